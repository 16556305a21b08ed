"""The same layers for many rows: the norms' own kernels, and the matrix products of PyTorch's vendor libraries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.gated_rms_norm import gated_rms_norm
from xpu_ports.common.kernels.rms_norm import add_rms_norm, rms_norm
from xpu_ports.common.kernels.skinny_linear import (
    adapted_linears,
    check_adapter,
    gated_norm_linear,
    linear,
    norm_glu,
    norm_linear,
)


def _takes_all(*args: object, **kwargs: object) -> None:
    """Nothing is refused: these are compositions of other ops, which choose for themselves."""
    return


@linear.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def linear_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@norm_linear.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def norm_linear_pytorch(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return F.linear(rms_norm(x, norm_weight, eps), weight, bias)
    normalized, total = add_rms_norm(x, residual, norm_weight, eps)
    return F.linear(normalized, weight, bias), total


@gated_norm_linear.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def gated_norm_linear_pytorch(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    group_size: int | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.linear(gated_rms_norm(y, z, norm_weight, eps, group_size), weight, bias)


@adapted_linears.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def adapted_linears_pytorch(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return adapted_linears.reference(x, weights, a, b)


@norm_glu.implement("pytorch", "xpu", "cuda", refuses=_takes_all)
def norm_glu_pytorch(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    activation: str,
    eps: float = 1e-6,
) -> Tensor:
    (gate_up,) = adapted_linears(rms_norm(x, norm_weight, eps), [weight], *check_adapter(a, b))
    return gated_activation(gate_up, None, activation)
