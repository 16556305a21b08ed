"""Timing: by device events, called from Python and inside a captured graph, variants in turn, with their spread.

Two numbers tell a small kernel's story. A call from Python, one after another, pays for the interpreter and the
launch; the same calls inside a captured graph pay for the device alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median and the 10th and 90th percentile of the samples."""

    median: float
    low: float
    high: float
    # Calls that one sample is the mean of, and how many samples there are.
    calls: int
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float], calls: int) -> Timing:
        """From seconds for `calls` calls each."""
        each = sorted(s / calls for s in samples)
        last = len(each) - 1
        return cls(each[len(each) // 2], each[round(0.1 * last)], each[round(0.9 * last)], calls, len(each))

    def overlaps(self, other: Timing) -> bool:
        """Whether the two spreads meet, so that a ratio of the medians says nothing."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    # Seconds that a sample should last at least, so that one call's jitter does not show.
    sample: float = 1e-3
    samples: int = 30
    # Seconds after which no further round of samples starts, for all variants of a case together.
    budget: float = 3.0
    most_calls: int = 200


class Stopwatch:
    """Seconds that the device spends between two points of a program; the host's clock on a CPU.

    The two events are made once and used again: on XPU each event costs a command that is reclaimed late.
    """

    def __init__(self, device: torch.device) -> None:
        self.events = None
        if device.type != "cpu":
            make = getattr(torch, device.type).Event
            self.events = make(enable_timing=True), make(enable_timing=True)

    def __call__(self, run: Call, ahead: bool = False) -> float:
        """Time one run; with `ahead` the same is queued before it, so that the launch of a graph is hidden by work."""
        if self.events is None:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = self.events
        if ahead:
            run()
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e-3


def rotate(calls: Sequence[Call], times: int) -> None:
    """Make the calls in turn, `times` in all.

    An output lives until the turn of its call comes again: outputs go through memory as the inputs do, instead of
    landing on the same cache lines every time.
    """
    kept: list[Any] = [None] * len(calls)
    for i in range(times):
        kept[i % len(calls)] = calls[i % len(calls)]()


def captured(device: torch.device) -> tuple[Any, Any] | None:
    """(graph class, capturing context) of a device type, or None where it has none."""
    module = getattr(torch, device.type)
    if device.type == "cuda":
        return module.CUDAGraph, module.graph
    if device.type == "xpu" and hasattr(module, "XPUGraph"):
        return module.XPUGraph, module.graph
    return None


@dataclass(frozen=True)
class Run:
    """What makes one sample of a variant."""

    run: Call
    # Calls in it.
    calls: int
    # Entered around the sample, outside of the measured time.
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def capture_run(device: torch.device, calls: Sequence[Call], stopwatch: Stopwatch, plan: Plan) -> Run:
    """A graph of the calls, long enough by the plan; the device must have graphs."""
    times = len(calls)
    replay = capture(device, calls, times)
    for _ in range(2):
        replay()
        one = stopwatch(replay, ahead=True) / times
        wanted = rounded_calls(plan, one, len(calls))
        if wanted <= times:
            break
        times = wanted
        replay = capture(device, calls, times)
    return Run(replay, times)


def capture(device: torch.device, calls: Sequence[Call], times: int) -> Call:
    """The replay of a graph with `times` calls."""
    api = captured(device)
    assert api is not None, f"{device.type} has no graphs"
    graph_class, context = api
    module = getattr(torch, device.type)
    # Allocations and lazy set-up of the libraries happen before the capture, on the kind of stream it uses.
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        rotate(calls, len(calls))
    module.current_stream().wait_stream(stream)
    graph = graph_class()
    with context(graph):
        rotate(calls, times)
    return graph.replay


def eager_run(
    calls: Sequence[Call],
    stopwatch: Stopwatch,
    plan: Plan,
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Run:
    """The calls from Python one after another, long enough by the plan; warm when this returns."""
    with context():
        rotate(calls, len(calls))
        one = min(stopwatch(functools.partial(rotate, calls, len(calls))) for _ in range(2)) / len(calls)
    times = rounded_calls(plan, one, len(calls))
    return Run(functools.partial(rotate, calls, times), times, context)


def rounded_calls(plan: Plan, one: float, sets: int) -> int:
    """A multiple of `sets`, as near to the plan's sample as calls of `one` second each can be."""
    rounds = round(plan.sample / one / sets) if one > 0 else plan.most_calls
    return max(1, min(rounds, plan.most_calls // sets)) * sets


def interleave(stopwatch: Stopwatch, runs: Mapping[str, Run], plan: Plan, ahead: bool = False) -> dict[str, Timing]:
    """Time variants in turn, so that clocks and neighbours that change while measuring change for all of them.

    Every other round goes backwards, since a device that has just worked hard is slower: none always follows the same.

    Args:
        runs: what makes one sample, by name; already warm.
        ahead: queue the same before each sample: for graphs.
    """
    samples: dict[str, list[float]] = {name: [] for name in runs}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        order = list(runs.items())
        for i in range(plan.samples if runs else 0):
            for name, run in order[::-1] if i % 2 else order:
                with run.context():
                    samples[name].append(stopwatch(run.run, ahead))
            if time.perf_counter() - start > plan.budget:
                break
    finally:
        if collecting:
            gc.enable()
    return {name: Timing.of(samples[name], run.calls) for name, run in runs.items()}


def cache_size(device: torch.device) -> int:
    """Bytes of the last cache in front of device memory: as the driver reports it, or a generous guess."""
    if device.type == "cpu":
        return 64 << 20
    properties = getattr(torch, device.type).get_device_properties(device)
    # torch does not report it for Intel GPUs; the largest to date is the 204 MB of a stack of Max 1550.
    return getattr(properties, "L2_cache_size", 0) or 204 << 20


@dataclass(frozen=True)
class Ceilings:
    """What this device does at best, measured by library calls."""

    # Bytes a second of a large copy, read plus written.
    copy: float
    # FLOP a second of a large square product of random bf16 matrices.
    matmul: float
    # The copy's size in bytes (one way) and the product's side.
    copy_bytes: int
    matmul_side: int

    def floor(self, moved: int, flops: int) -> float:
        """Seconds that no version of this much work beats by far."""
        return max(moved / self.copy, flops / self.matmul)


@functools.cache
def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure a copy and a product once for a device."""
    small = device.type == "cpu"
    size, side = (64 << 20, 1024) if small else (1 << 30, 8192)
    stopwatch, plan = Stopwatch(device), Plan(sample=4e-3, samples=15, budget=4.0)
    pairs = [torch.empty(2, size // 2, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)]
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    runs = {
        "copy": [functools.partial(pair[0].copy_, pair[1]) for pair in pairs],
        "matmul": [functools.partial(torch.matmul, a, b, out=out)],
    }
    timings = interleave(stopwatch, {name: eager_run(calls, stopwatch, plan) for name, calls in runs.items()}, plan)
    return Ceilings(2 * size / timings["copy"].median, 2 * side**3 / timings["matmul"].median, size, side)


def device_kernels(call: Callable[[], Any], device: torch.device) -> list[Any]:
    """The profiler's events of the kernels that a call runs on an accelerator, those of replayed graphs too."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activity, kind = getattr(ProfilerActivity, device.type.upper()), getattr(DeviceType, device.type.upper())
    with profile(activities=[activity]) as found:
        call()
        torch.accelerator.synchronize()
    return [e for e in found.events() if e.device_type == kind and not e.name.startswith(("Memcpy", "Memset"))]
