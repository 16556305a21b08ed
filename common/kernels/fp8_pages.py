"""Rows of a cache, one a token, in FP8: pages of bytes in the layout that serving engines keep DeepSeek-V4's in.

Keys of attention, K columns of which the last `rope` carry positions, are N = K - rope bytes of e4m3 in groups of 64
columns, then 2 rope bytes of bf16; a group has one byte of scale, 2^(byte - 127). A page holds the data of all its
tokens, N + 2 rope bytes each, and behind it the scales, padded with zeros to a multiple of 8 bytes a token; a page's
size is rounded up to a multiple of a token's data. With 512 and 64 columns: 448 + 128 bytes of data and 8 of scales.

Keys of the indexer are one group of K bytes of e4m3 with a scale in fp32, and a page is all the data and then all the
scales, 132 bytes a token at K = 128.

    a = max(max |x|, 1e-4),   s = 2^ceil(log2(a / 448)),   q = e4m3(x / s)

How many tokens a page has follows from its size. Rows are rounded to bf16 first, and what is read back is exact in it.

Source: FlashMLA 9241ae3, the cache that it calls MODEL1; the rule of the scales, with its floor on the largest value,
is that of vLLM 0.33.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, kernel, next_power_of_2, on_device_of, tl, triton

# Columns that share a scale, and the largest value of e4m3.
GROUP = 64
LARGEST = 448.0
# Below this a group's largest value is taken for this: its scale is 2^-22.
LEAST = 1e-4
# Tokens of a page, as serving engines have them.
PAGE_TOKENS = 64
# A program of `cache_rows` holds a row.
MOST_COLUMNS = 4096


def token_bytes(K: int, rope: int) -> tuple[int, int]:
    """Bytes of data and of scales of a token of attention's keys.

    Args:
        K: columns.
        rope: how many of them carry positions.

    Raises:
        ValueError: the others are no groups of 64.
    """
    if (K - rope) % GROUP or not 0 <= rope < K:
        raise ValueError(f"{K - rope} columns without positions, not a multiple of {GROUP}")
    return K + rope, -(-(K - rope) // GROUP // 8) * 8


def page_bytes(K: int, rope: int, tokens: int = PAGE_TOKENS) -> int:
    """Bytes of a page of attention's keys."""
    data, scales = token_bytes(K, rope)
    return -(-tokens * (data + scales) // data) * data


def index_page_bytes(K: int, tokens: int = PAGE_TOKENS) -> int:
    """Bytes of a page of the indexer's keys."""
    return tokens * (K + 4)


def exponents(rows: Tensor, group: int) -> Tensor:
    """log2 of the scales of groups of columns: [..., N] in fp32 to [..., N / group], int32.

    Read from the bits of a / 448, rounded up where its mantissa is not 0: a logarithm may miss a power of two.
    """
    largest = rows.unflatten(-1, (-1, group)).abs().amax(-1).clamp(min=LEAST)
    bits = (largest / LARGEST).view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).int() - 127


def encode(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """e4m3 as bytes, [..., N], and log2 of the scales, [..., N / group], of values of bf16, [..., N]."""
    rows = rows.float()
    log2 = exponents(rows, group)
    scaled = torch.ldexp(rows.unflatten(-1, (-1, group)), -log2[..., None]).clamp(-LARGEST, LARGEST)
    return scaled.flatten(-2).to(torch.float8_e4m3fn).view(torch.uint8), log2


def decode(data: Tensor, log2: Tensor) -> Tensor:
    """bf16, [..., N], of e4m3 as bytes, [..., N], and log2 of the scales, [..., N / group]."""
    values = data.view(torch.float8_e4m3fn).float().unflatten(-1, (log2.shape[-1], -1))
    return torch.ldexp(values, log2[..., None]).flatten(-2).bfloat16()


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _locate(slots: Tensor, tokens: int, each: int, start: int) -> tuple[Tensor, Tensor]:
    """Page, [..., 1], and offsets in it, [..., each], of `each` bytes a token that begin at `start`."""
    offsets = start + slots % tokens * each
    return slots[..., None] // tokens, offsets[..., None] + torch.arange(each, device=slots.device)


def _put(pages: Tensor, slots: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Write parts of rows, [B, T, bytes] each, the first of all tokens of a page before the second."""
    tokens = pages.shape[2] // sum(p.shape[-1] for p in parts)
    b, t = (slots >= 0).nonzero(as_tuple=True)
    start = 0
    for part in parts:
        page, offsets = _locate(slots[b, t].long(), tokens, part.shape[-1], start)
        pages[b[:, None], page, offsets] = part[b, t]
        start += tokens * part.shape[-1]


def _take(pages: Tensor, slots: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The inverse of `_put`: parts of `sizes` bytes; a slot below 0 gives the first token's."""
    tokens = pages.shape[2] // sum(sizes)
    b = torch.arange(pages.shape[0], device=pages.device)[:, None, None]
    parts, start = [], 0
    for size in sizes:
        page, offsets = _locate(slots.clamp(min=0).long(), tokens, size, start)
        parts.append(pages[b, page, offsets])
        start += tokens * size
    return parts


def write_pages(rows: Tensor, slots: Tensor, pages: Tensor, rope: int | None) -> None:
    """Quantize rows into pages.

    Args:
        rows: [B, T, K], floating point, of any strides; rounded to bf16 first.
        slots: [B, T], integers: which token of its row's pages each is; one below 0 is not written. Those of a row
            differ.
        pages: [B, P, bytes], uint8, written where slots say.
        rope: how many last columns stay bf16, in attention's keys; None for the indexer's.
    """
    rows = rows.detach().bfloat16()
    if rope is None:
        data, log2 = encode(rows, rows.shape[-1])
        _put(pages, slots, (data, _as_bytes(torch.ldexp(torch.ones_like(log2, dtype=torch.float32), log2))))
        return
    _, padded = token_bytes(rows.shape[-1], rope)
    own, tail = rows.split([rows.shape[-1] - rope, rope], dim=-1)
    data, log2 = encode(own, GROUP)
    scales = F.pad((log2 + 127).to(torch.uint8), (0, padded - log2.shape[-1]))
    _put(pages, slots, (torch.cat([data, _as_bytes(tail)], dim=-1), scales))


def read_pages(pages: Tensor, slots: Tensor, K: int, rope: int | None) -> Tensor:
    """Rows of pages: [B, S, K], bf16, exact; what a slot below 0 gives means nothing. See `write_pages`."""
    if rope is None:
        data, scales = _take(pages, slots, (K, 4))
        values = data.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
        return values.bfloat16()
    groups = (K - rope) // GROUP
    data, scales = _take(pages, slots, token_bytes(K, rope))
    own, tail = data.split([K - rope, 2 * rope], dim=-1)
    own = decode(own.contiguous(), scales[..., :groups].int() - 127)
    return torch.cat([own, tail.contiguous().view(torch.bfloat16)], dim=-1)


# ------------------------------------------------------------------------------- rows of a cache, quantized or not


def page_tokens(pages: Tensor, K: int, rope: int | None) -> int:
    """How many tokens a page has; see `write_pages`."""
    return pages.shape[2] // ((K + 4) if rope is None else sum(token_bytes(K, rope)))


def store_slots(store: Tensor, K: int, rope: int | None) -> int:
    """How many tokens a row of a store has room for."""
    return store.shape[1] * (page_tokens(store, K, rope) if store.dtype == torch.uint8 else 1)


def write_rows(store: Tensor, rows: Tensor, slots: Tensor, rope: int | None) -> Tensor:
    """Put rows into a store and give them back as it holds them.

    Args:
        store: [B, S, K], floating point, or pages [B, P, bytes], uint8; written.
        rows: [B, T, K].
        slots: [B, T]; one below 0 is not written.
        rope: as for `write_pages`.

    Returns:
        [B, T, K], in the store's dtype, bf16 of pages. Rows that are not written are rounded like the others.
    """
    if store.dtype != torch.uint8:
        rows = rows.to(store.dtype)
        b, t = (slots >= 0).nonzero(as_tuple=True)
        store[b, slots[b, t].long()] = rows.detach()[b, t]
        return rows
    write_pages(rows, slots, store, rope)
    B, T, K = rows.shape
    # One page that has them all, to read them back.
    page = index_page_bytes(K, T) if rope is None else page_bytes(K, rope, T)
    own = torch.zeros((B, 1, page), dtype=torch.uint8, device=rows.device)
    here = torch.arange(T, device=rows.device).expand(B, T)
    write_pages(rows, here, own, rope)
    return read_pages(own, here, K, rope)


def _fake_rows(store: Tensor, slots: Tensor, K: int, rope: int | None) -> Tensor:
    dtype = torch.bfloat16 if store.dtype == torch.uint8 else store.dtype
    return torch.empty((*slots.shape, K), dtype=dtype, device=store.device)


@op(fake=_fake_rows)
def cache_rows(store: Tensor, slots: Tensor, K: int, rope: int | None) -> Tensor:
    """Rows of a cache, out of FP8 pages or as they are.

    Args:
        store: [B, S, K], floating point, or pages [B, P, bytes], uint8, in the layout of this module's text.
        slots: [B, N], integers: which token of its row's store; one below 0 gives zeros.
        K: columns.
        rope: how many last columns of attention's keys are bf16 in pages; None for the indexer's keys.

    Returns:
        [B, N, K] in the store's dtype, bf16 of pages, exact.
    """
    if store.dtype == torch.uint8:
        rows = read_pages(store, slots, K, rope)
    else:
        rows = store.gather(1, slots.clamp(min=0).long()[..., None].expand(-1, -1, K))
    return torch.where(slots[..., None] >= 0, rows, 0.0)


def _refuses(store: Tensor, slots: Tensor, K: int, rope: int | None) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if store.dim() != 3 or slots.dim() != 2 or slots.shape[0] != store.shape[0]:
        return f"shapes {tuple(store.shape)} and {tuple(slots.shape)} of store and slots do not go together"
    if store.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.uint8):
        return f"store has dtype {store.dtype}, not one of float16, bfloat16, float32, uint8"
    if slots.dtype not in (torch.int32, torch.int64):
        return f"slots have dtype {slots.dtype}, not one of int32, int64"
    if not 0 < K <= MOST_COLUMNS:
        return f"{K} columns, not 1 to {MOST_COLUMNS}"
    if store.dtype != torch.uint8:
        return None if store.shape[2] == K else f"the store has {store.shape[2]} columns, not {K}"
    return refuses_pages(store, K, rope)


def refuses_pages(pages: Tensor, K: int, rope: int | None) -> str | None:
    """Why a kernel cannot read rows of K columns from pages, or None."""
    if pages.stride(2) != 1:
        return f"the last dimension of pages has stride {pages.stride(2)}, not 1"
    if rope is not None and ((K - rope) % GROUP or not 0 <= rope < K):
        return f"{K - rope} columns without positions, not a multiple of {GROUP}"
    tokens = page_tokens(pages, K, rope)
    return None if tokens else f"pages of {pages.shape[2]} bytes have no room for a token"


@triton.jit
def decode_e4m3(codes):
    """fp32 of e4m3 as bytes, in integers: Intel's conversion is wrong above 256."""
    code = codes.to(tl.int32)
    magnitude = code & 0x7F
    # The same exponent and mantissa in fp32, whose bias is larger by 120; below 8 there is no leading 1.
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 127, float("nan"), value)
    return tl.where(code > 127, -value, value)


@triton.jit
def load_fp32(ptrs, mask):
    """fp32 at pointers to its four bytes, which need not be aligned; 0 where masked."""
    bits = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, 4):
        bits |= tl.load(ptrs + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_page_rows(
    page_ptrs, at, columns, mask, K: tl.constexpr, ROPE: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr
):
    """Columns of tokens of pages of attention's keys, fp32 and exact in bf16; 0 where masked.

    page_ptrs (to a page's first byte), at (the token in it) and columns broadcast to the shape of mask.
    """
    own: tl.constexpr = K - ROPE
    scales: tl.constexpr = (own // GROUP + 7) // 8 * 8
    is_own = columns < own
    # Two bytes each behind the own columns.
    data_ptrs = page_ptrs + at * (K + ROPE) + tl.where(is_own, columns, 2 * columns - own)
    low = tl.load(data_ptrs, mask=mask, other=0)
    high = tl.load(data_ptrs + 1, mask=mask & (columns >= own), other=0)
    scale_ptrs = page_ptrs + TOKENS * (K + ROPE) + at * scales + columns // GROUP
    scale = tl.load(scale_ptrs, mask=mask & is_own, other=0)
    # e8m0 and bf16 are the upper bits of fp32.
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    tail = ((low.to(tl.int32) << 16) | (high.to(tl.int32) << 24)).to(tl.float32, bitcast=True)
    return tl.where(is_own, decode_e4m3(low) * factor, tail)


@kernel
@triton.jit
def _cache_rows_kernel(
    store_ptr,
    slots_ptr,
    rows_ptr,
    N,
    stride_s_b,
    stride_s_s,
    stride_s_k,
    stride_n_b,
    stride_n_n,
    K: tl.constexpr,
    ROPE: tl.constexpr,
    TOKENS: tl.constexpr,
    INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One row a program; TOKENS of a page, 0 where the store is no pages."""
    row = tl.program_id(0).to(tl.int64)
    b, n = row // N, row % N
    slot = tl.load(slots_ptr + b * stride_n_b + n * stride_n_n).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < tl.where(slot >= 0, K, 0)
    slot = tl.maximum(slot, 0)
    store_ptr += b * stride_s_b
    if TOKENS == 0:
        x = tl.load(store_ptr + slot * stride_s_s + offs_k.to(tl.int64) * stride_s_k, mask=mask_k, other=0.0)
    else:
        page_ptr = store_ptr + slot // TOKENS * stride_s_s
        at = slot % TOKENS
        if INDEX:
            scale = load_fp32(page_ptr + TOKENS * K + at * 4, True)
            x = decode_e4m3(tl.load(page_ptr + at * K + offs_k, mask=mask_k, other=0)) * scale
        else:
            x = load_page_rows(page_ptr, at, offs_k, mask_k, K, ROPE, TOKENS, GROUP)
    tl.store(rows_ptr + row * K + offs_k, x.to(rows_ptr.dtype.element_ty), mask=offs_k < K)


@cache_rows.implement("triton", "xpu", "cuda", refuses=_refuses)
def cache_rows_triton(store: Tensor, slots: Tensor, K: int, rope: int | None) -> Tensor:
    rows = _fake_rows(store, slots, K, rope)
    if rows.numel() == 0:
        return rows
    block_k = next_power_of_2(K)
    with on_device_of(store):
        _cache_rows_kernel[(slots.numel(),)](
            store,
            slots,
            rows,
            slots.shape[1],
            *store.stride(),
            *slots.stride(),
            K=K,
            ROPE=rope or 0,
            TOKENS=page_tokens(store, K, rope) if store.dtype == torch.uint8 else 0,
            INDEX=rope is None,
            GROUP=GROUP,
            BLOCK_K=block_k,
            num_warps=max(1, min(block_k // 128, 8)),
        )
    return rows
