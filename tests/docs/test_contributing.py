"""docs/contributing.md walked: the op that it makes passes the tests of every op, and models have what it asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from xpu_ports.models import PORTS

PAGE = "docs/contributing.md"
KERNEL, TESTS = "common/kernels/squared_relu.py", "tests/common/kernels/test_squared_relu.py"
# A file with a list of ops -> the line in front of which an entry goes, and how far it is indented.
ENTRIES = {
    "common/bench/registry.py": ("        Case(\n", 8),
    "tests/benchmarks/test_registry.py": ('    "rms_norm": ', 4),
    "tests/common/test_dispatch.py": ('    "rms_norm": ', 4),
}
# Tests of every op, and of the project's shape.
OF_EVERY_OP = (
    "tests/common/kernels/test_squared_relu.py",
    "tests/benchmarks/test_registry.py",
    "tests/common/test_dispatch.py",
    "tests/xpu_offline/test_choices.py",
)
OF_THE_PROJECT = (
    "tests/test_architecture.py::test_the_project",
    "tests/xpu_offline/test_lint.py::test_the_projects_kernels",
)


def steps() -> Iterator[tuple[str, str]]:
    """(file, code) of each block of the page, in order."""
    for block in blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8")):
        name, code = re.fullmatch(r"# (\S+)\n(.*)", block.text, re.DOTALL).groups()  # type: ignore[union-attr]
        yield name, code


def take(root: Path, name: str, code: str) -> None:
    """Do what the page says with a block: begin a file, go on with it, or put an entry into a list."""
    path = root / name
    if name not in ENTRIES:
        path.write_text((path.read_text() + "\n\n" if path.exists() else "") + code)
        return
    before, indent = ENTRIES[name]
    imports = [line for line in code.splitlines(keepends=True) if line.startswith("from ")]
    entry = code[len("".join(imports)) :].strip("\n").removesuffix(",") + ",\n"
    text = path.read_text()
    assert before in text, f"{name} has no {before!r} any more"
    text = text.replace(before, textwrap.indent(entry, " " * indent) + before, 1)
    path.write_text(text.replace("\nfrom xpu_ports", "\n" + "".join(imports) + "from xpu_ports", 1))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources, where an op may be added."""
    for folder in ("common", "models", "quant", "cli", "tests", "xpu_offline"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "package" / "xpu_ports").mkdir(parents=True)
    for folder in ("common", "models", "quant", "cli"):
        (tmp_path / "package" / "xpu_ports" / folder).symlink_to(tmp_path / folder)
    return tmp_path


def run_tests(root: Path, *arguments: str) -> dict[str, list[str]]:
    """Run tests of the copy, all of which must pass; the names of those that ran, by their module."""
    environment = {**os.environ, "PYTHONPATH": str(root / "package")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=ran.xml", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ran: dict[str, list[str]] = {}
    for case in ElementTree.parse(root / "ran.xml").iter("testcase"):
        assert case.find("skipped") is None, case.attrib
        ran.setdefault(case.attrib["classname"], []).append(case.attrib["name"])
    return ran


def test_an_op(copy: Path) -> None:
    pages = list(steps())
    assert [name for name, _ in pages] == [KERNEL, TESTS, KERNEL, TESTS, *ENTRIES]
    for name, code in pages[:2]:
        take(copy, name, code)
    # Step 2: on the reference alone.
    [names] = run_tests(copy, TESTS).values()
    assert len(names) > 10
    assert not any("interpreter" in name for name in names)
    for name, code in pages[2:]:
        take(copy, name, code)
    ran = run_tests(copy, *OF_EVERY_OP, "-k", "squared_relu")
    assert {module.replace(".", "/") + ".py" for module in ran} == set(OF_EVERY_OP)
    # The tests of step 2 run on the kernel by themselves.
    assert sum("interpreter" in name for name in ran["tests.common.kernels.test_squared_relu"]) > 10
    run_tests(copy, *OF_THE_PROJECT)


# --------------------------------------------------------------------------------------------------------------- models

PARTS = ("README.md", "modeling_{}.py", "accuracy.py", "memory.py", "layouts.py")
# What a language model has besides.
OF_PORTS = ("configuration_checks.py",)


def missing(name: str, root: Path = ROOT) -> list[str]:
    """What the page asks of a model and this one does not have."""
    folder = root / "models" / name
    parts = [part.format(name) for part in (*PARTS, *(OF_PORTS if name in PORTS else ()))]
    found = [f"models/{name}/{part}" for part in parts if not (folder / part).exists()]
    found += [f"tests/models/{name}"] if not list((root / "tests" / "models" / name).glob("test_*.py")) else []
    tiny = f"checkpoints/tiny-{name.replace('_', '-')}"
    found += [tiny] if not (root / tiny).is_dir() else []
    for page in ("mkdocs.yml", "docs/_hooks.py"):
        found += [page] if name not in (root / page).read_text(encoding="utf-8") else []
    readme = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").exists() else ""
    return found + [heading for heading in ("## Measured", "## What differs from ") if heading not in readme]


def models() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "models").glob("*/__init__.py"))


@pytest.mark.parametrize("name", models())
def test_a_model(name: str) -> None:
    assert missing(name) == []


def test_what_a_model_lacks_is_seen() -> None:
    assert len(missing("no_such_model")) == len(PARTS) + 6
    assert set(PORTS) < set(models())
