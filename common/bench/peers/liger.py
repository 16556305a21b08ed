"""liger-kernel: Triton kernels for training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction, rms_norm_forward
from liger_kernel.ops.rms_norm import rms_norm_backward as liger_backward
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Callable[[], Any]:
    return functools.partial(LigerRMSNormFunction.apply, x, weight, eps, 0.0, "llama", False)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    return functools.partial(LigerFusedAddRMSNormFunction.apply, x, residual, weight, eps, 0.0, "llama", False)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> Callable[[], Any]:
    _, rows, rstd, block, warps, casting = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
    return functools.partial(liger_backward, dy, rows, weight, rstd, 0.0, casting, block, warps, False, None)
