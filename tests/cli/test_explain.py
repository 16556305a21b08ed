"""The table of `xpu-ports explain`: exactly one prefill and one step, of the port's own ops."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import TINY_ZAMBA2
from xpu_ports.cli.explain import merge
from xpu_ports.common.dispatch import OPS, Decision, Explanation

LAYERS = json.loads((TINY_ZAMBA2 / "config.json").read_text())["num_hidden_layers"]


@pytest.fixture
def result(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--json", "--device", "cpu", "--backend", "rms_norm=reference")
    assert outcome.code == 0
    return json.loads(outcome.out)


def test_each_phase_runs_once(result):
    calls = {row["op"]: (row["prefill_calls"], row["decode_calls"]) for row in result["explain"]}
    assert calls["ssd_chunk_scan"] == (LAYERS, 0)
    assert calls["causal_conv1d"] == (LAYERS, 0)
    assert calls["gated_rms_norm"] == (LAYERS, LAYERS)


def test_rows_tell_back_end_and_reason(result):
    reasons = {row["op"]: (row["backend"], row["device"], row["reason"]) for row in result["explain"]}
    assert reasons["rms_norm"] == ("reference", "cpu", "forced")
    assert reasons["gated_rms_norm"] == ("reference", "cpu", "no other back end for cpu")


def test_registered_back_ends_are_those_of_the_ops_that_ran(result):
    assert set(result["registered"]) == {row["op"] for row in result["explain"]} & set(OPS)
    assert result["registered"]["gated_rms_norm"] == ["triton (xpu, cuda)"]


def test_table(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--prompt", "In the beginning", "--device", "cpu", "--dtype", "float32")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Zamba2ForCausalLM, 1,950,272 parameters, float32 on cpu (")
    assert ["ssd_chunk_scan", "reference", "cpu", str(LAYERS), "0"] in [line.split()[:5] for line in lines]
    assert "in order of preference" not in outcome.out
    assert not any(line.endswith(" ") for line in lines)


def test_verbose_adds_what_each_op_has(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--device", "cpu", "--verbose")
    assert ["gated_rms_norm", "triton", "(xpu,", "cuda),", "reference"] in [s.split() for s in outcome.out.splitlines()]


def test_empty_prompt(mistake):
    assert mistake("explain", TINY_ZAMBA2, "--prompt", "") == "xpu-ports: PROMPT is empty\n"


def test_a_changed_reason_is_a_row_of_its_own():
    prefill = Explanation([Decision("a", "triton", "xpu", "first that does not refuse", 3)])
    decode = Explanation(
        [
            Decision("a", "triton", "xpu", "first that does not refuse", 2),
            Decision("a", "reference", "xpu", "triton: too wide", 1),
        ]
    )
    rows = [tuple(row.values()) for row in merge(prefill, decode)]
    assert rows == [
        ("a", "reference", "xpu", 0, 1, "triton: too wide"),
        ("a", "triton", "xpu", 3, 2, "first that does not refuse"),
    ]
