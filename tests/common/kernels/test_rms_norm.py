"""rms_norm, add_rms_norm and the backward: numbers, strides, gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels import rms_norm as module
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW, add_rms_norm, rms_norm, rms_norm_backward

pytestmark = pytest.mark.op("rms_norm")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(M=1, N=1),
    dict(M=5, N=2),
    dict(M=17, N=127),
    dict(M=3, N=128),
    dict(M=3, N=129),
    dict(M=2, N=1000),
    dict(M=2, N=4096),
    dict(M=1, N=16381),
    dict(M=1, N=16384),
]
WIDE = pytest.mark.parametrize(
    "size",
    [dict(M=m, N=n) for m in (1, 2, 31, 257) for n in (3, 64, 97, 896, 2560, 3584, 7168, 8191, 12289)],
)


def rows(*shape: int, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """Rows of sizes 1e-3 to 1e2 in turn, so that eps weighs in some and not in others."""
    x = normal(*shape, dtype=dtype, layout=layout)
    if layout != "expanded":
        x *= torch.tensor([1e-3, 1.0, 1e2], dtype=dtype)[torch.arange(shape[-2]) % 3, None]
    return x


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, N = size.values()
    run(rows(M, N, dtype=dtype), torch.randn(N).to(dtype), 1e-5)


@pytest.mark.full
@FLOATS
@WIDE
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, N = size.values()
    run(rows(M, N, dtype=dtype), torch.randn(N).to(dtype), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(rows(2, 5, 96, dtype=torch.bfloat16, layout=layout), torch.randn(96).bfloat16())


def test_three_strides(run: Runner) -> None:
    x = normal(3, 2, 10, 32, dtype=torch.float32, layout="transposed")[:, :, ::2]
    run(x, torch.randn(32))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,)], ids=str)
def test_few_rows(run: Runner, shape: tuple) -> None:
    y = run(torch.randn(shape), torch.randn(64))
    assert y.shape == shape


@FLOATS
def test_without_weight(run: Runner, dtype: torch.dtype) -> None:
    run(rows(3, 100, dtype=dtype), None)


def test_weight_of_another_dtype(run: Runner) -> None:
    y = run(rows(3, 100, dtype=torch.bfloat16), torch.randn(100))
    assert y.dtype == torch.bfloat16


def test_not_a_number_stays_in_its_row(run: Runner) -> None:
    x = torch.randn(3, 50)
    x[1, 7] = float("nan")
    y = run(x, torch.randn(50))
    assert y.isnan().any(-1).tolist() == [False, True, False]


def test_one_rounding() -> None:
    x, dy = (rows(64, 96, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(96).bfloat16()
    assert_rounded_once(rms_norm, x, weight)
    assert_rounded_once(rms_norm_backward, dy, x, weight)


def test_formula() -> None:
    x, weight = torch.randn(4, 30, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    expected = torch.stack([row / (sum(v * v for v in row) / 30 + 1e-6) ** 0.5 * weight for row in x])
    accuracy.assert_close(rms_norm.reference(x, weight, 1e-6), expected, expected)


@pytest.mark.op("add_rms_norm")
@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_add_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, N = size.values()
    run(rows(M, N, dtype=dtype), rows(M, N, dtype=dtype), torch.randn(N).to(dtype), 1e-5)


@pytest.mark.op("add_rms_norm")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_add_layouts(run: Runner, layout: str) -> None:
    x = rows(2, 5, 96, dtype=torch.bfloat16)
    residual = rows(2, 5, 96, dtype=torch.bfloat16, layout=layout)
    run(x, residual, torch.randn(96))
    run(residual, x, None)


@pytest.mark.op("add_rms_norm")
def test_add_returns_the_sum(run: Runner) -> None:
    x, residual = torch.randn(4, 40).bfloat16(), torch.randn(4, 40)
    y, total = run(x, residual, None)
    assert (y.dtype, total.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(total, x.float() + residual)


@pytest.mark.op("add_rms_norm")
def test_add_normalizes_the_sum_as_stored(run: Runner) -> None:
    """Fused and unfused code agree: the sum is rounded to the residual's dtype before it is normalized."""
    run.rounds_once = False
    x, residual = torch.randn(8, 40), torch.randn(8, 40).bfloat16()
    y, total = run(x, residual, None)
    assert torch.equal(total, (x + residual.float()).bfloat16())
    accuracy.assert_close(y, rms_norm.reference(total.float(), None), rms_norm.reference(total.double(), None))


@pytest.mark.op("add_rms_norm")
def test_add_no_rows(run: Runner) -> None:
    y, total = run(torch.randn(0, 8), torch.randn(0, 8).bfloat16(), torch.randn(8))
    assert (y.shape, y.dtype, total.shape, total.dtype) == ((0, 8), torch.float32, (0, 8), torch.bfloat16)


@pytest.mark.op("rms_norm_backward")
@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_backward_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, N = size.values()
    run(normal(M, N, dtype=dtype), rows(M, N, dtype=dtype), torch.randn(N).to(dtype), 1e-5)


@pytest.mark.op("rms_norm_backward")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_layouts(run: Runner, layout: str) -> None:
    x, dy = (rows(2, 5, 96, dtype=torch.float32, layout=name) for name in (layout, "gap"))
    run(dy, x, torch.randn(96))
    run(x, dy, None)


@pytest.mark.op("rms_norm_backward")
def test_backward_sums_the_weight_gradient_over_many_rows(run: Runner) -> None:
    run(normal(41, 16, dtype=torch.float32), normal(41, 16, dtype=torch.float32), torch.randn(16))


@pytest.mark.op("rms_norm_backward")
def test_backward_no_rows(run: Runner) -> None:
    dx, dweight = run(torch.randn(0, 8), torch.randn(0, 8), torch.randn(8))
    assert dx.shape == (0, 8)
    assert dweight.tolist() == [0.0] * 8


@FLOATS
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "ones"])
def test_gradients(run: Runner, dtype: torch.dtype, weighted: bool) -> None:
    x = normal(2, 3, 70, dtype=dtype, layout="slice").requires_grad_()
    weight = torch.randn(70).to(dtype).requires_grad_() if weighted else None
    run.gradients(x, weight, 1e-5, grads=[torch.randn(2, 3, 70).to(dtype)])


@pytest.mark.op("add_rms_norm")
@FLOATS
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "ones"])
def test_add_gradients(run: Runner, dtype: torch.dtype, weighted: bool) -> None:
    x, residual = (normal(2, 3, 70, dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(70).to(dtype).requires_grad_() if weighted else None
    run.gradients(x, residual, weight, grads=[torch.randn(2, 3, 70).to(dtype) for _ in range(2)])


@pytest.mark.parametrize("function", [rms_norm.reference, rms_norm.overload], ids=["reference", "registered"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "ones"])
def test_gradcheck(function, weighted: bool) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(function, (x, weight, 1e-2))


@pytest.mark.parametrize("function", [add_rms_norm.reference, add_rms_norm.overload], ids=["reference", "registered"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "ones"])
def test_add_gradcheck(function, weighted: bool) -> None:
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(function, (x, residual, weight, 1e-2))


def test_backward_formula() -> None:
    dy, x, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 6), (4, 6), (6,)))
    x.requires_grad_()
    weight.requires_grad_()
    expected = torch.autograd.grad(rms_norm.reference(x, weight), (x, weight), dy)
    for got, wanted in zip(rms_norm_backward.reference(dy, x.detach(), weight.detach()), expected, strict=True):
        accuracy.assert_close(got, wanted, wanted)


GOOD = torch.zeros(2, 3, 8)
REFUSED = {
    "long rows": (torch.zeros(1, LARGEST_ROW + 1), None, "16385 elements"),
    "fp64": (GOOD.double(), None, "dtype torch.float64"),
    "last stride": (torch.zeros(2, 8, 3).transpose(1, 2), None, "last dimension has stride 3"),
    "weight shape": (GOOD, torch.zeros(1), "weight has shape"),
    "weight stride": (GOOD, torch.zeros(16)[::2], "weight has shape"),
    "weight dtype": (GOOD, torch.zeros(8).double(), "weight has dtype"),
    "four strides": (torch.zeros(7, 7, 7, 7, 8)[::2, ::2, ::2, ::2], None, "three strides"),
}


@pytest.mark.parametrize(("x", "weight", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(x: Tensor, weight: Tensor | None, why: str) -> None:
    assert why in refusal(rms_norm, x, weight)
    assert why in refusal(add_rms_norm, x, x, weight)
    assert why in refusal(rms_norm_backward, x, x, weight)


@pytest.mark.parametrize("other", [GOOD.double(), GOOD[:1], torch.zeros(2, 8, 3).mT], ids=["dtype", "shape", "stride"])
def test_refusals_of_the_second_tensor(other: Tensor) -> None:
    why = {torch.float64: "float64"}.get(other.dtype, "differ" if other.shape != GOOD.shape else "stride 3")
    assert why in refusal(add_rms_norm, GOOD, other, None)
    assert why in refusal(rms_norm_backward, other, GOOD, None)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(rms_norm, GOOD, None)


def test_taken() -> None:
    """The calls that the refusals above differ from in one thing each."""
    assert refusal(rms_norm, GOOD, torch.zeros(8)) == ""
    assert refusal(rms_norm, torch.zeros(1, LARGEST_ROW), None) == ""
    assert refusal(rms_norm, GOOD.clone().requires_grad_(), None) == ""
    assert refusal(add_rms_norm, GOOD, GOOD.bfloat16(), None) == ""
    assert refusal(rms_norm_backward, GOOD.half(), GOOD, None) == ""


def test_fallback_is_the_reference() -> None:
    x = torch.randn(2, 8, dtype=torch.float64)
    with use_backend(None):
        assert torch.equal(rms_norm(x, None), rms_norm.reference(x, None))
