"""gated_residual_norm: numbers, equality with the two ops in sequence, conditions, strides, the clip, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels.ada_layer_norm import LARGEST_ROW, ada_layer_norm
from xpu_ports.common.kernels.gated_residual import gated_residual
from xpu_ports.common.kernels.gated_residual_norm import gated_residual_norm

pytestmark = pytest.mark.op("gated_residual_norm")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [dict(B=1, T=1, D=1), dict(B=2, T=5, D=7), dict(B=3, T=17, D=64), dict(B=1, T=3, D=1025)]
CONDITIONS = {"one": (1, 1), "batch": (2, 1), "time": (1, 5), "each": (2, 5)}
LARGEST = 65504.0


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict[str, Any]:
    B, T, D = size.values()
    x, y = (normal(B, T, D, dtype=dtype, layout=layout) for _ in range(2))
    gate, scale, shift = normal(B, 1, 3 * D, dtype=dtype).chunk(3, dim=-1)
    return dict(x=x, y=y, gate=gate, scale=scale, shift=shift)


@FLOATS
@pytest.mark.parametrize("limit", [None, 1.0], ids=["whole", "clipped"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, limit: float | None, dtype: torch.dtype) -> None:
    for out in run(**arguments(size, dtype), limit=limit):
        assert out.is_contiguous()
        assert (out.shape, out.dtype) == (tuple(size.values()), dtype)


@pytest.mark.parametrize("one", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["gate", "scale", "shift"])
def test_conditions(run: Runner, one: tuple, place: int) -> None:
    conditions = [torch.randn(2, 1, 12) for _ in range(3)]
    conditions[place] = torch.randn(*one, 12)
    run(torch.randn(2, 5, 12), torch.randn(2, 5, 12), *conditions)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x, y, gate = (normal(2, 5, 24, dtype=torch.bfloat16, layout=name) for name in (layout, "gap", "slice"))
    run(x, y, gate, y, gate)
    run(y, gate, x, gate, x)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=str)
def test_no_rows(run: Runner, shape: tuple) -> None:
    condition = torch.randn(1, 1, 8)
    assert all(t.shape == shape for t in run(torch.randn(shape), torch.randn(shape), condition, condition, condition))


@FLOATS
@pytest.mark.parametrize("limit", [None, 1.0], ids=["whole", "clipped"])
def test_equals_the_two_ops(run: Runner, limit: float | None, dtype: torch.dtype) -> None:
    target = run.target
    given = {name: t.to(target.device) for name, t in arguments(dict(B=2, T=5, D=300), dtype).items()}
    with use_backend(target.backend):
        total, norm = gated_residual_norm(**given, limit=limit)
        expected = gated_residual(given["x"], given["y"], given["gate"], limit)
        assert torch.equal(total, expected)
        assert torch.equal(norm, ada_layer_norm(expected, given["scale"], given["shift"]))


def test_a_constant_sum_is_the_shift(run: Runner) -> None:
    x, shift = torch.full((1, 1, 24), 3.0), torch.randn(1, 1, 24)
    assert torch.equal(run(x, x, torch.ones(1, 1, 24), torch.randn(1, 1, 24), shift)[1], shift)


def test_formula() -> None:
    x, y, gate, scale, shift = accuracy.to_double(list(arguments(SIZES[1]).values()))
    total = (x + gate * y).clamp(-0.5, 0.5)
    norm = torch.nn.functional.layer_norm(total, (7,), eps=1e-3) * (1 + scale) + shift
    for found, expected in zip(
        gated_residual_norm.reference(x, y, gate, scale, shift, 1e-3, 0.5), (total, norm), strict=True
    ):
        accuracy.assert_close(found, expected, expected)


def test_gradients_through_the_reference() -> None:
    shapes = (2, 2, 5), (2, 2, 5), (2, 1, 5), (1, 2, 5), (1, 1, 5)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(gated_residual_norm, leaves)


GOOD = arguments(dict(B=2, T=3, D=8))
WIDE = LARGEST_ROW + 1
REFUSED = {
    **{f"{name} fp64": ({name: GOOD[name].double()}, "dtype torch.float64") for name in GOOD},
    **{f"{name} stride": ({name: torch.zeros(*GOOD[name].shape, 2)[..., 0]}, "has stride 2") for name in GOOD},
    "y shape": (dict(y=torch.zeros(2, 1, 8)), "differ"),
    "width": (dict(shift=torch.zeros(2, 1, 9)), "differ"),
    "batch": (dict(gate=torch.zeros(3, 1, 8)), "does not fit"),
    "time": (dict(scale=torch.zeros(2, 2, 8)), "does not fit"),
    "wide": ({name: torch.zeros(1, 1, WIDE) for name in GOOD}, "more than"),
    "gradient": (dict(y=torch.zeros(2, 3, 8, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict[str, Tensor], why: str) -> None:
    assert why in refusal(gated_residual_norm, **GOOD | changed)


def test_taken() -> None:
    assert refusal(gated_residual_norm, **GOOD, limit=LARGEST) == ""
