"""What checks every op is itself seen catching each fault once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Placed, Runner, Target, assert_rounded_once, normal, targets, unwritten_is_nan
from xpu_ports.common import dispatch
from xpu_ports.common.dispatch import OPS, Op

_serial = itertools.count()


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    before = dict(OPS)
    yield
    OPS.clear()
    OPS.update(before)


def faulty(implementation: Callable[[Tensor, Tensor], Tensor]) -> Op:
    """The op state += x; 2 state, run by an implementation that may do something else."""

    def reference(state: Tensor, x: Tensor) -> Tensor:
        """Accumulate."""
        state.copy_(state + x)
        return 2 * state

    reference.__name__ = f"accumulate_{next(_serial)}"
    op = dispatch.op(mutates=("state",))(reference)
    op.implement("fast", "cpu", refuses=lambda state, x: None)(lambda state, x: implementation(state, x))
    return op


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, ...]]:
    def run(implementation: Callable[[Tensor, Tensor], Tensor], layout: str = "gap") -> tuple[Tensor, ...]:
        state, x = (normal(3, 4, 8, dtype=torch.float32, layout=layout) for _ in range(2))
        return Runner(faulty(implementation), Target("fast", "cpu"), monkeypatch)(state, x)

    return run


def right(state: Tensor, x: Tensor) -> Tensor:
    state += x
    y = torch.empty(state.shape)
    y.copy_(2 * state)
    return y


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_right(check: Callable, layout: str) -> None:
    y, state = check(right, layout)
    assert torch.equal(y, 2 * state)


def wrong_value(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    y[1, 2, 3] += 1e-3
    return y


def unwritten(state: Tensor, x: Tensor) -> Tensor:
    right(state, x)
    y = torch.empty(state.shape)
    y[:, :, :-1] = 2 * state[:, :, :-1]
    return y


def wrong_state(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    state[0, 0, 0] += 1
    return y


def state_left(state: Tensor, x: Tensor) -> Tensor:
    return 2 * (state + x)


def input_written(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    x[2, 1, 0] = 0
    return y


def beside_an_input(state: Tensor, x: Tensor) -> Tensor:
    """Between the rows of the view."""
    y = right(state, x)
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(3)
    return y


def beside_the_state(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    state.as_strided((1,), (1,), state.storage_offset() + 8).fill_(3)
    return y


def around_an_input(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    x.as_strided((1,), (1,), x.untyped_storage().nbytes() // 4 - 1).fill_(3)
    return y


def around_the_output(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(3)
    return y


def read_around(state: Tensor, x: Tensor) -> Tensor:
    """As a kernel with a wrong mask does."""
    y = right(state, x)
    y[0, 0, 0] += 0 * x.as_strided((1,), (1,), 0)[0]
    return y


def input_returned(state: Tensor, x: Tensor) -> Tensor:
    y = right(state, x)
    x.copy_(y)
    return x


def state_returned(state: Tensor, x: Tensor) -> Tensor:
    right(state, x)
    return state


def other_dtype(state: Tensor, x: Tensor) -> Tensor:
    return right(state, x).double()


def other_shape(state: Tensor, x: Tensor) -> Tensor:
    return right(state, x)[0]


FAULTS = {
    wrong_value: "output 0: error",
    unwritten: "NaN or infinite",
    wrong_state: "state: error",
    state_left: "state: error",
    input_written: "an input was modified: . bytes from byte",
    beside_an_input: "an input was modified",
    beside_the_state: "an input was modified",
    around_an_input: "memory around an input was written: . bytes",
    around_the_output: "memory around an allocation was written",
    read_around: "NaN or infinite",
    input_returned: "output 0 shares memory with an argument",
    state_returned: "output 0 shares memory with an argument",
    other_dtype: r"dtype torch\.float64",
    other_shape: "shape",
}


@pytest.mark.parametrize(("fault", "why"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_faults(check: Callable, fault: Callable, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check(fault)


def test_another_op_on_another_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A back end that is forced for an op is forced for the ops that it calls."""

    def other(state: Tensor, x: Tensor) -> Tensor:
        with dispatch.use_backend("reference"):
            inner(x.clone(), x)
        return right(state, x)

    inner = faulty(right)
    state, x = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(AssertionError, match="not all on the forced back end"):
        Runner(faulty(other), Target("fast", "cpu"), monkeypatch)(state, x)


def test_the_reference_has_to_be_the_oracle_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds_too_much(x: Tensor) -> Tensor:
        """Rounds in between, unless fed fp64."""
        return x * 1 if x.dtype == torch.float64 else x.bfloat16().to(x.dtype)

    op = dispatch.op(rounds_too_much)
    runner = Runner(op, Target("reference", "cpu"), monkeypatch)
    with pytest.raises(AssertionError, match="output 0: error"):
        runner(torch.randn(4, 5))
    runner.rounds_once = False
    runner(torch.randn(4, 5))


def test_rounded_twice() -> None:
    def rounds_twice(x: Tensor) -> Tensor:
        """Rounds in between, unless fed fp64."""
        return (x / 3).to(x.dtype) / 7

    op = dispatch.op(rounds_twice)
    with pytest.raises(AssertionError, match="of the elements differ"):
        assert_rounded_once(op, torch.randn(40, 50).bfloat16())


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients(monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    def square(x: Tensor, y: Tensor) -> Tensor:
        """x^2 y."""
        return x * x * y

    square.__name__ = f"square_{next(_serial)}"
    op = dispatch.op(square)

    @op.implement("fast", "cpu", refuses=lambda x, y: None)
    def fast(x: Tensor, y: Tensor) -> Tensor:
        return x.detach() * x.detach() * y.detach()

    @op.differentiate(setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    def backward(ctx, dz: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return 2 * x * y * dz, x * (1 if wrong else x) * dz

    x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    runner = Runner(op, Target("fast", "cpu"), monkeypatch)
    if not wrong:
        runner.gradients(x, y, grads=[torch.randn(3, 4)])
        return
    with pytest.raises(AssertionError, match="gradient of y: error"):
        runner.gradients(x, y, grads=[torch.randn(3, 4)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placed_tensors_are_laid_out_as_given(layout: str) -> None:
    x = normal(3, 4, 5, dtype=torch.bfloat16, layout=layout)
    both = Placed({"x": x, "again": x[1:], "eps": 1e-5}, "cpu")
    moved, again = both.values["x"], both.values["again"]
    assert torch.equal(moved, x)
    assert moved.stride() == x.stride()
    assert again.untyped_storage().data_ptr() == moved.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert both.values["eps"] == 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_normal(layout: str) -> None:
    x = normal(3, 4, 5, dtype=torch.float16, layout=layout, scale=100.0)
    assert (x.shape, x.dtype) == ((3, 4, 5), torch.float16)
    assert x.is_contiguous() == (layout == "contiguous")
    assert x.isfinite().all()
    assert 10 < x.float().std() < 1000


def test_unwritten_memory_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    x, before = torch.zeros(2, 3), torch.empty
    with unwritten_is_nan(monkeypatch):
        for t in (torch.empty(2, 3), torch.empty_like(x), x.new_empty(4), torch.empty(3, dtype=torch.bfloat16)):
            assert t.isnan().all()
            assert t.is_contiguous()
        assert torch.empty_strided((2, 3), (1, 2)).stride() == (1, 2)
        assert (torch.empty(3, dtype=torch.int32) == -1).all()
        assert torch.empty(0, 3).shape == (0, 3)
    assert torch.empty is before


def test_targets() -> None:
    op = faulty(right)
    op.implement("triton", "xpu", "cuda", refuses=lambda state, x: None)(lambda state, x: x)
    op.implement("vendor", "xpu", refuses=lambda state, x: None)(lambda state, x: x)
    assert targets(op, "interpreter", None) == {
        "reference": Target("reference", "cpu"),
        "interpreter": Target("triton", "cpu"),
        "cpu-fast": Target("fast", "cpu"),
    }
    assert set(targets(op, None, "xpu")) == {"reference", "cpu-fast", "xpu-reference", "xpu", "xpu-vendor"}
    assert set(targets(op, None, "cuda")) == {"reference", "cpu-fast", "cuda-reference", "cuda"}
