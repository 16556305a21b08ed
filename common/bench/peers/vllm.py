"""vLLM's Triton kernels for Mamba layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert activation == "silu", "vLLM's kernel knows no other activation"
    return functools.partial(
        rms_norm_gated, x, weight, None, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
    )
