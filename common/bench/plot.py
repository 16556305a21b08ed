"""The roofline picture: how much of the measured ceiling each variant reaches. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from xpu_ports.common.bench.run import Result

# Told apart without colour too.
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")


def plot_roof_shares(path: Path, groups: Sequence[Sequence[Result]], title: str) -> None:
    """Write a PNG with a panel a case and a group of bars a size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Not pyplot: which back end that has is the caller's, as in a notebook.
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(results[0].case for results in groups))
    most = max(sum(results[0].case == case for results in groups) for case in cases)
    # Wide enough for the sizes' names side by side.
    shape = (max(9.0, 3.0 + 1.5 * most), 3.2 * len(cases))
    figure = Figure(figsize=shape, layout="constrained")
    axes = figure.subplots(len(cases), 1, squeeze=False)
    figure.suptitle(title)
    for axis, case in zip(axes[:, 0], cases, strict=True):
        mine = [results for results in groups if results[0].case == case]
        names = list(dict.fromkeys(r.variant for results in mine for r in results if r.roof_share is not None))
        width = 0.8 / max(1, len(names))
        for i, name in enumerate(names):
            shares = [next((r.roof_share for r in results if r.variant == name), None) for results in mine]
            places = [group + (i - (len(names) - 1) / 2) * width for group in range(len(mine))]
            heights = [100 * (share or 0.0) for share in shares]
            bars = axis.bar(places, heights, width, label=name, hatch=_HATCHES[i % len(_HATCHES)], edgecolor="black")
            axis.bar_label(bars, labels=[f"{h:.0f}" if h >= 1 else "" for h in heights], fontsize=7)
        axis.axhline(100, color="black", linestyle="--", linewidth=1)
        axis.set_title(case, loc="left", fontsize=10)
        axis.set_ylabel("% of measured roof")
        axis.set_xticks(range(len(mine)), [results[0].size for results in mine], fontsize=8)
        axis.margins(y=0.15)
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=120)
