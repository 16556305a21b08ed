"""transformers' torch code: what runs where no kernel package is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import (
    Zamba2RMSNorm,
    Zamba2RMSNormGated,
    apply_rotary_pos_emb,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    return functools.partial(_with_weight(Zamba2RMSNorm(x.shape[-1], eps), weight), x)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    norm = _with_weight(Zamba2RMSNorm(x.shape[-1], eps), weight)

    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total), total

    return call


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    N = x.shape[-1]
    if norm_before_gate:
        assert activation == "sigmoid", "KimiLinearRMSNormGated knows no other activation"
        return functools.partial(_with_weight(KimiLinearRMSNormGated(N, eps), weight), x, z)
    assert activation == "silu", "Zamba2RMSNormGated knows no other activation"
    return functools.partial(_with_weight(Zamba2RMSNormGated(N, group_size or N, eps), weight), x, z)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Callable[[], Any]:
    # As its models hand them over: both halves, in the model's dtype.
    cos, sin = (torch.cat((t, t), dim=-1).to(q.dtype) for t in (cos, sin))
    return functools.partial(apply_rotary_pos_emb, q, k, cos, sin, unsqueeze_dim=2)


def _with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module.requires_grad_(False).to(torch.device(weight.device))
