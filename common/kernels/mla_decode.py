"""Attention of one new token a row against a cache of latents, which serve all heads as keys and as values.

    y = softmax(scale q c^T + mask) c[:, :R]

With a head's key and value maps absorbed into its query and its output, what it attends to is a token's row of the
cache itself: R columns of latent and some that are keys alone. A program has a tile of heads and reads each row once
for all of them, on the matrix units; the keys are split over programs as in `decode_attention`.

Source: DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.2 and appendix C; the split over keys is
Flash-Decoding's (Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.decode_attention import NEVER, decode_attention, join_kernel, read_mask
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# A program holds the sums of a latent's columns for all its heads, and the queries' columns of one kind.
LARGEST_LATENT = 512
LARGEST_REST = 128
# Parts that the keys are split into, at most.
MOST_SPLITS = 128


@op
def mla_decode(q: Tensor, rows: Tensor, mask: Tensor | None, latent: int, scale: float) -> Tensor:
    """Attend with one query a row and head.

    Args:
        q: [B, H, R + K], any strides: against the latent, then against the rest of a row.
        rows: [B, S, R + K] in q's dtype, any strides.
        mask: [B or 1, S], as `decode_attention` takes it. None where all keys count.
        latent: R, the columns that are values too.
        scale: factor on q rows^T.

    Returns:
        [B, H, R] in q's dtype; 0 in a row without a key that counts. All is computed in fp32 (fp64 for fp64); a
        kernel rounds the weights that it sums the values with to q's dtype.
    """
    return decode_attention.reference(q, rows[:, None], rows[:, None, :, :latent], mask, scale)


def _refuses(q: Tensor, rows: Tensor, mask: Tensor | None, latent: int, scale: float) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype} is not one of float16, bfloat16, which matrix units take"
    if rows.dtype != q.dtype:
        return f"dtypes {q.dtype} and {rows.dtype} of q and rows differ"
    if q.dim() != 3 or rows.dim() != 3 or rows.shape[0] != q.shape[0] or rows.shape[2] != q.shape[2]:
        return f"shapes {tuple(q.shape)} and {tuple(rows.shape)} of q and rows do not go together"
    rest = q.shape[2] - latent
    if not (0 < latent <= LARGEST_LATENT and 0 <= rest <= LARGEST_REST):
        return f"{latent} and {rest} columns, not 1 to {LARGEST_LATENT} and 0 to {LARGEST_REST}"
    for name, t in (("q", q), ("rows", rows)):
        if t.stride(2) != 1 and t.shape[2] > 1:
            return f"the last dimension of {name} has stride {t.stride(2)}, not 1"
    if mask is None:
        return None
    if mask.shape not in ((q.shape[0], rows.shape[1]), (1, rows.shape[1])):
        return f"mask has shape {tuple(mask.shape)}, expected ({q.shape[0]} or 1, {rows.shape[1]})"
    if mask.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.bool):
        return f"mask has dtype {mask.dtype}, not one of float16, bfloat16, float32, bool"
    return None


@triton.jit
def _queries(q_ptr, columns, offs_h, mask_h, stride_q_h, WIDTH: tl.constexpr):
    """Some columns of all queries, [columns, heads]."""
    ptrs = q_ptr + columns[:, None] + offs_h[None, :] * stride_q_h
    return tl.load(ptrs, mask=(columns < WIDTH)[:, None] & mask_h[None, :], other=0.0)


@triton.jit
def _keys(rows_ptr, offs_s, columns, counts, stride_r_s, WIDTH: tl.constexpr):
    """Some columns of some rows, [keys, columns], 0 where a row does not count."""
    ptrs = rows_ptr + offs_s[:, None] * stride_r_s + columns[None, :]
    return tl.load(ptrs, mask=counts[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _chunked_scores(
    q_ptr,
    rows_ptr,
    offs_h,
    offs_s,
    mask_h,
    counts,
    stride_q_h,
    stride_r_s,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """c q^T over the latent, [BLOCK_S, BLOCK_H], CHUNK columns at a time: few registers, the queries read again."""
    scores = tl.zeros((BLOCK_S, BLOCK_H), dtype=tl.float32)
    for c in tl.static_range(0, R, CHUNK):
        columns = c + tl.arange(0, CHUNK)
        q = _queries(q_ptr, columns, offs_h, mask_h, stride_q_h, R)
        k = _keys(rows_ptr, offs_s, columns, counts, stride_r_s, R)
        scores = tl.dot(k, q, scores)
    return scores


# The number of keys changes with every token: one kernel for all.
@kernel
@triton.jit(do_not_specialize=["S"])
def _mla_decode_kernel(
    q_ptr,
    rows_ptr,
    mask_ptr,
    y_ptr,
    S,
    scale,
    stride_q_b,
    stride_q_h,
    stride_r_b,
    stride_r_s,
    stride_m_b,
    stride_m_s,
    H: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    MASK: tl.constexpr,
    ADDITIVE: tl.constexpr,
    NEVER: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All products are [keys or columns, heads]: warps share the rows of an accumulator, and heads are the few."""
    tiles: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    pid, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b = (pid // tiles).to(tl.int64)
    offs_h = (pid % tiles * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    mask_h = offs_h < H
    offs_r, offs_k = tl.arange(0, BLOCK_R), R + tl.arange(0, BLOCK_K)
    q_ptr += b * stride_q_b
    rows_ptr += b * stride_r_b
    mask_ptr += b * stride_m_b
    if CHUNK == BLOCK_R:
        q_r = _queries(q_ptr, offs_r, offs_h, mask_h, stride_q_h, R)
    if K > 0:
        q_k = _queries(q_ptr, offs_k, offs_h, mask_h, stride_q_h, R + K)
    # Exponents are of 2. The largest score so far starts low, not at -inf, so that no difference is NaN.
    scale *= 1.4426950408889634
    top = tl.full((BLOCK_H,), -1e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_H), dtype=tl.float32)
    # Blocks are dealt out in turn, so that the parts of a cache that is filled to some point are equally long.
    for start in range(split * BLOCK_S, S, splits * BLOCK_S):
        offs_s = (start + tl.arange(0, BLOCK_S)).to(tl.int64)
        counts, bias = read_mask(mask_ptr + offs_s * stride_m_s, offs_s < S, MASK, ADDITIVE, NEVER)
        v = _keys(rows_ptr, offs_s, offs_r, counts, stride_r_s, R)
        if CHUNK == BLOCK_R:
            scores = tl.dot(v, q_r)
        else:
            scores = _chunked_scores(
                q_ptr, rows_ptr, offs_h, offs_s, mask_h, counts, stride_q_h, stride_r_s, R, CHUNK, BLOCK_H, BLOCK_S
            )
        if K > 0:
            scores = tl.dot(_keys(rows_ptr, offs_s, offs_k, counts, stride_r_s, R + K), q_k, scores)
        scores = tl.where(counts[:, None], scores * scale + bias[:, None], float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=0))
        p, decay = tl.exp2(scores - new_top[None, :]), tl.exp2(top - new_top)
        top, total = new_top, total * decay + tl.sum(p, axis=0)
        acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * decay[None, :])
    row = b * H + offs_h
    mask_y = (offs_r < R)[:, None] & mask_h[None, :]
    if SPLIT:
        # What `join_kernel` reads: acc, top and total of each part.
        part_ptrs = y_ptr + (row * splits + split) * (R + 2)
        tl.store(part_ptrs[None, :] + offs_r[:, None], acc, mask=mask_y)
        tl.store(part_ptrs + R, top, mask=mask_h)
        tl.store(part_ptrs + R + 1, total, mask=mask_h)
    else:
        y = acc / tl.where(total == 0.0, 1.0, total)[None, :]
        tl.store(y_ptr + row[None, :] * R + offs_r[:, None], y.to(y_ptr.dtype.element_ty), mask=mask_y)


@dataclass(frozen=True)
class Tile:
    """What one program takes: heads, keys at a time, columns of a score's product at a time, its warps."""

    heads: int
    keys: int
    chunk: int
    warps: int
    # Registers a thread, where that can be chosen.
    registers: int = 128


def tile(architecture: Architecture, latent: int) -> Tile:
    """The tile for latents of some columns, 16 heads, which is the least that matrix units take.

    On an H200 32 heads or 8 warps gain nothing, and code that Triton 3.6 makes for 64 keys faults.
    """
    width = max(16, next_power_of_2(latent))
    if not architecture.has_grf_modes:
        return Tile(16, 32, width, 4)
    # 64 keys, 8 warps or 128 registers spill on Max and Xe2; Arc A has half of their shared memory.
    keys, chunk = (32, 64) if architecture.matrix_units else (16, 32)
    return Tile(16, keys, min(chunk, width), 16, 256)


def split(architecture: Architecture, programs: int, S: int, block_s: int) -> int:
    """How many parts the keys are split into: by shapes alone, so that a captured launch stays right.

    Two programs a unit, which is what their registers allow; parts differ by one block at most.
    """
    blocks = cdiv(S, block_s)
    wanted = min(cdiv(2 * architecture.units, programs), MOST_SPLITS)
    return cdiv(blocks, cdiv(blocks, wanted))


@mla_decode.implement("triton", "xpu", "cuda", refuses=_refuses)
def mla_decode_triton(q: Tensor, rows: Tensor, mask: Tensor | None, latent: int, scale: float) -> Tensor:
    B, H, width = q.shape
    S = rows.shape[1]
    y = torch.empty((B, H, latent), dtype=q.dtype, device=q.device)
    if y.numel() == 0:
        return y
    if S == 0:
        return y.zero_()
    arch = architecture(q.device)
    cut = tile(arch, latent)
    programs = B * cdiv(H, cut.heads)
    splits = split(arch, programs, S, cut.keys)
    out = y if splits == 1 else torch.empty((B * H * splits * (latent + 2),), dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _mla_decode_kernel[(programs, splits)](
            q,
            rows,
            q if mask is None else mask,
            out,
            S,
            scale,
            *q.stride()[:2],
            *rows.stride()[:2],
            # A mask of one row serves all of the batch.
            0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
            0 if mask is None else mask.stride(1),
            H=H,
            R=latent,
            K=width - latent,
            MASK=mask is not None,
            ADDITIVE=mask is not None and mask.dtype != torch.bool,
            NEVER=NEVER,
            SPLIT=splits > 1,
            CHUNK=cut.chunk,
            BLOCK_H=cut.heads,
            BLOCK_S=cut.keys,
            BLOCK_R=max(16, next_power_of_2(latent)),
            BLOCK_K=max(16, next_power_of_2(width - latent)),
            num_warps=cut.warps,
            # Two blocks in flight gain nothing: other programs' are.
            num_stages=1,
            **grf_options(cut.registers, arch),
        )
        if splits > 1:
            block_v = min(32, next_power_of_2(latent))
            join_kernel[(B * H, cdiv(latent, block_v))](
                out, y, splits, V=latent, BLOCK_SPLITS=next_power_of_2(splits), BLOCK_V=block_v, num_warps=4
            )
    return y
