"""Extracts of Intel's device library give the code that the whole of it gives."""

from __future__ import annotations

import os
import subprocess

import pytest

from xpu_offline.kernels import ROOT

PYTHON = ROOT / ".venv-xpu/bin/python"

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the XPU check was not run: there is no .venv-xpu (make xpu-check builds it)"
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = [PYTHON, "-m", "tests.xpu_offline.planted.library", tmp_path_factory.mktemp("library")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if "_kernel" in line]


def test_same_code(lines: list[str]) -> None:
    """For three targets, of a kernel that calls nothing of it, one function and several, compiled thrice."""
    assert len(lines) == 9
    assert all(line.endswith(" same") for line in lines), lines


def test_there_was_something_to_link(lines: list[str]) -> None:
    nothing, one, several = (int(line.split()[-2]) for line in lines[:3])
    assert nothing < one < several
