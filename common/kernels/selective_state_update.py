"""One decode step of the Mamba-2 recurrence, the state updated in place.

    S = exp(g) S + dt x B^T,   y = S C + D x,   g = -exp(A_log) dt,   dt = softplus(dt + dt_bias)

Source: Gu and Dao, "Mamba" (arXiv:2312.00752), section 3; Dao and Gu (arXiv:2405.21060) for groups and scalar decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.activations import softplus
from xpu_ports.common.kernels.ssd_chunk_scan import step_size
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# One program holds whole rows of the state.
LARGEST_STATE = 512
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op(mutates=("state",))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Move the state by one token and read it.

    Args:
        state: [B, H, P, N], fp32 in models. Written.
        x: [B, H, P], any strides.
        dt: [B, H], the step before bias and softplus.
        A_log: [H]; the decay rate is -exp(A_log).
        B, C: [B, G, N]; G divides H, head h uses group h // (H / G).
        D: [H] or None.
        dt_bias: [H] or None.
        mask: [B], nonzero where the token counts; a row whose token does not keeps its state and gives 0.

    Returns:
        y: [B, H, P] in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    H, G = x.shape[1], B.shape[1]
    dt = step_size(dt, dt_bias, wide)
    decay = torch.exp(dt * -torch.exp(A_log.to(wide)))[..., None, None]
    B, C = (t.to(wide).repeat_interleave(H // G, dim=1) for t in (B, C))  # [B, H, N]
    x_wide = x.to(wide)
    moved = state.to(wide) * decay + (dt[..., None] * x_wide)[..., None] * B[:, :, None]
    y = torch.einsum("bhpn,bhn->bhp", moved, C)
    if D is not None:
        y = y + D[:, None].to(wide) * x_wide
    if mask is not None:
        valid = mask.bool()
        y = torch.where(valid[:, None, None], y, 0.0)
        moved = torch.where(valid[:, None, None, None], moved, state.to(wide))
    state.copy_(moved)
    return y.to(x.dtype)


def _refuses(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    for name, t in (("x", x), ("dt", dt), ("B", B), ("C", C)):
        if t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    for name, t in (("x", x), ("B", B), ("C", C)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    batch, H, P, N = state.shape
    shapes = ((x, (batch, H, P)), (dt, (batch, H)), (C, tuple(B.shape)))
    for t, expected in shapes:
        if t.shape != expected:
            return f"shape {tuple(t.shape)} where {expected} is expected"
    if B.shape[0] != batch or B.shape[2] != N or H % B.shape[1]:
        return f"B has shape {tuple(B.shape)}, expected ({batch}, a divisor of {H}, {N})"
    if mask is not None and mask.shape != (batch,):
        return f"mask has shape {tuple(mask.shape)}, expected ({batch},)"
    return refuses_state(state, A_log, D, dt_bias)


def refuses_state(state: Tensor, A_log: Tensor, D: Tensor | None, dt_bias: Tensor | None) -> str | None:
    """Why a kernel cannot update a state [B, H, P, N] with these parameters of its heads, or None."""
    _, H, _, N = state.shape
    if state.dtype not in _FLOATS:
        return f"state has dtype {state.dtype}, not one of float16, bfloat16, float32"
    if state.stride(-1) != 1 and N > 1:
        return f"the last dimension of state has stride {state.stride(-1)}, not 1"
    if N > LARGEST_STATE:
        return f"a state of {N}, more than {LARGEST_STATE}"
    for name, t in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        if t is not None and (t.shape != (H,) or not t.is_contiguous() or t.dtype not in _FLOATS):
            return f"{name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected ({H},), contiguous, floating point"
    return None


@triton.jit
def step_of_head(dt, h, A_log_ptr, dt_bias_ptr, DT_BIAS: tl.constexpr):
    """(step, decay) of one head: softplus(dt + dt_bias) and exp(-exp(A_log) step)."""
    if DT_BIAS:
        dt += tl.load(dt_bias_ptr + h).to(tl.float32)
    dt = softplus(dt)
    return dt, tl.exp(-tl.exp(tl.load(A_log_ptr + h).to(tl.float32)) * dt)


@kernel
@triton.jit
def _selective_state_update_kernel(
    state_ptr,
    x_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    mask_ptr,
    y_ptr,
    stride_s_b,
    stride_s_h,
    stride_s_p,
    stride_x_b,
    stride_x_h,
    stride_dt_b,
    stride_dt_h,
    stride_B_b,
    stride_B_g,
    stride_C_b,
    stride_C_g,
    stride_m_b,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    SKIP: tl.constexpr,
    DT_BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    h = pid // tiles % H
    b = (pid // (tiles * H)).to(tl.int64)
    g = h // (H // G)
    offs_p = pid % tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_p, mask_n = offs_p < P, offs_n < N
    mask_pn = mask_p[:, None] & mask_n[None, :]
    # The state first: nearly all of the bytes, and nothing else is needed to fetch it.
    state_ptr += b * stride_s_b + h.to(tl.int64) * stride_s_h
    state_ptrs = state_ptr + offs_p[:, None] * stride_s_p + offs_n[None, :]
    state = tl.load(state_ptrs, mask=mask_pn, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + b * stride_x_b + h * stride_x_h + offs_p, mask=mask_p, other=0.0).to(tl.float32)
    B = tl.load(B_ptr + b * stride_B_b + g * stride_B_g + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    C = tl.load(C_ptr + b * stride_C_b + g * stride_C_g + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    dt = tl.load(dt_ptr + b * stride_dt_b + h * stride_dt_h).to(tl.float32)
    dt, decay = step_of_head(dt, h, A_log_ptr, dt_bias_ptr, DT_BIAS)
    # S = decay S + dt x B^T,  y = S C + D x
    state = state * decay + (dt * x)[:, None] * B[None, :]
    y = tl.sum(state * C[None, :], axis=1)
    if SKIP:
        y += tl.load(D_ptr + h).to(tl.float32) * x
    if MASK:
        valid = tl.load(mask_ptr + b * stride_m_b) != 0
        y = tl.where(valid, y, 0.0)
        mask_pn = mask_pn & (offs_p < tl.where(valid, P, 0))[:, None]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=mask_pn)
    tl.store(y_ptr + (b * H + h) * P + offs_p, y.to(y_ptr.dtype.element_ty), mask=mask_p)


class StateTile(NamedTuple):
    """Rows and columns of the part of a head's state that one program holds, and its warps."""

    block_p: int
    block_n: int
    warps: int


def candidates(arch: Architecture, batch: int, H: int, P: int, N: int) -> Iterator[StateTile]:
    """4 elements a lane, on Arc A 2, and up to as many as the rule takes: beyond, they spill."""
    block_n, most = max(16, next_power_of_2(N)), _elements_of_lane(arch)
    for log_p in range(next_power_of_2(P).bit_length()):
        for warps in (1, 2, 4, 8, 16, 32):
            cut = StateTile(1 << log_p, block_n, warps)
            if min(4, most // 2) <= cut.block_p * block_n // (arch.lanes * warps) <= most:
                yield cut


def _elements_of_lane(arch: Architecture) -> int:
    """Of the state, at most: 16 spill on a Max for some sizes, 8 on Arc A."""
    return {"arc-a": 4, "max": 8, "xe2": 8}.get(arch.name, 32)


@tunable("selective_state_update", candidates)
def tile(arch: Architecture, batch: int, H: int, P: int, N: int) -> StateTile:
    """The tile for a state [batch, H, P, N].

    A short batch is split finely, so that every unit has work; a long one into 16 KB (fp32). One warp of 512 elements
    measured best on an H200 for one sequence: 3.4 us, 4.3 us with four of 2048.
    """
    block_n = max(16, next_power_of_2(N))
    few = batch * H < 4 * arch.units
    elements = 2048 if few or arch.name == "arc-a" else 4096
    if few and arch.name == "nvidia":
        elements = 512
    block_p = max(1, min(next_power_of_2(P), elements // block_n))
    a_lane = min(_elements_of_lane(arch), 16 if few else 32)
    return StateTile(block_p, block_n, max(1, block_p * block_n // (arch.lanes * a_lane)))


@selective_state_update.implement("triton", "xpu", "cuda", refuses=_refuses)
def selective_state_update_triton(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    batch, H, P, N = state.shape
    y = torch.empty((batch, H, P), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block_p, block_n, warps = tile(architecture(x.device), batch, H, P, N)
    with on_device_of(x):
        _selective_state_update_kernel[(cdiv(P, block_p) * H * batch,)](
            state,
            x,
            dt,
            A_log,
            B,
            C,
            x if D is None else D,
            x if dt_bias is None else dt_bias,
            x if mask is None else mask,
            y,
            *state.stride()[:3],
            *x.stride()[:2],
            *dt.stride(),
            *B.stride()[:2],
            *C.stride()[:2],
            0 if mask is None else mask.stride(0),
            H=H,
            G=B.shape[1],
            P=P,
            N=N,
            SKIP=D is not None,
            DT_BIAS=dt_bias is not None,
            MASK=mask is not None,
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            num_warps=warps,
        )
    return y
