"""ada_layer_norm: numbers, conditions for all or for each token, strides, far means, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels import ada_layer_norm as module
from xpu_ports.common.kernels.ada_layer_norm import LARGEST_ROW, ada_layer_norm

pytestmark = pytest.mark.op("ada_layer_norm")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, T=1, D=1),
    dict(B=2, T=5, D=7),
    dict(B=3, T=17, D=64),
    dict(B=1, T=3, D=1000),
    dict(B=2, T=2, D=3072),
]
CONDITIONS = {"one": (1, 1), "batch": (2, 1), "time": (1, 5), "each": (2, 5)}


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict[str, Any]:
    B, T, D = size.values()
    modulation = normal(B, 1, 2 * D, dtype=dtype)
    return dict(x=normal(B, T, D, dtype=dtype, layout=layout), scale=modulation[..., :D], shift=modulation[..., D:])


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    y = run(**arguments(size, dtype))
    assert y.is_contiguous()
    assert (y.shape, y.dtype) == (tuple(size.values()), dtype)


@pytest.mark.parametrize("scale", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("shift", CONDITIONS.values(), ids=CONDITIONS)
def test_conditions(run: Runner, scale: tuple, shift: tuple) -> None:
    """For all tokens, for each row of the batch, for each token, or both; not necessarily the same for both."""
    run(torch.randn(2, 5, 12), torch.randn(*scale, 12), torch.randn(*shift, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x, scale, shift = (normal(2, 5, 24, dtype=torch.bfloat16, layout=name) for name in (layout, "gap", layout))
    run(x, scale, shift)
    run(scale, x, shift)


def test_one_condition_beside_one_for_each(run: Runner) -> None:
    """A single row serves all although its strides are not 0."""
    conditions = torch.randn(2, 5, 24)
    run(torch.randn(2, 5, 12), conditions[:1, 1:2, :12], conditions[1:, 2:3, 12:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_conditions_of_another_dtype(run: Runner, dtype: torch.dtype) -> None:
    y = run(normal(2, 3, 16, dtype=torch.bfloat16), torch.randn(2, 1, 16).to(dtype), torch.randn(2, 1, 16).to(dtype))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=str)
def test_no_rows(run: Runner, shape: tuple) -> None:
    assert run(torch.randn(shape), torch.randn(1, 1, 8), torch.randn(1, 1, 8)).shape == shape


def test_far_from_zero(run: Runner) -> None:
    """The mean is taken off before squares are: a large one, exact here, costs no digits of the variance."""
    x = torch.randint(-3, 4, (1, 4, 256)).float() + 1000.0
    y = run(x, torch.zeros(1, 1, 256), torch.zeros(1, 1, 256))
    assert y.std(-1, correction=0).sub(1.0).abs().max() < accuracy.TOLERANCE[torch.float32]


def test_a_constant_row_is_the_shift(run: Runner) -> None:
    shift = torch.randn(1, 1, 24)
    assert torch.equal(run(torch.full((1, 1, 24), 3.0), torch.randn(1, 1, 24), shift), shift)


def test_not_a_number_stays_in_its_row(run: Runner) -> None:
    x = torch.randn(2, 3, 20)
    x[1, 0, 7] = float("nan")
    y = run(x, torch.zeros(1, 1, 20), torch.zeros(1, 1, 20))
    assert y.isnan().any(-1).nonzero().tolist() == [[1, 0]]
    assert y[1, 0].isnan().all()


def test_formula() -> None:
    x, scale, shift = accuracy.to_double(list(arguments(SIZES[1]).values()))
    expected = torch.nn.functional.layer_norm(x, (7,), eps=1e-3) * (1 + scale) + shift
    accuracy.assert_close(ada_layer_norm.reference(x, scale, shift, 1e-3), expected, expected)


def test_one_rounding() -> None:
    assert_rounded_once(ada_layer_norm, **arguments(dict(B=4, T=16, D=64), torch.bfloat16))


def test_gradients_through_the_reference() -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2, 5), (2, 1, 5), (1, 2, 5))]
    assert torch.autograd.gradcheck(ada_layer_norm, leaves)


GOOD = arguments(dict(B=2, T=3, D=8))
WIDE = LARGEST_ROW + 1
REFUSED = {
    **{f"{name} fp64": ({name: GOOD[name].double()}, "dtype torch.float64") for name in GOOD},
    **{f"{name} stride": ({name: torch.zeros(*GOOD[name].shape, 2)[..., 0]}, "has stride 2") for name in GOOD},
    "dimensions": (dict(x=torch.zeros(3, 8)), "2 dimensions"),
    "scale dimensions": (dict(scale=torch.zeros(2, 8)), "differ"),
    "width": (dict(shift=torch.zeros(2, 1, 9)), "differ"),
    "batch": (dict(scale=torch.zeros(3, 1, 8)), "does not fit"),
    "time": (dict(shift=torch.zeros(2, 2, 8)), "does not fit"),
    "wide": (
        dict(x=torch.zeros(1, 1, WIDE), scale=torch.zeros(1, 1, WIDE), shift=torch.zeros(1, 1, WIDE)),
        "more than",
    ),
    "gradient": (dict(scale=torch.zeros(2, 1, 8, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict[str, Tensor], why: str) -> None:
    assert why in refusal(ada_layer_norm, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(ada_layer_norm, **GOOD)


def test_taken() -> None:
    assert refusal(ada_layer_norm, **GOOD) == ""
