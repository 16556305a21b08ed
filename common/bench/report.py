"""What a benchmark prints and writes: a table for people, JSON lines for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from xpu_ports.common.bench.run import Result, speedup
from xpu_ports.common.bench.timing import Ceilings, Timing


def reference_point(results: Sequence[Result]) -> Result | None:
    """What the others are compared with: the first back end of ours that has a time."""
    return next((r for r in results if r.ours and r.device_time), None)


def ceilings_line(ceilings: Ceilings) -> str:
    """The measured ceilings in words."""
    return (
        f"copy of {ceilings.copy_bytes / 2**20:.0f} MiB: {ceilings.copy / 1e9:.0f} GB/s (read plus written); "
        f"bf16 product of {ceilings.matmul_side}^3: {ceilings.matmul / 1e12:.1f} TFLOP/s"
    )


def table(name: str, groups: Iterable[Sequence[Result]]) -> Table:
    """One table for a case: a section a size, a row a variant. Microseconds: median, 10th to 90th percentile."""
    groups = list(groups)
    absent = sorted({r.variant for results in groups for r in results if r.missing})
    caption = f"not here: {', '.join(absent)}" if absent else None
    made = Table(title=name, title_justify="left", caption=caption, caption_justify="left")
    made.add_column("size", no_wrap=True)
    made.add_column("variant", no_wrap=True)
    for header in ("call us", "graph us", "GB/s", "TFLOP/s", "of roof", "ours is", "error/budget"):
        made.add_column(header, justify="right", no_wrap=True)
    made.add_column("note", overflow="fold")
    for results in groups:
        ours = reference_point(results)
        present = [r for r in results if not r.missing]
        for i, r in enumerate(present):
            made.add_row(r.size if i == 0 else "", *_cells(r, ours), end_section=i == len(present) - 1)
    return made


def _cells(r: Result, ours: Result | None) -> list[str]:
    time = r.device_time
    rate = f"{r.moved / time.median / 1e9:.0f}" if time else ""
    product = f"{r.flops / time.median / 1e12:.1f}" if time and r.flops else ""
    share = f"{100 * r.roof_share:.0f}%" if r.roof_share is not None else ""
    error = f"{r.error:.1e}/{r.allowed:.1e}" if r.error is not None else ""
    return [r.variant, _spread(r.eager), _spread(r.graph), rate, product, share, _ratio(r, ours), error, r.note]


def _spread(timing: Timing | None) -> str:
    if timing is None:
        return ""
    low, median, high = (f"{1e6 * t:.2f}" for t in (timing.low, timing.median, timing.high))
    return f"{median} ({low}-{high})"


def _ratio(r: Result, ours: Result | None) -> str:
    if ours is None or r is ours or not r.device_time:
        return ""
    ratio = speedup(ours, r)
    if ratio is None:
        return "not compared"
    return "same" if ratio == 1.0 else f"{ratio:.2f}x"


def summary(groups: Iterable[Sequence[Result]]) -> list[str]:
    """One line a size, for logs: ours, then each other's device time and call time in microseconds."""
    lines = []
    for results in groups:
        ours = reference_point(results)
        first = results[0]
        if ours is None:
            lines.append(f"{first.case} {first.size} {first.dtype}: {first.note or 'no time'}")
            continue
        assert ours.device_time is not None
        share = 100 * (ours.roof_share or 0.0)
        budget = "ok" if ours.within_budget else "WRONG"
        parts = [
            f"{first.case} {first.size}: {ours.variant} {_pair(ours)} "
            f"{ours.moved / ours.device_time.median / 1e9:.0f}GB/s {share:.0f}% {budget}"
        ]
        parts += [f"{r.variant} {_pair(r)}" for r in results if r is not ours and not r.missing]
        lines.append(" | ".join(parts))
    return lines


def _pair(r: Result) -> str:
    if r.eager is None:
        return f"[{r.note[:40]}]"
    device = f"{1e6 * r.graph.median:.2f}" if r.graph else "-"
    return f"{device}/{1e6 * r.eager.median:.1f}"


def to_json(result: Result) -> dict[str, Any]:
    """A result as a JSON object; times in seconds, with what follows from them."""
    time = result.device_time
    return {
        "kind": "op",
        **dataclasses.asdict(result),
        "within_budget": result.within_budget,
        "bytes_per_second": result.moved / time.median if time else None,
        "flop_per_second": result.flops / time.median if time and result.flops else None,
        "roof_share": result.roof_share,
    }


def records(
    environment: dict[str, Any], ceilings: Ceilings, groups: Iterable[Sequence[Result]]
) -> Iterator[dict[str, Any]]:
    """First the environment, then the ceilings, then a line a result; each an object with its "kind"."""
    yield {"kind": "environment", **environment}
    yield {"kind": "ceilings", **dataclasses.asdict(ceilings)}
    for results in groups:
        yield from map(to_json, results)
