"""concat_swiglu: numbers, the copy bit for bit, strides, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels import concat_swiglu as module
from xpu_ports.common.kernels.concat_swiglu import concat_swiglu

pytestmark = pytest.mark.op("concat_swiglu")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(M=1, D=1, F=1),
    dict(M=9, D=7, F=127),
    dict(M=3, D=256, F=768),
    dict(M=2, D=1025, F=3),
    dict(M=2, D=5, F=1025),
]


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    M, D, F = size.values()
    x = normal(M, D, dtype=dtype)
    y = run(x, normal(M, 2 * F, dtype=dtype, scale=3.0))
    assert y.is_contiguous()
    assert (y.shape, y.dtype) == ((M, D + F), dtype)
    assert torch.equal(y[:, :D], x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x, gate_up = (normal(2, 5, 96, dtype=torch.bfloat16, layout=name) for name in (layout, "gap"))
    run(x, gate_up)
    run(gate_up, x)


def test_slice_of_the_projection(run: Runner) -> None:
    """As a single block calls it: attention [B, T, D] beside the last columns of the projection."""
    projection = torch.randn(2, 3, 9 * 16)
    run(torch.randn(2, 3, 16), projection[..., 3 * 16 :])


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (6,), (3, 0)], ids=str)
def test_few_rows(run: Runner, shape: tuple) -> None:
    assert run(torch.randn(*shape[:-1], 4), torch.randn(shape)).shape == (*shape[:-1], 4 + shape[-1] // 2)


def test_far_from_zero(run: Runner) -> None:
    """Where the exponential overflows, and where the activation is nearly 0 or nearly its argument."""
    gate = torch.tensor([-1e4, -100.0, -1e-6, 0.0, 1e-6, 100.0, 1e4])
    y = run(torch.zeros(1, 1), torch.cat([gate, torch.ones_like(gate)])[None])
    assert y[0, 1] == 0
    assert y[0, -1] == 1e4


def test_formula() -> None:
    x, g, u = (torch.randn(5, n, dtype=torch.float64) for n in (3, 4, 4))
    expected = torch.cat([x, g / (1 + torch.exp(-g)) * u], dim=-1)
    accuracy.assert_close(concat_swiglu.reference(x, torch.cat([g, u], dim=-1)), expected, expected)


def test_raises(run: Runner) -> None:
    with pytest.raises(ValueError, match="is 7"):
        run(torch.zeros(2, 3), torch.zeros(2, 7))


def test_gradients_through_the_reference() -> None:
    leaves = [torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (3, 8)]
    assert torch.autograd.gradcheck(concat_swiglu, leaves)


GOOD = dict(x=torch.zeros(2, 3, 4), gate_up=torch.zeros(2, 3, 8))
REFUSED = {
    "fp64": ({name: t.double() for name, t in GOOD.items()}, "torch.float64"),
    "dtypes differ": (dict(x=GOOD["x"].half()), "torch.float16 and torch.float32"),
    "rows differ": (dict(x=torch.zeros(2, 1, 4)), "the rows of (2, 1, 4) and (2, 3, 8) differ"),
    "x stride": (dict(x=torch.zeros(2, 3, 4, 2)[..., 0]), "has stride 2"),
    "gate_up stride": (dict(gate_up=torch.zeros(2, 3, 8, 2)[..., 0]), "has stride 2"),
    "four strides": (
        dict(x=torch.zeros(7, 7, 7, 7, 4)[::2, ::2, ::2, ::2], gate_up=torch.zeros(4, 4, 4, 4, 8)),
        "three strides",
    ),
    "gradient": (dict(x=torch.zeros(2, 3, 4, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict[str, Tensor], why: str) -> None:
    assert why in refusal(concat_swiglu, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(concat_swiglu, **GOOD)


def test_taken() -> None:
    assert refusal(concat_swiglu, **GOOD) == ""
