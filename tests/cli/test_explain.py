"""The table of `xpu-ports explain`: exactly one prefill and one step, of the port's own ops."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from tests.cli.conftest import TINY_ZAMBA2
from xpu_ports.cli.explain import PROMPT, merge
from xpu_ports.common import dispatch
from xpu_ports.common.dispatch import OPS, Decision, Explanation
from xpu_ports.models.zamba2 import Zamba2ForCausalLM

LAYERS = json.loads((TINY_ZAMBA2 / "config.json").read_text())["num_hidden_layers"]


@pytest.fixture
def result(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--json", "--device", "cpu", "--backend", "concat_rms_norm=reference")
    assert outcome.code == 0
    return json.loads(outcome.out)


@pytest.fixture
def forwards() -> tuple[dict[str, int], dict[str, int]]:
    """The calls of each op in one forward over a prompt, and in one of a single token on its cache."""
    model = Zamba2ForCausalLM.from_pretrained(TINY_ZAMBA2)
    ids = AutoTokenizer.from_pretrained(TINY_ZAMBA2)(PROMPT, return_tensors="pt").input_ids
    phases, cache = [], None
    for tokens in (ids, ids[:, :1]):
        dispatch.reset_explain()
        with torch.no_grad():
            cache = model(tokens, cache=cache, use_cache=True).past_key_values
        phases.append({d.op: d.calls for d in dispatch.explain(show=False)})
    return phases[0], phases[1]


def test_a_prefill_and_a_step_run_once_each(result, forwards):
    for phase, calls in zip(("prefill_calls", "decode_calls"), forwards, strict=True):
        assert {row["op"]: row[phase] for row in result["explain"] if row[phase]} == calls
    assert forwards[0]["ssd_chunk_scan"] == LAYERS
    assert "ssd_chunk_scan" not in forwards[1]


def test_rows_tell_back_end_and_reason(result):
    reasons = {row["op"]: (row["backend"], row["device"], row["reason"]) for row in result["explain"]}
    assert reasons["concat_rms_norm"] == ("reference", "cpu", "forced")
    assert reasons["ssd_chunk_scan"] == ("reference", "cpu", "no other back end for cpu")


def test_registered_back_ends_are_those_of_the_ops_that_ran(result):
    assert set(result["registered"]) == {row["op"] for row in result["explain"]} & set(OPS)
    assert result["registered"]["ssd_chunk_scan"] == ["triton (xpu, cuda)"]


def test_table(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--prompt", "In the beginning", "--device", "cpu", "--dtype", "float32")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("Zamba2ForCausalLM, 1,950,272 parameters, float32 on cpu (")
    assert ["ssd_chunk_scan", "reference", "cpu", str(LAYERS), "0"] in [line.split()[:5] for line in lines]
    assert "in order of preference" not in outcome.out
    assert not any(line.endswith(" ") for line in lines)


def test_verbose_adds_what_each_op_has(cli):
    outcome = cli("explain", TINY_ZAMBA2, "--device", "cpu", "--verbose")
    assert ["ssd_chunk_scan", "triton", "(xpu,", "cuda),", "reference"] in [s.split() for s in outcome.out.splitlines()]


def test_empty_prompt(mistake):
    assert mistake("explain", TINY_ZAMBA2, "--prompt", "") == "xpu-ports: PROMPT is empty\n"


def test_a_changed_reason_is_a_row_of_its_own():
    prefill = Explanation([Decision("a", "triton", "xpu", "fits", 3), Decision("a", "reference", "xpu", "too wide", 1)])
    decode = Explanation([Decision("a", "triton", "xpu", "fits", 2), Decision("a", "reference", "xpu", "too deep", 4)])
    assert [tuple(row.values()) for row in merge(prefill, decode)] == [
        ("a", "reference", "xpu", 1, 0, "too wide"),
        ("a", "reference", "xpu", 0, 4, "too deep"),
        ("a", "triton", "xpu", 3, 2, "fits"),
    ]
