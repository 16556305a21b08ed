"""What is printed and written: it can be read back, and says nothing that was not measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from xpu_ports.cli.main import main
from xpu_ports.common.bench import environment as environment_module
from xpu_ports.common.bench import report
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.run import Result
from xpu_ports.common.bench.timing import Ceilings, Timing

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy=4e12, matmul=7e14, copy_bytes=1 << 30, matmul_side=8192)


def result(variant: str, median: float, *, ours: bool = False, error: float = 0.5, **fields: object) -> Result:
    eager = Timing(10 * median, 9 * median, 11 * median, 10, 9)
    graph = Timing(median, 0.9 * median, 1.1 * median, 10, 9)
    return Result(
        "norm", "T1-N8", "bfloat16", variant, ours, error=error, allowed=1.0, eager=eager, graph=graph,
        moved=4_000_000, floor=1e-6, **fields,
    )  # fmt: skip


@pytest.fixture
def group() -> list[Result]:
    return [
        result("triton", 2e-6, ours=True),
        result("slower", 5e-6),
        result("near", 2.1e-6),
        result("wrong", 5e-6, error=3.0, note="error 3.0e+00 exceeds the budget of 1.0e+00"),
        Result("norm", "T1-N8", "bfloat16", "away", False, missing=True, note="not installed: no module"),
        Result("norm", "T1-N8", "bfloat16", "broken", False, note="RuntimeError: no"),
    ]


def printed(group: list[Result]) -> dict[str, list[str]]:
    text = io.StringIO()
    Console(file=text, width=250).print(report.table("norm", [group]))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.getvalue().splitlines() if "│" in line]
    return {row[1]: row for row in rows} | {"caption": text.getvalue().splitlines()[-1:]}


def test_the_table_compares_what_can_be_compared(group: list[Result]):
    rows = printed(group)
    ratio = {name: row[7] for name, row in rows.items() if len(row) > 7}
    assert ratio == {"triton": "", "slower": "2.50x", "near": "same", "wrong": "not compared", "broken": ""}
    assert rows["triton"][2:7] == ["20.00 (18.00-22.00)", "2.00 (1.80-2.20)", "2000", "", "50%"]
    assert rows["triton"][8] == "5.0e-01/1.0e+00"
    assert rows["broken"][9] == "RuntimeError: no"
    assert "not here: away" in rows["caption"][0]


def test_nothing_is_compared_with_a_wrong_one_of_ours(group: list[Result]):
    group[0].error = 2.0
    assert printed(group)["slower"][7] == "not compared"
    (line,) = report.summary([group])
    assert "WRONG" in line


def test_the_summary_is_one_line_a_size(group: list[Result]):
    (line,) = report.summary([group])
    assert line.startswith("norm T1-N8: triton 2.00/20.0 2000GB/s 50% ok | slower 5.00/50.0 |")
    assert "away" not in line
    assert "broken [RuntimeError: no]" in line


def test_a_summary_without_ours_says_why():
    only = Result("norm", "T1-N8", "bfloat16", "triton", True, note="out of memory")
    assert report.summary([[only]]) == ["norm T1-N8 bfloat16: out of memory"]


def test_json_lines_can_be_read_back(group: list[Result]):
    head, ceilings, *rest = (
        json.loads(json.dumps(line)) for line in report.records(environment(CPU), CEILINGS, [group])
    )
    assert head["kind"] == "environment"
    assert head["versions"]["torch"] == torch.__version__
    assert {"python", "transformers"} <= set(head["versions"])
    assert head["device_type"] == "cpu"
    assert head["device"]
    assert ceilings == {"kind": "ceilings", "copy": 4e12, "matmul": 7e14, "copy_bytes": 1 << 30, "matmul_side": 8192}
    assert [r["variant"] for r in rest] == [r.variant for r in group]
    first = rest[0]
    assert first["graph"] == {"median": 2e-6, "low": 1.8e-6, "high": 2.2e-6, "calls": 10, "samples": 9}
    assert (first["bytes_per_second"], first["roof_share"], first["within_budget"]) == (2e12, 0.5, True)
    assert rest[-1]["roof_share"] is None


def test_the_revision_is_the_checkouts_or_the_environments(monkeypatch: pytest.MonkeyPatch):
    def no_git(*arguments: object) -> str:
        raise OSError("no git")

    environment_module.revision.cache_clear()
    monkeypatch.setattr(environment_module, "_git", no_git)
    monkeypatch.setenv(environment_module.REVISION, "abc123")
    assert environment_module.revision() == "abc123"
    environment_module.revision.cache_clear()
    answers = {"rev-parse": "0123456789ab", "status": " M common/device.py"}
    monkeypatch.setattr(environment_module, "_git", lambda folder, command, *rest: answers[command])
    assert environment_module.revision() == "0123456789ab+"
    environment_module.revision.cache_clear()


def test_the_picture_has_a_bar_for_each_share(group: list[Result], tmp_path: Path):
    pytest.importorskip("matplotlib")
    from xpu_ports.common.bench.plot import plot_roof_shares

    plot_roof_shares(tmp_path / "ops.png", [group, group], "a device")
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")


ARGUMENTS = ["bench", "ops", "rms_norm", "--device", "cpu", "--no-compile", "--sizes", "T2-N16,T3-N8"]


@pytest.fixture
def fixed_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ops", "run"):
        monkeypatch.setattr(f"xpu_ports.common.bench.{module}.measure_ceilings", lambda device: CEILINGS)


def test_the_command_prints_json_and_writes_files(
    fixed_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([*ARGUMENTS, "--json", "--out", str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours = [line for line in lines if line["kind"] == "op" and line["variant"] == "reference"]
    assert [line["size"] for line in ours] == ["T2-N16", "T3-N8"]
    assert all(line["within_budget"] for line in ours)
    written = (tmp_path / "out" / "ops.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written[2:]] == lines[2:]


def test_the_command_prints_a_table_that_ends_with_what_ran(fixed_ceilings: None, capsys: pytest.CaptureFixture[str]):
    assert main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert "T2-N16" in out
    assert "transformers" in out
    assert out.rstrip().splitlines()[-1].split()[:3] == ["rms_norm", "reference", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_nrm"], "did you mean 'rms_norm'"),
        (["rms_norm", "--sizes", "T1"], "does not have the letters"),
        (["rms_norm", "--sizes", "what"], "is not a size"),
        (["rms_norm", "--dtype", "int8"], "int8"),
    ],
)
def test_a_mistake_is_one_line(
    fixed_ceilings: None, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["bench", "ops", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
