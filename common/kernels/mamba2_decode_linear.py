"""One decode step of a Mamba-2 mixer and its output projection, in two launches.

    y = norm((S C + D x) * silu(z)) W^T + b

The step's own norm would be a launch between the two. Its factor is one number for a group of columns, so the
projection applies it to the finished sums instead.

Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.1 and figure 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.mamba2_decode_step.triton import launch_step, move_group_windows, refuses_step
from xpu_ports.common.kernels.skinny_linear.triton import Tile, candidates, in_lane_sum, refuses_linear, tile
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable


@op(mutates=("conv_state", "state"))
def mamba2_decode_linear(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """`mamba2_decode_step`, then a linear layer: one token of every sequence.

    Args:
        zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, eps: the
            step's. Both states are written.
        out_weight: [outputs, H P] in zxbcdt's dtype, any row stride.
        out_bias: [outputs] in zxbcdt's dtype, or None.

    Returns:
        [B, outputs] in zxbcdt's dtype; the bias alone, or 0, in a row whose token does not count. A kernel rounds
        before the projection and at the end; the reference also within the step.

    Raises:
        ValueError: zxbcdt has another number of columns.
    """
    y = mamba2_decode_step.reference(
        zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, eps
    )
    return F.linear(y, out_weight, out_bias)


def _refuses(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    refusal = refuses_step(
        zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, eps
    )
    # z is as wide as the projection's input.
    return refusal or refuses_linear(zxbcdt.narrow(1, 0, norm_weight.shape[0]), out_weight, out_bias)


@triton.jit
def _project(
    gated_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mask_ptr,
    pid,
    rows,
    outputs,
    stride_w,
    stride_m_b,
    eps,
    INNER: tl.constexpr,
    G: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """BLOCK_N outputs for all rows; `gated` and `squares` as `launch_step` gives them. Dimensions are [M, N, K]."""
    GROUP: tl.constexpr = INNER // G
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    mask_m = (offs_m < rows)[:, None, None]
    mask_n = (offs_n < outputs)[None, :, None]
    w_ptrs = weight_ptr + (offs_n.to(tl.int64) * stride_w)[None, :, None]
    gated_ptrs = gated_ptr + (offs_m.to(tl.int64) * INNER)[:, None, None]
    part = tl.arange(0, BLOCK_PARTS)[None, None, :]
    squares_ptrs = squares_ptr + (offs_m * (G * PARTS))[:, None, None] + part
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K // VECTOR), dtype=tl.float32)
    for g in range(G):
        squares = tl.load(squares_ptrs + g * PARTS, mask=mask_m & (part < PARTS), other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K // VECTOR), dtype=tl.float32)
        for k in range(0, GROUP, BLOCK_K):
            mask_k = k + offs_k < GROUP
            at = g * GROUP + k + offs_k
            # The weights first: nothing else has to come from memory.
            w = tl.load(w_ptrs + at, mask=mask_n & mask_k, other=0.0).to(tl.float32)
            x = tl.load(gated_ptrs + at, mask=mask_m & mask_k, other=0.0).to(tl.float32)
            total += in_lane_sum(w * x, BLOCK_K, VECTOR)
        rstd = tl.rsqrt(tl.sum(squares, axis=2) / GROUP + eps)[:, :, None]
        if MASK:
            # Also where eps is 0 and the factor infinite.
            valid = tl.load(mask_ptr + offs_m * stride_m_b, mask=offs_m < rows, other=0) != 0
            rstd = tl.where(valid[:, None, None], rstd, 0.0)
        acc += total * rstd
    y = tl.sum(acc, axis=2)
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < outputs, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * outputs + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < rows)[:, None] & (offs_n < outputs)[None, :])


@kernel
@triton.jit
def _out_kernel(
    gated_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    zxbcdt_ptr,
    conv_state_ptr,
    mask_ptr,
    rows,
    outputs,
    stride_w,
    stride_in_b,
    stride_c_b,
    stride_m_b,
    eps,
    STRIDE_C_D: tl.constexpr,
    STRIDE_C_S: tl.constexpr,
    INNER: tl.constexpr,
    G: tl.constexpr,
    GROUPED: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The norm and the projection; the last programs move B's and C's windows, tile by tile of each row."""
    moving: tl.constexpr = (GROUPED + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    tiles = tl.cdiv(outputs, BLOCK_N)
    if pid < tiles:
        _project(
            gated_ptr, squares_ptr, weight_ptr, bias_ptr, y_ptr, mask_ptr, pid, rows, outputs, stride_w, stride_m_b,
            eps, INNER, G, PARTS, BIAS, MASK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_PARTS, VECTOR,
        )  # fmt: skip
    else:
        b = ((pid - tiles) // moving).to(tl.int64)
        move_group_windows(
            zxbcdt_ptr, conv_state_ptr, mask_ptr, b, (pid - tiles) % moving, stride_in_b, stride_c_b, stride_m_b,
            STRIDE_C_D, STRIDE_C_S, INNER, GROUPED, S, MASK, BLOCK_C, BLOCK_S,
        )  # fmt: skip


def _narrowed(arch: Architecture, M: int, cut: Tile) -> Tile:
    """On Intel with fewer outputs, so that the sums of squares, held meanwhile, do not spill."""
    if not arch.has_grf_modes:
        return cut
    held = (2 if arch.name == "arc-a" else 8) * cut.registers // 128
    return replace(cut, block_n=max(1, min(cut.block_n, held // M)))


def _candidates(arch: Architecture, M: int, N: int, K: int, itemsize: int) -> Iterator[Tile]:
    # The sums of squares are shared out among the warps: on Intel two of them would spill.
    tiles = (_narrowed(arch, M, cut) for cut in candidates(arch, M, N, K, itemsize))
    return (cut for cut in tiles if not arch.has_grf_modes or cut.warps >= 4)


@tunable("mamba2_decode_linear", _candidates)
def _tile(arch: Architecture, M: int, N: int, K: int, itemsize: int) -> Tile:
    """The layer's own, narrowed; M is a power of two, K the columns of one group."""
    return _narrowed(arch, M, tile.rule(arch, M, N, K, itemsize))


@mamba2_decode_linear.implement("triton", "xpu", "cuda", refuses=_refuses)
def mamba2_decode_linear_triton(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    y = torch.empty((zxbcdt.shape[0], out_weight.shape[0]), dtype=zxbcdt.dtype, device=zxbcdt.device)
    if zxbcdt.shape[0] == 0:
        return y
    # In the weights' own dtype lanes hold the same columns of both. fp16 has the range for the normalized row only.
    dtype = torch.float32 if zxbcdt.dtype == torch.float16 else zxbcdt.dtype
    with on_device_of(zxbcdt):
        gated, squares = launch_step(
            zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, dtype
        )
        _launch_out(zxbcdt, conv_state, gated, squares, mask, out_weight, out_bias, y, n_groups, eps)
    return y


def _launch_out(
    zxbcdt: Tensor,
    conv_state: Tensor,
    gated: Tensor,
    squares: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    n_groups: int,
    eps: float,
) -> None:
    (rows, outputs), inner = y.shape, weight.shape[1]
    grouped, S = conv_state.shape[1] - inner, conv_state.shape[2]
    parts = squares.shape[2]
    block_m, block_s = next_power_of_2(rows), next_power_of_2(S)
    arch = architecture(zxbcdt.device)
    cut = _tile(arch, block_m, outputs, inner // n_groups, zxbcdt.element_size())
    block_c = max(1, 2048 // block_s)
    stride_c_b, stride_c_d, stride_c_s = conv_state.stride()
    _out_kernel[(cdiv(outputs, cut.block_n) + rows * cdiv(grouped, block_c),)](
        gated,
        squares,
        weight,
        zxbcdt if bias is None else bias,
        y,
        zxbcdt,
        conv_state,
        zxbcdt if mask is None else mask,
        rows,
        outputs,
        weight.stride(0),
        zxbcdt.stride(0),
        stride_c_b,
        0 if mask is None else mask.stride(0),
        eps,
        STRIDE_C_D=stride_c_d,
        STRIDE_C_S=stride_c_s,
        INNER=inner,
        G=n_groups,
        GROUPED=grouped,
        S=S,
        PARTS=parts,
        BIAS=bias is not None,
        MASK=mask is not None,
        BLOCK_M=block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        BLOCK_PARTS=next_power_of_2(parts),
        VECTOR=cut.vector(zxbcdt.element_size(), arch.lanes),
        BLOCK_C=block_c,
        BLOCK_S=block_s,
        num_warps=cut.warps,
        **grf_options(cut.registers, arch),
    )


def _takes_all(*args: object, **kwargs: object) -> None:
    """Nothing is refused: this is a composition of other ops, which choose for themselves."""
    return


@mamba2_decode_linear.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def mamba2_decode_linear_pytorch(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    y = mamba2_decode_step(
        zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, eps
    )
    return F.linear(y, out_weight, out_bias)
