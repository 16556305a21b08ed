"""Results of earlier runs: a file of tests whose every source is as it was when they passed need not run again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

from xpu_offline import native

ROOT = pathlib.Path(__file__).resolve().parent.parent
_DISTRIBUTIONS = ("torch", "triton-xpu", "intel-opencl-rt", "pyopencl", "pytest")
# Read without being imported.
_ALSO = ("pyproject.toml",)


def versions() -> list[str]:
    """All that the outcome depends on besides the sources: compilers, runtime, processor."""
    installed = [f"{name} {importlib.metadata.version(name)}" for name in _DISTRIBUTIONS]
    cpu = pathlib.Path("/proc/cpuinfo")
    models = {line for line in cpu.read_text().splitlines() if line.startswith("model name")} if cpu.exists() else set()
    return [sys.version, native.version(), *installed, *sorted(models)]


def sources(root: pathlib.Path = ROOT) -> list[str]:
    """The files of the project that this process has imported, relative to its root."""
    files = {pathlib.Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    inside = [f.relative_to(root) for f in files if f.is_relative_to(root) and f.suffix == ".py" and f.exists()]
    return sorted(str(f) for f in inside if not f.parts[0].startswith("."))


def store(cache: pathlib.Path, test_file: str, arguments: list[str], rows: list[Any], summary: str) -> None:
    """Keep what was seen while a file of tests passed.

    Args:
        cache: the check's cache.
        test_file: relative to the project's root.
        arguments: pytest's, beyond those that every run has.
        rows: the observations.
        summary: how many tests passed, in words.
    """
    kept = {
        "versions": versions(),
        "arguments": arguments,
        "files": {name: _digest(ROOT / name) for name in [*sources(), *_ALSO]},
        "summary": summary,
        "rows": rows,
    }
    path = _path(cache, test_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(kept))
    partial.replace(path)


def recall(cache: pathlib.Path, test_file: str, arguments: list[str]) -> dict[str, Any] | None:
    """What was kept, if nothing that it depends on has changed since."""
    path = _path(cache, test_file)
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    if kept["arguments"] != arguments or kept["versions"] != versions():
        return None
    if any(_digest(ROOT / name) != digest for name, digest in kept["files"].items()):
        return None
    return kept


def _path(cache: pathlib.Path, test_file: str) -> pathlib.Path:
    return cache / "results" / (test_file.replace("/", ".") + ".json")


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
