"""gated_residual: numbers, gates for all or for each token, strides, the clip, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels import ada_layer_norm as module
from xpu_ports.common.kernels.gated_residual import gated_residual

pytestmark = pytest.mark.op("gated_residual")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [dict(B=1, T=1, D=1), dict(B=2, T=5, D=7), dict(B=3, T=2, D=256), dict(B=1, T=3, D=1025)]
GATES = {"one": (1, 1), "batch": (2, 1), "time": (1, 5), "each": (2, 5)}
LARGEST = 65504.0


def arguments(size: dict, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    B, T, D = size.values()
    x, y = (normal(B, T, D, dtype=dtype) for _ in range(2))
    return dict(x=x, y=y, gate=normal(B, 1, 3 * D, dtype=dtype)[..., 2 * D :])


@FLOATS
@pytest.mark.parametrize("limit", [None, 1.0], ids=["whole", "clipped"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, limit: float | None, dtype: torch.dtype) -> None:
    out = run(**arguments(size, dtype), limit=limit)
    assert out.is_contiguous()
    assert (out.shape, out.dtype) == (tuple(size.values()), dtype)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_gates(run: Runner, gate: tuple) -> None:
    run(torch.randn(2, 5, 12), torch.randn(2, 5, 12), torch.randn(*gate, 12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x, y, gate = (normal(2, 5, 24, dtype=torch.bfloat16, layout=name) for name in (layout, "gap", "slice"))
    run(x, y, gate)
    run(y, gate, x)


def test_dtypes_of_their_own(run: Runner) -> None:
    out = run(normal(2, 3, 16, dtype=torch.bfloat16), torch.randn(2, 3, 16), torch.randn(1, 1, 16).half())
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=str)
def test_no_rows(run: Runner, shape: tuple) -> None:
    assert run(torch.randn(shape), torch.randn(shape), torch.randn(1, 1, 8)).shape == shape


def test_clip(run: Runner) -> None:
    """Sums and products beyond fp16 end at its largest numbers; without a limit they are infinite, NaN stays NaN."""
    x = torch.tensor([60000.0, -60000.0, 1.0, 1.0, float("nan"), 65504.0], dtype=torch.float16)[None, None]
    y = torch.tensor([60000.0, -60000.0, 60000.0, 2.0, 1.0, 0.0], dtype=torch.float16)[None, None]
    gate = torch.tensor([1.0, 1.0, -8.0, 3.0, 1.0, 1.0], dtype=torch.float16)[None, None]
    clipped, whole = (run(x, y, gate, limit=limit)[0, 0].tolist() for limit in (LARGEST, None))
    assert clipped[:4] == [LARGEST, -LARGEST, -LARGEST, 7.0]
    assert whole[:4] == [float("inf"), -float("inf"), -float("inf"), 7.0]
    assert clipped[5] == whole[5] == LARGEST
    assert clipped[4] != clipped[4]
    assert whole[4] != whole[4]


def test_formula() -> None:
    x, y, gate = accuracy.to_double(list(arguments(SIZES[1]).values()))
    expected = (x + gate * y).clamp(-0.5, 0.5)
    accuracy.assert_close(gated_residual.reference(x, y, gate, 0.5), expected, expected)


def test_one_rounding() -> None:
    assert_rounded_once(gated_residual, **arguments(dict(B=4, T=16, D=64), torch.bfloat16))


def test_gradients_through_the_reference() -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 2, 5), (2, 2, 5), (2, 1, 5))]
    assert torch.autograd.gradcheck(gated_residual, leaves)


GOOD = arguments(dict(B=2, T=3, D=8))
REFUSED = {
    **{f"{name} fp64": ({name: GOOD[name].double()}, "dtype torch.float64") for name in GOOD},
    **{f"{name} stride": ({name: torch.zeros(*GOOD[name].shape, 2)[..., 0]}, "has stride 2") for name in GOOD},
    "y shape": (dict(y=torch.zeros(2, 1, 8)), "differ"),
    "width": (dict(gate=torch.zeros(2, 1, 9)), "differ"),
    "batch": (dict(gate=torch.zeros(3, 1, 8)), "does not fit"),
    "time": (dict(gate=torch.zeros(2, 2, 8)), "does not fit"),
    "gradient": (dict(y=torch.zeros(2, 3, 8, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict[str, Tensor], why: str) -> None:
    assert why in refusal(gated_residual, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(gated_residual, **GOOD)


def test_taken() -> None:
    assert refusal(gated_residual, **GOOD, limit=LARGEST) == ""
