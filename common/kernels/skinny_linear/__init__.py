"""Linear layers for a few rows, where reading the weights is all that takes time, with what comes before them fused in.

    y = x W^T + b,   y = norm(x + residual) W^T + b,   y = norm(y * silu(z)) W^T + b,   y_i = x W_i^T + (x A_i^T) B_i^T,
    y = act(g) * u with g | u = n W^T + (n A^T) B^T and n = norm(x)

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4; Dao and Gu,
"Transformers are SSMs" (arXiv:2405.21060), section 7.1, for the gated norm; Hu et al., "LoRA" (arXiv:2106.09685),
equation 3, for the low-rank sum; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.gated_rms_norm import gated_rms_norm
from xpu_ports.common.kernels.rms_norm import add_rms_norm, rms_norm

# Layers that may share their input in one call: queries, keys and values.
MOST_LAYERS = 3


@op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b.

    Args:
        x: [..., K], floating point, any row strides.
        weight: [N, K] in x's dtype, any row stride.
        bias: [N] in x's dtype; None for nothing.

    Returns:
        [..., N] in x's dtype.
    """
    return F.linear(x, weight, bias)


@op
def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    """A linear layer behind the norm that opens a block of a pre-norm network: `rms_norm`, then `linear`.

    Args:
        x: [..., K], floating point, any row strides.
        residual: [..., K], added to x before the norm, in any floating dtype; None for nothing.
        norm_weight: [K]; None for ones.
        weight: [N, K] in x's dtype, any row stride.
        bias: [N] in x's dtype; None for nothing.
        eps: added to the mean square.

    Returns:
        y: [..., N] in x's dtype; where there is a residual (y, sum), the sum as `add_rms_norm` gives it, in the
        residual's dtype, and normalized as it is stored. A kernel may leave out the normalized row's rounding.
    """
    if residual is None:
        return F.linear(rms_norm.reference(x, norm_weight, eps), weight, bias)
    normalized, total = add_rms_norm.reference(x, residual, norm_weight, eps)
    return F.linear(normalized, weight, bias), total


@op
def gated_norm_linear(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    group_size: int | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The end of a Mamba-2 mixer: `gated_rms_norm`, gate first, then `linear`.

    Args:
        y: [..., K], floating point, any row strides.
        z: [..., K], the gate before silu, in any floating dtype; any row strides.
        norm_weight: [K]; None for ones.
        weight: [N, K] in y's dtype, any row stride.
        bias: [N] in y's dtype; None for nothing.
        group_size: columns that share a mean square; divides K. All of them when left out.
        eps: added to the mean square.

    Returns:
        [..., N] in y's dtype. A kernel may leave out the normalized row's rounding.

    Raises:
        ValueError: group_size does not divide K.
    """
    return F.linear(gated_rms_norm.reference(y, z, norm_weight, eps, group_size), weight, bias)


@op
def adapted_linears(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """Layers that read the same input, each with a low-rank adapter or all without: x W_i^T + (x A_i^T) B_i^T.

    Args:
        x: [..., K], floating point, any row strides.
        weights: [N_i, K] each, in x's dtype, any row strides.
        a: [R, K] each, as many as there are weights, or empty for no adapters.
        b: [N_i, R] each, as many as in `a`.

    Returns:
        [..., N_i] each, in x's dtype. A kernel may leave out the roundings of the products that are added.

    Raises:
        ValueError: the lists' lengths do not match.
    """
    check_layers(weights, a, b)
    outputs = [F.linear(x, weight) for weight in weights]
    if a:
        outputs = [y + F.linear(F.linear(x, down), up) for y, down, up in zip(outputs, a, b, strict=True)]
    return outputs


@op
def norm_glu(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    activation: str,
    eps: float = 1e-6,
) -> Tensor:
    """The first half of a gated feed-forward layer: `rms_norm`, `adapted_linears` of one layer, `gated_activation`.

    Args:
        x: [..., K], floating point, any row strides.
        norm_weight: [K]; None for ones.
        weight: [2 F, K] in x's dtype, any row stride: the gate's rows, then the others.
        a: [R, K], half of an adapter, or None for none.
        b: [2 F, R], the other half.
        activation: "gelu" (by the error function), "gelu_tanh" or "silu".
        eps: added to the mean square.

    Returns:
        [..., F] in x's dtype. A kernel may leave out the roundings in between.

    Raises:
        ValueError: weight has an odd number of rows, the activation is unknown, or half of an adapter is missing.
    """
    normalized = rms_norm.reference(x, norm_weight, eps)
    (gate_up,) = adapted_linears.reference(normalized, [weight], *check_adapter(a, b))
    return gated_activation.reference(gate_up, None, activation)


def check_adapter(a: Tensor | None, b: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """The halves of an adapter as `adapted_linears` has them.

    Raises:
        ValueError: one of them is missing.
    """
    if a is None or b is None:
        if a is not b:
            raise ValueError("half of the adapter is missing")
        return [], []
    return [a], [b]


def check_layers(weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> None:
    """Whether the adapters are as many as the layers, or none.

    Raises:
        ValueError: they are not, or there is no layer.
    """
    if not weights or len(a) != len(b) or len(a) not in (0, len(weights)):
        raise ValueError(f"{len(weights)} weights with {len(a)} and {len(b)} halves of adapters")


# Registered in this order, which is that of preference.
from xpu_ports.common.kernels.skinny_linear import triton as _triton  # noqa: E402, F401
from xpu_ports.common.kernels.skinny_linear import vendor as _vendor  # noqa: E402, F401
