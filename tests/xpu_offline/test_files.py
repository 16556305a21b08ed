"""The processes of the XPU check: each file of tests has one, and what becomes of it is said."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from xpu_offline.kernels import ROOT

PYTHON = ROOT / ".venv-xpu/bin/python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the XPU check was not run: there is no .venv-xpu (make xpu-check builds it)"
)


def test_what_becomes_of_a_file(tmp_path: pathlib.Path) -> None:
    command = [PYTHON, "-m", "tests.xpu_offline.planted.processes", tmp_path]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "XPU_PORTS_", "PYTEST_"))}
    environment["XPU_OFFLINE_CACHE"] = str(tmp_path / "cache")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    said = {part.split("\n")[0]: part for part in done.stdout.split("--- ")[1:]}
    dies, fails, passes, has_none = (
        said[str(tmp_path / f"test_{name}.py")] for name in ("dies", "fails", "passes", "has_none")
    )
    assert "the process ended; compiled last: nothing" in dies
    assert "exit status -6" in dies
    assert "FAILED" in fails
    assert "2 failed, 1 passed" in fails
    assert "3 passed" in passes
    assert "exit status" not in passes + has_none
    for name in ("dies", "fails", "passes", "has_none"):
        assert next(tmp_path.glob(f"*test_{name}.py.json")).read_text() == "[]\n"
