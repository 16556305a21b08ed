"""Depthwise causal convolution over time with its activation: over a sequence, and one step on a kept window.

    y[t] = act(sum_w weight[:, w] * x[t - W + 1 + w] + bias)

Source: Gu and Dao, "Mamba" (arXiv:2312.00752), figure 3; Dao's causal-conv1d states the same contract.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.activations import silu
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

ACTIVATIONS = ("silu", "identity")
# The taps are unrolled.
LARGEST_WIDTH = 16
LARGEST_WINDOW = 64
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str = "silu"
) -> Tensor:
    """Convolve each channel over time, seeing only the past.

    Args:
        x: [B, T, D], any strides: a slice of a wider projection is taken as it is.
        weight: [D, W], the last column meets the current token.
        bias: [D] or None.
        initial_state: [B, D, S] with S >= W - 1, the inputs before the first token, newest last; None for zeros.
        activation: "silu" or "identity".

    Returns:
        [B, T, D] in x's dtype.
    """
    T, W = x.shape[1], weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    history = x.new_zeros(x.shape[0], x.shape[2], W - 1) if initial_state is None else initial_state
    history = history[:, :, history.shape[2] - (W - 1) :]
    window = torch.cat([history.to(wide), x.to(wide).transpose(1, 2)], dim=-1)  # [B, D, W - 1 + T]
    y = torch.zeros_like(window[:, :, :T])
    for w in range(W):
        y = y + window[:, :, w : w + T] * weight[:, w, None].to(wide)
    if bias is not None:
        y = y + bias[:, None].to(wide)
    return _activate(y, activation).transpose(1, 2).to(x.dtype)


@op(mutates=("state",))
def causal_conv1d_update(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str = "silu"
) -> Tensor:
    """Convolve new tokens on a kept window and move the window along, in place.

    Args:
        state: [B, D, S] with S >= W - 1, the last inputs, newest last. Written.
        x: [B, T, D], the new tokens; T is small.
        weight: [D, W].
        bias: [D] or None.
        mask: [B, T], nonzero where a token counts; a token that does not leaves the window as it is and gives 0.
        activation: "silu" or "identity".

    Returns:
        [B, T, D] in x's dtype.
    """
    W, S = weight.shape[1], state.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t, :, None].to(state.dtype)], dim=-1)  # [B, D, S + 1]
        y = (window[:, :, S + 1 - W :].to(wide) * weight.to(wide)).sum(-1)
        if bias is not None:
            y = y + bias.to(wide)
        y = _activate(y, activation)
        moved = window[:, :, 1:]
        if mask is not None:
            valid = mask[:, t].bool()
            y = torch.where(valid[:, None], y, 0.0)
            moved = torch.where(valid[:, None, None], moved, state)
        state.copy_(moved)
        outputs.append(y)
    return torch.stack(outputs, dim=1).to(x.dtype) if outputs else torch.empty_like(x)


def _activate(y: Tensor, activation: str) -> Tensor:
    return torch.nn.functional.silu(y) if _is_silu(activation) else y


def _is_silu(activation: str) -> bool:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    return activation == "silu"


def _refuses(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str = "silu"
) -> str | None:
    return refuses_conv(x, initial_state, weight, bias)


def _refuses_update(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str = "silu"
) -> str | None:
    if mask is not None and mask.shape != x.shape[:2]:
        return f"mask has shape {tuple(mask.shape)}, expected {tuple(x.shape[:2])}"
    return refuses_conv(x, state, weight, bias)


def refuses_conv(x: Tensor, state: Tensor | None, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the kernels cannot convolve x [B, T, D] behind a window [B, D, S], or None."""
    if not AVAILABLE:
        return WHY_NOT
    batch, D, W = x.shape[0], x.shape[2], weight.shape[-1]
    for name, t in (("x", x), ("state", state), ("weight", weight), ("bias", bias)):
        if t is not None and t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    if weight.shape != (D, W) or not weight.is_contiguous():
        return f"weight has shape {tuple(weight.shape)}, expected ({D}, W), contiguous"
    if W > LARGEST_WIDTH:
        return f"a width of {W}, more than {LARGEST_WIDTH}"
    if bias is not None and (bias.shape != (D,) or not bias.is_contiguous()):
        return f"bias has shape {tuple(bias.shape)}, expected ({D},), contiguous"
    if state is not None and (state.shape[:2] != (batch, D) or not W - 1 <= state.shape[2] <= LARGEST_WINDOW):
        return f"the window has shape {tuple(state.shape)}, expected ({batch}, {D}, {W - 1} to {LARGEST_WINDOW})"
    return None


@triton.jit
def _first_tokens(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    y_ptr,
    T,
    stride_x_t,
    stride_x_d,
    stride_i_d,
    stride_i_s,
    offs_d,
    D: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The first W - 1 tokens of a row, whose taps reach back into the inputs before it."""
    mask_d = offs_d < D
    offs_x = offs_d.to(tl.int64) * stride_x_d
    for t in range(tl.minimum(T, W - 1)):
        acc = tl.zeros(offs_d.shape, dtype=tl.float32)
        if BIAS:
            acc += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        for w in tl.static_range(W):
            at = t + (w - (W - 1))
            before = offs_d < tl.where(at < 0, D, 0)
            x = tl.load(x_ptr + offs_x + at * stride_x_t, mask=mask_d & ~before, other=0.0).to(tl.float32)
            offs_i = offs_d.to(tl.int64) * stride_i_d + (S + at) * stride_i_s
            x += tl.load(initial_ptr + offs_i, mask=before, other=0.0).to(tl.float32)
            acc += x * tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
        if SILU:
            acc = silu(acc)
        tl.store(y_ptr + t * D + offs_d, acc.to(y_ptr.dtype.element_ty), mask=mask_d)


@kernel
@triton.jit
def _causal_conv1d_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    initial_ptr,
    y_ptr,
    T,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_i_b,
    stride_i_d,
    stride_i_s,
    D: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles_d: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tiles_t = tl.cdiv(T, BLOCK_T) + (1 if INITIAL else 0)
    pid = tl.program_id(0)
    pid_d, pid_t, pid_b = pid % tiles_d, pid // tiles_d % tiles_t, (pid // tiles_d // tiles_t).to(tl.int64)
    row = tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    offs_t = pid_t * BLOCK_T + row
    offs_d = pid_d * BLOCK_D + column
    mask_d = offs_d < D
    x_ptr += pid_b * stride_x_b
    y_ptr += pid_b * T * D
    first = 0
    if INITIAL:
        # Programs of their own for the tokens that see them keep the others free of these loads and their registers.
        first = W - 1
        if pid_t == tiles_t - 1:
            initial_ptr += pid_b * stride_i_b
            _first_tokens(
                x_ptr,
                weight_ptr,
                bias_ptr,
                initial_ptr,
                y_ptr,
                T,
                stride_x_t,
                stride_x_d,
                stride_i_d,
                stride_i_s,
                offs_d,
                D,
                W,
                S,
                SILU,
                BIAS,
            )
            return
    # 64-bit where the tile starts, 32-bit inside it.
    x_ptr += (pid_t * BLOCK_T).to(tl.int64) * stride_x_t + (pid_d * BLOCK_D).to(tl.int64) * stride_x_d
    # y[t] = act(sum_w weight[:, w] * x[t - W + 1 + w] + bias)
    acc = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        t = offs_t + (w - (W - 1))
        mask = ((t >= 0) & (t < T))[:, None] & mask_d[None, :]
        offs_x = (row + (w - (W - 1)))[:, None] * stride_x_t + column[None, :] * stride_x_d
        x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = silu(acc)
    y_ptr += (pid_t * BLOCK_T).to(tl.int64) * D
    mask = ((offs_t >= first) & (offs_t < T))[:, None] & mask_d[None, :]
    tl.store(y_ptr + row[:, None] * D + offs_d[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def convolve_window(
    window_ptr,
    new,
    weight_ptr,
    bias_ptr,
    offs_d,
    mask_d,
    STRIDE_D: tl.constexpr,
    STRIDE_S: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    BIAS: tl.constexpr,
):
    """sum_w weight[:, w] * window[:, w] + bias on the last W - 1 inputs of a row's window and a new one, in fp32."""
    acc = new * tl.load(weight_ptr + offs_d * W + (W - 1), mask=mask_d, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    for w in tl.static_range(W - 1):
        offs = offs_d * STRIDE_D + (S - (W - 1) + w) * STRIDE_S
        old = tl.load(window_ptr + offs, mask=mask_d, other=0.0).to(tl.float32)
        acc += old * tl.load(weight_ptr + offs_d * W + w, mask=mask_d, other=0.0).to(tl.float32)
    return acc


@triton.jit
def move_window(
    window_ptr,
    new,
    offs_d,
    mask_d,
    STRIDE_D: tl.constexpr,
    STRIDE_S: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Drop the oldest input of each channel of a row's window and append the new one, in place.

    Every load of the program from this part of the window must stand before the call.
    """
    offs_s = tl.arange(0, BLOCK_S)
    ptrs = window_ptr + offs_d[:, None] * STRIDE_D + offs_s[None, :] * STRIDE_S
    moved = tl.load(ptrs + STRIDE_S, mask=mask_d[:, None] & (offs_s < S - 1)[None, :], other=0.0)
    moved = tl.where((offs_s == S - 1)[None, :], new.to(moved.dtype)[:, None], moved)
    # A slot may be read by one thread and written by another.
    tl.debug_barrier()
    tl.store(ptrs, moved, mask=mask_d[:, None] & (offs_s < S)[None, :])


@kernel
@triton.jit
def _causal_conv1d_update_kernel(
    state_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    mask_ptr,
    y_ptr,
    T,
    stride_s_b,
    stride_x_b,
    stride_x_t,
    stride_x_d,
    stride_m_b,
    stride_m_t,
    STRIDE_D: tl.constexpr,
    STRIDE_S: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    tiles: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    pid_b = (pid // tiles).to(tl.int64)
    offs_d = pid % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    state_ptr += pid_b * stride_s_b
    x_ptr += pid_b * stride_x_b
    y_ptr += pid_b * T * D
    for t in range(T):
        # The window holds the inputs in its own dtype, the newest one too.
        new = tl.load(x_ptr + offs_d.to(tl.int64) * stride_x_d + t * stride_x_t, mask=mask_d, other=0.0)
        new = rounded(new.to(tl.float32), state_ptr).to(tl.float32)
        y = convolve_window(state_ptr, new, weight_ptr, bias_ptr, offs_d, mask_d, STRIDE_D, STRIDE_S, W, S, BIAS)
        if SILU:
            y = silu(y)
        moves = mask_d
        if MASK:
            valid = tl.load(mask_ptr + pid_b * stride_m_b + t * stride_m_t) != 0
            y = tl.where(valid, y, 0.0)
            moves = offs_d < tl.where(valid, D, 0)
        tl.store(y_ptr + t * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)
        move_window(state_ptr, new, offs_d, moves, STRIDE_D, STRIDE_S, S, BLOCK_S)
        # The next token reads what other threads have just written.
        tl.debug_barrier()


def _tile(device: torch.device, D: int) -> tuple[int, int, int]:
    """(tokens, channels, warps) of a program over a sequence: 32 elements a lane; 4 on Max and Xe2 and 2 on Arc A,
    where more spill.
    """
    arch = architecture(device)
    if not arch.has_grf_modes:
        return 64, min(64, next_power_of_2(D)), 4
    return 4 if arch.name == "arc-a" else 8, min(128, next_power_of_2(D)), 8


@causal_conv1d.implement("triton", "xpu", "cuda", refuses=_refuses)
def causal_conv1d_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str = "silu"
) -> Tensor:
    batch, T, D = x.shape
    y = torch.empty((batch, T, D), dtype=x.dtype, device=x.device)
    is_silu = _is_silu(activation)
    if y.numel() == 0:
        return y
    block_t, block_d, warps = _tile(x.device, D)
    with on_device_of(x):
        tiles_t = cdiv(T, block_t) + (initial_state is not None)
        _causal_conv1d_kernel[(cdiv(D, block_d) * tiles_t * batch,)](
            x,
            weight,
            x if bias is None else bias,
            x if initial_state is None else initial_state,
            y,
            T,
            *x.stride(),
            *((0, 0, 0) if initial_state is None else initial_state.stride()),
            D=D,
            W=weight.shape[1],
            S=0 if initial_state is None else initial_state.shape[2],
            SILU=is_silu,
            BIAS=bias is not None,
            INITIAL=initial_state is not None,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return y


@causal_conv1d_update.implement("triton", "xpu", "cuda", refuses=_refuses_update)
def causal_conv1d_update_triton(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, activation: str = "silu"
) -> Tensor:
    batch, T, D = x.shape
    S = state.shape[2]
    y = torch.empty((batch, T, D), dtype=x.dtype, device=x.device)
    is_silu = _is_silu(activation)
    if y.numel() == 0:
        return y
    block_d = min(128, next_power_of_2(D))
    stride_s_b, stride_s_d, stride_s_s = state.stride()
    with on_device_of(x):
        _causal_conv1d_update_kernel[(cdiv(D, block_d) * batch,)](
            state,
            x,
            weight,
            x if bias is None else bias,
            x if mask is None else mask,
            y,
            T,
            stride_s_b,
            *x.stride(),
            *((0, 0) if mask is None else mask.stride()),
            STRIDE_D=stride_s_d,
            STRIDE_S=stride_s_s,
            D=D,
            W=weight.shape[1],
            S=S,
            SILU=is_silu,
            BIAS=bias is not None,
            MASK=mask is not None,
            BLOCK_D=block_d,
            BLOCK_S=next_power_of_2(S),
            num_warps=4,
        )
    return y
