"""Judges what was seen of the kernels, and writes the table of docs/xpu_conformance.md.

python -m xpu_offline.report OBSERVATIONS... --markdown docs/xpu_conformance.md --json docs/xpu_conformance.json
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import json
import pathlib
import sys
import tomllib
from collections.abc import Iterable
from typing import Any

from xpu_offline.kernels import ROOT, entry_kernels, source_files

ALLOWANCES = pathlib.Path(__file__).with_name("allowances.toml")
Row = dict[str, Any]

# Architecture: (the name in the table, the device whose native code stands for it, bytes of shared memory).
DEVICES = {
    "max": ("Max", "pvc", 128 * 1024),
    "xe2": ("Xe2", "pvc", 128 * 1024),
    "arc-a": ("Arc A", "acm-g10", 64 * 1024),
}
# Architectures whose spills fail the check.
NO_SPILLS = ("max", "xe2")


def merge(observations: Iterable[list[Row]]) -> list[Row]:
    """The rows of several runs as one row a kernel and architecture."""
    merged: dict[tuple[str, str], Row] = {}
    for row in (row for rows in observations for row in rows):
        into = merged.setdefault((row["kernel"], row["architecture"]), copy.deepcopy(row))
        if into == row:
            continue
        into["launches"] += row["launches"]
        into["codes"] += row["codes"]
        for key in ("shared", "dpas", "block_read"):
            into[key] = max(into[key], row[key])
        for where in ("model", "tests"):
            found = [s for s in (into["spills"][where], row["spills"][where]) if s is not None]
            into["spills"][where] = max(found, default=None)
            both = {**into["spilling"][where], **row["spilling"][where]}
            into["spilling"][where] = dict(sorted(both.items(), key=lambda item: -item[1]))
        for key in ("grf", "simd", "undefined", "failures"):
            into[key] = sorted({*into[key], *row[key]})
        into["error"] = max((e for e in (into["error"], row["error"]) if e), key=share, default=None)
    order = list(DEVICES)
    return [merged[key] for key in sorted(merged, key=lambda key: (key[0], order.index(key[1])))]


def share(error: list[float]) -> float:
    """How much of what is allowed an error uses."""
    largest, allowed = error
    return largest / allowed if allowed else float(largest > 0)


def problems(rows: list[Row], kernels: list[str], allowances: dict[str, Any]) -> list[str]:
    """What fails the check, in words; an allowance that is not needed fails it too.

    Args:
        rows: merged observations.
        kernels: every kernel that has to be among them.
        allowances: as read from allowances.toml.
    """
    found = []
    seen = {(row["kernel"], row["architecture"]): row for row in rows}
    for kernel in kernels:
        for architecture in DEVICES:
            row = seen.get((kernel, architecture))
            if row is None or (not row["launches"] and not row["failures"]):
                missing = {"kernel": kernel, "architecture": architecture}
                if not any(_applies(a, missing) for a in allowances.get("unlaunched", [])):
                    found.append(f"{kernel}: no test launched it on {architecture}")
            else:
                found += _row_problems(row, allowances)
    found += [f"{row['kernel']}: launched, but not found in the source" for row in rows if row["kernel"] not in kernels]
    return [*dict.fromkeys(found), *_unused(rows, allowances)]


def _row_problems(row: Row, allowances: dict[str, Any]) -> list[str]:
    where = f"{row['kernel']} on {row['architecture']}"
    found = [f"{where}: {failure}" for failure in row["failures"]]
    limit = DEVICES[row["architecture"]][2]
    if row["shared"] > limit:
        found.append(f"{where}: {row['shared']} bytes of shared memory, the device has {limit}")
    if row["error"] is None and not row["failures"]:
        found.append(f"{where}: launched, but never compared with its oracle")
    elif row["error"] is not None and row["error"][0] > row["error"][1]:
        found.append(f"{where}: error {row['error'][0]:.2e}, allowed {row['error'][1]:.2e}")
    allowed = max((a["spills"] for a in allowances.get("spills", []) if _applies(a, row)), default=0)
    where_judged, spills = judged_spills(row)
    if row["architecture"] in NO_SPILLS and spills > allowed:
        worst = row["spilling"][where_judged].items()
        launches = (f"\n    {n}: {launch}" for launch, n in worst if n > allowed)
        found.append(f"{where}: spills {spills}, allowed {allowed}{''.join(launches)}")
    known = [u["symbol"] for u in allowances.get("undefined", [])]
    for symbol in row["undefined"]:
        if not any(fnmatch.fnmatch(symbol, pattern) for pattern in known):
            found.append(f"{where}: {symbol} is not resolved by ocloc, and not known to be missing in it")
    return found


def judged_spills(row: Row) -> tuple[str, int]:
    """("model" or "tests", the most that spills there): at the sizes of models, or of tests for want of those.

    Tests have sizes that no model has, rows of 61 elements and strides of 5; there every element has an address and a
    mask of its own in registers.
    """
    where = "tests" if row["spills"]["model"] is None else "model"
    return where, row["spills"][where] or 0


def _applies(allowance: dict[str, Any], row: Row) -> bool:
    return allowance["kernel"] == row["kernel"] and row["architecture"] in allowance["architectures"]


def _unused(rows: list[Row], allowances: dict[str, Any]) -> list[str]:
    found = []
    for a in allowances.get("spills", []):
        worst = max((judged_spills(row)[1] for row in rows if _applies(a, row)), default=0)
        if worst < a["spills"]:
            found.append(f"allowances.toml: {a['kernel']} may spill {a['spills']} and spills {worst}: lower it")
    for a in allowances.get("unlaunched", []):
        launched = [row["architecture"] for row in rows if _applies(a, row) and row["launches"]]
        found += [f"allowances.toml: {a['kernel']} is launched on {name}: take it out" for name in launched]
    return found


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| kernel | architecture | compiled | DPAS | 2D | GRF | spills: models / tests | shared | error / allowed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, device, _ = DEVICES[row["architecture"]]
        compiled = "**no**" if row["failures"] else f"{row['codes']} codes, {device}"
        unresolved = " (unresolved)" if row["undefined"] else ""
        cells = [
            f"`{row['kernel']}`",
            name,
            compiled + unresolved,
            "yes" if row["dpas"] else "-",
            "yes" if row["block_read"] else "-",
            ", ".join(map(str, row["grf"])) or "-",
            " / ".join("-" if n is None else str(n) for n in row["spills"].values()),
            f"{row['shared']} B",
            "-" if row["error"] is None else f"{row['error'][0]:.1e} / {row['error'][1]:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


_HEAD = """# XPU conformance

Written by `make xpu-check`; do not edit. [xpu_offline.md](xpu_offline.md) says what the columns mean and prove.

"""


def main(arguments: list[str]) -> int:
    """Write the reports; 0 if nothing fails the check, otherwise 1 with what does."""
    parser = argparse.ArgumentParser(prog="python -m xpu_offline.report", description=__doc__.splitlines()[0])
    parser.add_argument("observations", nargs="+", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--source", nargs="+", type=pathlib.Path, help="where the kernels are, instead of the project")
    parser.add_argument("--root", default=ROOT, type=pathlib.Path, help="what the modules' names are relative to")
    options = parser.parse_args(arguments)
    rows = merge(json.loads(path.read_text()) for path in options.observations)
    kernels = entry_kernels(options.source or source_files(), options.root)
    allowances = {} if options.source else tomllib.loads(ALLOWANCES.read_text())
    found = problems(rows, kernels, allowances)
    if options.markdown:
        options.markdown.write_text(_HEAD + table(rows) + "\n")
    if options.json:
        options.json.write_text(json.dumps({"kernels": rows, "problems": found}, indent=1) + "\n")
    for problem in found:
        print(f"FAIL {problem}")
    print(f"{len({row['kernel'] for row in rows})} kernels on {len(DEVICES)} architectures, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
