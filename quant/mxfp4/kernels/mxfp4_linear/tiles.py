"""Several rows of x against a weight in MXFP4 on the matrix units; the weight is decoded in registers.

Used by the linear layers on Intel GPUs and by the grouped one, whose rows are sorted by expert. Operands are bf16,
which holds every number of the weight; a wider x is a sum of two or three bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.kernels.decoding import high_number, low_number, power

# bf16 that add up to a number: 8 bits of the mantissa each.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


@triton.jit
def _multiply_scaled(x, packed, scale, acc, PARTS: tl.constexpr):
    """acc + x W^T, of x [M, K] in PARTS bf16, codes [N, K/2] and scales [N, K/32]."""
    packed = tl.trans(packed)
    if PARTS == 1:
        acc = tl.dot_scaled(x, None, "bf16", packed, scale, "e2m1", acc, fast_math=True)
    else:
        x = x.to(tl.float32)
        top = top_of(x)
        acc = tl.dot_scaled(top, None, "bf16", packed, scale, "e2m1", acc, fast_math=True)
        x = rest_of(x, top)
        top = top_of(x)
        acc = tl.dot_scaled(top, None, "bf16", packed, scale, "e2m1", acc, fast_math=True)
        if PARTS == 3:
            acc = tl.dot_scaled(top_of(rest_of(x, top)), None, "bf16", packed, scale, "e2m1", acc, fast_math=True)
    return acc


@triton.jit
def _multiply_parts(x, w, acc, PARTS: tl.constexpr):
    """acc + x W^T, of x [M, K] in PARTS bf16 and w [K, N], bf16."""
    if PARTS == 1:
        acc = tl.dot(x, w, acc)
    else:
        x = x.to(tl.float32)
        top = top_of(x)
        acc = tl.dot(top, w, acc)
        x = rest_of(x, top)
        top = top_of(x)
        acc = tl.dot(top, w, acc)
        if PARTS == 3:
            acc = tl.dot(top_of(rest_of(x, top)), w, acc)
    return acc


@triton.jit
def top_of(x):
    """The first 8 bits of the mantissa of an fp32, as bf16."""
    return ((x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def rest_of(x, top):
    """What top_of left over; nothing of an infinity."""
    wide = top.to(tl.float32)
    return tl.where(wide == x, 0.0, x - wide)


@kernel
@triton.jit
def _tile_kernel(
    x_ptr,
    packed_ptr,
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
    stride_p_e,
    stride_p_n,
    stride_s_e,
    stride_s_n,
    share,
    row_tiles,
    E,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    DIMS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of y over one of SPLIT parts of K; rows of one expert where GROUPED."""
    pid, part = tl.program_id(0), tl.program_id(1)
    # Tiles of the same weights run side by side.
    tile, pid_n = pid % row_tiles, pid // row_tiles
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    at_n = offs_n.to(tl.int64)
    packed_ptrs = packed_ptr + at_n[:, None] * stride_p_n + tl.arange(0, BLOCK_K // 2)[None, :]
    scale_at = at_n * stride_s_n
    if GROUPED:
        # The tiles of all experts in order: whose this is, and which of its rows.
        offs_e = tl.arange(0, BLOCK_E)
        tile_ends = tl.load(tile_ends_ptr + offs_e, mask=offs_e < E, other=2**30)
        before = tile_ends <= tile
        expert = tl.sum(before.to(tl.int32), axis=0)
        if expert >= E:
            return
        first_tile = tl.max(tl.where(before, tile_ends, 0), axis=0)
        end = tl.load(row_ends_ptr + expert)
        start = tl.load(row_ends_ptr + expert - 1, mask=expert > 0, other=0)
        place = start + (tile - first_tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = place < end
        offs_m = tl.load(order_ptr + place, mask=mask_m, other=0).to(tl.int64)
        packed_ptrs += expert.to(tl.int64) * stride_p_e
        scale_at += expert.to(tl.int64) * stride_s_e
        x_at = row_offset(offs_m // share, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    else:
        offs_m = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < rows
        x_at = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    length: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    first = part * length
    last = tl.minimum(first + length, K)
    offs_k, offs_p = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SCALED:
        offs_b = tl.arange(0, BLOCK_K // 32)
        x_ptrs = x_ptr + x_at[:, None] + offs_k[None, :]
        scale_ptrs = scale_ptr + scale_at[:, None] + offs_b[None, :]
        largest = tl.zeros((BLOCK_N, BLOCK_K // 32), dtype=tl.int32)
        for k in tl.range(first, last, BLOCK_K, num_stages=STAGES):
            if K % BLOCK_K == 0:
                packed = tl.load(packed_ptrs + k // 2, mask=mask_n[:, None], other=0)
                scale = tl.load(scale_ptrs + k // 32, mask=mask_n[:, None], other=0)
                x = tl.load(x_ptrs + k, mask=mask_m[:, None], other=0.0)
            else:
                mask_p, mask_b, mask_k = k // 2 + offs_p < K // 2, k // 32 + offs_b < K // 32, k + offs_k < K
                packed = tl.load(packed_ptrs + k // 2, mask=mask_n[:, None] & mask_p[None, :], other=0)
                scale = tl.load(scale_ptrs + k // 32, mask=mask_n[:, None] & mask_b[None, :], other=0)
                x = tl.load(x_ptrs + k, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            largest = tl.maximum(largest, scale.to(tl.int32))
            acc = _multiply_scaled(x, packed, scale, acc, PARTS)
        # dot_scaled is free to take a scale of 255 for infinity.
        acc = tl.where((tl.max(largest, axis=1) == 255)[None, :], float("nan"), acc)
    else:
        # The even columns, whose codes are low in their bytes, and then the odd ones.
        x_ptrs = x_ptr + x_at[:, None] + 2 * offs_p[None, :]
        scale_ptrs = scale_ptr + scale_at[:, None] + (offs_p // 16)[None, :]
        for k in range(first, last, BLOCK_K):
            mask_p = k // 2 + offs_p < K // 2
            mask_w, mask_x = mask_n[:, None] & mask_p[None, :], mask_m[:, None] & mask_p[None, :]
            codes = tl.load(packed_ptrs + k // 2, mask=mask_w, other=0).to(tl.int32)
            scale = power(tl.load(scale_ptrs + k // 32, mask=mask_w, other=0))
            w = (low_number(codes, False) * scale).to(tl.bfloat16)
            acc = _multiply_parts(tl.load(x_ptrs + k, mask=mask_x, other=0.0), tl.trans(w), acc, PARTS)
            w = (high_number(codes, False) * scale).to(tl.bfloat16)
            acc = _multiply_parts(tl.load(x_ptrs + (k + 1), mask=mask_x, other=0.0), tl.trans(w), acc, PARTS)
    y = acc
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + (part.to(tl.int64) * rows + offs_m)[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@kernel
@triton.jit
def _sum_kernel(parts_ptr, bias_ptr, y_ptr, size, N, SPLIT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of K added up, [SPLIT, size] in fp32, with the bias."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    y = tl.load(parts_ptr + offs, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLIT):
        y += tl.load(parts_ptr + part * size + offs, mask=mask, other=0.0)
    if BIAS:
        y += tl.load(bias_ptr + offs % N, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def _decode_kernel(
    packed_ptr,
    scale_ptr,
    w_ptr,
    N,
    stride_p,
    stride_s,
    K: tl.constexpr,
    DENORMALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_N rows of BLOCK_K columns, decoded to w, contiguous [N, K]."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_p = tl.program_id(1) * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    at_n = offs_n.to(tl.int64)[:, None]
    mask = (offs_n < N)[:, None] & (offs_p < K // 2)[None, :]
    codes = tl.load(packed_ptr + at_n * stride_p + offs_p[None, :], mask=mask, other=0).to(tl.int32)
    scale = power(tl.load(scale_ptr + at_n * stride_s + (offs_p // 16)[None, :], mask=mask, other=0))
    low, high = low_number(codes, DENORMALS) * scale, high_number(codes, DENORMALS) * scale
    w = tl.reshape(tl.join(low.to(w_ptr.dtype.element_ty), high.to(w_ptr.dtype.element_ty)), (BLOCK_N, BLOCK_K))
    tl.store(w_ptr + at_n * K + offs_k[None, :], w, mask=(offs_n < N)[:, None] & (offs_k < K)[None, :])


@dataclass(frozen=True)
class Tile:
    """How the product is cut: rows, outputs and columns of a program, parts of K, warps, loads in flight."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int = 2
    split: int = 1
    # Whether dot_scaled decodes the weight: with Triton 3.3 it does not compile for all Intel GPUs.
    scaled: bool = False
    registers: int = 128


def plan(arch: Architecture, M: int, N: int, K: int, grouped: bool = False) -> Tile:
    """The tile for M rows; of an expert on average, and then over all of K, where they are grouped.

    NVIDIA's have two warps, too few for the asynchronous product of four. With a factor decoded in registers that was
    no faster on an H200 up to 64 rows, and with 128 x 128 outputs its error was, with Triton 3.6, at times half as
    large again as that of the rounding.
    """
    if arch.name == "nvidia":
        block_m, block_n, block_k = (16, 64, 128) if M <= 16 and not grouped else (16, 32, 128)
        if M > 16:
            block_m, block_k = 64, 64
        return Tile(
            block_m, block_n, block_k, 2, split=1 if grouped else _split(arch, cdiv(N, block_n), K), scaled=True
        )
    if M <= 16:
        return Tile(16, 32, 32, 4, split=1 if grouped else _split(arch, cdiv(N, 32), K), registers=256)
    return Tile(32, 32, 32, 4, registers=256)


def _split(arch: Architecture, tiles: int, K: int) -> int:
    """Parts of K, a power of two, for about six programs a unit, each with some of K left."""
    split = 1
    while split * tiles < 4 * arch.units and 2 * split * 512 <= K:
        split *= 2
    return split


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert: the order, and where the rows of each expert end; A rows of y share one of x."""

    order: Tensor
    row_ends: Tensor
    counts: Tensor
    share: int

    def tiles(self, rows: int, block_m: int) -> tuple[int, Tensor]:
        """The largest number of tiles that the experts can have, each with rows of its own, and where they end."""
        ends = ((self.counts + (block_m - 1)) // block_m).cumsum(0, dtype=torch.int32)
        # Every expert with rows may have a tile that is not full.
        return cdiv(rows, block_m) + min(len(self.counts), rows), ends


def launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    cut: Tile,
    groups: Groups | None = None,
) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype."""
    N, K = packed.shape[-2], x.shape[-1]
    rows = y.numel() // N
    sizes, (stride_x,) = row_strides(x)  # type: ignore[misc]
    arch = architecture(x.device)
    row_tiles, E, tile_ends = cdiv(rows, cut.block_m), 1, x
    if groups is not None:
        E = packed.shape[0]
        row_tiles, tile_ends = groups.tiles(rows, cut.block_m)
    target = y
    if cut.split > 1:
        target = torch.empty((cut.split, rows, N), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        _tile_kernel[(row_tiles * cdiv(N, cut.block_n), cut.split)](
            x,
            packed,
            scale,
            x if bias is None else bias,
            x if groups is None else groups.order,
            x if groups is None else groups.row_ends,
            tile_ends,
            target,
            rows,
            N,
            sizes[1],
            sizes[2],
            *stride_x,
            packed.stride(0) if groups is not None else 0,
            packed.stride(-2),
            scale.stride(0) if groups is not None else 0,
            scale.stride(-2),
            1 if groups is None else groups.share,
            row_tiles,
            E,
            K=K,
            SPLIT=cut.split,
            DIMS=dims_used(sizes),
            PARTS=PARTS[x.dtype],
            BIAS=bias is not None and cut.split == 1,
            GROUPED=groups is not None,
            SCALED=cut.scaled,
            BLOCK_E=next_power_of_2(E),
            BLOCK_M=cut.block_m,
            BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **grf_options(cut.registers, arch),
        )
    if cut.split > 1:
        add_parts(target, bias, y)


def add_parts(parts: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fill y, contiguous, with the sum of the parts of K, [split, rows, N] in fp32, and the bias."""
    split, rows, N = parts.shape
    block = 1024
    with on_device_of(y):
        _sum_kernel[(cdiv(rows * N, block),)](
            parts,
            y if bias is None else bias,
            y,
            rows * N,
            N,
            SPLIT=split,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=8,
        )


def decode(packed: Tensor, scale: Tensor, w: Tensor) -> None:
    """Fill w, contiguous [N, K] in any floating dtype."""
    N, K = w.shape
    block_n, block_k = 4, min(512, next_power_of_2(K))
    with on_device_of(w):
        _decode_kernel[(cdiv(N, block_n), cdiv(K, block_k))](
            packed,
            scale,
            w,
            N,
            packed.stride(0),
            scale.stride(0),
            K=K,
            DENORMALS=architecture(w.device).name == "nvidia",
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=4,
        )
