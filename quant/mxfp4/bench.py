"""The MXFP4 ops' benchmark rows, with the same layer in bf16 on the vendor's library beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.bench.case import Args, Case, Draw, count, sample_rows
from xpu_ports.quant.mxfp4.format import BLOCK, dequantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_experts import mxfp4_experts
from xpu_ports.quant.mxfp4.kernels.mxfp4_grouped_linear import mxfp4_grouped_linear
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import mxfp4_linear, mxfp4_linear_a4
from xpu_ports.quant.mxfp4.kernels.mxfp4_quantize import mxfp4_quantize

Size = Mapping[str, int]


def _weight(draw: Draw, *shape: int) -> tuple[Tensor, Tensor]:
    """All codes, and scales within a factor of 64."""
    *leading, K = shape
    packed = draw.uniform(0, 256, *leading, K // 2, dtype=torch.uint8)
    return packed, draw.uniform(114, 121, *leading, K // BLOCK, dtype=torch.uint8)


def _linear(size: Size, draw: Draw) -> Args:
    T, N, K = (size[letter] for letter in "TNK")
    return draw(T, K), *_weight(draw, N, K), None


def _linear_flops(size: Size) -> int:
    return 2 * size["T"] * size["N"] * size["K"]


def _linear_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    x, packed, scale, bias = args
    rows, some = slice(None, None, max(1, x.shape[0] // 64)), slice(None, None, 100)
    return (x[rows], packed[some], scale[some], bias), [outputs[0][rows, some]]


def _grouped(size: Size, draw: Draw) -> Args:
    T, E, A, N, K = (size[letter] for letter in "TEANK")
    experts = draw.uniform(0, 1, T, E, dtype=torch.float32).argsort(-1)[:, :A].contiguous()
    return draw(T, K), *_weight(draw, E, N, K), experts


def _grouped_flops(size: Size) -> int:
    return size["A"] * _linear_flops(size)


def _decoded(size: Size) -> int:
    # A value and a scale for each weight of the experts that rows are sent to.
    return 2 * min(size["E"], size["T"] * size["A"]) * size["N"] * size["K"]


def _other_experts(args: Args) -> int:
    """Bytes of the experts that no row was sent to."""
    _, packed, scale, experts = args
    return (packed.shape[0] - experts.unique().numel()) * (packed[0].numel() + scale[0].numel())


def _grouped_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    x, packed, scale, experts = args
    some = slice(None, None, 100)
    return (x[:4], packed[:, some], scale[:, some], experts[:4]), [outputs[0][:4, ..., some]]


def _experts(size: Size, draw: Draw) -> Args:
    T, E, A, D, F = (size[letter] for letter in "TEADF")
    indices = draw.uniform(0, 1, T, E, dtype=torch.float32).argsort(-1)[:, :A].contiguous()
    weights = draw.uniform(0, 1, T, A, dtype=torch.float32)
    return draw(T, D), *_weight(draw, E, 2 * F, D), *_weight(draw, E, D, F), indices, weights, 10.0


def _experts_flops(size: Size) -> int:
    return 6 * size["T"] * size["A"] * size["D"] * size["F"]


def _experts_elementwise(size: Size) -> int:
    T, E, A, D, F = (size[letter] for letter in "TEADF")
    return 6 * min(E, T * A) * D * F + T * A * (6 * F + 2 * D)


def _experts_not_chosen(args: Args) -> int:
    """Bytes of the experts that no token was sent to."""
    _, *packed, indices, _, _ = args
    return (packed[0].shape[0] - indices.unique().numel()) * sum(t[0].numel() for t in packed)


def _experts_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    x, *packed, indices, weights, limit = args
    return (x[:2], *packed, indices[:2], weights[:2], limit), [outputs[0][:2]]


def dense_linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    """The layer with its weight in x's dtype."""
    return functools.partial(F.linear, x, dequantize(packed, scale, x.dtype), bias)


_DENSE = {"pytorch": f"{__name__}:dense_linear"}
_LAYER = "N12288-K4096"

CASES = (
    Case(
        "mxfp4_quantize",
        mxfp4_quantize,
        tuple(f"T{T}-K4096" for T in (1, 256, 4096)),
        lambda size, draw: (draw(size["T"], size["K"]), "even"),
        sample=sample_rows,
        elementwise=count(TK=5),
    ),
    Case(
        "mxfp4_linear",
        mxfp4_linear,
        tuple(f"T{T}-{_LAYER}" for T in (1, 4, 16, 64, 256, 4096)),
        _linear,
        _DENSE,
        _linear_sample,
        _linear_flops,
        compiles=False,
        elementwise=count(NK=2),
    ),
    Case(
        "mxfp4_linear_a4",
        mxfp4_linear_a4,
        tuple(f"T{T}-{_LAYER}" for T in (1, 16, 256, 4096)),
        _linear,
        {},
        _linear_sample,
        _linear_flops,
        compiles=False,
        elementwise=count(NK=2, TK=5),
    ),
    Case(
        "mxfp4_grouped_linear",
        mxfp4_grouped_linear,
        tuple(f"T{T}-E256-A8-N2048-K2304" for T in (1, 32, 4096)),
        _grouped,
        {},
        _grouped_sample,
        _grouped_flops,
        _other_experts,
        compiles=False,
        elementwise=_decoded,
    ),
    Case(
        "mxfp4_experts",
        mxfp4_experts,
        tuple(f"T{T}-E64-A6-D4096-F2048" for T in (1, 8, 32)),
        _experts,
        {},
        _experts_sample,
        _experts_flops,
        _experts_not_chosen,
        compiles=False,
        elementwise=_experts_elementwise,
    ),
)
