"""`xpu-ports warmup` and `xpu-ports bench model`, on a CPU: what they run, print and refuse."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from xpu_ports.cli.main import main
from xpu_ports.cli.warmup import _kernels

CHECKPOINT = "checkpoints/tiny-zamba2"


def test_warmup_says_that_a_cpu_compiles_nothing(capsys: pytest.CaptureFixture) -> None:
    assert main(["warmup", CHECKPOINT, "--device", "cpu", "--prompt", "5"]) == 0
    assert "0 kernels compiled" in capsys.readouterr().out


def test_warmup_as_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["warmup", CHECKPOINT, "--device", "cpu", "--prompt", "5,6", "--batch", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["batches"], result["prompts"], result["compiled"], result["cache"]) == ([2], [5, 6], 0, None)


def test_kernels_are_counted_by_what_triton_writes_last(tmp_path) -> None:
    for name in ("done", "started"):
        (tmp_path / name).mkdir()
    (tmp_path / "done" / "__grp___kernel.json").write_text("{}")
    (tmp_path / "started" / "kernel.ttir").write_text("")
    assert _kernels(tmp_path) == {tmp_path / "done"}


@pytest.mark.parametrize("value", ["x", "", "0", "1,-2", "1.5"])
@pytest.mark.parametrize("command", [["warmup", CHECKPOINT], ["bench", "model", "zamba2"]])
def test_bad_numbers(command: list[str], value: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*command, "--batch", value]) == 2
    error = capsys.readouterr().err
    assert f"--batch is {value!r}, expected positive numbers" in error
    assert "Traceback" not in error


def test_bench_model(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    # The default back end of torch.compile needs a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    command = ["bench", "model", "zamba2", "--checkpoint", CHECKPOINT, "--device", "cpu", "--dtype", "float32"]
    assert main([*command, "--prompt", "6", "--new", "8", "--compile", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "transformers" in out
    assert "mamba2_decode" in out
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["model"] == "zamba2"
    rates = {line["variant"]: line["decode_tokens_per_s"] for line in lines if "variant" in line}
    assert set(rates) == {"eager", "torch.compile", "transformers"}
    assert min(rates.values()) > 0


def test_bench_of_what_is_not_there(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "model", "zamba3"]) == 2
    assert "no port of model type 'zamba3'" in capsys.readouterr().err
    assert main(["bench", "model", "zamba2", "--layout", "3b", "--device", "cpu"]) == 2
    assert "no Zamba2 layout is named '3b'" in capsys.readouterr().err
