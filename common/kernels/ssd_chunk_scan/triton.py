"""The Triton implementation of `ssd_chunk_scan`: which calls it takes, and how each device runs them."""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan
from xpu_ports.common.kernels.ssd_chunk_scan.blocks import Blocks
from xpu_ports.common.kernels.ssd_chunk_scan.parts import Call, Products, Tile
from xpu_ports.common.kernels.ssd_chunk_scan.walk import Walk
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, on_device_of

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The walk holds all columns of a state in registers.
LARGEST_N = 256
# Every program of a segmented launch reads all of cu_seqlens.
MOST_SEQUENCES = 8192


def plan(dtype: torch.dtype, device: Architecture) -> Walk | Blocks:
    """How tensors of a dtype run on an architecture."""
    # bf16 operands are exact for bf16 tensors, and three of them hold an fp32 number. Not fp16 operands for fp16: the
    # state and the scores may leave its range where y does not.
    if device.name in ("max", "xe2", "arc-a"):
        return _intel(dtype, device.matrix_units)
    if dtype == torch.bfloat16:
        states, scan = (Tile(64, 64, LARGEST_N, warps=4, stages=stages) for stages in (3, 2))
        return Walk(Products("bf16", "ieee", 3), 2 * device.units, 256, states, scan)
    tile = Tile(32, 32, LARGEST_N, warps=8)
    products = Products("tf32", "tf32", 2) if dtype == torch.float16 else Products("fp32", "tf32x3", 1)
    return Walk(products, 2 * device.units, 256, tile, tile)


def _intel(dtype: torch.dtype, matrix_units: bool) -> Blocks:
    """Tiles of which Intel's compiler spills no register, at the models' sizes and at odd ones."""
    if dtype == torch.float32 or not matrix_units:
        tile = Tile(32, 64, 16, warps=8, registers=256)
        return Blocks(Products("fp32", "ieee", 1), 256, tile, tile, tile)
    products = Products("bf16", "ieee", 3, True) if dtype == torch.bfloat16 else Products("tf32", "tf32", 2, True)
    tile = Tile(32, 64, 32, warps=8, registers=256)
    return Blocks(products, 256, Tile(32, 64, 64, warps=16, registers=256), tile, tile)


def _refuses(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    for name, t in (("x", x), ("B", B), ("C", C)):
        if t.dtype not in _FLOATS or t.dtype != x.dtype:
            return f"{name} has dtype {t.dtype}; x, B and C share one of float16, bfloat16, float32"
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    by_head = {"A_log": A_log, "D": D, "dt_bias": dt_bias}
    for name, given in {"dt": dt, **by_head, "initial_state": initial_state}.items():
        if given is not None and given.dtype not in _FLOATS:
            return f"{name} has dtype {given.dtype}, not one of float16, bfloat16, float32"
    for name, given in by_head.items():
        if given is not None and (given.shape != x.shape[2:3] or not given.is_contiguous()):
            return f"{name} has shape {tuple(given.shape)}, expected ({x.shape[2]},), contiguous"
    if B.shape[-1] > LARGEST_N:
        return f"a state of {B.shape[-1]} columns, more than {LARGEST_N}"
    if initial_state is not None and initial_state.stride(-1) != 1 and B.shape[-1] > 1:
        return f"the last dimension of initial_state has stride {initial_state.stride(-1)}, not 1"
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
        return f"cu_seqlens is {cu_seqlens.dtype} at batch {x.shape[0]}, expected contiguous int32 at batch 1"
    if cu_seqlens.shape[0] - 1 > MOST_SEQUENCES:
        return f"{cu_seqlens.shape[0] - 1} sequences, more than {MOST_SEQUENCES}"
    return None


@ssd_chunk_scan.implement("triton", "xpu", "cuda", refuses=_refuses)
def ssd_chunk_scan_triton(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    call = Call(x, dt, A_log, B, C, D, dt_bias, initial_state, dt_min, cu_seqlens)
    return launch(plan(x.dtype, architecture(x.device)), call)


def launch(how: Walk | Blocks, call: Call) -> tuple[Tensor, Tensor]:
    """(y, state) of a call, run as planned."""
    x = call.x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = call.empty(call.sequences, *x.shape[2:], call.B.shape[3])
    if final.numel():
        with on_device_of(x):
            how.launch(call, y, final)
    return y, final
