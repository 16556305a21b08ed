"""The body of `xpu-ports bench ops`: run rows of the registry, print them, write them down."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from xpu_ports.common import dispatch
from xpu_ports.common.bench import report
from xpu_ports.common.bench.environment import device_name, environment
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
        out: folder for ops.jsonl and ops.png (where matplotlib is installed), made when it is not there.
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
    try:
        for case in cases:
            with console.status(case.name):
                mine = list(run_cases([case], sizes, device, dtype, plan, compiled))
            groups += mine
            if not as_json:
                console.print(report.table(case.name, mine))
    finally:
        # An error of the device ends the process: what was measured before it is kept.
        if as_json:
            report.write_jsonl(sys.stdout, environment(device), ceilings, groups)
        else:
            dispatch.explain()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with (out / "ops.jsonl").open("w") as file:
                report.write_jsonl(file, environment(device), ceilings, groups)
    if out is not None:
        _plot(out / "ops.png", groups, device, dtype, console)
    return groups


def _plot(path: Path, groups: list[list[Result]], device: torch.device, dtype: torch.dtype, console: Console) -> None:
    from xpu_ports.common.bench.plot import plot_roof_shares

    try:
        plot_roof_shares(path, groups, f"{device_name(device)}, {dtype}".replace("torch.", ""))
    except ImportError as missing:
        console.print(f"no picture: {missing}", highlight=False)
