"""Tuning: which tiles are measured on what, which of them wins, and that a wrong one never does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.common import tritonlib, tuning
from xpu_ports.common.bench import run as run_module
from xpu_ports.common.bench import tune as module
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.bench.run import Result
from xpu_ports.common.bench.timing import Ceilings, Plan, Timing
from xpu_ports.common.bench.tune import BUILT_IN, Item, Job, Outcome, choose, describe, find_jobs, to_table, tune
from xpu_ports.common.device import ARCHITECTURES
from xpu_ports.common.kernels.rms_norm import RowTile, tile
from xpu_ports.common.tuning import Table

CPU = torch.device("cpu")
ARCH = ARCHITECTURES["cpu"]
SHORT = Plan(sample=1e-9, samples=2, budget=1.0)
NORM = Item(CASES["rms_norm"], "T3-N64")
FAST, FASTER = RowTile(2, 64, 1), RowTile(4, 64, 1)
interpreted = pytest.mark.skipif(not tritonlib.INTERPRETED, reason="kernels run in Triton's interpreter")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[RowTile, float]], None]:
    """Runs what is timed, and says that it took what the tile in force is said to take; 1 s where nothing is."""
    monkeypatch.setattr(run_module, "measure_ceilings", lambda device: Ceilings(1e9, 1e12, 1, 1))
    monkeypatch.setattr(run_module, "MOST_INPUT_SETS", 2)
    # The kernels' own choice is long.
    monkeypatch.setattr(tile, "candidates", lambda *sizes: [FAST, FASTER])
    seconds: dict[RowTile, float] = {}

    class FakeStopwatch:
        def __init__(self, device: torch.device) -> None:
            pass

        def __call__(self, run: Callable[[], Any], ahead: bool = False) -> float:
            run()
            return seconds.get(tile(ARCH, 64, False, True), 1.0)

    monkeypatch.setattr(run_module, "Stopwatch", FakeStopwatch)
    return seconds.update


def the_job(**changes: Any) -> Job:
    (job,) = find_jobs([NORM], ["rms_norm"], ARCH, torch.float32)
    assert (job.kernel, job.sizes) == (tile, (64, False, True))
    return job


def tune_one(job: Job) -> Outcome:
    (outcome,) = tune([job], CPU, torch.float32, plan=SHORT)
    return outcome


@interpreted
def test_the_fastest_tile_wins(clock: Callable) -> None:
    clock({FAST: 0.8, FASTER: 0.5})
    outcome = tune_one(the_job())
    assert outcome.tile == FASTER
    assert outcome.ratio == pytest.approx(2.0)
    assert outcome.notes == []


@interpreted
def test_the_built_in_tile_stays_where_none_is_faster(clock: Callable) -> None:
    job = the_job()
    clock({job.kernel.rule(ARCH, *job.sizes): 0.9})
    outcome = tune_one(job)
    assert outcome.tile is None
    assert outcome.measured


@interpreted
def test_a_wrong_tile_loses_with_a_message(clock: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the columns, however fast; and one that does not run."""
    wrong, broken, right = RowTile(1, 32, 1), RowTile(1, 48, 1), RowTile(1, 64, 1)
    monkeypatch.setattr(tile, "candidates", lambda *sizes: [wrong, broken, right])
    clock({wrong: 0.1, broken: 0.1, right: 0.7})
    outcome = tune_one(the_job())
    assert outcome.tile == right
    notes = dict(note.split(": ", 1) for note in outcome.notes)
    assert set(notes) == {describe(tile, wrong), describe(tile, broken)}
    assert all(notes.values())


@interpreted
def test_a_tile_that_is_nearly_right_loses(clock: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the three rows is off by a hundredth."""
    call = tritonlib.Fixed.__call__

    def worse(self: tritonlib.Fixed, grid: tuple[int, ...], *args: Any) -> None:
        call(self, grid, *args)
        if self.constants["BLOCK_M"] == FASTER.block_m:
            y = args[3]
            y[-1] *= 1.01

    monkeypatch.setattr(tritonlib.Fixed, "__call__", worse)
    clock({FAST: 0.9, FASTER: 0.1})
    outcome = tune_one(the_job())
    assert outcome.tile == FAST
    (note,) = outcome.notes
    assert note.startswith(f"{describe(tile, FASTER)}: error")
    assert "exceeds the budget" in note


@interpreted
def test_tables_do_not_count_while_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = the_job()
    rule, other = job.kernel.allowed(ARCH, job.sizes)[:2]
    table = Table("cpu", "cpu", tuning.triton_version(), (tuning.to_entry(tile, job.sizes, other, {}),))
    tuning.write(tmp_path / "cpu.json", table)
    monkeypatch.setattr(tuning, "device_names", lambda name: {"cpu"})
    monkeypatch.setenv(tuning.ENVIRONMENT, str(tmp_path / "cpu.json"))
    asked = []
    monkeypatch.setattr(module, "run_case", lambda *args, **given: asked.append(tile(ARCH, *job.sizes)) or [])
    tuning.forget()
    try:
        with contextlib.suppress(KeyError):
            tune_one(job)
        assert asked == [rule]
        assert tile(ARCH, *job.sizes) == other
    finally:
        monkeypatch.undo()
        tuning.forget()


def test_no_measurement_starts_when_the_time_is_up() -> None:
    (outcome,) = tune([the_job()], CPU, torch.float32, seconds=-1.0, plan=SHORT)
    assert outcome.late
    assert not outcome.measured


# ------------------------------------------------------------------------------------------------------------ choice


def result(name: str, low: float, median: float, high: float, note: str = "") -> Result:
    timing = Timing(median, low, high, 1, 9)
    return Result("rms_norm", "T3-N64", "float32", name, True, error=0.0, allowed=1.0, eager=timing, note=note)


def chosen(*items: list[Result]) -> Outcome:
    tiles = {BUILT_IN: RowTile(1, 64, 1), "a": RowTile(2, 64, 1), "b": RowTile(4, 64, 1)}
    names = [r.variant for r in items[0]]
    results = {str(i): measured for i, measured in enumerate(items)}
    return choose(Job(tile, (64, False, True)), {n: tiles[n] for n in names}, results)


def test_within_the_spread_nothing_changes() -> None:
    outcome = chosen([result(BUILT_IN, 9, 10, 11), result("a", 8, 8.5, 9.5)])
    assert outcome.tile is None
    assert outcome.best == RowTile(2, 64, 1)


def test_slower_on_one_call_is_no_win() -> None:
    """Nor where it is ten times as fast on the other; another one that is never slower wins."""
    first = [result(BUILT_IN, 9, 10, 11), result("a", 0.9, 1, 1.1), result("b", 7, 8, 8.9)]
    second = [result(BUILT_IN, 9, 10, 11), result("a", 12, 13, 14), result("b", 9, 10, 11)]
    outcome = chosen(first, second)
    assert outcome.tile == RowTile(4, 64, 1)
    assert outcome.ratio == pytest.approx(math.sqrt(10 / 8))
    assert set(outcome.times) == {"0", "1"}


def test_what_the_built_in_tile_cannot_run_does_not_count() -> None:
    lost = [result(BUILT_IN, 1, 1, 1, "out of memory"), result("a", 1, 1, 1)]
    lost[0].eager = None
    outcome = chosen(lost)
    assert not outcome.measured
    assert outcome.notes == ["0: out of memory"]
    outcome = chosen(lost, [result(BUILT_IN, 9, 10, 11), result("a", 7, 8, 8.9)])
    assert outcome.tile == RowTile(2, 64, 1)
    assert list(outcome.times) == ["1"]


def test_a_tile_without_a_time_loses() -> None:
    gone = result("a", 1, 1, 1)
    gone.eager = None
    outcome = chosen([result(BUILT_IN, 9, 10, 11), gone])
    assert outcome.tile is None
    assert outcome.notes == ["a: no time"]


def outcome_of(sizes: tuple, won: RowTile | None, measured: bool = True) -> Outcome:
    times = {"rms_norm T3-N64": (Timing(2e-6, 2e-6, 2e-6, 1, 9), Timing(1e-6, 1e-6, 1e-6, 1, 9))}
    return Outcome(Job(tile, sizes), won, won, times, measured=measured)


def test_a_table_keeps_what_was_not_measured_again() -> None:
    few, many, add = (64, False, True), (64, False, False), (64, True, False)
    won = RowTile(2, 64, 1)
    before = to_table([outcome_of(s, won) for s in (few, many, add)], ARCH, "card")
    assert [e.measured for e in before.entries] == [{"rms_norm T3-N64": (2.0, 1.0)}] * 3
    later = [outcome_of(few, RowTile(4, 64, 1)), outcome_of(many, None), outcome_of(add, None, measured=False)]
    after = tuning.tiles(to_table(later, ARCH, "card", before), tile, "")
    assert after == {few: RowTile(4, 64, 1), add: won}


# --------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.skipif(not tritonlib.AVAILABLE, reason="launches are Triton's")
@pytest.mark.parametrize("name", ["nvidia", "xe2", "arc-a"])
def test_the_registry_covers_every_kernel(name: str) -> None:
    jobs = find_jobs(module.registry_items(), [], ARCHITECTURES[name], torch.bfloat16)
    # On Intel GPUs these have one tile that does not spill.
    fixed = {"indexer_scores", "mhc_dot", "mhc_post_products"} if ARCHITECTURES[name].has_grf_modes else set()
    assert {job.kernel.name for job in jobs} == set(tuning.TUNABLES) - fixed
    sizes = {(job.kernel.name, job.size): [item.name for item in job.items] for job in jobs}
    assert sizes["skinny_linear", "M=1 N=8512 K=2048 itemsize=2 fused=add_norm"] == ["norm_linear T1-N8512-K2048"]
    assert sizes["mamba2_decode_linear", "M=8 N=2048 K=4096 itemsize=2"] == [
        "mamba2_decode_linear B8-H64-P64-N128-G1-D2048"
    ]


def test_names_are_of_kernels_ops_and_rows() -> None:
    def kernels(*names: str) -> set[str]:
        items = [Item(CASES[n], CASES[n].sizes[0]) for n in ("rms_norm", "linear", "mamba2_decode_linear")]
        return {job.kernel.name for job in find_jobs(items, names, ARCHITECTURES["nvidia"], torch.bfloat16)}

    assert kernels("skinny_linear") == kernels("linear") == {"skinny_linear"}
    assert kernels("mamba2_decode_step") == {"mamba2_decode_step"}
    assert kernels("mamba2_decode_linear") == {"mamba2_decode_step", "mamba2_decode_linear"}
    with pytest.raises(ValueError, match="no tile of 'skiny_linear' to tune; did you mean 'skinny_linear'"):
        kernels("skiny_linear")
    with pytest.raises(ValueError, match="no tile of 'kda_gate'"):
        kernels("kda_gate")


@pytest.fixture
def recorded() -> list[Item]:
    """What a mixer's end calls: with a few rows one op, with many one that is composed of others."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = CASES["mamba2_decode_linear"]

    def run() -> None:
        for batch in (2, 2, 32):
            case.op(*case.draw(f"B{batch}-H4-P8-N16-G1-D24", CPU, torch.float32))
        # A gate that is a slice of wider rows.
        gated = CASES["gated_rms_norm"]
        gated.op(*gated.draw("T3-N32-G1-Z80", CPU, torch.float32))

    with FakeTensorMode(), torch.no_grad():
        return module.model_items(run, ARCH)


def test_calls_of_a_model_are_found(recorded: list[Item]) -> None:
    calls = {item.case.name: item.calls for item in recorded if not item.size.startswith("32x")}
    assert calls == {"mamba2_decode_linear": 2, "gated_rms_norm": 1}
    assert [item.size for item in recorded if item.case.name == "gated_rms_norm"] == [
        "3x32 3x32:80x1 32 1e-05 32 False silu None False False"
    ]
    composed = {item.case.name for item in recorded if item.size.startswith("32x")}
    assert {"mamba2_decode_linear", "mamba2_decode_step"} <= composed


def test_calls_are_drawn_anew_as_they_were(recorded: list[Item]) -> None:
    (item,) = [item for item in recorded if item.case.name == "gated_rms_norm"]
    args = item.case.draw(item.size, CPU, torch.bfloat16, seed=1)
    assert [type(a) for a in args[:3]] == [torch.Tensor] * 3
    assert [(a.shape, a.stride(), a.dtype) for a in args[:2]] == [
        ((3, 32), (32, 1), torch.float32),
        ((3, 32), (80, 1), torch.float32),
    ]
    assert args[3:] == (1e-5, 32, False, "silu", None, False, False)
    assert not torch.equal(args[0], item.case.draw(item.size, CPU, torch.bfloat16, seed=2)[0])


@interpreted
def test_a_recorded_call_is_measured(recorded: list[Item], clock: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in every tile: arguments drawn anew keep the numbers within the budget."""
    items = [item for item in recorded if item.case.name == "mamba2_decode_linear" and item.calls == 2]
    (job,) = (j for j in find_jobs(items, [], ARCH, torch.float32) if j.kernel.name == "mamba2_decode_linear")
    last = job.kernel.allowed(ARCH, job.sizes)[-2:]
    monkeypatch.setattr(job.kernel, "candidates", lambda *sizes: last)
    outcome = tune_one(job)
    assert outcome.measured
    assert outcome.notes == []
