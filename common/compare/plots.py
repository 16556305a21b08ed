"""Pictures of a report; the one import of matplotlib here. Told apart by markers and lines, not by colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xpu_ports.common.compare.layers import LayerError
from xpu_ports.common.compare.report import Report, Section

STYLES = (
    {"color": "black", "marker": "o", "linestyle": "-"},
    {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    {"color": "#D55E00", "marker": "^", "linestyle": ":"},
)
# A log axis has no zero: an exact result stands at the bottom.
FLOOR = 1e-9
# Points of a curve over positions.
BINS = 32


def check_matplotlib() -> None:
    """Find out before anything runs.

    Raises:
        ImportError: matplotlib is not installed; says what to install.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"plots need matplotlib: pip install 'xpu-ports[report]', or leave out --out ({error})"
        ) from error


def plot(report: Report, folder: Path) -> dict[str, Path]:
    """Write the plots that a report has something for; what each shows, and its file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    check_matplotlib()
    made: dict[str, Path] = {}
    for section in (s for s in report.sections if s.layers):
        name = "layers" if "layers.png" not in {p.name for p in made.values()} else f"layers-{len(made)}"
        made[f"Error by layer, {section.title}"] = _layers(section, folder / f"{name}.png")
    sections = [s for s in report.sections if len(s.kl_by_position) > 1]
    if sections:
        made["KL divergence by position"] = _positions(sections, folder / "kl.png")
    histograms = [(s.title, s.histogram) for s in report.sections if s.histogram]
    if histograms:
        made["Differences of logits"] = _histogram(histograms, folder / "differences.png")
    steps = [(s.title, s.latents_by_step) for s in report.sections if s.latents_by_step]
    if steps:
        made["Error of the latents by step"] = _steps(steps, folder / "latents.png")
    return made


def _figure(title: str, width: float = 8.0) -> tuple[Any, Any]:
    # Without pyplot, whose back end belongs to the caller: a notebook's plots go on showing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axis = figure.add_subplot()
    axis.set_title(title, loc="left", fontsize=11, wrap=True)
    axis.set_axisbelow(True)
    axis.grid(True, axis="y", linewidth=0.4, alpha=0.6)
    return figure, axis


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _shown(values: Sequence[float]) -> list[float]:
    return [max(v, FLOOR) if math.isfinite(v) else math.nan for v in values]


def _layers(section: Section, path: Path) -> Path:
    layers: list[LayerError] = section.layers
    figure, axis = _figure(f"Error by layer, {section.title}", max(8.0, 3.0 + 0.16 * len(layers)))
    places = [layer.layer for layer in layers]
    lines: list[tuple[str, list[Any]]] = [
        ("by itself, on the reference's input", [layer.error for layer in layers]),
        ("of the whole stream, with all before it", [layer.so_far for layer in layers]),
    ]
    for (label, values), style in zip(lines, STYLES, strict=False):
        if all(v is not None for v in values):
            axis.plot(places, _shown(values), label=label, markersize=5, **style)
    if layers[0].allowed is not None:
        axis.plot(places, [layer.allowed for layer in layers], color="#D55E00", linestyle=":", linewidth=2,
                  label="bound for a layer by itself")  # fmt: skip
    first = section.first_outside
    if first is not None and math.isfinite(first.error):
        axis.annotate(
            f"layer {first.layer}: outside", (first.layer, first.error), xytext=(8, 8), textcoords="offset points"
        )
    axis.set_yscale("log")
    axis.margins(y=0.15)
    axis.set_xlabel("layer")
    zeros = any(v is not None and v < FLOOR for _, values in lines for v in values)
    axis.set_ylabel("relative error" + (f" (0 drawn as {FLOOR:g})" if zeros else ""))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    return _save(figure, path)


def _positions(sections: Sequence[Section], path: Path) -> Path:
    figure, axis = _figure("KL divergence by position, mean over windows and a few positions")
    for section, style in zip(sections, STYLES * len(sections), strict=False):
        values = section.kl_by_position
        few = max(1, len(values) // BINS)
        groups = [values[i : i + few] for i in range(0, len(values), few)]
        places = [section.first_position + i * few + (len(g) - 1) / 2 for i, g in enumerate(groups)]
        axis.plot(places, _shown([sum(g) / len(g) for g in groups]), label=section.title, markersize=4, **style)
    axis.set_yscale("log")
    axis.set_xlabel("position in the window")
    zeros = any(v < FLOOR for section in sections for v in section.kl_by_position)
    axis.set_ylabel("nats" + (f" (less drawn as {FLOOR:g})" if zeros else ""))
    axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False)
    return _save(figure, path)


def _histogram(histograms: Sequence[tuple[str, dict[str, int]]], path: Path) -> Path:
    figure, axis = _figure("Differences of logits, by size")
    used = [n for n in histograms[0][1] if any(h[n] for _, h in histograms)]
    width = 0.8 / len(histograms)
    for i, (label, counts) in enumerate(histograms):
        total = max(sum(counts.values()), 1)
        places = [p + (i - (len(histograms) - 1) / 2) * width for p in range(len(used))]
        axis.bar(
            places, [100 * counts[n] / total for n in used], width, label=label, edgecolor="black",
            color=("#BBBBBB", "#56B4E9", "#E69F00")[i % 3], hatch=("", "///", "...")[i % 3],
        )  # fmt: skip
    names = [n if n.startswith("<") else f"{n} to\n1e{int(n[2:]) + 1}" for n in used]
    axis.set_xticks(range(len(used)), names, fontsize=9)
    axis.set_xlabel("difference")
    axis.set_ylabel("% of all logits")
    axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=1, frameon=False)
    return _save(figure, path)


def _steps(curves: Sequence[tuple[str, Sequence[float]]], path: Path) -> Path:
    figure, axis = _figure("Relative error of the latents after each step")
    for (label, values), style in zip(curves, STYLES * len(curves), strict=False):
        axis.plot(range(1, len(values) + 1), _shown(values), label=label, markersize=5, **style)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("relative error")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1, frameon=False)
    return _save(figure, path)
