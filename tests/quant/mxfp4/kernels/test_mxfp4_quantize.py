"""mxfp4_quantize: byte for byte what the codec gives, on every back end."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal
from xpu_ports.quant.mxfp4.format import SCALE_RULES, quantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_quantize import mxfp4_quantize

pytestmark = pytest.mark.op("mxfp4_quantize")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
RULES = pytest.mark.parametrize("rule", SCALE_RULES)


def same_bytes(run: Runner, x: Tensor, rule: str = "even") -> None:
    for got, expected in zip(run(x, rule), quantize(x, rule), strict=True):
        assert torch.equal(got, expected)


@FLOATS
@RULES
@pytest.mark.parametrize("size", [dict(M=1, K=32), dict(M=3, K=96), dict(M=17, K=1120), dict(M=2, K=4096)])
def test_sizes(run: Runner, size: dict, rule: str, dtype: torch.dtype) -> None:
    M, K = size.values()
    # Blocks between 1e-6 and 1e3, so that every scale of float16 is among them.
    x = torch.randn(M, K // 32, 32) * 10 ** (torch.rand(M, K // 32, 1) * 9 - 6)
    same_bytes(run, x.view(M, K).to(dtype), rule)


@RULES
def test_every_bfloat16(run: Runner, rule: str) -> None:
    """Beside a neighbour up to four binades larger, and beside itself; NaN, infinity and denormal numbers too."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    same_bytes(run, x.view(-1, 64), rule)
    same_bytes(run, x.view(64, -1).T.contiguous(), rule)


@FLOATS
def test_next_to_ties(run: Runner, dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    near = torch.cat([(ties.view(integer) + step).view(dtype) for step in (-1, 0, 1)])
    x = torch.zeros(3, 32, dtype=dtype)
    x[:, :21], x[1] = near, -x[0]
    x[:, 31] = torch.tensor([6.0, 6.0, 7.0])
    same_bytes(run, x)


@FLOATS
@RULES
def test_not_a_number(run: Runner, rule: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 96).to(dtype)
    x[0, 5], x[1, 40], x[2, 95] = math.nan, math.inf, -math.inf
    x[3, :32], x[3, 32:64] = 0.0, -0.0
    same_bytes(run, x, rule)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    same_bytes(run, normal(2, 4, 64, dtype=torch.bfloat16, layout=layout))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (64,), (3, 0)], ids=str)
def test_few_elements(run: Runner, shape: tuple) -> None:
    same_bytes(run, torch.randn(shape))


def test_compiled() -> None:
    x = torch.randn(3, 64)
    compiled = torch.compile(mxfp4_quantize, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), quantize(x), strict=True))
