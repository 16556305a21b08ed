"""One row of x against a weight in MXFP4 on NVIDIA's tensor cores, which multiply codes; scales multiply their sums.

As in `fragments.py` lane 4 g + t reads a block of 32 codes of rows g and g + 8, where four lanes have the same row and
four blocks of it. One row of x leaves seven of the product's eight columns free. So here each column has x for one
block of eight, zero elsewhere, and the products of a block stay apart: a scale meets the sum of 32 products and not 32
codes, any scale in fp32, and the row's sum is taken at the end.

The codes are bf16 times 2^-126, x is times 2^100, which keeps sums in fp32 normal. Where an output is not finite in the
end, be it for a scale of NaN, an x that is not finite, or one from 2^28 on, the program starts again as
`fragments.py` does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.activations import limit_both, silu
from xpu_ports.common.launch_order import overlap_options, wait_for_inputs
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.kernels.decoding import multiplied_pair
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_row, hopper_row_fp8
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.fragments import launch_slices, sum_slices

# Columns of two turns of a warp, whose blocks are the product's columns.
COLUMNS = 256


@triton.jit
def _codes(words, WARPS: tl.constexpr):
    """Words [lanes, 4, rows g and g + 8] to [WARPS, 16, 128] bf16, columns [word, J / 2, t, J % 2, half]."""
    words = tl.reshape(words, (WARPS, 8, 4, 4, 2))
    first, second = multiplied_pair(words, 0), multiplied_pair(words, 1)
    third, fourth = multiplied_pair(words, 2), multiplied_pair(words, 3)
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    # From [warp, g, t, word, h, J / 2, J % 2, half].
    w = tl.permute(tl.join(low, high), (0, 4, 1, 3, 5, 2, 6, 7))
    return tl.reshape(w, (WARPS, 16, 128))


@triton.jit
def _read_pairs(ptrs, mask, MASKED: tl.constexpr):
    """Eight columns, [lanes, 8] addresses, as columns J and J + 4 in 32 bits: [lanes, 4]."""
    x = tl.load(ptrs, mask=mask, other=0.0) if MASKED else tl.load(ptrs)
    bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    low, high = tl.split(tl.permute(tl.reshape(bits, (bits.shape[0], 2, 4)), (0, 2, 1)))
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def _read_block(ptrs, mask, MASKED: tl.constexpr):
    """32 columns in pairs, [lanes, J, word / 2, word % 2]."""
    even = tl.join(_read_pairs(ptrs, mask, MASKED), _read_pairs(ptrs + 16, mask, MASKED))
    odd = tl.join(_read_pairs(ptrs + 8, mask, MASKED), _read_pairs(ptrs + 24, mask, MASKED))
    return tl.join(even, odd)


@triton.jit
def _columns(pairs, factor, WARPS: tl.constexpr):
    """What `_read_block` gives times each lane's factor to [WARPS, 128, 8], in the order of `_codes`."""
    factor = factor[:, None, None, None]
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    # From [warp, g, t, J / 2, J % 2, word / 2, word % 2, half].
    x = tl.permute(tl.reshape(tl.join(low, high), (WARPS, 8, 4, 2, 2, 2, 2, 2)), (0, 5, 6, 3, 2, 4, 7, 1))
    return tl.reshape(x, (WARPS, 128, 8))


@triton.jit
def _read_rows(words_ptrs, scale_ptrs, row, stride_w_n, stride_s_n, d, N, there, MASKED: tl.constexpr):
    """Of 256 columns of rows g and g + 8: blocks t and 4 + t, [lanes, 4, rows], and two scales in 16 bits."""
    # Rows beyond the last are the last.
    at_0, at_1 = tl.minimum(row, N - 1).to(tl.int64), tl.minimum(row + 8, N - 1).to(tl.int64)
    words_0 = words_ptrs + (at_0 * stride_w_n + 32 * d)[:, None]
    words_1 = words_ptrs + (at_1 * stride_w_n + 32 * d)[:, None]
    scale_0, scale_1 = scale_ptrs + (at_0 * stride_s_n + 4 * d), scale_ptrs + (at_1 * stride_s_n + 4 * d)
    if MASKED:
        mask = there[:, None]
        first = tl.join(tl.load(words_0, mask=mask, other=0), tl.load(words_1, mask=mask, other=0))
        second = tl.join(tl.load(words_0 + 16, mask=mask, other=0), tl.load(words_1 + 16, mask=mask, other=0))
        scales = tl.join(tl.load(scale_0, mask=there, other=0), tl.load(scale_1, mask=there, other=0))
    else:
        first = tl.join(tl.load(words_0), tl.load(words_1))
        second = tl.join(tl.load(words_0 + 16), tl.load(words_1 + 16))
        scales = tl.join(tl.load(scale_0), tl.load(scale_1))
    return first, second, scales


@triton.jit
def _add(first, second, scales, x_first, x_second, total, WARPS: tl.constexpr):
    """total + the products of 256 columns, [WARPS, 16, block]."""
    acc = tl.zeros((WARPS, 16, 8), dtype=tl.float32)
    acc = tl.dot(_codes(first, WARPS), x_first, acc)
    acc = tl.dot(_codes(second, WARPS), x_second, acc)
    scales = tl.reshape(scales, (WARPS, 8, 4, 2)).to(tl.int32)
    # [warp, g, t, h, low or high]; 2^26 is what codes and x are without.
    factor = tl.join((scales & 0xFF) << 23, (scales & 0xFF00) << 15)
    factor = tl.reshape(tl.permute(factor, (0, 3, 1, 2, 4)), (WARPS, 16, 8)).to(tl.float32, bitcast=True)
    return total + acc * 67108864.0 * factor


@triton.jit
def _is_not_finite(y):
    """Whether any of y is infinite or NaN."""
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) >= 0x7F800000


@triton.jit
def _exact_sums(
    x_ptr, words_ptr, scale_ptr, row, N, stride_w_n, stride_s_n, K: tl.constexpr, WARPS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """16 TILES outputs as `fragments.py` makes them."""
    x_row = x_ptr + row * 0
    acc, _ = sum_slices(
        x_row, x_row, words_ptr, scale_ptr, row, N, stride_w_n, stride_s_n, K, 1, WARPS, TILES, 1, 1, True
    )
    # Each column is the same row of x.
    acc = tl.where(tl.arange(0, 8)[None, None, :] == 0, acc, 0.0)
    return tl.sum(tl.sum(acc, axis=2), axis=0)


@kernel
@triton.jit
def _row_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    experts_ptr,
    y_ptr,
    N,
    limit,
    stride_x,
    stride_w_e,
    stride_w_n,
    stride_s_e,
    stride_s_n,
    second_w,
    second_s,
    share,
    E,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    GLU: tl.constexpr,
    LIMIT: tl.constexpr,
    WARPS: tl.constexpr,
    TILES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """16 TILES outputs of a row, K in turns over the warps; TILES is 1 or 2. GROUPED: each row has an expert.

    GLU: of N outputs of a gated layer, whose weight has N rows for the gate and then N for what it gates. TILES is 2,
    16 of each.
    """
    # Rows of one expert run side by side: what they share is in the cache.
    place = tl.program_id(0)
    wait_for_inputs(OVERLAP)
    if GROUPED:
        expert = tl.load(experts_ptr + place).to(tl.int64)
        if expert >= E:
            return
        words_ptr += expert * stride_w_e
        scale_ptr += expert * stride_s_e
        x_ptr += (place // share).to(tl.int64) * stride_x
    lane = tl.arange(0, 32 * WARPS)
    offs_g, offs_t, warp = lane // 4 % 8, lane % 4, lane // 32
    count: tl.constexpr = 16 if GLU else 16 * TILES
    start_n = tl.program_id(1) * count
    row = start_n + offs_g
    # A lane gives the product x for column g, which is block g of eight and the weight's from lanes with g % 4.
    own = tl.where(offs_t == offs_g % 4, 0x7180, 0)
    factor_first = tl.where(offs_g < 4, own, 0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    factor_second = tl.where(offs_g < 4, 0, own).to(tl.int16).to(tl.bfloat16, bitcast=True)
    x_ptrs = (x_ptr + 256 * warp + 32 * offs_g)[:, None] + tl.arange(0, 8)
    words_ptrs = (words_ptr + 32 * warp + 4 * offs_t)[:, None] + tl.arange(0, 4)
    scale_ptrs = scale_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (4 * warp + offs_t)
    stride_s = stride_s_n // 2
    # The second tile.
    row_1, words_ptrs_1, scale_ptrs_1 = row + 16, words_ptrs, scale_ptrs
    if GLU:
        row_1 = row
        words_ptrs_1 += second_w
        scale_ptrs_1 += second_s // 2
    total = tl.zeros((WARPS, 16, 8), dtype=tl.float32)
    total_1 = total
    doubles: tl.constexpr = K // 256
    masked: tl.constexpr = doubles % WARPS != 0
    if AHEAD:
        there = warp < doubles
        a, b, s = _read_rows(words_ptrs, scale_ptrs, row, stride_w_n, stride_s, 0, N, there, masked)
        if TILES == 2:
            a_1, b_1, s_1 = _read_rows(words_ptrs_1, scale_ptrs_1, row_1, stride_w_n, stride_s, 0, N, there, masked)
    for d in range(0, doubles, WARPS):
        there = d + warp < doubles
        pairs = _read_block(x_ptrs + 256 * d, there[:, None], masked)
        # The last turn reads ahead what it has.
        next_d = tl.minimum(d + WARPS, (doubles - 1) // WARPS * WARPS) if AHEAD else d
        there = next_d + warp < doubles
        c, e, f = _read_rows(words_ptrs, scale_ptrs, row, stride_w_n, stride_s, next_d, N, there, masked)
        if TILES == 2:
            c_1, e_1, f_1 = _read_rows(
                words_ptrs_1, scale_ptrs_1, row_1, stride_w_n, stride_s, next_d, N, there, masked
            )
        if not AHEAD:
            a, b, s = c, e, f
            if TILES == 2:
                a_1, b_1, s_1 = c_1, e_1, f_1
        x_first, x_second = _columns(pairs, factor_first, WARPS), _columns(pairs, factor_second, WARPS)
        total = _add(a, b, s, x_first, x_second, total, WARPS)
        if TILES == 2:
            total_1 = _add(a_1, b_1, s_1, x_first, x_second, total_1, WARPS)
        if AHEAD:
            a, b, s = c, e, f
            if TILES == 2:
                a_1, b_1, s_1 = c_1, e_1, f_1
    y = tl.sum(tl.sum(total, axis=2), axis=0)
    offs_n = start_n + tl.arange(0, count)
    mask_n = offs_n < N
    if GLU:
        u = tl.sum(tl.sum(total_1, axis=2), axis=0)
        if _is_not_finite(y) | _is_not_finite(u):
            y = _exact_sums(x_ptr, words_ptr, scale_ptr, row, N, stride_w_n, stride_s_n, K, WARPS, 1)
            words_ptr, scale_ptr = words_ptr + second_w, scale_ptr + second_s
            u = _exact_sums(x_ptr, words_ptr, scale_ptr, row, N, stride_w_n, stride_s_n, K, WARPS, 1)
        if LIMIT:
            y, u = limit_both(y, u, limit)
        y = silu(y) * u
    else:
        if TILES == 2:
            y = tl.reshape(tl.permute(tl.join(y, tl.sum(tl.sum(total_1, axis=2), axis=0)), (1, 0)), (32,))
        if _is_not_finite(y):
            y = _exact_sums(x_ptr, words_ptr, scale_ptr, row, N, stride_w_n, stride_s_n, K, WARPS, TILES)
    if BIAS:
        y += tl.load(bias_ptr + offs_n.to(tl.int64), mask=mask_n, other=0.0).to(tl.float32)
    tl.store(y_ptr + place.to(tl.int64) * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask_n)


@dataclass(frozen=True)
class Cut:
    """How a row's product is cut: warps over K, 16s of outputs (1 or 2), whether a turn's weights are read ahead."""

    warps: int
    tiles: int
    ahead: bool


def cut(arch: Architecture, N: int, K: int, rows: int, gated: bool = False) -> Cut:
    """By times on an H200, but for what few programs get; of a gated layer N counts what comes out."""
    few = cdiv(N, 32) * rows < 2 * arch.units
    if K % (4 * COLUMNS):
        # Four warps would have nothing to do in a part of the last turn.
        return Cut(2, 2 if gated else 1, True)
    warps = 8 if few and K >= 8 * COLUMNS else 4
    return Cut(warps, 2 if gated or not few else 1, warps * COLUMNS < K)


def suits(x: Tensor, scale: Tensor) -> bool:
    """Whether this kernel takes rows of x: bf16, whole turns of a warp, and scales that can be read in twos."""
    K = x.shape[-1]
    even = all(stride % 2 == 0 for stride in (*scale.stride()[:-1], scale.storage_offset()))
    return x.dtype == torch.bfloat16 and even and (K % (4 * COLUMNS) == 0 or (K % COLUMNS == 0 and K > 8 * COLUMNS))


def launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    experts: Tensor | None = None,
    share: int = 1,
) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype: of x's one row, or with experts as `launch_slices`."""
    if suits(x, scale):
        _launch(x, packed, scale, bias, y, experts, share, False, None)
    else:
        launch_slices(x, packed, scale, bias, y, experts, share)


def launch_gated(
    x: Tensor, packed: Tensor, scale: Tensor, y: Tensor, experts: Tensor, share: int, limit: float | None
) -> None:
    """Fill y, contiguous [rows, N], of weights with 2 N rows: silu(first half) * second half, within a limit.

    Only of what `suits`.
    """
    _launch(x, packed, scale, None, y, experts, share, True, limit)


def _launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    experts: Tensor | None,
    share: int,
    gated: bool,
    limit: float | None,
) -> None:
    for hopper in (hopper_row, hopper_row_fp8):
        if hopper.takes(x, packed, scale, y):
            hopper.launch(x, packed, scale, bias, y, experts, share, gated, limit)
            return
    N, K = y.shape[-1], x.shape[-1]
    rows = y.numel() // N
    words, grouped = packed.view(torch.int32), experts is not None
    how = cut(architecture(x.device), N, K, rows, gated)
    # The experts' products come one after another. Alone and among other kernels it gains nothing.
    overlap = overlap_options(x.device) if grouped else {}
    with on_device_of(x):
        _row_kernel[(rows, cdiv(N, 16 if gated else 16 * how.tiles))](
            x,
            words,
            scale,
            x if bias is None else bias,
            x if experts is None else experts,
            y,
            N,
            0.0 if limit is None else limit,
            x.stride(0) if grouped else 0,
            words.stride(0) if grouped else 0,
            words.stride(-2),
            scale.stride(0) if grouped else 0,
            scale.stride(-2),
            N * words.stride(-2) if gated else 0,
            N * scale.stride(-2) if gated else 0,
            share,
            packed.shape[0] if grouped else 1,
            K=K,
            BIAS=bias is not None,
            GROUPED=grouped,
            GLU=gated,
            LIMIT=limit is not None,
            WARPS=how.warps,
            TILES=how.tiles,
            AHEAD=how.ahead,
            OVERLAP=bool(overlap),
            num_warps=how.warps,
            num_stages=1,
            **overlap,
        )
