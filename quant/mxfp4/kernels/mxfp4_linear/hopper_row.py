"""One row of x against a weight in MXFP4 on Hopper: all of a program's weights are asked for at once.

The arithmetic is that of `row.py`. What is different is how the weight comes: by asynchronous copies to shared memory,
which take no registers, so that a multiprocessor has 200 KB on their way where registers hold 50. The kernel is started
while the one before it ends (`launch_order.py`) and asks for its weights before it waits for x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.gluonlib import copy_async, gl, gluon, hopper, refuses, seen_as
from xpu_ports.common.kernels.activations import limit_both, silu
from xpu_ports.common.launch_order import overlap_options, wait_for_inputs
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of
from xpu_ports.quant.mxfp4.kernels.decoding import low_number, power

# Columns of x that a warp takes at a time.
COLUMNS = 256
# Columns of x whose weights and x fit into shared memory for several programs.
SMALLEST, LARGEST = 2048, 8192

# Nibbles J and J + 4 of a word where two bf16 have sign, last exponent bits and mantissa, J from 0 to 3. The signs of
# two pairs stand where a selection by bits, one instruction, merges one with its number and drops the other.
_PAIRS = gl.constexpr(
    """{
    .reg .b32 even, odd, high, number, sign;
    and.b32 even, $4, 0x08080808;
    and.b32 odd, $4, 0x80808080;
    shr.u32 high, $4, 8;
    shl.b32 number, $4, 6;
    shl.b32 sign, even, 12;
    lop3.b32 $0, number, sign, 0x01C001C0, 0xE4;
    shl.b32 number, $4, 2;
    shl.b32 sign, odd, 8;
    lop3.b32 $1, number, sign, 0x01C001C0, 0xE4;
    shl.b32 number, high, 6;
    shl.b32 sign, even, 4;
    lop3.b32 $2, number, sign, 0x01C001C0, 0xE4;
    shl.b32 number, high, 2;
    lop3.b32 $3, number, odd, 0x01C001C0, 0xE4;
    }"""
)


# ------------------------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def bits(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def up_to_power(n):
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def words_in_memory(warps, rows):
    # The lowest bit of a row moves its words by 16, so that the two rows that eight lanes read have banks of their own.
    of_rows = [[1, 16], *[[2 << i, 0] for i in range(bits(rows) - 1)]]
    return gl.SharedLinearLayout([*[[0, 1 << i] for i in range(5 + bits(warps))], *of_rows])


@gluon.constexpr_function
def _words_of_lanes(warps, rows):
    # Lane 4 g + t has words 4 t and 16 + 4 t to the next four of rows g and g + 8.
    of_rows = [[8 << i, 0] for i in range(bits(rows) - 3)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    of_warps = [[0, 32 << i] for i in range(bits(warps))]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], *of_rows], lanes, of_warps, [], [rows, 32 * warps])


@gluon.constexpr_function
def _scales_in_memory(rows, width, size):
    # In units of `size` bytes. Eight rows' eight bytes of the same columns have banks of their own.
    chunks, unit = width // 8, 8 // size
    of_rows, move = [], 1
    for i in range(bits(rows)):
        moved = 0
        if i < 3 and width << i >= 128 and move < chunks:
            moved, move = move, 2 * move
        of_rows.append([1 << i, unit * moved])
    return gl.SharedLinearLayout([*[[0, 1 << i] for i in range(bits(unit * chunks))], *of_rows])


@gluon.constexpr_function
def _scales_of_lanes(warps, rows):
    # As the products' sums lie.
    of_rows = [[8 << i, 0] for i in range(bits(rows) - 3)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], *of_rows], lanes, [[0, 8 << i] for i in range(bits(warps))], [], [rows, 8 * warps]
    )


@gluon.constexpr_function
def _x_of_lanes(warps):
    # Lane 4 g + t has block g of its warp's eight, whatever t is: [warp, g, t, column].
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    of_warps = [[1 << i, 0, 0, 0] for i in range(bits(warps))]
    return gl.DistributedLinearLayout([[0, 0, 0, 1 << i] for i in range(5)], lanes, of_warps, [], [warps, 8, 4, 32])


# ------------------------------------------------------------------------------------------------------------ numbers


@gluon.jit
def pairs_of(words):
    """Nibbles J and J + 4 of words as bf16 times 2^-126, in 32 bits; for J from 0 to 3."""
    return gl.inline_asm_elementwise(
        _PAIRS, "=&r,=&r,=&r,=&r,r", [words], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )


@gluon.jit
def _codes(words, WARPS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """[ROWS, WARPS, t, word] to [WARPS, ROWS, 128] bf16 times 2^-126, columns [word, J / 2, J % 2, t, half]."""
    a, b, c, d = pairs_of(words)
    pairs = gl.join(gl.join(a, b), gl.join(c, d))
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    w = gl.permute(gl.join(low, high), (1, 0, 3, 5, 4, 2, 6))
    return gl.convert_layout(gl.reshape(w, (WARPS, ROWS, 128)), layout, assert_trivial=True)


@gluon.jit
def add_exactly(total, code, scale, x_ptrs):
    """total and, as fp32 numbers make them, words [rows, words] of codes with scales times eight columns of x each."""
    factor = power(scale)
    for nibble in range(8):
        x = gl.load(x_ptrs + nibble).to(gl.float32)
        total += low_number(code, True) * factor * x[None, :]
        code = code >> 4
    return total


@gluon.jit
def exact_sums(x_ptr, words, scale_ptr, start, N, stride_s, second, GLU: gl.constexpr, LANES: gl.constexpr):
    """The sums as fp32 numbers make them, of words in shared memory, [turns, rows, words], read as LANES; [rows]."""
    TURNS: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = words.shape[2]
    rows = rows_of(start, N, second, ROWS, GLU, gl.SliceLayout(1, LANES))
    scale_ptrs = scale_ptr + (rows * stride_s)[:, None]
    columns = gl.arange(0, WORDS, gl.SliceLayout(0, LANES))
    total = gl.zeros((ROWS, WORDS), gl.float32, LANES)
    # This is hardly ever run; but a loop here costs what comes before it registers.
    if TURNS <= 8:
        for turn in gl.static_range(TURNS):
            total = _add_turn(total, words, turn, scale_ptrs, columns, x_ptr, LANES)
    else:
        for turn in range(TURNS):
            total = _add_turn(total, words, turn, scale_ptrs, columns, x_ptr, LANES)
    return gl.sum(total, axis=1)


@gluon.jit
def _add_turn(total, words, turn, scale_ptrs, columns, x_ptr, LANES: gl.constexpr):
    at = turn * words.shape[2] + columns
    return add_exactly(total, words.index(turn).load(LANES), gl.load(scale_ptrs + (at // 4)[None, :]), x_ptr + 8 * at)


@gluon.jit
def rows_of(start, N, second, ROWS: gl.constexpr, GLU: gl.constexpr, layout: gl.constexpr):
    """The weight's rows of a program, int64; of a gated layer half of them are `second` further on."""
    at = gl.arange(0, ROWS, layout)
    # Rows beyond the last are the last.
    if GLU:
        half: gl.constexpr = ROWS // 2
        rows = gl.minimum(start + at % half, N - 1).to(gl.int64) + (at // half).to(gl.int64) * second
    else:
        rows = gl.minimum(start + at, N - 1).to(gl.int64)
    return rows


@gluon.jit
def put_outputs(sums, bias_ptr, y_ptr, start, N, limit, BIAS: gl.constexpr, GLU: gl.constexpr, LIMIT: gl.constexpr):
    """A program's outputs from `start` on, of its rows' sums; of a gated layer the gates' sums come first."""
    OUT: gl.constexpr = sums.shape[0] // 2 if GLU else sums.shape[0]
    if GLU:
        gate, up = gl.split(gl.permute(gl.reshape(sums, (2, OUT)), (1, 0)))
        if LIMIT:
            gate, up = limit_both(gate, up, limit)
        y = silu(gate) * up
    else:
        y = sums
    offs_n = start + gl.arange(0, OUT, y.type.layout)
    mask = offs_n < N
    if BIAS:
        y += gl.load(bias_ptr + offs_n.to(gl.int64), mask=mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------------- kernel


@kernel
@gluon.jit
def _hopper_row_kernel(
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
    second,
    share,
    E,
    K: gl.constexpr,
    BIAS: gl.constexpr,
    GROUPED: gl.constexpr,
    GLU: gl.constexpr,
    LIMIT: gl.constexpr,
    WARPS: gl.constexpr,
    ROWS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """ROWS outputs of a row of x, or of a gated layer half as many; K in turns over the warps."""
    TURNS: gl.constexpr = K // (256 * WARPS)
    WORDS: gl.constexpr = 32 * WARPS
    # Scales of a row, up to a power of two.
    SCALES: gl.constexpr = up_to_power(K // 32)
    OUT: gl.constexpr = ROWS // 2 if GLU else ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # x in shared memory, [turn, warp, block, column].
    COPY_X: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    x_shared = gl.allocate_shared_memory(
        gl.bfloat16, [TURNS, WARPS, 8, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    at_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, COPY_X)))[:, None, None]
    at_b = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, COPY_X)))[None, :, None]
    at_c = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, COPY_X)))[None, None, :]
    x_ptrs = 256 * at_w + 32 * at_b + at_c
    # Rows of one expert run side by side: what they share is in the cache.
    place = gl.program_id(0)
    if GROUPED:
        wait_for_inputs(OVERLAP)
        expert = gl.load(experts_ptr + place).to(gl.int64)
        # Asked for before the weights, which the first of them would wait behind.
        x_ptr += (place // share).to(gl.int64) * stride_x
        for turn in gl.static_range(TURNS):
            copy_async(x_shared.index(turn), x_ptr + (turn * 256 * WARPS + x_ptrs))
        if expert >= E:
            # No program ends before its copies.
            hopper.async_copy.commit_group()
            hopper.async_copy.wait_group(0)
            return
        words_ptr += expert * stride_w_e
        scale_ptr += expert * stride_s_e
    start = gl.program_id(1) * OUT
    words = gl.allocate_shared_memory(gl.int32, [TURNS, ROWS, WORDS], words_in_memory(WARPS, ROWS))
    scales = gl.allocate_shared_memory(gl.int64, [ROWS, SCALES // 8], _scales_in_memory(ROWS, SCALES, 8))
    # Scales in eights, words in fours, 16 bytes, of a row side by side.
    few: gl.constexpr = min(32, SCALES // 8)
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 1], [32 // few, few], [WARPS, 1], [1, 0])
    rows_s = rows_of(start, N, second, ROWS, GLU, gl.SliceLayout(1, COPY_S))
    columns_s = gl.arange(0, SCALES // 8, gl.SliceLayout(0, COPY_S))
    eights_ptr = scale_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    scale_ptrs = eights_ptr + (rows_s * (stride_s_n // 8))[:, None] + columns_s[None, :]
    if SCALES * 32 == K:
        copy_async(scales, scale_ptrs)
    else:
        copy_async(scales, scale_ptrs, mask=(columns_s < K // 256)[None, :])
    several: gl.constexpr = min(32, WORDS // 4)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [32 // several, several], [WARPS, 1], [1, 0])
    rows_w = rows_of(start, N, second, ROWS, GLU, gl.SliceLayout(1, COPY))
    words_ptrs = words_ptr + (rows_w * stride_w_n)[:, None] + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
    for turn in gl.static_range(TURNS):
        copy_async(words.index(turn), words_ptrs + turn * WORDS)
        hopper.async_copy.commit_group()
    if not GROUPED:
        # Weights are no other kernel's results.
        wait_for_inputs(OVERLAP)
        for turn in gl.static_range(TURNS):
            x_shared.index(turn).store(gl.load(x_ptr + (turn * 256 * WARPS + x_ptrs)))
    # A lane gives the product x for column g, which is block g of eight and the weight's from lanes with g % 4.
    X: gl.constexpr = _x_of_lanes(WARPS)
    of_t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, X))))
    of_g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    of_t = gl.expand_dims(gl.expand_dims(gl.expand_dims(of_t, 0), 0), 3)
    of_g = gl.expand_dims(gl.expand_dims(gl.expand_dims(of_g, 0), 2), 3)
    # 2^100.
    own = gl.where(of_t == of_g % 4, 0x7180, 0).to(gl.int16).to(gl.bfloat16, bitcast=True)
    # Blocks t are those of columns 0 to 3, blocks 4 + t of the others; in the other four a product means nothing.
    is_first = (gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, MMA))) < 4)[None, None, :]
    scale_bytes = seen_as(scales, gl.uint8, [ROWS, SCALES], _scales_in_memory(ROWS, SCALES, 1))
    total = gl.zeros((WARPS, ROWS, 8), gl.float32, MMA)
    zero = total
    for turn in gl.static_range(TURNS):
        hopper.async_copy.wait_group(TURNS - 1 - turn)
        w = words.index(turn).load(_words_of_lanes(WARPS, ROWS))
        first, second_half = gl.split(gl.permute(gl.reshape(w, (ROWS, WARPS, 2, 4, 4)), (0, 1, 3, 4, 2)))
        scale = scale_bytes.slice(turn * 8 * WARPS, 8 * WARPS, dim=1).load(_scales_of_lanes(WARPS, ROWS))
        scale = gl.permute(gl.reshape(scale, (ROWS, WARPS, 8)), (1, 0, 2))
        scale = gl.convert_layout(scale, MMA, assert_trivial=True)
        x = gl.expand_dims(x_shared.index(turn).load(gl.SliceLayout(2, X)), 2) * own
        # From [warp, g, t, word, half, J / 2, J % 2].
        x = gl.permute(gl.reshape(x, (WARPS, 8, 4, 4, 2, 2, 2)), (0, 3, 5, 6, 2, 4, 1))
        x = gl.convert_layout(gl.reshape(x, (WARPS, 128, 8)), B, assert_trivial=True)
        sums_first = hopper.mma_v2(_codes(first, WARPS, ROWS, A), x, zero)
        sums_second = hopper.mma_v2(_codes(second_half, WARPS, ROWS, A), x, zero)
        # 2^26 is what codes and x are without.
        factor = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        total += gl.where(is_first, sums_first, sums_second) * 67108864.0 * factor
    sums = gl.sum(gl.sum(total, axis=2), axis=0)
    if gl.max(sums.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) >= 0x7F800000:
        # For a scale of NaN, an x that is not finite, or a large one.
        exact = exact_sums(x_ptr, words, scale_ptr, start, N, stride_s_n, second, GLU, _words_of_lanes(WARPS, ROWS))
        sums = gl.convert_layout(exact, sums.type.layout)
    put_outputs(sums, bias_ptr, y_ptr + place.to(gl.int64) * N, start, N, limit, BIAS, GLU, LIMIT)


@dataclass(frozen=True)
class Cut:
    """How a row's product is cut: warps over K, outputs a program."""

    warps: int
    outputs: int


def cut(arch: Architecture, N: int, K: int, grouped: bool) -> Cut:
    """By times on an H200; N counts the weight's rows."""
    if grouped or K < 4096 or K % (8 * COLUMNS):
        return Cut(4, 16)
    programs = cdiv(N, 32)
    # 32 outputs share what is made of x, and two such programs fill a multiprocessor: for all of them at once, or many
    # times so many. Else programs of 16, of which five do.
    even = 0.9 * arch.units <= programs <= 2 * arch.units or programs >= 6 * arch.units
    return Cut(8, 32 if K <= 4096 and even else 16)


def takes(x: Tensor, packed: Tensor, scale: Tensor, y: Tensor) -> bool:
    """Whether this kernel runs here and is meant for rows of x, bf16, and a weight that is copied by 16 bytes.

    y may have any floating dtype.
    """
    K = x.shape[-1]
    if x.dtype != torch.bfloat16 or not SMALLEST <= K <= LARGEST or K % (4 * COLUMNS) or refuses(x.device) is not None:
        return False
    # x is copied like weights for rows with experts.
    return takes_weight(packed, scale) and (packed.dim() == 2 or in_steps(x, 16, 8))


def takes_weight(packed: Tensor, scale: Tensor) -> bool:
    """Whether a weight can be copied by 16 bytes, and asking for all of it at once pays."""
    arch = architecture(packed.device)
    # Of one weight what is more than the shared memory of all multiprocessors is read as fast by `row.py`.
    if packed.dim() == 2 and packed.numel() > 1.25 * arch.units * arch.shared_memory:
        return False
    return in_steps(packed, 64, 16) and in_steps(scale, 8, 8)


def in_steps(t: Tensor, stride: int, offset: int) -> bool:
    """Whether all rows begin at multiples."""
    return all(s % stride == 0 for s in t.stride()[:-1]) and t.storage_offset() % offset == 0


def arguments(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    experts: Tensor | None,
    share: int,
    gated: bool,
    limit: float | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What kernels for a row are given, with the option to start early: by place and by name."""
    N, words, grouped = y.shape[-1], packed.view(torch.int32), experts is not None
    overlap = overlap_options(x.device)
    by_place = (
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
        N,
        share,
        packed.shape[0] if grouped else 1,
    )
    by_name = dict(
        K=x.shape[-1],
        BIAS=bias is not None,
        GROUPED=grouped,
        GLU=gated,
        LIMIT=limit is not None,
        OVERLAP=bool(overlap),
        **overlap,
    )
    return by_place, by_name


def launch(
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
    """Fill y, contiguous [rows, N] in any floating dtype, of what is taken; see `row.launch` and `row.launch_gated`."""
    N, K = y.shape[-1], x.shape[-1]
    how = cut(architecture(x.device), 2 * N if gated else N, K, experts is not None)
    by_place, by_name = arguments(x, packed, scale, bias, y, experts, share, gated, limit)
    with on_device_of(x):
        _hopper_row_kernel[(y.numel() // N, cdiv(N, how.outputs // 2 if gated else how.outputs))](
            *by_place, **by_name, WARPS=how.warps, ROWS=how.outputs, num_warps=how.warps
        )
