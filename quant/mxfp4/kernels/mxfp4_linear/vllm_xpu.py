"""W4A4 on oneDNN, where the package vllm_xpu_kernels is installed: its fp4_gemm with this project's rounding of x.

Its own quantization of x takes the scale rule "rceil" and rounds ties down, so that it is not used.

Source: vllm-project/vllm-xpu-kernels at 4543b58, csrc/xpu/onednn/onednn_matmul.cpp and fp4_gemm_w4a4.h, for layouts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import check_arguments, mxfp4_linear_a4
from xpu_ports.quant.mxfp4.kernels.mxfp4_quantize import mxfp4_quantize

# Rows up to which reading the weight once, which the Triton kernel does, is all that takes time.
LARGEST_VECTOR = 4


@functools.cache
def _gemm() -> Callable[..., Tensor] | str:
    """torch.ops._xpu_C.fp4_gemm, which importing the package registers; why not where it cannot be had."""
    try:
        importlib.import_module("vllm_xpu_kernels._xpu_C")
        return torch.ops._xpu_C.fp4_gemm
    except ImportError as error:
        return f"vllm_xpu_kernels cannot be imported: {error}"
    except AttributeError:
        return "vllm_xpu_kernels has no fp4_gemm"


def _refuses(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> str | None:
    gemm = _gemm()
    if isinstance(gemm, str):
        return gemm
    if x.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {x.dtype} is not one of float16, bfloat16"
    if bias is not None and bias.dtype != x.dtype:
        return f"bias has dtype {bias.dtype}, the input {x.dtype}"
    if packed.dtype != torch.uint8 or scale.dtype != torch.uint8:
        return f"dtypes {packed.dtype} and {scale.dtype}, expected bytes as torch.uint8"
    if x.dim() == 0 or x.shape[-1] % BLOCK or not packed.is_contiguous():
        return "columns are not whole blocks, or packed is not contiguous"
    if x.numel() <= LARGEST_VECTOR * x.shape[-1]:
        return f"no more than {LARGEST_VECTOR} rows"
    return None


@mxfp4_linear_a4.implement("vllm-xpu-kernels", "xpu", refuses=_refuses)
def mxfp4_linear_a4_vllm(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    check_arguments(x, packed, scale)
    gemm = _gemm()
    assert callable(gemm)
    x_packed, x_scale = mxfp4_quantize(x.reshape(-1, x.shape[-1]))
    # The weight transposed as a view; its scales, [K/32, N], in memory too, which is a copy of a 17th of it.
    y = gemm(
        x_packed.view(torch.float4_e2m1fn_x2),
        packed.view(torch.float4_e2m1fn_x2).t(),
        x_scale.view(torch.float8_e8m0fnu),
        scale.t().clone(memory_format=torch.contiguous_format).view(torch.float8_e8m0fnu),
        x.dtype,
        bias,
    )
    return y.view(*x.shape[:-1], packed.shape[0])
