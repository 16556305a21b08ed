"""Attention of one new token a row against a cache of keys and values.

    y = softmax(scale q k^T + mask) v

The keys are split over programs, each with an online softmax of its own, and the parts are joined in a second, small
launch where there is more than one. Keys that do not count are not loaded, so that the unused part of a static cache
costs its mask alone.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867), section 3; the split
over keys is Flash-Decoding's (Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# An additive mask's value from which on down a key does not count: the lowest number of fp16.
NEVER = -65504.0
# The widest head of keys or values: a program holds one whole.
LARGEST_HEAD = 256
# Parts that the keys of one head are split into, at most.
MOST_SPLITS = 32
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend with one query a row and head.

    Args:
        q: [B, H, K], any strides.
        k: [B, G, S, K], any strides; G divides H, query head h reads key head h // (H / G).
        v: [B, G, S, V], any strides.
        mask: [B or 1, S]: bool, True where a key counts, or floating point, added to the scaled scores; a key at -65504
            or below (-inf, the lowest number of any dtype) does not count. What such keys and their values hold, NaN
            too, has no effect. None where all count.
        scale: factor on q k^T.

    Returns:
        [B, H, V] in q's dtype, rounded once: everything before is fp32 (fp64 for fp64). A row with no key that counts
        gives 0.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    G, S = k.shape[1:3]
    if mask is None:
        mask = torch.ones(1, S, dtype=torch.bool, device=q.device)
    additive = mask.dtype != torch.bool
    counts = mask > NEVER if additive else mask
    counts = counts[:, None, None]  # [B or 1, 1, 1, S]
    k, v = (torch.where(counts.mT, t.to(wide), 0.0) for t in (k, v))
    scores = q.to(wide).unflatten(1, (G, -1)) @ k.mT * scale  # [B, G, H / G, S]
    if additive:
        scores = scores + mask.to(wide)[:, None, None]
    weights = scores.masked_fill(~counts, float("-inf")).softmax(dim=-1).masked_fill(~counts, 0.0)
    return (weights @ v).flatten(1, 2).to(q.dtype)


def _refuses(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dtype not in _FLOATS:
        return f"dtype {q.dtype} is not one of float16, bfloat16, float32"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype} and {v.dtype} of q, k and v differ"
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions, not 3, 4 and 4"
    B, H, K = q.shape
    G = k.shape[1]
    if k.shape[0] != B or k.shape[3] != K or v.shape[:3] != k.shape[:3] or G == 0 or H % G:
        return f"shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} of q, k and v do not go together"
    if max(K, v.shape[3]) > LARGEST_HEAD:
        return f"heads of {K} and {v.shape[3]}, more than {LARGEST_HEAD}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    if mask is None:
        return None
    if mask.shape not in ((B, k.shape[2]), (1, k.shape[2])):
        return f"mask has shape {tuple(mask.shape)}, expected ({B} or 1, {k.shape[2]})"
    if mask.dtype not in (*_FLOATS, torch.bool):
        return f"mask has dtype {mask.dtype}, not one of float16, bfloat16, float32, bool"
    return None


@triton.jit
def read_mask(mask_ptrs, inside, MASK: tl.constexpr, ADDITIVE: tl.constexpr, NEVER: tl.constexpr):
    """(whether each key counts, what is added to its score in units of log 2)."""
    bias = tl.zeros(inside.shape, dtype=tl.float32)
    if not MASK:
        return inside, bias
    mask = tl.load(mask_ptrs, mask=inside, other=0)
    if not ADDITIVE:
        return inside & (mask != 0), bias
    mask = mask.to(tl.float32)
    return inside & (mask > NEVER), mask * 1.4426950408889634


@triton.jit
def _attend_lanes(q, k_ptrs, v_ptrs, mask_k, mask_v, bias, counts, top, total, acc):
    """Take in a block of keys, each place in it with a softmax of its own: no sum over keys until the end.

    q [M, 1, K], scaled; k_ptrs [S, K]; v_ptrs [S, V]; bias and counts [S]; top and total [M, S]; acc [M, S, V].
    """
    k = tl.load(k_ptrs[None, :, :], mask=counts[None, :, None] & mask_k[None, None, :], other=0.0).to(tl.float32)
    v = tl.load(v_ptrs[None, :, :], mask=counts[None, :, None] & mask_v[None, None, :], other=0.0).to(tl.float32)
    scores = tl.where(counts[None, :], tl.sum(q * k, axis=2) + bias[None, :], float("-inf"))
    new_top = tl.maximum(top, scores)
    p, decay = tl.exp2(scores - new_top), tl.exp2(top - new_top)
    return new_top, total * decay + p, acc * decay[:, :, None] + p[:, :, None] * v


@triton.jit
def _attend_dot(q, k_ptrs, v_ptrs, mask_k, mask_v, bias, counts, top, total, acc, scale):
    """Take in a block of keys on the matrix units.

    q [M, K]; k_ptrs [S, K]; v_ptrs [S, V]; bias and counts [S]; top and total [M]; acc [M, V].
    """
    k = tl.load(k_ptrs, mask=counts[:, None] & mask_k[None, :], other=0.0)
    v = tl.load(v_ptrs, mask=counts[:, None] & mask_v[None, :], other=0.0)
    scores = tl.where(counts[None, :], tl.dot(q, tl.trans(k)) * scale + bias[None, :], float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    p, decay = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
    # In two halves, so that the weights are not rounded to 16 bits.
    high = p.to(v.dtype)
    low = (p - high.to(tl.float32)).to(v.dtype)
    acc = tl.dot(high, v, acc * decay[:, None])
    acc = tl.dot(low, v, acc)
    return new_top, total * decay + tl.sum(p, axis=1), acc


# The number of keys changes with every token: one kernel for all.
@kernel
@triton.jit(do_not_specialize=["S"])
def _decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    y_ptr,
    S,
    scale,
    stride_q_b,
    stride_q_h,
    stride_k_b,
    stride_k_g,
    stride_k_s,
    stride_v_b,
    stride_v_g,
    stride_v_s,
    stride_m_b,
    stride_m_s,
    G: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    ADDITIVE: tl.constexpr,
    NEVER: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    pid, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    g = (pid // tiles % G).to(tl.int64)
    b = (pid // (tiles * G)).to(tl.int64)
    offs_m = pid % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_h = g * M + offs_m
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    mask_m, mask_k, mask_v = offs_m < M, offs_k < K, offs_v < V
    q_ptrs = q_ptr + b * stride_q_b + offs_h[:, None] * stride_q_h + offs_k[None, :]
    q = tl.load(q_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
    # Exponents are of 2. The largest score so far starts low, not at -inf, so that no difference is NaN.
    scale *= 1.4426950408889634
    if DOT:
        top = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    else:
        q = (q.to(tl.float32) * scale)[:, None, :]
        top = tl.full((BLOCK_M, BLOCK_S), -1e30, dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_S, BLOCK_V), dtype=tl.float32)
    total = tl.zeros(top.shape, dtype=tl.float32)
    k_ptr += b * stride_k_b + g * stride_k_g
    v_ptr += b * stride_v_b + g * stride_v_g
    mask_ptr += b * stride_m_b
    # Blocks are dealt out in turn, so that the parts of a cache that is filled to some point are equally long.
    for start in range(split * BLOCK_S, S, splits * BLOCK_S):
        offs_s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        counts, bias = read_mask(mask_ptr + offs_s * stride_m_s, offs_s < S, MASK, ADDITIVE, NEVER)
        k_ptrs = k_ptr + offs_s[:, None] * stride_k_s + offs_k[None, :]
        v_ptrs = v_ptr + offs_s[:, None] * stride_v_s + offs_v[None, :]
        # No branch around blocks of which no key counts: the loads of the next block start before this one is done.
        if DOT:
            top, total, acc = _attend_dot(q, k_ptrs, v_ptrs, mask_k, mask_v, bias, counts, top, total, acc, scale)
        else:
            top, total, acc = _attend_lanes(q, k_ptrs, v_ptrs, mask_k, mask_v, bias, counts, top, total, acc)
    if not DOT:
        lanes = top
        top = tl.max(lanes, axis=1)
        weight = tl.exp2(lanes - top[:, None])
        total = tl.sum(total * weight, axis=1)
        acc = tl.sum(acc * weight[:, :, None], axis=1)
    row = b * (G * M) + offs_h
    mask_y = mask_m[:, None] & mask_v[None, :]
    if SPLIT:
        # What `join_kernel` reads: acc, top and total of each part.
        part_ptrs = y_ptr + (row * splits + split) * (V + 2)
        tl.store(part_ptrs[:, None] + offs_v[None, :], acc, mask=mask_y)
        tl.store(part_ptrs + V, top, mask=mask_m)
        tl.store(part_ptrs + V + 1, total, mask=mask_m)
    else:
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(y_ptr + row[:, None] * V + offs_v[None, :], y.to(y_ptr.dtype.element_ty), mask=mask_y)


@kernel
@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    part_ptr,
    y_ptr,
    splits,
    V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Sum the parts of one row, each scaled to the largest score of all."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_p = tl.arange(0, BLOCK_SPLITS)
    mask_p, mask_v = offs_p < splits, offs_v < V
    part_ptrs = part_ptr + (row * splits + offs_p) * (V + 2)
    acc_ptrs = part_ptrs[:, None] + offs_v[None, :]
    acc = tl.load(acc_ptrs, mask=mask_p[:, None] & mask_v[None, :], other=0.0)
    top = tl.load(part_ptrs + V, mask=mask_p, other=float("-inf"))
    total = tl.load(part_ptrs + V + 1, mask=mask_p, other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    total = tl.sum(total * weight, axis=0)
    y = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(y_ptr + row * V + offs_v, y.to(y_ptr.dtype.element_ty), mask=mask_v)


class Block(NamedTuple):
    """One program's: whether it goes to the matrix units, its queries and keys, its warps."""

    dot: bool
    block_m: int
    block_s: int
    warps: int


def _candidates(arch: Architecture, dtype: torch.dtype, M: int, K: int, V: int) -> Iterator[Block]:
    """As many sums a lane as the rule takes; matrix units where it takes them."""
    width = next_power_of_2(max(K, V))
    rule = tile.rule(arch, torch.float32, M, K, V)
    for warps in (rule.warps, 2 * rule.warps):
        if tile.rule(arch, dtype, M, K, V).dot:
            yield from (Block(True, 16, keys, warps) for keys in (32, 64, 128) if keys * width <= 128 * 128)
        sums = rule.block_m * rule.block_s * warps // rule.warps
        yield from (Block(False, queries, sums // queries, warps) for queries in (1, 2, 4) if queries <= rule.block_m)


@tunable("decode_attention", _candidates)
def tile(arch: Architecture, dtype: torch.dtype, M: int, K: int, V: int) -> Block:
    """The block for M queries of one key head.

    The sums take an fp32 register for each query and element of the values: 32 a lane, on Intel 8, on Arc A 4, which
    is where its compiler stops spilling. It spills the matrix units' two products in every shape. Elsewhere they are
    the faster way even for one query, padded to 16.
    """
    width = next_power_of_2(max(K, V))
    most_queries, elements, warps = 4, 4096, 4
    if arch.has_grf_modes:
        most_queries, elements, warps = (2, 2048, 8) if arch.matrix_units else (1, 1024, 8)
    elif arch.matrix_units and dtype != torch.float32:
        return Block(True, 16, 32, 4)
    block_m = min(next_power_of_2(M), most_queries)
    return Block(False, block_m, max(1, min(128, elements // (block_m * width))), warps)


def split(architecture: Architecture, programs: int, S: int, block_s: int) -> int:
    """How many parts the keys are split into: by shapes alone, so that a captured launch stays right.

    Four programs a unit hide the latency of memory; parts differ by one block at most.
    """
    blocks = cdiv(S, block_s)
    wanted = min(cdiv(4 * architecture.units, programs), MOST_SPLITS)
    return cdiv(blocks, cdiv(blocks, wanted))


@decode_attention.implement("triton", "xpu", "cuda", refuses=_refuses)
def decode_attention_triton(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    B, H, K = q.shape
    _, G, S, V = v.shape
    y = torch.empty((B, H, V), dtype=q.dtype, device=q.device)
    if y.numel() == 0:
        return y
    if S == 0:
        return y.zero_()
    arch = architecture(q.device)
    dot, block_m, block_s, warps = tile(arch, q.dtype, H // G, K, V)
    programs = B * G * cdiv(H // G, block_m)
    splits = split(arch, programs, S, block_s)
    out = y if splits == 1 else torch.empty((B * H * splits * (V + 2),), dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _decode_attention_kernel[(programs, splits)](
            q,
            k,
            v,
            q if mask is None else mask,
            out,
            S,
            scale,
            *q.stride()[:2],
            *k.stride()[:3],
            *v.stride()[:3],
            # A mask of one row serves all of the batch.
            0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
            0 if mask is None else mask.stride(1),
            G=G,
            M=H // G,
            K=K,
            V=V,
            MASK=mask is not None,
            ADDITIVE=mask is not None and mask.dtype != torch.bool,
            NEVER=NEVER,
            SPLIT=splits > 1,
            DOT=dot,
            BLOCK_M=block_m,
            BLOCK_S=block_s,
            BLOCK_K=max(16, next_power_of_2(K)),
            BLOCK_V=max(16, next_power_of_2(V)),
            num_warps=warps,
        )
        if splits > 1:
            block_v = min(32, next_power_of_2(V))
            join_kernel[(B * H, cdiv(V, block_v))](
                out, y, splits, V=V, BLOCK_SPLITS=MOST_SPLITS, BLOCK_V=block_v, num_warps=4
            )
    return y
