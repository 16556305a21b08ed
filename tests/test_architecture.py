"""The project's shape, read off its syntax trees: who may ask for a device, who imports whom, what an op has.

A rule is a function of a file's path, relative to the repository, and its source; it yields what is wrong. Each is
seen failing on planted sources below. What kernels may contain is checked by `xpu_offline.lint` and its tests.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the top down: a folder imports itself and those behind it.
LAYERS = ("cli", "models", "quant", "common")
# Other folders of the repository, which the installed package does not have.
NOT_INSTALLED = ("tests", "benchmarks", "xpu_offline")

Rule = Callable[[PurePosixPath, str], Iterator[str]]


def imports(path: PurePosixPath, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, inside functions too; `from a import b` gives a.b as well as a."""
    package = ("xpu_ports", *path.parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def dotted(node: ast.AST) -> str:
    """a.b.c of an attribute chain; what is not a name in it reads "?"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


# -------------------------------------------------------------------------------------------------------------- rules

DEVICE_MODULES = ("torch.cuda", "torch.xpu", "torch.accelerator", "torch.backends")
DEVICE_NAMES = {"cuda", "xpu", "cpu"}


def asks_for_a_device(path: PurePosixPath, source: str) -> Iterator[str]:
    """Models, quantized modules and kernels run where their tensors are; the dispatch alone knows what that means."""
    if path.parts[0] not in ("models", "quant") and path.parts[:2] != ("common", "kernels"):
        return
    tree = ast.parse(source)
    for line, module in imports(path, tree):
        if module.startswith(DEVICE_MODULES):
            yield f"{path}:{line}: imports {module}"
        if path.parts[0] == "models" and (module == "triton" or module.startswith("triton.")):
            yield f"{path}:{line}: imports {module}"
        if path.parts[0] == "models" and module == "xpu_ports.common.tritonlib":
            yield f"{path}:{line}: imports {module}: kernels live elsewhere"
        if module in ("os.environ", "os.getenv"):
            yield f"{path}:{line}: reads the environment"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in (*DEVICE_MODULES, "os.environ", "os.getenv") or node.attr in ("is_cuda", "is_xpu", "is_cpu"):
                yield f"{path}:{node.lineno}: {name}"
            elif name.endswith("device.type"):
                yield f"{path}:{node.lineno}: {name}: asks what kind of device it is on"
        elif isinstance(node, ast.Compare):
            words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            if words & DEVICE_NAMES:
                yield f"{path}:{node.lineno}: compares with {', '.join(sorted(words & DEVICE_NAMES))}"


def imports_point_one_way(path: PurePosixPath, source: str) -> Iterator[str]:
    """cli -> models -> quant -> common, and no model imports another; the package imports no development tool."""
    own = path.parts[0]
    for line, module in imports(path, ast.parse(source)):
        top, *rest = module.split(".")
        if top in LAYERS:
            yield f"{path}:{line}: imports {module}: a second copy beside xpu_ports.{module}"
        if top in NOT_INSTALLED:
            yield f"{path}:{line}: imports {module}, which is not installed"
        if top != "xpu_ports" or not rest or rest[0] not in LAYERS:
            continue
        if LAYERS.index(rest[0]) < LAYERS.index(own):
            yield f"{path}:{line}: {own} imports {module}"
        if own == rest[0] == "models" and len(path.parts) > 2 and len(rest) > 1 and rest[1] != path.parts[1]:
            yield f"{path}:{line}: models/{path.parts[1]} imports {module}"


def triton_has_one_import(path: PurePosixPath, source: str) -> Iterator[str]:
    """Everything else takes it from tritonlib or gluonlib, which also work without one."""
    if str(path) in ("common/tritonlib.py", "common/gluonlib.py") or path.parts[0] == "cli":
        return
    for line, module in imports(path, ast.parse(source)):
        if module.split(".")[0] == "triton":
            yield f"{path}:{line}: imports {module}: take it from xpu_ports.common.tritonlib"


def tensors_are_not_moved(path: PurePosixPath, source: str) -> Iterator[str]:
    """No .cuda() and .xpu(): the caller chose the device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "xpu"):
            yield f"{path}:{node.lineno}: {dotted(node.func)}()"


# Handlers of any exception, and why they may be.
CATCH_ALL = {
    "cli/main.py": "the outermost handler: a plain message for what nobody foresaw",
    "cli/_common.py": "the tokenizers library raises a bare Exception",
    "cli/_probe.py": "reports on what may be broken in any way",
    "common/bench/run.py": "other people's code, whose errors are findings",
}


def exceptions_have_names(path: PurePosixPath, source: str) -> Iterator[str]:
    """What is caught is named: a handler of everything hides the next mistake."""
    if str(path) in CATCH_ALL:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "suppress":
            caught = node.args
        else:
            continue
        if any(c is None or dotted(c).split(".")[-1] in ("Exception", "BaseException") for c in caught):
            yield f"{path}:{node.lineno}: catches any exception"


def functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def ops(tree: ast.AST) -> list[ast.FunctionDef]:
    """The references: functions decorated with @op or @op(...)."""
    return [
        f
        for f in functions(tree).values()
        if any(dotted(d.func if isinstance(d, ast.Call) else d).split(".")[-1] == "op" for d in f.decorator_list)
    ]


def implementations(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(op, the call of implement) of every @op.implement(...)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "implement":
            yield dotted(node.func.value), node


SECTIONS = ("Args:", "Returns:")


def ops_are_documented(path: PurePosixPath, source: str) -> Iterator[str]:
    """A reference says what it computes, on which arguments, and what it returns; its module says the equation."""
    tree = ast.parse(source)
    for function in ops(tree):
        text = ast.get_docstring(function) or ""
        arguments = [a.arg for a in function.args.args]
        for missing in [s for s in SECTIONS if s not in text]:
            yield f"{path}:{function.lineno}: op {function.name} has no {missing.rstrip(':')} in its docstring"
        for name in [a for a in arguments if text and not re.search(rf"\b{re.escape(a)}\b", text)]:
            yield f"{path}:{function.lineno}: op {function.name} does not say what {name} is"
        if function.returns is None or any(a.annotation is None for a in function.args.args):
            yield f"{path}:{function.lineno}: op {function.name} lacks annotations"
    if ops(tree) and "Source" not in (ast.get_docstring(tree) or ""):
        yield f"{path}: the docstring names no source"


def implementations_can_refuse(path: PurePosixPath, source: str) -> Iterator[str]:
    """Each has a `refuses`, and a kernel's can say no: what returns nothing but None is for compositions of ops."""
    tree = ast.parse(source)
    defined = functions(tree)
    for op, call in implementations(tree):
        backend = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else "?"
        where = f"{path}:{call.lineno}: {op}: the back end {backend}"
        refuses = {k.arg: k.value for k in call.keywords}.get("refuses")
        if refuses is None:
            yield f"{where} has no refusal"
        elif backend == "triton" and isinstance(refuses, ast.Lambda) and isinstance(refuses.body, ast.Constant):
            yield f"{where} never refuses"
        elif backend == "triton" and isinstance(refuses, ast.Name) and refuses.id in defined:
            returned = [n.value for n in ast.walk(defined[refuses.id]) if isinstance(n, ast.Return)]
            if all(v is None or (isinstance(v, ast.Constant) and v.value is None) for v in returned):
                yield f"{where} never refuses"


def mirrored_test(path: PurePosixPath) -> PurePosixPath:
    """Where the tests of a file with ops are; a folder of one op is tested like a file."""
    if path.name == "__init__.py":
        path = path.parent.with_suffix(".py")
    return PurePosixPath("tests", path.parent, f"test_{path.name}")


def ops_are_tested(path: PurePosixPath, source: str, root: Path = ROOT) -> Iterator[str]:
    """Each op is named by the test file that mirrors its own, or by one of several: test_kda.py, test_kda_gate.py."""
    names = [f.name for f in ops(ast.parse(source))]
    test = root / mirrored_test(path)
    tests = [t for t in (test, *sorted(test.parent.glob(f"{test.stem}_*.py"))) if t.exists()]
    for name in names:
        if not tests:
            yield f"{path}: op {name} has no tests: {mirrored_test(path)} does not exist"
        elif not any(re.search(rf"\b{name}\b", t.read_text(encoding="utf-8")) for t in tests):
            yield f"{path}: op {name} is not mentioned in {mirrored_test(path)}"


# Spelled so that this file does not match itself.
ABSOLUTE = re.compile(r"(?<![\w.~}\-])/(?:work|root|home|Users)" + r"/[\w.]")


def paths_are_relative(path: PurePosixPath, source: str) -> Iterator[str]:
    """No absolute path of the machine that a file was written on."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := ABSOLUTE.search(line):
            yield f"{path}:{number}: {found.group()}..."


RULES: list[Rule] = [
    asks_for_a_device,
    imports_point_one_way,
    triton_has_one_import,
    tensors_are_not_moved,
    exceptions_have_names,
    ops_are_documented,
    implementations_can_refuse,
    ops_are_tested,
]


# --------------------------------------------------------------------------------------------------------- the project


def package_files() -> list[Path]:
    return sorted(path for folder in LAYERS for path in (ROOT / folder).rglob("*.py"))


def text_files() -> Iterator[tuple[PurePosixPath, str]]:
    """Every file of the repository that git keeps or would keep, if it is text."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        try:
            yield PurePosixPath(name), (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project(rule: Rule) -> None:
    found = [
        finding
        for path in package_files()
        for finding in rule(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_no_absolute_paths() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = list(text_files())
    assert len(files) > 20
    found = [finding for path, source in files for finding in paths_are_relative(path, source)]
    assert not found, "\n".join(found)


def test_there_is_something_to_check() -> None:
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package_files()}
    assert {path.relative_to(ROOT).parts[0] for path in sources} == set(LAYERS)
    assert sum(len(ops(tree)) for tree in sources.values()) >= 8
    assert sum(len(list(implementations(tree))) for tree in sources.values()) >= 8


def test_every_catch_all_is_there() -> None:
    """The list of exceptions to the rule does not outlive them."""
    for name in CATCH_ALL:
        source = (ROOT / name).read_text(encoding="utf-8")
        assert list(exceptions_have_names(PurePosixPath("elsewhere.py"), source)), name


# ------------------------------------------------------------------------------------------------------------- planted

MODEL, QUANT, KERNEL = "models/a/modeling_a.py", "quant/mxfp4/linear.py", "common/kernels/rms_norm.py"

OP = '''"""One sentence.

Source: a paper.
"""
@op
def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Normalize.

    Args:
        x: [..., N].
        eps: added.

    Returns:
        [..., N].
    """
    return x
'''
TRITON = '@rms_norm.implement("triton", "xpu"{})\ndef rms_norm_triton(x, eps):\n    return x\n'

PLANTED: list[tuple[Rule, str, str, str]] = [
    (asks_for_a_device, MODEL, "if torch.cuda.is_available():\n    pass", "torch.cuda"),
    (asks_for_a_device, QUANT, "n = torch.xpu.device_count()", "torch.xpu"),
    (asks_for_a_device, KERNEL, "torch.xpu.synchronize()", "torch.xpu"),
    (asks_for_a_device, MODEL, "from torch.cuda import Event", "imports torch.cuda"),
    (asks_for_a_device, MODEL, "from torch import xpu", "imports torch.xpu"),
    (asks_for_a_device, MODEL, "fast = x.is_cuda", "x.is_cuda"),
    (asks_for_a_device, QUANT, "fast = self.weight.is_xpu", "is_xpu"),
    (asks_for_a_device, MODEL, "if x.device.type == kind:\n    pass", "device.type"),
    (asks_for_a_device, MODEL, "fast = f(x).device.type", "device.type"),
    (asks_for_a_device, MODEL, "fast = kind in ('cuda', 'hip')", "compares with cuda"),
    (asks_for_a_device, MODEL, "fast = 'xpu' in str(x.device)", "compares with xpu"),
    (asks_for_a_device, MODEL, "import os\nfast = os.environ.get('FAST')", "os.environ"),
    (asks_for_a_device, QUANT, "import os\nfast = os.getenv('FAST')", "os.getenv"),
    (asks_for_a_device, MODEL, "from os import environ", "reads the environment"),
    (asks_for_a_device, MODEL, "def f():\n    import triton.language as tl", "imports triton.language"),
    (asks_for_a_device, MODEL, "from xpu_ports.common.tritonlib import tl", "kernels live elsewhere"),
    (imports_point_one_way, MODEL, "from xpu_ports.models.b import B", "models/a imports xpu_ports.models.b"),
    (imports_point_one_way, MODEL, "from ..b import modeling_b", "models/a imports xpu_ports.models.b"),
    (imports_point_one_way, MODEL, "def f():\n    import xpu_ports.models.b", "models/a imports xpu_ports.models.b"),
    (imports_point_one_way, KERNEL, "from xpu_ports.models.a import A", "common imports xpu_ports.models"),
    (imports_point_one_way, KERNEL, "from xpu_ports import quant", "common imports xpu_ports.quant"),
    (imports_point_one_way, "common/weights.py", "import xpu_ports.cli.main", "common imports xpu_ports.cli"),
    (imports_point_one_way, QUANT, "from xpu_ports.models.a import A", "quant imports xpu_ports.models"),
    (imports_point_one_way, MODEL, "from xpu_ports.cli import main", "models imports xpu_ports.cli"),
    (imports_point_one_way, MODEL, "from common.kernels import rms_norm", "a second copy"),
    (imports_point_one_way, "cli/main.py", "import benchmarks.ops", "which is not installed"),
    (triton_has_one_import, KERNEL, "import triton", "imports triton"),
    (triton_has_one_import, QUANT, "from triton import language", "imports triton"),
    (tensors_are_not_moved, MODEL, "x = x.cuda()", "x.cuda()"),
    (tensors_are_not_moved, "common/weights.py", "x = load(f)[0].xpu(0)", "xpu()"),
    (exceptions_have_names, KERNEL, "try:\n    f()\nexcept Exception:\n    pass", "catches any"),
    (exceptions_have_names, MODEL, "try:\n    f()\nexcept (ValueError, builtins.BaseException) as e:\n    g(e)", "any"),
    (exceptions_have_names, "cli/new.py", "try:\n    f()\nexcept:\n    raise", "catches any"),
    (exceptions_have_names, MODEL, "with contextlib.suppress(Exception):\n    f()", "catches any"),
    (ops_are_documented, KERNEL, OP.replace("    Args:", "    Arguments:"), "no Args"),
    (ops_are_documented, KERNEL, OP.replace("    Returns:", "    Gives:"), "no Returns"),
    (ops_are_documented, KERNEL, OP.replace("        eps: added.\n", ""), "does not say what eps is"),
    (ops_are_documented, KERNEL, OP.replace("eps: float", "eps"), "lacks annotations"),
    (
        ops_are_documented,
        KERNEL,
        OP.replace("@op\n", "@op(mutates=('x',))\n").replace(") -> Tensor", ")"),
        "annotations",
    ),
    (ops_are_documented, KERNEL, OP.replace("Source: a paper.", ""), "names no source"),
    (implementations_can_refuse, KERNEL, OP + TRITON.format(""), "has no refusal"),
    (implementations_can_refuse, KERNEL, OP + TRITON.format(", refuses=lambda *a: None"), "never refuses"),
    (
        implementations_can_refuse,
        KERNEL,
        OP + "def no(x, eps):\n    return None\n" + TRITON.format(", refuses=no"),
        "never refuses",
    ),
    (ops_are_tested, KERNEL, OP.replace("rms_norm", "rms_norm_of_nothing"), "not mentioned in tests/common/kernels"),
    (ops_are_tested, "common/kernels/nothing.py", OP, "tests/common/kernels/test_nothing.py does not exist"),
    (ops_are_tested, "quant/nothing/__init__.py", OP, "tests/quant/test_nothing.py does not exist"),
    (paths_are_relative, "docs/a.md", "see " + "/" + "work/shared/x", "docs/a.md:1"),
    (paths_are_relative, "Makefile", "PY = '" + "/" + "root/.venv/bin/python'", "Makefile:1"),
]

FINE: list[tuple[Rule, str, str]] = [
    (asks_for_a_device, MODEL, "y = torch.zeros(3, device=x.device)\nkind = layer.type == 'linear_attention'"),
    (asks_for_a_device, "common/device.py", "torch.xpu.get_device_name(0)\nx.device.type == 'xpu'"),
    (asks_for_a_device, QUANT, "from xpu_ports.common.tritonlib import tl, triton"),
    (imports_point_one_way, MODEL, "from xpu_ports.models.a.layouts import A\nfrom xpu_ports.quant import mxfp4"),
    (imports_point_one_way, MODEL, "from . import layouts\nfrom xpu_ports.common.modules import RMSNorm"),
    (imports_point_one_way, "models/__init__.py", "from xpu_ports.models.b import B"),
    (imports_point_one_way, "cli/main.py", "from xpu_ports.models.a import A\nfrom xpu_ports.cli import generate"),
    (triton_has_one_import, KERNEL, "from xpu_ports.common.tritonlib import tl, triton"),
    (tensors_are_not_moved, MODEL, "x = x.to(y.device)"),
    (exceptions_have_names, MODEL, "try:\n    f()\nexcept (KeyError, ValueError):\n    pass"),
    (ops_are_documented, KERNEL, OP),
    (ops_are_documented, KERNEL, "def helper(x):\n    return x"),
    (implementations_can_refuse, KERNEL, OP + TRITON.format(", refuses=_imported")),
    (
        implementations_can_refuse,
        KERNEL,
        OP + "def no(*a):\n    return\n" + TRITON.format(", refuses=no").replace("triton", "pytorch"),
    ),
    (ops_are_tested, KERNEL, OP),
    (paths_are_relative, "a.py", "# https://example.org/" + "work/x, ~/" + "root/x and frame" + "work/x"),
]


def _id(value: object) -> str | None:
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize(("rule", "path", "source", "why"), PLANTED, ids=_id)
def test_planted(rule: Rule, path: str, source: str, why: str) -> None:
    findings = list(rule(PurePosixPath(path), source))
    assert any(why in finding for finding in findings), findings


@pytest.mark.parametrize(("rule", "path", "source"), FINE, ids=_id)
def test_fine(rule: Rule, path: str, source: str) -> None:
    assert list(rule(PurePosixPath(path), source)) == []


def test_every_rule_has_been_seen_failing() -> None:
    def named(cases: Iterable[tuple]) -> set[str]:
        return {case[0].__name__ for case in cases}

    assert named(PLANTED) == named(FINE) == {rule.__name__ for rule in [*RULES, paths_are_relative]}
