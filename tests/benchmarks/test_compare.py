"""Result files side by side: what changed, against both spreads; and what is wrong with a file, by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xpu_ports.cli.main import main
from xpu_ports.common.bench.compare import FASTER, LOST, ONLY_A, ONLY_B, SLOWER, SPREAD, WRONG, compare
from xpu_ports.common.bench.files import Results, ResultsError, read_results, write_lines

COMMITTED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").rglob("*.jsonl"))
H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
ENVIRONMENT = {
    "kind": "environment", "device": "a card", "device_type": "xpu", "driver": "1", "revision": "abc", "platform": "p",
    "time": "2026-01-01T00:00:00+00:00", "versions": {"torch": "2.11", "triton": "3.6"},
}  # fmt: skip


def op(size: str = "T1-N8", median: float | None = 1e-3, **fields: Any) -> dict[str, Any]:
    """A line of an op whose spread is 2% to each side."""
    timing = None if median is None else {"median": median, "low": 0.98 * median, "high": 1.02 * median}
    line = {"case": "rms_norm", "size": size, "dtype": "bfloat16", "variant": "triton", "ours": True}
    return {"kind": "op", **line, "within_budget": True, "graph": timing, "eager": None, "note": "", **fields}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, *lines: dict[str, Any], **environment: Any) -> Path:
        write_lines(tmp_path / name, [{**ENVIRONMENT, **environment}, *lines])
        return tmp_path / name

    return write


@pytest.fixture
def verdict(write: Write) -> Callable[..., str]:
    def verdict(a: dict[str, Any], b: dict[str, Any], threshold: float = 0.05) -> str:
        [row] = compare(read_results(write("a", a)), read_results(write("b", b)), threshold)
        return row.verdict

    return verdict


@pytest.mark.parametrize(
    ("median", "threshold", "expected"),
    [
        (1.2e-3, 0.05, SLOWER),
        (0.8e-3, 0.05, FASTER),
        # The spreads meet, whatever the threshold.
        (1.03e-3, 0.0, SPREAD),
        (0.97e-3, 0.0, SPREAD),
        # They do not, but it is not much; or it is, for one who asks for less.
        (1.045e-3, 0.05, "within 5%"),
        (1.045e-3, 0.01, SLOWER),
        (0.955e-3, 0.05, "within 5%"),
        (1.2e-3, 0.5, "within 50%"),
    ],
)
def test_verdicts(verdict: Callable[..., str], median: float, threshold: float, expected: str) -> None:
    assert verdict(op(), op(median=median), threshold) == expected


def test_a_wide_spread_of_either_hides_a_difference(verdict: Callable[..., str]) -> None:
    wide = {"median": 1.5e-3, "low": 1.0e-3, "high": 2e-3}
    assert verdict(op(), op(graph=wide)) == SPREAD
    assert verdict(op(graph=wide), op()) == SPREAD


def test_what_was_lost_and_what_became_wrong(write: Write) -> None:
    broken = op(median=None, note="out of memory", within_budget=False)
    a = read_results(write("a", op("T1-N8"), op("T2-N8"), op("T3-N8"), op("T4-N8", None, note="no"), op("T5-N8")))
    b = read_results(
        write("b", {**broken, "size": "T1-N8"}, op("T2-N8", within_budget=False), op("T4-N8", None), op("T6-N8"))
    )
    verdicts = {(dict(row.either.key)["size"], dict(row.either.key)["what"]): row.verdict for row in compare(a, b)}
    assert verdicts == {
        ("T1-N8", "graph"): LOST,
        ("T2-N8", "graph"): WRONG,
        ("T3-N8", "graph"): ONLY_A,
        ("T5-N8", "graph"): ONLY_A,
        ("T6-N8", "graph"): ONLY_B,
    }
    assert [row.regression for row in compare(a, b)] == [True, True, False, False, False]


def test_rates_are_better_when_larger_and_older_files_have_no_spread_of_the_prefill(write: Write) -> None:
    header = {"kind": "model", "model": "zamba2", "layout": "somewhere/1.2b", "dtype": "bfloat16"}
    line = {"variant": "captured", "batch": 1, "prompt": 128, "prefill_tokens_per_s": 1000.0,
            "decode_tokens_per_s": 100.0, "decode_low": 99.0, "decode_high": 101.0}  # fmt: skip
    slow = {**line, "kind": "generate", "decode_tokens_per_s": 80.0, "decode_low": 79.0, "decode_high": 81.0,
            "prefill_tokens_per_s": 2000.0, "prefill_low": 900.0, "prefill_high": 2100.0}  # fmt: skip
    a = read_results(write("a", line, {"explain": {}}, **header))
    b = read_results(write("b", slow, **{**header, "layout": "elsewhere/1.2b"}))
    rows = {dict(row.either.key)["what"]: row for row in compare(a, b)}
    assert (rows["decode"].verdict, rows["decode"].gain) == (SLOWER, pytest.approx(0.8))
    assert rows["prefill"].verdict == SPREAD


def test_peers_do_not_count(write: Write) -> None:
    peer = {"variant": "vllm", "ours": False}
    a, b = write("a", op(**peer), op()), write("b", op(median=2e-3, **peer), op())
    [theirs, ours] = compare(read_results(a), read_results(b))
    assert (theirs.verdict, theirs.regression, ours.verdict) == (SLOWER, False, SPREAD)
    assert main(["bench", "compare", str(a), str(b)]) == 0


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_results_can_be_compared(path: Path) -> None:
    results = read_results(path)
    rows = compare(results, results)
    assert {row.verdict for row in rows} <= {SPREAD}
    assert len(rows) >= (3 if path.parent.name == "h200" else 0)
    assert rows or results.left_out


def test_a_slower_committed_result_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of the many, a tenth slower; through the command, as JSON and as a table."""
    lines = [json.loads(line) for line in (H200 / "ops.jsonl").read_text().splitlines()]
    planted = next(x for x in lines if x.get("case") == "ssd_chunk_scan" and x["variant"] == "triton")
    planted["graph"] = {name: 1.1 * value for name, value in planted["graph"].items()}
    write_lines(tmp_path / "b.jsonl", lines)
    command = ["bench", "compare", str(H200 / "ops.jsonl"), str(tmp_path / "b.jsonl")]
    assert main([*command, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    [row] = [row for row in result["rows"] if row["regression"]]
    assert (row["op"], row["size"], row["variant"], row["what"]) == (
        "ssd_chunk_scan",
        planted["size"],
        "triton",
        "graph",
    )
    assert row["gain"] == pytest.approx(1 / 1.1)
    assert (result["regressions"], result["same_device"], result["a"]["versions"]["torch"]) == (1, True, "2.11.0+cu130")
    assert main([*command, "--changed"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("NVIDIA H200") == 2
    assert "slower" in printed
    assert "1 of ours stepped back" in printed
    assert "rms_norm" not in printed
    assert main([*command, "--threshold", "11"]) == 0
    assert main([*command, "--only", "call"]) == 0
    assert main([*command, "--only", "ssd_chunk_scan"]) == 1
    assert main([*command, "--only", "ssd_chunk"]) == 2
    assert "no row of" in capsys.readouterr().err
    assert main(["bench", "compare", command[3], command[2]]) == 0
    assert "1 faster" in capsys.readouterr().out


def test_versions_are_shown(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    b = write("b", op(), driver="2", versions={"torch": "2.12", "triton": "3.6", "vllm": "1"})
    assert main(["bench", "compare", str(write("a", op())), str(b)]) == 0
    printed = capsys.readouterr().out
    for part in ("driver 1 -> 2", "torch 2.11 -> 2.12", "vllm not installed -> 1"):
        assert part in printed
    assert "triton 3.6 ->" not in printed


def test_different_devices(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "compare", str(write("a", op())), str(write("b", op(median=1.0), device="another"))]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "measured on a card" in error
    assert "another" in error
    assert main([*command, "--across-devices"]) == 0
    printed = capsys.readouterr().out
    assert "WARNING: different devices, a card and another" in printed
    assert "slower" in printed
    assert "stepped back" not in printed
    assert main([*command, "--across-devices", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["same_device"], result["regressions"], result["rows"][0]["regression"]) == (False, 0, False)


def test_nothing_in_common(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", str(write("a", op("T1-N8"))), str(write("b", op("T2-N8")))]) == 2
    assert "no row is in both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "where", "why"),
    [
        ('{"kind": "op", "case"', ":3", "not JSON"),
        ("[1, 2]", ":3", "expected an object"),
        (json.dumps({**op(), "graph": {"median": 1.0, "low": 1.0}}), ":3: graph", "high is missing among median, low"),
        (json.dumps({**op(), "graph": {"median": -1.0, "low": 1, "high": 1}}), ":3: graph", "median is -1.0"),
        (json.dumps({**op(), "graph": {"median": float("nan"), "low": 1, "high": 1}}), ":3: graph", "median is nan"),
        (json.dumps({**op(), "graph": 5}), ":3", "graph is 5, expected median, low and high"),
        (json.dumps({k: v for k, v in op().items() if k != "size"}), ":3", "size is missing"),
        (json.dumps(op()), ":3", ":2 already"),
        (json.dumps({"kind": "prediction"}), ":3", "a prediction, expected measurements"),
    ],
    ids=["cut", "list", "no-high", "negative", "nan", "number", "no-size", "twice", "prediction"],
)
def test_a_broken_line_is_named(
    write: Write, line: str, where: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("broken.jsonl", op())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ResultsError) as error:
        read_results(path)
    assert f"{path}{where}" in str(error.value)
    assert why in str(error.value)
    assert main(["bench", "compare", str(path), str(path)]) == 2
    assert f"{path}{where}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "no lines"), (json.dumps(op()), ":1: the first line has kind, case"), ("\xff", "not")],
    ids=["empty", "no-environment", "no-text"],
)
def test_files_of_another_kind(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(ResultsError, match=why):
        read_results(tmp_path / "x.jsonl")


def test_lines_of_other_kinds_are_counted(write: Write) -> None:
    results: Results = read_results(write("a", {"kind": "accuracy"}, {"kind": "accuracy"}, {"kind": "explain"}, op()))
    assert results.left_out == {"accuracy": 2}
    assert [m.median for m in results.measurements] == [1e-3, None]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    write_lines(path, [{"a": 1}])

    def lines():
        yield {"a": 2}
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        write_lines(path, lines())
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]
