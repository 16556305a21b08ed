"""The body of `xpu-ports bench ops`: run rows of the registry, print them, write them down."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from xpu_ports.common import dispatch
from xpu_ports.common.bench import report
from xpu_ports.common.bench.environment import device_name, environment
from xpu_ports.common.bench.files import ResultsError, read_results, write_lines
from xpu_ports.common.bench.registry import find
from xpu_ports.common.bench.run import Result, run_cases
from xpu_ports.common.bench.timing import Plan, measure_ceilings


def bench_ops(
    names: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[str] | None = None,
    out: Path | None = None,
    as_json: bool = False,
    plan: Plan | None = None,
    compiled: bool = True,
) -> list[list[Result]]:
    """Check and time ops beside their peers.

    Args:
        names: rows or ops; all rows for none.
        sizes: size ids; each row's own when left out (on a CPU its two smallest).
        out: folder for ops.jsonl and, where matplotlib is installed, ops.png and roofline.png; made if it is not there.
        as_json: print JSON lines instead of tables.
        plan: how long to measure.
        compiled: also the references under torch.compile.

    Returns:
        The results, a list a size.

    Raises:
        ValueError: a name or a size does not exist.
    """
    cases = find(names)
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 170)
    console.print(f"{device_name(device)}, {dtype}".replace("torch.", ""), highlight=False)
    ceilings = measure_ceilings(device)
    console.print(report.ceilings_line(ceilings), highlight=False)
    groups: list[list[Result]] = []
    dispatch.reset_explain()
    try:
        for case in cases:
            with console.status(case.name):
                mine = list(run_cases([case], sizes, device, dtype, plan, compiled))
            groups += mine
            if not as_json:
                console.print(report.table(case.name, mine))
    finally:
        # An error of the device ends the process: what was measured before it is kept.
        lines = list(report.records(environment(device), ceilings, groups))
        if as_json:
            for line in lines:
                print(json.dumps(line))
        else:
            dispatch.explain()
        if out is not None:
            write_lines(out / "ops.jsonl", lines)
    if out is not None:
        _plot(out, groups, device, dtype, console)
    return groups


def _plot(out: Path, groups: list[list[Result]], device: torch.device, dtype: torch.dtype, console: Console) -> None:
    from xpu_ports.common.bench.plot import plot_roof_shares
    from xpu_ports.common.bench.roofline import plot_roofline

    try:
        plot_roof_shares(out / "ops.png", groups, f"{device_name(device)}, {dtype}".replace("torch.", ""))
        plot_roofline(out / "roofline.png", read_results(out / "ops.jsonl"))
    except ImportError as missing:
        console.print(f"no picture: {missing}", highlight=False)
    except ResultsError as nothing:
        console.print(f"no roofline: {nothing}", highlight=False)
