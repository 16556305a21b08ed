"""Figures, verdicts, plots and the page, on numbers made by hand; and the command around them."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.common.compare import command
from xpu_ports.common.compare.bounds import Bounds, Check
from xpu_ports.common.compare.figures import LogitFigures, Nll
from xpu_ports.common.compare.language import logit_checks
from xpu_ports.common.compare.layers import Culprit, LayerError, LayerErrors
from xpu_ports.common.compare.report import HEADER, Report, Section, rows, verdict
from xpu_ports.common.compare.spool import spool
from xpu_ports.common.compare.subject import Options

BOUNDS = Bounds("made up", logits=0.1, kl=0.01, top_1=0.9, perplexity=0.1)


def figures(offset: float = 0.0) -> LogitFigures:
    """130 tokens, more than are compared at once, 7 words; logits off by noise of a size."""
    made = LogitFigures()
    expected = torch.randn(130, 7)
    made.add(expected, expected + offset * torch.randn(130, 7), torch.randint(7, (130,)))
    return made


class TestFigures:
    def test_against_the_definitions(self) -> None:
        p, q, ids = torch.randn(130, 7), torch.randn(130, 7), torch.randint(7, (130,))
        made, nll = LogitFigures(), Nll()
        made.add(p, q, ids)
        nll.add(q, ids)
        log_p, log_q = (t.double().log_softmax(-1) for t in (p, q))
        assert made.kl.tolist() == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).tolist())
        assert made.largest == pytest.approx((p - q).abs().max().item())
        assert made.mean == pytest.approx((p - q).abs().mean().item())
        assert made.scale == pytest.approx(p.abs().max().item())
        assert made.top_1 == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        common = [
            len(set(a) & set(b)) for a, b in zip(p.topk(5).indices.tolist(), q.topk(5).indices.tolist(), strict=True)
        ]
        assert made.top_5 == pytest.approx(sum(common) / 650)
        expected = math.exp(-log_q[:-1].gather(1, ids[1:, None]).mean().item())
        assert made.perplexity == pytest.approx(expected)
        assert nll.perplexity == pytest.approx(expected)
        assert sum(made.histogram().values()) == 130 * 7

    def test_by_position_over_windows(self) -> None:
        made = LogitFigures()
        p = torch.randn(4, 7)
        made.add(p, p, torch.zeros(4, dtype=torch.int64))
        made.add(p, p.flip(1), torch.zeros(4, dtype=torch.int64))
        assert made.kl_by_position() == pytest.approx((made.kl[4:] / 2).tolist())

    def test_equal_and_not(self) -> None:
        assert all(check.within for check in logit_checks(figures(), BOUNDS))
        failed = {check.figure for check in logit_checks(figures(3.0), BOUNDS) if not check.within}
        assert "KL, mean" in failed
        assert "same likeliest token" in failed

    def test_nan_is_within_no_bound(self) -> None:
        made = LogitFigures()
        p = torch.randn(9, 7)
        q = p.clone()
        q[3, 2] = float("nan")
        made.add(p, q, torch.zeros(9, dtype=torch.int64))
        failed = {check.figure for check in logit_checks(made, BOUNDS) if not check.within}
        assert {"KL, mean", "logits, largest difference over largest logit"} <= failed
        assert not Check("x", float("nan"), 1.0).within
        assert not Check("x", float("nan"), 1.0, at_least=True).within

    def test_layers(self) -> None:
        """An error as a share of what the layer adds, beyond the rounding of the sum; a few tokens do not count."""
        x, expected = torch.zeros(1, 100, 8), torch.ones(1, 100, 8)
        got = 1.01 * expected
        got[0, :3] = 5.0
        errors = LayerErrors(0.02, {0: "kind"})
        errors.add(0, x, expected, got)
        errors.add_stream(0, expected, 1.5 * expected)
        [layer] = errors.finish()
        assert layer.error == pytest.approx(0.01)
        assert layer.largest == pytest.approx(4)
        assert layer.allowed == pytest.approx(0.02, rel=1e-4)
        assert layer.so_far == pytest.approx(0.5)
        assert layer.within
        # In bf16 a stream that is a hundred times what the layer adds is rounded by as much.
        errors = LayerErrors(0.02)
        stream = torch.full((1, 100, 8), 100.0)
        errors.add(0, stream.bfloat16(), (stream + 1).bfloat16(), (stream + 1).bfloat16())
        assert errors.finish()[0].allowed == pytest.approx(0.02 + 2 * 2**-8 * 101, rel=1e-3)

    def test_spool(self) -> None:
        with spool() as files:
            t = torch.randn(3, 5).bfloat16()
            kept = files.keep(t)
            assert torch.equal(kept, t)
            assert len(list(files.folder.iterdir())) == 1
            with pytest.raises(OSError, match="take fewer windows"):
                files.new((1 << 50,), torch.float32)
            folder = files.folder
        assert not folder.exists()


# -------------------------------------------------------------------------------------------------------------- report


def report(outside: bool = False) -> Report:
    layers = [LayerError(i, "mixer", 0.001 * (i + 1), 0.01, 0.02, 0.002 * (i + 1)) for i in range(4)]
    if outside:
        layers[2] = LayerError(2, "mixer", 0.5, 0.01, 0.7, 0.3)
    figure = figures(1e-3)
    beside = Section(
        "beside <that>", logit_checks(figure, BOUNDS), layers,
        Culprit(2, "mixer", "attn.o_proj", "input", 0.5, "attn.v_proj") if outside else None,
        kl_by_position=figure.kl_by_position(), histogram=figure.histogram(), why="made up",
    )  # fmt: skip
    steps = Section("latents", [Check("latents", float("inf"))], latents_by_step=[0.0, 0.01, 0.02])
    line = dict(op="rms_norm", backend="reference", device="cpu", reason="on the CPU", calls=3)
    return Report("A model", {"dtype": "bfloat16"}, [beside, steps], ["a note"], explain=[line])


class TestReport:
    def test_rows(self) -> None:
        few, all_of_them = list(rows(report(True), False)), list(rows(report(True), True))
        assert all(len(row) == len(HEADER) for row in few)
        [outside] = [row for row in few if row[-1] == "OUTSIDE"]
        assert outside[1] == "error of layer 2 (mixer), the first outside"
        assert outside[2:4] == ("0.5", "<= 0.01")
        assert len(all_of_them) == len(few) + 3
        assert "error of layer 3 (mixer), the largest" in [row[1] for row in rows(report(), False)]

    def test_verdict(self) -> None:
        assert verdict(report())[-1] == "within the model's bounds"
        lines = verdict(report(True))
        assert lines[-1] == "OUTSIDE the model's bounds"
        assert lines[1] == (
            "beside <that>: layer 2 (mixer): what reaches attn.o_proj is off by 5.0e-01, attn.v_proj before it is right"
        )

    @pytest.mark.parametrize("outside", [False, True])
    def test_files(self, outside: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        assert command.finish(report(outside), tmp_path, per_layer=False, as_json=False) == outside
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {"report.html", "accuracy.json", "layers.png", "kl.png", "differences.png", "latents.png"}
        page = (tmp_path / "report.html").read_text()
        # Self-contained: every picture is in it, and nothing points elsewhere.
        assert page.count("data:image/png;base64,") == 4
        assert not re.search(r'(?:src|href)="(?!data:)', page)
        assert "beside &lt;that&gt;" in page
        assert ("Outside the model" in page) == outside
        read = json.loads((tmp_path / "accuracy.json").read_text())
        assert read["within_bounds"] is not outside
        assert read["sections"][0]["first_layer_outside"] == (2 if outside else None)
        assert read["sections"][1]["checks"][0]["value"] == "inf"
        printed = capsys.readouterr().out
        assert printed.rstrip().endswith("on the CPU")
        assert ("OUTSIDE" in printed) == outside

    def test_json_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.finish(report(), None, per_layer=False, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["title"] == "A model"


class TestCommand:
    def test_options(self, capsys: pytest.CaptureFixture[str]) -> None:
        seen: list[Options] = []

        def compare(options: Options) -> Report:
            seen.append(options)
            return report(outside=True)

        arguments = ["ckpt", "--dtype", "float32", "--windows", "3", "--cache", "fp8", "--device", "cpu", "--json"]
        assert command.main(compare, "a model", arguments) == 1
        assert (seen[0].checkpoint, seen[0].windows, seen[0].cache) == ("ckpt", 3, "fp8")
        assert seen[0].dtype is torch.float32
        assert seen[0].device == torch.device("cpu")
        with pytest.raises(SystemExit):
            command.main(compare, "a model", ["ckpt", "--windows", "0"])

    def test_a_mistake_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        def compare(options: Options) -> Report:
            raise ValueError("no such\nthing")

        assert command.main(compare, "a model", ["ckpt", "--device", "cpu"]) == 2
        assert capsys.readouterr().err == "a model: no such thing\n"

    def test_plots_without_matplotlib(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Said before a model runs, and only where plots are asked for."""
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        run: Any = lambda options: report()  # noqa: E731
        out = tmp_path / "out"
        assert command.main(run, "a model", ["ckpt", "--device", "cpu", "--out", str(out)]) == 2
        assert "pip install 'xpu-ports[report]'" in capsys.readouterr().err
        assert not out.exists()
        assert command.main(run, "a model", ["ckpt", "--device", "cpu"]) == 0

    @pytest.mark.parametrize("name", ["zamba2", "kimi_linear", "deepseek_v4", "flux2"])
    def test_every_model_has_its_own(self, name: str) -> None:
        if name == "flux2":
            pytest.importorskip("diffusers", reason="diffusers is not installed")
        module = importlib.import_module(f"xpu_ports.models.{name}.accuracy")
        assert {"float32", "bfloat16"} <= module.BOUNDS.keys()
        assert all(len(bounds.why) > 20 for bounds in module.BOUNDS.values())
        assert callable(module.compare)
