"""Finds in the source of kernels what does not survive on an Intel GPU, in some Triton release or on some of them.

    python -m xpu_offline.lint [FILES...]

The rules read the syntax tree, so they need neither Triton nor a device. Addresses are judged by `xpu_offline.widths`.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xpu_offline import widths
from xpu_offline.kernels import ROOT, is_jit, source_files

# Sub-groups of a work-group where a thread has 256 registers.
MOST_WARPS = 32
# The one module that knows which words a Triton release has for them.
_KNOWS_GRF_WORDS = "device.py"
# The module by which others have Gluon, of releases that were tried and on NVIDIA's GPUs alone.
_KNOWS_GLUON = "gluonlib"


@dataclass(frozen=True)
class Finding:
    path: pathlib.Path
    line: int
    what: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.what}"


def lint(paths: Iterable[pathlib.Path]) -> list[Finding]:
    """All findings in the files, which may call each other's kernels."""
    trees = {path: ast.parse(path.read_text()) for path in paths}
    functions = {f.name: f for tree in trees.values() for f in _functions(tree) if is_jit(f)}
    found = []
    for path, tree in trees.items():
        places = [*_anywhere(tree, path), *_in_wrappers(tree), *_warps(tree)]
        for function in _functions(tree):
            if is_jit(function):
                places += [*_in_kernel(function), *widths.narrow_products(function, functions)]
        found += [Finding(path, line, what) for line, what in places]
    return sorted(set(found), key=lambda f: (f.path, f.line, f.what))


Place = tuple[int, str]


def _functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _has_gluon(tree: ast.Module, path: pathlib.Path) -> bool:
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return path.stem == _KNOWS_GLUON or f"xpu_ports.common.{_KNOWS_GLUON}" in modules


def _anywhere(tree: ast.Module, path: pathlib.Path) -> Iterator[Place]:
    source = ast.unparse(tree)
    gated = "hasattr(tl, 'make_tensor_descriptor')" in source or _has_gluon(tree, path)
    for node in ast.walk(tree):
        name = _last_name(node)
        if name in ("make_block_ptr", "advance"):
            yield node.lineno, f"{name}: block pointers are gone from Triton 3.9; use plain pointers"
        if name in ("make_tensor_descriptor", "_experimental_make_tensor_descriptor", "TensorDescriptor") and not gated:
            yield node.lineno, f"{name} is not in every release: ask hasattr(tl, 'make_tensor_descriptor') first"
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if _last_name(decorator) == "autotune" or "autotune(" in ast.unparse(decorator):
                    yield decorator.lineno, "autotune at module level: it runs in-place kernels twice; use a table"
        if path.name != _KNOWS_GRF_WORDS:
            yield from _grf_words(node)


def _grf_words(node: ast.AST) -> Iterator[Place]:
    what = "grf_mode: its words differ between Triton releases; take them from grf_options"
    if isinstance(node, ast.keyword) and node.arg == "grf_mode":
        yield node.value.lineno, what
    if isinstance(node, ast.Dict):
        for key in node.keys:
            if isinstance(key, ast.Constant) and key.value == "grf_mode":
                yield key.lineno, what


def _in_kernel(function: ast.FunctionDef) -> Iterator[Place]:
    for node in ast.walk(function):
        if _last_name(node) == "float64" or (isinstance(node, ast.Constant) and node.value == "fp64"):
            yield node.lineno, "fp64 in a kernel: Arc A has none"
        if _last_name(node).startswith("inline_asm"):
            yield node.lineno, "inline assembly is for one vendor's device"


def _in_wrappers(tree: ast.Module) -> Iterator[Place]:
    """`.contiguous()` in what launches a kernel and in what that calls in the same file."""
    functions = {f.name: f for f in _functions(tree) if not is_jit(f)}
    todo = [f for f in functions.values() if _launches(f) or _implements(f)]
    wrappers: dict[str, ast.FunctionDef] = {}
    while todo:
        function = todo.pop()
        if function.name in wrappers or _is_reference(function):
            continue
        wrappers[function.name] = function
        calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
        todo += [functions[f.id] for f in calls if isinstance(f, ast.Name) and f.id in functions]
    for function in wrappers.values():
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _last_name(node.func) == "contiguous":
                yield node.lineno, ".contiguous() in a launch wrapper: pass strides, or refuse the call"


def _launches(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) for node in ast.walk(function))


def _implements(function: ast.FunctionDef) -> bool:
    return any(".implement(" in ast.unparse(d) for d in function.decorator_list)


def _is_reference(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).split("(")[0] == "op" for d in function.decorator_list)


def _warps(tree: ast.Module) -> Iterator[Place]:
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "num_warps":
            values = [node.value]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            values = [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "num_warps"]
        else:
            continue
        for value in values:
            most = _most(value)
            if most is not None and most > MOST_WARPS:
                yield (
                    value.lineno,
                    f"num_warps up to {most}: more than {MOST_WARPS} are not possible with 256 registers",
                )


def _most(value: ast.expr) -> int | None:
    """The largest value of an expression of constants, min and max; None where it has no bound in sight."""
    if isinstance(value, ast.Constant) and isinstance(value.value, int):
        return value.value
    if isinstance(value, ast.Call) and _last_name(value.func) in ("min", "max"):
        bounds = [_most(v) for v in value.args]
        known = [b for b in bounds if b is not None]
        if _last_name(value.func) == "min":
            return min(known, default=None)
        return max(known) if known and len(known) == len(bounds) else None
    return None


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def main(arguments: list[str]) -> int:
    """Print the findings; 1 if there are any."""
    found = lint([pathlib.Path(a) for a in arguments] or source_files())
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
