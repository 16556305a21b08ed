"""RMS normalization and rotary embedding of a layer's queries and keys, in place, in one launch.

    n = x / sqrt(mean(x^2) + eps) * weight,   [n1, n2] -> [n1 cos - n2 sin, n2 cos + n1 sin]

Sources: Henry et al., "Query-Key Normalization for Transformers" (arXiv:2010.04245); Su et al., "RoFormer"
(arXiv:2104.09864), section 3.2, whose pairs are neighbours; GPT-NeoX splits the head in halves instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

HEAD_DIMS = (64, 128, 256)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op(mutates=("q", "k"))
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos_sin: Tensor,
    positions: Tensor | None = None,
    split: int = 0,
    interleaved: bool = True,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> None:
    """Normalize each head by its root mean square, then rotate its first R elements by the angles of its position.

    Args:
        q: [B, T, Hq, D], written; any strides, such as those of a slice of a wider projection.
        k: [B, T, Hk, D], written; strides of its own.
        q_weights: one [D] for all tokens, or two: for the first `split` tokens and for the others.
        k_weights: as many, for the keys.
        cos_sin: [P, R], R <= D even: cosines, then sines, of R / 2 angles for each position; fp32 in models.
        positions: [T] or [B, T], int32 or int64, the row of cos_sin for each token; None for 0, 1, 2, ...
        split: how many tokens have the first weight, where there are two.
        interleaved: pairs are (x[2i], x[2i + 1]); else (x[i], x[i + R / 2]).
        eps: added to the mean square.
        round_norm: round the normalized value to q's dtype before it is rotated, as diffusers does; else the result is
            rounded once.

    Returns:
        None: q and k are the results. No backward of its own.
    """
    for x, weights in ((q, q_weights), (k, k_weights)):
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = _by_token(weights, split, x.shape[1]).to(wide)
        # A copy, so that autograd may keep it while x is written.
        x_wide = x.to(wide, copy=True)
        y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps) * weight
        if round_norm:
            y = y.to(x.dtype).to(wide)
        x.copy_(_rotate(y, _angles(cos_sin, positions, x.shape[1]).to(wide), interleaved))


def _by_token(weights: list[Tensor], split: int, T: int) -> Tensor:
    """[D] or [T, 1, D]."""
    if len(weights) == 1:
        return weights[0]
    first, last = weights
    return torch.cat([first.expand(split, -1), last.expand(T - split, -1)])[:, None]


def _angles(cos_sin: Tensor, positions: Tensor | None, T: int) -> Tensor:
    """[1 or B, T, 1, R]."""
    rows = cos_sin[:T] if positions is None else cos_sin[positions]
    return rows[None, :, None] if rows.dim() == 2 else rows[:, :, None]


def _rotate(y: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    R = cos_sin.shape[-1]
    cos, sin = cos_sin.chunk(2, dim=-1)
    head, rest = y[..., :R], y[..., R:]
    y1, y2 = head.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else head.chunk(2, dim=-1)
    turned = y1 * cos - y2 * sin, y2 * cos + y1 * sin
    head = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat([head, rest], dim=-1)


def _refuses(
    q: Tensor,
    k: Tensor,
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos_sin: Tensor,
    positions: Tensor | None = None,
    split: int = 0,
    interleaved: bool = True,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dim() != 4 or k.dim() != 4:
        return f"q and k have {q.dim()} and {k.dim()} dimensions, not 4"
    B, T, _, D = q.shape
    if q.dtype not in _FLOATS or k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}, not one of float16, bfloat16, float32"
    if k.shape[:2] != (B, T) or k.shape[3] != D:
        return f"q is {tuple(q.shape)} and k is {tuple(k.shape)}: batch, tokens or head width differ"
    if D not in HEAD_DIMS:
        return f"heads are {D} wide, not one of {HEAD_DIMS}"
    if q.stride(3) != 1 or k.stride(3) != 1:
        return f"the last dimension has strides {q.stride(3)} and {k.stride(3)}, not 1"
    return _refuses_weights(q_weights, k_weights, D) or _refuses_angles(cos_sin, positions, B, T, D)


def _refuses_weights(q_weights: list[Tensor], k_weights: list[Tensor], D: int) -> str | None:
    if len(q_weights) != len(k_weights) or len(q_weights) not in (1, 2):
        return f"there are {len(q_weights)} and {len(k_weights)} weights, not one or two of each"
    for w in (*q_weights, *k_weights):
        if w.shape != (D,) or w.stride(0) != 1 or w.dtype not in _FLOATS:
            return f"a weight has shape {tuple(w.shape)} and dtype {w.dtype}, expected ({D},), contiguous, floating"
        if w.dtype != q_weights[0].dtype:
            return f"weights are {q_weights[0].dtype} and {w.dtype}"
    return None


def _refuses_angles(cos_sin: Tensor, positions: Tensor | None, B: int, T: int, D: int) -> str | None:
    if cos_sin.dtype not in _FLOATS or cos_sin.dim() != 2 or cos_sin.stride(1) != 1:
        return f"cos_sin is {tuple(cos_sin.shape)}, {cos_sin.dtype}, strides {cos_sin.stride()}, not rows of floats"
    R = cos_sin.shape[1]
    if R % 2 or not 2 <= R <= D:
        return f"cos_sin is {R} wide, not even and at most {D}"
    if positions is None:
        return None if cos_sin.shape[0] >= T else f"cos_sin has {cos_sin.shape[0]} rows for {T} tokens"
    if positions.shape not in ((T,), (B, T)) or positions.dtype not in (torch.int32, torch.int64):
        return f"positions are {tuple(positions.shape)}, {positions.dtype}, expected {(T,)} or {(B, T)}, int32 or int64"
    return None


@triton.jit
def _norm_rope_interleaved(
    x_ptrs, mask, weight_ptr, cos_ptr, eps, D: tl.constexpr, R: tl.constexpr, ROUND: tl.constexpr
):
    """The rows at x_ptrs [BLOCK_H, 1], pairs of neighbours; pairs beyond R / 2 turn by an angle of 0."""
    BLOCK_H: tl.constexpr = x_ptrs.shape[0]
    offs_d = tl.arange(0, D)
    x = tl.load(x_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    # As wide as x, so that each lane loads the weights of its own elements; of one row they are passed between warps.
    offs_w = tl.zeros((BLOCK_H, 1), tl.int32) + offs_d[None, :]
    y *= tl.load(weight_ptr + offs_w).to(tl.float32)
    if ROUND:
        y = rounded(y, x_ptrs).to(tl.float32)
    offs_r = tl.arange(0, D // 2)
    cos = tl.load(cos_ptr + offs_r, mask=offs_r < R // 2, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(cos_ptr + R // 2 + offs_r, mask=offs_r < R // 2, other=0.0).to(tl.float32)[None, :]
    y1, y2 = tl.split(tl.reshape(y, (BLOCK_H, D // 2, 2)))
    y = tl.reshape(tl.join(y1 * cos - y2 * sin, y2 * cos + y1 * sin), (BLOCK_H, D))
    tl.store(x_ptrs + offs_d[None, :], y.to(x_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope_halves(
    x_ptrs,
    mask,
    weight_ptr,
    cos_ptr,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The rows at x_ptrs [BLOCK_H, 1], pairs R / 2 apart; what lies behind R is normalized alone."""
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R // 2
    x1_ptrs = x_ptrs + offs_r[None, :]
    mask_x = mask & mask_r[None, :]
    x1 = tl.load(x1_ptrs, mask=mask_x, other=0.0).to(tl.float32)
    x2 = tl.load(x1_ptrs + R // 2, mask=mask_x, other=0.0).to(tl.float32)
    square = tl.sum(x1 * x1 + x2 * x2, axis=1)
    if R < D:
        offs_rest = R + tl.arange(0, BLOCK_REST)
        mask_rest = offs_rest < D
        rest_ptrs = x_ptrs + offs_rest[None, :]
        rest = tl.load(rest_ptrs, mask=mask & mask_rest[None, :], other=0.0).to(tl.float32)
        square += tl.sum(rest * rest, axis=1)
    rstd = tl.rsqrt(square / D + eps)[:, None]
    y1 = x1 * rstd * tl.load(weight_ptr + offs_r, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    y2 = x2 * rstd * tl.load(weight_ptr + R // 2 + offs_r, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    if ROUND:
        y1 = rounded(y1, x_ptrs).to(tl.float32)
        y2 = rounded(y2, x_ptrs).to(tl.float32)
    cos = tl.load(cos_ptr + offs_r, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_ptr + R // 2 + offs_r, mask=mask_r, other=0.0).to(tl.float32)[None, :]
    # Of fewer elements than lanes there are, several warps hold the same ones: none may write what another has to read.
    tl.debug_barrier()
    tl.store(x1_ptrs, (y1 * cos - y2 * sin).to(x_ptrs.dtype.element_ty), mask=mask_x)
    tl.store(x1_ptrs + R // 2, (y2 * cos + y1 * sin).to(x_ptrs.dtype.element_ty), mask=mask_x)
    if R < D:
        rest *= rstd * tl.load(weight_ptr + offs_rest, mask=mask_rest, other=0.0).to(tl.float32)[None, :]
        tl.store(rest_ptrs, rest.to(x_ptrs.dtype.element_ty), mask=mask & mask_rest[None, :])


@kernel
@triton.jit
def _qk_norm_rope_kernel(
    q_ptr,
    k_ptr,
    q_first_ptr,
    q_last_ptr,
    k_first_ptr,
    k_last_ptr,
    cos_sin_ptr,
    positions_ptr,
    T,
    split,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_cos_p,
    stride_p_b,
    stride_p_t,
    eps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    POSITIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    position = t
    if POSITIONS:
        position = tl.load(positions_ptr + b * stride_p_b + t * stride_p_t).to(tl.int64)
    cos_ptr = cos_sin_ptr + position * stride_cos_p
    # The first programs of a token take its queries, the others its keys.
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    if block < q_blocks:
        offs_h = block * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (offs_h < HQ)[:, None]
        x_ptrs = q_ptr + b * stride_q_b + t * stride_q_t + offs_h.to(tl.int64)[:, None] * stride_q_h
        first_ptr = q_first_ptr
        last_ptr = q_last_ptr
    else:
        offs_h = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (offs_h < HK)[:, None]
        x_ptrs = k_ptr + b * stride_k_b + t * stride_k_t + offs_h.to(tl.int64)[:, None] * stride_k_h
        first_ptr = k_first_ptr
        last_ptr = k_last_ptr
    weight_ptr = first_ptr
    if t >= split:
        weight_ptr = last_ptr
    if INTERLEAVED:
        _norm_rope_interleaved(x_ptrs, mask, weight_ptr, cos_ptr, eps, D, R, ROUND)
    else:
        _norm_rope_halves(x_ptrs, mask, weight_ptr, cos_ptr, eps, D, R, ROUND, BLOCK_R, BLOCK_REST)


class HeadTile(NamedTuple):
    """Heads of a token that a program takes, and its warps."""

    block_h: int
    warps: int


def _candidates(arch: Architecture, heads: int, D: int) -> Iterator[HeadTile]:
    """4 to 32 elements a lane on NVIDIA, to what the rule takes on Intel."""
    most = {"nvidia": 32, "arc-a": 4}.get(arch.name, 8)
    for block_h in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            if block_h <= next_power_of_2(heads) and 4 <= block_h * D // (32 * warps) <= most:
                yield HeadTile(block_h, warps)


@tunable("qk_norm_rope", _candidates)
def tile(arch: Architecture, heads: int, D: int) -> HeadTile:
    """1024 elements, 16 bytes a lane in 16 bits; more lanes where registers are few. `heads`: of q or k, the more."""
    block_h = min(1024 // D, next_power_of_2(heads))
    return HeadTile(block_h, max(1, block_h * D // (128 if arch.name == "arc-a" else 256)))


@qk_norm_rope.implement("triton", "xpu", "cuda", refuses=_refuses)
def qk_norm_rope_triton(
    q: Tensor,
    k: Tensor,
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos_sin: Tensor,
    positions: Tensor | None = None,
    split: int = 0,
    interleaved: bool = True,
    eps: float = 1e-6,
    round_norm: bool = False,
) -> None:
    B, T, HQ, D = q.shape
    HK, R = k.shape[2], cos_sin.shape[1]
    if B * T * (HQ + HK) == 0:
        return
    stride_p_b, stride_p_t = (0, 0) if positions is None else (0, *positions.stride())[-2:]
    block_h, warps = tile(architecture(q.device), max(HQ, HK), D)
    with on_device_of(q):
        _qk_norm_rope_kernel[(B * T, cdiv(HQ, block_h) + cdiv(HK, block_h))](
            q,
            k,
            q_weights[0],
            q_weights[-1],
            k_weights[0],
            k_weights[-1],
            cos_sin,
            cos_sin if positions is None else positions,
            T,
            # Where there is one weight it is the first and the last.
            split,
            *q.stride()[:3],
            *k.stride()[:3],
            cos_sin.stride(0),
            stride_p_b,
            stride_p_t,
            eps,
            HQ=HQ,
            HK=HK,
            D=D,
            R=R,
            POSITIONS=positions is not None,
            INTERLEAVED=interleaved,
            ROUND=round_norm,
            BLOCK_H=block_h,
            BLOCK_R=next_power_of_2(R // 2),
            BLOCK_REST=next_power_of_2(max(1, D - R)),
            num_warps=warps,
        )
