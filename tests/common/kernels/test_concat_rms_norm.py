"""concat_rms_norm: numbers, the sum it returns, strides, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels.concat_rms_norm import concat_rms_norm
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW, rms_norm

pytestmark = pytest.mark.op("concat_rms_norm")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = pytest.mark.parametrize(
    "size", [dict(M=1, D=1), dict(M=17, D=61), dict(M=3, D=128), dict(M=2, D=129), dict(M=1, D=LARGEST_ROW // 2)]
)


@FLOATS
@SIZES
def test_without_residual(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, D = size.values()
    y = run(normal(M, D, dtype=dtype), None, normal(M, D, dtype=dtype), torch.randn(2 * D).to(dtype), 1e-5)
    assert isinstance(y, Tensor)
    assert y.shape == (M, 2 * D)


@FLOATS
@SIZES
def test_with_residual(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run.rounds_once = False
    M, D = size.values()
    x, residual, x0 = (normal(M, D, dtype=dtype) for _ in range(3))
    y, total = run(x, residual, x0, torch.randn(2 * D).to(dtype), 1e-5)
    assert (y.shape, total.shape) == ((M, 2 * D), (M, D))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run.rounds_once = False
    a, b, c = (normal(2, 5, 96, dtype=torch.bfloat16, layout=name) for name in (layout, "gap", "contiguous"))
    for x, residual, x0 in ((a, b, c), (b, c, a), (c, a, b)):
        run(x, residual, x0, torch.randn(192))
        run(x, None, x0, None)


def test_one_half_far_larger_than_the_other(run: Runner) -> None:
    """The mean square is of both halves: normalized apart, either would come out at 1."""
    y = run(torch.ones(4, 50) * 1e-3, None, torch.ones(4, 50) * 1e3, None, 0.0)
    assert (y[:, :50] < 1e-5).all()
    torch.testing.assert_close(y[:, 50:], torch.full((4, 50), 2**0.5))


def test_returns_the_sum_as_stored_and_normalizes_it(run: Runner) -> None:
    run.rounds_once = False
    x, residual, x0 = torch.randn(8, 40), torch.randn(8, 40).bfloat16(), torch.randn(8, 40)
    y, total = run(x, residual, x0, None)
    assert torch.equal(total, (x + residual.float()).bfloat16())
    both = torch.cat([total.float(), x0], dim=-1)
    accuracy.assert_close(y, rms_norm.reference(both, None), rms_norm.reference(both.double(), None))


def test_residual_in_fp32(run: Runner) -> None:
    x, residual, x0 = torch.randn(4, 40).bfloat16(), torch.randn(4, 40), torch.randn(4, 40).bfloat16()
    y, total = run(x, residual, x0, torch.randn(80).bfloat16())
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,)], ids=str)
def test_few_rows(run: Runner, shape: tuple) -> None:
    y, total = run(torch.randn(shape), torch.randn(shape), torch.randn(shape), torch.randn(16))
    assert (y.shape, total.shape) == ((*shape[:-1], 16), shape)


@pytest.mark.parametrize("where", [0, 1, 2], ids=["x", "residual", "x0"])
def test_not_a_number_stays_in_its_row(run: Runner, where: int) -> None:
    tensors = [torch.randn(3, 50) for _ in range(3)]
    tensors[where][1, 7] = float("nan")
    y, total = run(*tensors, torch.randn(100))
    assert y.isnan().any(-1).tolist() == [False, True, False]
    assert total.isnan().sum() == (where != 2)


def test_equals_the_unfused_ops() -> None:
    x, residual, x0, weight = (torch.randn(4, 30, dtype=torch.float64) for _ in range(4))
    weight = weight.flatten()[:60]
    y, total = concat_rms_norm.reference(x, residual, x0, weight, 1e-3)
    assert torch.equal(total, x + residual)
    expected = rms_norm.reference(torch.cat([x + residual, x0], dim=-1), weight, 1e-3)
    accuracy.assert_close(y, expected, expected)
    accuracy.assert_close(concat_rms_norm.reference(x + residual, None, x0, weight, 1e-3), expected, expected)


GOOD = torch.zeros(2, 3, 8)
REFUSED = {
    "long rows": (torch.zeros(1, LARGEST_ROW // 2 + 1), None, torch.zeros(1, LARGEST_ROW // 2 + 1), None, "16386 elem"),
    "fp64": (GOOD.double(), None, GOOD, None, "dtype torch.float64"),
    "fp64 x0": (GOOD, None, GOOD.double(), None, "dtype torch.float64"),
    "fp64 residual": (GOOD, GOOD.double(), GOOD, None, "dtype torch.float64"),
    "x0 shape": (GOOD, None, GOOD[:1], None, "differ"),
    "residual stride": (GOOD, torch.zeros(2, 8, 3).mT, GOOD, None, "stride 3"),
    "weight shape": (GOOD, None, GOOD, torch.zeros(8), "expected (16,)"),
    "weight stride": (GOOD, None, GOOD, torch.zeros(32)[::2], "contiguous"),
    "weight dtype": (GOOD, None, GOOD, torch.zeros(16, dtype=torch.float64), "weight has dtype"),
    "four strides": (*(torch.zeros(7, 7, 7, 7, 8)[::2, ::2, ::2, ::2],) * 3, None, "three strides"),
    "gradient": (GOOD, None, GOOD.clone().requires_grad_(), None, "no backward"),
}


@pytest.mark.parametrize(("x", "residual", "x0", "weight", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(x: Tensor, residual: Tensor | None, x0: Tensor, weight: Tensor | None, why: str) -> None:
    assert why in refusal(concat_rms_norm, x, residual, x0, weight)


def test_taken() -> None:
    assert refusal(concat_rms_norm, GOOD, GOOD.bfloat16(), GOOD.half(), torch.zeros(16)) == ""


def test_gradients_through_the_reference() -> None:
    x, residual, x0 = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(concat_rms_norm, (x, residual, x0, weight, 1e-2))
    assert torch.autograd.gradcheck(concat_rms_norm, (x, None, x0, weight, 1e-2))
