"""The Triton implementation of `recurrent_kda`: the state is read and written once, however many tokens there are."""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.kda import recurrent_kda
from xpu_ports.common.kernels.kda.parts import FLOATS, inverse_norm, refuses_tokens
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton


def _refuses(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float = 1.0,
    l2norm: bool = False,
    mask: Tensor | None = None,
    slots: Tensor | None = None,
) -> str | None:
    why = refuses_tokens(q, k, v, g, beta)
    if why is not None:
        return why
    B, T, H, K = q.shape
    states = B if slots is None else state.shape[0]
    if state.shape != (states, H, K, v.shape[3]):
        return f"state has shape {tuple(state.shape)}, expected {(states, H, K, v.shape[3])}"
    if state.dtype not in FLOATS:
        return f"state has dtype {state.dtype}, not one of float16, bfloat16, float32"
    if state.stride(-1) != 1 and v.shape[3] > 1:
        return f"the last dimension of state has stride {state.stride(-1)}, not 1"
    if mask is not None and mask.shape != (B, T):
        return f"mask has shape {tuple(mask.shape)}, expected {(B, T)}"
    if slots is not None and (slots.shape != (B,) or slots.dtype not in (torch.int32, torch.int64)):
        return f"slots has shape {tuple(slots.shape)} and dtype {slots.dtype}, expected ({B},), int32 or int64"
    return None


@kernel
@triton.jit
def _recurrent_kda_kernel(
    state_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    mask_ptr,
    slots_ptr,
    o_ptr,
    T,
    scale,
    stride_s_b,
    stride_s_h,
    stride_s_k,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    stride_b_b,
    stride_b_t,
    stride_b_h,
    stride_m_b,
    stride_m_t,
    stride_slots,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    L2NORM: tl.constexpr,
    MASK: tl.constexpr,
    SLOTS: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """All tokens on BLOCK_V columns of one head's state."""
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    h = (pid // V_BLOCKS % H).to(tl.int64)
    b = (pid // (V_BLOCKS * H)).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < K, offs_v < V
    slot = b
    if SLOTS:
        slot = tl.load(slots_ptr + b * stride_slots).to(tl.int64)
        if slot < 0:
            o_ptr += (b * T * H + h) * V
            for _ in range(1 if ONE else T):
                tl.store(o_ptr + offs_v, tl.zeros((BLOCK_V,), o_ptr.dtype.element_ty), mask=mask_v)
                o_ptr += H * V
            return
    state_ptrs = state_ptr + slot * stride_s_b + h * stride_s_h + offs_k[:, None] * stride_s_k + offs_v[None, :]
    state_mask = mask_k[:, None] & mask_v[None, :]
    # The state first: nearly all of the bytes, and nothing else is needed to fetch it.
    state = tl.load(state_ptrs, mask=state_mask, other=0.0).to(tl.float32)
    q_ptr += b * stride_q_b + h * stride_q_h
    k_ptr += b * stride_k_b + h * stride_k_h
    v_ptr += b * stride_v_b + h * stride_v_h
    g_ptr += b * stride_g_b + h * stride_g_h
    beta_ptr += b * stride_b_b + h * stride_b_h
    mask_ptr += b * stride_m_b
    o_ptr += (b * T * H + h) * V
    counted = 0
    for _ in range(1 if ONE else T):
        q = tl.load(q_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr).to(tl.float32)
        if L2NORM:
            q *= inverse_norm(q, 0)
            k *= inverse_norm(k, 0)
        moved = state * tl.exp(g)[:, None]
        # q . (moved + k delta) is q . moved + (q . k) delta: both sums over the state at once, not one after the other.
        delta = beta * (v - tl.sum(moved * k[:, None], axis=0))
        o = scale * (tl.sum(moved * q[:, None], axis=0) + tl.sum(q * k, 0) * delta)
        moved += k[:, None] * delta[None, :]
        if MASK:
            counts = tl.load(mask_ptr) != 0
            o = tl.where(counts, o, 0.0)
            state = tl.where(counts, moved, state)
            counted += counts.to(tl.int32)
            mask_ptr += stride_m_t
        else:
            state = moved
        tl.store(o_ptr + offs_v, o.to(o_ptr.dtype.element_ty), mask=mask_v)
        q_ptr += stride_q_t
        k_ptr += stride_k_t
        v_ptr += stride_v_t
        g_ptr += stride_g_t
        beta_ptr += stride_b_t
        o_ptr += H * V
    if MASK:
        state_mask = state_mask & (offs_v < tl.where(counted > 0, V, 0))[None, :]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=state_mask)


def tile(architecture: Architecture, heads: int, K: int, V: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of the part of a head's state that one program holds, for so many heads in the batch.

    All rows, since both products sum over them; the fewer heads there are, the fewer columns, so that every unit has
    work, but 64 bytes of a row where there are as many.
    """
    block_k = max(16, next_power_of_2(K))
    few = heads < 4 * architecture.units
    block_v = min(next_power_of_2(V), 16 if few or architecture.name == "arc-a" else 32)
    a_lane = {"arc-a": 4, "max": 8, "xe2": 8}.get(architecture.name, 64)
    return block_k, block_v, min(16, max(1, block_k * block_v // (architecture.lanes * a_lane)))


@recurrent_kda.implement("triton", "xpu", "cuda", refuses=_refuses)
def recurrent_kda_triton(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float = 1.0,
    l2norm: bool = False,
    mask: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    B, T, H, K = q.shape
    V = v.shape[3]
    o = torch.empty((B, T, H, V), dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    block_k, block_v, warps = tile(architecture(q.device), B * H, K, V)
    with on_device_of(q):
        _recurrent_kda_kernel[(cdiv(V, block_v) * H * B,)](
            *(state, q, k, v, g, beta, q if mask is None else mask, q if slots is None else slots, o, T, scale),
            *state.stride()[:3],
            *(stride for t in (q, k, v, g, beta) for stride in t.stride()[:3]),
            *((0, 0) if mask is None else mask.stride()),
            0 if slots is None else slots.stride(0),
            H=H,
            K=K,
            V=V,
            L2NORM=l2norm,
            MASK=mask is not None,
            SLOTS=slots is not None,
            ONE=T == 1,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            num_warps=warps,
        )
    return o
