"""`xpu-ports accuracy` as a command: what it prints, writes and returns."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from xpu_ports.cli.main import main

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
HELDOUT = Path(__file__).parents[1] / "data" / "heldout.txt"
SHORT = ["--window", "48", "--windows", "2", "--steps", "4", "--device", "cpu"]


def test_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = tmp_path / "report"
    arguments = ["accuracy", str(CHECKPOINTS / "tiny-zamba2"), "--text", str(HELDOUT), "--per-layer", "--out", str(out)]
    assert main([*arguments, *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "within the model's bounds" in printed
    assert "error of layer 7 (linear_attention)" in printed
    # It ends with what ran.
    assert printed.rstrip().splitlines()[-1].split()[1] in ("reference", "layers")
    result = json.loads((out / "accuracy.json").read_text())
    assert result["within_bounds"]
    assert (result["tokens"], result["windows"]) == (96, 2)
    assert {p.suffix for p in out.iterdir()} == {".html", ".json", ".png"}
    assert (out / "report.html").stat().st_size > 50_000


def test_the_models_own_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures, without the package's command line."""
    name = "xpu_ports.models.kimi_linear.accuracy"
    monkeypatch.setattr(sys, "argv", [name, str(CHECKPOINTS / "tiny-kimi-linear"), *SHORT, "--json"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module(name, run_name="__main__")
    result = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0, result["sections"]
    assert (result["model_type"], result["dtype"]) == ("kimi_linear", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["tiny-kimi-linear", "--cache", "fp8"], "KimiLinearForCausalLM has no such cache"),
        (["tiny-deepseek-v4", "--cache", "fp8", "--quant", "mxfp4"], "two things at once"),
        (["tiny-deepseek-v4", "--dtype", "float16"], "states bounds for float32, bfloat16"),
        (["tiny-zamba2", "--reference", "diffusers"], "for pictures"),
        (["tiny-flux2", "--reference", "transformers"], "for language models"),
        (["tiny-flux2", "--cache", "fp8"], "FLUX.2 has none"),
        (["tiny-nothing"], "no such folder"),
    ],
    ids=["cache", "both", "dtype", "diffusers", "transformers", "pictures", "folder"],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[0] == "tiny-flux2":
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    name, *options = arguments
    assert main(["accuracy", str(CHECKPOINTS / name), *options, "--device", "cpu"]) == 2
    assert why in capsys.readouterr().err
