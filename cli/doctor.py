"""`xpu-ports doctor`: what is installed, what is wrong with it, and what to do."""

from __future__ import annotations

import dataclasses
import sys

import typer

from xpu_ports.cli import _common, _facts
from xpu_ports.cli._checks import Finding, examine


def doctor(as_json: _common.JsonOption = False, verbose: _common.VerboseOption = False) -> None:
    """Check torch, Triton, the GPU and its driver, and say what to do about what is wrong.

    Compiles and runs a small kernel. Exit code 1 when a check fails.
    """
    facts = _facts.gather()
    findings = examine(facts)
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        _common.print_json(
            {
                "ok": not failed,
                "findings": [dataclasses.asdict(finding) for finding in findings],
                "facts": dataclasses.asdict(facts),
            }
        )
    else:
        show(findings)
        if verbose and facts.kernel is not None and facts.kernel.error is not None:
            print(facts.kernel.log, file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    """One line for each finding, with what to do beneath, and a summary."""
    from rich.table import Table
    from rich.text import Text

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        status = Text(finding.status, style=colors[finding.status])
        table.add_row(status, Text(finding.check), Text(finding.found))
        if finding.do:
            table.add_row("", "", Text(f"-> {finding.do}"))
    _common.print_rich(table)
    counts = {status: sum(f.status == status for f in findings) for status in colors}
    print(f"{len(findings)} findings: {counts['fail']} failed, {counts['warn']} to look at", file=sys.stderr)
