"""Questions that can crash or hang a process, asked in one of their own: `python -m xpu_ports.cli._probe QUESTION`.

Prints one JSON object. `devices`: what torch is and what it sees. `kernel DEVICE`: compile and run a Triton kernel.
`choices`: the back ends that the environment forces; an unknown one is an error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


def devices() -> dict[str, Any]:
    """torch's version and build, and each accelerator; the fields of `_facts.Torch`."""
    import torch

    from xpu_ports.common import tuning
    from xpu_ports.common.device import architecture

    found: list[dict[str, Any]] = []
    tuned: list[str] = []
    errors: list[str] = []
    for kind in ("xpu", "cuda"):
        module = getattr(torch, kind)
        for index in range(module.device_count()):
            properties = module.get_device_properties(index)
            native_bf16 = (
                getattr(properties, "has_bfloat16_conversions", True)
                if kind == "xpu"
                else torch.cuda.is_bf16_supported(including_emulation=False)
            )
            found.append(
                {
                    "type": kind,
                    "index": index,
                    "name": properties.name,
                    "architecture": architecture(torch.device(kind, index)).name,
                    "total_memory": properties.total_memory,
                    "free_memory": _free_memory(module, index),
                    "bf16": bool(native_bf16),
                    "fp64": bool(getattr(properties, "has_fp64", True)),
                    "driver": getattr(properties, "driver_version", None),
                }
            )
    for name in sorted({device["architecture"] for device in found}):
        try:
            tuned += filter(None, [tuning.check(name)])
        except tuning.TableError as error:
            errors.append(str(error))
    version = torch.version
    build = {"version": torch.__version__, "xpu": version.xpu, "cuda": version.cuda, "hip": version.hip}
    return {**build, "devices": found, "tuned": tuned, "tuning_errors": errors}


def _free_memory(module: Any, index: int) -> int | None:
    try:
        return module.mem_get_info(index)[0]
    except (RuntimeError, AttributeError):
        # Drivers without Sysman do not tell.
        return None


def kernel(device: str) -> dict[str, Any]:
    """Add 1 to 64 numbers on a device with a Triton kernel; the fields of `_facts.Kernel`."""
    import torch

    from xpu_ports.common.tritonlib import AVAILABLE, INTERPRETED, WHY_NOT, tl, triton

    if not AVAILABLE:
        return {"triton": None, "interpreted": False, "error": WHY_NOT}

    @triton.jit
    def add_one(x_ptr, y_ptr, BLOCK: tl.constexpr):
        offs = tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) + 1)

    error = None
    x = torch.arange(64, dtype=torch.float32)
    y = torch.zeros_like(x, device=device)
    try:
        add_one[(1,)](x.to(device), y, BLOCK=64)
        if not torch.equal(y.cpu(), x + 1):
            error = f"the kernel gave {y[:4].tolist()}..., expected [1.0, 2.0, 3.0, 4.0]..."
    except Exception as failure:
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    return {"triton": triton.__version__, "interpreted": INTERPRETED, "error": error}


def choices() -> dict[str, Any]:
    """What XPU_PORTS_BACKEND forces: op -> back end."""
    from xpu_ports.common import dispatch

    return dict(dispatch.parse_choices(os.environ.get(dispatch.ENVIRONMENT, "")))


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {"devices": devices, "kernel": kernel, "choices": choices}

if __name__ == "__main__":
    question, *arguments = sys.argv[1:]
    # Libraries may print; the answer goes to the real stdout alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    out.write(json.dumps(QUESTIONS[question](*arguments)))
    out.flush()
