"""The error budget lets through what it should and catches planted errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xpu_ports.common import accuracy
from xpu_ports.common.accuracy import TOLERANCE, assert_close, measure, oracle, to_double

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))


def triple(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(out, reference, oracle) of an exact computation rounded once."""
    exact = torch.randn(64, 48, dtype=torch.float64)
    return exact.to(dtype, copy=True), exact.to(dtype, copy=True), exact


@DTYPES
def test_the_oracle_rounded_passes(dtype: torch.dtype) -> None:
    out, reference, exact = triple(dtype)
    error = assert_close(out, reference, exact)
    assert error.largest == (out.double() - exact).abs().max().item()
    assert error.allowed >= TOLERANCE[dtype] * exact.abs().max().item()


@DTYPES
@pytest.mark.parametrize("off", [0.0, 0.125])
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_budget_is_as_stated(dtype: torch.dtype, off: float, factor: float) -> None:
    """An error just below the budget passes, one just above does not; of one element among a thousand."""
    exact = torch.zeros(1000, dtype=torch.float64)
    exact[7], exact[500] = 1.0, 0.5
    reference = exact.to(dtype, copy=True)
    reference[7] += off
    budget = 2 * off + TOLERANCE[dtype]
    out = exact.to(dtype, copy=True)
    # Where the oracle is 0, any error can be held.
    out[3] = budget * factor
    assert measure(out, reference, exact).within == (factor < 1)


@DTYPES
def test_rounded_operands_have_the_share_twice(dtype: torch.dtype) -> None:
    out, reference, exact = triple(dtype)
    once, twice = (measure(out, reference, exact, rounds_operands=rounds).allowed for rounds in (False, True))
    assert twice - once == pytest.approx(TOLERANCE[dtype] * exact.abs().max().item())


@DTYPES
def test_one_wrong_element(dtype: torch.dtype) -> None:
    out, reference, exact = triple(dtype)
    out[5, 6] += 8 * TOLERANCE[dtype] * exact.abs().max() + torch.finfo(dtype).eps * 8
    with pytest.raises(AssertionError, match=f"norm: error .* at flat index {5 * 48 + 6}, allowed .*{dtype}"):
        assert_close(out, reference, exact, "norm")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_where_the_oracle_is(value: float) -> None:
    out, reference, exact = triple(torch.float32)
    out[1, 2] = value
    with pytest.raises(AssertionError, match=r"1 of 3072 values .* first at flat index 50"):
        measure(out, reference, exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_same_places_pass(value: float) -> None:
    out, reference, exact = (t.clone() for t in triple(torch.float32))
    for t in (out, reference, exact):
        t[1, 2] = value
    assert assert_close(out, reference, exact).within


def test_nan_moved() -> None:
    out, reference, exact = (t.clone() for t in triple(torch.float32))
    out[1, 3] = reference[1, 2] = exact[1, 2] = float("nan")
    with pytest.raises(AssertionError, match="2 of 3072 values"):
        measure(out, reference, exact)


@pytest.mark.parametrize(
    ("got", "expected"), [("inf", "nan"), ("nan", "inf"), ("-inf", "inf"), ("inf", "-inf"), ("1", "inf"), ("1", "nan")]
)
def test_another_value_that_is_not_finite(got: str, expected: str) -> None:
    out, reference, exact = (t.clone() for t in triple(torch.float32))
    out[1, 2], reference[1, 2], exact[1, 2] = float(got), float(expected), float(expected)
    with pytest.raises(AssertionError, match="first at flat index 50"):
        measure(out, reference, exact)


def test_overflow_of_the_dtype_is_infinite() -> None:
    """70000 is beyond fp16: infinite in the reference, finite in the oracle, and infinite is right."""
    exact = torch.tensor([1.0, 7e4, -7e4], dtype=torch.float64)
    assert assert_close(exact.half(), exact.half(), exact).within
    with pytest.raises(AssertionError, match="2 of 3 values"):
        measure(torch.tensor([1.0, 65504.0, -65504.0]).half(), exact.half(), exact)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_reference_that_is_not_a_number_excuses_nothing(value: float) -> None:
    out, reference, exact = (t.clone() for t in triple(torch.float32))
    out[1, 2], reference[1, 2] = value, float("nan")
    with pytest.raises(AssertionError, match=r"flat index 50|allowed nan"):
        assert_close(out, reference, exact)


def test_shape_and_dtype() -> None:
    out, reference, exact = triple(torch.float32)
    with pytest.raises(AssertionError, match=r"shape \(48, 64\), expected \(64, 48\)"):
        measure(out.T, reference, exact)
    with pytest.raises(AssertionError, match=r"dtype torch\.float64, expected torch\.float32"):
        measure(out.double(), reference, exact)


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0, 3)
    assert assert_close(empty, empty, empty.double()).largest == 0.0
    with pytest.raises(AssertionError, match="shape"):
        measure(empty, empty, torch.zeros(0, 4).double())


def test_relative_error() -> None:
    exact = torch.full((4,), 2.0, dtype=torch.float64)
    out = exact.clone()
    out[0] = 2.5
    assert measure(out, exact, exact).relative == pytest.approx(0.125)
    assert measure(exact * 0, exact * 0, exact * 0).relative == 0.0


def test_every_dtype_is_looser_than_the_one_before() -> None:
    shares = [TOLERANCE[d] for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    assert shares == sorted(shares)
    for dtype, share in TOLERANCE.items():
        assert torch.finfo(dtype).eps / 2 <= share <= 512 * torch.finfo(dtype).eps, dtype


def test_to_double() -> None:
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    i = torch.ones(2, dtype=torch.int32)
    got = to_double([x, (i, None), "silu", 3])
    assert got[0].dtype == torch.float64
    assert not got[0].requires_grad
    assert type(got[1]) is tuple
    assert got[1][0].dtype == torch.int32
    assert got[1][1:] + tuple(got[2:]) == (None, "silu", 3)


def test_oracle_runs_in_double_on_copies() -> None:
    def reference(state: Tensor, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        assert state.dtype == x.dtype == torch.float64
        assert mask.dtype == torch.bool
        state += x
        mask[0] = False
        return state * scale

    for dtype in (torch.float32, torch.float64):
        state, x, mask = torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.bool)
        assert oracle(reference, state, x, mask, scale=2.0).tolist() == [2.0, 2.0]
        assert oracle(reference, state=state, x=x, mask=mask).tolist() == [1.0, 1.0]
        assert (state.tolist(), mask.tolist()) == ([0.0, 0.0], [True, True])


def test_assert_close_returns_the_error() -> None:
    out, reference, exact = triple(torch.bfloat16)
    assert isinstance(assert_close(out, reference, exact), accuracy.Error)


def test_integers_have_no_tolerance() -> None:
    indices = torch.tensor([[7, 300]])
    assert measure(indices, indices, indices).allowed == 0
    assert measure(indices, indices, indices).within
    assert not measure(indices + torch.tensor([[0, 1]]), indices, indices).within
