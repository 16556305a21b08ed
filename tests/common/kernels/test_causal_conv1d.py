"""causal_conv1d over a sequence and on a kept window: numbers, windows, masks, strides, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import causal_conv1d as module
from xpu_ports.common.kernels.causal_conv1d import (
    LARGEST_WIDTH,
    LARGEST_WINDOW,
    causal_conv1d,
    causal_conv1d_update,
)

SEQUENCE = pytest.mark.op("causal_conv1d")
UPDATE = pytest.mark.op("causal_conv1d_update")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, T=1, D=1, W=1),
    dict(B=2, T=1, D=7, W=4),
    dict(B=2, T=2, D=130, W=4),
    dict(B=1, T=61, D=5, W=4),
    dict(B=3, T=33, D=127, W=3),
    dict(B=1, T=1, D=5248, W=4),
    dict(B=1, T=20, D=16, W=8),
]
WINDOWS = pytest.mark.parametrize("window", [None, 0, 1, 5], ids=["zeros", "exact", "one-more", "five-more"])


def parameters(D: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(weight, bias)."""
    return torch.randn(D, W).to(dtype), torch.randn(D).to(dtype)


def by_token(
    x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor]:
    """(y, inputs so far), one number at a time, fp64. history: [B, D, S] or None for zeros."""
    (B, T, D), W = x.shape, weight.shape[1]
    seen = torch.zeros(B, D, W - 1, dtype=torch.float64) if history is None else history
    y = torch.empty_like(x)
    for b, t, d in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(D)).reshape(-1, 3).tolist():
        inputs = [*seen[b, d].tolist(), *x[b, : t + 1, d].tolist()][-W:]
        value = sum(w * v for w, v in zip(weight[d].tolist(), inputs, strict=True))
        value += 0.0 if bias is None else float(bias[d])
        y[b, t, d] = value / (1 + math.exp(-value)) if silu else value
    return y, torch.cat([seen, x.transpose(1, 2)], dim=-1)


@SEQUENCE
@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    B, T, D, W = size.values()
    run(normal(B, T, D, dtype=dtype), *parameters(D, W, dtype), normal(B, D, W - 1, dtype=dtype))


@SEQUENCE
@pytest.mark.full
@FLOATS
@pytest.mark.parametrize("size", [dict(B=2, T=t, D=d, W=4) for t in (31, 64, 257) for d in (97, 256, 4352)])
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    B, T, D, W = size.values()
    run(normal(B, T, D, dtype=dtype), *parameters(D, W, dtype), normal(B, D, W, dtype=dtype))


@SEQUENCE
@WINDOWS
@pytest.mark.parametrize("T", [1, 2, 40])
def test_windows(run: Runner, window: int | None, T: int) -> None:
    """A window may hold more than is needed: transformers keeps W inputs, vLLM W - 1. The newest count."""
    weight, bias = parameters(6, 4, torch.float32)
    state = None if window is None else torch.randn(2, 6, 3 + window)
    y = run(torch.randn(2, T, 6), weight, bias, state)
    assert y.shape == (2, T, 6)


@SEQUENCE
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_options(run: Runner, activation: str, biased: bool) -> None:
    weight, bias = parameters(6, 4, torch.float32)
    run(torch.randn(2, 9, 6), weight, bias if biased else None, None, activation)


@SEQUENCE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    x = normal(2, 37, 24, dtype=torch.bfloat16, layout=layout)
    run(x, *parameters(24, 4, torch.bfloat16), normal(2, 24, 4, dtype=torch.float32, layout=layout))


@SEQUENCE
def test_channels_first(run: Runner) -> None:
    run(
        torch.randn(2, 12, 21).transpose(1, 2),
        *parameters(12, 4, torch.float32),
        torch.randn(4, 2, 12).permute(1, 2, 0),
    )


@SEQUENCE
@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)], ids=["no-rows", "no-tokens"])
def test_nothing(run: Runner, shape: tuple) -> None:
    y = run(torch.randn(shape), *parameters(6, 4, torch.float32), torch.randn(shape[0], 6, 3))
    assert y.shape == shape


@SEQUENCE
def test_only_the_past_counts(run: Runner) -> None:
    """A token that is not a number spoils itself and the W - 1 tokens after it, in its channel alone."""
    x = torch.randn(1, 12, 3)
    x[0, 5, 1] = float("nan")
    y = run(x, *parameters(3, 4, torch.float32), None)
    assert y.isnan()[0].nonzero().tolist() == [[t, 1] for t in range(5, 9)]


@WINDOWS
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_formula(window: int | None, activation: str, T: int) -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, T, 3), (3, 4), (3,)))
    state = None if window is None else torch.randn(2, 3, 3 + window, dtype=torch.float64)
    expected, _ = by_token(x, weight, bias, state, activation == "silu")
    accuracy.assert_close(causal_conv1d.reference(x, weight, bias, state, activation), expected, expected)


def test_one_rounding() -> None:
    x, state = torch.randn(4, 30, 40).bfloat16(), torch.randn(4, 40, 4).bfloat16()
    weight, bias = parameters(40, 4, torch.bfloat16)
    assert_rounded_once(causal_conv1d, x, weight, bias, state)
    assert_rounded_once(causal_conv1d_update, state, x, weight, bias, None)


def test_gradcheck() -> None:
    x, weight, bias, state = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (3, 4), (3,), (2, 3, 4))
    )
    with use_backend(None):
        assert torch.autograd.gradcheck(causal_conv1d, (x, weight, bias, state))


# ------------------------------------------------------------------------------------------------------------- update


@UPDATE
@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_update_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    B, T, D, W = size.values()
    T = min(T, 3)
    run(normal(B, D, W, dtype=dtype), normal(B, T, D, dtype=dtype), *parameters(D, W, dtype), None)


@UPDATE
@pytest.mark.parametrize("window", [3, 4, 9], ids=["exact", "one-more", "six-more"])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_update_windows(run: Runner, window: int, T: int) -> None:
    state, x = torch.randn(2, 6, window), torch.randn(2, T, 6)
    _, moved = run(state, x, *parameters(6, 4, torch.float32), None)
    assert torch.equal(moved, torch.cat([state, x.transpose(1, 2)], dim=-1)[:, :, -window:])


@UPDATE
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no-bias"])
def test_update_options(run: Runner, activation: str, biased: bool) -> None:
    weight, bias = parameters(6, 4, torch.float32)
    run(torch.randn(2, 6, 4), torch.randn(2, 1, 6), weight, bias if biased else None, None, activation)


@UPDATE
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_update_mask(run: Runner, dtype: torch.dtype) -> None:
    """A token that does not count leaves the window as it is and gives 0, whatever it holds."""
    state, x = torch.randn(3, 6, 4), torch.randn(3, 2, 6)
    mask = torch.tensor([[1, 1], [0, 1], [0, 0]]).to(dtype)
    x[mask == 0] = float("nan")
    weight, bias = parameters(6, 4, torch.float32)
    y, moved = run(state, x, weight, bias, mask)
    assert (y[mask == 0] == 0).all()
    assert torch.equal(moved[2], state[2])
    assert torch.equal(moved[1], torch.cat([state[1, :, 1:], x[1, 1, :, None]], dim=-1))
    alone, _ = run(state[:1], x[:1], weight, bias, None)
    torch.testing.assert_close(y[:1], alone)


@UPDATE
@pytest.mark.parametrize("layout", ["contiguous", "slice", "gap", "transposed"])
def test_update_layouts(run: Runner, layout: str) -> None:
    """The window may be part of a larger cache, of which nothing else is written."""
    state = normal(2, 24, 4, dtype=torch.bfloat16, layout=layout)
    mask = torch.tensor([[0, 9, 1, 9], [1, 9, 0, 9]])[:, ::2]
    run(state, normal(2, 2, 24, dtype=torch.bfloat16, layout=layout), *parameters(24, 4, torch.bfloat16), mask)


@UPDATE
def test_update_rounds_what_it_keeps(run: Runner) -> None:
    """The newest input is seen as the window keeps it, so that one step and a later look at it agree."""
    state, x = torch.randn(2, 5, 3).bfloat16(), torch.randn(2, 1, 5)
    weight, _ = parameters(5, 4, torch.float32)
    run.rounds_once = False
    y, moved = run(state, x, weight, None, None, "identity")
    assert torch.equal(moved[:, :, -1], x[:, 0].bfloat16())
    window = torch.cat([state, moved[:, :, -1:]], dim=-1)
    expected = (window.double() * weight.double()).sum(-1)[:, None]
    accuracy.assert_close(y, expected.float(), expected)


@UPDATE
@pytest.mark.parametrize("shape", [(0, 1, 6), (2, 0, 6)], ids=["no-rows", "no-tokens"])
def test_update_nothing(run: Runner, shape: tuple) -> None:
    state = torch.randn(shape[0], 6, 4)
    y, moved = run(state, torch.randn(shape), *parameters(6, 4, torch.float32), None)
    assert y.shape == shape
    assert torch.equal(moved, state)


@pytest.mark.parametrize("window", [3, 4, 6])
def test_update_formula(window: int) -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 5, 3), (3, 4), (3,)))
    state = torch.randn(2, 3, window, dtype=torch.float64)
    expected, inputs = by_token(x, weight, bias, state, True)
    moved = state.clone()
    y = torch.cat([causal_conv1d_update.reference(moved, x[:, t : t + 1], weight, bias, None) for t in range(5)], 1)
    accuracy.assert_close(y, expected, expected)
    assert torch.equal(moved, inputs[:, :, -window:])
    accuracy.assert_close(y, causal_conv1d.reference(x, weight, bias, state), expected)


# ----------------------------------------------------------------------------------------------------------- refusals

X, WEIGHT, BIAS, STATE = torch.zeros(2, 5, 6), torch.zeros(6, 4), torch.zeros(6), torch.zeros(2, 6, 4)
REFUSED = {
    "x fp64": (dict(x=X.double()), "x has dtype torch.float64"),
    "state fp64": (dict(state=STATE.double()), "state has dtype torch.float64"),
    "weight fp64": (dict(weight=WEIGHT.double()), "weight has dtype torch.float64"),
    "bias fp64": (dict(bias=BIAS.double()), "bias has dtype torch.float64"),
    "weight rows": (dict(weight=torch.zeros(5, 4)), "weight has shape (5, 4)"),
    "weight strides": (dict(weight=torch.zeros(4, 6).T), "weight has shape"),
    "width": (
        dict(weight=torch.zeros(6, LARGEST_WIDTH + 1), state=torch.zeros(2, 6, LARGEST_WIDTH)),
        "a width of 17, more than 16",
    ),
    "bias shape": (dict(bias=torch.zeros(5)), "bias has shape (5,)"),
    "bias stride": (dict(bias=torch.zeros(12)[::2]), "bias has shape"),
    "short window": (dict(state=torch.zeros(2, 6, 2)), "the window has shape (2, 6, 2)"),
    "long window": (dict(state=torch.zeros(2, 6, LARGEST_WINDOW + 1)), "the window has shape"),
    "rows of the window": (dict(state=torch.zeros(3, 6, 4)), "the window has shape"),
    "gradient": (dict(x=X.clone().requires_grad_()), "no backward"),
}


def _refusals(x: Tensor = X, weight: Tensor = WEIGHT, bias: Tensor | None = BIAS, state: Tensor = STATE) -> list[str]:
    return [
        refusal(causal_conv1d, x, weight, bias, state),
        refusal(causal_conv1d_update, state, x, weight, bias, torch.zeros(2, 5)),
    ]


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert [why in reason for reason in _refusals(**changed)] == [True, True]


def test_refusal_of_the_mask() -> None:
    assert "mask has shape (2,)" in refusal(causal_conv1d_update, STATE, X, WEIGHT, BIAS, torch.zeros(2))


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert ["no module" in reason for reason in _refusals()] == [True, True]


def test_taken() -> None:
    """The calls that the refusals above differ from in one thing each."""
    assert _refusals() == ["", ""]
    assert _refusals(bias=None, x=X.half(), state=STATE.bfloat16()) == ["", ""]
    assert refusal(causal_conv1d, X, WEIGHT, BIAS, None) == ""
    assert refusal(causal_conv1d_update, STATE, X, WEIGHT, BIAS, None) == ""


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_unknown_activation(backend: str) -> None:
    for op, arguments in (
        (causal_conv1d, (X, WEIGHT, BIAS, STATE)),
        (causal_conv1d_update, (STATE, X, WEIGHT, BIAS, None)),
    ):
        run = {i.backend: i.run for i in op.implementations} | {"reference": op.reference}
        with pytest.raises(ValueError, match="'gelu', expected one of silu, identity"):
            run[backend](*arguments, activation="gelu")


@UPDATE
def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    x = torch.randn(2, 1, 6, device=run.target.device, requires_grad=True)
    state, weight = (t.to(run.target.device) for t in (STATE, WEIGHT))
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        causal_conv1d_update(state, x, weight, None, None)
