"""The experts for some tokens on matrix units, in two launches: what they choose together is read once.

A program of the first launch makes some columns of what one expert activates for all tokens that chose it, times what
it counts for each: the program of the first choice of this expert, those of the others have nothing to do. One of them
lists the experts, and a program of the second launch adds up some columns of all tokens' outputs along the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture
from xpu_ports.common.kernels.activations import limit_both, silu
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, tl, triton

# A few tokens read what they share from the cache as fast; of many each program would read more than weights.
FEWEST_N, MOST_N = 5, 16
# One program compares all choices with each other.
MOST_CHOICES = 128


def suits(arch: Architecture, N: int, A: int, dtype: torch.dtype) -> bool:
    """Whether N tokens with A choices each go this way, which was measured on an H200 alone."""
    return arch.name == "nvidia" and FEWEST_N <= N <= MOST_N and N * A <= MOST_CHOICES and dtype != torch.float32


@triton.jit
def _list_experts(list_ptr, chosen, offs_p, E, CHOICES: tl.constexpr, SHARED: tl.constexpr):
    """How many experts there are and the choices that are the first of each, in the second row which they are."""
    ROW: tl.constexpr = CHOICES + 2 if SHARED else CHOICES + 1
    same = (chosen[:, None] == chosen[None, :]) & (offs_p[None, :] < offs_p[:, None])
    first = (tl.sum(same.to(tl.int32), axis=1) == 0) & (chosen < E)
    place = tl.cumsum(first.to(tl.int32), axis=0)
    tl.store(list_ptr + place, offs_p, mask=first)
    tl.store(list_ptr + ROW + place, chosen, mask=first)
    many = tl.sum(first.to(tl.int32), axis=0)
    if SHARED:
        many += 1
        tl.store(list_ptr + many, CHOICES)
        tl.store(list_ptr + ROW + many, 0)
    tl.store(list_ptr, many)


@kernel
@triton.jit
def _gate_up_once_kernel(
    x_ptr,
    w_ptr,
    shared_ptr,
    indices_ptr,
    weights_ptr,
    h_ptr,
    list_ptr,
    E,
    limit,
    stride_x_n,
    stride_w_e,
    stride_w_f,
    stride_s_f,
    stride_i_n,
    stride_i_a,
    stride_g_n,
    stride_g_a,
    N: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h = w silu(g) * u, BLOCK_F columns of one expert; h is [choices, N, F], 0 for tokens that did not choose it."""
    choices: tl.constexpr = N * A
    places: tl.constexpr = N * A + 1 if SHARED else N * A
    pid = tl.program_id(0)
    p = pid % places
    routed = p < choices
    offs_p = tl.arange(0, BLOCK_P)
    chosen = tl.load(indices_ptr + offs_p // A * stride_i_n + offs_p % A * stride_i_a, mask=offs_p < choices, other=E)
    chosen = chosen.to(tl.int32)
    if pid == 0:
        _list_experts(list_ptr, chosen, offs_p, E, choices, SHARED)
    e = tl.load(indices_ptr + p // A * stride_i_n + p % A * stride_i_a, mask=routed, other=0).to(tl.int32)
    earlier = tl.sum(((chosen == e) & (offs_p < p)).to(tl.int32), axis=0)
    # Another device has expert E.
    if (p == choices) | ((earlier == 0) & (e < E)):
        width = F if S == F else tl.where(routed, F, S)
        # Row 2 f of the tile is the gate's f, row 2 f + 1 what it gates.
        rows = tl.arange(0, 2 * BLOCK_F)
        offs_f = pid // places * BLOCK_F + rows // 2
        offs_w = (offs_f + rows % 2 * width).to(tl.int64)
        w_ptrs = w_ptr + e.to(tl.int64) * stride_w_e + offs_w * stride_w_f
        if SHARED:
            w_ptrs = tl.where(routed, w_ptrs, shared_ptr + offs_w * stride_s_f)
        offs_n, offs_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        mask_n, mask_w = (offs_n < N)[None, :], (offs_f < width)[:, None]
        x_ptrs = x_ptr + offs_n.to(tl.int64)[None, :] * stride_x_n + offs_k[:, None]
        acc = tl.zeros((2 * BLOCK_F, BLOCK_N), dtype=tl.float32)
        for k in range(0, D, BLOCK_K):
            mask_k = k + offs_k < D
            w = tl.load(w_ptrs[:, None] + (k + offs_k)[None, :], mask=mask_w & mask_k[None, :], other=0.0)
            x = tl.load(x_ptrs + k, mask=mask_n & mask_k[:, None], other=0.0)
            acc = tl.dot(w, x, acc)
        # What the expert counts for each token, which may have chosen it twice; the shared one counts 1.
        offs_a = tl.arange(0, BLOCK_A)
        mask_a = (offs_n < N)[:, None] & (offs_a < A)[None, :]
        index_ptrs = indices_ptr + offs_n[:, None] * stride_i_n + offs_a[None, :] * stride_i_a
        here = (tl.load(index_ptrs, mask=mask_a, other=E).to(tl.int32) == e) & routed
        weight_ptrs = weights_ptr + offs_n[:, None] * stride_g_n + offs_a[None, :] * stride_g_a
        weight = tl.load(weight_ptrs, mask=mask_a, other=0.0).to(tl.float32)
        weight = tl.where(routed, tl.sum(tl.where(here, weight, 0.0), axis=1), 1.0)
        counts = (tl.sum(here.to(tl.int32), axis=1) > 0) | (p == choices)
        g, u = tl.split(tl.permute(tl.reshape(acc, (BLOCK_F, 2, BLOCK_N)), (0, 2, 1)))
        if LIMIT:
            g, u = limit_both(g, u, limit)
        h = tl.where(counts[None, :], silu(g) * u * weight[None, :], 0.0).to(h_ptr.dtype.element_ty)
        offs_f = pid // places * BLOCK_F + tl.arange(0, BLOCK_F)
        h_ptrs = h_ptr + (p * N + offs_n).to(tl.int64)[None, :] * F + offs_f[:, None]
        tl.store(h_ptrs, h, mask=mask_n & (offs_f < F)[:, None])


@kernel
@triton.jit
def _down_once_kernel(
    h_ptr,
    w_ptr,
    shared_ptr,
    list_ptr,
    y_ptr,
    stride_w_e,
    stride_w_d,
    stride_s_d,
    N: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    S: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = sum_e down_e h_e, BLOCK_D columns of all tokens."""
    places: tl.constexpr = N * A + 1 if SHARED else N * A
    steps: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    offs_d = tl.program_id(0).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n, offs_k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    mask_n, mask_d = (offs_n < N)[None, :], (offs_d < D)[:, None]
    acc = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    # One loop over the columns of all experts, so that the loads of one are on their way before another's are used up.
    for i in range(tl.load(list_ptr) * steps):
        p = tl.load(list_ptr + 1 + i // steps)
        e = tl.load(list_ptr + places + 2 + i // steps).to(tl.int64)
        columns = i % steps * BLOCK_K + offs_k
        w_ptrs = w_ptr + e * stride_w_e + offs_d * stride_w_d
        if SHARED:
            w_ptrs = tl.where(p < N * A, w_ptrs, shared_ptr + offs_d * stride_s_d)
        mask_k = columns < (F if S == F else tl.where(p < N * A, F, S))
        w = tl.load(w_ptrs[:, None] + columns[None, :], mask=mask_d & mask_k[None, :], other=0.0)
        h_ptrs = h_ptr + (p * N + offs_n).to(tl.int64)[None, :] * F + columns[:, None]
        acc = tl.dot(w, tl.load(h_ptrs, mask=mask_n & mask_k[:, None], other=0.0), acc)
    tl.store(y_ptr + offs_n[None, :] * D + offs_d[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask_n & mask_d)


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows of a weight and columns of it that a program takes at a time, warps, loads in flight.

    Of the second product some loads are of the list.
    """

    rows: int
    block_k: int
    warps: int
    stages: int


# Those that measured best at DeepSeek-V4-Flash's sizes.
GATE_UP = Tile(32, 256, 4, 3)
DOWN = Tile(32, 256, 4, 7)


def launch(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    y: Tensor,
) -> None:
    """Fill y [N, D]; nothing is empty."""
    (N, D), F, A = x.shape, down.shape[2], indices.shape[1]
    shares = shared_gate_up is not None
    shared_gate_up = gate_up[0] if shared_gate_up is None else shared_gate_up
    shared_down = down[0] if shared_down is None else shared_down
    places = N * A + shares
    h = torch.empty((places, N, F), dtype=x.dtype, device=x.device)
    listed = torch.empty((2, places + 1), dtype=torch.int32, device=x.device)
    of_both = dict(N=N, D=D, F=F, S=shared_down.shape[1], A=A, SHARED=shares, BLOCK_N=max(16, next_power_of_2(N)))
    _gate_up_once_kernel[(places * cdiv(F, GATE_UP.rows // 2),)](
        x,
        gate_up,
        shared_gate_up,
        indices,
        weights,
        h,
        listed,
        gate_up.shape[0],
        0.0 if limit is None else limit,
        x.stride(0),
        *gate_up.stride()[:2],
        shared_gate_up.stride(0),
        *indices.stride(),
        *weights.stride(),
        **of_both,
        LIMIT=limit is not None,
        BLOCK_P=next_power_of_2(N * A),
        BLOCK_A=next_power_of_2(A),
        BLOCK_F=GATE_UP.rows // 2,
        BLOCK_K=min(GATE_UP.block_k, max(16, next_power_of_2(D))),
        num_warps=GATE_UP.warps,
        num_stages=GATE_UP.stages,
    )
    _down_once_kernel[(cdiv(D, DOWN.rows),)](
        h,
        down,
        shared_down,
        listed,
        y,
        *down.stride()[:2],
        shared_down.stride(0),
        **of_both,
        BLOCK_D=DOWN.rows,
        BLOCK_K=min(DOWN.block_k, max(16, next_power_of_2(F))),
        num_warps=DOWN.warps,
        num_stages=DOWN.stages,
    )
