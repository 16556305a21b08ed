"""The roofline picture: achieved FLOP/s over arithmetic intensity, under the device's roofs.

Source: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model" (CACM 52(4), 2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpu_ports.common.bench.case import parse_size
from xpu_ports.common.bench.files import Results, ResultsError
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.cards import Roofs, card_of_driver

# Told apart without colour.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
_LINE = {"color": "black", "linewidth": 1.2, "zorder": 1}
# Under names of lines, which the lines to the labels may cross.
_BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
# Inches: of a label's two lines, above and below the axes.
_LABEL, _ABOVE, _BELOW = 0.36, 0.6, 0.6
_COLOURS = ("black", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class Point:
    """One op at one size."""

    case: str
    size: str
    variant: str
    # FLOP a byte, FLOP a second, seconds.
    intensity: float
    rate: float
    seconds: float
    # Of the FLOP, those in products.
    products: float
    # Of the lowest roof above it, as measured or as published.
    share: float | None


def operations(record: Mapping[str, Any]) -> tuple[int, int]:
    """FLOP in products and element by element of an op's line; by the row's formulas where a file has none."""
    case = CASES.get(str(record.get("case")))
    flops, elementwise = int(record.get("flops") or 0), record.get("elementwise")
    if elementwise is None and case is not None:
        size = parse_size(str(record["size"]))
        return case.flops(size), case.elementwise(size)
    return flops, int(elementwise or 0)


def fastest(results: Results) -> list[Mapping[str, Any]]:
    """Of each op, size and dtype the line of our fastest back end that is right and was timed."""
    best: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for record in results.ops:
        if not record.get("ours") or not record.get("within_budget") or _timing(record) is None:
            continue
        key = (record["case"], record["size"], record["dtype"])
        if key not in best or seconds_of(record) < seconds_of(best[key]):
            best[key] = record
    return list(best.values())


def _timing(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return record.get("graph") or record.get("eager")


def seconds_of(record: Mapping[str, Any]) -> float:
    """The time of a line that has one: the device's own where it is known."""
    timing = _timing(record)
    assert timing is not None
    return float(timing["median"])


def points(results: Results) -> list[Point]:
    """Our fastest back ends under the roofs.

    Raises:
        ResultsError: the file has no op that was timed and has FLOPs and bytes.
    """
    roofs = roofs_of(results)
    found = []
    for record in fastest(results):
        products, elementwise = operations(record)
        moved, seconds = int(record.get("moved") or 0), seconds_of(record)
        if not moved or not products + elementwise:
            continue
        total = products + elementwise
        share = roofs.floor(moved, products, elementwise) / seconds if roofs is not None else None
        found.append(
            Point(
                record["case"], record["size"], record["variant"], total / moved, total / seconds, seconds,
                products / total, share,
            )
        )  # fmt: skip
    if not found:
        raise ResultsError(f"{results.path}: no op with a time, bytes and FLOPs, expected those of xpu-ports bench ops")
    return found


def roofs_of(results: Results) -> Roofs | None:
    """The published roofs of the device of a file, or None if it is not in the table of cards."""
    card = card_of_driver(results.device)
    return None if card is None else card.roofs


def plot_roofline(path: Path, results: Results) -> list[Point]:
    """Write the picture as PNG.

    Returns:
        What is in it.

    Raises:
        ImportError: matplotlib is not installed; says what to install.
        ResultsError: the file has nothing to show.
    """
    shown = points(results)
    cases = list(dict.fromkeys(p.case for p in shown))
    height = max(6.0, _ABOVE + _BELOW + _LABEL * len(cases))
    figure, axis = _figure(height)
    least, most = min(p.intensity for p in shown), max(p.intensity for p in shown)
    left, right = least / 4, max(most, 300.0) * 8
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(left, right)
    highest = max([p.rate for p in shown] + [top for top in _tops(results)])
    axis.set_ylim(min(p.rate for p in shown) / 2, highest * 2.5)
    slopes = _roofs(axis, results, left, right)
    anchors = []
    for i, case in enumerate(cases):
        mine = sorted((p for p in shown if p.case == case), key=lambda p: p.rate)
        style = {
            "color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)], "markersize": 6,
            "markerfacecolor": "white", "markeredgewidth": 1.3, "zorder": 3,
        }  # fmt: skip
        axis.plot([p.intensity for p in mine], [p.rate for p in mine], linestyle="-", linewidth=0.8, **style)
        top = mine[-1]
        share = "" if top.share is None else f", {100 * top.share:.0f}% of the roof"
        anchors.append((top, f"{case}\n{top.size}{share}", style))
    _name_slopes(axis, slopes)
    _name_points(axis, _LABEL / (height - _ABOVE - _BELOW), anchors)
    axis.set_xlabel("FLOP a byte of device memory (inputs read once, outputs written once)")
    axis.set_ylabel("FLOP/s")
    axis.set_title(_title(results, shown), loc="left", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return shown


def _figure(height: float) -> tuple[Any, Any]:
    # Not pyplot: which back end that has is the caller's, as in a notebook.
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(f"a picture needs matplotlib: pip install 'xpu-ports[report]' ({error})") from error
    figure = matplotlib.figure.Figure(figsize=(11.0, height))
    axis = figure.add_subplot()
    # The labels stand in a column of their own, so that none lies on another or is cut.
    figure.subplots_adjust(left=0.07, right=0.70, bottom=_BELOW / height, top=1 - _ABOVE / height)
    axis.grid(True, which="major", linewidth=0.4, alpha=0.5)
    return figure, axis


def _title(results: Results, shown: Sequence[Point]) -> str:
    versions = results.environment["versions"]
    dtypes = dict.fromkeys(r["dtype"] for r in results.ops)
    about = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions)
    variants = ", ".join(dict.fromkeys(p.variant for p in shown))
    ours = f"ours, at each size the fastest back end ({variants}); shares of the published roof"
    return f"{results.device}, {', '.join(dtypes)}, {about}\n{ours}"


def _tops(results: Results) -> list[float]:
    """The highest of what is published and of what was measured."""
    published, measured = roofs_of(results), results.ceilings
    return [top.matrix for top in (published,) if top is not None] + [
        top.matmul for top in (measured,) if top is not None
    ]


def _roofs(axis: Any, results: Results, left: float, right: float) -> list[tuple[float, float, str, bool]]:
    """Published roofs as solid lines, measured ceilings dashed; flat ones are named.

    Returns:
        The slopes to name when the scales are known: bytes a second, where the slope ends, its name, whether above it.
    """
    published, measured = roofs_of(results), results.ceilings
    slopes = []
    if published is not None:
        top = published.matrix
        axis.plot([left, top / published.memory, right], [published.memory * left, top, top], "-", **_LINE)
        _name_flat(axis, right, top, f"products in bf16, {top / 1e12:,.0f} TFLOP/s", above=True)
        start = max(published.vector / published.memory, left)
        axis.plot([start, right], [published.vector] * 2, ":", **_LINE)
        name = f"fp32 outside of the matrix units, {published.vector / 1e12:,.0f} TFLOP/s"
        _name_flat(axis, right, published.vector, name, above=False)
        slopes.append((published.memory, top, f"memory, {published.memory / 1e9:,.0f} GB/s", True))
    if measured is not None:
        top = measured.matmul
        axis.plot([left, top / measured.copy, right], [measured.copy * left, top, top], "--", **_LINE)
        _name_flat(axis, right, top, f"measured: {top / 1e12:,.0f}", above=False)
        slopes.append((measured.copy, top, f"measured copy: {measured.copy / 1e9:,.0f}", False))
    return slopes


def _name_flat(axis: Any, right: float, top: float, name: str, above: bool) -> None:
    axis.annotate(
        name, (right, top), xytext=(-4, 3 if above else -3), textcoords="offset points", fontsize=8,
        ha="right", va="bottom" if above else "top", zorder=4, bbox=_BACKGROUND,
    )  # fmt: skip


def _name_slopes(axis: Any, slopes: Sequence[tuple[float, float, str, bool]]) -> None:
    """Names along the slopes, in the middle of the part without points; the scales must be final."""
    for slope, top, name, above in slopes:
        ends = [axis.transData.transform((x, slope * x)) for x in (1.0, 10.0)]
        angle = math.degrees(math.atan2(ends[1][1] - ends[0][1], ends[1][0] - ends[0][0]))
        x = math.sqrt(5.0 * top / slope)
        axis.annotate(
            name, (x, slope * x), xytext=(-4, 4) if above else (5, -5), textcoords="offset points", fontsize=8,
            rotation=angle, rotation_mode="anchor", ha="center", va="bottom" if above else "top",
            zorder=4, bbox=_BACKGROUND,
        )  # fmt: skip


def _name_points(axis: Any, height: float, anchors: Sequence[tuple[Point, str, dict[str, Any]]]) -> None:
    """Labels in the column at the right, in the order of the heights of their points, each with a line to its point."""
    ordered = sorted(anchors, key=lambda anchor: anchor[0].rate)
    low, high = (math.log10(end) for end in axis.get_ylim())
    places: list[float] = []
    for point, _, _ in ordered:
        wanted = (math.log10(point.rate) - low) / (high - low)
        places.append(max(wanted, places[-1] + height if places else height / 2))
    # Pushed up past the top: back down, from the top.
    limit = 1 - height / 2
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - height
    for (point, text, style), place in zip(ordered, places, strict=True):
        # In a label's first line, where its marker stands too.
        axis.annotate(
            "", (point.intensity, point.rate), xytext=(1.025, place), textcoords="axes fraction", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.6, "shrinkA": 4, "shrinkB": 4},
        )  # fmt: skip
        axis.plot([1.03], [place], transform=axis.transAxes, clip_on=False, linestyle="", **style)
        axis.text(1.045, place, text, transform=axis.transAxes, fontsize=8, va="center", ha="left")
