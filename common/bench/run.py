"""Run benchmark cases: check a variant against the oracle, then time it beside the others."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common import accuracy
from xpu_ports.common.bench.case import (
    Args,
    Case,
    PeerMissingError,
    Prepare,
    Work,
    copy_args,
    flatten_outputs,
    prepare_op,
)
from xpu_ports.common.bench.timing import (
    Plan,
    Stopwatch,
    Timing,
    cache_size,
    capture_run,
    captured,
    eager_run,
    interleave,
    measure_ceilings,
)
from xpu_ports.common.dispatch import EMULATED_ON_CPU, BackendError, use_backend

MOST_INPUT_SETS = 8


@dataclass(frozen=True)
class Variant:
    """One way to compute a case: a back end of the op, the compiled reference, or a peer."""

    name: str
    prepare: Callable[[], Prepare]
    # The back end of ours to force, or None for code that is not ours.
    backend: str | None = None

    @contextlib.contextmanager
    def context(self, case: Case) -> Iterator[None]:
        """What the calls run in."""
        with contextlib.ExitStack() as stack:
            if self.backend is not None:
                for op in case.ops:
                    stack.enter_context(use_backend(self.backend, op=op.name))
            yield


@dataclass
class Result:
    """What was found about one variant at one size."""

    case: str
    size: str
    dtype: str
    variant: str
    ours: bool
    # A peer that is not here.
    missing: bool = False
    # The largest error against the oracle and the budget for it; None where it could not be run.
    error: float | None = None
    allowed: float | None = None
    # Called from Python, and inside a captured graph (None where the device has none).
    eager: Timing | None = None
    graph: Timing | None = None
    moved: int = 0
    # In products, and element by element.
    flops: int = 0
    elementwise: int = 0
    # Seconds that the measured ceilings leave at least.
    floor: float = 0.0
    input_sets: int = 0
    # Why there are no numbers, or why they are not comparable.
    note: str = ""

    @property
    def within_budget(self) -> bool:
        return self.error is not None and self.allowed is not None and self.error <= self.allowed

    @property
    def device_time(self) -> Timing | None:
        """The time to compare by: the device's own where it is known."""
        return self.graph or self.eager

    @property
    def roof_share(self) -> float | None:
        """Floor over time: 1 is the measured ceiling."""
        return self.floor / self.device_time.median if self.device_time else None


def variants(case: Case, device: torch.device, compiled: bool = True) -> list[Variant]:
    """Ours first, the op's own back ends in the order of preference; then the compiled reference; then the peers."""
    # A back end that is emulated on a CPU computes the right thing at no speed worth a number.
    skipped = EMULATED_ON_CPU if device.type == "cpu" else ()
    found = [
        Variant(name, functools.partial(prepare_op, case.op), backend=name)
        for name in case.op.backends(device.type)
        if name not in skipped
    ]
    if compiled:
        found.append(Variant("torch.compile", functools.partial(_compiled, case)))
    return found + [Variant(name, functools.partial(case.peer, name)) for name in case.peers]


def _compiled(case: Case) -> Prepare:
    return prepare_op(torch.compile(case.op.reference, fullgraph=True, dynamic=False))


def run_case(
    case: Case,
    size: str,
    device: torch.device,
    dtype: torch.dtype,
    plan: Plan | None = None,
    compiled: bool = True,
    among: Sequence[Variant] | None = None,
) -> list[Result]:
    """Check and time every variant of a case at one size.

    Args:
        size: one of the case's ids or another with the same letters.
        plan: how long to measure.
        compiled: also the reference under torch.compile.
        among: other variants instead, by the device's own time alone where the device has graphs.

    Returns:
        One result a variant; one that cannot run here says why in `note` and has no times.

    Raises:
        ValueError: the size is not one of this case.
    """
    plan = plan or Plan()
    # Compiled code of earlier cases would count towards the limit of recompilations of the same reference.
    torch.compiler.reset()
    ceilings = measure_ceilings(device)
    args = case.draw(size, device, dtype)
    results, calls, judge = {}, {}, _Judge(case, size, args, dtype)
    for variant in variants(case, device, compiled and case.compiles) if among is None else among:
        result = Result(case.name, size, str(dtype).removeprefix("torch."), variant.name, variant.backend is not None)
        results[variant.name] = result
        with torch.no_grad(), _noted(result), variant.context(case):
            prepare = variant.prepare()
            work = judge(prepare, result)
            result.moved, result.flops, result.elementwise = work.moved, work.flops, work.elementwise
            result.floor = ceilings.floor(work.moved, work.flops)
            calls[variant] = prepare
    with torch.no_grad():
        moved = max((r.moved for r in results.values()), default=0)
        sets = [args, *(case.draw(size, device, dtype, seed) for seed in range(1, input_sets(moved, device)))]
        _time(case, sets, calls, results, plan, eagerly=among is None or captured(device) is None)
    return list(results.values())


class _Judge:
    """Compares first calls of the variants of a case with the oracle, which it asks once."""

    def __init__(self, case: Case, size: str, args: Args, dtype: torch.dtype) -> None:
        self.case, self.size, self.args, self.dtype = case, size, args, dtype
        self._expected: list[tuple[Tensor, Tensor]] = []

    def __call__(self, prepare: Prepare, result: Result) -> Work:
        """Make one call on fresh arguments and fill in the error of the result."""
        copies = copy_args(self.args)
        outputs = flatten_outputs(prepare(*copies)()) + self.case.mutated(copies)
        part, sampled = self.case.sample(self.args, outputs)
        if not self._expected:
            part = _on_cpu(part)
            exact = self._reference_outputs(accuracy.to_double(part))
            self._expected = list(zip(self._reference_outputs(part), exact, strict=True))
        ratio = -1.0
        for out, (reference, oracle) in zip(sampled, self._expected, strict=False):
            # All in the benchmark's dtype: a state kept in fp32 is a sum of products taken in it, and a peer may
            # return an output in another dtype than ours. The ops' tests are stricter.
            out = out.cpu().reshape(reference.shape).to(self.dtype)
            error = accuracy.measure(out, reference.to(self.dtype), oracle)
            share = error.largest / error.allowed if error.allowed else math.inf if error.largest else 0.0
            if share > ratio:
                ratio, result.error, result.allowed = share, error.largest, error.allowed
        if not result.within_budget:
            result.note = f"error {result.error:.1e} exceeds the budget of {result.allowed:.1e}"
        return self.case.work(self.size, self.args, outputs)

    def _reference_outputs(self, args: Args) -> list[Tensor]:
        copies = copy_args(args)
        return flatten_outputs(self.case.op.reference(*copies)) + self.case.mutated(copies)


def _on_cpu(value: Any) -> Any:
    """Tensors on the CPU, also those in lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_cpu, value))
    return value.cpu() if isinstance(value, Tensor) else value


def input_sets(moved: int, device: torch.device) -> int:
    """How many sets of arguments to rotate, so that a call of `moved` bytes does not find its own in the cache.

    Small calls stay within the cache whatever is done, as they do in a model: their operands were just written.
    """
    return max(2, min(MOST_INPUT_SETS, math.ceil(4 * cache_size(device) / max(moved, 1))))


def _time(
    case: Case,
    sets: Sequence[Args],
    prepared: dict[Variant, Prepare],
    results: dict[str, Result],
    plan: Plan,
    eagerly: bool,
) -> None:
    """Time the variants that passed their first call; fills in the times of the results."""
    device = next(a.device for a in sets[0] if isinstance(a, Tensor))
    stopwatch = Stopwatch(device)
    eager, graphs = {}, {}
    for variant, prepare in prepared.items():
        result = results[variant.name]
        result.input_sets = len(sets)
        context = functools.partial(variant.context, case)
        with _noted(result), context():
            calls = [prepare(*copy_args(s) if case.op.mutates else s) for s in sets]
            if eagerly:
                eager[variant.name] = eager_run(calls, stopwatch, plan, context)
            if captured(device) is not None:
                graphs[variant.name] = capture_run(device, calls, stopwatch, plan)
    for name, timing in interleave(stopwatch, eager, plan).items():
        results[name].eager = timing
    for name, timing in interleave(stopwatch, graphs, plan, ahead=True).items():
        results[name].graph = timing


@contextlib.contextmanager
def _noted(result: Result) -> Iterator[None]:
    """Turn what stops one variant into its note: the others go on.

    Peers are other people's code at versions that we do not choose, so that any exception of theirs is a finding.
    """
    try:
        yield
    except PeerMissingError as missing:
        result.missing = True
        result.note = str(missing)
    except BackendError as refusal:
        result.note = str(refusal)
    except torch.OutOfMemoryError:
        result.note = "out of memory"
    except Exception as error:
        message = next(iter(str(error).strip().splitlines()), "")
        result.note = f"{type(error).__name__}: {message}"[:160]


def run_cases(
    cases: Sequence[Case],
    sizes: Sequence[str] | None,
    device: torch.device,
    dtype: torch.dtype,
    plan: Plan | None = None,
    compiled: bool = True,
) -> Iterator[list[Result]]:
    """`run_case` over cases and their sizes; a list of results as each size is done."""
    for case in cases:
        for size in sizes if sizes is not None else default_sizes(case, device):
            yield run_case(case, size, device, dtype, plan, compiled)


def default_sizes(case: Case, device: torch.device) -> tuple[str, ...]:
    """All of a case's sizes; on a CPU the two smallest."""
    return case.sizes[:2] if device.type == "cpu" else case.sizes


def speedup(ours: Result, other: Result) -> float | None:
    """How many times as fast ours is by device time; None unless both are right and the difference is no noise."""
    if not (ours.within_budget and other.within_budget and ours.device_time and other.device_time):
        return None
    if ours.device_time.overlaps(other.device_time):
        return 1.0
    return other.device_time.median / ours.device_time.median
