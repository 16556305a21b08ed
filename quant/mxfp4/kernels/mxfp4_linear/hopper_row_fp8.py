"""One row of x against a weight in MXFP4 on Hopper, multiplied as eight-bit numbers by warp groups.

What `hopper_row.py` does, with its copies: a program's weights are all asked for at once. There the decoding to bf16,
14 instructions for eight codes, takes longer than the copies. To e4m3, which holds a code as it is, it takes six; and
e4m3 is what an asynchronous product of four warps multiplies.

x is cut for it, by blocks: a power of two, with which the largest number is from 128 on and below 256; that as e4m3;
and as e4m3 once more what is left, 32 times as large. The pieces are all of a bf16 down to 2^-15 of the largest's power
of two, and of smaller ones 2^-23 of it is the most that is lost. A product has eight columns for the one row of x:
column 2 t + p has piece p of what lane t of four multiplies and zeros for the other lanes, so that a lane's sums are
those of one block, and are multiplied by its scale once.

The product keeps some 14 bits of what it adds: fewer than other kernels' products, more than the eight of a bf16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.gluonlib import allocate_barriers, barrier, copy_async, gl, gluon, hopper, refuses, seen_as
from xpu_ports.common.launch_order import wait_for_inputs
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.hopper_row import (
    arguments,
    bits,
    exact_sums,
    put_outputs,
    rows_of,
    takes_weight,
    up_to_power,
    words_in_memory,
)

# Rows of the weight that a program has: what four warps multiply at once.
ROWS = 64
# Columns of x of a turn, which is two products.
COLUMNS = 256
# Columns of x whose weights and pieces fit into shared memory: up to 2560 for two programs, then for one.
SMALLEST, LARGEST = 2048, 3072

_ROWS = gl.constexpr(ROWS)
# Columns of x that are cut at a time: eight a thread.
_CHUNK = gl.constexpr(1024)

# Four bytes of two codes each as e4m3 times 2^-6: the low nibbles, the high ones. An e4m3 has two more bits of an
# exponent above the code's and two more of a mantissa below. A selection by bits, one instruction, merges a number with
# its sign: that of the other nibble, which comes along, lies where the number is taken.
_EIGHTS = gl.constexpr(
    """{
    .reg .b32 number, signs, sign;
    and.b32 signs, $2, 0x88888888;
    shl.b32 number, $2, 2;
    shl.b32 sign, signs, 4;
    lop3.b32 $0, number, sign, 0x1C1C1C1C, 0xE4;
    shr.u32 number, $2, 2;
    lop3.b32 $1, number, signs, 0x1C1C1C1C, 0xE4;
    }"""
)

# Four numbers $2 to $5 as four e4m3, and as four more 32 times what is left of them. fp16 holds an e4m3.
_CUT = gl.constexpr(
    """{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 pair;
    .reg .f32 p, q, r, s;
    cvt.rn.satfinite.e4m3x2.f32 low, $3, $2;
    cvt.rn.satfinite.e4m3x2.f32 high, $5, $4;
    mov.b32 $0, {low, high};
    cvt.rn.f16x2.e4m3x2 pair, low;
    mov.b32 {a, b}, pair;
    cvt.rn.f16x2.e4m3x2 pair, high;
    mov.b32 {c, d}, pair;
    cvt.f32.f16 p, a;
    cvt.f32.f16 q, b;
    cvt.f32.f16 r, c;
    cvt.f32.f16 s, d;
    sub.f32 p, $2, p;
    sub.f32 q, $3, q;
    sub.f32 r, $4, r;
    sub.f32 s, $5, s;
    mul.f32 p, p, 0f42000000;
    mul.f32 q, q, 0f42000000;
    mul.f32 r, r, 0f42000000;
    mul.f32 s, s, 0f42000000;
    cvt.rn.satfinite.e4m3x2.f32 low, q, p;
    cvt.rn.satfinite.e4m3x2.f32 high, s, r;
    mov.b32 $1, {low, high};
    }"""
)


# ------------------------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def _bytes_in_memory():
    # `words_in_memory` of 32 words.
    return gl.SharedLinearLayout([*[[0, 1 << i] for i in range(7)], [1, 64], *[[2 << i, 0] for i in range(5)]])


@gluon.constexpr_function
def _bytes_of_lanes():
    # Lane 4 g + t has words 4 t and 16 + 4 t to the next four of rows g and g + 8.
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    registers = [*[[0, 1 << i] for i in range(4)], [0, 64], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [ROWS, 128])


@gluon.constexpr_function
def _words_of_lanes():
    # The same in words.
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 16], [8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 32])


@gluon.constexpr_function
def _scales_to_memory(eights):
    # Eight scales of one turn, of all rows, lie side by side.
    return gl.SharedLinearLayout([*[[1 << i, 0] for i in range(6)], *[[0, 1 << i] for i in range(bits(eights))]])


@gluon.constexpr_function
def _scales_in_memory():
    return gl.SharedLinearLayout([*[[0, 1 << i] for i in range(3)], *[[1 << i, 0] for i in range(6)]])


@gluon.constexpr_function
def _scales_of_lanes():
    # Of [row, half of a turn, t], as sums lie.
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 1, 0], [8, 0, 0]], lanes, [[16, 0, 0], [32, 0, 0]], [], [ROWS, 2, 4])


@gluon.constexpr_function
def _scales_in_pairs():
    # The same of [row, block of a turn].
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 4], [8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS, 8])


@gluon.constexpr_function
def _pieces_of_lanes():
    # Of [128 columns, t of the block, piece, word, nibble, t of a lane]: as `_x_of_lanes`.
    lanes = [[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    registers = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]
    of_warps = [[2, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [8, 4, 2, 4, 2, 4])


@gluon.constexpr_function
def _sums_of_lanes():
    # All in each warp, of a gated layer two that belong together in a lane.
    return gl.DistributedLinearLayout([[32]], [[1 << i] for i in range(5)], [[0], [0]], [], [ROWS])


@gluon.constexpr_function
def _x_of_lanes():
    # Of [block, quarter, column]: four lanes have a block.
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1 << i] for i in range(3)], lanes, [[8, 0, 0], [16, 0, 0]], [], [32, 4, 8]
    )


# ------------------------------------------------------------------------------------------------------------ numbers


@gluon.jit
def _codes(w, layout: gl.constexpr):
    """[64, 64] bytes of codes to [64, 128] e4m3 times 2^-6, columns [word of four, nibble, t, byte]."""
    low, high = gl.inline_asm_elementwise(_EIGHTS, "=&r,=r,r", [w], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    w = gl.reshape(gl.join(low, high), (_ROWS, 4, 4, 4, 2))
    w = gl.reshape(gl.permute(w, (0, 2, 4, 1, 3)), (_ROWS, 128))
    return gl.convert_layout(w, layout, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _of_blocks(sums):
    """[64, 8] to [64, t], both pieces' sums in one."""
    high, low = gl.split(gl.reshape(sums, (_ROWS, 4, 2)))
    return gl.convert_layout(high + low * 0.03125, gl.SliceLayout(1, _scales_of_lanes()), assert_trivial=True)


@gluon.jit
def _load_x(x_ptr, columns, K: gl.constexpr):
    """x by 1024 columns; zeros beyond the last."""
    x = ()
    for chunk in gl.static_range((K + _CHUNK - 1) // _CHUNK):
        at = columns + chunk * _CHUNK
        x += (gl.load(x_ptr + at, mask=at < K, other=0.0),)  # type: ignore[assignment]
    return x


@gluon.jit
def _put_x(x, words, factors, OUT: gl.constexpr):
    """Pieces of 1024 columns of x, [block, quarter, 8], to shared memory, and what blocks' sums are multiplied by.

    OUT: of the pieces, as `_pieces_of_lanes`.
    """
    sizes = x.to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF
    # The exponent of the largest number as bf16 has it, or the least for which 2^-e is normal.
    largest = gl.maximum(gl.max(gl.max(sizes, axis=2), axis=1) >> 7, 7)
    # 2^e with the 2^6 that codes are without. What is not finite makes sums NaN.
    factor = gl.where(largest == 255, 0x7FC00000, (largest - 1) << 23).to(gl.float32, bitcast=True)
    factors.store(factor)
    # 2^-e.
    inverse = ((261 - largest) << 23).to(gl.float32, bitcast=True)
    numbers = x.to(gl.float32) * inverse[:, None, None]
    # From [block, word, byte / 2, byte % 2, nibble].
    numbers = gl.permute(gl.reshape(numbers, (32, 4, 2, 2, 2)), (0, 1, 4, 2, 3))
    even, odd = gl.split(numbers)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    high, low = gl.inline_asm_elementwise(
        _CUT, "=&r,=r,r,r,r,r", [a, b, c, d], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    # From [128 columns, t of the block, word, nibble, piece].
    pieces = gl.permute(gl.reshape(gl.join(high, low), (8, 4, 4, 2, 2)), (0, 1, 4, 2, 3))
    pieces = gl.expand_dims(gl.convert_layout(pieces, gl.SliceLayout(5, OUT), assert_trivial=True), 5)
    # Zeros for the lanes t whose block it is not.
    OF_T: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, OUT))))
    IN_T: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, OUT))))
    of_t = gl.arange(0, 4, gl.SliceLayout(0, OF_T))[None, :, None, None, None, None]
    in_t = gl.arange(0, 4, gl.SliceLayout(0, IN_T))[None, None, None, None, None, :]
    own = of_t == in_t
    words.store(gl.reshape(gl.where(own, pieces, 0), (64, 32)))


# ------------------------------------------------------------------------------------------------------------- kernel


@kernel
@gluon.jit
def _hopper_row_fp8_kernel(
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
    OVERLAP: gl.constexpr,
):
    """64 outputs of a row of x, or of a gated layer 32, by four warps."""
    TURNS: gl.constexpr = K // 256
    CHUNKS: gl.constexpr = (K + _CHUNK - 1) // _CHUNK
    # Scales of a row up to a power of two.
    SCALES: gl.constexpr = up_to_power(K // 32)
    OUT: gl.constexpr = _ROWS // 2 if GLU else _ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    # A turn's weights, with what was asked for before them, are there when each thread's copies are.
    ready = allocate_barriers(TURNS)
    for turn in gl.static_range(TURNS):
        hopper.mbarrier.init(ready.index(turn), count=128)
    hopper.fence_async_shared()
    barrier()
    X: gl.constexpr = _x_of_lanes()
    blocks_x = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    quarters_x = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, X)))
    columns_x = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, X)))
    x_columns = (32 * blocks_x)[:, None, None] + (8 * quarters_x)[None, :, None] + columns_x[None, None, :]
    # Rows of one expert run side by side: what they share is in the cache.
    place = gl.program_id(0)
    if GROUPED:
        wait_for_inputs(OVERLAP)
        expert = gl.load(experts_ptr + place).to(gl.int64)
        x_ptr += (place // share).to(gl.int64) * stride_x
        x = _load_x(x_ptr, x_columns, K)
        if expert >= E:
            return
        words_ptr += expert * stride_w_e
        scale_ptr += expert * stride_s_e
    start = gl.program_id(1) * OUT
    words = gl.allocate_shared_memory(gl.int32, [TURNS, _ROWS, 32], words_in_memory(1, _ROWS))
    scales = gl.allocate_shared_memory(gl.int64, [_ROWS, SCALES // 8], _scales_to_memory(SCALES // 8))
    # x as a product takes it, by 128 columns, and as it is written.
    x_words = gl.allocate_shared_memory(gl.int32, [CHUNKS, 64, 32], gl.NVMMASharedLayout(128, 32, 2))
    x_shared = seen_as(x_words, gl.float8e4nv, [8 * CHUNKS, 8, 128], gl.NVMMASharedLayout(128, 8, 2))
    factors = gl.allocate_shared_memory(gl.float32, [CHUNKS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Scales in eights, a few of a row, which all go to the same banks; words in fours, 16 bytes, of a row side by side.
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    rows_s = rows_of(start, N, second, _ROWS, GLU, gl.SliceLayout(1, COPY_S))
    columns_s = gl.arange(0, SCALES // 8, gl.SliceLayout(0, COPY_S))
    eights_ptr = scale_ptr.to(gl.pointer_type(gl.int64), bitcast=True)
    scale_ptrs = eights_ptr + (rows_s * (stride_s_n // 8))[:, None] + columns_s[None, :]
    if SCALES * 32 == K:
        copy_async(scales, scale_ptrs)
    else:
        copy_async(scales, scale_ptrs, mask=(columns_s < K // 256)[None, :])
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows_w = rows_of(start, N, second, _ROWS, GLU, gl.SliceLayout(1, COPY))
    words_ptrs = words_ptr + (rows_w * stride_w_n)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, COPY))[None, :]
    for turn in range(TURNS):
        copy_async(words.index(turn), words_ptrs + turn * 32)
        hopper.async_copy.mbarrier_arrive(ready.index(turn), increment_count=False)
    if not GROUPED:
        # Weights are no other kernel's results.
        wait_for_inputs(OVERLAP)
        x = _load_x(x_ptr, x_columns, K)
    for chunk in gl.static_range(CHUNKS):
        _put_x(x[chunk], x_words.index(chunk), factors.index(chunk), _pieces_of_lanes())
    hopper.fence_async_shared()
    barrier()
    S: gl.constexpr = _scales_of_lanes()
    w_bytes = seen_as(words, gl.int8, [TURNS, _ROWS, 128], _bytes_in_memory())
    scale_bytes = seen_as(scales, gl.uint8, [SCALES // 8, _ROWS, 8], _scales_in_memory())
    of_turns = seen_as(factors, gl.float32, [4 * CHUNKS, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    zero = gl.zeros((_ROWS, 8), gl.float32, MMA)
    total = gl.zeros((_ROWS, 4), gl.float32, gl.SliceLayout(1, S))
    for turn in range(TURNS):
        hopper.mbarrier.wait(ready.index(turn), 0)
        w = w_bytes.index(turn).load(_bytes_of_lanes())
        first, second_half = gl.split(gl.permute(gl.reshape(w, (_ROWS, 2, 64)), (0, 2, 1)))
        # The second half is decoded while the first is multiplied.
        x_first, x_second = x_shared.index(2 * turn).permute((1, 0)), x_shared.index(2 * turn + 1).permute((1, 0))
        sums_first = hopper.warpgroup_mma(_codes(first, A), x_first, zero, use_acc=False, is_async=True)
        sums_second = hopper.warpgroup_mma(_codes(second_half, A), x_second, zero, use_acc=False, is_async=True)
        scale = scale_bytes.index(turn).load(_scales_in_pairs())
        scale = gl.convert_layout(gl.reshape(scale, (_ROWS, 2, 4)), S, assert_trivial=True)
        factor = of_turns.index(turn).load(gl.SliceLayout(0, _scales_in_pairs()))
        factor = gl.convert_layout(gl.reshape(factor, (2, 4)), gl.SliceLayout(0, S), assert_trivial=True)
        factor = factor[None, :, :] * (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        factor_first, factor_second = gl.split(gl.permute(factor, (0, 2, 1)))
        factor_first = gl.convert_layout(factor_first, total.type.layout, assert_trivial=True)
        factor_second = gl.convert_layout(factor_second, total.type.layout, assert_trivial=True)
        sums_first = hopper.warpgroup_mma_wait(1, deps=(sums_first,))
        total += _of_blocks(sums_first) * factor_first
        sums_second = hopper.warpgroup_mma_wait(0, deps=(sums_second,))
        total += _of_blocks(sums_second) * factor_second
    # Each warp has all of them: so their largest, and the two of a gated layer, are found without other warps.
    SUMS: gl.constexpr = _sums_of_lanes()
    sums = gl.convert_layout(gl.sum(total, axis=1), SUMS)
    if gl.max(sums.to(gl.int32, bitcast=True) & 0x7FFFFFFF, axis=0) >= 0x7F800000:
        # For a scale of NaN, an x that is not finite, or a large one.
        exact = exact_sums(x_ptr, words, scale_ptr, start, N, stride_s_n, second, GLU, _words_of_lanes())
        sums = gl.convert_layout(exact, SUMS)
    put_outputs(sums, bias_ptr, y_ptr + place.to(gl.int64) * N, start, N, limit, BIAS, GLU, LIMIT)


def takes(x: Tensor, packed: Tensor, scale: Tensor, y: Tensor) -> bool:
    """Whether this kernel runs here and is meant for rows of x and y, bf16, and a weight that is copied by 16 bytes."""
    K = x.shape[-1]
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        return False
    if not SMALLEST <= K <= LARGEST or K % COLUMNS or refuses(x.device) is not None:
        return False
    return takes_weight(packed, scale)


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
    """Fill y, contiguous [rows, N], of what is taken; see `row.launch` and `row.launch_gated`."""
    N = y.shape[-1]
    by_place, by_name = arguments(x, packed, scale, bias, y, experts, share, gated, limit)
    with on_device_of(x):
        _hopper_row_fp8_kernel[(y.numel() // N, cdiv(N, ROWS // 2 if gated else ROWS))](
            *by_place, **by_name, num_warps=4
        )
