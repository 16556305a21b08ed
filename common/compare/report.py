"""What a comparison found: for people as a table, for programs as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from xpu_ports.common.compare.bounds import Check
from xpu_ports.common.compare.layers import Culprit, LayerError


@dataclass
class Section:
    """One thing compared with another."""

    # Such as "beside transformers".
    title: str
    checks: list[Check] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    # Inside the first layer that is outside its bounds.
    culprit: Culprit | None = None
    kl_by_position: list[float] = field(default_factory=list)
    # Of the first of them, in its window.
    first_position: int = 0
    histogram: dict[str, int] = field(default_factory=dict)
    # Relative error of the latents after each step.
    latents_by_step: list[float] = field(default_factory=list)
    why: str = ""

    @property
    def first_outside(self) -> LayerError | None:
        return next((layer for layer in self.layers if not layer.within), None)

    @property
    def within(self) -> bool:
        return all(check.within for check in self.checks) and self.first_outside is None


@dataclass
class Report:
    """Sections and what they are about."""

    title: str
    # What ran, on what, with which versions.
    facts: Mapping[str, Any]
    sections: list[Section] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Pictures by what they show: files beside the report.
    pictures: dict[str, Path] = field(default_factory=dict)
    # The ledger of the port's runs.
    explain: list[dict[str, Any]] = field(default_factory=list)

    @property
    def within(self) -> bool:
        return all(section.within for section in self.sections)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "within_bounds": self.within,
            **self.facts,
            "notes": self.notes,
            "sections": [_section(section) for section in self.sections],
            "pictures": {name: path.name for name, path in self.pictures.items()},
            "explain": self.explain,
        }


def _section(section: Section) -> dict[str, Any]:
    first = section.first_outside
    return {
        "title": section.title,
        "within_bounds": section.within,
        "why_these_bounds": section.why,
        "checks": [{**_plain(check), "within": check.within} for check in section.checks],
        "layers": [{**_plain(layer), "within": layer.within} for layer in section.layers],
        "first_layer_outside": None if first is None else first.layer,
        "culprit": None if section.culprit is None else {**_plain(section.culprit), "text": str(section.culprit)},
        "first_position": section.first_position,
        "kl_by_position": [_number(x) for x in section.kl_by_position],
        "histogram": section.histogram,
        "latents_by_step": [_number(x) for x in section.latents_by_step],
    }


def _plain(value: Any) -> dict[str, Any]:
    return {name: _number(v) for name, v in dataclasses.asdict(value).items()}


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- table


def number(value: float) -> str:
    """Four digits, as short as they can be read."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


HEADER = ("compared", "figure", "value", "bound", "")


def rows(report: Report, per_layer: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """The table's rows; of the layers the worst, the first outside, or all."""
    for section in report.sections:
        title = section.title
        for check in section.checks:
            yield title, check.figure, number(check.value), *_bound(check)
            title = ""
        shown: Sequence[LayerError] = section.layers
        if not per_layer and shown:
            shown = [section.first_outside or max(shown, key=lambda r: r.error / (r.allowed or 1))]
        for layer in shown:
            name = f"error of layer {layer.layer}" + (f" ({layer.kind})" if layer.kind else "")
            if not per_layer:
                name += ", the first outside" if not layer.within else ", the largest"
            yield title, name, number(layer.error), *_bound(Check("", layer.error, layer.allowed))
            title = ""


def _bound(check: Check) -> tuple[str, str]:
    if check.bound is None:
        return "", ""
    sign = ">=" if check.at_least else "<="
    return f"{sign} {number(check.bound)}", "ok" if check.within else "OUTSIDE"


def table(report: Report, per_layer: bool = False) -> Table:
    """The report as a rich table."""
    made = Table(title=report.title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in HEADER:
        made.add_column(name, justify="right" if name in ("value", "bound") else "left", overflow="fold")
    for *cells, verdict in rows(report, per_layer):
        style = "bold red" if verdict == "OUTSIDE" else ""
        made.add_row(*(Text(cell) for cell in cells), Text(verdict, style=style))
    return made


def verdict(report: Report) -> list[str]:
    """What to say beneath the table."""
    lines = [f"note: {note}" for note in report.notes]
    for section in report.sections:
        if section.culprit is not None:
            lines.append(f"{section.title}: {section.culprit}")
        elif (first := section.first_outside) is not None:
            lines.append(f"{section.title}: layer {first.layer} is the first outside its bound")
    lines.append("within the model's bounds" if report.within else "OUTSIDE the model's bounds")
    return lines
