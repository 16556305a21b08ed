"""mamba-ssm: the Triton kernels of Mamba's authors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from torch import Tensor


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert activation == "silu", "mamba-ssm's kernel knows no other activation"
    return functools.partial(rmsnorm_fn, x, weight, None, z, eps, group_size, norm_before_gate)
