"""Two kernels: one has read and moved every state and all but the shared windows; one normalizes and moves those.

The norm needs sums over heads, which programs of one launch cannot wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.activations import silu
from xpu_ports.common.kernels.causal_conv1d import convolve_window, move_window, refuses_conv
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.selective_state_update import (
    StateTile,
    candidates,
    refuses_state,
    step_of_head,
    tile,
)
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable


def refuses_step(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> str | None:
    """Why the kernels cannot take a step with these arguments of the op, or None."""
    if not AVAILABLE:
        return WHY_NOT
    batch, H, P, N = state.shape
    inner, conv_dim = H * P, H * P + 2 * n_groups * N
    if zxbcdt.shape != (batch, inner + conv_dim + H) or H % n_groups:
        return f"zxbcdt has shape {tuple(zxbcdt.shape)}, expected ({batch}, {inner + conv_dim + H})"
    if zxbcdt.stride(1) != 1:
        return f"the last dimension of zxbcdt has stride {zxbcdt.stride(1)}, not 1"
    if norm_weight.shape != (inner,) or not norm_weight.is_contiguous():
        return f"norm_weight has shape {tuple(norm_weight.shape)}, expected ({inner},), contiguous"
    if mask is not None and mask.shape != (batch,):
        return f"mask has shape {tuple(mask.shape)}, expected ({batch},)"
    xbc = zxbcdt.narrow(1, inner, conv_dim).unsqueeze(1)
    return refuses_conv(xbc, conv_state, conv_weight, conv_bias) or refuses_state(state, A_log, D, dt_bias)


@kernel
@triton.jit
def _step_kernel(
    zxbcdt_ptr,
    conv_state_ptr,
    state_ptr,
    conv_weight_ptr,
    conv_bias_ptr,
    A_log_ptr,
    D_ptr,
    dt_bias_ptr,
    norm_weight_ptr,
    mask_ptr,
    gated_ptr,
    squares_ptr,
    stride_in_b,
    stride_c_b,
    stride_s_b,
    stride_s_h,
    stride_s_p,
    stride_m_b,
    STRIDE_C_D: tl.constexpr,
    STRIDE_C_S: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    CONV_BIAS: tl.constexpr,
    SKIP: tl.constexpr,
    DT_BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rows of one head's state: convolution, state update, gate, and their sum of squares for the norm.

    Every program convolves its group's B and C anew, so it leaves their windows to the next kernel; the windows of its
    own x channels it moves itself.
    """
    INNER: tl.constexpr = H * P
    tiles: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    part = pid % tiles
    h = pid // tiles % H
    b = (pid // (tiles * H)).to(tl.int64)
    offs_p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    mask_p, mask_n = offs_p < P, offs_n < N
    mask_pn = mask_p[:, None] & mask_n[None, :]
    # The state first: nearly all of the bytes, and nothing else is needed to fetch it.
    state_ptr += b * stride_s_b + h.to(tl.int64) * stride_s_h
    state_ptrs = state_ptr + offs_p[:, None] * stride_s_p + offs_n[None, :]
    state = tl.load(state_ptrs, mask=mask_pn, other=0.0).to(tl.float32)

    # x, B, C = silu(conv(xBC)); the new inputs in the window's dtype, as the window will hold them.
    in_ptr = zxbcdt_ptr + b * stride_in_b
    window_ptr = conv_state_ptr + b * stride_c_b
    kept = conv_state_ptr.dtype.element_ty
    at_x = h * P + offs_p
    at_B = INNER + h // (H // G) * N + offs_n
    at_C = at_B + G * N
    new_x = tl.load(in_ptr + INNER + at_x, mask=mask_p, other=0.0).to(kept).to(tl.float32)
    new_B = tl.load(in_ptr + INNER + at_B, mask=mask_n, other=0.0).to(kept).to(tl.float32)
    new_C = tl.load(in_ptr + INNER + at_C, mask=mask_n, other=0.0).to(kept).to(tl.float32)
    z = tl.load(in_ptr + at_x, mask=mask_p, other=0.0).to(tl.float32)
    dt = tl.load(in_ptr + INNER + INNER + 2 * G * N + h).to(tl.float32)
    weight = tl.load(norm_weight_ptr + at_x, mask=mask_p, other=0.0).to(tl.float32)
    x = silu(
        convolve_window(
            window_ptr, new_x, conv_weight_ptr, conv_bias_ptr, at_x, mask_p, STRIDE_C_D, STRIDE_C_S, W, S, CONV_BIAS
        )
    )
    B = silu(
        convolve_window(
            window_ptr, new_B, conv_weight_ptr, conv_bias_ptr, at_B, mask_n, STRIDE_C_D, STRIDE_C_S, W, S, CONV_BIAS
        )
    )
    C = silu(
        convolve_window(
            window_ptr, new_C, conv_weight_ptr, conv_bias_ptr, at_C, mask_n, STRIDE_C_D, STRIDE_C_S, W, S, CONV_BIAS
        )
    )

    # S = decay S + dt x B^T,  y = (S C + D x) * silu(z)
    dt, decay = step_of_head(dt, h, A_log_ptr, dt_bias_ptr, DT_BIAS)
    state = state * decay + (dt * x)[:, None] * B[None, :]
    y = tl.sum(state * C[None, :], axis=1)
    if SKIP:
        y += tl.load(D_ptr + h).to(tl.float32) * x
    y = tl.where(mask_p, y * silu(z), 0.0)
    weighted = y * weight
    moves = mask_p
    if MASK:
        valid = tl.load(mask_ptr + b * stride_m_b) != 0
        y = tl.where(valid, y, 0.0)
        weighted = tl.where(valid, weighted, 0.0)
        moves = offs_p < tl.where(valid, P, 0)
        mask_pn = mask_pn & moves[:, None]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=mask_pn)
    tl.store(gated_ptr + b * INNER + at_x, weighted.to(gated_ptr.dtype.element_ty), mask=mask_p)
    tl.store(squares_ptr + pid, tl.sum(y * y, axis=0))
    move_window(window_ptr, new_x, at_x, moves, STRIDE_C_D, STRIDE_C_S, S, BLOCK_S)


@triton.jit
def move_group_windows(
    zxbcdt_ptr,
    conv_state_ptr,
    mask_ptr,
    b,
    tile,
    stride_in_b,
    stride_c_b,
    stride_m_b,
    STRIDE_C_D: tl.constexpr,
    STRIDE_C_S: tl.constexpr,
    INNER: tl.constexpr,
    GROUPED: tl.constexpr,
    S: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Append row b's token to the windows of B and C, GROUPED channels in tiles of BLOCK_C: what `_step_kernel` left.

    The last two dimensions of `conv_state` have strides STRIDE_C_D and STRIDE_C_S.
    """
    offs = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_d = INNER + offs
    mask_d = offs < GROUPED
    new = tl.load(zxbcdt_ptr + b * stride_in_b + INNER + offs_d, mask=mask_d, other=0.0)
    if MASK:
        mask_d = offs < tl.where(tl.load(mask_ptr + b * stride_m_b) != 0, GROUPED, 0)
    move_window(conv_state_ptr + b * stride_c_b, new, offs_d, mask_d, STRIDE_C_D, STRIDE_C_S, S, BLOCK_S)


@kernel
@triton.jit
def _norm_kernel(
    zxbcdt_ptr,
    conv_state_ptr,
    mask_ptr,
    gated_ptr,
    squares_ptr,
    y_ptr,
    stride_in_b,
    stride_c_b,
    stride_m_b,
    eps,
    STRIDE_C_D: tl.constexpr,
    STRIDE_C_S: tl.constexpr,
    INNER: tl.constexpr,
    G: tl.constexpr,
    GROUPED: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Columns of one group normalized by PARTS sums of squares; the last programs of a row move B's and C's windows."""
    GROUP: tl.constexpr = INNER // G
    tiles: tl.constexpr = (GROUP + BLOCK_D - 1) // BLOCK_D
    moving: tl.constexpr = (GROUPED + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    b = (pid // (G * tiles + moving)).to(tl.int64)
    pid = pid % (G * tiles + moving)
    if pid < G * tiles:
        g = pid // tiles
        offs_g = pid % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
        offs_d = g * GROUP + offs_g
        mask_d = offs_g < GROUP
        y = tl.load(gated_ptr + b * INNER + offs_d, mask=mask_d, other=0.0)
        part = tl.arange(0, BLOCK_PARTS)
        squares = tl.load(squares_ptr + (b * G + g) * PARTS + part, mask=part < PARTS, other=0.0)
        y *= tl.rsqrt(tl.sum(squares, axis=0) / GROUP + eps)
        if MASK:
            y = tl.where(tl.load(mask_ptr + b * stride_m_b) != 0, y, 0.0)
        tl.store(y_ptr + b * INNER + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)
    else:
        move_group_windows(
            zxbcdt_ptr, conv_state_ptr, mask_ptr, b, pid - G * tiles, stride_in_b, stride_c_b, stride_m_b,
            STRIDE_C_D, STRIDE_C_S, INNER, GROUPED, S, MASK, BLOCK_D, BLOCK_S,
        )  # fmt: skip


def _candidates(arch: Architecture, batch: int, H: int, P: int, N: int) -> Iterator[StateTile]:
    # The kernel after this one holds a sum of squares for each part of a group: no more of them than by the rule.
    least = _tile.rule(arch, batch, H, P, N).block_p
    return (cut for cut in candidates(arch, batch, H, P, N) if cut.warps >= 2 and cut.block_p >= least)


@tunable("mamba2_decode_step", _candidates)
def _tile(arch: Architecture, batch: int, H: int, P: int, N: int) -> StateTile:
    """A program's part of a state: as in the update alone, but four warps at the least.

    Each program convolves its group's B and C, which warps share.
    """
    cut = tile.rule(arch, batch, H, P, N)
    if cut.warps >= 4:
        return cut
    return StateTile(min(2 * cut.block_p, next_power_of_2(P)), cut.block_n, 4)


@mamba2_decode_step.implement("triton", "xpu", "cuda", refuses=refuses_step)
def mamba2_decode_step_triton(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    batch, H, P, N = state.shape
    y = torch.empty((batch, H * P), dtype=zxbcdt.dtype, device=zxbcdt.device)
    if y.numel() == 0:
        return y
    with on_device_of(zxbcdt):
        gated, squares = launch_step(
            zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups,
            torch.float32,
        )  # fmt: skip
        _launch_norm(zxbcdt, conv_state, gated, squares, y, mask, n_groups, N, eps)
    return y


def launch_step(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    n_groups: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The op up to the norm, in one launch; B's and C's windows are left to `move_group_windows`.

    Returns:
        (gated, squares): [B, H P] in `dtype`, the gated outputs times the norm's weights; [B, G, parts] in fp32, what
        adds up to a group's sum of squares of the gated outputs.
    """
    batch, H, P, N = state.shape
    block_p, block_n, warps = _tile(architecture(zxbcdt.device), batch, H, P, N)
    tiles = cdiv(P, block_p)
    gated = torch.empty((batch, H * P), dtype=dtype, device=zxbcdt.device)
    squares = torch.empty((batch, n_groups, H * tiles // n_groups), dtype=torch.float32, device=zxbcdt.device)
    stride_c_b, stride_c_d, stride_c_s = conv_state.stride()
    _step_kernel[(tiles * H * batch,)](
        zxbcdt,
        conv_state,
        state,
        conv_weight,
        zxbcdt if conv_bias is None else conv_bias,
        A_log,
        zxbcdt if D is None else D,
        zxbcdt if dt_bias is None else dt_bias,
        norm_weight,
        zxbcdt if mask is None else mask,
        gated,
        squares,
        zxbcdt.stride(0),
        stride_c_b,
        *state.stride()[:3],
        0 if mask is None else mask.stride(0),
        STRIDE_C_D=stride_c_d,
        STRIDE_C_S=stride_c_s,
        H=H,
        G=n_groups,
        P=P,
        N=N,
        W=conv_weight.shape[1],
        S=conv_state.shape[2],
        CONV_BIAS=conv_bias is not None,
        SKIP=D is not None,
        DT_BIAS=dt_bias is not None,
        MASK=mask is not None,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        BLOCK_S=next_power_of_2(conv_state.shape[2]),
        num_warps=warps,
    )
    return gated, squares


def _launch_norm(
    zxbcdt: Tensor,
    conv_state: Tensor,
    gated: Tensor,
    squares: Tensor,
    y: Tensor,
    mask: Tensor | None,
    n_groups: int,
    N: int,
    eps: float,
) -> None:
    batch, inner = y.shape
    parts = squares.shape[2]
    stride_c_b, stride_c_d, stride_c_s = conv_state.stride()
    block_d = 512
    programs = n_groups * cdiv(inner // n_groups, block_d) + cdiv(2 * n_groups * N, block_d)
    _norm_kernel[(programs * batch,)](
        zxbcdt,
        conv_state,
        zxbcdt if mask is None else mask,
        gated,
        squares,
        y,
        zxbcdt.stride(0),
        stride_c_b,
        0 if mask is None else mask.stride(0),
        eps,
        STRIDE_C_D=stride_c_d,
        STRIDE_C_S=stride_c_s,
        INNER=inner,
        G=n_groups,
        GROUPED=2 * n_groups * N,
        S=conv_state.shape[2],
        PARTS=parts,
        MASK=mask is not None,
        BLOCK_D=block_d,
        BLOCK_PARTS=next_power_of_2(parts),
        BLOCK_S=next_power_of_2(conv_state.shape[2]),
        num_warps=4,
    )
