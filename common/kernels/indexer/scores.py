"""The indexer's scores: a tile of keys beside the heads of one token after another, on the matrix units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.fp8_pages import decode_e4m3, load_fp32, page_tokens, refuses_pages, store_slots
from xpu_ports.common.kernels.indexer import indexer_scores
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# A program holds the products of a tile of keys with the heads of a token.
MOST_HEADS = 128
LARGEST_HEAD = 256


def _refuses_scores(q: Tensor, weights: Tensor, keys: Tensor, entries: int, start: Tensor, ratio: int) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}, not one of float16, bfloat16, which matrix units take"
    if q.dim() != 4 or weights.shape != q.shape[:3]:
        return f"q and weights have shapes {tuple(q.shape)} and {tuple(weights.shape)}, not (B, T, H, C) and (B, T, H)"
    B, _, H, C = q.shape
    if weights.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"weights have dtype {weights.dtype}, not one of float16, bfloat16, float32"
    if not (0 < H <= MOST_HEADS and 0 < C <= LARGEST_HEAD):
        return f"{H} heads of {C} columns, not 1 to {MOST_HEADS} of 1 to {LARGEST_HEAD}"
    if q.stride(3) != 1 and C > 1:
        return f"the last dimension of q has stride {q.stride(3)}, not 1"
    if start.shape != (B,) or start.dtype not in (torch.int32, torch.int64):
        return f"start has shape {tuple(start.shape)} and dtype {start.dtype}, not ({B},), int32 or int64"
    return _refuses_keys(keys, B, C, entries, q.dtype)


def _refuses_keys(keys: Tensor, B: int, C: int, entries: int, dtype: torch.dtype) -> str | None:
    if keys.dim() != 3 or keys.shape[0] != B:
        return f"keys have shape {tuple(keys.shape)}, not ({B}, ...) in 3 dimensions"
    if keys.dtype == torch.uint8:
        refusal = refuses_pages(keys, C, None)
        if refusal is not None:
            return refusal
    elif keys.dtype != dtype or keys.shape[2] != C:
        return f"keys are {tuple(keys.shape)} in {keys.dtype}, not {C} columns in {dtype}"
    elif keys.stride(2) != 1 and C > 1:
        return f"the last dimension of keys has stride {keys.stride(2)}, not 1"
    slots = store_slots(keys, C, None)
    return f"{entries} entries, and there is room for {slots}" if entries > slots else None


@triton.jit
def _index_keys(keys_ptr, offs_s, offs_c, mask_s, stride_s, C: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr):
    """Entries' keys [BLOCK_S, BLOCK_C] without their scales, and the scales [BLOCK_S]; TOKENS of a page, 0 for none."""
    mask = mask_s[:, None] & (offs_c < C)[None, :]
    if TOKENS == 0:
        k = tl.load(keys_ptr + offs_s.to(tl.int64)[:, None] * stride_s + offs_c[None, :], mask=mask, other=0.0)
        scale = tl.full(offs_s.shape, 1.0, tl.float32)
    else:
        page_ptrs = keys_ptr + (offs_s // TOKENS).to(tl.int64) * stride_s
        at = offs_s % TOKENS
        codes = tl.load(page_ptrs[:, None] + at[:, None] * C + offs_c[None, :], mask=mask, other=0)
        # Each is exact in 16 bits.
        k = decode_e4m3(codes).to(DTYPE)
        scale = load_fp32(page_ptrs + TOKENS * C + at * 4, mask_s)
    return k, scale


@triton.jit
def _chunked_products(
    keys_ptr,
    q_ptrs,
    offs_s,
    mask_s,
    mask_h,
    stride_s,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HEADS: tl.constexpr,
):
    """k q^T, [BLOCK_S, HEADS], CHUNK columns at a time: few registers, the keys read again.

    A loop at run time: what does not change from token to token would be kept in registers otherwise.
    """
    products = tl.zeros((BLOCK_S, HEADS), dtype=tl.float32)
    for c in range(0, BLOCK_C, CHUNK):
        offs_c = c + tl.arange(0, CHUNK)
        q = tl.load(q_ptrs[None, :] + offs_c[:, None], mask=(offs_c < C)[:, None] & mask_h[None, :], other=0.0)
        k, _ = _index_keys(keys_ptr, offs_s, offs_c, mask_s, stride_s, C, TOKENS, q_ptrs.dtype.element_ty)
        products = tl.dot(k, q, products)
    return products


# The number of entries changes with every few tokens: one kernel for all.
@kernel
@triton.jit(do_not_specialize=["E"])
def _indexer_scores_kernel(
    q_ptr,
    w_ptr,
    keys_ptr,
    start_ptr,
    y_ptr,
    T,
    E,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_w_b,
    stride_w_t,
    stride_w_h,
    stride_k_b,
    stride_k_s,
    stride_start,
    H: tl.constexpr,
    C: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_S entries for BLOCK_T tokens, one after the other: an entry's key is read, and decoded, once for them."""
    b = tl.program_id(2).to(tl.int64)
    first_s, first_t = tl.program_id(0) * BLOCK_S, tl.program_id(1) * BLOCK_T
    last_t = tl.minimum(first_t + BLOCK_T, T)
    offs_s, offs_h, offs_c = first_s + tl.arange(0, BLOCK_S), tl.arange(0, HEADS), tl.arange(0, BLOCK_C)
    start = tl.load(start_ptr + b * stride_start).to(tl.int32)
    t = first_t.to(tl.int64)
    y_ptrs = y_ptr + (b * T + t) * E + offs_s
    # What the last of the tokens sees is the most.
    seen = (start + last_t) // RATIO
    if first_s < seen:
        mask_s = (offs_s < E) & (offs_s < seen)
        keys_ptr += b * stride_k_b
        k, scale = _index_keys(keys_ptr, offs_s, offs_c, mask_s, stride_k_s, C, TOKENS, q_ptr.dtype.element_ty)
        q_ptrs = q_ptr + b * stride_q_b + t * stride_q_t + offs_h.to(tl.int64) * stride_q_h
        w_ptrs = w_ptr + b * stride_w_b + t * stride_w_t + offs_h.to(tl.int64) * stride_w_h
        for position in range(start + first_t, start + last_t):
            y = tl.zeros((BLOCK_S,), dtype=tl.float32)
            for h in tl.static_range(0, BLOCK_H, HEADS):
                mask_h = h + offs_h < H
                if CHUNK == BLOCK_C:
                    mask_q = (offs_c < C)[:, None] & mask_h[None, :]
                    q = tl.load((q_ptrs + h * stride_q_h)[None, :] + offs_c[:, None], mask=mask_q, other=0.0)
                    products = tl.dot(k, q)
                else:
                    products = _chunked_products(
                        keys_ptr,
                        q_ptrs + h * stride_q_h,
                        offs_s,
                        mask_s,
                        mask_h,
                        stride_k_s,
                        C,
                        TOKENS,
                        CHUNK,
                        BLOCK_S,
                        BLOCK_C,
                        HEADS,
                    )
                products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
                w = tl.load(w_ptrs + h * stride_w_h, mask=mask_h, other=0.0).to(tl.float32)
                y += tl.sum(products * w[None, :], axis=1)
            y = tl.where(offs_s < (position + 1) // RATIO, y * scale, float("-inf"))
            tl.store(y_ptrs, y, mask=offs_s < E)
            q_ptrs += stride_q_t
            w_ptrs += stride_w_t
            y_ptrs += E
    else:
        for _ in range(first_t, last_t):
            tl.store(y_ptrs, tl.full((BLOCK_S,), float("-inf"), tl.float32), mask=offs_s < E)
            y_ptrs += E


class ScoresTile(NamedTuple):
    """Entries and tokens of a program, heads and columns of a product, its warps, and blocks in flight."""

    block_s: int
    block_t: int
    heads: int
    chunk: int
    warps: int
    stages: int
    # Registers a thread, where that can be chosen.
    registers: int = 128


def _candidates(arch: Architecture, tokens: int, heads: int, columns: int) -> Iterator[ScoresTile]:
    if arch.has_grf_modes:
        return
    for block_s in (64, 128):
        for block_t in (1,) if tokens == 1 else (16, 32, 64):
            for stages in (2, 3):
                yield ScoresTile(block_s, block_t, min(heads, 64), columns, 4, stages)


@tunable("indexer_scores", _candidates)
def tile(arch: Architecture, tokens: int, heads: int, columns: int) -> ScoresTile:
    """The tile for one token a row or many (`tokens` 1 or 2), and padded numbers of heads and columns."""
    block_t = 1 if tokens == 1 else 32
    if not arch.has_grf_modes:
        return ScoresTile(64 if tokens == 1 else 128, block_t, min(heads, 64), columns, 4, 2)
    if not arch.matrix_units:
        return ScoresTile(16, block_t, 16, 16, 16, 1, 256)
    return ScoresTile(32, block_t, min(heads, 64), columns, 16, 1, 256)


@indexer_scores.implement("triton", "xpu", "cuda", refuses=_refuses_scores)
def indexer_scores_triton(q: Tensor, weights: Tensor, keys: Tensor, entries: int, start: Tensor, ratio: int) -> Tensor:
    B, T, H, C = q.shape
    y = torch.empty((B, T, entries), dtype=torch.float32, device=q.device)
    if y.numel() == 0:
        return y
    arch = architecture(q.device)
    block_h, block_c = max(16, next_power_of_2(H)), max(16, next_power_of_2(C))
    cut = tile(arch, min(T, 2), block_h, block_c)
    with on_device_of(q):
        _indexer_scores_kernel[(cdiv(entries, cut.block_s), cdiv(T, cut.block_t), B)](
            q,
            weights,
            keys,
            start,
            y,
            T,
            entries,
            *q.stride()[:3],
            *weights.stride(),
            *keys.stride()[:2],
            start.stride(0),
            H=H,
            C=C,
            RATIO=ratio,
            TOKENS=page_tokens(keys, C, None) if keys.dtype == torch.uint8 else 0,
            HEADS=cut.heads,
            CHUNK=cut.chunk,
            BLOCK_T=cut.block_t,
            BLOCK_S=cut.block_s,
            BLOCK_H=block_h,
            BLOCK_C=block_c,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **grf_options(cut.registers, arch),
        )
    return y
