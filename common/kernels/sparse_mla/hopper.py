"""A decode step on pages, 64 heads a program, on NVIDIA's Hopper in Gluon: three kinds of warps work side by side.

Four warps decode pages' rows into shared memory. Four have the scores and weights, and sum the left half of the
columns; four sum the right half. In Triton all warps take turns at each of these, so that matrix units wait for the
decoding and the softmax: 64 tokens of 128 heads on 1152 keys each take 83.9 us on an H200, here 57.4.

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
# Tiles of rows in shared memory: two of 64 KB, beside the queries' 64.
_STAGES = gl.constexpr(2)
# Warps that decode. Registers a thread of them and of those with the right half; the left half's have the others.
_DECODERS = gl.constexpr(4)
_REGISTERS_DECODERS = gl.constexpr(120)
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
def _named(block, indices_ptr, named, stride, W: gl.constexpr, NAMED: gl.constexpr, layout: gl.constexpr):
    """The entries of a block, of which W come before the entries' own; -1 for none."""
    offs = (block - W) * _KEYS + gl.arange(0, _KEYS, layout)
    # What is negative is large without a sign.
    counts = offs.to(gl.uint32) < named.to(gl.uint32)
    if NAMED:
        entry = gl.load(indices_ptr + offs.to(gl.int64) * stride, mask=counts, other=-1).to(gl.int32)
    else:
        entry = gl.where(counts, offs, -1)
    return entry


@gluon.jit
def _slots(block, entry, n, before, closed, SPAN: gl.constexpr, W: gl.constexpr, layout: gl.constexpr):
    """Slots of a block of the window, or of its entries; -1 for none."""
    slots, counts = window_slots(block * _KEYS + gl.arange(0, _KEYS, layout), n, before, SPAN, True, _KEYS)
    slots = gl.where(counts, slots, -1)
    return gl.where(block < W, slots, gl.where(entry < closed, entry, -1))


@gluon.jit
def _decoded(words, scales, layout: gl.constexpr):
    """Codes of four groups, [keys, 4, 16] words, with a scale a byte, as pairs of bf16, [keys, 4, 32].

    As `rows.decoded`: exact, codes of NaN read as 480, and a row with scales of 0 is 0.
    """
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, words.type.layout)))
    # e8m0 is the exponent of bf16.
    factor = (((scales[:, None] >> (8 * group)[None, :]) & 0xFF) * 0x00800080)[:, :, None]
    low, high = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,r,r", [words, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(low, high).reshape([_KEYS, 4, 32]), layout, assert_trivial=True)


@gluon.jit
def _decode_rows(
    left, right, raw, biases, ready_l, ready_r, free_l, free_r, window_ptr, entries_ptr, indices_ptr, stride_w_s,
    stride_e_s, stride_i_a, n, before, closed, named, split, splits, turns,
    SPAN: gl.constexpr, NAMED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Decode tiles of rows into shared memory, seen in words of two columns, [stages, keys, 128] each half.

    The next tile's right half is on its way to registers, the left half's codes to shared memory: a warp that waits for
    one of several loads to registers waits for all of them.
    """
    RAW: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 1, 4], [_DECODERS, 1, 1], [2, 1, 0])
    # As `_decoded` leaves it: four codes are two words.
    OUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 1, 4], [_DECODERS, 1, 1], [2, 1, 0])
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, RAW))
    OF_KEYS_OUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, OUT))
    W: gl.constexpr = (SPAN + _KEYS - 1) // _KEYS
    group = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, RAW)))
    word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, RAW)))
    offs = (group * 16)[None, :, None] + word[None, None, :]
    offs_tail = _OWN + gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    # The last group of the right half is bf16.
    coded = (group < 3)[None, :, None]
    is_tail = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))[None, :, None] == 3
    entry = _named(split, indices_ptr, named, stride_i_a, W, NAMED, OF_KEYS)
    words_r = gl.zeros([_KEYS, 4, 16], gl.int32, RAW)
    tail = gl.zeros([_KEYS, 32], gl.int32, gl.SliceLayout(1, OUT))
    scales_l = gl.zeros([_KEYS], gl.int32, OF_KEYS)
    scales_r = scales_l
    counts = scales_l < 0
    # The first turn only asks for rows.
    for i in range(-1, turns):
        block = split + (i + 1) * splits
        at = _slots(block, entry, n, before, closed, SPAN, W, OF_KEYS)
        entry = _named(block + splits, indices_ptr, named, stride_i_a, W, NAMED, OF_KEYS)
        next_counts = at >= 0
        # What does not count is read too, and multiplied by 0 later: no code becomes an infinity or NaN.
        at = gl.maximum(at, 0)
        ptr = gl.where(block < W, window_ptr, entries_ptr)
        page = (at // TOKENS).to(gl.int64) * gl.where(block < W, stride_w_s, stride_e_s)
        data = page + at % TOKENS * _DATA
        scales = page + TOKENS * _DATA + at % TOKENS * _SCALES
        ptrs = ptr + data[:, None, None] + offs
        tail_ptrs = ptr + gl.convert_layout(data, OF_KEYS_OUT, assert_trivial=True)[:, None] + offs_tail[None, :]
        s = (i + _STAGES) % _STAGES
        phase = (i // _STAGES) & 1
        # The right half is free first, and what scores begin with.
        if i >= 0:
            hopper.mbarrier.wait(free_r.index(s), phase ^ 1)
            kept = gl.convert_layout(counts, OF_KEYS_OUT, assert_trivial=True)
            last = gl.where(kept[:, None], tail, 0)[:, None, :]
            x = gl.where(is_tail, last, _decoded(words_r, scales_r, OUT))
            right.index(s).store(x.reshape([_KEYS, 128]))
            biases.index(s).store(gl.where(counts, 0.0, float("-inf")))
            hopper.fence_async_shared()
            barrier()
            hopper.mbarrier.arrive(ready_r.index(s), count=1)
        # The left half's came with what has just been decoded.
        scales_now = scales_l
        words_r = gl.load(ptrs + 64, mask=coded, other=0)
        tail = gl.load(tail_ptrs)
        scales_r = gl.load(ptr + scales + 1, mask=next_counts, other=0)
        scales_l = gl.load(ptr + scales, mask=next_counts, other=0)
        if i >= 0:
            hopper.async_copy.wait_group(0)
            words_l = raw.load(RAW)
            hopper.mbarrier.wait(free_l.index(s), phase ^ 1)
            left.index(s).store(_decoded(words_l, scales_now, OUT).reshape([_KEYS, 128]))
            hopper.fence_async_shared()
            barrier()
            hopper.mbarrier.arrive(ready_l.index(s), count=1)
            # Last: what is read from shared memory waits behind copies and loads that wait for theirs.
            copy_async(raw, ptrs)
            hopper.async_copy.commit_group()
        else:
            copy_async(raw, ptrs)
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
def _scores_of(s, phase, queries_l, queries_r, left, right, ready_l, ready_r, zeros):
    """Begin the product of queries and a tile of rows, [heads, keys]."""
    hopper.mbarrier.wait(ready_r.index(s), phase)
    rows = right.index(s).permute((1, 0))
    scores = hopper.warpgroup_mma(queries_r, rows, zeros, use_acc=False, is_async=True)
    hopper.mbarrier.wait(ready_l.index(s), phase)
    return hopper.warpgroup_mma(queries_l, left.index(s).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _put_weights(s, phase, scores, scale, top, total, biases, weights, decays, weights_ready, weights_free):
    """Give a tile's weights, and what older sums are multiplied by, to the right half; (decay, top, total)."""
    bias = biases.index(s).load(gl.SliceLayout(0, scores.type.layout))
    scores = scores * scale + bias[None, :]
    new_top = gl.maximum(top, gl.max(scores, 1))
    p = gl.exp2(scores - new_top[:, None])
    decay = gl.exp2(top - new_top)
    hopper.mbarrier.wait(weights_free.index(s), phase ^ 1)
    weights.index(s).store(p.to(gl.bfloat16))
    decays.index(s).store(decay)
    hopper.fence_async_shared()
    barrier()
    hopper.mbarrier.arrive(weights_ready.index(s), count=1)
    return decay, new_top, total * decay + gl.sum(p, 1)


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
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    acc = gl.zeros([64, _HALF], gl.float32, SUMS)
    zeros = gl.zeros([64, _KEYS], gl.float32, SCORES)
    # Of the turn before the first.
    weights.index(_STAGES - 1).store(zeros.to(gl.bfloat16))
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
    decay = total
    hopper.mbarrier.wait(queries_ready, 0)
    # The product with a tile's values comes behind that for the next one's scores, and beside their softmax; with the
    # first one's scores there is one with weights of 0, which costs less than code of its own for that turn. A part may
    # have no tile where few entries are closed.
    for i in range(turns):
        s = i % _STAGES
        phase = (i // _STAGES) & 1
        last = gl.maximum(i - 1, 0) % _STAGES
        scores = _scores_of(s, phase, queries_l, queries_r, left, right, ready_l, ready_r, zeros)
        acc = acc * gl.convert_layout(decay, OF_SUMS, assert_trivial=True)[:, None]
        acc = hopper.warpgroup_mma(weights.index((i + _STAGES - 1) % _STAGES), left.index(last), acc, is_async=True)
        scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
        decay, top, total = _put_weights(
            s, phase, scores, scale, top, total, biases, weights, decays, weights_ready, weights_free
        )
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        if i > 0:
            hopper.mbarrier.arrive(free_l.index(last), count=1)
    for _ in range(gl.minimum(turns, 1)):
        last = (turns - 1) % _STAGES
        acc = acc * gl.convert_layout(decay, OF_SUMS, assert_trivial=True)[:, None]
        acc = hopper.warpgroup_mma(weights.index(last), left.index(last), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    if SPLIT:
        heads = row + heads * step
        gl.store(tops_ptr + 4 * heads, top)
        gl.store(tops_ptr + 4 * heads + 1, total)
    else:
        totals.store(total)
        barrier()
        hopper.mbarrier.arrive(total_ready, count=1)
    total = gl.convert_layout(total, OF_SUMS, assert_trivial=True)
    _put_sums(acc, total, left, row, step, y_ptr, tops_ptr, 0, SPLIT)


@gluon.jit
def _attend_right(
    queries_r, weights, decays, totals, right, ready_r, free_r, queries_ready, weights_ready, weights_free, total_ready,
    q_ptr, y_ptr, tops_ptr, stride_q_h, row, step, turns, SPLIT: gl.constexpr,
):  # fmt: skip
    """The sums of the right half."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, SUMS)
    _put_queries(q_ptr, stride_q_h, queries_r, _HALF)
    hopper.mbarrier.arrive(queries_ready, count=1)
    acc = gl.zeros([64, _HALF], gl.float32, SUMS)
    for i in range(turns):
        s = i % _STAGES
        phase = (i // _STAGES) & 1
        # The weights imply the rows, but it is the writers' own fence that asynchronous products go by.
        hopper.mbarrier.wait(ready_r.index(s), phase)
        hopper.mbarrier.wait(weights_ready.index(s), phase)
        acc = acc * decays.index(s).load(OF_HEADS)[:, None]
        acc = hopper.warpgroup_mma(weights.index(s), right.index(s), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        barrier()
        hopper.mbarrier.arrive(free_r.index(s), count=1)
        hopper.mbarrier.arrive(weights_free.index(s), count=1)
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
):
    """64 heads of one token and every `splits`-th tile of its keys; a page's stride is in words."""
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
    # Blocks are dealt out in turn, so that the parts are equally long whatever is closed.
    turns = (blocks + W - split + splits - 1) // splits
    q_ptr += b * stride_q_b + head.to(gl.int64) * stride_q_h
    sinks_ptr += head * stride_sink
    window_ptr = (window_ptr + b * stride_w_b).to(gl.pointer_type(gl.int32), bitcast=True)
    entries_ptr = (entries_ptr + b * stride_e_b).to(gl.pointer_type(gl.int32), bitcast=True)
    indices_ptr += b * stride_i_b
    # Where the heads' results begin, and how far from one to the next.
    row, step = b * H + head, 1
    if SPLIT:
        row, step = row * splits + split, splits
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries_l = gl.allocate_shared_memory(gl.bfloat16, [64, _HALF], TILE)
    queries_r = gl.allocate_shared_memory(gl.bfloat16, [64, _HALF], TILE)
    left = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, _HALF], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _KEYS, _HALF], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 64, _KEYS], TILE)
    words_l = seen_as(left, gl.int32, [_STAGES, _KEYS, 128], WORDS)
    words_r = seen_as(right, gl.int32, [_STAGES, _KEYS, 128], WORDS)
    # A group of all keys side by side: what a warp reads at once has banks of its own.
    raw = gl.allocate_shared_memory(gl.int32, [_KEYS, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1]))
    biases = gl.allocate_shared_memory(gl.float32, [_STAGES, _KEYS], FLAT)
    decays = gl.allocate_shared_memory(gl.float32, [_STAGES, 64], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    ready_l, ready_r = allocate_barriers(_STAGES), allocate_barriers(_STAGES)
    free_l, free_r = allocate_barriers(_STAGES), allocate_barriers(_STAGES)
    weights_ready, weights_free = allocate_barriers(_STAGES), allocate_barriers(_STAGES)
    queries_ready, total_ready = allocate_barriers(1), allocate_barriers(1)
    init_barriers((ready_l, ready_r, free_l, free_r, weights_ready, weights_free), _STAGES)
    init_barriers((queries_ready, total_ready), 1)
    queries_ready, total_ready = queries_ready.index(0), total_ready.index(0)
    hopper.fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_attend_left, (queries_l, queries_r, weights, decays, totals, left, right, biases, ready_l, ready_r,
                            free_l, queries_ready, weights_ready, weights_free, total_ready, q_ptr, sinks_ptr, y_ptr,
                            tops_ptr, stride_q_h, stride_sink, scale, row, step, turns, split, SPLIT)),
            (_attend_right, (queries_r, weights, decays, totals, right, ready_r, free_r, queries_ready, weights_ready,
                             weights_free, total_ready, q_ptr, y_ptr, tops_ptr, stride_q_h, row, step, turns, SPLIT)),
            (_decode_rows, (words_l, words_r, raw, biases, ready_l, ready_r, free_l, free_r, window_ptr, entries_ptr,
                            indices_ptr, stride_w_s, stride_e_s, stride_i_a, n, before, closed, named, split, splits,
                            turns, SPAN, NAMED, TOKENS)),
        ],
        [4, _DECODERS],
        [_REGISTERS_RIGHT, _REGISTERS_DECODERS],
    )  # fmt: skip


@kernel
@gluon.jit(do_not_specialize=["splits"])
def _join_hopper_kernel(sums_ptr, tops_ptr, y_ptr, splits, PARTS: gl.constexpr):
    """The sum of four heads' parts, a warp each, scaled to the largest score of all; the sink makes totals positive.

    tops: [heads, splits, 4] of the largest score, the total, and what the sums of each half of the columns are times.
    PARTS: how many are read at once.
    """
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
        num_warps=4,
    )
    if splits > 1:
        parts = min(16, next_power_of_2(splits))
        _join_hopper_kernel[(B * H // 4,)](out, tops, y, splits, PARTS=parts, num_warps=4)
