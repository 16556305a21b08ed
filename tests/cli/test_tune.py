"""`xpu-ports tune` on a CPU: what it lists, refuses, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.cli import tune_kernels as module
from xpu_ports.common import tritonlib, tuning
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.bench.timing import Timing
from xpu_ports.common.bench.tune import Item, Job, Outcome
from xpu_ports.common.kernels.rms_norm import RowTile, tile

CHECKPOINT = "checkpoints/tiny-zamba2"
with_triton = pytest.mark.skipif(not tritonlib.AVAILABLE, reason="launches are Triton's")


@pytest.fixture(autouse=True)
def _as_on_xe2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures are kept by device in a process: the listing is made for the CPU's unless it is named here."""
    from xpu_ports.common.device import ARCHITECTURES

    monkeypatch.setattr("xpu_ports.common.device.architecture", lambda device: ARCHITECTURES["xe2"])


@with_triton
def test_without_a_gpu_there_is_nothing_to_measure_on(mistake: Callable) -> None:
    assert "no GPU here to measure on; --dry-run lists" in mistake("tune", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rms_nrm"], "no tile of 'rms_nrm' to tune; did you mean 'rms_norm'"),
        (["--layout", "1.2b"], "say which with --model"),
        (["--model", "zamba2", "--checkpoint", CHECKPOINT], "give one"),
        (["--model", "zamba3"], "'zamba3', expected one that there is a port for"),
        (["--model", "zamba2", "--layout", "3b"], "no Zamba2 layout is named '3b'"),
        (["--checkpoint", "./nowhere"], "./nowhere: no such folder"),
        (["--batch", "0"], "--batch is '0'"),
    ],
    ids=["name", "layout", "both", "model", "no-layout", "checkpoint", "batch"],
)
@with_triton
def test_mistakes(mistake: Callable, arguments: list[str], words: str) -> None:
    assert words in mistake("tune", "--device", "cpu", "--dry-run", *arguments)


@with_triton
def test_a_dry_run_lists_the_registry(cli: Callable) -> None:
    outcome = cli("tune", "linear", "rms_norm", "--device", "cpu", "--dry-run")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["kernel", "sizes", "tiles", "measured", "on"]
    (line,) = (line for line in lines if "N=32000" in line and "M=1 " in line)
    assert line.startswith("skinny_linear")
    assert line.endswith("linear T1-N32000-K2048")
    assert lines[-1].endswith("tiles to measure on the architecture xe2")
    assert {line.split()[0] for line in lines[1:-1]} == {"skinny_linear", "rms_norm"}


@with_triton
@pytest.mark.parametrize("named", [["--checkpoint", CHECKPOINT], ["--model", "zamba2", "--layout", "1.2b"]], ids=len)
def test_a_dry_run_finds_what_a_model_calls(cli: Callable, named: list[str]) -> None:
    outcome = cli("tune", "--device", "cpu", "--dry-run", "--json", "--dtype", "float32", *named)
    assert outcome.code == 0, outcome.err
    listed = json.loads(outcome.out)
    assert listed["architecture"] == "xe2"
    kernels = {job["kernel"] for job in listed["jobs"]}
    assert {"skinny_linear", "mamba2_decode_step", "gated_rms_norm", "rms_norm"} <= kernels
    # As narrow as the checkpoint's layers are, it has one tile alone on Intel GPUs.
    assert ("mamba2_decode_linear" in kernels) == ("--layout" in named)
    assert all(job["tiles"] > 1 and job["on"] for job in listed["jobs"])
    assert all("itemsize=4" in job["sizes"] for job in listed["jobs"] if "itemsize" in job["sizes"])


# --------------------------------------------------------------------------------------------------------- measuring

FEW, MANY = (64, False, True), (64, False, False)
ITEM = Item(CASES["rms_norm"], "T3-N64")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs the command's body with outcomes that are made up, into a file; gives what it prints."""
    path = tmp_path / "tuned.json"

    def times(median: float) -> Timing:
        return Timing(1e-6 * median, 0.9e-6 * median, 1.1e-6 * median, 10, 20)

    def outcomes(*args: Any) -> list[Outcome]:
        won = RowTile(2, 64, 1)
        return [
            Outcome(Job(tile, FEW, [ITEM]), won, won, {ITEM.name: (times(3), times(2))}, ["block_m=4: error 1e-1"]),
            Outcome(Job(tile, MANY, [ITEM]), None, won, {ITEM.name: (times(3), times(2.9))}),
            Outcome(Job(tile, (64, True, True), [ITEM]), measured=False, late=True),
        ]

    monkeypatch.setattr(module, "tune", outcomes)
    monkeypatch.setattr(module, "find_jobs", lambda *args: [])

    def run(capsys: pytest.CaptureFixture, **options: Any) -> str:
        module.tune_kernels([], [], torch.device("cpu"), torch.float32, out=path, **options)
        return capsys.readouterr().out

    return run


def test_before_and_after_are_shown(measured: Callable, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    lines = measured(capsys).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "kernel sizes built-in us best us best tile measured on",
        "rms_norm N=64 add=False few=True 3.00 (2.70-3.30) 2.00 (1.80-2.20) 1.50x block_m=2 block_n=64 warps=1 "
        "rms_norm T3-N64",
        "rms_norm N=64 add=False few=False 3.00 (2.70-3.30) 2.90 (2.61-3.19) built-in stays block_m=2 block_n=64 "
        "warps=1 rms_norm T3-N64",
        "rms_norm N=64 add=False few=True: block_m=4: error 1e-1",
        "1 launches were not measured: the time was up",
        f"1 of 2 launches are faster with another tile: {tmp_path / 'tuned.json'}",
    ]


def test_only_what_won_is_written(measured: Callable, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    measured(capsys)
    (entry,) = tuning.read(tmp_path / "tuned.json").entries
    assert entry.sizes == {"N": 64, "add": False, "few": True}
    assert entry.tile == {"block_m": 2, "block_n": 64, "warps": 1}
    assert entry.measured == {ITEM.name: (3.0, 2.0)}


def test_a_table_that_does_not_count_is_written_anew(
    measured: Callable, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of this machine keeps its other entries."""
    path = tmp_path / "tuned.json"
    other = tuning.to_entry(tile, (128, False, True), RowTile(1, 128, 1), {})
    for triton, entries in (("2.1", 1), (tuning.triton_version(), 2)):
        table = tuning.Table("xe2", "card", triton, (other,))
        tuning.write(path, table)
        monkeypatch.setattr(tuning, "device_names", lambda name: {"card"})
        monkeypatch.setattr(module, "architecture", lambda device: tuning.ARCHITECTURES["xe2"])
        measured(capsys)
        assert len(tuning.read(path).entries) == entries
    path.write_text("{")
    measured(capsys)
    assert len(tuning.read(path).entries) == 1


def test_json(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    won, stays, unmeasured = json.loads(measured(capsys, as_json=True))["outcomes"]
    assert won["written"] == won["best"] == {"block_m": 2, "block_n": 64, "warps": 1}
    assert won["seconds"][ITEM.name]["built_in"]["median"] == 3e-6
    assert stays["written"] is None
    assert (unmeasured["late"], unmeasured["seconds"]) == (True, {})
