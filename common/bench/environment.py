"""What a number depends on: the machine, the versions and the command that made it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from xpu_ports.common import tritonlib

REVISION = "XPU_PORTS_REVISION"
_DISTRIBUTIONS = (
    "xpu-ports",
    "transformers",
    "numpy",
    "vllm",
    "fla-core",
    "flash-linear-attention",
    "liger-kernel",
    "mamba-ssm",
    "causal-conv1d",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Machine, versions, revision, time (UTC) and command line, ready for JSON."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "driver": _driver(device),
        "revision": revision(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "platform": platform.platform(),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    """The name that the driver reports, or the processor's."""
    if device.type != "cpu":
        return getattr(torch, device.type).get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python, torch, Triton (read off the module: its distribution has another name on XPU) and peers that are here."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if tritonlib.AVAILABLE:
        found["triton"] = tritonlib.triton.__version__
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def revision() -> str | None:
    """The commit of this checkout, with "+" when files differ from it; XPU_PORTS_REVISION where there is no git."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    return os.environ.get(REVISION)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def _driver(device: torch.device) -> str | None:
    if device.type == "xpu":
        return getattr(torch.xpu.get_device_properties(device), "driver_version", None)
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    return None
