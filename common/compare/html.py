"""One page with everything, which needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from xpu_ports.common.compare.report import HEADER, Report, rows, verdict

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; color: #111; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: .2em .8em .2em 0; text-align: left; }
th { border-bottom: 1px solid #111; } td:nth-child(3), td:nth-child(4) { font-variant-numeric: tabular-nums; }
tr.outside td { font-weight: bold; } tr.outside td:last-child::before { content: "\\2717 "; }
.verdict { font-size: 1.1em; padding: .6em 1em; border: 2px solid #111; display: inline-block; }
figure { margin: 1.5em 0; } img { max-width: 100%; } pre { overflow-x: auto; }
"""


def write_html(report: Report, path: Path) -> None:
    """Write the page: verdict, table, layers, plots and pictures, what ran."""
    said = "Within the model's bounds" if report.within else "Outside the model's bounds"
    parts = [
        f"<h1>{_text(report.title)}</h1>",
        f'<p class="verdict">{said}</p>',
        "".join(f"<p>{_text(line)}</p>" for line in verdict(report)[:-1]),
        _table(HEADER, rows(report, per_layer=False)),
        "".join(f"<p>Bounds, {_text(s.title)}: {_text(s.why)}.</p>" for s in report.sections if s.why),
        *(_picture(name, file) for name, file in report.pictures.items()),
        "<h2>Every layer</h2>",
        _table(HEADER, (row for row in rows(report, per_layer=True) if row[1].startswith("error of layer"))),
        "<h2>What ran</h2>",
        _table(("fact", ""), ((name, str(value)) for name, value in report.facts.items())),
        _table(
            ("op", "back end", "device", "calls", "why"),
            ((d["op"], d["backend"], d["device"], str(d["calls"]), d["reason"]) for d in report.explain),
        ),
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(report.title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _text(value: str) -> str:
    return html.escape(value)


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    lines = [
        f"<tr{' class=outside' if 'OUTSIDE' in row else ''}>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>"
        for row in body
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>" if lines else ""


def _picture(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    alt = _text(name)
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"><figcaption>{alt}</figcaption></figure>'
