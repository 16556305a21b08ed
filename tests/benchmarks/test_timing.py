"""The clock: what is counted, in which order, and that outputs and inputs rotate."""

from __future__ import annotations

import gc
import time
import types
import weakref

import pytest
import torch

from xpu_ports.common.bench import timing
from xpu_ports.common.bench.timing import Ceilings, Plan, Run, Stopwatch, Timing, capture, interleave, rotate

CPU = torch.device("cpu")


class Thing:
    """An output whose life can be watched."""


def test_percentiles_are_of_one_call():
    samples = [10.0 * (i + 1) for i in range(11)]
    assert Timing.of(samples, 10) == Timing(6.0, 2.0, 10.0, 10, 11)
    assert Timing.of([3.0], 3) == Timing(1.0, 1.0, 1.0, 3, 1)


def test_spreads_overlap():
    a = Timing(2.0, 1.0, 3.0, 1, 9)
    assert a.overlaps(Timing(3.5, 3.0, 4.0, 1, 9))
    assert Timing(3.5, 3.0, 4.0, 1, 9).overlaps(a)
    assert not a.overlaps(Timing(5.0, 3.1, 6.0, 1, 9))
    assert not Timing(5.0, 3.1, 6.0, 1, 9).overlaps(a)


def test_calls_take_turns_and_outputs_live_for_one_round():
    made: list[tuple[int, weakref.ref]] = []
    alive = []

    def call(i: int) -> Thing:
        alive.append(sum(ref() is not None for _, ref in made))
        thing = Thing()
        made.append((i, weakref.ref(thing)))
        return thing

    rotate([lambda i=i: call(i) for i in range(3)], 7)
    assert [i for i, _ in made] == [0, 1, 2, 0, 1, 2, 0]
    assert alive == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("one", "sets", "expected"), [(1e-3, 2, 2), (1e-4, 4, 8), (1e-7, 8, 200), (5.0, 3, 3), (0.0, 8, 200)]
)
def test_a_sample_is_long_enough_and_whole_rounds(one: float, sets: int, expected: int):
    assert timing.rounded_calls(Plan(sample=1e-3, most_calls=200), one, sets) == expected


def test_the_stopwatch_of_a_cpu_counts_seconds():
    assert 0.02 <= Stopwatch(CPU)(lambda: time.sleep(0.02)) < 1.0


@pytest.mark.parametrize(
    ("ahead", "expected"), [(False, ["first", "run", "last", "wait"]), (True, ["run", "first", "run", "last", "wait"])]
)
def test_events_enclose_the_run(monkeypatch: pytest.MonkeyPatch, ahead: bool, expected: list[str]):
    log: list[str] = []
    names = iter(("first", "last"))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = next(names)

        def record(self) -> None:
            log.append(self.name)

        def synchronize(self) -> None:
            assert self.name == "last"
            log.append("wait")

        def elapsed_time(self, other: Event) -> float:
            assert (self.name, other.name) == ("first", "last")
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch(torch.device("cuda"))
    assert watch(lambda: log.append("run"), ahead=ahead) == 0.25
    assert log == expected


def test_variants_take_turns_inside_their_context():
    log: list[str] = []

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            log.append(f"enter {self.name}")

        def __exit__(self, *error: object) -> None:
            log.append(f"exit {self.name}")

    runs = {name: Run(lambda name=name: log.append(name), 2, lambda name=name: Context(name)) for name in "ab"}
    timings = interleave(Stopwatch(CPU), runs, Plan(samples=2))
    a, b = (["enter " + name, name, "exit " + name] for name in "ab")
    assert log == a + b + b + a
    assert {name: (t.samples, t.calls) for name, t in timings.items()} == {"a": (2, 2), "b": (2, 2)}


def test_measuring_stops_at_its_budget():
    timings = interleave(Stopwatch(CPU), {"slow": Run(lambda: time.sleep(0.02), 1)}, Plan(samples=1000, budget=0.05))
    assert 1 <= timings["slow"].samples < 50


def test_garbage_is_collected_again_after_an_error():
    def fail() -> None:
        assert not gc.isenabled()
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        interleave(Stopwatch(CPU), {"bad": Run(fail, 1)}, Plan())
    assert gc.isenabled()


def test_nothing_to_time_takes_no_time():
    assert interleave(Stopwatch(CPU), {}, Plan()) == {}


class Recorder:
    """Stands in for a graph: calls made while it captures are kept and made again by `replay`."""

    active: Recorder | None = None

    def __init__(self) -> None:
        self.calls: list = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class capturing:  # noqa: N801
    def __init__(self, graph: Recorder) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        Recorder.active = self.graph

    def __exit__(self, *error: object) -> None:
        Recorder.active = None


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "captured", lambda device: (Recorder, capturing))
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    module = types.SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=lambda s: capturing(None)
    )
    monkeypatch.setattr(torch, "cpu", module)


def test_a_graph_holds_the_rotated_calls_after_a_warm_up(graphs: None):
    log: list[str] = []

    def call(name: str) -> None:
        if Recorder.active is not None:
            Recorder.active.calls.append(lambda: log.append(name))
        else:
            log.append(f"warm {name}")

    replay = capture(CPU, [lambda: call("a"), lambda: call("b")], 4)
    assert log == ["warm a", "warm b"]
    replay()
    assert log[2:] == ["a", "b", "a", "b"]


def test_a_graph_of_short_calls_grows_to_a_sample(graphs: None):
    def call() -> None:
        if Recorder.active is not None:
            Recorder.active.calls.append(lambda: time.sleep(1e-3))

    run = timing.capture_run(CPU, [call, call], Stopwatch(CPU), Plan(sample=0.02, most_calls=16))
    assert 8 <= run.calls <= 16
    assert Stopwatch(CPU)(run.run) >= run.calls * 1e-3


def test_the_floor_is_the_larger_of_two_times():
    ceilings = Ceilings(copy=100.0, matmul=1000.0, copy_bytes=1, matmul_side=1)
    assert ceilings.floor(moved=200, flops=0) == 2.0
    assert ceilings.floor(moved=200, flops=5000) == 5.0


def test_devices_without_graphs(monkeypatch: pytest.MonkeyPatch):
    assert timing.captured(CPU) is None
    monkeypatch.delattr(torch.xpu, "XPUGraph", raising=False)
    assert timing.captured(torch.device("xpu")) is None
    assert timing.captured(torch.device("cuda")) == (torch.cuda.CUDAGraph, torch.cuda.graph)
