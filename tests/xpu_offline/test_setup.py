"""Where the XPU check cannot run, it says what is missing and exits with 3."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from xpu_offline.kernels import ROOT

TOOLS = ("bash", "dirname", "grep", "uname", "sha256sum", "cut")


@pytest.fixture
def tools(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of the few commands that the script finds: no ocloc, no compiler, no apt-get."""
    for name in TOOLS:
        path = shutil.which(name)
        assert path is not None
        (tmp_path / name).symlink_to(path)
    script(tmp_path, "id", "echo 1000")
    script(tmp_path, "uname", "echo x86_64")
    return tmp_path


def script(folder: pathlib.Path, name: str, line: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{line}\n")
    path.chmod(0o755)


def check(tools: pathlib.Path, name: str = "setup.sh", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tools / "bash"), str(ROOT / "xpu_offline" / name)],
        env={"PATH": str(tools), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_apt(tools: pathlib.Path) -> None:
    done = check(tools)
    assert done.returncode == 3
    assert "intel-opencl-icd" in done.stderr
    assert "there is no apt-get" in done.stderr


def test_without_root(tools: pathlib.Path) -> None:
    script(tools, "apt-get", "exit 1")
    done = check(tools)
    assert done.returncode == 3
    assert "as root, run  apt-get install -y intel-opencl-icd" in done.stderr


def test_packages_that_do_not_install(tools: pathlib.Path) -> None:
    script(tools, "apt-get", "exit 100")
    script(tools, "id", "echo 0")
    done = check(tools)
    assert done.returncode == 3
    assert "xpu-check: installing intel-opencl-icd" in done.stdout
    assert "apt-get cannot install them" in done.stderr


def test_another_processor(tools: pathlib.Path) -> None:
    script(tools, "uname", "echo aarch64")
    assert "exist for x86-64 alone" in check(tools).stderr


def test_the_check_stops_there(tools: pathlib.Path) -> None:
    done = check(tools, "check.sh")
    assert done.returncode == 3
    assert "there is no apt-get" in done.stderr


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is an Intel GPU here")
def test_no_card() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "xpu_offline/card.sh")],
        env={**os.environ, "PY": sys.executable, "DEVICE": "xpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "sees no xpu device" in done.stderr
