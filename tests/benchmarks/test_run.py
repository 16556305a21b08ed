"""A run: right variants get numbers, wrong ones no comparison, broken ones a note."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from xpu_ports.common import dispatch
from xpu_ports.common.bench import run as run_module
from xpu_ports.common.bench.case import Case
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.bench.run import Result, default_sizes, input_sets, run_case, speedup, variants
from xpu_ports.common.bench.timing import Ceilings, Plan, Timing

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy=1e9, matmul=1e12, copy_bytes=1, matmul_side=1)
SHORT = Plan(sample=1e-5, samples=3, budget=1.0)


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "measure_ceilings", lambda device: CEILINGS)


def with_peers(monkeypatch: pytest.MonkeyPatch, name: str, **peers: Callable) -> Case:
    """The row with other peers."""
    module = types.ModuleType("peers_of_a_test")
    vars(module).update(peers)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return dataclasses.replace(CASES[name], peers={peer: f"{module.__name__}:{peer}" for peer in peers})


def results(case: Case, size: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Result]:
    return {r.variant: r for r in run_case(case, size, CPU, dtype, SHORT, compiled=False)}


def test_ours_and_the_peers_that_are_here():
    found = results(CASES["rms_norm"], "T5-N32")
    for name in ("reference", "pytorch", "transformers"):
        r = found[name]
        assert r.within_budget, r
        assert r.eager is not None
        assert r.graph is None
        assert r.eager.low <= r.eager.median <= r.eager.high
        assert r.moved == 2 * (2 * 5 * 32 + 32)
        assert r.roof_share == pytest.approx(r.moved / 1e9 / r.eager.median)
    assert found["reference"].ours
    assert not found["pytorch"].ours


def test_emulated_back_ends_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "EMULATED_ON_CPU", {"triton"})
    monkeypatch.setattr(run_module, "EMULATED_ON_CPU", {"triton"})
    assert "triton" in CASES["rms_norm"].op.backends("cpu")
    assert "triton" not in [v.name for v in variants(CASES["rms_norm"], CPU, compiled=False)]
    assert "triton" in [v.name for v in variants(CASES["rms_norm"], torch.device("cuda"))]


def test_a_wrong_peer_is_not_compared(monkeypatch: pytest.MonkeyPatch):
    def wrong(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        # One column of the last row.
        def call() -> Tensor:
            y = CASES["rms_norm"].op.reference(x, weight, eps)
            y[-1, -1] += 0.25
            return y

        return call

    found = results(with_peers(monkeypatch, "rms_norm", wrong=wrong), "T200-N32")
    assert "exceeds the budget" in found["wrong"].note
    assert found["wrong"].eager is not None
    assert speedup(found["reference"], found["wrong"]) is None


def test_a_peer_that_leaves_the_state_alone_is_wrong(monkeypatch: pytest.MonkeyPatch):
    op = CASES["selective_state_update"].op

    def forgets(state: Tensor, *rest: Tensor) -> Callable[[], Tensor]:
        return lambda: op.reference(state.clone(), *rest)

    def keeps(state: Tensor, *rest: Tensor) -> Callable[[], Tensor]:
        return lambda: op.reference(state, *rest)

    found = results(with_peers(monkeypatch, op.name, forgets=forgets, keeps=keeps), "B3-H4-P8-N8-G2")
    assert not found["forgets"].within_budget
    assert found["keeps"].within_budget


def test_a_broken_peer_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object) -> Callable[[], Tensor]:
        raise RuntimeError("needs a wider GPU\nand more text")

    def overwrites(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        return lambda: x.zero_()

    def shaped(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        return lambda: x[:, :1]

    def late(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        return lambda: CASES["rms_norm"].op.reference(x, weight, eps)

    peers = {"broken": broken, "overwrites": overwrites, "shaped": shaped, "late": late}
    found = results(with_peers(monkeypatch, "rms_norm", **peers), "T5-N32")
    assert found["broken"].note == "RuntimeError: needs a wider GPU"
    assert found["broken"].eager is None
    assert not found["overwrites"].within_budget
    assert found["shaped"].note.startswith("RuntimeError: ")
    assert found["reference"].within_budget
    assert found["late"].within_budget, "what one peer overwrites, the next one gets"


def test_nan_is_never_right(monkeypatch: pytest.MonkeyPatch):
    def nan(x: Tensor, weight: Tensor, eps: float) -> Callable[[], Tensor]:
        return lambda: torch.full_like(x, float("nan"))

    found = results(with_peers(monkeypatch, "rms_norm", nan=nan), "T5-N32")
    assert not found["nan"].within_budget
    assert "NaN" in found["nan"].note


def test_a_narrower_gradient_is_judged_in_the_benchmarks_dtype(monkeypatch: pytest.MonkeyPatch):
    reference = CASES["rms_norm_backward"].op.reference

    def narrow(*args: object) -> Callable[[], tuple[Tensor, Tensor]]:
        dx, dweight = reference(*args)
        return lambda: (dx, dweight.to(torch.bfloat16))

    assert results(with_peers(monkeypatch, "rms_norm_backward", narrow=narrow), "T9-N32")["narrow"].within_budget


def test_the_forced_back_end_is_what_runs():
    dispatch.reset_explain()
    results(CASES["rms_norm"], "T2-N32")
    lines = [d for d in dispatch.explain(show=False) if d.op == "rms_norm"]
    assert {(d.backend, d.reason) for d in lines} == {("reference", "forced")}


def test_the_forced_back_end_of_a_chain_is_what_all_its_ops_run():
    dispatch.reset_explain()
    results(CASES["mhc_post.pre"], "T2-S4-D8")
    lines = [(d.op, d.backend, d.reason) for d in dispatch.explain(show=False) if d.op.startswith("mhc")]
    assert set(lines) == {("mhc_post", "reference", "forced"), ("mhc_pre", "reference", "forced")}


def test_a_back_end_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch):
    # No implementation takes a CPU tensor here, so that forcing one is refused.
    refusing = run_module.Variant("triton", lambda: run_module.prepare_op(CASES["rms_norm"].op), backend="triton")
    monkeypatch.setattr(run_module, "variants", lambda case, device, compiled: [refusing])
    monkeypatch.setattr(dispatch, "EMULATED_ON_CPU", set())
    (found,) = run_case(CASES["rms_norm"], "T2-N32", CPU, torch.bfloat16, SHORT)
    assert "cannot run this call on cpu" in found.note
    assert found.eager is None


def timed(median: float, spread: float, error: float = 0.0) -> Result:
    timing = Timing(median, median - spread, median + spread, 1, 9)
    return Result("c", "T1", "bfloat16", "v", True, error=error, allowed=1.0, eager=timing)


def test_a_speed_up_needs_two_right_results_and_a_difference():
    assert speedup(timed(1.0, 0.1), timed(3.0, 0.1)) == 3.0
    assert speedup(timed(1.0, 0.1), timed(1.1, 0.1)) == 1.0
    assert speedup(timed(1.0, 0.1, error=2.0), timed(3.0, 0.1)) is None
    assert speedup(timed(1.0, 0.1), timed(3.0, 0.1, error=2.0)) is None


def test_graph_times_go_before_call_times():
    ours, other = timed(9.0, 0.1), timed(9.0, 0.1)
    ours.graph = Timing(1.0, 1.0, 1.0, 1, 9)
    other.graph = Timing(2.0, 2.0, 2.0, 1, 9)
    assert speedup(ours, other) == 2.0


def test_large_calls_rotate_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_module, "cache_size", lambda device: 60)
    assert [input_sets(moved, CPU) for moved in (0, 1, 100, 1000)] == [8, 8, 3, 2]


def test_a_cpu_takes_the_small_sizes():
    case = CASES["rms_norm"]
    assert default_sizes(case, CPU) == case.sizes[:2]
    assert default_sizes(case, torch.device("xpu")) == case.sizes
