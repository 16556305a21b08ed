"""kda_gate: both forms, tiny and large arguments, strides, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.kernels.kda import gate as module
from xpu_ports.common.kernels.kda import kda_gate
from xpu_ports.common.kernels.kda.parts import LARGEST_HEAD

pytestmark = pytest.mark.op("kda_gate")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0])
SIZES = [
    dict(B=1, T=1, H=1, K=1),
    dict(B=2, T=3, H=2, K=5),
    dict(B=1, T=70, H=3, K=16),
    dict(B=1, T=9, H=2, K=128),
]


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict:
    B, T, H, K = size.values()
    return dict(
        f=normal(B, T, H, K, dtype=dtype, layout=layout),
        A_log=torch.log(1 + 15 * torch.rand(H)),
        dt_bias=torch.rand(H * K) * 5 - 7,
        lower_bound=None,
    )


@FLOATS
@BOUNDS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, lower_bound: float | None, dtype: torch.dtype) -> None:
    given = arguments(size, dtype) | dict(lower_bound=lower_bound)
    if lower_bound is not None:
        # The exponent is the product of all three; where it is -100, a last bit of it is a millionth of the result.
        given["dt_bias"] *= 0.1
    g = run(**given)
    assert g.dtype == torch.float32
    assert g.is_contiguous()
    assert (g <= 0).all()


@BOUNDS
def test_without_bias(run: Runner, lower_bound: float | None) -> None:
    run(**arguments(SIZES[1]) | dict(dt_bias=None, lower_bound=lower_bound))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(**arguments(SIZES[2], torch.bfloat16, layout))


@pytest.mark.parametrize("f", [-30.0, -25.0, -10.0, 0.0, 19.0, 21.0, 90.0])
@BOUNDS
def test_size_of_the_argument(run: Runner, f: float, lower_bound: float | None) -> None:
    """Tiny log-decays keep their relative accuracy, since a thousand tokens add them up; large ones do not overflow."""
    given = arguments(SIZES[1]) | dict(dt_bias=None, lower_bound=lower_bound, A_log=torch.tensor([0.0, 0.5]))
    g = run(**given | dict(f=torch.full_like(given["f"], f)))
    assert g.isfinite().all()
    if lower_bound is None:
        assert (g != 0).any()
    else:
        assert (g >= lower_bound).all()


def test_nothing(run: Runner) -> None:
    assert run(**arguments(dict(B=2, T=0, H=2, K=5))).shape == (2, 0, 2, 5)


@BOUNDS
def test_formula(lower_bound: float | None) -> None:
    """One number at a time; a bounded log-decay is a sigmoid's, not one cut off."""
    given = accuracy.to_double(list(arguments(dict(B=1, T=2, H=2, K=3)).values())[:-1])
    f, A_log, dt_bias = given
    expected = torch.empty_like(f)
    for t in range(2):
        for h in range(2):
            for d in range(3):
                x, rate = float(f[0, t, h, d] + dt_bias[3 * h + d]), math.exp(float(A_log[h]))
                if lower_bound is None:
                    expected[0, t, h, d] = -rate * math.log1p(math.exp(x))
                else:
                    expected[0, t, h, d] = lower_bound / (1 + math.exp(-rate * x))
    accuracy.assert_close(kda_gate.reference(*given, lower_bound), expected, expected)


@pytest.mark.parametrize("lower_bound", [0.0, 5.0, float("nan")])
def test_bound_that_bounds_nothing(lower_bound: float) -> None:
    with pytest.raises(ValueError, match="expected a negative number"):
        kda_gate(**arguments(SIZES[1]) | dict(lower_bound=lower_bound))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=3, H=2, K=4))
REFUSED = {
    "f fp64": (dict(f=GOOD["f"].double()), "f has dtype torch.float64"),
    "f stride": (dict(f=GOOD["f"].mT.contiguous().mT), "the last dimension of f has stride"),
    "A_log fp64": (dict(A_log=GOOD["A_log"].double()), "A_log has shape (2,) and dtype torch.float64"),
    "A_log shape": (dict(A_log=torch.zeros(1, 1, 2, 1)), "A_log has shape (1, 1, 2, 1)"),
    "A_log stride": (dict(A_log=torch.zeros(4)[::2]), "A_log has shape (2,)"),
    "dt_bias shape": (dict(dt_bias=torch.zeros(2, 4)), "dt_bias has shape (2, 4)"),
    "positive bound": (dict(lower_bound=5.0), "lower_bound is 5.0"),
    "wide heads": (dict(f=torch.zeros(1, 1, 1, LARGEST_HEAD + 1)), "heads of 257 channels, more than 256"),
    "gradient": (dict(f=GOOD["f"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(kda_gate, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(kda_gate, **GOOD)


def test_taken() -> None:
    assert refusal(kda_gate, **GOOD) == ""
    assert refusal(kda_gate, **GOOD | dict(dt_bias=None, lower_bound=-5.0)) == ""
    assert refusal(kda_gate, **arguments(dict(B=1, T=2, H=32, K=128), torch.bfloat16)) == ""
