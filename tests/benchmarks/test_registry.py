"""The rows: each op has one, sizes are read strictly, and the part that is checked stands for the whole."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util

import pytest
import torch
from torch import Tensor

from xpu_ports.common import dispatch
from xpu_ports.common.bench import case as case_module
from xpu_ports.common.bench import run
from xpu_ports.common.bench.case import Case, PeerMissingError, copy_args, flatten_outputs, parse_size, sample_rows
from xpu_ports.common.bench.registry import CASES, find
from xpu_ports.common.bench.report import to_json
from xpu_ports.common.bench.timing import Ceilings, Plan

CPU = torch.device("cpu")
# A size of each row that the reference takes no time for; more rows than a sample takes where it takes some.
SMALL = {
    "mxfp4_quantize": "T150-K64",
    "qk_norm_rope": "T150-H2-K8",
    "ada_layer_norm": "T150-N32",
    "gated_residual": "T150-N32",
    "gated_residual_norm": "T150-N32",
    "concat_swiglu": "T150-D8-F16",
    "mxfp4_linear": "T150-N150-K64",
    "mxfp4_linear_a4": "T150-N150-K64",
    "mxfp4_grouped_linear": "T9-E6-A2-N150-K64",
    "mxfp4_experts": "T9-E6-A2-D64-F32",
    "rms_norm": "T150-N32",
    "add_rms_norm": "T150-N32",
    "rms_norm_backward": "T5-N32",
    "concat_rms_norm": "T150-D16",
    "gated_rms_norm": "T150-N32-G2-Z40",
    "gated_rms_norm.sigmoid": "T50-H3-N16",
    "gated_square_sum": "T150-N32",
    "gated_norm_by_sum": "T150-N32",
    "gated_activation": "T150-F16",
    "rotary_embedding": "B2-T150-H2-K8",
    "rotary_angles": "B2-T9-K8",
    "rotary_insert": "B3-T2-H2-S9-K8",
    "greedy_tokens": "B3-V150",
    "linear": "T3-N150-K16",
    "norm_linear": "T3-N150-K16",
    "gated_norm_linear": "T3-N150-K16-G2",
    "adapted_linears": "T3-L3-N5-K16-R4",
    "norm_glu": "T3-F150-K16-R4",
    "decode_attention": "B3-H4-S9-K8-Z12",
    "causal_conv1d": "B2-T9-D100-W4-Z130",
    "causal_conv1d_update": "B5-D12-W4",
    "ssd_chunk_scan": "B1-T20-H4-P8-N8-G2",
    "selective_state_update": "B5-H4-P8-N8-G2",
    "mamba2_decode_step": "B5-H4-P8-N8-G2",
    "kda_gate": "B2-T150-H2-K8",
    "chunk_kda": "B1-T70-H3-K8-V4",
    "recurrent_kda": "B5-H2-K8-V4",
    "mamba2_decode_linear": "B5-H4-P8-N8-G2-D12",
    "mla_decode": "B3-H2-S9-R6-K2",
    "moe_router_logits": "T9-E6-D8",
    "moe_sigmoid_router": "T150-E8-A2",
    "moe_experts": "T9-E6-A2-D8-F16",
    "mhc_pre": "T5-S4-D8",
    "mhc_pre.products": "T5-S4-D8",
    "mhc_post": "T5-S4-D8",
    "mhc_post_products": "T5-S4-D8",
    "mhc_post_products.pre": "T5-S4-D8",
    "mhc_post.pre": "T5-S4-D8",
    "mhc_head": "T5-S4-D8",
    "compress_csa": "B3-T9-C4",
    "compress_hca": "B3-T9-C4",
    "indexer_scores": "B3-T2-S9-H2-C4",
    "indexer_scores.pages": "B3-T2-S9-H2-C4",
    "stable_topk": "T5-S9-A3",
    "cache_rows": "B3-S9-K128",
    "qnorm_rope_kv_insert": "B3-T2-H2-K8-N2",
    "qnorm_rope_kv_insert.pages": "B3-T2-H2-K128-N32",
    "norm_rope_insert": "B3-T2-K8-N2",
    "rope_tail": "B3-T2-H2-K8-N2",
    "inverse_rope_grouped_out": "B3-T2-H2-K8-N2-G2-R3",
    "sparse_mla_decode": "B3-H2-K128-S9-A3",
    "sparse_mla_decode.closed": "B3-H2-K128-S9",
    "sparse_mla_prefill": "B3-T5-H2-K8-S9",
    "sparse_mla_prefill.named": "B3-T5-H2-K128-S9-A3",
    "moe_sqrtsoftplus_router": "T5-E8-A2",
    "moe_hash_router": "T5-E8-A2-V9",
    "moe_experts_many": "T9-E6-A2-D8-F16",
}


def full(case: Case) -> tuple[tuple, list[Tensor]]:
    args = case.draw(SMALL[case.name], CPU, torch.float64)
    copies = copy_args(args)
    return args, flatten_outputs(case.op.reference(*copies)) + case.mutated(copies)


def test_every_op_has_a_row():
    dispatch.load_ops()
    assert {case.op.name for case in CASES.values()} == set(dispatch.OPS)


@pytest.mark.parametrize("name", CASES)
def test_sizes_grow(name: str):
    def elements(size: str) -> int:
        with torch.device("meta"):
            args = CASES[name].inputs(parse_size(size), MetaDraw())
        return sum(t.numel() for t in flatten_outputs(args))

    sizes = [elements(size) for size in CASES[name].sizes if "Z" not in size]
    assert sizes == sorted(sizes)


class MetaDraw:
    """Draws shapes without memory."""

    dtype = torch.float32

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self(*shape, dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_is_what_the_reference_gives_for_it(name: str):
    case = CASES[name]
    args, outputs = full(case)
    part, sampled = case.sample(args, outputs)
    copies = copy_args(part)
    expected = flatten_outputs(case.op.reference(*copies)) + case.mutated(copies)
    assert len(sampled) == len(expected) == len(outputs)
    for ours, theirs in zip(sampled, expected, strict=True):
        torch.testing.assert_close(ours, theirs.reshape(ours.shape))
    if case.sample is sample_rows:
        assert sampled[0].shape[0] < outputs[0].flatten(0, -2).shape[0]
        assert torch.equal(sampled[0][-1], outputs[0].flatten(0, -2)[-1])


@pytest.mark.parametrize("name", CASES)
def test_every_row_runs_here(name: str, monkeypatch: pytest.MonkeyPatch):
    """Checked, timed and written down, at a small size in bf16."""
    monkeypatch.setattr(run, "measure_ceilings", lambda device: Ceilings(1e9, 1e12, 1, 1))
    # Both take longer than all the rest.
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    plan = Plan(sample=1e-5, samples=2, budget=0.1)
    results = [r for r in run.run_case(CASES[name], SMALL[name], CPU, torch.bfloat16, plan, compiled=False) if r.ours]
    assert "reference" in {r.variant for r in results}
    for result in results:
        assert result.within_budget, result
        assert result.moved > 0
        assert result.flops + result.elementwise > 0
        line = to_json(result)
        assert line["eager"]["low"] <= line["eager"]["median"] <= line["eager"]["high"]
        assert line["bytes_per_second"] > 0


@pytest.mark.parametrize("name", CASES)
def test_every_row_has_formulas_that_grow_with_its_letters(name: str):
    """Doubling a letter takes up to eight times the operations; some letter counts, and none makes them fewer."""
    case = CASES[name]
    size = parse_size(SMALL[name])

    def operations(size: dict[str, int]) -> int:
        return case.flops(size) + case.elementwise(size)

    assert operations(size) > 0
    grown = [operations({**size, letter: 2 * n}) / operations(size) for letter, n in size.items()]
    assert min(grown) >= 1
    assert 1.9 < max(grown) <= 8


@pytest.mark.parametrize("name", CASES)
def test_work_without_data_is_that_of_the_data(name: str):
    case = CASES[name]
    args = case.draw(SMALL[name], CPU, torch.bfloat16)
    copies = copy_args(args)
    outputs = flatten_outputs(case.op.reference(*copies)) + case.mutated(copies)
    assert case.work_without_data(SMALL[name], torch.bfloat16) == case.work(SMALL[name], args, outputs)


@pytest.mark.parametrize("name", CASES)
def test_work_of_the_largest_size_grows_with_it(name: str):
    """Without its data, which some rows have gigabytes of."""
    case = CASES[name]
    first, last = (case.work_without_data(size, torch.bfloat16) for size in (SMALL[name], case.sizes[-1]))
    assert last.moved > first.moved
    assert last.flops + last.elementwise > first.flops + first.elementwise


def test_work_of_a_size_that_does_not_fit_here():
    work = CASES["moe_experts"].work_without_data("T1-E4096-A8-D7168-F4096", torch.bfloat16)
    # Eight experts and the shared one, of 2 TB.
    assert 1.0 < work.moved / (9 * 3 * 7168 * 4096 * 2) < 1.01


def test_products_are_counted_once():
    assert CASES["linear"].flops({"T": 3, "N": 5, "K": 7}) == 2 * 3 * 5 * 7
    assert CASES["decode_attention"].flops({"B": 2, "H": 3, "S": 5, "K": 7, "Z": 99}) == 4 * 2 * 3 * 5 * 7
    assert CASES["rms_norm"].elementwise({"T": 2, "N": 3}) == 4 * 2 * 3
    assert CASES["mhc_post"].elementwise({"T": 2, "S": 4, "D": 3}) == 2 * 2 * 4 * 4 * 3 + 2 * 2 * 4 * 3


def test_a_chain_counts_what_is_between_its_ops_twice():
    args, outputs = full(CASES["mhc_post.pre"])
    y, x, *weights = args
    streams, layer_input, post, comb = outputs
    small = [*weights, post, comb]
    expected = sum(t.numel() for t in (x, streams, streams, y, layer_input, *small)) * 8
    for name in ("mhc_post.pre", "mhc_post_products.pre"):
        assert CASES[name].work(SMALL[name], args, outputs).moved == expected


def test_bytes_count_inputs_outputs_and_state_twice():
    case = CASES["selective_state_update"]
    args, outputs = full(case)
    state, x, dt, A_log, B, C, D, dt_bias, _ = args
    wide = 8 * (x.numel() * 2 + dt.numel() + B.numel() + C.numel())
    # The state is fp32 in every dtype of the benchmark, read and written; so are the numbers of a head, read.
    assert case.work(SMALL[case.name], args, outputs).moved == wide + 4 * (
        2 * state.numel() + A_log.numel() + D.numel() + dt_bias.numel()
    )


def test_bytes_of_a_slice_are_those_of_the_slice():
    case = CASES["gated_rms_norm"]
    args = case.draw("T3-N32-G1-Z64", CPU, torch.bfloat16)
    assert args[1].stride() == (64, 1)
    assert case.work("T3-N32-G1-Z64", args, [args[0]]).moved == 2 * (3 * 32 * 3 + 32)


def test_flops_of_the_scan_are_the_causal_products():
    case = CASES["ssd_chunk_scan"]
    B, T, H, P, N, G = 1, 512, 4, 8, 16, 2
    scores, values, states = (T * 256 * N * G, T * 256 * P * H, 2 * 2 * T * N * P * H)
    assert case.flops({"B": B, "T": T, "H": H, "P": P, "N": N, "G": G}) == scores + values + states


def test_a_seed_repeats_and_another_differs():
    case = CASES["rms_norm"]
    first, again, other = (case.draw("T3-N8", CPU, torch.float32, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("size", ["", "T1", "T1-Q4", "T1-N4-T2", "t1-N4", "T1-N", "T1-N4-H2"])
def test_a_wrong_size_is_refused(size: str):
    with pytest.raises(ValueError, match=r"is not a size|does not have the letters"):
        CASES["rms_norm"].draw(size, CPU, torch.float32)


def test_an_optional_letter_may_be_left_out():
    assert CASES["gated_rms_norm"].draw("T2-N8-G1", CPU, torch.float32)[1].is_contiguous()


def test_find_by_row_and_by_op():
    assert [case.name for case in find(["rms_norm"])] == ["rms_norm"]
    assert [case.name for case in find(["gated_rms_norm"])] == ["gated_rms_norm", "gated_rms_norm.sigmoid"]
    assert [case.name for case in find(["gated_rms_norm.sigmoid"])] == ["gated_rms_norm.sigmoid"]
    assert find([]) == list(CASES.values())
    with pytest.raises(ValueError, match="did you mean 'rms_norm'"):
        find(["rms_nrm"])


# The packages that peers come from, by the peer's name.
PACKAGES = {"liger": "liger_kernel"}


@pytest.mark.parametrize(("name", "peer"), [(case.name, peer) for case in CASES.values() for peer in case.peers])
def test_every_peer_is_written(name: str, peer: str):
    if importlib.util.find_spec(PACKAGES.get(peer, "torch" if peer == "pytorch" else peer)) is None:
        with pytest.raises(PeerMissingError, match=PACKAGES.get(peer, peer)):
            CASES[name].peer(peer)
    else:
        assert callable(CASES[name].peer(peer))


def test_a_peer_that_is_not_installed_says_so():
    case = dataclasses.replace(CASES["rms_norm"], peers={"none": "no_such_package:rms_norm"})
    with pytest.raises(PeerMissingError, match="no_such_package"):
        case.peer("none")


def test_copied_arguments_keep_their_strides_and_share_nothing():
    x = torch.arange(60.0).reshape(3, 4, 5)[:, 1:3, ::2].transpose(0, 1)
    (copy,) = copy_args((x,))
    assert copy.stride() == x.stride()
    assert torch.equal(copy, x)
    copy.zero_()
    assert x.abs().sum() > 0
    empty = torch.empty(0, 4)
    assert copy_args((empty, None, 1.0))[0].shape == (0, 4)


def test_lists_of_tensors_are_counted_and_copied():
    case = CASES["adapted_linears"]
    args = case.draw("T2-L3-N5-K16-R4", CPU, torch.bfloat16)
    assert case.work("T2-L3-N5-K16-R4", args, []).moved == 2 * (2 * 16 + 3 * (5 * 16 + 4 * 16 + 5 * 4))
    copies = copy_args(args)
    copies[1][2].zero_()
    assert args[1][2].abs().sum() > 0


def test_row_samples_of_one_row_and_of_many():
    for rows in (1, 2, 64, 65, 1000):
        x = torch.arange(float(rows))[:, None].expand(rows, 3)
        _, (picked,) = case_module.sample_rows((), [x])
        assert picked[0, 0] == 0
        assert picked[-1, 0] == rows - 1
        assert len(picked) <= 130


def test_keys_that_do_not_count_are_not_moved():
    case = CASES["decode_attention"]
    moved = [
        case.work(size, case.draw(size, CPU, torch.float32), []).moved for size in ("B2-H3-S8-K4", "B2-H3-S8-K4-Z32")
    ]
    mask = 32
    assert moved[1] == moved[0] + mask
