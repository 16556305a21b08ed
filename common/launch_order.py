"""Kernels that start while the one before them ends: programmatic dependent launch, from NVIDIA's Hopper on.

Between two kernels of a stream a device drains and fills again, 1 to 2 us, of which a decode step of some hundred
kernels has many. A kernel launched with the option of `overlap_options` may be started before the one before it has
ended: it has its programs, its addresses and, where it reads weights first, its first loads ready. What another kernel
may have written, or may still read, it touches after `wait_for_inputs`, which waits for all kernels before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from xpu_ports.common import tritonlib
from xpu_ports.common.tritonlib import tl, triton


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait for all kernels before this one, then let the next one start; nothing without OVERLAP.

    In that order, so that there are at most two kernels at a time, and every kernel before those has ended: a kernel
    may then read ahead what the one just before it has not written.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device) -> dict[str, Any]:
    """The option to launch a kernel with that begins with `wait_for_inputs`; empty where there is no such thing."""
    return _options(device.index or 0) if device.type == "cuda" else {}


@functools.cache
def _options(index: int) -> dict[str, Any]:
    if tritonlib.INTERPRETED or torch.version.hip or torch.cuda.get_device_capability(index) < (9, 0):
        return {}
    extra = getattr(getattr(tl, "extra", None), "cuda", None)
    return {"launch_pdl": True} if hasattr(extra, "gdc_wait") else {}
