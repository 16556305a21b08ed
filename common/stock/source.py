"""Functions told apart by their source: what is left of it when names of files, comments and annotations are gone."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from types import FunctionType
from typing import Any

# Parts of a function's syntax that change nothing that it computes.
_IGNORED = ("annotation", "returns", "decorator_list", "type_comment", "type_params", "kind")


def fingerprint(function: Any) -> str | None:
    """What a function computes, as a hash of its source behind all decorators; None where there is no source."""
    inner = inspect.unwrap(function) if callable(function) else function
    if not isinstance(inner, FunctionType):
        return None
    return fingerprints(inner.__module__).get(inner.__qualname__)


@functools.cache
def fingerprints(module: str) -> dict[str, str]:
    """Those of an imported module's functions and of its classes' methods, by qualified name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _hash(node)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}": _hash(f) for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


def _hash(function: ast.FunctionDef) -> str:
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:]
    return hashlib.sha256(_text(function).encode()).hexdigest()[:16]


def _text(node: Any) -> str:
    """A syntax tree as text, the same in all versions of Python, which `ast.dump` is not."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED)
        inner = ",".join(f"{name}={_text(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({inner})"
    return f"[{','.join(map(_text, node))}]" if isinstance(node, list) else repr(node)
