"""Predicted times: sums are right, a measured card is predicted as measured, and no prediction passes for more."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.cli.bench_predict import HEADING
from xpu_ports.cli.main import main
from xpu_ports.common.bench.case import Work
from xpu_ports.common.bench.files import read_results
from xpu_ports.common.bench.predict import ROOF, Share, model_share, predict, predict_ops, step_work
from xpu_ports.common.bench.registry import find
from xpu_ports.common.cards import CARDS

ROOT = Path(__file__).parents[2]
H200 = ROOT / "benchmarks" / "results" / "h200"
MODELS = ["zamba2", "kimi_linear", "deepseek_v4"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["bench", "predict", *map(str, arguments), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prediction"] is True
    assert {row["kind"] for row in result["rows"]} == {"prediction"}
    return result["rows"]


def test_the_roof_that_is_reached_first_bounds() -> None:
    b580 = CARDS["b580"]
    half = Share(0.5, "made up")
    for work, bound, floor in (
        (Work(456_000_000, 10, 10), "memory", 1e-3),
        (Work(10, 116_500_000_000, 10), "matrix", 1e-3),
        (Work(10, 10, 13_700_000_000), "vector", 1e-3),
    ):
        p = predict("x", "T1", b580, work, half)
        assert (p.bound, p.floor) == (bound, pytest.approx(floor))
        assert p.seconds == pytest.approx(2 * floor)
    assert predict("x", "T1", b580, Work(456, 1), Share(None, "small")).seconds is None


def test_arc_a_has_no_matrix_units_for_kernels() -> None:
    work = Work(8, 17_200_000_000, 0)
    kernel = predict("x", "", CARDS["a770"], work, Share(1.0, ROOF))
    library = predict("x", "", CARDS["a770"], work, Share(1.0, ROOF), by_kernel=False)
    assert (kernel.bound, kernel.floor) == ("vector", pytest.approx(1e-3))
    assert library.bound == "matrix"


def test_products_in_fp32_are_none_of_the_matrix_units() -> None:
    [p] = predict_ops([CARDS["b580"]], find(["ssd_chunk_scan"]), ["B1-T2048-H64-P64-N128-G1"], torch.float32)
    assert p.work.flops == 0
    assert p.bound == "vector"


def test_mxfp4_saves_bytes_and_no_flops() -> None:
    size = "T1-N4096-K4096"
    [dense] = predict_ops([CARDS["b580"]], find(["linear"]), [size], torch.bfloat16)
    [packed] = predict_ops([CARDS["b580"]], find(["mxfp4_linear"]), [size], torch.bfloat16)
    assert packed.work.flops == dense.work.flops
    # 4.25 bits for 16.
    assert 3.5 < dense.floor / packed.floor < 16 / 4.25


def test_a_measured_card_is_predicted_as_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of a result and the same roofs give the time that it had; other sizes have no share."""
    results = H200 / "ops.jsonl"
    measured = {
        (r["case"], r["size"]): r["graph"]["median"] for r in read_results(results).ops if r["variant"] == "triton"
    }
    found = rows(capsys, "ssd_chunk_scan", "selective_state_update", "--device", "h200", "--measured", results)
    assert len(found) == 6
    for row in found:
        assert row["share_measured"]
        assert row["predicted_seconds"] == pytest.approx(measured[row["what"], row["size"]])
    [row] = rows(capsys, "ssd_chunk_scan", "--sizes", "B1-T512-H64-P64-N128-G1", "--measured", results)
    assert (row["share"], row["share_measured"], row["share_source"]) == (1.0, False, ROOF)


def test_what_latency_bounds_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gated_rms_norm.sigmoid", "--sizes", "T1-H32-N128", "--measured", H200 / "ops.jsonl"]
    [row] = rows(capsys, *arguments)
    assert (row["share"], row["predicted_seconds"]) == (None, None)
    assert "bound by latency" in row["share_source"]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_each_weight_of_a_dense_layer_once(name: str) -> None:
    """Of the experts as many as tokens choose, in the end all."""
    from xpu_ports.cli._common import port
    from xpu_ports.cli.plan import weight_sizes

    config = port(name).config_class.from_pretrained(ROOT / "checkpoints" / f"tiny-{name.replace('_', '-')}")
    memory = importlib.import_module(f"xpu_ports.models.{name}.memory")
    _, forms, _ = weight_sizes(name, config)
    step = step_work(forms["bf16"], lambda key, n: memory.weight_reads(config, key, n), 0, 0, 1)
    many = step_work(forms["bf16"], lambda key, n: memory.weight_reads(config, key, n), 0, 0, 10**6)
    assert step.weights == sum(size for _, size in forms["bf16"].values())
    assert step.work.moved < many.work.moved
    experts = [key for key in forms["bf16"] if ".experts." in key]
    assert (name == "zamba2") == (not experts)
    for key in experts:
        assert 0 < memory.weight_reads(config, key, 1) < memory.weight_reads(config, key, 2) < 1
        assert memory.weight_reads(config, key, 10**6) == pytest.approx(1)


def test_a_shared_block_is_read_at_each_of_its_places() -> None:
    """Zamba2-7B: 13 places, two blocks in turn, each stored at its first place; adapters are a place's own."""
    from xpu_ports.models.zamba2.layouts import layout_config
    from xpu_ports.models.zamba2.memory import weight_reads

    config = layout_config("7b")
    shared = "model.layers.{}.shared_transformer.feed_forward.{}.weight"
    for name, reads in {
        shared.format(6, "down_proj"): 7,
        shared.format(11, "down_proj"): 6,
        shared.format(6, "gate_up_proj_adapter_list.2.0"): 1,
        "model.layers.6.mamba_decoder.mamba.in_proj.weight": 1,
        "model.embed_tokens.weight": 1 + 4 / config.vocab_size,
    }.items():
        assert weight_reads(config, name, 4) == reads, name


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_no_more_than_the_cache_and_its_states_twice(name: str) -> None:
    from xpu_ports.cli._common import port

    config = port(name).config_class.from_pretrained(ROOT / "checkpoints" / f"tiny-{name.replace('_', '-')}")
    memory = importlib.import_module(f"xpu_ports.models.{name}.memory")
    none, some = (memory.cache_bytes(config, 2, tokens, torch.bfloat16) for tokens in (0, 4096))
    read = memory.cache_reads(config, 2, 4096, torch.bfloat16)
    assert none < read <= some + none
    if name == "deepseek_v4":
        # Of the entries an indexer chooses some.
        assert read < some


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of the H200's decoding; packed weights fit where dense ones do not."""
    measured = H200 / "model-zamba2-7b-b1.jsonl"
    dense, packed, *_ = rows(capsys, "--model", "zamba2", "--layout", "7b", "--device", "b580", "--measured", measured)
    assert (dense["form"], dense["fits"], packed["form"], packed["fits"]) == ("bf16", False, "mxfp4", True)
    assert dense["bound"] == packed["bound"] == "memory"
    assert dense["share_measured"]
    assert not packed["share_measured"]
    assert dense["predicted_tokens_per_second"] == pytest.approx(dense["share"] * dense["roof_tokens_per_second"])
    assert packed["bytes"] < dense["bytes"] / 3
    assert packed["flops"] == dense["flops"]
    # Of another batch size nothing is known.
    dense, _ = rows(
        capsys, "--model", "zamba2", "--layout", "7b", "--device", "b580", "--batch", 2, "--measured", measured
    )
    assert not dense["share_measured"]


def test_the_measured_model_is_predicted_as_measured() -> None:
    results = read_results(H200 / "model-zamba2-7b-b1.jsonl")
    [captured] = [r for r in results.models if r["variant"] == "captured"]
    step = step_work({"w": (7 * 10**9, 14e9)}, lambda key, n: 1.0, 0, 0, 1)
    asked: list[int] = []

    def step_at(tokens: int):
        asked.append(tokens)
        return step

    share = model_share(step_at, "zamba2", "7b", "bfloat16", 1, [results])
    assert asked == [128]
    p = predict("x", "", CARDS["h200"], step.work, share)
    assert p.seconds == pytest.approx(1 / captured["decode_tokens_per_s"])
    assert model_share(step_at, "zamba2", "1.2b", "bfloat16", 1, [results]) == Share(1.0, ROOF)


def test_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(
        capsys, "--checkpoint", ROOT / "checkpoints" / "tiny-kimi-linear", "--batch", "1,4", "--device", "b60,b70"
    )
    assert [(r["form"], r["batch"], r["card"]) for r in found] == [
        (form, batch, card) for form in ("bf16", "mxfp4") for batch in (1, 4) for card in ("Arc Pro B60", "Arc Pro B70")
    ]


def test_a_step_of_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    [row] = rows(
        capsys, "--model", "flux2", "--layout", "dev", "--device", "h200", "--measured", H200 / "flux2-dev.jsonl"
    )
    assert row["bytes"] / 1e9 == pytest.approx(64.446562304)
    assert row["predicted_seconds"] == pytest.approx(0.442963134765625)
    [row] = rows(capsys, "--checkpoint", ROOT / "checkpoints" / "tiny-flux2", "--side", 64, "--text", 8)
    assert row["bound"] == "memory"


@torch.no_grad()
def test_operations_of_a_step_are_those_that_torch_counts() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from xpu_ports.cli.bench_pictures import Options, step
    from xpu_ports.models.flux2 import Flux2Transformer2DModel
    from xpu_ports.models.flux2.memory import step_operations

    sizes = {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "joint_attention_dim": 48,
             "in_channels": 16, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 4, 4)}  # fmt: skip
    model = Flux2Transformer2DModel(**sizes).eval()
    # The products of attention are counted where they are products of matrices.
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model(**step(model, torch.float32, Options(side=6, text=5), torch.device("cpu")))
    moved, operations = step_operations(sizes, 6 * 16, 5, torch.float32)
    assert moved == sum(p.nbytes for p in model.parameters() if p.dim() == 2)
    assert operations == counted.get_total_flops()


def test_it_says_that_it_is_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "predict", "rms_norm", "--sizes", "T8192-N4096", "--device", "b580"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(HEADING)
    # Without a share there is a roof and no prediction.
    [line] = [line for line in printed.splitlines() if line.startswith("rms_norm")]
    assert line.endswith("at least 294 us")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["rms_norm", "--device", "b999"], "no card is named 'b999'"),
        (["rms_nrm"], "did you mean 'rms_norm'"),
        (["rms_norm", "--sizes", "T1"], "does not have the letters"),
        (["--layout", "7b"], "name it with --model"),
        (["rms_norm", "--model", "zamba2"], "ops and a model at once"),
        (["--model", "zamba3"], "expected one that there is a port for: deepseek_v4, kimi_linear, zamba2, flux2"),
        (["--model", "zamba2", "--layout", "3b"], "no Zamba2 layout is named '3b'"),
        (["--model", "flux2", "--layout", "3b"], "no FLUX.2 layout is named '3b'"),
        (["--model", "zamba2", "--checkpoint", "checkpoints/tiny-kimi-linear"], "is a kimi_linear, not a zamba2"),
        (["--checkpoint", "checkpoints/nothing"], "no such folder"),
        (["--model", "zamba2", "--batch", "0"], "--batch is '0'"),
        (
            ["rms_norm", "--measured", "benchmarks/results/cpu/mxfp4-accuracy.jsonl"],
            "whose published roofs are not known",
        ),
        (["rms_norm", "--measured", "README.md"], "README.md:1: not JSON"),
    ],
)
def test_mistakes(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["bench", "predict", *arguments]) == 2
    assert why in capsys.readouterr().err
