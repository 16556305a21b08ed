"""`xpu-ports bench compare` and `bench roofline`: what result files say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from xpu_ports.common.bench.compare import Row

ResultsArgument = Annotated[
    Path, typer.Argument(metavar="RESULTS.jsonl", help="What bench ops or bench model wrote.", show_default=False)
]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A.jsonl", help="The older results.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B.jsonl", help="The newer results.", show_default=False)],
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold",
            min=0.0,
            metavar="PERCENT",
            help="Differences up to this are none, even where the spreads do not meet.",
        ),
    ] = 5.0,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="WORD",
            help="Compare rows with this word in their name alone, such as graph, decode or an op.",
            show_default=False,
        ),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Show the rows that changed, not all.")] = False,
    across_devices: Annotated[
        bool,
        typer.Option("--across-devices", help="Compare results of different devices; no row is a regression then."),
    ] = False,
    as_json: _common.JsonOption = False,
) -> None:
    """Set two result files side by side, row by row: slower, faster, within the spread, or only in one of them.

    A row is slower when the two spreads (10th to 90th percentile, or slowest to fastest repetition) do not meet and
    the medians differ by more than the threshold. Exit code 1 when a row of ours is slower, has lost its time, or is
    wrong now; rows of peers are shown and do not count.
    """
    from xpu_ports.common.bench import compare as comparison
    from xpu_ports.common.bench.files import read_results

    first, second = read_results(a), read_results(b)
    same = first.device == second.device
    if not same and not across_devices:
        raise _common.UserError(
            f"{a} was measured on {first.device}, {b} on {second.device}: no comparison of code. "
            "--across-devices sets them side by side all the same"
        )
    rows = comparison.compare(first, second, threshold / 100)
    if only is not None:
        rows = [row for row in rows if only in row.either.name.split()]
        if not rows:
            raise _common.UserError(f"--only {only}: no row of {a} and {b} has this word in its name")
    if not any(row.a is not None and row.b is not None for row in rows):
        raise _common.UserError(
            f"{a} and {b}: no row is in both: {len(first.measurements)} and {len(second.measurements)}"
        )
    regressions = sum(row.regression for row in rows) if same else 0
    if as_json:
        _common.print_json(comparison.to_json(rows, first, second, threshold / 100))
    else:
        print(f"A  {comparison.describe(first)}")
        print(f"B  {comparison.describe(second)}")
        if not same:
            print(f"WARNING: different devices, {first.device} and {second.device}: no row says anything about code")
        for difference in comparison.differences(first, second):
            print(f"   {difference}")
        for results in (first, second):
            for kind, many in results.left_out.items():
                print(f"   {results.path}: {many} lines of kind {kind!r} are left out")
        print()
        show(rows, changed)
        if same:
            print(f"{regressions or 'none'} of ours stepped back")
    if regressions:
        raise typer.Exit(1)


def show(rows: list[Row], changed: bool) -> None:
    """A table, and how many rows have which verdict."""
    from collections import Counter

    from xpu_ports.common.bench import compare as comparison

    shown = [row for row in rows if row.changed or not changed]
    if shown:
        _common.print_table(
            ["", "A", "B", "B's speed", "verdict"],
            [
                [
                    row.either.name,
                    comparison.show(row.a),
                    comparison.show(row.b),
                    "" if row.gain is None else f"{row.gain:.2f}x",
                    row.verdict + ("" if row.ours or row.verdict not in comparison.REGRESSIONS else " (a peer)"),
                ]
                for row in shown
            ],
        )
        print()
    counts = Counter(row.verdict for row in rows)
    print(f"{len(rows)} rows: {', '.join(f'{many} {verdict}' for verdict, many in counts.items())}")


def roofline(
    results: ResultsArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.png", help="Where the picture goes; beside the results when left out."),
    ] = None,
    as_json: _common.JsonOption = False,
) -> None:
    """Draw FLOP/s over FLOP a byte of the ops in a result file, under the roofs of the device. Needs matplotlib.

    Solid roofs are the published ones of the card, dashed ones were measured in the same run. Bytes are the least
    that a call must move; FLOPs count products of matrices and the operations beside them.
    """
    from xpu_ports.common.bench.files import read_results
    from xpu_ports.common.bench.roofline import plot_roofline

    path = results.with_suffix(".png") if out is None else out
    if path.suffix.lower() != ".png":
        raise _common.UserError(f"--out is {path}, expected a name that ends with .png")
    try:
        shown = plot_roofline(path, read_results(results))
    except ImportError as error:
        raise _common.UserError(str(error)) from error
    if as_json:
        _common.print_json({"picture": str(path), "points": [point.__dict__ for point in shown]})
        return
    _common.print_table(
        ["op", "size", "back end", "us", "FLOP/byte", "GFLOP/s", "of the roof"],
        [
            [
                p.case,
                p.size,
                p.variant,
                f"{1e6 * p.seconds:,.2f}",
                f"{p.intensity:.3g}",
                f"{p.rate / 1e9:,.0f}",
                "" if p.share is None else f"{100 * p.share:.0f}%",
            ]
            for p in shown
        ],
    )
    print(f"\n{len(shown)} points in {path}")
