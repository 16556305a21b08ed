"""Tuning: which of the tiles that a kernel may have is the fastest on the device at hand, among those that are right.

What is measured are calls of ops: rows of the registry, or what a model calls. Which tiles a call asks for is found by
making it without a launch, on tensors without data.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from xpu_ports.common import tuning
from xpu_ports.common.bench.case import Args, Case, Draw, Work, flatten_outputs, prepare_op
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.bench.run import Result, Variant, run_case
from xpu_ports.common.bench.timing import Plan, Timing
from xpu_ports.common.device import Architecture, architecture, use_architecture
from xpu_ports.common.dispatch import OPS, Implementation, Op, use_backend
from xpu_ports.common.tritonlib import without_launches
from xpu_ports.common.tuning import TUNABLES, Entry, Sizes, Table, Tunable

BUILT_IN = "built-in"
PLAN = Plan(sample=5e-4, samples=20, budget=1.0)


@dataclass(frozen=True)
class Item:
    """A call to measure, and how often a model makes it."""

    case: Case
    size: str
    calls: int = 1

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.size}"


@dataclass
class Job:
    """A kernel's tile at some sizes, and the calls that it is measured on."""

    kernel: Tunable
    sizes: Sizes
    items: list[Item] = field(default_factory=list)

    @property
    def size(self) -> str:
        """Such as "N=4096 few=True"."""
        return " ".join(f"{name}={value}" for name, value in zip(self.kernel.sizes, self.sizes, strict=True))


@dataclass
class Outcome:
    """What was found about a job. `tile` is the winner, None where the built-in one stays."""

    job: Job
    tile: Any = None
    # The fastest right one beside the built-in, and both times by the item's name.
    best: Any = None
    times: Mapping[str, tuple[Timing, Timing]] = field(default_factory=dict)
    # What was wrong with tiles that lost for it, or why nothing was measured.
    notes: list[str] = field(default_factory=list)
    measured: bool = True
    # Not measured because the time was up.
    late: bool = False

    @property
    def ratio(self) -> float:
        """How many times as fast the best is as the built-in tile: the geometric mean over the items."""
        return math.exp(_mean([math.log(before.median / after.median) for before, after in self.times.values()]))


# ---------------------------------------------------------------------------------------------------- what to measure


def tuned_ops() -> list[Op]:
    """The ops with a launch in a module that has a tile to tune."""
    modules = {kernel.rule.__module__ for kernel in TUNABLES.values()}
    return [op for op in OPS.values() if any(i.run.__module__ in modules for i in op.implementations)]


def registry_items() -> list[Item]:
    """Every row and size of the registry whose op has something to tune."""
    ops = tuned_ops()
    return [Item(case, size) for case in CASES.values() if case.op in ops for size in case.sizes]


def find_jobs(items: Iterable[Item], names: Sequence[str], arch: Architecture, dtype: torch.dtype) -> list[Job]:
    """The tiles that these calls ask for and that there is a choice of, most called first.

    Args:
        names: kernels, ops or rows of the registry to look at; all for none.

    Raises:
        ValueError: a name is none of these, or not one with a tile to tune.
    """
    known = {*TUNABLES, *(op.name for op in tuned_ops()), *(i.case.name for i in registry_items())}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no tile of {name!r} to tune;{hint} there are: {', '.join(sorted(known))}")
    jobs: dict[tuple[str, Sizes], Job] = {}
    for item in items:
        whole = not names or bool({item.case.name, item.case.op.name} & set(names))
        for kernel, sizes in _asked_by(item, arch, dtype):
            if whole or kernel.name in names:
                jobs.setdefault((kernel.name, sizes), Job(kernel, sizes)).items.append(item)
    found = [job for job in jobs.values() if len(job.kernel.allowed(arch, job.sizes)) > 1]
    return sorted(found, key=lambda job: -sum(item.calls for item in job.items))


def _asked_by(item: Item, arch: Architecture, dtype: torch.dtype) -> list[tuple[Tunable, Sizes]]:
    with FakeTensorMode():
        args = item.case.draw(item.size, torch.device("cpu"), dtype)
        chosen = _chosen(item.case.op, args)
        if chosen is None:
            return []
        tuning.forget()
        with use_architecture(arch.name), without_launches(), torch.no_grad():
            chosen.run(*args)
    return [(kernel, sizes) for kernel in TUNABLES.values() for sizes in kernel.seen()]


def _chosen(op: Op, args: Args) -> Implementation | None:
    """What the op would run on an accelerator; None for the reference."""
    return next((i for i in op.implementations if i.refuses(*args) is None), None)


@dataclass(frozen=True)
class RecordedCase(Case):
    """A call that a model made: arguments of the same shapes, strides and dtypes, drawn anew."""

    recorded: Args = ()

    def draw(self, size: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Args:
        draw = Draw(device, dtype, torch.Generator(device).manual_seed(seed))
        return tuple(_filled(a, draw) for a in self.recorded)

    def work(self, size: str, args: Args, outputs: list[Tensor]) -> Work:
        return Work(sum(t.numel() * t.element_size() for t in flatten_outputs((args, outputs))))


def _filled(value: Any, draw: Draw) -> Any:
    if isinstance(value, (list, tuple)):
        return [_filled(v, draw) for v in value]
    if not isinstance(value, Tensor):
        return value
    span = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    if value.dtype.is_floating_point:
        flat = draw(span, dtype=value.dtype)
    else:
        flat = torch.ones(span, dtype=value.dtype, device=draw.device)
    return flat.as_strided(value.shape, value.stride())


class _Recorder(TorchDispatchMode):
    """Notes the ops that are called on tensors without data."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Op, Args]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "xpu_ports":
            op = OPS[func.name().partition("::")[2]]
            bound = op.signature.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.calls.append((op, bound.args))
        return func(*args, **(kwargs or {}))


def model_items(run: Callable[[], object], arch: Architecture) -> list[Item]:
    """The calls of ops with something to tune that a model makes.

    Args:
        run: calls the model, on tensors without data.
    """
    ops = tuned_ops()
    with _Recorder() as recorder:
        run()
    pending, items = recorder.calls, dict[str, Item]()
    for op, args in pending:
        chosen = _chosen(op, args) if op in ops else None
        if chosen is None:
            continue
        # Composed of other ops, or a launch, which asks for no further one.
        with _Recorder() as nested, use_architecture(arch.name), without_launches(), torch.no_grad():
            chosen.run(*args)
        pending.extend(nested.calls)
        size = _described(args)
        case = RecordedCase(op.name, op, (size,), lambda *_: (), recorded=args)
        known = items.get(f"{op.name} {size}", Item(case, size, calls=0))
        items[known.name] = replace(known, calls=known.calls + 1)
    return list(items.values())


def _described(value: Any) -> str:
    """Arguments in a word each, tensors by shape and, where they are not contiguous, strides: "1x2048:1x4096 None"."""
    if isinstance(value, Tensor):
        shape = "x".join(map(str, value.shape)) or "1"
        return shape if value.is_contiguous() else f"{shape}:{'x'.join(map(str, value.stride()))}"
    if isinstance(value, list):
        return f"[{','.join(map(_described, value))}]"
    return " ".join(map(_described, value)) if isinstance(value, tuple) else str(value)


# ------------------------------------------------------------------------------------------------------- measurement


@dataclass(frozen=True, kw_only=True)
class Candidate(Variant):
    """A tile of a kernel, in force while it is measured."""

    job_kernel: Tunable
    sizes: Sizes
    tile: Any
    arch: Architecture

    @contextlib.contextmanager
    def context(self, case: Case) -> Iterator[None]:  # type: ignore[override]
        with use_backend("triton", op=case.op.name), self.job_kernel.trying(self.arch, self.sizes, self.tile):
            yield


def tune(
    jobs: Iterable[Job], device: torch.device, dtype: torch.dtype, seconds: float = math.inf, plan: Plan = PLAN
) -> Iterator[Outcome]:
    """Measure jobs one after another; an outcome each.

    Args:
        dtype: of the registry's inputs.
        seconds: after which no further measurement starts.
        plan: how long to measure one call with all tiles.
    """
    end = time.perf_counter() + seconds
    arch = architecture(device)
    for job in jobs:
        tiles = dict(zip(_names(job, arch), job.kernel.allowed(arch, job.sizes), strict=True))
        results: dict[str, list[Result]] = {}
        with tuning.rules_alone():
            for item in job.items:
                if time.perf_counter() > end:
                    break
                among = [
                    Candidate(
                        name=name,
                        prepare=functools.partial(prepare_op, item.case.op),
                        backend="triton",
                        job_kernel=job.kernel,
                        sizes=job.sizes,
                        tile=tile,
                        arch=arch,
                    )
                    for name, tile in tiles.items()
                ]
                results[item.name] = run_case(item.case, item.size, device, dtype, plan, among=among)
        if len(results) < len(job.items):
            yield Outcome(job, measured=False, late=True)
        else:
            yield choose(job, tiles, results)


def _names(job: Job, arch: Architecture) -> list[str]:
    _, *others = job.kernel.allowed(arch, job.sizes)
    return [BUILT_IN, *(describe(job.kernel, tile) for tile in others)]


def describe(kernel: Tunable, tile: Any) -> str:
    """Such as "block_m=1 block_n=4096 warps=8"."""
    return " ".join(f"{name}={getattr(tile, name)}" for name in kernel.fields)


def choose(job: Job, tiles: Mapping[str, Any], results: Mapping[str, list[Result]]) -> Outcome:
    """The tile to write down: right on every item, slower than the built-in one on none and faster on one at least.

    Faster and slower are beyond the spread: the 10th to 90th percentiles do not meet. Items that the built-in tile has
    no time for do not count; among several tiles that of the largest geometric mean of ratios wins.
    """
    notes, groups = [], {}
    for item, measured in results.items():
        by_name = {r.variant: r for r in measured}
        built_in = by_name.pop(BUILT_IN)
        if built_in.device_time is None or not built_in.within_budget:
            notes.append(f"{item}: {built_in.note or 'no time'}")
            continue
        groups[item] = built_in.device_time, by_name
    best = Outcome(job, notes=notes, measured=bool(groups))
    for name in list(tiles)[1:] if groups else ():
        wrong = [r for _, by_name in groups.values() if (r := by_name[name]).note or r.device_time is None]
        if wrong:
            notes.append(f"{name}: {wrong[0].note or 'no time'}")
            continue
        times = {
            item: (before, time)
            for item, (before, by_name) in groups.items()
            if (time := by_name[name].device_time) is not None
        }
        outcome = Outcome(job, best=tiles[name], times=times, notes=notes)
        if best.best is None or (_wins(outcome), outcome.ratio) > (_wins(best), best.ratio):
            best = outcome
    if best.best is not None and _wins(best):
        best.tile = best.best
    return best


def _wins(outcome: Outcome) -> bool:
    pairs = outcome.times.values()
    slower = any(after.low > before.high for before, after in pairs)
    return not slower and outcome.ratio > 1 and any(after.high < before.low for before, after in pairs)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def to_table(outcomes: Iterable[Outcome], arch: Architecture, device: str, before: Table | None = None) -> Table:
    """A table with the winners.

    Args:
        device: its name, as the driver reports it.
        before: a table whose other entries stay; what was measured anew replaces or removes its entry.
    """
    entries: dict[tuple, Entry] = {e.key: e for e in before.entries} if before is not None else {}
    for outcome in outcomes:
        if not outcome.measured:
            continue
        job = outcome.job
        measured = {
            item: (round(1e6 * built_in.median, 3), round(1e6 * tuned.median, 3))
            for item, (built_in, tuned) in outcome.times.items()
        }
        tile = outcome.tile if outcome.tile is not None else job.kernel.rule(arch, *job.sizes)
        entry = tuning.to_entry(job.kernel, job.sizes, tile, measured)
        entries.pop(entry.key, None)
        if outcome.tile is not None:
            entries[entry.key] = entry
    return Table(arch.name, device, tuning.triton_version(), tuple(entries.values()))
