"""The body of `xpu-ports tune`: find launches, measure their tiles, print what was found and write the table."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import xpu_ports.models
from xpu_ports.common import tuning
from xpu_ports.common.bench.environment import device_name
from xpu_ports.common.bench.timing import Timing
from xpu_ports.common.bench.tune import Item, Job, Outcome, describe, find_jobs, model_items, to_table, tune
from xpu_ports.common.device import Architecture, architecture

# Tokens of the prompt that a model is looked at with.
PROMPT = 2048


def model_calls(name: str, config: Any, dtype: torch.dtype, batches: Sequence[int], arch: Architecture) -> list[Item]:
    """What a prefill and a decode step of a model call, found on tensors without data.

    Args:
        name: the model type.
        config: its configuration.
        dtype: of weights and activations.
    """
    class_name = xpu_ports.models.PORTS[name][1]["AutoModelForCausalLM"]
    port = getattr(importlib.import_module(f"xpu_ports.models.{name}"), class_name)

    def run() -> None:
        for batch in batches:
            ids = torch.zeros(batch, PROMPT, dtype=torch.long)
            cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache
            model(input_ids=ids[:, :1], cache=cache, logits_to_keep=1)

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = port._from_config(config, dtype=dtype).eval()
        return model_items(run, arch)


def list_tiles(items: list[Item], names: Sequence[str], dtype: torch.dtype, arch: Architecture, as_json: bool) -> None:
    """Print what would be measured.

    Raises:
        ValueError: a name is not of something to tune.
    """
    jobs = find_jobs(items, names, arch, dtype)
    counts = [len(job.kernel.allowed(arch, job.sizes)) for job in jobs]
    if as_json:
        rows = [
            {"kernel": job.kernel.name, "sizes": job.size, "tiles": n, "on": [item.name for item in job.items]}
            for job, n in zip(jobs, counts, strict=True)
        ]
        print(json.dumps({"architecture": arch.name, "jobs": rows}, indent=2))
        return
    table = _frame("kernel", "sizes", "tiles", "measured on")
    for job, n in zip(jobs, counts, strict=True):
        table.add_row(job.kernel.name, job.size, str(n), ", ".join(item.name for item in job.items))
    _show(table)
    print(f"{len(jobs)} launches, {sum(counts)} tiles to measure on the architecture {arch.name}")


def tune_kernels(
    items: list[Item],
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    seconds: float | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> list[Outcome]:
    """Measure, print and write.

    Args:
        items: the calls to measure on.
        names: kernels, ops or rows to look at; all for none.
        seconds: after which no further measurement starts; None for no end.
        out: the table's file; the one that launches look for when left out.
        as_json: print one JSON object instead of a table.

    Raises:
        ValueError: a name is not of something to tune.
    """
    arch = architecture(device)
    path = out or tuning.default_path(arch.name)
    before, outcomes = _counting(path, arch.name), list[Outcome]()
    for outcome in tune(find_jobs(items, names, arch, dtype), device, dtype, math.inf if seconds is None else seconds):
        outcomes.append(outcome)
        # After each: a tile that stops the driver costs no more than itself.
        tuning.write(path, to_table(outcomes, arch, device_name(device), before))
        if not as_json:
            print(f"{_name(outcome.job)}: {_verdict(outcome)}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"table": str(path), "outcomes": [_to_json(o) for o in outcomes]}, indent=2))
    else:
        _report(outcomes, path)
    return outcomes


def _counting(path: Path, name: str) -> tuning.Table | None:
    """The table that is there already, where it counts here; any other is written anew."""
    try:
        table = tuning.read(path) if path.is_file() else None
    except tuning.TableError:
        return None
    return table if table is not None and table.why_not(name) is None else None


def _report(outcomes: list[Outcome], path: Path) -> None:
    """A row for each call that a tile was measured on; microseconds: median, 10th to 90th percentile."""
    table = _frame("kernel", "sizes", "built-in us", "best us", "", "best tile", "measured on")
    in_time = [outcome for outcome in outcomes if not outcome.late]
    for outcome in in_time:
        for i, row in enumerate(_rows(outcome)):
            table.add_row(*(row if i == 0 else ("", "", *row[2:4], "", "", row[6])))
    _show(table)
    for outcome in in_time:
        for note in outcome.notes:
            print(f"{_name(outcome.job)}: {note}")
    if len(in_time) < len(outcomes):
        print(f"{len(outcomes) - len(in_time)} launches were not measured: the time was up")
    won = sum(outcome.tile is not None for outcome in outcomes)
    print(f"{won} of {len(in_time)} launches are faster with another tile: {path}")


def _rows(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    job = outcome.job
    tile = describe(job.kernel, outcome.best) if outcome.best is not None else ""
    if not outcome.times:
        yield job.kernel.name, job.size, "", "", _verdict(outcome), tile, ""
    for item, (before, after) in outcome.times.items():
        yield job.kernel.name, job.size, _spread(before), _spread(after), _verdict(outcome), tile, item


def _verdict(outcome: Outcome) -> str:
    if not outcome.measured:
        return "not measured"
    return f"{outcome.ratio:.2f}x" if outcome.tile is not None else "built-in stays"


def _name(job: Job) -> str:
    return f"{job.kernel.name} {job.size}"


def _spread(timing: Timing) -> str:
    low, median, high = (f"{1e6 * t:.2f}" for t in (timing.low, timing.median, timing.high))
    return f"{median} ({low}-{high})"


def _to_json(outcome: Outcome) -> dict[str, Any]:
    job = outcome.job
    tiles = {"best": outcome.best, "written": outcome.tile}
    return {
        "kernel": job.kernel.name,
        "sizes": dict(zip(job.kernel.sizes, map(str, job.sizes), strict=True)),
        **{k: t and {field: getattr(t, field) for field in job.kernel.fields} for k, t in tiles.items()},
        "seconds": {
            item: {"built_in": dataclasses.asdict(before), "best": dataclasses.asdict(after)}
            for item, (before, after) in outcome.times.items()
        },
        "notes": outcome.notes,
        "late": outcome.late,
    }


def _frame(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, justify="right" if header.endswith("us") or header == "tiles" else "left")
    return table


def _show(table: Table) -> None:
    """In a file or a pipe a row stays one line."""
    console = Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)
