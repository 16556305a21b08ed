"""The kernels of both ops, in which a decode step is a sequence of one token."""

from __future__ import annotations

from xpu_ports.common.kernels.sparse_mla.rows import (
    coded,
    decoded,
    locate_tokens,
    plain,
    product,
    rows_in,
    tail_of,
    whole_tokens,
)
from xpu_ports.common.tritonlib import kernel, tl, triton


@triton.jit
def _scores_in_chunks(
    q_ptrs,
    ptr,
    slots,
    counts,
    mask_h,
    stride,
    K: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PARTS_Q: tl.constexpr,
    PARTS_R: tl.constexpr,
):
    """c q^T, [keys, heads], CHUNK columns at a time: few registers, rows and queries read again."""
    scores = tl.zeros((slots.shape[0], BLOCK_H), dtype=tl.float32)
    offs_c = tl.arange(0, CHUNK)
    if TOKENS == 0:
        for first in range(0, K, CHUNK):
            c = plain(ptr, slots, counts, stride, first, K, CHUNK)
            mask = (first + offs_c < K)[:, None] & mask_h[None, :]
            q = tl.load(q_ptrs[None, :] + first + offs_c[:, None], mask=mask, other=0.0)
            scores = product(c, q, scores, PARTS_R, PARTS_Q)
    else:
        data, scales = locate_tokens(slots, stride, K - ROPE, ROPE, TOKENS)
        for first in range(0, K - ROPE, CHUNK):
            c = coded(ptr, data, scales, counts, first, K - ROPE, CHUNK)
            q = tl.load(q_ptrs[None, :] + first + offs_c[:, None], mask=mask_h[None, :], other=0.0)
            scores = product(c, q, scores, PARTS_R, PARTS_Q)
        for first in range(K - ROPE, K, CHUNK):
            c = tail_of(ptr, data, counts, first, K - ROPE, ROPE, CHUNK)
            mask = (first + offs_c < K)[:, None] & mask_h[None, :]
            q = tl.load(q_ptrs[None, :] + first + offs_c[:, None], mask=mask, other=0.0)
            scores = product(c, q, scores, PARTS_R, PARTS_Q)
    return scores


@triton.jit
def _weighed(scores, top, total):
    """(weights, decay, top, total) with the scores [heads, keys] of more keys."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    p, decay = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    return p, decay, new_top, total * decay + tl.sum(p, axis=1)


@triton.jit
def _take_in(
    q,
    q_ptrs,
    ptr,
    slots,
    counts,
    mask_h,
    stride,
    scale,
    top,
    total,
    acc,
    K: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS_Q: tl.constexpr,
    PARTS_R: tl.constexpr,
):
    """(top, total, acc) with the tokens in some slots; acc [BLOCK_H, BLOCK_K] where WHOLE, else [BLOCK_K, BLOCK_H]."""
    # Rows that do not count are 0.
    bias = tl.where(counts, 0.0, float("-inf"))
    if WHOLE:
        c = rows_in(ptr, slots, counts, stride, K, ROPE, TOKENS, WHOLE, BLOCK_K)
        p, decay, new_top, total = _weighed(tl.dot(q, tl.trans(c)) * scale + bias[None, :], top, total)
        acc = tl.dot(p.to(c.dtype), c, acc * decay[:, None])
    else:
        scores = _scores_in_chunks(
            q_ptrs, ptr, slots, counts, mask_h, stride, K, ROPE, TOKENS, CHUNK, BLOCK_H, PARTS_Q, PARTS_R
        )
        scores = scores * scale + bias[:, None]
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        p, decay = tl.exp2(scores - new_top[None, :]), tl.exp2(top - new_top)
        total = total * decay + tl.sum(p, axis=0)
        if PARTS_Q == 1:
            p = p.to(q_ptrs.dtype.element_ty)
        # Not before: fewer registers.
        c = rows_in(ptr, slots, counts, stride, K, ROPE, TOKENS, WHOLE, BLOCK_K)
        acc = product(tl.trans(c), p, acc * decay[None, :], PARTS_R, PARTS_Q)
    return new_top, total, acc


@triton.jit
def window_slots(offs, n, before, SPAN: tl.constexpr, RING: tl.constexpr, BLOCK_S: tl.constexpr):
    """(slots, whether they count) of tokens of the window, in blocks; the n-th token of a row is the window's last.

    RING: position p is at slot p mod `before`; else at slot `before` + p - (n - 1).
    """
    counts = n - SPAN + offs >= 0
    if SPAN % BLOCK_S != 0:
        counts = counts & (offs < SPAN)
    if RING:
        # One division of scalars: the ring has at least SPAN slots.
        slots = (n - SPAN + before) % before + offs
        slots = tl.where(slots >= before, slots - before, slots)
    else:
        slots = before + 1 - SPAN + offs
        counts = counts & (slots >= 0)
    return slots, counts


@triton.jit
def _of_window(block, n, before, SPAN: tl.constexpr, RING: tl.constexpr, BLOCK_S: tl.constexpr):
    """(slots, whether they count) of a block of the window."""
    return window_slots(block * BLOCK_S + tl.arange(0, BLOCK_S), n, before, SPAN, RING, BLOCK_S)


@triton.jit
def _of_entries(block, indices_ptr, closed, named, stride, NAMED: tl.constexpr, BLOCK_S: tl.constexpr):
    """(slots, whether they count) of a block of the entries named, or of all that are closed; none before block 0."""
    offs = block * BLOCK_S + tl.arange(0, BLOCK_S)
    # What is negative is large without a sign.
    counts = offs.to(tl.uint32) < named.to(tl.uint32)
    slots = offs
    if NAMED:
        slots = tl.load(indices_ptr + offs.to(tl.int64) * stride, mask=counts, other=-1).to(tl.int32)
        slots = tl.where(slots < closed, slots, -1)
        counts = slots >= 0
    return slots, counts


@triton.jit
def _of_either(
    block, n, before, closed, named, window_ptr, entries_ptr, indices_ptr, stride_w_s, stride_e_s, stride_i_a,
    SPAN: tl.constexpr, RING: tl.constexpr, NAMED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """(the store, its stride, slots, whether they count) of a block of the window, or behind it of the entries."""
    window_blocks: tl.constexpr = (SPAN + BLOCK_S - 1) // BLOCK_S
    inside = block < window_blocks
    at, counts = _of_window(block, n, before, SPAN, RING, BLOCK_S)
    at_e, counts_e = _of_entries(block - window_blocks, indices_ptr, closed, named, stride_i_a, NAMED, BLOCK_S)
    # As numbers: a select of truths takes three operations.
    at = tl.where(inside, tl.where(counts, at, -1), at_e if NAMED else tl.where(counts_e, at_e, -1))
    counts = at >= 0
    at = tl.maximum(at, 0)
    return tl.where(inside, window_ptr, entries_ptr), tl.where(inside, stride_w_s, stride_e_s), at, counts


# Numbers of tokens, entries and slots change from call to call: one kernel for all.
@kernel
@triton.jit(do_not_specialize=["T", "before", "slots", "named", "one"])
def _sparse_mla_kernel(
    q_ptr,
    window_ptr,
    entries_ptr,
    indices_ptr,
    lengths_ptr,
    sinks_ptr,
    y_ptr,
    tops_ptr,
    T,
    before,
    slots,
    named,
    scale,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_w_b,
    stride_w_s,
    stride_e_b,
    stride_e_s,
    stride_i_b,
    stride_i_t,
    stride_i_a,
    stride_l,
    stride_sink,
    one,
    H: tl.constexpr,
    K: tl.constexpr,
    ROPE: tl.constexpr,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    DECODE: tl.constexpr,
    ENTRIES: tl.constexpr,
    NAMED: tl.constexpr,
    ALIKE: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS_W: tl.constexpr,
    TOKENS_E: tl.constexpr,
    PARTS_Q: tl.constexpr,
    PARTS_W: tl.constexpr,
    PARTS_E: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of heads of one token.

    ALIKE: the window is stored as the entries are, and one loop takes in both. AHEAD: both are pages, and a block's
    rows are on their way while the one before it is attended to. `one` is 1.
    """
    tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, t = (pid // tiles // T).to(tl.int64), pid // tiles % T
    offs_h = (pid % tiles * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask_h = offs_h < H
    n = tl.load(lengths_ptr + b * stride_l).to(tl.int32)
    if not DECODE:
        n += t + 1
        before += t
    q_ptrs = q_ptr + b * stride_q_b + t.to(tl.int64) * stride_q_t + offs_h * stride_q_h
    window_ptr += b * stride_w_b
    entries_ptr += b * stride_e_b
    indices_ptr += b * stride_i_b + t.to(tl.int64) * stride_i_t
    # Exponents are of 2. The largest score so far starts low, not at -inf, so that no difference is NaN.
    scale *= 1.4426950408889634
    top = tl.full((BLOCK_H,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    if split == 0:
        # The sink is a key without a value, of the first part.
        sink = tl.load(sinks_ptr + offs_h * stride_sink, mask=mask_h, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(sink < -1e30, -1e30, sink)
        total = tl.full((BLOCK_H,), 1.0, dtype=tl.float32)
    # Rows that are loaded ahead come before the queries, which shared memory waits for.
    q = top
    if WHOLE:
        if not AHEAD:
            q = tl.load(q_ptrs[:, None] + offs_k[None, :], mask=mask_h[:, None] & (offs_k < K)[None, :], other=0.0)
        acc = tl.zeros((BLOCK_H, BLOCK_K), dtype=tl.float32)
    else:
        # Warps share the rows of an accumulator, and heads are the few.
        acc = tl.zeros((BLOCK_K, BLOCK_H), dtype=tl.float32)
    window_blocks: tl.constexpr = (SPAN + BLOCK_S - 1) // BLOCK_S
    closed, blocks = slots, 0
    if ENTRIES:
        if not (DECODE and NAMED):
            closed = tl.minimum(n // RATIO, slots)
        if not NAMED:
            named = closed
        blocks = tl.cdiv(named, BLOCK_S)
    # Blocks are dealt out in turn, so that the parts are equally long whatever is closed.
    if AHEAD:
        OWN: tl.constexpr = K - ROPE
        ptr, stride, at, counts = _of_either(
            split, n, before, closed, named, window_ptr, entries_ptr, indices_ptr, stride_w_s, stride_e_s,
            stride_i_a, SPAN, DECODE, NAMED, BLOCK_S,
        )  # fmt: skip
        data, scales = locate_tokens(at, stride, OWN, ROPE, TOKENS_W)
        words, low, high, tail = whole_tokens(ptr, data, scales, counts, OWN, ROPE, BLOCK_K)
        q = tl.load(q_ptrs[:, None] + offs_k[None, :], mask=mask_h[:, None] & (offs_k < K)[None, :], other=0.0)
        bias = tl.where(counts, 0.0, float("-inf"))
        for block in range(split, window_blocks + blocks, splits):
            ptr, stride, at, counts = _of_either(
                block + splits, n, before, closed, named, window_ptr, entries_ptr, indices_ptr, stride_w_s, stride_e_s,
                stride_i_a, SPAN, DECODE, NAMED, BLOCK_S,
            )  # fmt: skip
            data, scales = locate_tokens(at, stride, OWN, ROPE, TOKENS_W)
            c = decoded(words, low, high, tail, OWN)
            # Before both products, so that their time is the loads' too: issuing 37 KB takes longer than the softmax.
            words, low, high, tail = whole_tokens(ptr, data, scales, counts, OWN, ROPE, BLOCK_K)
            scores = tl.zeros((BLOCK_H, BLOCK_S), dtype=tl.float32)
            # In a loop Triton sees no chain of two products, of which it has warps share the heads alone.
            for _ in range(one):
                scores = tl.dot(q, tl.trans(c), scores)
            p, decay, top, total = _weighed(scores * scale + bias[None, :], top, total)
            acc = tl.dot(p.to(c.dtype), c, acc * decay[:, None])
            bias = tl.where(counts, 0.0, float("-inf"))
    elif ALIKE:
        for block in range(split, window_blocks + blocks, splits):
            ptr, stride, at, counts = _of_either(
                block, n, before, closed, named, window_ptr, entries_ptr, indices_ptr, stride_w_s, stride_e_s,
                stride_i_a, SPAN, DECODE, NAMED, BLOCK_S,
            )  # fmt: skip
            top, total, acc = _take_in(
                q, q_ptrs, ptr, at, counts, mask_h, stride, scale, top, total, acc,
                K, ROPE, TOKENS_W, WHOLE, CHUNK, BLOCK_H, BLOCK_K, PARTS_Q, PARTS_W,
            )  # fmt: skip
    else:
        for block in range(split, window_blocks, splits):
            at, counts = _of_window(block, n, before, SPAN, DECODE, BLOCK_S)
            at = tl.where(counts, at, 0)
            top, total, acc = _take_in(
                q, q_ptrs, window_ptr, at, counts, mask_h, stride_w_s, scale, top, total, acc,
                K, ROPE, TOKENS_W, WHOLE, CHUNK, BLOCK_H, BLOCK_K, PARTS_Q, PARTS_W,
            )  # fmt: skip
        # The part whose turn it is begins.
        turn = (split + splits - window_blocks % splits) % splits
        for block in range(turn, blocks, splits):
            at, counts = _of_entries(block, indices_ptr, closed, named, stride_i_a, NAMED, BLOCK_S)
            at = tl.where(counts, at, 0)
            top, total, acc = _take_in(
                q, q_ptrs, entries_ptr, at, counts, mask_h, stride_e_s, scale, top, total, acc,
                K, ROPE, TOKENS_E, WHOLE, CHUNK, BLOCK_H, BLOCK_K, PARTS_Q, PARTS_E,
            )  # fmt: skip
    row = (b * T + t) * H + offs_h
    if SPLIT:
        row = row * splits + split
        tl.store(tops_ptr + 2 * row, top, mask=mask_h)
        tl.store(tops_ptr + 2 * row + 1, total, mask=mask_h)
    elif WHOLE:
        acc = acc / total[:, None]
    else:
        acc = acc / total[None, :]
    if WHOLE:
        y_ptrs = y_ptr + row[:, None] * K + offs_k[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_h[:, None] & (offs_k < K)[None, :])
    else:
        y_ptrs = y_ptr + row[None, :] * K + offs_k[:, None]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask_h[None, :] & (offs_k < K)[:, None])


@kernel
@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    parts_ptr,
    tops_ptr,
    y_ptr,
    splits,
    K: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum the parts of one head, each scaled to the largest score of all; the sink makes the total positive."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_p = tl.arange(0, BLOCK_SPLITS)
    mask_p, mask_k = offs_p < splits, offs_k < K
    part = row * splits + offs_p
    acc_ptrs = parts_ptr + part[:, None] * K + offs_k[None, :]
    acc = tl.load(acc_ptrs, mask=mask_p[:, None] & mask_k[None, :], other=0.0)
    top = tl.load(tops_ptr + 2 * part, mask=mask_p, other=float("-inf"))
    total = tl.load(tops_ptr + 2 * part + 1, mask=mask_p, other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    y = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(y_ptr + row * K + offs_k, y.to(y_ptr.dtype.element_ty), mask=mask_k)
