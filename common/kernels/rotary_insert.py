"""A decode step's rotary embedding, keys and values going straight to their place in the cache, in one launch.

    q' = R(t) q,   keys[slot] = R(t) k,   values[slot] = v,   R(t) [x1, x2] = [x1 cos - x2 sin, x2 cos + x1 sin]

Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.2; the split in halves is GPT-NeoX's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rotary_embedding import refuses_rotation, rotary_embedding, turn_halves
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton


@op(mutates=("keys", "values"))
def rotary_insert(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Rotate queries and keys by the angles of their positions, and put keys and values into a cache.

    Args:
        q: [B, T, Hq, K], any strides; K is even.
        k: [B, T, Hk, K], any strides.
        v: [B, T, Hk, V], any strides.
        cos, sin: [B or 1, T, K / 2], one angle for each pair (x[i], x[i + K / 2]); fp32 in models.
        slots: [T], int64, different, 0 <= slot < S: where each token's keys and values go, on the device.
        keys: [B, Hk, S, K], written at the slots; any strides.
        values: [B, Hk, S, V], written at the slots; any strides.

    Returns:
        q rotated, [B, T, Hq, K], contiguous, in its own dtype, rounded once, as are the keys.
    """
    q, k = rotary_embedding.reference(q, k, cos, sin)
    keys.index_copy_(2, slots, k.transpose(1, 2).to(keys.dtype))
    values.index_copy_(2, slots, v.transpose(1, 2).to(values.dtype))
    return q


def _refuses(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> str | None:
    refusal = refuses_rotation(q, k, cos, sin)
    if refusal is not None:
        return refusal
    (B, T, H, K), V = k.shape, v.shape[-1]
    if v.shape[:3] != (B, T, H) or V > 2048:
        return f"v is {tuple(v.shape)}, expected ({B}, {T}, {H}, at most 2048)"
    if not v.dtype == keys.dtype == values.dtype == k.dtype:
        return f"k, v, keys and values are {k.dtype}, {v.dtype}, {keys.dtype} and {values.dtype}, not all of one dtype"
    if slots.shape != (T,) or slots.dtype != torch.int64:
        return f"slots are {tuple(slots.shape)} of {slots.dtype}, expected ({T},) of int64"
    S = keys.shape[2] if keys.dim() == 4 else 0
    if keys.shape != (B, H, S, K) or values.shape != (B, H, S, V):
        return f"keys and values are {tuple(keys.shape)} and {tuple(values.shape)}, not [{B}, {H}, S, {K} and {V}]"
    for name, t in (("v", v), ("keys", keys), ("values", values)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    return None


@kernel
@triton.jit
def _rotary_insert_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_out_ptr,
    keys_ptr,
    values_ptr,
    T,
    S,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_cos_b,
    stride_cos_t,
    stride_sin_b,
    stride_sin_t,
    stride_slot,
    stride_keys_b,
    stride_keys_h,
    stride_keys_s,
    stride_values_b,
    stride_values_h,
    stride_values_s,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HALF: tl.constexpr,
    V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The first programs of a token take its queries, the next its keys, the last its values: BLOCK_H heads each."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // T, row % T
    q_blocks: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H
    k_blocks: tl.constexpr = (HK + BLOCK_H - 1) // BLOCK_H
    block = tl.program_id(1)
    slot = tl.load(slots_ptr + t * stride_slot).to(tl.int64)
    # A slot outside the cache is the caller's error: nothing is written there.
    kept = tl.where((slot >= 0) & (slot < S), HK, 0)
    if block >= q_blocks + k_blocks:
        offs_h = ((block - q_blocks - k_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
        offs_v = tl.arange(0, BLOCK_V)[None, :]
        # Not `mask`: a name has one type in all branches.
        mask_v = (offs_h < kept) & (offs_v < V)
        v = tl.load(v_ptr + b * stride_v_b + t * stride_v_t + offs_h * stride_v_h + offs_v, mask=mask_v, other=0.0)
        values_ptr += b * stride_values_b + slot * stride_values_s
        tl.store(values_ptr + offs_h * stride_values_h + offs_v, v, mask=mask_v)
    else:
        offs_d = tl.arange(0, BLOCK_HALF)
        mask_d = offs_d < HALF
        cos = tl.load(cos_ptr + b * stride_cos_b + t * stride_cos_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + b * stride_sin_b + t * stride_sin_t + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        if block < q_blocks:
            offs_h = (block * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
            mask = (offs_h < HQ) & mask_d[None, :]
            q_ptrs = q_ptr + b * stride_q_b + t * stride_q_t + offs_h * stride_q_h + offs_d[None, :]
            turn_halves(q_ptrs, q_out_ptr + (row * HQ + offs_h) * (2 * HALF) + offs_d[None, :], cos, sin, mask, HALF)
        else:
            offs_h = ((block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
            mask = (offs_h < kept) & mask_d[None, :]
            k_ptrs = k_ptr + b * stride_k_b + t * stride_k_t + offs_h * stride_k_h + offs_d[None, :]
            keys_ptr += b * stride_keys_b + slot * stride_keys_s
            turn_halves(k_ptrs, keys_ptr + offs_h * stride_keys_h + offs_d[None, :], cos, sin, mask, HALF)


@rotary_insert.implement("triton", "xpu", "cuda", refuses=_refuses)
def rotary_insert_triton(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    B, T, HQ, K = q.shape
    HK, V = v.shape[2:]
    q_out = torch.empty((B, T, HQ, K), dtype=q.dtype, device=q.device)
    if B * T == 0 or HQ + HK == 0:
        return q_out
    block_half, block_v = next_power_of_2(K // 2), next_power_of_2(V)
    # Few elements a program: a step has one token a row, and what it waits for is one load.
    block_h = max(1, min(next_power_of_2(max(HQ, HK)), 512 // max(block_half, block_v // 2)))
    # A table of one row serves all of the batch.
    stride_cos_b, stride_sin_b = (0 if t.shape[0] == 1 else t.stride(0) for t in (cos, sin))
    with on_device_of(q):
        _rotary_insert_kernel[(B * T, cdiv(HQ, block_h) + 2 * cdiv(HK, block_h))](
            q,
            k,
            v,
            cos,
            sin,
            slots,
            q_out,
            keys,
            values,
            T,
            keys.shape[2],
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            stride_cos_b,
            cos.stride(1),
            stride_sin_b,
            sin.stride(1),
            slots.stride(0),
            *keys.stride()[:3],
            *values.stride()[:3],
            HQ=HQ,
            HK=HK,
            HALF=K // 2,
            V=V,
            BLOCK_H=block_h,
            BLOCK_HALF=block_half,
            BLOCK_V=block_v,
            num_warps=max(1, min(8, block_h * max(block_half, block_v // 2) // 128)),
        )
    return q_out
