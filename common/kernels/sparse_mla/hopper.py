"""A decode step on pages, 64 heads a program, on NVIDIA's Hopper in Gluon: three kinds of warps work side by side.

Four warps decode pages' rows into shared memory. Four have the scores and weights, and sum the left half of the
columns; four sum the right half. In Triton all warps take turns at each of these, so that matrix units wait for the
decoding and the softmax: 64 tokens of 128 heads on 1152 keys each take 83.9 us on an H200, here 47.1.

The arithmetic is that of `kernels.py`, with codes decoded as by `rows.decoded`: the same numbers in another order, and
parts of sums in fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.gluonlib import (
    allocate_barriers,
    barrier,
    copy_async,
    gl,
    gluon,
    hopper,
    init_barriers,
    refuses,
    seen_as,
)
from xpu_ports.common.kernels.fp8_pages import GROUP
from xpu_ports.common.kernels.sparse_mla.kernels import window_slots
from xpu_ports.common.launch_order import overlap_options, wait_for_inputs
from xpu_ports.common.tritonlib import kernel, next_power_of_2

# What a program takes: heads, all of what one asynchronous product has rows for, and keys at a time.
HEADS, KEYS = 64, 64
# The one size that it is written for: columns of a head, in two halves, and how many of them are bf16 in pages.
COLUMNS, ROPE = 512, GROUP

_KEYS = gl.constexpr(KEYS)
_HALF = gl.constexpr(COLUMNS // 2)
# Of a token in pages, in 32-bit words: where its bf16 begin, its data, its scales.
_OWN = gl.constexpr((COLUMNS - ROPE) // 4)
_DATA = gl.constexpr((COLUMNS + ROPE) // 4)
_SCALES = gl.constexpr(2)
# Tiles of rows in shared memory: two of 64 KB, beside the queries' 64 KB and 24 KB of codes on their way.
_STAGES = gl.constexpr(2)
# Warps that decode. Registers a thread of them and of those with the right half; the left half's have the others.
_DECODERS = gl.constexpr(4)
_REGISTERS_DECODERS = gl.constexpr(96)
_REGISTERS_RIGHT = gl.constexpr(168)


def _pair(out: int, select: str) -> str:
    """Two codes as bf16: sign, exponent and mantissa where bf16 has them, 2^120 for the exponent's bias, the scale.

    The selection has signs of bytes above them.
    """
    return f"""
    prmt.b32 code, $2, 0, {select};
    shl.b32 code, code, 4;
    and.b32 code, code, 0x87F087F0;
    mul.rn.bf16x2 code, code, bias;
    mul.rn.bf16x2 ${out}, code, $3;"""


# The four codes of a word $2, in order, times $3 as two pairs.
_DECODE = gl.constexpr(
    "{\n.reg .b32 code, bias;\nmov.b32 bias, 0x7B807B80;" + _pair(0, "0x9180") + _pair(1, "0xB3A2") + "\n}"
)


# --------------------------------------------------------------------------------------------------------------- rows


@gluon.jit
def _ask_for_indices(dest, block, indices_ptr, named, stride, W: gl.constexpr, NAMED: gl.constexpr):
    """Ask for which entries a block names; the first W blocks are the window's and name none."""
    if NAMED:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [_DECODERS], [0])
        offs = (block - W) * _KEYS + gl.arange(0, _KEYS, LAYOUT)
        # What is negative is large without a sign.
        counts = offs.to(gl.uint32) < named.to(gl.uint32)
        copy_async(dest, indices_ptr + offs.to(gl.int64) * stride, mask=counts)


@gluon.jit
def _slots(
    block, indices, n, before, closed, named, SPAN: gl.constexpr, W: gl.constexpr, NAMED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Slots of a block of the window, or of the entries that it names; negative for none."""
    slots, counts = window_slots(block * _KEYS + gl.arange(0, _KEYS, layout), n, before, SPAN, True, _KEYS)
    slots = gl.where(counts, slots, -1)
    offs = (block - W) * _KEYS + gl.arange(0, _KEYS, layout)
    entry = offs
    if NAMED:
        entry = indices.load(layout).to(gl.int32)
    counts = (offs.to(gl.uint32) < named.to(gl.uint32)) & (entry < closed)
    return gl.where(block < W, slots, gl.where(counts, entry, -1))


@gluon.jit
def _ask_for_codes(dest, ptr, FIRST: gl.constexpr, layout: gl.constexpr):
    """Ask for some groups of codes of all rows, [keys, groups, 16] words, from group FIRST on."""
    GROUPS: gl.constexpr = dest.shape[1]
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    copy_async(dest, ptr[:, None, None] + (group * 16)[None, :, None] + word[None, None, :])


@gluon.jit
def _decoded(words, scales, FIRST: gl.constexpr, layout: gl.constexpr):
    """Codes of groups from FIRST on of a half, [keys, groups, 16] words, with a scale a byte, as words of two bf16.

    As `rows.decoded`: exact, codes of NaN read as 480, and a row with scales of 0 is 0. Returns [keys, groups * 32].
    """
    GROUPS: gl.constexpr = words.shape[1]
    group = FIRST + gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, words.type.layout)))
    # e8m0 is the exponent of bf16.
    factor = (((scales[:, None] >> (8 * group)[None, :]) & 0xFF) * 0x00800080)[:, :, None]
    low, high = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [words, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    x = gl.convert_layout(gl.join(low, high).reshape([_KEYS, GROUPS, 32]), layout, assert_trivial=True)
    return x.reshape([_KEYS, GROUPS * 32])


@gluon.jit
def _decode_rows(
    left, right, codes_l, codes_r, scales, indices, biases, ready_l, ready_r, free_l, free_r, window_ptr, entries_ptr,
    indices_ptr, stride_w_s, stride_e_s, stride_i_a, n, before, closed, named, split, splits, turns,
    SPAN: gl.constexpr, NAMED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Decode tiles of rows into shared memory, seen in words of two columns, [stages, keys, 128] each half.

    All that is read comes by copies to shared memory, asked for a turn ahead, where the last turn's has been read.
    Loads to registers would take fewer instructions, but the compiler counts them together with reads of shared memory:
    a warp that waits for the one waits for the other, which at times is all of memory's latency.
    """
    CODES: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [_DECODERS, 1, 1], [2, 1, 0])
    # As `_decoded` has it: four codes are two words.
    DECODED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 1, 4], [_DECODERS, 1, 1], [2, 1, 0])
    TAIL: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [_DECODERS, 1], [1, 0])
    BOTH: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [_DECODERS, 1], [1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    W: gl.constexpr = (SPAN + _KEYS - 1) // _KEYS
    column = gl.arange(0, 32, gl.SliceLayout(0, TAIL))[None, :]
    half = gl.arange(0, 2, gl.SliceLayout(0, BOTH))[None, :]
    # A turn asks for three groups of copies: the next tile's left half, its right half's codes but the last, the rest.
    _ask_for_indices(indices.index(0), split, indices_ptr, named, stride_i_a, W, NAMED)
    for _ in gl.static_range(3):
        hopper.async_copy.commit_group()
    counts = gl.zeros([_KEYS], gl.int32, OF_KEYS) < 0
    # The first turn only asks.
    for i in range(-1, turns):
        block = split + (i + 1) * splits
        s = (i + _STAGES) % _STAGES
        hopper.async_copy.wait_group(2)
        words_l = codes_l.load(CODES)
        scales_l, scales_r = gl.split(scales.load(BOTH))
        scales_l = gl.convert_layout(scales_l, OF_KEYS, assert_trivial=True)
        scales_r = gl.convert_layout(scales_r, OF_KEYS, assert_trivial=True)
        at = _slots(block, indices.index((i + 1) & 1), n, before, closed, named, SPAN, W, NAMED, OF_KEYS)
        next_counts = at >= 0
        # Codes that do not count are read too, and multiplied by 0 later: none becomes an infinity or NaN.
        at = gl.maximum(at, 0)
        ptr = gl.where(block < W, window_ptr, entries_ptr)
        page = (at // TOKENS).to(gl.int64) * gl.where(block < W, stride_w_s, stride_e_s)
        data = page + at % TOKENS * _DATA
        of_scales = gl.convert_layout(page + at % TOKENS * _SCALES, gl.SliceLayout(1, BOTH), assert_trivial=True)
        scales_count = gl.convert_layout(next_counts, gl.SliceLayout(1, BOTH), assert_trivial=True)
        _ask_for_codes(codes_l, ptr + data, 0, CODES)
        copy_async(scales, ptr + of_scales[:, None] + (TOKENS * _DATA + half), mask=scales_count[:, None])
        _ask_for_indices(indices.index(i & 1), block + splits, indices_ptr, named, stride_i_a, W, NAMED)
        hopper.async_copy.commit_group()
        if i >= 0:
            hopper.mbarrier.wait(free_l.index(s), ((i // _STAGES) & 1) ^ 1)
            left.index(s).store(_decoded(words_l, scales_l, 0, DECODED))
            barrier()
            hopper.mbarrier.arrive(ready_l.index(s), count=1)
            hopper.async_copy.wait_group(1)
            words_r = codes_r.load(CODES)
            last = right.index(s).slice(64, 32, dim=1)
            last_words = gl.split(last.load(TAIL).reshape([_KEYS, 2, 16]).permute((0, 2, 1)))[0]
            last_words = gl.convert_layout(last_words.reshape([_KEYS, 1, 16]), CODES, assert_trivial=True)
            _ask_for_codes(codes_r, ptr + data, 4, CODES)
            hopper.async_copy.commit_group()
            right.index(s).slice(0, 64, dim=1).store(_decoded(words_r, scales_r, 0, DECODED))
            last.store(_decoded(last_words, scales_r, 2, DECODED))
            biases.index(s).store(gl.where(counts, 0.0, float("-inf")))
            barrier()
            hopper.mbarrier.arrive(ready_r.index(s), count=1)
        else:
            _ask_for_codes(codes_r, ptr + data, 4, CODES)
            hopper.async_copy.commit_group()
        if i + 1 < turns:
            to = (i + 1) % _STAGES
            hopper.mbarrier.wait(free_r.index(to), (((i + 1) // _STAGES) & 1) ^ 1)
            rows = ptr + gl.convert_layout(data, gl.SliceLayout(1, TAIL), assert_trivial=True)[:, None]
            # The last group's codes wait in the place of what they become, beside the columns that are bf16 already.
            copy_async(right.index(to).slice(64, 32, dim=1), rows + (96 + column), mask=column < 16)
            tails_count = gl.convert_layout(next_counts, gl.SliceLayout(1, TAIL), assert_trivial=True)
            copy_async(right.index(to).slice(96, 32, dim=1), rows + (_OWN + column), mask=tails_count[:, None])
        hopper.async_copy.commit_group()
        counts = next_counts
    # No program ends before its copies, which those of the turn after the last still are.
    hopper.async_copy.wait_group(0)


# --------------------------------------------------------------------------------------------------- scores and values


@gluon.jit
def _put_queries(q_ptr, stride_q_h, dest, FIRST: gl.constexpr):
    """Half of the queries' columns, from FIRST on, into shared memory."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    heads = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    columns = FIRST + gl.arange(0, _HALF, gl.SliceLayout(0, ROWS))
    dest.store(gl.load(q_ptr + heads[:, None] * stride_q_h + columns[None, :]))
    hopper.fence_async_shared()
    barrier()


@gluon.jit
def _scores_of(i, queries_l, queries_r, left, right, ready_l, ready_r, zeros):
    """Begin the product of queries and a tile of rows, [heads, keys].

    The fence that asynchronous products need between them and the rows' writers is the readers', which have the time.
    """
    s = i % _STAGES
    phase = (i // _STAGES) & 1
    hopper.mbarrier.wait(ready_l.index(s), phase)
    hopper.fence_async_shared()
    rows = left.index(s).permute((1, 0))
    scores = hopper.warpgroup_mma(queries_l, rows, zeros, use_acc=False, is_async=True)
    hopper.mbarrier.wait(ready_r.index(s), phase)
    hopper.fence_async_shared()
    return hopper.warpgroup_mma(queries_r, right.index(s).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weigh(i, scores, acc, scale, top, total, left, biases, weights, decays, weights_ready, weights_free):
    """Give a tile's weights to the right half and begin their product with the left half's values.

    Older sums are multiplied by a decay that is given too. Returns (sums, top, total).
    """
    s = i % _STAGES
    scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
    bias = biases.index(s).load(gl.SliceLayout(0, scores.type.layout))
    scores = scores * scale + bias[None, :]
    new_top = gl.maximum(top, gl.max(scores, 1))
    p = gl.exp2(scores - new_top[:, None])
    decay = gl.exp2(top - new_top)
    hopper.mbarrier.wait(weights_free, (i & 1) ^ 1)
    weights.store(p.to(gl.bfloat16))
    decays.store(decay)
    hopper.fence_async_shared()
    barrier()
    hopper.mbarrier.arrive(weights_ready, count=1)
    total = total * decay + gl.sum(p, 1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    return hopper.warpgroup_mma(weights, left.index(s), acc, is_async=True), new_top, total


@gluon.jit
def _put_sums(acc, total, rows, row, step, y_ptr, tops_ptr, FIRST: gl.constexpr, SPLIT: gl.constexpr):
    """The sums of half of the columns, from FIRST on: a part of them, or divided by the total the result.

    A part is fp16, half of what fp32 takes, times a power of two for each head, with which its largest sum is near
    fp16's largest: the rounding is 2^-12, an eighth of the result's. All goes through the shared memory of the rows
    that it is of, from which a warp writes whole lines.
    """
    if SPLIT:
        # fp32's exponent of each head's largest, and of what makes that 2^14 or more; it and its inverse are normal.
        largest = gl.max(gl.abs(acc), 1).to(gl.int32, bitcast=True) >> 23
        exponent = gl.minimum(268 - largest, 253)
        acc = (acc * (exponent << 23).to(gl.float32, bitcast=True)[:, None]).to(gl.float16)
        heads = row + gl.arange(0, 64, exponent.type.layout) * step
        gl.store(tops_ptr + 4 * heads + 2 + FIRST // _HALF, ((254 - exponent) << 23).to(gl.float32, bitcast=True))
        shared = seen_as(rows.index(0), gl.float16, [64, _HALF], gl.NVMMASharedLayout(128, 16, 2))
    else:
        acc = (acc * (1 / total)[:, None]).to(gl.bfloat16)
        shared = rows.index(0)
    shared.store(acc)
    barrier()
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    heads = row + gl.arange(0, 64, gl.SliceLayout(1, LINES)) * step
    columns = FIRST + gl.arange(0, _HALF, gl.SliceLayout(0, LINES))
    gl.store(y_ptr + heads[:, None] * (2 * _HALF) + columns[None, :], shared.load(LINES))


@gluon.jit
def _attend_left(
    queries_l, queries_r, weights, decays, totals, left, right, biases, ready_l, ready_r, free_l, queries_ready,
    weights_ready, weights_free, total_ready, q_ptr, sinks_ptr, y_ptr, tops_ptr, stride_q_h, stride_sink, scale, row,
    step, turns, split, SPLIT: gl.constexpr,
):  # fmt: skip
    """Scores, weights, and the sums of the left half."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, SCORES)
    acc = gl.zeros([64, _HALF], gl.float32, SUMS)
    zeros = gl.zeros([64, _KEYS], gl.float32, SCORES)
    _put_queries(q_ptr, stride_q_h, queries_l, 0)
    heads = gl.arange(0, 64, OF_HEADS)
    # Exponents are of 2. The largest score so far starts low, not at -inf, so that no difference is NaN.
    scale *= 1.4426950408889634
    top = gl.full([64], -1e30, gl.float32, OF_HEADS)
    total = gl.zeros([64], gl.float32, OF_HEADS)
    if split == 0:
        # The sink is a key without a value, of the first part.
        sink = gl.load(sinks_ptr + heads * stride_sink).to(gl.float32) * 1.4426950408889634
        top = gl.where(sink < -1e30, -1e30, sink)
        total = gl.full([64], 1.0, gl.float32, OF_HEADS)
    hopper.mbarrier.wait(queries_ready, 0)
    # The next tile's scores come right behind the product with this one's values, whose rows are free before anything
    # else is waited for.
    scores = _scores_of(0, queries_l, queries_r, left, right, ready_l, ready_r, zeros)
    for i in range(turns - 1):
        acc, top, total = _weigh(
            i, scores, acc, scale, top, total, left, biases, weights, decays, weights_ready, weights_free
        )
        scores = _scores_of(i + 1, queries_l, queries_r, left, right, ready_l, ready_r, zeros)
        acc = hopper.warpgroup_mma_wait(2, deps=(acc,))
        barrier()
        hopper.mbarrier.arrive(free_l.index(i % _STAGES), count=1)
    acc, top, total = _weigh(
        turns - 1, scores, acc, scale, top, total, left, biases, weights, decays, weights_ready, weights_free
    )
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    if SPLIT:
        heads = row + heads * step
        gl.store(tops_ptr + 4 * heads, top)
        gl.store(tops_ptr + 4 * heads + 1, total)
    else:
        totals.store(total)
        barrier()
        hopper.mbarrier.arrive(total_ready, count=1)
    total = gl.convert_layout(total, gl.SliceLayout(1, SUMS), assert_trivial=True)
    _put_sums(acc, total, left, row, step, y_ptr, tops_ptr, 0, SPLIT)


@gluon.jit
def _attend_right(
    queries_r, weights, decays, totals, right, free_r, queries_ready, weights_ready, weights_free, total_ready, q_ptr,
    y_ptr, tops_ptr, stride_q_h, row, step, turns, SPLIT: gl.constexpr,
):  # fmt: skip
    """The sums of the right half."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, SUMS)
    _put_queries(q_ptr, stride_q_h, queries_r, _HALF)
    hopper.mbarrier.arrive(queries_ready, count=1)
    acc = gl.zeros([64, _HALF], gl.float32, SUMS)
    for i in range(turns):
        s = i % _STAGES
        # The weights imply the rows.
        hopper.mbarrier.wait(weights_ready, i & 1)
        hopper.fence_async_shared()
        acc = acc * decays.load(OF_HEADS)[:, None]
        acc = hopper.warpgroup_mma(weights, right.index(s), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        hopper.mbarrier.arrive(free_r.index(s), count=1)
        hopper.mbarrier.arrive(weights_free, count=1)
    total = gl.full([64], 1.0, gl.float32, OF_HEADS)
    if not SPLIT:
        hopper.mbarrier.wait(total_ready, 0)
        total = totals.load(OF_HEADS)
    _put_sums(acc, total, right, row, step, y_ptr, tops_ptr, _HALF, SPLIT)


# Numbers of entries and slots change from call to call: one kernel for all.
@kernel
@gluon.jit(do_not_specialize=["before", "slots", "named"])
def _sparse_mla_hopper_kernel(
    q_ptr,
    window_ptr,
    entries_ptr,
    indices_ptr,
    lengths_ptr,
    sinks_ptr,
    y_ptr,
    tops_ptr,
    before,
    slots,
    named,
    scale,
    stride_q_b,
    stride_q_h,
    stride_w_b,
    stride_w_s,
    stride_e_b,
    stride_e_s,
    stride_i_b,
    stride_i_a,
    stride_l,
    stride_sink,
    H: gl.constexpr,
    SPAN: gl.constexpr,
    RATIO: gl.constexpr,
    ENTRIES: gl.constexpr,
    NAMED: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """64 heads of one token and every `splits`-th tile of its keys; a page's stride is in words."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # A group of all keys side by side: what a warp reads at once has banks of its own.
    CODES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1])
    queries_l = gl.allocate_shared_memory(gl.bfloat16, [64, _HALF], TILE)
    queries_r = gl.allocate_shared_memory(gl.bfloat16, [64, _HALF], TILE)
    left = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, _HALF], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, _HALF], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, _KEYS], TILE)
    words_l = seen_as(left, gl.int32, [_STAGES, _KEYS, 128], WORDS)
    words_r = seen_as(right, gl.int32, [_STAGES, _KEYS, 128], WORDS)
    codes_l = gl.allocate_shared_memory(gl.int32, [_KEYS, 4, 16], CODES)
    codes_r = gl.allocate_shared_memory(gl.int32, [_KEYS, 2, 16], CODES)
    scales = gl.allocate_shared_memory(gl.int32, [_KEYS, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    indices = gl.allocate_shared_memory(indices_ptr.dtype.element_ty if NAMED else gl.int32, [2, _KEYS], FLAT)
    biases = gl.allocate_shared_memory(gl.float32, [_STAGES, _KEYS], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ready_l, ready_r = allocate_barriers(_STAGES), allocate_barriers(_STAGES)
    free_l, free_r = allocate_barriers(_STAGES), allocate_barriers(_STAGES)
    weights_ready, weights_free = allocate_barriers(1), allocate_barriers(1)
    queries_ready, total_ready = allocate_barriers(1), allocate_barriers(1)
    init_barriers((ready_l, ready_r, free_l, free_r), _STAGES)
    init_barriers((weights_ready, weights_free, queries_ready, total_ready), 1)
    weights_ready, weights_free = weights_ready.index(0), weights_free.index(0)
    queries_ready, total_ready = queries_ready.index(0), total_ready.index(0)
    hopper.fence_async_shared()
    barrier()
    wait_for_inputs(OVERLAP)
    tiles: gl.constexpr = H // 64
    W: gl.constexpr = (SPAN + _KEYS - 1) // _KEYS
    pid, split, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    b, head = (pid // tiles).to(gl.int64), pid % tiles * 64
    n = gl.load(lengths_ptr + b * stride_l).to(gl.int32)
    closed, blocks = slots, 0
    if ENTRIES:
        if not NAMED:
            closed = gl.minimum(n // RATIO, slots)
            named = closed
        blocks = (named + _KEYS - 1) // _KEYS
    # Blocks are dealt out in turn, so that the parts are equally long whatever is closed. A part that gets none takes
    # one in which nothing counts.
    turns = gl.maximum((blocks + W - split + splits - 1) // splits, 1)
    q_ptr += b * stride_q_b + head.to(gl.int64) * stride_q_h
    sinks_ptr += head * stride_sink
    window_ptr = (window_ptr + b * stride_w_b).to(gl.pointer_type(gl.int32), bitcast=True)
    entries_ptr = (entries_ptr + b * stride_e_b).to(gl.pointer_type(gl.int32), bitcast=True)
    indices_ptr += b * stride_i_b
    # Where the heads' results begin, and how far from one to the next.
    row, step = b * H + head, 1
    if SPLIT:
        row, step = row * splits + split, splits
    gl.warp_specialize(
        [
            (_attend_left, (queries_l, queries_r, weights, decays, totals, left, right, biases, ready_l, ready_r,
                            free_l, queries_ready, weights_ready, weights_free, total_ready, q_ptr, sinks_ptr, y_ptr,
                            tops_ptr, stride_q_h, stride_sink, scale, row, step, turns, split, SPLIT)),
            (_attend_right, (queries_r, weights, decays, totals, right, free_r, queries_ready, weights_ready,
                             weights_free, total_ready, q_ptr, y_ptr, tops_ptr, stride_q_h, row, step, turns, SPLIT)),
            (_decode_rows, (words_l, words_r, codes_l, codes_r, scales, indices, biases, ready_l, ready_r, free_l,
                            free_r, window_ptr, entries_ptr, indices_ptr, stride_w_s, stride_e_s, stride_i_a, n,
                            before, closed, named, split, splits, turns, SPAN, NAMED, TOKENS)),
        ],
        [4, _DECODERS],
        [_REGISTERS_RIGHT, _REGISTERS_DECODERS],
    )  # fmt: skip


@kernel
@gluon.jit(do_not_specialize=["splits"])
def _join_hopper_kernel(sums_ptr, tops_ptr, y_ptr, splits, PARTS: gl.constexpr, OVERLAP: gl.constexpr):
    """The sum of four heads' parts, a warp each, scaled to the largest score of all; the sink makes totals positive.

    tops: [heads, splits, 4] of the largest score, the total, and what the sums of each half of the columns are times.
    PARTS: how many are read at once.
    """
    wait_for_inputs(OVERLAP)
    ALL: gl.constexpr = gl.BlockedLayout([1, PARTS, 8], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, ALL)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, ALL)
    heads = gl.program_id(0).to(gl.int64) * 4 + gl.arange(0, 4, gl.SliceLayout(1, OF_PARTS))
    columns = gl.arange(0, _HALF, gl.SliceLayout(0, OF_SUMS))
    total = gl.zeros([4], gl.float32, gl.SliceLayout(1, OF_PARTS))
    top = total - float("inf")
    left = gl.zeros([4, _HALF], gl.float32, OF_SUMS)
    right = left
    for first in range(0, splits, PARTS):
        part = first + gl.arange(0, PARTS, gl.SliceLayout(0, OF_PARTS))[None, :]
        counts = part < splits
        part = heads[:, None] * splits + part
        sums_ptrs = sums_ptr + part[:, :, None] * (2 * _HALF) + columns[None, None, :]
        sums_l = gl.load(sums_ptrs, counts[:, :, None], other=0.0)
        sums_r = gl.load(sums_ptrs + _HALF, counts[:, :, None], other=0.0)
        ptrs = tops_ptr + 4 * part
        tops = gl.load(ptrs, counts, other=-float("inf"))
        totals = gl.load(ptrs + 1, counts, other=0.0)
        scale_l, scale_r = gl.load(ptrs + 2, counts, other=0.0), gl.load(ptrs + 3, counts, other=0.0)
        new_top = gl.maximum(top, gl.max(tops, 1))
        decay, weights = gl.exp2(top - new_top), gl.exp2(tops - new_top[:, None])
        total = total * decay + gl.sum(weights * totals, 1)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, OF_SUMS), assert_trivial=True)[:, None]
        left = left * decay + gl.sum(sums_l.to(gl.float32) * (weights * scale_l)[:, :, None], 1)
        right = right * decay + gl.sum(sums_r.to(gl.float32) * (weights * scale_r)[:, :, None], 1)
        top = new_top
    heads = gl.convert_layout(heads, gl.SliceLayout(1, OF_SUMS), assert_trivial=True)
    total = gl.convert_layout(total, gl.SliceLayout(1, OF_SUMS), assert_trivial=True)[:, None]
    ptrs = y_ptr + heads[:, None] * (2 * _HALF) + columns[None, :]
    gl.store(ptrs, (left / total).to(gl.bfloat16))
    gl.store(ptrs + _HALF, (right / total).to(gl.bfloat16))


def takes(q: Tensor, rope: int) -> bool:
    """Whether this kernel runs here and takes such queries of one token a row, with a window and entries in pages."""
    _, H, K = q.shape
    sizes = q.dtype == torch.bfloat16 and K == COLUMNS and rope == ROPE and H > 0 and H % HEADS == 0
    return sizes and refuses(q.device) is None


def launch(
    q: Tensor,
    window: Tensor,
    before: int,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    y: Tensor,
    span: int,
    ratio: int,
    slots: int,
    named: int,
    tokens: int,
    splits: int,
    scale: float,
) -> None:
    """Fill y, with the keys in so many parts.

    before: slots of the window's ring. slots, named: of the entries, how many are named. tokens: of a page.
    """
    B, H, K = q.shape
    store = window if entries is None else entries
    of_indices = (0, 0) if indices is None else indices.stride()
    out, tops = y, y
    overlap = overlap_options(q.device)
    if splits > 1:
        out = torch.empty((B * H * splits, K), dtype=torch.float16, device=q.device)
        tops = torch.empty((B * H * splits, 4), dtype=torch.float32, device=q.device)
    _sparse_mla_hopper_kernel[(B * (H // HEADS), splits)](
        q,
        window,
        store,
        q if indices is None else indices,
        lengths,
        sinks,
        out,
        tops,
        before,
        slots,
        named,
        scale,
        q.stride(0),
        q.stride(1),
        window.stride(0),
        window.stride(1) // 4,
        store.stride(0),
        store.stride(1) // 4,
        *of_indices,
        lengths.stride(0),
        sinks.stride(0),
        H=H,
        SPAN=span,
        RATIO=ratio,
        ENTRIES=entries is not None,
        NAMED=indices is not None,
        TOKENS=tokens,
        SPLIT=splits > 1,
        OVERLAP=bool(overlap),
        num_warps=4,
        **overlap,
    )
    if splits > 1:
        parts = min(16, next_power_of_2(splits))
        _join_hopper_kernel[(B * H // 4,)](
            out, tops, y, splits, PARTS=parts, OVERLAP=bool(overlap), num_warps=4, **overlap
        )
