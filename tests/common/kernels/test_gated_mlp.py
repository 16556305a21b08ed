"""gated_activation: numbers, strides, adapters, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels.gated_mlp import ACTIVATIONS, gated_activation

pytestmark = pytest.mark.op("gated_activation")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
EVERY = pytest.mark.parametrize("activation", ACTIVATIONS)


@EVERY
@FLOATS
@pytest.mark.parametrize("size", [dict(M=9, F=1), dict(M=1, F=127), dict(M=2, F=256), dict(M=17, F=1025)])
def test_sizes(run: Runner, size: dict, dtype: torch.dtype, activation: str) -> None:
    M, F = size.values()
    y = run(normal(M, 2 * F, dtype=dtype, scale=3.0), None, activation)
    assert y.shape == (M, F)


@EVERY
@FLOATS
def test_adapter(run: Runner, dtype: torch.dtype, activation: str) -> None:
    run(normal(3, 130, dtype=dtype), normal(3, 130, dtype=dtype), activation)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x, adapter = (normal(2, 5, 96, dtype=torch.bfloat16, layout=name) for name in (layout, "gap"))
    run(x, None, "gelu")
    run(x, adapter, "gelu")
    run(adapter, x, "gelu")


def test_three_strides(run: Runner) -> None:
    run(normal(3, 2, 10, 32, dtype=torch.float32, layout="transposed")[:, :, ::2], None, "silu")


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (3, 0)], ids=str)
def test_few_rows(run: Runner, shape: tuple) -> None:
    assert run(torch.randn(shape), None, "silu").shape == (*shape[:-1], shape[-1] // 2)


def test_adapter_of_another_dtype(run: Runner) -> None:
    assert run(normal(3, 100, dtype=torch.bfloat16), torch.randn(3, 100), "gelu").dtype == torch.bfloat16


@EVERY
@FLOATS
def test_far_from_zero(run: Runner, dtype: torch.dtype, activation: str) -> None:
    """Where an exponential overflows, and where the activation is nearly 0 or nearly its argument."""
    gate = torch.tensor([-1e4, -100.0, -20.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 20.0, 100.0, 1e4], dtype=dtype)
    y = run(torch.cat([gate, torch.ones_like(gate)])[None], None, activation)
    assert y[0, 0] == 0
    assert y[0, -1] == gate[-1]


def test_not_a_number_stays_in_its_row_and_column(run: Runner) -> None:
    x = torch.randn(3, 60)
    x[1, 7] = x[2, 30 + 9] = float("nan")
    assert run(x, None, "gelu").isnan().nonzero().tolist() == [[1, 7], [2, 9]]


def test_formulas() -> None:
    g, u = torch.randn(50, dtype=torch.float64) * 3, torch.randn(50, dtype=torch.float64)
    phi = torch.tensor([0.5 * math.erfc(-v / math.sqrt(2)) for v in g.tolist()], dtype=torch.float64)
    inner = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in g.tolist()]
    expected = {
        "gelu": g * phi * u,
        "gelu_tanh": g * 0.5 * (1 + torch.tensor([math.tanh(v) for v in inner], dtype=torch.float64)) * u,
        "silu": g / (1 + torch.exp(-g)) * u,
    }
    for name in ACTIVATIONS:
        got = gated_activation.reference(torch.cat([g, u]), None, name)
        accuracy.assert_close(got, expected[name], expected[name], name)


@pytest.mark.parametrize(
    ("x", "activation", "why"),
    [(torch.zeros(2, 7), "silu", "is 7"), (torch.zeros(2, 8), "swish", "'swish'")],
    ids=["odd", "unknown"],
)
def test_raises(x: Tensor, activation: str, why: str, run: Runner) -> None:
    with pytest.raises(ValueError, match=why):
        run(x, None, activation)


GOOD = torch.zeros(2, 3, 8)
REFUSED = {
    "fp64": (GOOD.double(), None, "dtype torch.float64"),
    "last stride": (torch.zeros(2, 8, 4).mT, None, "last dimension has stride 4"),
    "adapter dtype": (GOOD, GOOD.double(), "dtype torch.float64"),
    "adapter shape": (GOOD, GOOD[:1], "differ"),
    "four strides": (torch.zeros(7, 7, 7, 7, 8)[::2, ::2, ::2, ::2], None, "three strides"),
    "gradient": (GOOD.clone().requires_grad_(), None, "no backward"),
}


@pytest.mark.parametrize(("x", "adapter", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(x: Tensor, adapter: Tensor | None, why: str) -> None:
    assert why in refusal(gated_activation, x, adapter, "silu")


def test_taken() -> None:
    assert refusal(gated_activation, GOOD, GOOD.bfloat16(), "gelu") == ""


def test_gradients_through_the_reference() -> None:
    x, adapter = (torch.randn(3, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for name in ACTIVATIONS:
        assert torch.autograd.gradcheck(lambda a, b, name=name: gated_activation(a, b, name), (x, adapter))
