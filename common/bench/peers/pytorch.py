"""PyTorch's own fused operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.bench.case import PeerMissingError


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Callable[[], Any]:
    return functools.partial(F.rms_norm, x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Callable[[], Any]:
    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (x.shape[-1],), weight, eps), total

    return call


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    if dy.device.type == "cpu":
        raise PeerMissingError("PyTorch has no fused backward on a CPU")
    # Autograd hands the operator the root mean square that the forward kept.
    shape = [x.shape[-1]]
    _, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
    return functools.partial(torch.ops.aten._fused_rms_norm_backward, dy, x, shape, rstd, weight, [True, True])


def concat_rms_norm(x: Tensor, residual: Tensor, x0: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(torch.cat([total, x0], dim=-1), weight.shape, weight, eps), total

    return call


def gated_activation(gate_up: Tensor, adapter: Tensor | None, activation: str) -> Callable[[], Any]:
    assert adapter is None, "written for a projection without adapters"
    assert activation == "gelu", "written for the activation of Zamba2"

    def call() -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate) * up

    return call


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: None, activation: str
) -> Callable[[], Any]:
    D, W = weight.shape
    T = x.shape[1]

    def call() -> Tensor:
        y = F.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=W - 1, groups=D)[..., :T]
        return F.silu(y).transpose(1, 2)

    return call


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Callable[[], Any]:
    assert q.shape[1] == k.shape[1], "written for one key head a query head"
    attend = functools.partial(
        F.scaled_dot_product_attention, q[:, :, None], k, v, None if mask is None else mask[:, None, None], scale=scale
    )
    return lambda: attend()[:, :, 0]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[[], Any]:
    return functools.partial(F.linear, x, weight, bias)


def norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Callable[[], Any]:
    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.linear(F.rms_norm(total, norm_weight.shape, norm_weight, eps), weight, bias), total

    return call


def gated_norm_linear(
    y: Tensor, z: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, group_size: int, eps: float
) -> Callable[[], Any]:
    def call() -> Tensor:
        gated = (y * F.silu(z)).unflatten(-1, (-1, group_size))
        return F.linear(F.rms_norm(gated, (group_size,), None, eps).flatten(-2) * norm_weight, weight, bias)

    return call


def adapted_linears(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> Callable[[], Any]:
    def call() -> list[Tensor]:
        return [F.linear(x, w) + F.linear(F.linear(x, d), u) for w, d, u in zip(weights, a, b, strict=True)]

    return call


def mla_decode(q: Tensor, rows: Tensor, mask: Tensor | None, latent: int, scale: float) -> Callable[[], Any]:
    where = None if mask is None else mask[:, None, None]
    k = rows[:, None]
    attend = functools.partial(
        F.scaled_dot_product_attention, q[:, :, None], k, k[..., :latent], where, scale=scale, enable_gqa=True
    )
    return lambda: attend()[:, :, 0]


def moe_router_logits(x: Tensor, weight: Tensor) -> Callable[[], Any]:
    return lambda: F.linear(x.to(weight.dtype), weight)
