"""Rows of x against a weight in MXFP4 on NVIDIA's tensor cores, the weight decoded in the lanes that multiply it.

Such a product takes a factor from registers: of 16 rows and 16 columns lane 4 g + t gives rows g and g + 8, in columns
that t determines. Here a lane reads a block of 32 codes of a row, 16 bytes, and what it decodes is what it gives.
Those are not the columns that the product means, but of a sum the order is free: it is x's columns that are brought
into the weight's order, in registers for a few rows, in memory for many. Nothing of the weight moves between lanes,
which takes more time than decoding it. The results do not depend on any of this: where a compiler lays out registers
in another way it adds the moves.

Used by the linear layers and by the grouped one, whose rows each have an expert or are sorted by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.kernels.decoding import code_pair
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_few
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.tiles import PARTS, Groups, add_parts, rest_of, top_of

# Rows of x that the kernel without shared memory takes.
LARGEST_SLICED = 16
# Rows up to which the weight is decoded in registers; from there on to memory, for the vendor's product.
LARGEST_TILED = 256


@triton.jit
def _read(ptrs, mask, MASKED: tl.constexpr):
    return tl.load(ptrs, mask=mask, other=0) if MASKED else tl.load(ptrs)


@triton.jit
def _read_rows(ptrs_0, ptrs_1, ptrs_2, ptrs_3, at, mask, MASKED: tl.constexpr, PAIRS: tl.constexpr):
    """The same place in rows g, g + 8 and, of two pairs, g + 16 and g + 24; the rows come last."""
    values = tl.join(_read(ptrs_0 + at, mask, MASKED), _read(ptrs_1 + at, mask, MASKED))
    if PAIRS == 2:
        values = tl.join(values, tl.join(_read(ptrs_2 + at, mask, MASKED), _read(ptrs_3 + at, mask, MASKED)))
    return values


@triton.jit
def _halves(words, factor, rest, J: tl.constexpr, LARGE: tl.constexpr):
    """Nibbles J and J + 4 of words, decoded; they come last. The high one first makes one multiplication of both."""
    pair = code_pair(words, J)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    if LARGE:
        high *= rest
        low *= rest
    return tl.join(low, high)


@triton.jit
def _decode(words, scale, WARPS: tl.constexpr, PAIRS: tl.constexpr, LARGE: tl.constexpr):
    """Words [lanes, 4, rows] and scales [lanes, rows] to [warp, g, t, word, rows, half, J]: bf16, halves J and J + 4.

    The codes are times 2^-126, which scales up to 2 make good: 2^(scale - 1) is then a bf16. LARGE for others.
    """
    words = tl.reshape(words, (WARPS, 8, 4, 4, 2, PAIRS))
    scale = tl.reshape(scale, (WARPS, 8, 4, 1, 2, PAIRS)).to(tl.int32)
    factor = ((tl.minimum(scale, 128) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    rest = factor
    if LARGE:
        rest = tl.where(scale == 255, 0x7FC0, (tl.maximum(scale, 128) - 1) << 7)
        rest = rest.to(tl.int16).to(tl.bfloat16, bitcast=True)
    even = tl.join(_halves(words, factor, rest, 0, LARGE), _halves(words, factor, rest, 1, LARGE))
    odd = tl.join(_halves(words, factor, rest, 2, LARGE), _halves(words, factor, rest, 3, LARGE))
    return tl.join(even, odd)


@triton.jit
def _multiply_parts(w, x, acc, PARTS: tl.constexpr):
    """acc + w x, of x in PARTS bf16."""
    if PARTS == 1:
        acc = tl.dot(w, x, acc)
    else:
        x = x.to(tl.float32)
        top = top_of(x)
        acc = tl.dot(w, top, acc)
        x = rest_of(x, top)
        top = top_of(x)
        acc = tl.dot(w, top, acc)
        if PARTS == 3:
            acc = tl.dot(w, top_of(rest_of(x, top)), acc)
    return acc


@triton.jit
def _find_rows(tile, tile_ends_ptr, row_ends_ptr, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the tiles of all experts in order: whose a tile is, and which of the sorted rows, from where to where."""
    offs_e = tl.arange(0, BLOCK_E)
    tile_ends = tl.load(tile_ends_ptr + offs_e, mask=offs_e < E, other=2**30)
    before = tile_ends <= tile
    expert = tl.sum(before.to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(before, tile_ends, 0), axis=0)
    start = tl.load(row_ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    end = tl.load(row_ends_ptr + expert, mask=expert < E, other=0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


# --------------------------------------------------------------------------------------------------------- a few rows


@triton.jit
def _read_columns(ptrs_0, ptrs_1, at, mask, MASKED: tl.constexpr, GROUPS: tl.constexpr):
    """32 columns of rows g and, of two groups of rows, g + 8: [lanes, 8, (groups,) 2, 2], the words last."""
    if GROUPS == 1:
        even = tl.join(_read(ptrs_0 + at, mask, MASKED), _read(ptrs_0 + (at + 16), mask, MASKED))
        odd = tl.join(_read(ptrs_0 + (at + 8), mask, MASKED), _read(ptrs_0 + (at + 24), mask, MASKED))
    else:
        first = tl.join(_read(ptrs_0 + at, mask, MASKED), _read(ptrs_1 + at, mask, MASKED))
        second = tl.join(_read(ptrs_0 + (at + 8), mask, MASKED), _read(ptrs_1 + (at + 8), mask, MASKED))
        third = tl.join(_read(ptrs_0 + (at + 16), mask, MASKED), _read(ptrs_1 + (at + 16), mask, MASKED))
        fourth = tl.join(_read(ptrs_0 + (at + 24), mask, MASKED), _read(ptrs_1 + (at + 24), mask, MASKED))
        even, odd = tl.join(first, third), tl.join(second, fourth)
    return tl.join(even, odd)


@triton.jit
def sum_slices(
    x_ptrs_0,
    x_ptrs_1,
    words_ptr,
    scale_ptr,
    offs_n,
    N,
    stride_w_n,
    stride_s_n,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    WARPS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """w x^T by the parts of K that warps have, [WARPS, 16 PAIRS, 8 GROUPS], and the largest scale of each lane."""
    lane = tl.arange(0, 32 * WARPS)
    # A warp has 128 columns at a time, and the warps take turns.
    offs_b = lane // 32 * 4 + lane % 4
    blocks: tl.constexpr = K // 32
    step: tl.constexpr = 4 * WARPS
    masked: tl.constexpr = blocks % (TURNS * step) != 0
    # Rows beyond the last are the last.
    at_0, at_1 = tl.minimum(offs_n, N - 1).to(tl.int64), tl.minimum(offs_n + 8, N - 1).to(tl.int64)
    at_2, at_3 = tl.minimum(offs_n + 16, N - 1).to(tl.int64), tl.minimum(offs_n + 24, N - 1).to(tl.int64)
    words_ptrs = (words_ptr + 4 * offs_b)[:, None] + tl.arange(0, 4)
    words_ptrs_0, words_ptrs_1 = words_ptrs + (at_0 * stride_w_n)[:, None], words_ptrs + (at_1 * stride_w_n)[:, None]
    words_ptrs_2, words_ptrs_3 = words_ptrs + (at_2 * stride_w_n)[:, None], words_ptrs + (at_3 * stride_w_n)[:, None]
    scale_ptrs_0, scale_ptrs_1 = scale_ptr + (at_0 * stride_s_n + offs_b), scale_ptr + (at_1 * stride_s_n + offs_b)
    scale_ptrs_2, scale_ptrs_3 = scale_ptr + (at_2 * stride_s_n + offs_b), scale_ptr + (at_3 * stride_s_n + offs_b)
    offs_x = 32 * offs_b[:, None] + tl.arange(0, 8)
    x_ptrs_0, x_ptrs_1 = x_ptrs_0[:, None] + offs_x, x_ptrs_1[:, None] + offs_x
    acc = tl.zeros((WARPS, 16 * PAIRS, 8 * GROUPS), dtype=tl.float32)
    largest = tl.zeros((32 * WARPS, 2 * PAIRS), dtype=tl.int32)
    for start in range(0, blocks, TURNS * step):
        for turn in tl.static_range(TURNS):
            b = start + turn * step
            there = b + offs_b < blocks
            words = _read_rows(
                words_ptrs_0, words_ptrs_1, words_ptrs_2, words_ptrs_3, 4 * b, there[:, None], masked, PAIRS
            )
            scale = _read_rows(scale_ptrs_0, scale_ptrs_1, scale_ptrs_2, scale_ptrs_3, b, there, masked, PAIRS)
            x = _read_columns(x_ptrs_0, x_ptrs_1, 32 * b, there[:, None], masked, GROUPS)
            # [warp, rows, h, g, word, t, j1, j0, half] and [warp, word, t, j1, j0, half, rows, g]: a word a lane.
            w = _decode(words, scale, WARPS, PAIRS, LARGE)
            w = tl.reshape(tl.permute(w, (0, 5, 4, 1, 3, 2, 8, 7, 6)), (WARPS, 16 * PAIRS, 128))
            columns = tl.permute(tl.reshape(x, (WARPS, 8, 4, 2, 2, 2, GROUPS, 2, 2)), (0, 7, 8, 2, 4, 5, 3, 6, 1))
            acc = _multiply_parts(w, tl.reshape(columns, (WARPS, 128, 8 * GROUPS)), acc, PARTS)
            largest = tl.maximum(largest, tl.reshape(scale, (32 * WARPS, 2 * PAIRS)).to(tl.int32))
    return acc, tl.max(largest, axis=1)


@kernel
@triton.jit
def _sliced_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    order_ptr,
    row_ends_ptr,
    tile_ends_ptr,
    y_ptr,
    rows,
    N,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_w_e,
    stride_w_n,
    stride_s_e,
    stride_s_n,
    share,
    E,
    K: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WARPS: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUPS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """16 PAIRS outputs of up to 8 GROUPS rows, K in slices over the warps.

    GROUPED is 0; 1 where each row has an expert, which order_ptr holds; 2 where order_ptr sorts rows by expert.
    """
    tile = tl.program_id(1)
    lane = tl.arange(0, 32 * WARPS)
    offs_g, offs_m = lane // 4 % 8, tl.arange(0, 8 * GROUPS)
    if GROUPED == 0:
        first, end = tile * (8 * GROUPS), rows
    elif GROUPED == 1:
        expert = tl.load(order_ptr + tile).to(tl.int64)
        if expert >= E:
            return
        first, end = tile, tile + 1
    else:
        expert, first, end = _find_rows(tile, tile_ends_ptr, row_ends_ptr, E, BLOCK_E, 8 * GROUPS)
        if expert >= E:
            return
        expert = expert.to(tl.int64)
    if GROUPED > 0:
        words_ptr += expert * stride_w_e
        scale_ptr += expert * stride_s_e
    # Rows beyond the last are the last.
    row_0, row_1 = tl.minimum(first + offs_g, end - 1), tl.minimum(first + offs_g + 8, end - 1)
    mask_m = first + offs_m < end
    if GROUPED == 2:
        row_0, row_1 = tl.load(order_ptr + row_0), tl.load(order_ptr + row_1)
        place = tl.load(order_ptr + first + offs_m, mask=mask_m, other=0).to(tl.int64)
    else:
        place = (first + offs_m).to(tl.int64)
    if GROUPED > 0:
        row_0, row_1 = row_0 // share, row_1 // share
    x_ptrs_0 = x_ptr + row_offset(row_0, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    x_ptrs_1 = x_ptr + row_offset(row_1, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    start_n = tl.program_id(0) * (16 * PAIRS)
    offs_n = start_n + offs_g
    acc, largest = sum_slices(
        x_ptrs_0,
        x_ptrs_1,
        words_ptr,
        scale_ptr,
        offs_n,
        N,
        stride_w_n,
        stride_s_n,
        K,
        PARTS,
        WARPS,
        PAIRS,
        GROUPS,
        TURNS,
        False,
    )
    if tl.max(largest, axis=0) > 128:
        acc, largest = sum_slices(
            x_ptrs_0,
            x_ptrs_1,
            words_ptr,
            scale_ptr,
            offs_n,
            N,
            stride_w_n,
            stride_s_n,
            K,
            PARTS,
            WARPS,
            PAIRS,
            GROUPS,
            TURNS,
            True,
        )
    y = tl.sum(acc, axis=0)
    offs_n = start_n + tl.arange(0, 16 * PAIRS).to(tl.int64)
    mask_n = offs_n < N
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + place[None, :] * N + offs_n[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@dataclass(frozen=True)
class Slices:
    """How few rows are cut: warps over K, pairs of eight outputs (1 or 2), turns of the warps that are written out."""

    warps: int
    pairs: int
    turns: int


def slices(arch: Architecture, M: int, N: int, K: int, row_tiles: int) -> Slices:
    """For tiles of M rows, 8 or 16. By times on an H200, but for the warps of few programs."""
    pairs = 1 if M == 8 and (K <= 1024 or cdiv(N, 32) * row_tiles < 2 * arch.units) else 2
    warps = 4 if K % 512 == 0 else 2
    if cdiv(N, 16 * pairs) * row_tiles < 2 * arch.units and K >= 2048:
        warps *= 2
    turns = cdiv(K, 128 * warps)
    return Slices(warps, pairs, next((n for n in (3, 2) if turns % n == 0), 1))


def launch_slices(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    experts: Tensor | None = None,
    share: int = 1,
    groups: Groups | None = None,
) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype.

    With experts, one a row, row i reads row i // share of x; with groups the rows are sorted by expert.
    """
    if experts is None and groups is None and hopper_few.takes(x, packed, scale):
        hopper_few.launch(x, packed, scale, bias, y)
        return
    N, K = packed.shape[-2], x.shape[-1]
    rows = y.numel() // N
    sizes, (stride_x,) = row_strides(x)  # type: ignore[misc]
    words = packed.view(torch.int32)
    E, order, row_ends, tile_ends, mode = 1, x, x, x, 0
    M = rows
    if experts is not None:
        E, order, mode, M = packed.shape[0], experts, 1, 1
    elif groups is not None:
        E, mode = packed.shape[0], 2
        order, row_ends, share = groups.order, groups.row_ends, groups.share
        M = cdiv(rows, E)
    block_m = 8 if M <= 8 else 16
    row_tiles = cdiv(rows, block_m)
    if experts is not None:
        row_tiles = rows
    elif groups is not None:
        row_tiles, tile_ends = groups.tiles(rows, block_m)
    cut = slices(architecture(x.device), block_m, N, K, row_tiles)
    with on_device_of(x):
        _sliced_kernel[(cdiv(N, 16 * cut.pairs), row_tiles)](
            x,
            words,
            scale,
            x if bias is None else bias,
            order,
            row_ends,
            tile_ends,
            y,
            rows,
            N,
            sizes[1],
            sizes[2],
            *stride_x,
            words.stride(0) if mode else 0,
            words.stride(-2),
            scale.stride(0) if mode else 0,
            scale.stride(-2),
            share,
            E,
            K=K,
            DIMS=dims_used(sizes),
            PARTS=PARTS[x.dtype],
            BIAS=bias is not None,
            GROUPED=mode,
            BLOCK_E=next_power_of_2(E) if mode == 2 else 1,
            WARPS=cut.warps,
            PAIRS=cut.pairs,
            GROUPS=block_m // 8,
            TURNS=cut.turns,
            num_warps=cut.warps,
            # Copies ahead to shared memory, where x is what all programs read, are many times slower.
            num_stages=1,
        )


# ---------------------------------------------------------------------------------------------------------- many rows


@kernel
@triton.jit
def _order_kernel(
    x_ptr,
    y_ptr,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    part_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A row of x in PARTS bf16 to y, [PARTS, .., COLUMNS], in the order of `_tile_kernel`, with zeros beyond K."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at = row_offset(row, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    x = tl.load(x_ptr + x_at + offs_k, mask=offs_k < K, other=0.0)
    # [.., t, word, half, J] to [.., word, J, t, half]: lane t has two columns in eight.
    x = tl.permute(tl.reshape(x, (BLOCK_K // 128, 4, 4, 2, 4)), (0, 2, 4, 1, 3))
    x = tl.reshape(x, (BLOCK_K,))
    y_ptrs = y_ptr + row * COLUMNS + offs_k
    mask = offs_k < COLUMNS
    if PARTS == 1:
        tl.store(y_ptrs, x, mask=mask)
    else:
        x = x.to(tl.float32)
        for part in tl.static_range(PARTS):
            top = top_of(x)
            tl.store(y_ptrs + part * part_stride, top, mask=mask)
            x = rest_of(x, top)


@kernel
@triton.jit
def _tile_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    rows,
    N,
    stride_w_n,
    stride_s_n,
    part_stride,
    row_tiles,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """16 WARPS outputs of BLOCK_M rows over one of SPLIT parts of K, with x as `_order_kernel` leaves it."""
    pid, part = tl.program_id(0), tl.program_id(1)
    # Tiles of the same weights run side by side.
    tile, start_n = pid % row_tiles, pid // row_tiles * (16 * WARPS)
    offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_ptrs = x_ptr + offs_m[:, None] * COLUMNS + tl.arange(0, 128)[None, :]
    length: tl.constexpr = (COLUMNS // 128 + SPLIT - 1) // SPLIT * 4
    first = part * length
    last = tl.minimum(first + length, COLUMNS // 32)
    lane = tl.arange(0, 32 * WARPS)
    offs_b = lane % 4
    blocks: tl.constexpr = K // 32
    # Rows beyond the last are the last.
    offs_l = start_n + lane // 32 * 16 + lane // 4 % 8
    at_0, at_1 = tl.minimum(offs_l, N - 1).to(tl.int64), tl.minimum(offs_l + 8, N - 1).to(tl.int64)
    words_ptrs = (words_ptr + 4 * offs_b)[:, None] + tl.arange(0, 4)
    words_ptrs_0, words_ptrs_1 = words_ptrs + (at_0 * stride_w_n)[:, None], words_ptrs + (at_1 * stride_w_n)[:, None]
    scale_ptrs_0, scale_ptrs_1 = scale_ptr + (at_0 * stride_s_n + offs_b), scale_ptr + (at_1 * stride_s_n + offs_b)
    now = first + offs_b < blocks
    scale = tl.join(_read(scale_ptrs_0 + first, now, True), _read(scale_ptrs_1 + first, now, True))
    acc = tl.zeros((16 * WARPS, BLOCK_M), dtype=tl.float32)
    for b in tl.range(first, last, 4, num_stages=STAGES):
        there, more = (b + offs_b < blocks)[:, None], b + 4 + offs_b < blocks
        words_0 = _read(words_ptrs_0 + 4 * b, there, blocks % 4 != 0)
        words_1 = _read(words_ptrs_1 + 4 * b, there, blocks % 4 != 0)
        # [warp, rows, g, word, j1, j0, t, half]
        w = tl.permute(_decode(tl.join(words_0, words_1), scale, WARPS, 1, True), (0, 5, 4, 1, 3, 8, 7, 2, 6))
        w = tl.reshape(w, (16 * WARPS, 128))
        for part_x in tl.static_range(PARTS):
            acc = tl.dot(w, tl.trans(tl.load(x_ptrs + 32 * b + part_x * part_stride)), acc)
        # Nothing, which the compiler finds out at the end. Until then it is a reason to wait for the product: with
        # Triton 3.6 the next turn would decode into registers that the matrix unit has yet to read.
        acc = tl.where((b & 3) < 4, acc, 0.0)
        # Bytes are not copied ahead by the compiler.
        scale = tl.join(_read(scale_ptrs_0 + (b + 4), more, True), _read(scale_ptrs_1 + (b + 4), more, True))
    offs_n = start_n + tl.arange(0, 16 * WARPS).to(tl.int64)
    mask_n = offs_n < N
    y = acc
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + (part.to(tl.int64) * rows + offs_m)[None, :] * N + offs_n[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_n[:, None] & (offs_m < rows)[None, :])


@dataclass(frozen=True)
class Tile:
    """How many rows are cut: rows of a program, warps with 16 outputs each, parts of K, steps that are copied ahead.

    `registers` is the most that a thread may have, for several programs to run side by side; 0 for no limit.
    """

    block_m: int
    warps: int
    split: int = 1
    stages: int = 3
    registers: int = 0


def tile(arch: Architecture, M: int, N: int, K: int, parts: int) -> Tile:
    """For M rows of x in some parts."""
    if M <= 64:
        return Tile(32 if M <= 32 else 64, 4, _split(2 * arch.units, cdiv(N, 64), K))
    split = _split(arch.units // 2, cdiv(N, 128), K)
    if parts == 1:
        # Two programs share a unit: one decodes while the other multiplies.
        return Tile(128, 8, split, registers=128)
    # The parts of x that are copied ahead fill the shared memory.
    block_m = min(128 if M <= 128 else 256, next_power_of_2(256 // parts + 1) // 2)
    return Tile(block_m, 8, split)


def _split(wanted: int, tiles: int, K: int) -> int:
    """Parts of K, a power of two, for the wanted number of programs, each with some of K left."""
    split = 1
    while split * tiles < wanted and 2 * split * 512 <= K:
        split *= 2
    return split


def launch_tiles(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    cut: Tile,
) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype."""
    N, K = packed.shape[0], x.shape[-1]
    rows = y.numel() // N
    sizes, (stride_x,) = row_strides(x)  # type: ignore[misc]
    words = packed.view(torch.int32)
    row_tiles = cdiv(rows, cut.block_m)
    columns, parts, block_k = cdiv(K, 128) * 128, PARTS[x.dtype], min(1024, next_power_of_2(cdiv(K, 128)) * 128)
    # Tiles are read whole.
    ordered = torch.empty((parts, row_tiles * cut.block_m, columns), dtype=torch.bfloat16, device=x.device)
    target = y
    if cut.split > 1:
        target = torch.empty((cut.split, rows, N), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _order_kernel[(rows, cdiv(columns, block_k))](
            x,
            ordered,
            sizes[1],
            sizes[2],
            *stride_x,
            ordered.stride(0),
            K=K,
            COLUMNS=columns,
            DIMS=dims_used(sizes),
            PARTS=parts,
            BLOCK_K=block_k,
            num_warps=4,
        )
        _tile_kernel[(row_tiles * cdiv(N, 16 * cut.warps), cut.split)](
            ordered,
            words,
            scale,
            x if bias is None else bias,
            target,
            rows,
            N,
            words.stride(0),
            scale.stride(0),
            ordered.stride(0),
            row_tiles,
            K=K,
            COLUMNS=columns,
            SPLIT=cut.split,
            PARTS=parts,
            BIAS=bias is not None and cut.split == 1,
            WARPS=cut.warps,
            BLOCK_M=cut.block_m,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **({"maxnreg": cut.registers} if cut.registers else {}),
        )
    if cut.split > 1:
        add_parts(target, bias, y)
