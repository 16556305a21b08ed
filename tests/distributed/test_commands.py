"""Commands under torchrun: the text of one process, printed once, and errors that say whose they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import torchrun
from xpu_ports.cli import _common
from xpu_ports.cli.main import main

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-kimi-linear"
ARGUMENTS = ("generate", CHECKPOINT, "And God said", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", 12)


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    done = torchrun(2, "-m", "xpu_ports.cli", *ARGUMENTS, "--explain")
    assert done.returncode == 0, done.stderr[-3000:]
    assert main([str(a) for a in ARGUMENTS]) == 0
    assert done.stdout == capsys.readouterr().out
    assert done.stderr.count("prefill: ") == 1
    assert done.stderr.count("experts 0 to 4 of 8") == 1


@pytest.mark.full
def test_accuracy() -> None:
    command = "accuracy", CHECKPOINT, "--window", 48, "--windows", 1, "--steps", 4, "--dtype", "float32", "--json"
    done = torchrun(2, "-m", "xpu_ports.cli", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)


@pytest.mark.full
def test_bench() -> None:
    command = "bench", "model", "kimi_linear", "--checkpoint", CHECKPOINT, "--prompt", 8, "--new", 12, "--json"
    done = torchrun(2, "-m", "xpu_ports.cli", *command)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["variant"] for line in lines if "variant" in line] == ["eager"]
    assert any("divided among 2 ranks" in line.get("note", "") for line in lines)


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


def test_errors_say_whose_they_are(second_of_two: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "And"]) == 2
    assert capsys.readouterr().err.startswith(f"xpu-ports: rank 1 of 2: {tmp_path}: not a checkpoint")
    assert main(["generate", str(CHECKPOINT), "And", "--device", "cuda:0"]) == 2
    assert "each of 2 processes has a device of its own" in capsys.readouterr().err
    assert main(["accuracy", str(CHECKPOINT), "--quant", "mxfp4"]) == 2
    assert "convert the checkpoint" in capsys.readouterr().err


def test_the_second_is_silent_but_for_errors(second_of_two: None, capsys: pytest.CaptureFixture[str]) -> None:
    with _common.first_rank_speaks():
        print("text")
        print("speed", file=sys.stderr)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ValueError, match="whole"), _common.first_rank_speaks():
        raise ValueError("whole")
    print("after", file=sys.stderr)
    assert capsys.readouterr().err == "after\n"


def test_the_first_speaks(
    second_of_two: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with _common.first_rank_speaks():
        print("text")
    assert capsys.readouterr().out == "text\n"
