"""The experts for a few tokens, where reading the weights is all that takes time, in two launches.

A program of the first launch makes some columns of what one expert activates for one token, a program of the second
some columns of one token's output, from all of its experts: nothing is sorted, counted or added up afterwards. The
programs of the same columns run side by side, so that an expert that several tokens chose comes from memory once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.activations import limit_both, silu
from xpu_ports.common.kernels.moe_experts import moe_experts, once
from xpu_ports.common.kernels.skinny_linear.triton import in_lane_sum
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# From here on sorting the rows and a grouped product are faster: a token reads its experts from the cache for itself.
LARGEST_N = 32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _refuses(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if x.dtype not in _FLOATS:
        return f"dtype {x.dtype} is not one of float16, bfloat16, float32"
    if x.dim() != 2 or gate_up.dim() != 3 or gate_up.shape[1] % 2:
        return f"x and gate_up have shapes {tuple(x.shape)} and {tuple(gate_up.shape)}, expected (N, D) and (E, 2 F, D)"
    (N, D), (E, F2, _) = x.shape, gate_up.shape
    if N > LARGEST_N:
        return f"{N} tokens, more than {LARGEST_N}"
    if indices.dim() != 2 or indices.shape[0] != N or weights.shape != indices.shape:
        return f"indices and weights have shapes {tuple(indices.shape)} and {tuple(weights.shape)}, expected ({N}, A)"
    if indices.dtype not in (torch.int64, torch.int32) or weights.dtype not in _FLOATS:
        return f"indices and weights have dtypes {indices.dtype} and {weights.dtype}"
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "x": (x, (N, D)),
        "gate_up": (gate_up, (E, F2, D)),
        "down": (down, (E, D, F2 // 2)),
    }
    if shared_gate_up is not None:
        # As wide as the others, or less, as a rank's part of one is.
        S = min(shared_gate_up.shape[0], F2)
        shapes |= {"shared_gate_up": (shared_gate_up, (S, D)), "shared_down": (shared_down, (D, S // 2))}
    for name, (t, shape) in shapes.items():
        if t is None or t.shape != shape:
            return f"{name} has shape {None if t is None else tuple(t.shape)}, expected {shape}"
        if t.dtype != x.dtype:
            return f"{name} has dtype {t.dtype}, the input {x.dtype}"
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    return None


@triton.jit
def _expert(
    w_ptr,
    shared_ptr,
    indices_ptr,
    a,
    offs,
    E,
    stride_w_e,
    stride_w,
    stride_s,
    stride_i,
    A: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Pointers to rows `offs` of the expert that is a token's a-th choice, or of the shared one behind the last.

    And whether it is here: another device has expert E.
    """
    chooses = a < A
    e = tl.load(indices_ptr + a * stride_i, mask=chooses, other=0).to(tl.int64)
    ptrs = w_ptr + e * stride_w_e + offs.to(tl.int64) * stride_w
    if SHARED:
        ptrs = tl.where(chooses, ptrs, shared_ptr + offs.to(tl.int64) * stride_s)
    return ptrs, e < E


@triton.jit
def dot_rows(x_ptr, w_ptrs, mask_w, width, K: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """[1, ROWS, BLOCK_K / VECTOR], which add up to w x along the last dimension; w_ptrs are [ROWS].

    Rows have width columns, K at most.
    """
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    w_ptrs, mask_w = w_ptrs[None, :, None], mask_w[None, :, None]
    acc = tl.zeros((1, w_ptrs.shape[1], BLOCK_K // VECTOR), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        mask_k = k + offs_k < width
        # The weights first: nothing else has to come from memory.
        w = tl.load(w_ptrs + (k + offs_k), mask=mask_w & mask_k, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + (k + offs_k), mask=mask_k, other=0.0).to(tl.float32)
        acc += in_lane_sum(w * x, BLOCK_K, VECTOR)
    return acc


@kernel
@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    shared_ptr,
    indices_ptr,
    h_ptr,
    pairs,
    E,
    limit,
    stride_x_n,
    stride_w_e,
    stride_w_f,
    stride_s_f,
    stride_i_n,
    stride_i_a,
    D: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """h = silu(g) * u, BLOCK_F columns of one token and expert; h is [N, A or A + 1, F], the shared expert's last.

    S columns are its own; the others become 0.
    """
    choices: tl.constexpr = A + 1 if SHARED else A
    pid = tl.program_id(0)
    pair = (pid % pairs).to(tl.int64)
    n, a = pair // choices, pair % choices
    width = F if S == F else tl.where(a < A, F, S)
    # Row 2 f of the tile is the gate's f, row 2 f + 1 what it gates.
    rows = tl.arange(0, 2 * BLOCK_F)
    offs_f = pid // pairs * BLOCK_F + rows // 2
    w_ptrs, here = _expert(
        w_ptr, shared_ptr, indices_ptr + n * stride_i_n, a, offs_f + rows % 2 * width, E, stride_w_e, stride_w_f,
        stride_s_f, stride_i_a, A, SHARED,
    )  # fmt: skip
    acc = dot_rows(x_ptr + n * stride_x_n, w_ptrs, offs_f < tl.where(here, width, 0), D, D, BLOCK_K, VECTOR)
    g, u = tl.split(tl.reshape(tl.sum(acc, axis=2), (BLOCK_F, 2)))
    if LIMIT:
        g, u = limit_both(g, u, limit)
    offs_f = pid // pairs * BLOCK_F + tl.arange(0, BLOCK_F)
    h = (silu(g) * u).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + pair * F + offs_f, h, mask=offs_f < F)


@kernel
@triton.jit
def _down_kernel(
    h_ptr,
    w_ptr,
    shared_ptr,
    indices_ptr,
    weights_ptr,
    y_ptr,
    N,
    E,
    stride_w_e,
    stride_w_d,
    stride_s_d,
    stride_i_n,
    stride_i_a,
    stride_g_n,
    stride_g_a,
    D: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """y = sum_a w_a down_a h_a, BLOCK_D columns of one token."""
    choices: tl.constexpr = A + 1 if SHARED else A
    pid = tl.program_id(0)
    n = (pid % N).to(tl.int64)
    offs_d = pid // N * BLOCK_D + tl.arange(0, BLOCK_D)
    indices_ptr += n * stride_i_n
    acc = tl.zeros((1, BLOCK_D, BLOCK_K // VECTOR), dtype=tl.float32)
    for a in range(choices):
        w_ptrs, here = _expert(
            w_ptr, shared_ptr, indices_ptr, a, offs_d, E, stride_w_e, stride_w_d, stride_s_d, stride_i_a, A, SHARED
        )
        weight = tl.load(weights_ptr + n * stride_g_n + a * stride_g_a, mask=a < A, other=1.0).to(tl.float32)
        width = F if S == F else tl.where(a < A, F, S)
        mask_d = offs_d < tl.where(here, D, 0)
        acc += weight * dot_rows(h_ptr + (n * choices + a) * F, w_ptrs, mask_d, width, F, BLOCK_K, VECTOR)
    y = tl.sum(tl.sum(acc, axis=2), axis=0)
    tl.store(y_ptr + n * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=offs_d < D)


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows of a weight and columns of it that a program takes at a time, and its warps."""

    rows: int
    block_k: int
    warps: int
    # Registers a thread, where that can be chosen.
    registers: int = 128


def tile(arch: Architecture, K: int, itemsize: int) -> Tile:
    """The tile for rows of K elements: lanes stand along them, 16 bytes each, or less on Intel GPUs not to spill."""
    vector = 16 // itemsize
    rows, warps = 4, 4
    if arch.has_grf_modes:
        rows, vector = (4, min(vector, 4)) if arch.matrix_units else (2, min(vector, 4))
    # No more columns than there are, and at least one load for each lane.
    columns = max(vector, next_power_of_2(K))
    warps = max(1, min(warps, columns // (arch.lanes * vector)))
    return Tile(rows, min(columns, warps * arch.lanes * vector), warps)


@moe_experts.implement("triton", "xpu", "cuda", refuses=_refuses)
def moe_experts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    (N, D), (_, F2, _), A = x.shape, gate_up.shape, indices.shape[1]
    shared = shared_gate_up is not None
    choices = A + shared
    y = torch.empty((N, D), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if choices == 0 or F2 == 0:
        return y.zero_()
    if once.suits(architecture(x.device), N, A, x.dtype):
        with on_device_of(x):
            once.launch(x, gate_up, down, indices, weights, limit, shared_gate_up, shared_down, y)
        return y
    h = torch.empty((N, choices, F2 // 2), dtype=x.dtype, device=x.device)
    with on_device_of(x):
        _launch_gate_up(x, gate_up, gate_up if shared_gate_up is None else shared_gate_up, indices, h, limit)
        _launch_down(h, down, down if shared_down is None else shared_down, indices, weights, y)
    return y


def _launch_gate_up(
    x: Tensor, gate_up: Tensor, shared: Tensor, indices: Tensor, h: Tensor, limit: float | None
) -> None:
    N, choices, F = h.shape
    D = x.shape[1]
    arch = architecture(x.device)
    cut = tile(arch, D, x.element_size())
    block_f = cut.rows // 2
    _gate_up_kernel[(N * choices * cdiv(F, block_f),)](
        x,
        gate_up,
        shared,
        indices,
        h,
        N * choices,
        gate_up.shape[0],
        0.0 if limit is None else limit,
        x.stride(0),
        *gate_up.stride()[:2],
        shared.stride(-2),
        *indices.stride(),
        D=D,
        F=F,
        S=shared.shape[-2] // 2,
        A=indices.shape[1],
        SHARED=choices > indices.shape[1],
        LIMIT=limit is not None,
        BLOCK_F=block_f,
        BLOCK_K=cut.block_k,
        VECTOR=vector(cut, x, arch),
        num_warps=cut.warps,
        **grf_options(cut.registers, arch),
    )


def _launch_down(h: Tensor, down: Tensor, shared: Tensor, indices: Tensor, weights: Tensor, y: Tensor) -> None:
    N, choices, F = h.shape
    D = y.shape[1]
    arch = architecture(y.device)
    cut = tile(arch, F, y.element_size())
    _down_kernel[(N * cdiv(D, cut.rows),)](
        h,
        down,
        shared,
        indices,
        weights,
        y,
        N,
        down.shape[0],
        *down.stride()[:2],
        shared.stride(-2),
        *indices.stride(),
        *weights.stride(),
        D=D,
        F=F,
        S=shared.shape[-1],
        A=indices.shape[1],
        SHARED=choices > indices.shape[1],
        BLOCK_D=cut.rows,
        BLOCK_K=cut.block_k,
        VECTOR=vector(cut, y, arch),
        num_warps=cut.warps,
        **grf_options(cut.registers, arch),
    )


def vector(cut: Tile, weight: Tensor, arch: Architecture) -> int:
    """Columns that one load gives a lane."""
    return max(1, min(16 // weight.element_size(), cut.block_k // (cut.warps * arch.lanes)))
