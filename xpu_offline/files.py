"""Runs every file of tests of the XPU check, as many at once as there are cores.

    .venv-xpu/bin/python -m xpu_offline.files SEEN [PYTEST_ARGUMENT...]

SEEN is a folder: what was seen of kernels goes there, a file each, and what the tests wrote. Exits with 1 where one has
failed. A file of tests has a process of its own, since the compiler or the code can take one down: a fork of this one,
which has imported what takes seconds. A file that passed, and of which nothing has changed since, is not run again.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
from triton.compiler.compiler import triton_key

from xpu_offline import native, plugin, results

# The longest first, so that no core is left with one of them at the end.
KERNELS = "tests/common/kernels"
LONGEST = [
    f"{KERNELS}/test_kda_chunk.py",
    "xpu_offline/model_sizes.py",
    *(f"{KERNELS}/test_{name}.py" for name in ("ssd_chunk_scan", "mhc", "sparse_mla")),
    *(f"tests/quant/mxfp4/kernels/test_mxfp4_{name}.py" for name in ("linear", "experts", "grouped_linear")),
    *(f"{KERNELS}/test_{name}.py" for name in ("skinny_linear", "decode_attention", "mamba2_decode_linear", "indexer")),
]
_SHOWN = re.compile(r"^(FAILED|ERROR)| in [0-9.]*s")


def all_files() -> list[str]:
    """The files of tests, relative to the project's root."""
    folders = (results.ROOT / KERNELS, *sorted(results.ROOT.glob("tests/quant/*/kernels")))
    found = [str(path.relative_to(results.ROOT)) for f in folders for path in sorted(f.glob("test_*.py"))]
    return [*LONGEST, *(name for name in found if name not in LONGEST)]


def main(arguments: list[str]) -> int:
    seen, given = pathlib.Path(arguments[0]), arguments[1:]
    # Takes half a second, and every process asks for it.
    triton_key()
    native.version()
    # What is here already is never garbage: forks need not look through it.
    gc.freeze()
    waiting, running, failed = iter(all_files()), {}, 0
    for _ in range(int(os.environ.get("XPU_CHECK_PROCESSES") or len(os.sched_getaffinity(0)))):
        running |= _next(waiting, seen, given)
    while running:
        process, status, used = os.wait3(0)
        name = running.pop(process)
        passed = _ended(name, os.waitstatus_to_exitcode(status), seen, used.ru_utime + used.ru_stime)
        failed |= not passed
        running |= _next(waiting, seen, given)
    return int(failed)


def _next(waiting: Iterator[str], seen: pathlib.Path, given: list[str]) -> dict[int, str]:
    """The process of the next file that has to run, or nothing where none is left."""
    for name in waiting:
        kept = results.recall(plugin.CACHE, name, given)
        if kept is None:
            return {_start(name, seen, given): name}
        _observations(name, seen).write_text(json.dumps(kept["rows"], indent=1) + "\n")
        print(f"--- {name}\nas it was when it passed: {kept['summary']}", flush=True)
    return {}


def _start(name: str, seen: pathlib.Path, given: list[str]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        log = os.open(_log(name, seen), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for stream in (1, 2):
            os.dup2(log, stream)
        options = ["--backend", "xpu-offline", "-q", "--tb=short", "-rN", "--capture=sys", "-p", "no:cacheprovider"]
        options += ["--xpu-observations", str(_observations(name, seen)), "--xpu-results-of", name]
        status = int(pytest.main([*options, "tests/conftest.py", name, *given], plugins=[plugin]))
        sys.stdout.flush()
    finally:
        # Not what the parent would do at its end.
        os._exit(status)


def _ended(name: str, status: int, seen: pathlib.Path, seconds: float) -> bool:
    """Say what came of a file of tests and the CPU seconds that it took, and whether it passed."""
    log = _log(name, seen)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    shown = [line for line in lines if _SHOWN.search(line)] or lines[-20:]
    # No test of the file need take part.
    passed = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not _observations(name, seen).exists():
        _observations(name, seen).write_text("[]\n")
        crumb = _observations(name, seen).with_suffix(".json.compiling")
        last = crumb.read_text().strip() if crumb.exists() else ""
        shown.append(f"FAILED {name}: the process ended; compiled last: {last or 'nothing'}")
        passed = False
    if not passed:
        shown.append(f"{name}: exit status {status}")
    print(f"--- {name}", *shown, f"{seconds:.0f} CPU seconds", sep="\n", flush=True)
    return passed


def _observations(name: str, seen: pathlib.Path) -> pathlib.Path:
    return seen / (name.replace("/", ".") + ".json")


def _log(name: str, seen: pathlib.Path) -> pathlib.Path:
    return seen / (name.replace("/", ".") + ".log")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
