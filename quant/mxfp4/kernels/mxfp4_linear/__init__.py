"""Linear layers whose weight stays MXFP4: with x as it is (W4A16), and with x rounded to MXFP4 (W4A4).

    y = x W^T + b,   y = round(x) W^T + b,   W = value[code] 2^(scale - 127)

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, section 6.1, with products of decoded
elements; the roundings of x are compressed-tensors' (scale rule "even").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.quant.mxfp4 import format


def _fake(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@op(fake=_fake)
def mxfp4_linear(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with the weight in MXFP4 and x as it is. Differentiable in x and bias.

    Args:
        x: [..., K], floating point, any row strides.
        packed: [N, K/2], uint8.
        scale: [N, K/32], uint8.
        bias: [N] in x's dtype; None for nothing.

    Returns:
        [..., N] in x's dtype. The products are of x and the weight in x's dtype (exact but for what float16 does not
        hold, which a kernel may keep exact), the sums fp32 (fp64 for fp64).

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    check_arguments(x, packed, scale)
    return product(x, packed, scale, bias, x)


@op(fake=_fake)
def mxfp4_linear_a4(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with weight and x in MXFP4: x is rounded a block of 32 at a time, by the rule "even".

    Differentiable in x and bias; the gradient passes the rounding as if it were not there.

    Args:
        x: [..., K], floating point, any row strides.
        packed: [N, K/2], uint8.
        scale: [N, K/32], uint8.
        bias: [N] in x's dtype; None for nothing.

    Returns:
        [..., N] in x's dtype. Both factors are exact, also those that float16 does not hold; the sums are fp32 (fp64
        for fp64).

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    check_arguments(x, packed, scale)
    exact = torch.float32 if x.dtype == torch.float16 else x.dtype
    return product(x, packed, scale, bias, format.dequantize(*format.quantize(x), exact))


def product(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
    """factor W^T + b in x's dtype, some rows of W at a time, so that W is never whole in memory."""
    return _Product.apply(x, packed, scale, bias, factor)


class _Product(torch.autograd.Function):
    """The gradient of the factor goes to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, factor: Tensor) -> Tensor:
        _save_for_backward(ctx, (x, packed, scale, bias), x)
        y = x.new_empty((*x.shape[:-1], packed.shape[0]))
        if x.shape[-1] == 0:
            y.zero_() if bias is None else y.copy_(bias)
        bias = None if bias is None else bias.to(factor.dtype)
        for rows, weight in format.dequantized_rows(packed, scale, factor.dtype):
            y[..., rows] = F.linear(factor, weight, None if bias is None else bias[rows])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_linear_grad(ctx, dy), None


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, packed, scale, bias = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(packed, scale)


@mxfp4_linear.differentiate(setup_context=_save_for_backward)
@mxfp4_linear_a4.differentiate(setup_context=_save_for_backward)
def _linear_grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    dx = _input_gradient(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    needs_bias = ctx.biased and ctx.needs_input_grad[3]
    return dx, None, None, dy.reshape(-1, dy.shape[-1]).sum(0) if needs_bias else None


def _input_gradient(dy: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """dy W, summed in fp32 (fp64 for fp64) over the same rows."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    dx = dy.new_zeros((*dy.shape[:-1], 2 * packed.shape[1]), dtype=wide)
    for rows, weight in format.dequantized_rows(packed, scale, dy.dtype):
        dx += dy[..., rows] @ weight
    return dx.to(dy.dtype)


def check_arguments(x: Tensor, packed: Tensor, scale: Tensor) -> None:
    """Whether x, [..., K], meets a weight of K columns, a matrix.

    Raises:
        ValueError: it does not, or the weight's shapes or dtypes do not belong together.
    """
    K = format.check(packed, scale)
    if packed.dim() != 2 or x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(f"x {tuple(x.shape)} and packed {tuple(packed.shape)} are not [..., K] and [N, K/2]")


# Registered in this order, which is that of preference.
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import vllm_xpu as _vllm_xpu  # noqa: E402, F401, I001
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import triton as _triton  # noqa: E402, F401
