"""A linear layer of many experts in MXFP4, each row sent through its own.

    y_i = W_e x_i^T,   e = experts_i

Source: as `xpu_ports.quant.mxfp4.kernels.mxfp4_linear`, one weight a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import cdiv
from xpu_ports.quant.mxfp4 import format
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import fragments, product, row, tiles, vector
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.triton import refuses_weight

# Pairs of row and expert up to which each pair reads its expert's weight by itself. Sorting the rows, which saves
# reading twice what several rows chose, takes eight small launches.
LARGEST_UNSORTED = 64
# Sorted rows of an expert, on average, up to which NVIDIA's kernel for few rows is faster than tiles.
LARGEST_SLICED = 8


def _fake(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    return x.new_empty((*experts.shape, packed.shape[1]))


@op(fake=_fake)
def mxfp4_grouped_linear(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    """Send each row through the layers of its experts: one of them, or A with the row read A times in place.

    Args:
        x: [M, K], floating point.
        packed: [E, N, K/2], uint8.
        scale: [E, N, K/32], uint8.
        experts: [M] or [M, A], int64, in [0, E]; a row's experts need not differ. E is one that another device has.

    Returns:
        [M, N] or [M, A, N] in x's dtype, as `mxfp4_linear` computes it. Only chosen experts' weights are read. What
        expert E would give is not computed and may be any number.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    check_arguments(x, packed, scale, experts)
    M, N = x.shape[0], packed.shape[1]
    flat = experts.reshape(-1)
    y = x.new_zeros((flat.numel(), N))
    for expert in flat[flat < packed.shape[0]].unique().tolist():
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


def _refuses(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> str | None:
    if experts.dtype != torch.int64:
        return f"experts have dtype {experts.dtype}, not torch.int64"
    return refuses_weight(x, packed, scale)


@mxfp4_grouped_linear.implement("triton", "xpu", "cuda", refuses=_refuses)
def mxfp4_grouped_linear_triton(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    check_arguments(x, packed, scale, experts)
    y = torch.empty((*experts.shape, packed.shape[1]), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    multiply(x, packed, scale, y, experts.reshape(-1))
    return y


def multiply(x: Tensor, packed: Tensor, scale: Tensor, y: Tensor, flat: Tensor) -> None:
    """Fill y, contiguous [.., N] in any floating dtype, a row for each of flat [M A], of x [M, K]."""
    M, K = x.shape
    E, N = packed.shape[:2]
    R, arch = flat.numel(), architecture(x.device)
    if R <= LARGEST_UNSORTED or not arch.matrix_units:
        if arch.name == "nvidia":
            row.launch(x, packed, scale, None, y, flat, R // M)
        else:
            vector.launch(x, packed, scale, None, y, 1, flat, R // M)
        return
    # Nothing here waits for the device.
    counts = torch.zeros(E + 1, dtype=torch.int32, device=x.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).narrow(0, 0, E)
    groups = tiles.Groups(flat.argsort(stable=True), counts.cumsum(0, dtype=torch.int32), counts, R // M)
    if arch.name == "nvidia" and cdiv(R, E) <= LARGEST_SLICED:
        fragments.launch_slices(x, packed, scale, None, y, groups=groups)
    else:
        tiles.launch(x, packed, scale, None, y, tiles.plan(arch, cdiv(R, E), N, K, grouped=True), groups)
