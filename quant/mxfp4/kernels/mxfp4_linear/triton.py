"""The linear layers on Triton: which kernel for how many rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.kernels.rms_norm import refuses_rows
from xpu_ports.common.tritonlib import next_power_of_2
from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import (
    check_arguments,
    fragments,
    hopper,
    mxfp4_linear,
    mxfp4_linear_a4,
    row,
    tiles,
    vector,
)
from xpu_ports.quant.mxfp4.kernels.mxfp4_quantize import round_rows

# Rows up to which Intel GPUs read the weight without matrix units, and up to which it is decoded in registers; from
# there on it is decoded to memory, a part at a time, for the vendor's matrix product.
LARGEST_VECTOR = 4
LARGEST_TILED = 64
# Numbers that are decoded at a time.
_DECODED_AT_ONCE = 2**25
# Rows of the weight that they are a multiple of.
_ALIGNED = 256


def refuses_weight(x: Tensor, packed: Tensor, scale: Tensor) -> str | None:
    """Why the kernels cannot take x [..., K] and a weight [..., N, K/2], or None; what no back end takes is left."""
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        return f"dtypes {packed.dtype} and {scale.dtype}, expected bytes as torch.uint8"
    if x.dim() == 0 or x.shape[-1] < BLOCK or x.shape[-1] % BLOCK or packed.dim() < 2 or scale.dim() != packed.dim():
        return "there are no columns, or no whole blocks of them"
    if packed.stride(-1) != 1 or (scale.stride(-1) != 1 and scale.shape[-1] > 1):
        return "the last dimension of packed or scale is not contiguous"
    # The codes are read as 32-bit words.
    if any(stride % 4 for stride in packed.stride()[:-1]) or packed.storage_offset() % 4:
        return f"rows of packed codes have strides {packed.stride()}, not multiples of 4"
    return refuses_rows(x, None)


def _refuses(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> str | None:
    N = packed.shape[0]
    if bias is not None and (bias.shape != (N,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        return f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, expected ({N},), contiguous, {x.dtype}"
    return refuses_weight(x, packed, scale)


@mxfp4_linear.implement("triton", "xpu", "cuda", refuses=_refuses)
def mxfp4_linear_triton(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    check_arguments(x, packed, scale)
    y = torch.empty((*x.shape[:-1], packed.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(x, packed, scale, bias, y)
    return y


@mxfp4_linear_a4.implement("triton", "xpu", "cuda", refuses=_refuses)
def mxfp4_linear_a4_triton(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    check_arguments(x, packed, scale)
    y = torch.empty((*x.shape[:-1], packed.shape[0]), dtype=x.dtype, device=x.device)
    _multiply(round_rows(x), packed, scale, bias, y)
    return y


def _multiply(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fill y, contiguous [..., N]; its dtype need not be x's."""
    if y.numel() == 0:
        return
    N, K = packed.shape[0], x.shape[-1]
    rows, arch = y.numel() // N, architecture(x.device)
    if arch.name == "nvidia" and rows == 1:
        row.launch(x, packed, scale, bias, y)
    elif arch.name == "nvidia" and rows <= fragments.LARGEST_SLICED:
        fragments.launch_slices(x, packed, scale, bias, y)
    elif arch.name == "nvidia" and hopper.takes(x, packed):
        hopper.launch(x, packed, scale, bias, y)
    elif arch.name == "nvidia" and rows <= fragments.LARGEST_TILED:
        fragments.launch_tiles(x, packed, scale, bias, y, fragments.tile(arch, rows, N, K, tiles.PARTS[x.dtype]))
    elif rows <= LARGEST_VECTOR:
        vector.launch(x, packed, scale, bias, y, min(2, next_power_of_2(rows)))
    elif rows <= LARGEST_TILED and arch.matrix_units:
        tiles.launch(x, packed, scale, bias, y, tiles.plan(arch, rows, N, K))
    else:
        _decode_and_multiply(x, packed, scale, bias, y)


def _decode_and_multiply(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    N, K = packed.shape[0], x.shape[-1]
    # Of rounded rows, bf16, the product in a wider dtype is not to be rounded to bf16 in between.
    x = (x if x.dtype == y.dtype else x.float()).reshape(-1, K)
    # A part of the product that does not begin at a multiple of 16 bytes takes the vendor's library twice as long.
    step = min(N, max(_ALIGNED, _DECODED_AT_ONCE // K // _ALIGNED * _ALIGNED))
    workspace = torch.empty((step, K), dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.to(x.dtype)
    for start in range(0, N, step):
        # Not by indexing, which tensors without data on a device that is not here do not take.
        n = min(step, N - start)
        weight = workspace.narrow(0, 0, n)
        tiles.decode(packed.narrow(0, start, n), scale.narrow(0, start, n), weight)
        part = y.view(-1, N).narrow(1, start, n)
        some = None if bias is None else bias.narrow(0, start, n)
        if x.dtype != y.dtype:
            part.copy_(F.linear(x, weight, some))
        elif some is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(some, x, weight.t(), out=part)
