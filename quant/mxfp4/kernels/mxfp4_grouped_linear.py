"""A linear layer of many experts in MXFP4, each row sent through its own.

    y_i = W_e x_i^T,   e = experts_i

Source: as `xpu_ports.quant.mxfp4.kernels.mxfp4_linear`, one weight a row.
"""

from __future__ import annotations

from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.quant.mxfp4 import format
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import product


def _fake(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty((*experts.shape, packed.shape[1]))


@op(fake=_fake)
def mxfp4_grouped_linear(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    """Send each row through the layers of its experts: one of them, or A with the row read A times in place.

    Args:
        x: [M, K], floating point.
        packed: [E, N, K/2], uint8.
        scale: [E, N, K/32], uint8.
        experts: [M] or [M, A], int64, in [0, E); a row's experts need not differ.

    Returns:
        [M, N] or [M, A, N] in x's dtype, as `mxfp4_linear` computes it. Only chosen experts' weights are read.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    check_arguments(x, packed, scale, experts)
    M, N = x.shape[0], packed.shape[1]
    flat = experts.reshape(-1)
    y = x.new_zeros((flat.numel(), N))
    for expert in flat.unique().tolist():
        mine = (flat == expert).nonzero().squeeze(1)
        some = x[mine // (flat.numel() // M)]
        y[mine] = product(some, packed[expert], scale[expert], None, some)
    return y.view(*experts.shape, N)


def check_arguments(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> None:
    """Whether rows, weights and choices belong together.

    Raises:
        ValueError: they do not.
    """
    K = format.check(packed, scale)
    if packed.dim() != 3 or x.dim() != 2 or x.shape[1] != K:
        raise ValueError(f"x {tuple(x.shape)} and packed {tuple(packed.shape)} are not [M, K] and [E, N, K/2]")
    if experts.dim() not in (1, 2) or experts.shape[0] != x.shape[0] or experts.dtype.is_floating_point:
        raise ValueError(
            f"experts {tuple(experts.shape)} of {experts.dtype} for {x.shape[0]} rows, expected [M] or [M, A], int64"
        )
