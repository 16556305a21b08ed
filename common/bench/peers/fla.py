"""flash-linear-attention (fla-core)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fla.modules.causal_conv1d import causal_conv1d as fla_conv
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from torch import Tensor


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert norm_before_gate, "fla's kernel normalizes first"
    assert group_size in (None, x.shape[-1]), "fla's kernel has no groups"
    return functools.partial(rms_norm_gated, x, z, weight, None, activation, eps=eps)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str
) -> Callable[[], Any]:
    def call() -> Tensor:
        return fla_conv(x, weight, bias, initial_state=initial_state, activation=activation)[0]

    return call
