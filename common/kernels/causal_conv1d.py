"""Depthwise causal convolution over time with its activation: over a sequence, and one step on a kept window.

    y[t] = act(sum_w weight[:, w] * x[t - W + 1 + w] + bias)

Source: Gu and Dao, "Mamba" (arXiv:2312.00752), figure 3; Dao's causal-conv1d states the same contract.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op

ACTIVATIONS = ("silu", "identity")


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
    y = sum(window[:, :, w : w + T] * weight[:, w, None].to(wide) for w in range(W))
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
    return torch.stack(outputs, dim=1).to(x.dtype)


def _activate(y: Tensor, activation: str) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    return torch.nn.functional.silu(y) if activation == "silu" else y
