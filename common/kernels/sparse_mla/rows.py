"""Rows of the window and entries as operands of products: FP8 pages are decoded in registers."""

from __future__ import annotations

from xpu_ports.common.kernels.fp8_pages import GROUP, decode_e4m3
from xpu_ports.common.tritonlib import tl, triton

_GROUP = tl.constexpr(GROUP)


# ----------------------------------------------------------------------------------------------------------- products


@triton.jit
def _high(x):
    """The first 8 bits of the mantissa of an fp32, as bf16: cut off in integers, which no compiler undoes."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _rest(x, high):
    """What `_high` left over; nothing of an infinity."""
    wide = high.to(tl.float32)
    return tl.where(wide == x, 0.0, x - wide)


@triton.jit
def product(a, b, acc, PARTS_A: tl.constexpr, PARTS_B: tl.constexpr):
    """acc + a b; an operand of more than one part is a sum of so many bf16, the products of the smallest left out."""
    if PARTS_A == 1 and PARTS_B == 1:
        acc = tl.dot(a, b, acc)
    else:
        a, b = a.to(tl.float32), b.to(tl.float32)
        a0, b0 = _high(a), _high(b)
        a, b = _rest(a, a0), _rest(b, b0)
        if PARTS_A > 1:
            acc = tl.dot(_high(a), b0, acc)
        if PARTS_B > 1:
            acc = tl.dot(a0, _high(b), acc)
        if PARTS_A > 1 and PARTS_B > 1:
            acc = tl.dot(_high(a), _high(b), acc)
        if PARTS_A > 2:
            acc = tl.dot(_high(_rest(a, _high(a))), b0, acc)
        if PARTS_B > 2:
            acc = tl.dot(a0, _high(_rest(b, _high(b))), acc)
        acc = tl.dot(a0, b0, acc)
    return acc


# --------------------------------------------------------------------------------------------------------------- rows


@triton.jit
def locate_tokens(slots, stride, OWN: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr):
    """(of a token's data, of its scales) the offsets in pages in 32-bit words, of a page's stride in words."""
    # Of as many words each, which Triton sees are multiples of 16 bytes where they are.
    data: tl.constexpr = (OWN + 2 * ROPE) // 4
    scales: tl.constexpr = (OWN // _GROUP + 7) // 8 * 2
    page, at = (slots // TOKENS).to(tl.int64) * stride, slots % TOKENS
    return page + at * data, page + TOKENS * data + at * scales


@triton.jit
def coded(ptr, data, scales, counts, first, OWN: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns from `first` on of tokens of pages, as far as they are e4m3, else 0: bf16, [keys, WIDTH]."""
    # The columns of one scale side by side, so that a scale is read once.
    groups: tl.constexpr = (WIDTH + _GROUP - 1) // _GROUP
    each: tl.constexpr = WIDTH // groups
    offs_g = tl.arange(0, groups)
    mask_g = first + offs_g * each < OWN
    scale_ptrs = ptr + (4 * scales + first // _GROUP)[:, None] + offs_g[None, :]
    scale = tl.load(scale_ptrs, mask=counts[:, None] & mask_g[None, :], other=0)
    columns = offs_g[:, None] * each + tl.arange(0, each)[None, :]
    code_ptrs = ptr + (4 * data + first)[:, None, None] + columns[None, :, :]
    codes = tl.load(code_ptrs, mask=counts[:, None, None] & mask_g[None, :, None], other=0)
    # e8m0 is the exponent of fp32.
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    x = decode_e4m3(codes) * factor[:, :, None]
    return tl.reshape(x.to(tl.bfloat16), (data.shape[0], WIDTH))


@triton.jit
def tail_of(ptr, data, counts, first, OWN: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns from `first` on of tokens of pages, as far as they are bf16, else 0: [keys, WIDTH]."""
    columns = first + tl.arange(0, WIDTH) - OWN
    ptrs = ptr.to(tl.pointer_type(tl.bfloat16)) + (2 * data + OWN // 2)[:, None] + columns[None, :]
    return tl.load(ptrs, mask=counts[:, None] & ((columns >= 0) & (columns < ROPE))[None, :], other=0.0)


@triton.jit
def with_tail(x, tail, OWN: tl.constexpr):
    """x [keys, columns] with its columns from OWN on from tail [keys, GROUP], within one group."""
    groups: tl.constexpr = x.shape[1] // _GROUP
    grouped = tl.reshape(x, (x.shape[0], groups, _GROUP))
    own = tl.arange(0, groups) * _GROUP < OWN
    return tl.reshape(tl.where(own[None, :, None], grouped, tail[:, None, :]), x.shape)


@triton.jit
def whole_tokens(ptr, data, scales, counts, OWN: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr):
    """Tokens of pages as they lie, in 32-bit words: four codes each, both of scales, and bf16 columns, of one group."""
    groups: tl.constexpr = WIDTH // _GROUP
    offs_g = tl.arange(0, groups)
    word_ptr = ptr.to(tl.pointer_type(tl.int32))
    low = tl.load(word_ptr + scales, mask=counts, other=0)
    high = tl.load(word_ptr + scales + 1, mask=counts, other=0)
    # Held from turn to turn as bf16 they would be taken apart, and so waited for, at once.
    pairs = tl.arange(0, _GROUP // 2)
    tail_ptrs = word_ptr + (data + OWN // 4)[:, None] + pairs[None, :]
    tail = tl.load(tail_ptrs, mask=counts[:, None] & (pairs < ROPE // 2)[None, :], other=0)
    # What does not count is read too, and multiplied by 0 later: no code becomes an infinity or NaN.
    columns = (offs_g * (_GROUP // 4))[:, None] + tl.arange(0, _GROUP // 4)[None, :]
    mask_g = (offs_g * _GROUP < OWN)[None, :, None]
    words = tl.load(word_ptr + data[:, None, None] + columns[None, :, :], mask=mask_g, other=0)
    return words, low, high, tail


@triton.jit
def decoded(words, low, high, tail, OWN: tl.constexpr):
    """What `whole_tokens` loads as bf16, [keys, columns], four codes at a time.

    For devices that surely compute with denormal bf16. Codes of NaN read as 480: a row that has one was NaN throughout,
    since rows are normalized, and its last columns say so. A row that does not count is 0, whatever is there.
    """
    keys: tl.constexpr = words.shape[0]
    groups: tl.constexpr = words.shape[1]
    offs_g = tl.arange(0, groups)
    scale = tl.where((offs_g < 4)[None, :], low[:, None], high[:, None]) >> (offs_g % 4 * 8)[None, :]
    factor = ((scale & 0xFF) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    odd = words
    even = words << 8
    # Sign, exponent and mantissa of two codes each where two bf16 have them: masks 0x80008000 and 0x07F007F0.
    odd = (odd & -0x7FFF8000) | ((odd >> 4) & 0x07F007F0)
    even = (even & -0x7FFF8000) | ((even >> 4) & 0x07F007F0)
    # A word's codes in order: even, odd of the low halves, then of the high ones.
    codes = tl.reshape(tl.join(_halves(even), _halves(odd)), (keys, groups, _GROUP))
    # The exponent's bias is 120 more.
    x = (codes.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36) * factor[:, :, None]
    last = tl.reshape(_halves(tail), (keys, _GROUP)).to(tl.bfloat16, bitcast=True)
    return with_tail(tl.reshape(x, (keys, groups * _GROUP)), last, OWN)


@triton.jit
def _halves(words):
    """The low and the high half of each word, a last dimension of int16."""
    return tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))


@triton.jit
def plain(ptr, slots, counts, stride, first, K: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns from `first` on of rows that are no pages, [keys, WIDTH]; 0 where a slot does not count."""
    columns = first + tl.arange(0, WIDTH)
    ptrs = ptr + slots.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(ptrs, mask=counts[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def rows_in(
    ptr,
    slots,
    counts,
    stride,
    K: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tokens in some slots, [keys, BLOCK_K]; 0 where a slot does not count. TOKENS of a page, 0 without pages."""
    if TOKENS == 0:
        x = plain(ptr, slots, counts, stride, 0, K, BLOCK_K)
    else:
        data, scales = locate_tokens(slots, stride, K - ROPE, ROPE, TOKENS)
        if WHOLE:
            words, low, high, tail = whole_tokens(ptr, data, scales, counts, K - ROPE, ROPE, BLOCK_K)
            x = decoded(words, low, high, tail, K - ROPE)
        else:
            x = coded(ptr, data, scales, counts, 0, K - ROPE, BLOCK_K)
            if ROPE <= _GROUP:
                x = with_tail(x, tail_of(ptr, data, counts, K - ROPE, K - ROPE, ROPE, _GROUP), K - ROPE)
            else:
                tail = tail_of(ptr, data, counts, 0, K - ROPE, ROPE, BLOCK_K)
                x = tl.where((tl.arange(0, BLOCK_K) < K - ROPE)[None, :], x, tail)
    return x
