"""Rotary position embedding of queries and keys, half-split layout, both in one launch; and its cosines and sines.

    [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin],   the angles of a position t being t theta_i

Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2; the split in halves is GPT-NeoX's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles.

    Args:
        positions: [B, T], int32 or int64, any row stride.
        frequencies: [K / 2], radians a position, contiguous.
        scale: factor on both results.

    Returns:
        (cos, sin), [B, T, K / 2] each, contiguous, in fp32 (fp64 for frequencies in it), as are the angles.
    """
    wide = torch.promote_types(frequencies.dtype, torch.float32)
    angles = positions[..., None].to(wide) * frequencies.to(wide)
    return angles.cos() * scale, angles.sin() * scale


@op
def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: [B, T, Hq, K], any strides; K is even.
        k: [B, T, Hk, K].
        cos, sin: [B or 1, T, K / 2], one angle for each pair (x[i], x[i + K / 2]); fp32 in models.

    Returns:
        (q, k) rotated, contiguous, in their own dtypes, rounded once.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    x1, x2 = x.to(wide).chunk(2, dim=-1)
    cos, sin = cos.to(wide)[:, :, None], sin.to(wide)[:, :, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def _refuses_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if positions.dtype not in (torch.int32, torch.int64) or positions.dim() != 2:
        return f"positions are {tuple(positions.shape)} of {positions.dtype}, not [B, T] of int32 or int64"
    if positions.stride(1) != 1:
        return f"the last dimension of positions has stride {positions.stride(1)}, not 1"
    if frequencies.dtype not in _FLOATS:
        return f"frequencies are of {frequencies.dtype}, not one of float16, bfloat16, float32"
    if frequencies.dim() != 1 or not frequencies.is_contiguous():
        return f"frequencies have shape {tuple(frequencies.shape)}, not one dimension, contiguous"
    return None


def refuses_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    for t in (q, k, cos, sin):
        if t.dtype not in _FLOATS:
            return f"dtype {t.dtype} is not one of float16, bfloat16, float32"
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension has stride {t.stride(-1)}, not 1"
    if q.dtype != k.dtype:
        return f"q is {q.dtype} and k is {k.dtype}"
    if q.shape[-1] % 2 or q.shape[-1] != k.shape[-1] or q.shape[-1] > 1024:
        return f"head widths are {q.shape[-1]} and {k.shape[-1]}, not equal, even and at most 1024"
    expected = (q.shape[1], q.shape[3] // 2)
    if cos.shape != sin.shape or cos.shape[1:] != expected or cos.shape[0] not in (1, q.shape[0]):
        return (
            f"cos and sin are {tuple(cos.shape)} and {tuple(sin.shape)}, expected {(q.shape[0], *expected)} or one row"
        )
    if q.shape[:2] != k.shape[:2]:
        return f"q is {tuple(q.shape)} and k is {tuple(k.shape)}: batch and tokens differ"
    return None


@kernel
@triton.jit
def _rotary_angles_kernel(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    T,
    stride_p_b,
    scale,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_HALF + tl.arange(0, BLOCK_HALF)
    mask_d = offs_d < HALF
    position = tl.load(positions_ptr + row // T * stride_p_b + row % T).to(tl.float32)
    angles = position * tl.load(frequencies_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    tl.store(cos_ptr + row * HALF + offs_d, tl.cos(angles) * scale, mask=mask_d)
    tl.store(sin_ptr + row * HALF + offs_d, tl.sin(angles) * scale, mask=mask_d)


@rotary_angles.implement("triton", "xpu", "cuda", refuses=_refuses_angles)
def rotary_angles_triton(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    (B, T), half = positions.shape, frequencies.shape[0]
    cos, sin = (torch.empty((B, T, half), dtype=torch.float32, device=positions.device) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    block = min(64, next_power_of_2(half))
    with on_device_of(positions):
        _rotary_angles_kernel[(B * T, cdiv(half, block))](
            positions, frequencies, cos, sin, T, positions.stride(0), scale,
            HALF=half, BLOCK_HALF=block, num_warps=cdiv(block, 32),
        )  # fmt: skip
    return cos, sin


@triton.jit
def turn_halves(x_ptrs, y_ptrs, cos, sin, mask, HALF: tl.constexpr):
    """Rotate heads, [heads, columns] of pointers to their first halves; cos and sin are [columns], in fp32."""
    x1 = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    # [x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]
    tl.store(y_ptrs, (x1 * cos[None, :] - x2 * sin[None, :]).to(y_ptrs.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + HALF, (x2 * cos[None, :] + x1 * sin[None, :]).to(y_ptrs.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def _rotary_embedding_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    T,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_cos_b,
    stride_cos_t,
    stride_sin_b,
    stride_sin_t,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    offs_d = tl.arange(0, BLOCK_HALF)
    mask_d = offs_d < HALF
    cos = tl.load(cos_ptr + b * stride_cos_b + t * stride_cos_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * stride_sin_b + t * stride_sin_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    # The first programs of a row rotate its queries, the others its keys.
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    if block < q_blocks:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (offs_h < HQ)[:, None] & mask_d[None, :]
        x_ptrs = q_ptr + b * stride_q_b + t * stride_q_t + offs_h.to(tl.int64)[:, None] * stride_q_h + offs_d[None, :]
        out_ptrs = q_out_ptr + (row * HQ + offs_h[:, None]) * (2 * HALF) + offs_d[None, :]
    else:
        offs_h = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (offs_h < HK)[:, None] & mask_d[None, :]
        x_ptrs = k_ptr + b * stride_k_b + t * stride_k_t + offs_h.to(tl.int64)[:, None] * stride_k_h + offs_d[None, :]
        out_ptrs = k_out_ptr + (row * HK + offs_h[:, None]) * (2 * HALF) + offs_d[None, :]
    turn_halves(x_ptrs, out_ptrs, cos, sin, mask, HALF)


@rotary_embedding.implement("triton", "xpu", "cuda", refuses=refuses_rotation)
def rotary_embedding_triton(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    B, T, HQ, K = q.shape
    HK = k.shape[2]
    q_out, k_out = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    if q_out.numel() == 0:
        return q_out, k_out
    block_half = next_power_of_2(K // 2)
    block_h = max(1, min(next_power_of_2(max(HQ, HK)), 1024 // block_half))
    # A table of one row serves all of the batch.
    stride_cos_b, stride_sin_b = (0 if t.shape[0] == 1 else t.stride(0) for t in (cos, sin))
    with on_device_of(q):
        _rotary_embedding_kernel[(B * T, cdiv(HQ, block_h) + cdiv(HK, block_h))](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            T,
            *q.stride()[:3],
            *k.stride()[:3],
            stride_cos_b,
            cos.stride(1),
            stride_sin_b,
            sin.stride(1),
            HQ=HQ,
            HK=HK,
            HALF=K // 2,
            BLOCK_H=block_h,
            BLOCK_HALF=block_half,
            num_warps=max(1, min(4, block_h * block_half // 256)),
        )
    return q_out, k_out
