"""flash-linear-attention (fla-core)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fla.modules.norm.fused_norm_gate import rms_norm_gated
from torch import Tensor


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert norm_before_gate, "fla's kernel normalizes first"
    assert group_size in (None, x.shape[-1]), "fla's kernel has no groups"
    return functools.partial(rms_norm_gated, x, z, weight, None, activation, eps=eps)
