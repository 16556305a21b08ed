"""Finds Triton kernels in source, without importing it."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Where the project's kernels are.
FOLDERS = ("common", "quant")


@dataclass(frozen=True)
class Kernel:
    """A `@triton.jit` function."""

    # The module without the package and the function without its underscore, as in reports.
    name: str
    function: ast.FunctionDef
    path: pathlib.Path


def source_files(root: pathlib.Path = ROOT, folders: Iterable[str] = FOLDERS) -> list[pathlib.Path]:
    """Every Python file in the folders."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def is_jit(function: ast.FunctionDef) -> bool:
    """Whether a function is decorated with `triton.jit`, called or not."""
    return any(ast.unparse(d).split("(")[0] in ("triton.jit", "jit") for d in function.decorator_list)


def jit_functions(paths: Iterable[pathlib.Path], root: pathlib.Path = ROOT) -> list[Kernel]:
    """Every `@triton.jit` function in the files, at any depth."""
    found = []
    for path in paths:
        module = ".".join(path.resolve().relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and is_jit(node):
                found.append(Kernel(f"{module}.{node.name.removeprefix('_')}", node, path))
    return found


def entry_kernels(paths: Iterable[pathlib.Path], root: pathlib.Path = ROOT) -> list[str]:
    """Names of the kernels that are launched, as opposed to functions that other kernels call.

    A function that nothing calls and nothing launches counts as a kernel, so that it is missed.
    """
    paths = list(paths)
    functions = jit_functions(paths, root)
    called = {
        node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for kernel in functions
        for node in ast.walk(kernel.function)
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute))
    }
    # Passed by name to tl.reduce and tl.associative_scan.
    called |= {
        node.id
        for kernel in functions
        for call in ast.walk(kernel.function)
        if isinstance(call, ast.Call)
        for node in (*call.args, *(k.value for k in call.keywords))
        if isinstance(node, ast.Name)
    }
    launched = {
        ast.unparse(node.func.value).split(".")[-1]
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    return sorted(k.name for k in functions if k.function.name in launched or k.function.name not in called)
