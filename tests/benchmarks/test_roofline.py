"""The roofline picture: its points are those of the file, and its words can be read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from xpu_ports.cli.main import main
from xpu_ports.common.bench import roofline
from xpu_ports.common.bench.case import parse_size
from xpu_ports.common.bench.files import ResultsError, read_results, write_lines
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.cards import CARDS, Roofs, card_of_driver

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", "b580"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "b60"),
        ("Intel(R) Arc(TM) A770 Graphics", "a770"),
        ("Intel(R) Data Center GPU Max 1550", "max1550"),
        ("Intel(R) Data Center GPU Max 1100", "max1100"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "lunar-lake"),
        ("NVIDIA H200", "h200"),
        ("AMD EPYC", None),
    ],
)
def test_cards_by_what_drivers_call_them(driver: str, name: str | None) -> None:
    assert card_of_driver(driver) is (None if name is None else CARDS[name])


def test_every_card_has_roofs_that_fit_together() -> None:
    """Matrix units are 5 to 20 times as fast as the rest; a FLOP a byte of 40 to 400 is where the two roofs meet."""
    for name, card in CARDS.items():
        assert card.roofs is not None, name
        assert card.roofs_source, name
        assert 5 < card.roofs.matrix / card.roofs.vector < 20, name
        assert 40 < card.roofs.matrix / card.roofs.memory < 420, name
    whole, stack = CARDS["max1550-card"].roofs, CARDS["max1550"].roofs
    assert whole is not None
    assert stack is not None
    assert whole.memory == 2 * stack.memory


def test_the_lowest_roof_counts() -> None:
    roofs = Roofs(memory=10.0, matrix=100.0, vector=20.0)
    assert roofs.floor(30, 100, 40) == 3.0
    assert roofs.floor(10, 400, 40) == 4.0
    assert roofs.floor(10, 100, 100) == 5.0


def test_points_are_computed_from_the_file() -> None:
    """Of a file without FLOPs of what is no product, which the formulas of the rows have."""
    results = read_results(H200 / "ops.jsonl")
    [point] = [p for p in roofline.points(results) if (p.case, p.size) == ("rms_norm", "T8192-N4096")]
    [record] = [r for r in results.ops if (r["case"], r["size"], r["variant"]) == (point.case, point.size, "triton")]
    assert "elementwise" not in record
    operations = 4 * 8192 * 4096
    assert point.seconds == record["graph"]["median"]
    assert point.intensity == operations / record["moved"]
    assert point.rate == operations / record["graph"]["median"]
    assert point.share == pytest.approx(record["moved"] / 4.8e12 / record["graph"]["median"])
    # The fastest of ours, not the reference, and no peer.
    assert {p.variant for p in roofline.points(results)} == {"triton"}


def test_what_is_wrong_or_someone_elses_is_no_point() -> None:
    results = read_results(H200 / "ops.jsonl")
    kept = roofline.fastest(results)
    for record in results.ops:
        record["within_budget"] = record["variant"] != "triton"
    assert {r["variant"] for r in roofline.fastest(results)} == {"reference"}
    assert len(kept) == len({(r["case"], r["size"]) for r in results.ops})


def all_rows(path: Path) -> Path:
    """A file with every row of the registry, all at 1e14 FLOP/s: labels that all want the same place near the top."""
    lines: list[dict[str, Any]] = [{"kind": "environment", "device": "NVIDIA H200", "versions": {"torch": "2.11"}}]
    for case in CASES.values():
        size = parse_size(case.sizes[0])
        seconds = (case.flops(size) + case.elementwise(size)) / 1e14
        timing = {"median": seconds, "low": seconds, "high": seconds}
        lines.append({"kind": "op", "case": case.name, "size": case.sizes[0], "dtype": "bfloat16", "moved": 1 << 20,
                      "variant": "triton", "ours": True, "within_budget": True, "graph": timing})  # fmt: skip
    write_lines(path, lines)
    return path


@pytest.mark.parametrize("name", ["ops", "ops-deepseek_v4", "all rows"])
def test_no_word_is_cut_and_none_lies_on_another(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = H200 / f"{name}.jsonl" if name != "all rows" else all_rows(tmp_path / "all.jsonl")
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figures = []
    figure_of = roofline._figure

    def kept(height: float):
        made = figure_of(height)
        figures.append(made)
        return made

    monkeypatch.setattr(roofline, "_figure", kept)
    roofline.plot_roofline(tmp_path / "x.png", read_results(path))
    [(figure, axis)] = figures
    renderer = FigureCanvasAgg(figure).get_renderer()
    labels = [t for t in axis.texts if t.get_text()]
    boxes = [t.get_window_extent(renderer) for t in [*labels, axis.title, axis._left_title, axis.xaxis.label]]
    column = [t.get_window_extent(renderer) for t in labels if t.get_transform() is axis.transAxes]
    assert len(column) == len({r["case"] for r in read_results(path).ops})
    for box in boxes:
        assert min(box.x0, box.y0) >= 0
        assert (box.x1, box.y1) <= (figure.bbox.x1, figure.bbox.y1)
        assert box.y1 <= figure.bbox.y1
    for i, a in enumerate(column):
        assert not any(a.overlaps(b) for b in column[i + 1 :])
    # Told apart without colour: a marker each.
    markers = [line.get_marker() for line in axis.lines if line.get_transform() is axis.transAxes]
    assert len(markers) == len(column)
    assert len(set(markers)) == min(len(column), len(roofline._MARKERS))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "x.png"
    assert main(["bench", "roofline", str(H200 / "ops-deepseek_v4.jsonl"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "25 points" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["model-zamba2-7b-b1.jsonl"], "no op with a time"),
        (["ops.jsonl", "--out", "x.pdf"], "expected a name that ends with .png"),
        (["nothing.jsonl"], "nothing.jsonl: no such file"),
    ],
    ids=["no-ops", "name", "no-file"],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roofline", str(H200 / arguments[0]), *arguments[1:]]) == 2
    assert why in capsys.readouterr().err


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "x.png"
    assert main(["bench", "roofline", str(H200 / "ops.jsonl"), "--out", str(out)]) == 2
    assert "pip install 'xpu-ports[report]'" in capsys.readouterr().err
    assert not out.exists()


def test_a_row_that_is_gone_is_left_out(tmp_path: Path) -> None:
    lines = [{"kind": "environment", "device": "a card", "versions": {}},
             {"kind": "op", "case": "gone", "size": "T1", "dtype": "bfloat16", "variant": "triton", "ours": True,
              "within_budget": True, "moved": 8, "graph": {"median": 1.0, "low": 1.0, "high": 1.0}}]  # fmt: skip
    write_lines(tmp_path / "x.jsonl", lines)
    assert "gone" not in CASES
    with pytest.raises(ResultsError, match="no op with a time, bytes and FLOPs"):
        roofline.points(read_results(tmp_path / "x.jsonl"))
