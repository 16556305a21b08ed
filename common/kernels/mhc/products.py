"""mHC's streams written, and what `mhc_pre` reads of them made meanwhile: a launch that has them in registers.

A program has some tokens and columns of all the streams, old and new. On matrix units the new ones, rounded, are an
operand right away. Products are of pieces of fn, as `mhc_pre`'s are. Of many tokens NVIDIA's Hopper has `hopper.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.mhc import hopper, mhc_post_products, product_columns
from xpu_ports.common.kernels.mhc.tiles import load_pieces, load_streams, mixed, product
from xpu_ports.common.kernels.mhc.triton import (
    SPLIT_COLUMNS,
    _mhc_split_kernel,
    refuses_post,
    refuses_rows,
    units_for,
)
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.kernels.skinny_linear.triton import in_lane_sum
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# Up to here NVIDIA's matrix units, which take 16 tokens, gain nothing.
SEVERAL_TOKENS = 8


def products_save_time(y: Tensor, x: Tensor, fn: Tensor) -> bool:
    """Whether streams written with their products, and read with them, take less time than without; on an H200.

    Args:
        y, x, fn: as `mhc_post_products` takes them.
    """
    N, D = x.shape[:-2].numel(), x.shape[-1]
    if N <= SEVERAL_TOKENS:
        return True
    if N < hopper.FROM_TOKENS or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (y, x, fn)):
        return False
    columns = product_columns(N, D)
    return hopper.refuses(y, x, fn, columns) is None and hopper.fills(N, cdiv(D, columns), architecture(x.device).units)


def _refuses(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor) -> str | None:
    S, D = x.shape[-2:]
    if fn.dim() != 2:
        return f"fn has {fn.dim()} dimensions, not 2"
    return refuses_post(y, x, post, comb) or refuses_rows("fn", fn, (fn.shape[0], S * D))


@kernel
@triton.jit
def _mhc_post_dot_kernel(
    y_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    part_ptr,
    N,
    n1,
    n2,
    stride_y_0,
    stride_y_1,
    stride_y_2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    stride_f,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURN: tl.constexpr,
    DIMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens' COLUMNS columns of all streams, and these columns' products with all rows.

    TURN: fn is the left operand. Its rows are fewer than units of four warps take, which on the right would want the
    new streams from registers inside a loop.
    """
    parts: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    part = pid % parts
    # From the last tokens to the first: who reads the streams next goes the other way.
    offs_n = (tl.num_programs(0) // parts - 1 - pid // parts) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_n = (offs_n < N)[:, None]
    offs_r = tl.arange(0, BLOCK_R)
    rows = offs_n.to(tl.int64)[:, None]
    y_ptrs = y_ptr + row_offset(offs_n, n1, n2, stride_y_0, stride_y_1, stride_y_2, DIMS)[:, None]
    x_ptrs = x_ptr + row_offset(offs_n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None]
    out_ptrs = out_ptr + rows * (S * D)
    post_ptrs, comb_ptrs = post_ptr + rows * S, comb_ptr + rows * (S * S)
    acc = tl.zeros((BLOCK_R, BLOCK_T) if TURN else (BLOCK_T, BLOCK_R), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K // VECTOR), dtype=tl.float32)
    for d in tl.range(part * COLUMNS, min(D, part * COLUMNS + COLUMNS), BLOCK_K, num_stages=1):
        offs_d = d + tl.arange(0, BLOCK_K)
        mask = mask_n & (offs_d < D)[None, :]
        y = tl.load(y_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        x0, x1, x2, x3 = load_streams(x_ptrs + offs_d[None, :], mask, stride_x_s, S)
        if TURN:
            fn_ptrs = fn_ptr + offs_r.to(tl.int64)[:, None] * stride_f + offs_d[None, :]
            mask_w = (offs_r < R)[:, None] & (offs_d < D)[None, :]
        else:
            fn_ptrs = fn_ptr + offs_r.to(tl.int64)[None, :] * stride_f + offs_d[:, None]
            mask_w = (offs_r < R)[None, :] & (offs_d < D)[:, None]
        # Not unrolled: that would hold the pieces of all streams' rows at once.
        for k in range(S):
            w0, w1, w2 = load_pieces(fn_ptrs + k * D, mask_w, R * S * D)
            out = rounded(mixed(y, x0, x1, x2, x3, post_ptrs + k, comb_ptrs + k, mask_n, S), out_ptr)
            tl.store(out_ptrs + k * D + offs_d[None, :], out, mask=mask)
            wide = out.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (BLOCK_T, BLOCK_K // VECTOR, VECTOR)), axis=2)
            acc += product(out, w0, w1, w2, TURN)
    part_ptrs = part_ptr + (offs_n.to(tl.int64) * parts + part) * (R + 1)
    if TURN:
        tl.store(part_ptrs[None, :] + offs_r[:, None], acc, mask=(offs_n < N)[None, :] & (offs_r < R)[:, None])
    else:
        tl.store(part_ptrs[:, None] + offs_r[None, :], acc, mask=mask_n & (offs_r < R)[None, :])
    tl.store(part_ptrs + R, tl.sum(squares, axis=1), mask=offs_n < N)


@kernel
@triton.jit
def _mhc_post_few_kernel(
    y_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    out_ptr,
    part_ptr,
    N,
    n1,
    n2,
    stride_y_0,
    stride_y_1,
    stride_y_2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    stride_f,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """As `_mhc_post_dot_kernel`, of BLOCK_R rows, without matrix units; other rows' programs make the streams again."""
    parts: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    groups: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    size: tl.constexpr = BLOCK_S * BLOCK_K
    pid = tl.program_id(0)
    part, pid = pid % parts, pid // parts
    # Dimensions are [tokens, rows, columns of all streams side by side].
    offs_n = pid // groups * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = pid % groups * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_k = (tl.arange(0, size) // BLOCK_K)[None, None, :]
    mask_n, mask_r = (offs_n < N)[:, None, None], (offs_r < R)[None, :, None]
    rows = offs_n.to(tl.int64)[:, None, None]
    y_ptrs = y_ptr + row_offset(offs_n, n1, n2, stride_y_0, stride_y_1, stride_y_2, DIMS)[:, None, None]
    x_ptrs = x_ptr + row_offset(offs_n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None, None]
    fn_ptrs = fn_ptr + (offs_r.to(tl.int64) * stride_f)[None, :, None] + offs_k * D
    out_ptrs = out_ptr + rows * (S * D) + offs_k * D
    post_ptrs, comb_ptrs = post_ptr + rows * S + offs_k, comb_ptr + rows * (S * S) + offs_k
    mask_k = mask_n & (offs_k < S)
    acc = tl.zeros((BLOCK_T, BLOCK_R, size // VECTOR), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, 1, size // VECTOR), dtype=tl.float32)
    for d in range(part * COLUMNS, min(D, part * COLUMNS + COLUMNS), BLOCK_K):
        offs_d = d + (tl.arange(0, size) % BLOCK_K)[None, None, :]
        w = tl.load(fn_ptrs + offs_d, mask=mask_r & (offs_k < S) & (offs_d < D), other=0.0)
        mask = mask_n & (offs_d < D)
        y = tl.load(y_ptrs + offs_d, mask=mask, other=0.0).to(tl.float32)
        x0, x1, x2, x3 = load_streams(x_ptrs + offs_d, mask, stride_x_s, S)
        out = rounded(mixed(y, x0, x1, x2, x3, post_ptrs, comb_ptrs, mask_k, S), out_ptr)
        # One group of rows says it for all.
        if pid % groups == 0:
            tl.store(out_ptrs + offs_d, out, mask=mask_k & (offs_d < D))
        x = out.to(tl.float32)
        acc += in_lane_sum(w * x, size, VECTOR)
        squares += in_lane_sum(x * x, size, VECTOR)
    part_ptrs = part_ptr + ((offs_n.to(tl.int64) * parts + part) * (R + 1))[:, None]
    mask_n = (offs_n < N)[:, None]
    tl.store(part_ptrs + offs_r[None, :], tl.sum(acc, axis=2), mask=mask_n & (offs_r < R)[None, :])
    if pid % groups == 0:
        tl.store(part_ptrs + R, tl.sum(squares, axis=2), mask=mask_n)


class PostTile(NamedTuple):
    """Tokens, rows of fn and columns of all streams that a program takes at a time, its warps, and loads in flight."""

    block_t: int
    block_r: int
    block_k: int
    warps: int
    stages: int = 1
    # Registers a thread, where that can be chosen.
    registers: int = 128


def _candidates(arch: Architecture, R: int, dtype: torch.dtype, units: str) -> Iterator[PostTile]:
    if arch.name != "nvidia":
        return
    if units in ("few", "several"):
        for block_t in (1, 2, 4):
            for block_r in (2, 4, 8):
                for warps in (2, 4):
                    yield PostTile(block_t, block_r, 64, warps)
        return
    for block_t in (32,) if units == "some" else (32, 64):
        for block_k in (16, 32):
            for warps in (4, 8):
                # Of one stage streams were not `mhc_post`'s to the last bit.
                for stages in (2, 3):
                    if block_t * block_k <= (512 if dtype == torch.bfloat16 else 128) * warps:
                        yield PostTile(block_t, max(16, next_power_of_2(R)), block_k, warps, stages)


@tunable("mhc_post_products", _candidates)
def post_tile(arch: Architecture, R: int, dtype: torch.dtype, units: str) -> PostTile:
    """The tile for R rows and streams of a dtype.

    Five tiles in fp32 and three of fn in pieces are in registers: a small one of some warps.
    """
    if units == "several":
        return PostTile(4, 8, 64, 4)
    if units == "few" and arch.name == "nvidia":
        return PostTile(2, 4, 64, 2)
    if units == "few":
        return PostTile(1, 4 if arch.name == "arc-a" else 8, 64, 2, registers=256)
    block_r = max(16, next_power_of_2(R))
    if arch.has_grf_modes:
        return PostTile(16, block_r, 16, 4 if dtype == torch.bfloat16 else 8, registers=256)
    if dtype != torch.bfloat16:
        return PostTile(32, block_r, 16, 4, 3)
    return PostTile(64 if units == "many" else 32, block_r, 32, 4, 3)


@mhc_post_products.implement("triton", "xpu", "cuda", refuses=_refuses)
def mhc_post_products_triton(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    (S, D), R = x.shape[-2:], fn.shape[0]
    N = x.shape[:-2].numel()
    columns = product_columns(N, D)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    part = torch.empty((*x.shape[:-2], cdiv(D, columns), R + 1), dtype=torch.float32, device=x.device)
    if N == 0:
        return out, part
    if hopper.refuses(y, x, fn, columns) is None:
        hopper.launch(y, x, post, comb, fn, out, part)
        return out, part
    sizes, (stride_y, stride_x) = row_strides(y, x.select(-2, 0))  # type: ignore[misc]
    arch = architecture(x.device)
    units = units_for(arch, N)
    if units == "some" and arch.name == "nvidia" and N <= SEVERAL_TOKENS:
        units = "several"
    cut = post_tile(arch, R, x.dtype, units)
    stride_f = fn.stride(0)
    options = {"S": S, "D": D, "R": R, "COLUMNS": columns, "DIMS": dims_used(sizes)}
    options |= {"BLOCK_T": cut.block_t, "BLOCK_R": cut.block_r, "BLOCK_K": cut.block_k}
    programs = cdiv(N, cut.block_t) * part.shape[-2]
    with on_device_of(x):
        if units in ("few", "several"):
            run, programs = _mhc_post_few_kernel, programs * cdiv(R, cut.block_r)
            block_s = next_power_of_2(S)
            # Columns of fn that one load gives a lane.
            vector = max(1, min(4, block_s * cut.block_k // (cut.warps * arch.lanes)))
            options |= {"VECTOR": vector, "BLOCK_S": block_s}
        else:
            run = _mhc_post_dot_kernel
            options |= {"VECTOR": 8, "TURN": arch.name == "nvidia"}
        if units == "many":
            pieces = torch.empty((3, R, S * D), dtype=torch.bfloat16, device=x.device)
            _mhc_split_kernel[(R, cdiv(S * D, SPLIT_COLUMNS))](
                fn, pieces, S * D, stride_f, R=R, BLOCK_K=SPLIT_COLUMNS, num_warps=4
            )
            fn, stride_f = pieces, S * D
        run[(programs,)](
            y,
            x,
            post,
            comb,
            fn,
            out,
            part,
            N,
            sizes[1],
            sizes[2],
            *stride_y,
            *stride_x,
            x.stride(-2),
            stride_f,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **options,
            **grf_options(cut.registers, arch),
        )
    return out, part
