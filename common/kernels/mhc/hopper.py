"""`mhc_post_products` of many tokens on NVIDIA's Hopper, in Gluon.

One warp has boxes of the old streams and of the layer's output copied to shared memory, some steps ahead. The other
warps mix them and put the new streams where the old ones were: from there they are copied to memory, and from there
matrix units multiply them with fn. What `products.py` does as well, but Triton there keeps the new streams in registers
beside the old ones, waits for each product, and reads memory and multiplies in turn.

fn is two numbers of bf16 rather than three, each rounded: a weight is off by 2^-18 of itself at most, and products by
about 1e-7 |x| |w|, which is what sums in fp32 are off by. Streams are `mhc_post`'s but for the order in which
multiplications and additions are fused: one in 60,000 is the next number of bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common import gluonlib
from xpu_ports.common.boxes import Box, boxed
from xpu_ports.common.device import architecture
from xpu_ports.common.gluonlib import allocate_barriers, copy_box, gl, gluon, hopper, init_barriers, store_box
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton

# From here on there are tiles enough for more than a few units.
FROM_TOKENS = 1024
# Rows of fn: two numbers of each are 64 columns of a product.
MOST_ROWS = 32
# Tokens and columns of a box, which is 128 bytes wide, and warps that mix and multiply.
_TOKENS, _COLUMNS, _WARPS = 64, 64, 8
T, C, WARPS = gl.constexpr(_TOKENS), gl.constexpr(_COLUMNS), gl.constexpr(_WARPS)
# Steps of streams that are there at a time, and of fn: as many as shared memory has room for.
SLOTS, FN_SLOTS = gl.constexpr(4), gl.constexpr(2)
# Columns of fn that a program makes pieces of.
_SPLIT_COLUMNS = 1024


@kernel
@triton.jit
def _split_kernel(fn_ptr, pieces_ptr, K, stride_f, BLOCK_K: tl.constexpr):
    """Row r of fn as rows 2 r and 2 r + 1 in bf16, which add up to it."""
    r = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = offs_k < K
    w = tl.load(fn_ptr + r * stride_f + offs_k, mask=mask, other=0.0)
    first = w.to(tl.bfloat16)
    pieces_ptrs = pieces_ptr + 2 * r * K + offs_k
    tl.store(pieces_ptrs, first, mask=mask)
    tl.store(pieces_ptrs + K, (w - first.to(tl.float32)).to(tl.bfloat16), mask=mask)


@gluon.jit
def _copy(y, x, fn, tiles, buffers, barriers, D: gl.constexpr, PART: gl.constexpr, TILES: gl.constexpr):
    """Ask for boxes as there is room: fn's of a step, then the streams' and the output's of each tile."""
    x_buffers, fn_buffers = buffers
    x_ready, x_free, fn_ready, fn_free = barriers
    parts: gl.constexpr = D // PART
    step = 0
    for item in range(gl.program_id(0), tiles * parts, gl.num_programs(0)):
        tile = tiles - 1 - item // parts
        for j in range(PART // C):
            d = item % parts * PART + j * C
            at = step % FN_SLOTS
            hopper.mbarrier.wait(fn_free.index(at), ((step // FN_SLOTS) & 1) ^ 1)
            hopper.mbarrier.expect(fn_ready.index(at), 4 * 64 * C * 2)
            for k in gl.static_range(4):
                copy_box(fn, [0, k * D + d], fn_ready.index(at), fn_buffers.index(at * 4 + k))
            for h in gl.static_range(TILES):
                i = step * TILES + h
                at = i % SLOTS
                row = (tile * TILES + h) * T
                hopper.mbarrier.wait(x_free.index(at), ((i // SLOTS) & 1) ^ 1)
                hopper.mbarrier.expect(x_ready.index(at), 5 * T * C * 2)
                copy_box(y, [row, d], x_ready.index(at), x_buffers.index(at * 5 + 4))
                for k in gl.static_range(4):
                    copy_box(x, [row, k * D + d], x_ready.index(at), x_buffers.index(at * 5 + k))
            step += 1


@gluon.jit
def _shares(post_ptrs, comb_ptrs, mask, K: gl.constexpr):
    """What the output and each stream give to stream K."""
    p = gl.load(post_ptrs + K, mask=mask, other=0.0).to(gl.float32)
    c0 = gl.load(comb_ptrs + K, mask=mask, other=0.0).to(gl.float32)
    c1 = gl.load(comb_ptrs + 4 + K, mask=mask, other=0.0).to(gl.float32)
    c2 = gl.load(comb_ptrs + 8 + K, mask=mask, other=0.0).to(gl.float32)
    c3 = gl.load(comb_ptrs + 12 + K, mask=mask, other=0.0).to(gl.float32)
    return p, c0, c1, c2, c3


@gluon.jit
def _mix(y, x0, x1, x2, x3, shares):
    p, c0, c1, c2, c3 = shares
    out = gl.expand_dims(p, 1) * y
    out += gl.expand_dims(c0, 1) * x0
    out += gl.expand_dims(c1, 1) * x1
    out += gl.expand_dims(c2, 1) * x2
    out += gl.expand_dims(c3, 1) * x3
    # Two at a time: the compiler's own conversions take one each, at a quarter of the rate.
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [out], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _step(pending, acc, squares, row, d, i, step, post_ptr, comb_ptr, out, N, buffers, barriers, D: gl.constexpr,
          FIRST: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """Columns of a tile mixed, while the products of the step before, `pending`, are made and added to its sums.

    FIRST: that step was the last to read its columns of fn.
    """
    x_buffers, fn_buffers = buffers
    x_ready, x_free, fn_ready, fn_free = barriers
    at, at_fn = i % SLOTS, step % FN_SLOTS
    offs_n = row + gl.arange(0, T, gl.SliceLayout(1, ROWS))
    mask = offs_n < N
    post_ptrs, comb_ptrs = post_ptr + offs_n.to(gl.int64) * 4, comb_ptr + offs_n.to(gl.int64) * 16
    shares = (
        _shares(post_ptrs, comb_ptrs, mask, 0),
        _shares(post_ptrs, comb_ptrs, mask, 1),
        _shares(post_ptrs, comb_ptrs, mask, 2),
        _shares(post_ptrs, comb_ptrs, mask, 3),
    )
    hopper.mbarrier.wait(x_ready.index(at), (i // SLOTS) & 1)
    x0 = x_buffers.index(at * 5).load(ROWS).to(gl.float32)
    x1 = x_buffers.index(at * 5 + 1).load(ROWS).to(gl.float32)
    x2 = x_buffers.index(at * 5 + 2).load(ROWS).to(gl.float32)
    x3 = x_buffers.index(at * 5 + 3).load(ROWS).to(gl.float32)
    y = x_buffers.index(at * 5 + 4).load(ROWS).to(gl.float32)
    own = gl.zeros([T, C], gl.float32, ROWS)
    for k in gl.static_range(4):
        mixed = _mix(y, x0, x1, x2, x3, shares[k])
        # A thread has read of the old streams all that it overwrites.
        x_buffers.index(at * 5 + k).store(mixed)
        wide = mixed.to(gl.float32)
        own += wide * wide
    squares += gl.sum(own, axis=1)
    hopper.fence_async_shared()
    # Matrix units cut sums off rather than round them: a step's are added up outside.
    acc += hopper.warpgroup_mma_wait(0, deps=(pending,))
    # The step before is read now, by products and by the copies to memory.
    hopper.tma.store_wait(0)
    # Here all warps wait for each other, so that what they wrote can be read.
    hopper.mbarrier.arrive(x_free.index((i + SLOTS - 1) % SLOTS), count=1, pred=i > 0)
    for k in gl.static_range(4):
        store_box(out, [row, k * D + d], x_buffers.index(at * 5 + k))
    if FIRST:
        hopper.mbarrier.arrive(fn_free.index((step + FN_SLOTS - 1) % FN_SLOTS), count=1, pred=i > 0)
    hopper.mbarrier.wait(fn_ready.index(at_fn), (step // FN_SLOTS) & 1)
    SUM: gl.constexpr = acc.type.layout
    block = gl.zeros([T, 64], gl.float32, SUM)
    for k in gl.static_range(4):
        w = fn_buffers.index(at_fn * 4 + k).permute((1, 0))
        block = hopper.warpgroup_mma(x_buffers.index(at * 5 + k), w, block, use_acc=k > 0, is_async=True)
    return block, acc, squares


@gluon.jit
def _write(acc, squares, part_ptr, row, part, N, R: gl.constexpr, PARTS: gl.constexpr):
    """A tile's products, of which two columns side by side are one row's, and squares."""
    products = gl.sum(gl.reshape(acc, [T, 32, 2]), axis=2)
    LAYOUT: gl.constexpr = products.type.layout
    offs_n = row + gl.arange(0, T, gl.SliceLayout(1, LAYOUT))
    offs_r = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))
    ptrs = part_ptr + (gl.expand_dims((offs_n.to(gl.int64) * PARTS + part) * (R + 1), 1) + gl.expand_dims(offs_r, 0))
    gl.store(ptrs, products, mask=gl.expand_dims(offs_n < N, 1) & gl.expand_dims(offs_r < R, 0))
    FLAT: gl.constexpr = squares.type.layout
    offs_n = row + gl.arange(0, T, FLAT)
    gl.store(part_ptr + ((offs_n.to(gl.int64) * PARTS + part) * (R + 1) + R), squares, mask=offs_n < N)


@gluon.jit
def _multiply(post_ptr, comb_ptr, part_ptr, out, N, tiles, buffers, barriers, R: gl.constexpr, D: gl.constexpr,
              PART: gl.constexpr, TILES: gl.constexpr):  # fmt: skip
    """Mix and multiply what `_copy` brings."""
    PARTS: gl.constexpr = D // PART
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 64 * 4 // WARPS, 16])
    step = 0
    for item in range(gl.program_id(0), tiles * PARTS, gl.num_programs(0)):
        row, part = (tiles - 1 - item // PARTS) * (TILES * T), item % PARTS
        zero = gl.zeros([T, 64], gl.float32, SUM)
        acc_0, acc_1 = zero, zero
        squares_0 = gl.zeros([T], gl.float32, gl.SliceLayout(1, ROWS))
        squares_1 = squares_0
        pending = hopper.warpgroup_mma_init(zero)
        for j in range(PART // C):
            d = part * PART + j * C
            if TILES == 2:
                # What is pending is the other tile's.
                pending, acc_1, squares_0 = _step(
                    pending, acc_1, squares_0, row, d, step * 2, step, post_ptr, comb_ptr, out, N, buffers, barriers,
                    D, True, ROWS,
                )  # fmt: skip
                pending, acc_0, squares_1 = _step(
                    pending, acc_0, squares_1, row + T, d, step * 2 + 1, step, post_ptr, comb_ptr, out, N, buffers,
                    barriers, D, False, ROWS,
                )  # fmt: skip
            else:
                pending, acc_0, squares_0 = _step(
                    pending, acc_0, squares_0, row, d, step, step, post_ptr, comb_ptr, out, N, buffers, barriers,
                    D, True, ROWS,
                )  # fmt: skip
            step += 1
        last = hopper.warpgroup_mma_wait(0, deps=(pending,))
        if TILES == 2:
            _write(acc_1 + last, squares_1, part_ptr, row + T, part, N, R, PARTS)
        else:
            acc_0 += last
        _write(acc_0, squares_0, part_ptr, row, part, N, R, PARTS)
    hopper.tma.store_wait(0)


def _box(constants: object) -> tuple[int, int]:
    return _TOKENS, _COLUMNS


@kernel
@boxed(
    y=Box("N", "columns", "stride_y", _box),
    x=Box("N", "width", "stride_x", _box),
    fn=Box("pieces", "width", "width", _box),
    out=Box("N", "width", "width", _box),
)
@gluon.jit
def _mhc_post_kernel(
    y,
    x,
    fn,
    out,
    post_ptr,
    comb_ptr,
    part_ptr,
    N,
    columns,
    width,
    pieces,
    stride_y,
    stride_x,
    tiles,
    R: gl.constexpr,
    D: gl.constexpr,
    PART: gl.constexpr,
    TILES: gl.constexpr,
):
    """TILES times 64 tokens and PART columns of all streams at a time.

    From the last tokens to the first: who reads the streams next goes the other way.
    """
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [SLOTS * 5, T, C], x.layout)
    fn_buffers = gl.allocate_shared_memory(gl.bfloat16, [FN_SLOTS * 4, 64, C], fn.layout)
    x_ready, x_free = allocate_barriers(SLOTS), allocate_barriers(SLOTS)
    fn_ready, fn_free = allocate_barriers(FN_SLOTS), allocate_barriers(FN_SLOTS)
    init_barriers((x_ready, x_free), SLOTS)
    init_barriers((fn_ready, fn_free), FN_SLOTS)
    hopper.fence_async_shared()
    buffers = (x_buffers, fn_buffers)
    barriers = (x_ready, x_free, fn_ready, fn_free)
    gl.warp_specialize(
        [
            (_multiply, (post_ptr, comb_ptr, part_ptr, out, N, tiles, buffers, barriers, R, D, PART, TILES)),
            (_copy, (y, x, fn, tiles, buffers, barriers, D, PART, TILES)),
        ],
        [1],
        [24],
    )


def refuses(y: Tensor, x: Tensor, fn: Tensor, columns: int) -> str | None:
    """Why the kernel cannot take what `mhc_post_products` takes, with parts of some columns, or None."""
    S, D = x.shape[-2:]
    N = x.shape[:-2].numel()
    if N < FROM_TOKENS:
        return f"{N} tokens, fewer than {FROM_TOKENS}"
    reason = gluonlib.refuses(x.device)
    if reason is not None:
        return reason
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        return f"x and y are {x.dtype} and {y.dtype}, not bfloat16"
    if S != 4 or D % columns or fn.shape[0] > MOST_ROWS:
        return f"{S} streams of {D} columns and {fn.shape[0]} rows"
    merged = row_strides(y, x.select(-2, 0), dims=1)
    if merged is None or x.stride(-2) != D:
        return "tokens or streams are not side by side"
    for t, (stride,), row in zip((y, x), merged[1], (D, S * D), strict=True):
        if t.data_ptr() % 16 or stride % 8 or stride < row:
            return f"tokens, {stride} elements apart, do not begin at multiples of 16 bytes"
    return None


def fills(N: int, parts: int, units: int) -> bool:
    """Whether about every unit has a tile."""
    return cdiv(N, _TOKENS) * parts > 0.9 * units


def tiles_each(N: int, parts: int, units: int) -> int:
    """Tiles of 64 tokens that a program has at a time: two read fn once, one by one more units have work."""
    single, double = (cdiv(cdiv(N, each * _TOKENS) * parts, units) for each in (1, 2))
    return 1 if 1.2 * single < 2 * double else 2


def launch(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor, out: Tensor, part: Tensor) -> None:
    """Fill the streams and, contiguous [..., P, R + 1], the parts of their products with fn."""
    (S, D), R, parts = x.shape[-2:], fn.shape[0], part.shape[-2]
    N, width = x.shape[:-2].numel(), S * D
    _, ((stride_y,), (stride_x,)) = row_strides(y, x.select(-2, 0), dims=1)  # type: ignore[misc]
    units = architecture(x.device).units
    each = tiles_each(N, parts, units)
    tiles = cdiv(N, each * _TOKENS)
    # As few programs as take no longer.
    programs = cdiv(tiles * parts, cdiv(tiles * parts, units))
    with on_device_of(x):
        pieces = torch.empty((2 * R, width), dtype=torch.bfloat16, device=x.device)
        _split_kernel[(R, cdiv(width, _SPLIT_COLUMNS))](
            fn, pieces, width, fn.stride(0), BLOCK_K=_SPLIT_COLUMNS, num_warps=4
        )
        _mhc_post_kernel[(programs,)](
            y,
            x,
            pieces,
            out,
            post,
            comb,
            part,
            N,
            D,
            width,
            2 * R,
            stride_y,
            stride_x,
            tiles,
            R=R,
            D=D,
            PART=D // parts,
            TILES=each,
            num_warps=_WARPS,
        )
