"""The back end of vllm_xpu_kernels, with a module in its place that checks the layouts it is given, and computes."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.common.ops import fake
from xpu_ports.common import accuracy
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import mxfp4_linear_a4, vllm_xpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA build of PyTorch cannot fake an XPU")


def fp4_gemm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Its arguments as onednn_matmul.cpp checks them, and the product that oneDNN makes of them."""
    assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
    assert a_scale.dtype == b_scale.dtype == torch.float8_e8m0fnu
    M, half = a.shape
    N = b.shape[1]
    assert b.shape == (half, N)
    assert b.stride() == (1, half), "the weight is transposed in place"
    assert a.is_contiguous()
    assert a_scale.shape == (M, half // 16)
    assert b_scale.shape == (half // 16, N)
    assert a_scale.is_contiguous()
    assert b_scale.is_contiguous()
    assert dtype in (torch.float16, torch.bfloat16)
    w = dequantize(b.view(torch.uint8).t(), b_scale.view(torch.uint8).t(), torch.float32)
    y = dequantize(a.view(torch.uint8), a_scale.view(torch.uint8), torch.float32) @ w.t()
    return (y if bias is None else y + bias.float()).to(dtype)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("vllm_xpu_kernels", "vllm_xpu_kernels._xpu_C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(torch.ops, "_xpu_C", types.SimpleNamespace(fp4_gemm=fp4_gemm), raising=False)
    vllm_xpu._gemm.cache_clear()
    yield
    vllm_xpu._gemm.cache_clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(5, 96), (2, 7, 64)], ids=str)
def test_numbers(shape: tuple, biased: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), quantize(torch.randn(9, shape[-1]))
    bias = torch.randn(9).to(dtype) if biased else None
    y = vllm_xpu.mxfp4_linear_a4_vllm(x, *weight, bias)
    oracle = accuracy.oracle(mxfp4_linear_a4.reference, x, *weight, bias)
    accuracy.assert_close(y, mxfp4_linear_a4.reference(x, *weight, bias), oracle)


def choice(**change: object) -> tuple[str, str]:
    given = {"x": torch.randn(8, 64).bfloat16(), "bias": None}
    given["packed"], given["scale"] = quantize(torch.randn(9, 64))
    with FakeTensorMode():
        return mxfp4_linear_a4.choose(**{name: fake(value) for name, value in (given | change).items()})


@pytest.mark.usefixtures("installed")
def test_it_is_taken_on_an_xpu() -> None:
    assert choice() == ("vllm-xpu-kernels", "first that does not refuse")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(x=torch.randn(8, 64)), "dtype torch.float32"),
        (dict(bias=torch.randn(9)), "bias has dtype torch.float32"),
        (dict(x=torch.randn(4, 64).bfloat16()), "no more than 4 rows"),
        (dict(packed=torch.zeros(18, 32).byte()[::2]), "packed is not contiguous"),
        (dict(scale=torch.zeros(9, 2).byte().view(torch.float8_e8m0fnu)), "float8_e8m0fnu, expected bytes"),
    ],
    ids=["dtype", "bias", "rows", "layout", "bytes"],
)
def test_refusals(change: dict, why: str) -> None:
    backend, reason = choice(**change)
    assert backend != "vllm-xpu-kernels"
    assert why in reason


def test_without_the_package() -> None:
    vllm_xpu._gemm.cache_clear()
    backend, reason = choice()
    assert backend != "vllm-xpu-kernels"
    assert "vllm_xpu_kernels cannot be imported" in reason


def test_without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm_xpu_kernels", "vllm_xpu_kernels._xpu_C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vllm_xpu._gemm.cache_clear()
    assert "has no fp4_gemm" in choice()[1]
    vllm_xpu._gemm.cache_clear()
