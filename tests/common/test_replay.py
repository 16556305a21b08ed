"""Calls made again: as the wrapper would have made them, only where that is certain, and for less on the host."""

from __future__ import annotations

import gc
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import each_tensor
from tests.common.test_dispatch import CALLS, LARGEST_OVERHEAD, _forget, throwaway  # noqa: F401
from xpu_ports.common import dispatch, replay, tritonlib, tuning
from xpu_ports.common.device import use_architecture
from xpu_ports.common.dispatch import OPS, Op, explain, use_backend

# Where kernels run: in Triton's interpreter, else on the accelerator that is here.
DEVICE = torch.device("cpu" if tritonlib.INTERPRETED else torch.accelerator.current_accelerator() or "meta")
runs_kernels = pytest.mark.skipif(DEVICE.type == "meta", reason="neither Triton's interpreter nor an accelerator")
# Calls whose wrapper does more than allocate and launch, and what.
NOT_KEPT = {
    "rms_norm_backward": "a sum of torch's",
    "inverse_rope_grouped_out": "a product of torch's",
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replay, "DEVICES", {"cpu", DEVICE.type})
    monkeypatch.setattr(dispatch, "ALIKE", 1)
    dispatch.forget_plans()
    yield
    dispatch.forget_plans()


def kept(op: Op) -> int:
    return sum(isinstance(plan, replay.Plan) for plan in op._plans.values())


def listed(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs or ())


def kernel_calls() -> Iterator[Any]:
    for call in CALLS:
        if "triton" in {i.backend for i in OPS[call.split()[0]].implementations}:
            yield pytest.param(call, marks=pytest.mark.full if call.startswith("chunk_kda from") else ())


@runs_kernels
@pytest.mark.parametrize("call", list(kernel_calls()))
def test_calls_made_again(call: str) -> None:
    """Bit for bit what the wrapper gives, in outputs and in what is written, with other numbers than before."""
    op = OPS[call.split()[0]]

    def draw() -> list[Any]:
        return [each_tensor(a, lambda t: t.to(DEVICE)) for a in CALLS[call]()]

    with torch.no_grad(), use_backend("triton"):
        op(*draw())
        op(*draw())
        given = draw()
        copies = [each_tensor(a, torch.clone) for a in given]
        with replay.off():
            expected = listed(op(*copies))
        for a, b in zip(listed(op(*given)), expected, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)
    for a, b in zip(given, copies, strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num())
    assert (kept(op) == 0) == (call in NOT_KEPT)


# ------------------------------------------------------------------------------------------------- a kernel of our own


class Scale:
    """Stands where `triton.jit` leaves a function: y = x * factor, plus weight where there is one."""

    __name__ = "scale"

    def fn(self, x_ptr, weight_ptr, y_ptr, factor, WEIGHT) -> None:
        raise AssertionError("never run")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: Tensor, weight: Tensor, y: Tensor, factor: float, WEIGHT: bool) -> None:
            y.copy_(x * factor + weight if WEIGHT else x * factor)

        return launch


class Scaled:
    """An op on that kernel, and how often its wrapper ran."""

    def __init__(self) -> None:
        def reference(x: Tensor, weight: Tensor | None = None, factor: float = 2.0) -> Tensor:
            """x * factor + weight."""
            return x * factor if weight is None else x * factor + weight

        self.op = throwaway(reference)
        self.ran = 0
        self.kernel = tritonlib.Kernel(Scale())
        self.also: Callable[[Tensor, Tensor], Any] = lambda x, y: None

        @self.op.implement("triton", "cpu", refuses=lambda x, weight=None, factor=2.0: "large" if len(x) > 99 else None)
        def scale(x: Tensor, weight: Tensor | None = None, factor: float = 2.0) -> Tensor:
            self.ran += 1
            y = torch.empty(x.shape, dtype=x.dtype)
            self.launch(x, weight, y, factor)
            other = self.also(x, y)
            return y if other is None else other

    def launch(self, x: Tensor, weight: Tensor | None, y: Tensor, factor: float) -> None:
        self.kernel[(1,)](x, x if weight is None else weight, y, factor, WEIGHT=weight is not None)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():
            got = self.op(*args, **kwargs)
        assert torch.equal(got, self.op.reference(*args, **kwargs))
        return got


@pytest.fixture
def scaled() -> Scaled:
    return Scaled()


X = torch.randn(4, 8)


def test_from_the_third_call_on_the_wrapper_does_not_run(scaled: Scaled) -> None:
    for _ in range(5):
        scaled(torch.randn(4, 8), torch.randn(8))
    assert scaled.ran == 2
    (line,) = explain(show=False)
    assert (line.backend, line.reason, line.calls) == ("triton", "first that does not refuse", 5)


OTHERS: dict[str, tuple] = {
    "shape": (torch.randn(4, 9),),
    "rows": (torch.randn(5, 8),),
    "strides": (torch.randn(8, 4).T,),
    "dtype": (X.double(),),
    "alignment": (torch.randn(40)[1:33].view(4, 8),),
    "another argument": (X, torch.randn(8)),
    "number": (X, None, 3.0),
    "type of a number": (X, None, 2),
    "truth for a number": (X, None, True),
    "sign of zero": (X, None, -0.0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_another_call(scaled: Scaled, other: str) -> None:
    usual = (
        (X, None, 1) if other == "truth for a number" else (X, None, 0.0) if other == "sign of zero" else (X, None, 2.0)
    )
    for _ in range(3):
        scaled(*usual)
    assert scaled.ran == 2
    scaled(*OTHERS[other])
    assert scaled.ran == 3
    for _ in range(3):
        scaled(*usual)
        scaled(*OTHERS[other])
    assert (scaled.ran, kept(scaled.op)) == (4, 2)


def test_a_call_is_kept_only_after_some_alike_ones(scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ALIKE", 3)
    for _ in range(6):
        scaled(X)
    assert scaled.ran == 4


def test_keywords(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X, factor=3.0)
        scaled(x=X, factor=3.0)
    assert scaled.ran == 4


def test_outputs_are_new_each_time(scaled: Scaled) -> None:
    outputs = [scaled(torch.randn(4, 8)) for _ in range(5)]
    assert len({t.data_ptr() for t in outputs}) == 5


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_outputs_are_of_the_mode_that_they_are_made_in(scaled: Scaled, mode: Any) -> None:
    for _ in range(3):
        with torch.no_grad():
            scaled.op(X)
    with mode():
        assert scaled.op(X).is_inference() == (mode is torch.inference_mode)
    assert scaled.ran == 2


def test_a_gradient_goes_by_the_reference(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X)
    x = X.clone().requires_grad_()
    scaled.op(x).sum().backward()
    assert x.grad is not None
    assert explain(show=False)[-1].backend == "reference"


# ---------------------------------------------------------------------------------------------------- what calls go by


def test_a_forced_choice_goes_before_what_was_kept(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X)
    with use_backend("reference"):
        scaled(X)
    assert explain(show=False)[-1].backend == "reference"
    with use_backend("triton"):
        scaled(X)
    assert scaled.ran == 3


def test_a_refusal_is_no_plan(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(torch.randn(100, 2))
    assert (scaled.ran, kept(scaled.op)) == (0, 0)


def test_another_implementation_is_asked_anew(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X)
    scaled.op.implement("other", "cpu", refuses=lambda x, weight=None, factor=2.0: None)(scaled.op.reference)
    assert kept(scaled.op) == 0


def test_tiles_are_asked_for_anew(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X)
    next(iter(tuning.TUNABLES.values())).forget()
    scaled(X)
    assert scaled.ran == 3


@pytest.mark.parametrize("context", [lambda: use_architecture("max"), replay.off], ids=["architecture", "off"])
def test_where_nothing_is_made_again(scaled: Scaled, context: Any) -> None:
    for _ in range(3):
        scaled(X)
    with context():
        for _ in range(3):
            scaled(X)
    scaled(X)
    assert scaled.ran == 5


def test_a_plan_made_while_plans_are_forgotten(scaled: Scaled) -> None:
    """By another thread, say: what it was made by counts no more."""
    scaled.also = lambda x, y: scaled.op.forget() if scaled.ran == 2 else None
    for _ in range(2):
        scaled(X)
    assert kept(scaled.op) == 0
    scaled(X)
    assert scaled.ran == 3


def test_launches_are_left_out_of_calls_made_again_too(scaled: Scaled) -> None:
    for _ in range(3):
        scaled(X)
    with tritonlib.without_launches(), torch.no_grad():
        scaled.op(X)
    assert scaled.ran == 3


def test_a_profiler_sees_launches(scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonlib, "_CPU", tritonlib._CPU._replace(hooked=lambda: True))
    for _ in range(4):
        scaled(X)
    assert scaled.ran == 4


def test_plans_are_not_kept_without_end(scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_PLANS", 5)
    for n in range(1, 40):
        scaled(torch.randn(n))
        assert len(scaled.op._plans) <= 5


# ---------------------------------------------------------------------------------------------------- what is not kept


@pytest.mark.parametrize(
    "also",
    [
        lambda x, y: y.mul_(1),
        lambda x, y: y + 0,
        lambda x, y: y if y[0, 0].item() else None,
        lambda x, y: x,
    ],
    ids=["in place", "another output", "a look at the data", "an argument as output"],
)
def test_a_wrapper_that_does_more(scaled: Scaled, also: Callable[[Tensor, Tensor], Any]) -> None:
    scaled.also = also
    with torch.no_grad():
        for _ in range(4):
            scaled.op(X.clone())
    assert (scaled.ran, kept(scaled.op)) == (4, 0)


def test_one_tensor_for_two_arguments(scaled: Scaled) -> None:
    """Which of them a launch took cannot be seen; two tensors of the same sizes are another matter, also later."""
    x = torch.randn(8)
    for _ in range(3):
        scaled(x, x)
    assert kept(scaled.op) == 0
    for _ in range(3):
        scaled(torch.randn(8), x)
    assert (scaled.ran, kept(scaled.op)) == (4, 1)
    scaled(x, x)
    assert scaled.ran == 4


def test_memory_from_elsewhere(scaled: Scaled) -> None:
    """A table that the wrapper keeps itself."""
    table = torch.randn(8)

    def other(x: Tensor, y: Tensor) -> None:
        scaled.kernel[(1,)](x, table, y, 2.0, WEIGHT=True)

    scaled.also = other
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(scaled.op(X), X * 2 + table)
    assert (scaled.ran, kept(scaled.op)) == (4, 0)


def test_tensors_on_another_device_than_the_first() -> None:
    assert replay.describe((X, [X]), -1, [], [], False)
    assert not replay.describe((X, [X]), 0, [], [], False)


def test_memory_that_begins_unevenly() -> None:
    """A refusal may read where a tensor begins in its memory. By address nothing else is looked at."""
    buffer = bytearray(80)
    begins = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    t = torch.frombuffer(buffer, dtype=torch.uint8, offset=(1 - begins) % 16)
    assert (t.data_ptr() % 16, t.storage_offset()) == (1, 0)
    assert replay.describe((t,), -1, [], [], True)
    assert not replay.describe((t,), -1, [], [], False)


def test_a_batch_of_calls_at_once(scaled: Scaled) -> None:
    """vmap's tensors say that they are plain ones, and have no memory of their own."""
    for _ in range(3):
        scaled(X)
    with torch.no_grad(), use_backend("reference"):
        assert torch.equal(torch.vmap(lambda x: scaled.op(x))(X), X * 2)


def test_a_launch_that_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of interpreted kernels on an accelerator."""
    monkeypatch.setattr(tritonlib, "_stream", lambda index, cuda: "stream")
    kernel = tritonlib.Kernel(Scale())
    x = torch.empty(4, device="meta")
    with replay.Recording([x]) as recording:
        for _ in range(2):
            kernel[(1,)](x, x, x, 2.0, WEIGHT=False)
    assert recording.spoiled


# -------------------------------------------------------------------------------------------------------- what is kept


def test_parts_of_memory(scaled: Scaled) -> None:
    """Of the call's own, as arguments of launches and as outputs."""

    def other(x: Tensor, y: Tensor) -> Tensor:
        whole = torch.empty((3, *x.shape), dtype=x.dtype)
        first, second, _ = whole.unbind()
        scaled.launch(y, None, second, 3.0)
        scaled.launch(second, None, first.view(-1).view(x.shape), 5.0)
        return whole[:2].transpose(1, 2)

    scaled.also = other
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(4, 8)
            got = scaled.op(x)
            assert torch.equal(got, torch.stack([x * 2 * 3 * 5, x * 2 * 3]).transpose(1, 2))
    assert (scaled.ran, kept(scaled.op)) == (2, 1)


@pytest.mark.parametrize(
    "also", [lambda x, y: None, lambda x, y: [y], lambda x, y: y.view(-1)], ids=["tensor", "list", "part"]
)
def test_a_plan_holds_no_tensors(scaled: Scaled, also: Callable[[Tensor, Tensor], Any]) -> None:
    """Of the call that it was made of."""
    scaled.also = also
    seen = []
    with torch.no_grad():
        for _ in range(3):
            x, weight = torch.randn(4, 8), torch.randn(8)
            y = listed(scaled.op(x, weight))[0]
            seen += [weakref.ref(t) for t in (x, weight, y)]
            del x, weight, y
    assert kept(scaled.op) == 1
    gc.collect()
    assert [t() for t in seen] == [None] * 9


def test_an_op_within_an_op(scaled: Scaled) -> None:
    """Its launches are the outer call's, and the ledger counts both."""
    inner = Scaled()
    scaled.also = lambda x, y: inner.op(y, None, 4.0)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(scaled.op(X), X * 2 * 4)
    assert scaled.ran == 2
    assert {d.op: d.calls for d in explain(show=False)} == {scaled.op.name: 5, inner.op.name: 5}


def test_an_op_of_another_back_end_within(scaled: Scaled) -> None:
    inner = Scaled()
    scaled.also = lambda x, y: inner.op(y, None, 4.0)
    with torch.no_grad(), use_backend("reference", op=inner.op.name):
        for _ in range(4):
            assert torch.equal(scaled.op(X), X * 2 * 4)
    assert (scaled.ran, kept(scaled.op)) == (4, 0)


def test_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA's launchers are called: numbers for tensors, also for parts, and the stream."""
    launched = []
    driver = replay.Driver(lambda index: f"stream {index}", lambda index: None, lambda: False)
    x = torch.randn(4, 8)
    with replay.Recording([x]) as recording:
        y = torch.empty(2, 4, 8)
        run = lambda *args: launched.append(args)  # noqa: E731
        recording.launched(run, (replay.STREAM, x, y, y[1], 0.5), driver)
    plan = recording.plan(y, addresses=True)
    assert plan is not None
    got = plan.run(x, 0, [x.data_ptr()])
    part = got.data_ptr() + 4 * 8 * got.element_size()
    assert launched == [("stream 0", x.data_ptr(), got.data_ptr(), part, 0.5)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_call_is_made_again(scaled: Scaled, compiled: bool) -> None:
    call = torch.compile(lambda x: scaled.op(x), fullgraph=True, backend="aot_eager") if compiled else scaled.op
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(call(X), X * 2)
    assert scaled.ran == 2


def test_overhead(scaled: Scaled) -> None:
    """A call made again, of three arguments and one launch, takes no more than 150 direct calls of a function."""
    scaled.kernel.function.__class__.__getitem__ = lambda self, grid: lambda *args, **constants: None
    weight = torch.randn(8)

    def direct(x: Tensor, weight: Tensor | None, factor: float) -> Tensor:
        return x

    def seconds(function: Callable) -> float:
        start = time.thread_time()
        for _ in range(200):
            function(X, weight, 2.0)
        return (time.thread_time() - start) / 200

    medians: list[float] = []
    with torch.no_grad():
        seconds(scaled.op)
        while len(medians) < 60 and min(medians, default=math.inf) > 150:
            medians.append(statistics.median(seconds(scaled.op) / seconds(direct) for _ in range(25)))
    assert scaled.ran == 2
    assert min(medians) <= 150, f"{min(medians):.0f} direct calls"
