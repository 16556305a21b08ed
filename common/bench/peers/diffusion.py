"""What a diffusion transformer runs without fused ops: PyTorch's operators one by one, as diffusers calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weights: list[Tensor],
    k_weights: list[Tensor],
    cos_sin: Tensor,
    positions: None,
    split: int,
    interleaved: bool,
    eps: float,
    round_norm: bool,
) -> Callable[[], Any]:
    assert interleaved, "written for pairs of neighbours"
    cos, sin = (t.repeat_interleave(2, dim=-1)[:, None] for t in cos_sin.chunk(2, dim=-1))

    def turn(x: Tensor, weight: Tensor) -> Tensor:
        x = F.rms_norm(x, weight.shape, weight, eps)
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return (x.float() * cos + torch.stack([-second, first], dim=-1).flatten(-2).float() * sin).to(x.dtype)

    return lambda: (turn(q, q_weights[0]), turn(k, k_weights[0]))


def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Callable[[], Any]:
    return lambda: (1 + scale) * F.layer_norm(x, x.shape[-1:], eps=eps) + shift


def gated_residual(x: Tensor, y: Tensor, gate: Tensor, limit: float | None) -> Callable[[], Any]:
    return lambda: x + gate * y


def gated_residual_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float, limit: float | None
) -> Callable[[], Any]:
    def call() -> tuple[Tensor, Tensor]:
        total = x + gate * y
        return total, (1 + scale) * F.layer_norm(total, x.shape[-1:], eps=eps) + shift

    return call


def concat_swiglu(x: Tensor, gate_up: Tensor) -> Callable[[], Any]:
    def call() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.cat([x, F.silu(gate) * up], dim=-1)

    return call
