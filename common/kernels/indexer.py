"""The lightning indexer: which compressed entries a token's attention looks at.

    score_j = sum_h w_h relu(q_h . k_j),   chosen = the k largest of those that are closed at the token

Source: DeepSeek-AI, "DeepSeek-V4", section 2.3.1, equations 13 to 17; its inference code (model.py, class Indexer).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.fp8_pages import (
    cache_rows,
    decode_e4m3,
    load_fp32,
    page_tokens,
    refuses_pages,
    store_slots,
)
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# A program holds the products of a tile of keys with all heads of a token.
MOST_HEADS = 128
LARGEST_HEAD = 256
# A program of `stable_topk` holds so many scores, of which it chooses a part.
SEGMENT = 16384
MOST_CHOSEN = 4096


@op
def indexer_scores(q: Tensor, weights: Tensor, keys: Tensor, entries: int, start: Tensor, ratio: int) -> Tensor:
    """How much each entry matters to each token.

    Args:
        q: [B, T, H, C], floating point.
        weights: [B, T, H], floating point, of either sign, with all scales in it.
        keys: [B, S, C], floating point, or pages of the indexer's layout [B, P, bytes], uint8 (see `fp8_pages`).
        entries: E, how many entries to score: at least those that any token sees, at most those that fit.
        start: [B], integers: the first token's position in its row.
        ratio: tokens of an entry: entry j is seen from position (j + 1) ratio - 1 on.

    Returns:
        [B, T, E], fp32 (fp64 for fp64), minus infinity where the token does not see the entry.
    """
    (B, T, H, C), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    j = torch.arange(entries, device=q.device)
    k = cache_rows.reference(keys, j.expand(B, -1), C, None).to(wide)
    scores = torch.zeros((B, T, entries), dtype=wide, device=q.device)
    # One head at a time: all at once would be H times the memory.
    for h in range(H):
        scores = scores + (q[:, :, h].to(wide) @ k.mT).relu() * weights[:, :, h, None].to(wide)
    seen = (start[:, None] + torch.arange(1, T + 1, device=q.device)) // ratio  # [B, T]
    return scores.masked_fill(j >= seen[..., None], float("-inf"))


@op
def stable_topk(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest scores; of equal ones the lower place is taken, on every device and in every length.

    Args:
        scores: [..., S], floating point; minus infinity is never taken, what is not a number only when all others are.
        k: how many, at least 1.

    Returns:
        [..., min(k, S)], int32, in rising order and then -1 where there are fewer.
    """
    order = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, scores)
    chosen = order.argsort(dim=-1, descending=True, stable=True)[..., :k]
    never = order.gather(-1, chosen) == float("-inf")
    last = scores.shape[-1]
    chosen = chosen.masked_fill(never, last).sort(dim=-1).values
    return chosen.masked_fill(chosen == last, -1).int()


# ------------------------------------------------------------------------------------------------------------- scores


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
def _keys(keys_ptr, offs_s, offs_c, mask_s, stride_s, C: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr):
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
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_S entries for BLOCK_T tokens, one after the other: an entry's key is read, and decoded, once for them."""
    b = tl.program_id(2).to(tl.int64)
    first_s, first_t = tl.program_id(0) * BLOCK_S, tl.program_id(1) * BLOCK_T
    last_t = tl.minimum(first_t + BLOCK_T, T)
    offs_s, offs_h, offs_c = first_s + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    start = tl.load(start_ptr + b * stride_start).to(tl.int32)
    t = first_t.to(tl.int64)
    y_ptrs = y_ptr + (b * T + t) * E + offs_s
    # What the last of the tokens sees is the most.
    seen = (start + last_t) // RATIO
    if first_s < seen:
        mask_s = (offs_s < E) & (offs_s < seen)
        k, scale = _keys(
            keys_ptr + b * stride_k_b, offs_s, offs_c, mask_s, stride_k_s, C, TOKENS, q_ptr.dtype.element_ty
        )
        q_ptrs = q_ptr + b * stride_q_b + t * stride_q_t + offs_c[:, None] + offs_h.to(tl.int64)[None, :] * stride_q_h
        w_ptrs = w_ptr + b * stride_w_b + t * stride_w_t + offs_h.to(tl.int64) * stride_w_h
        mask_q = (offs_c < C)[:, None] & (offs_h < H)[None, :]
        for position in range(start + first_t, start + last_t):
            q = tl.load(q_ptrs, mask=mask_q, other=0.0)
            w = tl.load(w_ptrs, mask=offs_h < H, other=0.0).to(tl.float32)
            products = tl.dot(k, q)
            products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
            y = tl.sum(products * w[None, :], axis=1) * scale
            tl.store(y_ptrs, tl.where(offs_s < (position + 1) // RATIO, y, float("-inf")), mask=offs_s < E)
            q_ptrs += stride_q_t
            w_ptrs += stride_w_t
            y_ptrs += E
    else:
        for _ in range(first_t, last_t):
            tl.store(y_ptrs, tl.full((BLOCK_S,), float("-inf"), tl.float32), mask=offs_s < E)
            y_ptrs += E


class ScoresTile(NamedTuple):
    """Entries and tokens of a program, its warps, and blocks in flight."""

    block_s: int
    block_t: int
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
                yield ScoresTile(block_s, block_t, 4, stages)


@tunable("indexer_scores", _candidates)
def tile(arch: Architecture, tokens: int, heads: int, columns: int) -> ScoresTile:
    """The tile for one token a row or many (`tokens` 1 or 2), and padded numbers of heads and columns."""
    block_t = 1 if tokens == 1 else 32
    if not arch.has_grf_modes:
        return ScoresTile(64 if tokens == 1 else 128, block_t, 4, 2)
    block_s = 32 if arch.matrix_units else 16
    return ScoresTile(block_s, block_t, 16, 1, 256)


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
            BLOCK_T=cut.block_t,
            BLOCK_S=cut.block_s,
            BLOCK_H=block_h,
            BLOCK_C=block_c,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **grf_options(cut.registers, arch),
        )
    return y


# ------------------------------------------------------------------------------------------------------------- choice


def _refuses_topk(scores: Tensor, k: int) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if scores.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"scores have dtype {scores.dtype}, not one of float16, bfloat16, float32"
    if not 1 <= scores.dim() <= 3:
        return f"scores have {scores.dim()} dimensions, not 1 to 3"
    return None if 1 <= k <= MOST_CHOSEN else f"{k} to choose, not 1 to {MOST_CHOSEN}"


@triton.jit
def _ordered(scores, LOWEST: tl.constexpr):
    """int32 that are in the order of the scores; NaN is the lowest number, and zero has no sign."""
    x = scores.to(tl.float32)
    x = tl.where(x != x, LOWEST, x)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # Of negative numbers the larger bits are the lower number.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(keys, K: tl.constexpr):
    """A number that at least K of the keys reach, of the largest such, bit by bit; any that just K reach will do."""
    threshold = tl.full((), -2147483648, tl.int32)
    bit = tl.full((), 31, tl.int32)
    reached = tl.full((), -1, tl.int32)
    while (bit >= 0) & (reached != K):
        # The highest bit is the sign, which is set in the lower half: turned over like the others.
        higher = threshold ^ (tl.full((), 1, tl.int32) << bit)
        count = tl.sum((keys >= higher).to(tl.int32), axis=0)
        threshold = tl.where(count >= K, higher, threshold)
        reached = tl.where(count >= K, count, reached)
        bit -= 1
    return threshold


# The number of scores changes with every few tokens: one kernel for all of a tile.
@kernel
@triton.jit(do_not_specialize=["S", "length"])
def _stable_topk_kernel(
    scores_ptr,
    places_ptr,
    chosen_ptr,
    N,
    S,
    length,
    stride_m,
    stride_n,
    stride_s,
    K: tl.constexpr,
    NAMED: tl.constexpr,
    LOWEST: tl.constexpr,
    NEVER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`length` scores of a row, or of the places of it that are named: the K largest, in the order they stand in."""
    row = tl.program_id(0).to(tl.int64)
    segment, segments = tl.program_id(1), tl.num_programs(1)
    scores_ptr += row // N * stride_m + row % N * stride_n
    offs = tl.arange(0, BLOCK_S)
    offs_s = segment.to(tl.int64) * length + offs
    mask_s = (offs < length) & (offs_s < S)
    if NAMED:
        places = tl.load(places_ptr + row * S + offs_s, mask=mask_s, other=-1)
        mask_s = places >= 0
    else:
        places = offs_s.to(tl.int32)
    scores = tl.load(scores_ptr + places.to(tl.int64) * stride_s, mask=mask_s, other=float("-inf"))
    keys = _ordered(scores, LOWEST)
    threshold = tl.maximum(_threshold(keys, K), NEVER)
    above, level = keys > threshold, keys == threshold
    # Of those on the threshold the first that there is room for: none where it is minus infinity.
    room = tl.where(threshold == NEVER, 0, K - tl.sum(above.to(tl.int32), axis=0))
    # Both counts in one: a segment has fewer than 2^15.
    counts = (above.to(tl.int32) << 16) | level.to(tl.int32)
    before = tl.cumsum(counts, axis=0) - counts
    place = (before >> 16) + tl.minimum(before & 0xFFFF, room)
    taken = above | (level & ((before & 0xFFFF) < room))
    chosen_ptr += (row * segments + segment) * K
    tl.store(chosen_ptr + place, places, mask=taken)
    offs_k = tl.arange(0, BLOCK_K)
    total = tl.sum(taken.to(tl.int32), axis=0)
    tl.store(chosen_ptr + offs_k, tl.full((BLOCK_K,), -1, tl.int32), mask=(offs_k < K) & (offs_k >= total))


@stable_topk.implement("triton", "xpu", "cuda", refuses=_refuses_topk)
def stable_topk_triton(scores: Tensor, k: int) -> Tensor:
    """The K largest of a long row are among the K largest of its parts, which then are a shorter row."""
    S = scores.shape[-1]
    K = min(k, S)
    chosen = torch.empty((*scores.shape[:-1], K), dtype=torch.int32, device=scores.device)
    if chosen.numel() == 0:
        return chosen
    strides = (0, 0, *scores.stride())[-3:]
    N = scores.shape[-2] if scores.dim() > 1 else 1
    rows = chosen.numel() // K
    places: Tensor | None = None
    while True:
        segments = cdiv(S, SEGMENT)
        out = chosen
        if segments > 1:
            out = torch.empty((rows, segments * K), dtype=torch.int32, device=scores.device)
        length = cdiv(S, segments)
        block_s = next_power_of_2(length)
        with on_device_of(scores):
            _stable_topk_kernel[(rows, segments)](
                scores,
                scores if places is None else places,
                out,
                N,
                S,
                length,
                *strides,
                K=K,
                NAMED=places is not None,
                LOWEST=torch.finfo(scores.dtype).min,
                # What minus infinity is in `_ordered`.
                NEVER=-0x7F800001,
                BLOCK_S=block_s,
                BLOCK_K=next_power_of_2(K),
                num_warps=max(1, min(block_s // 512, 32)),
            )
        if segments == 1:
            return chosen
        places, S = out, segments * K
