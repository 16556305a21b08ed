"""`xpu-ports bench`: every op and model is listed, and each model runs at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from xpu_ports.cli import bench_model
from xpu_ports.cli.main import main
from xpu_ports.common import dispatch
from xpu_ports.common.bench.files import read_results
from xpu_ports.models.deepseek_v4 import layouts
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def test_the_list_has_every_op_and_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch.load_ops()
    assert main(["bench", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in listed["ops"]} == set(dispatch.OPS)
    assert {row["name"] for row in listed["models"]} == {"zamba2", "kimi_linear", "deepseek_v4", "flux2"}
    assert all(row["layouts"] for row in listed["models"])
    assert main(["bench", "list"]) == 0
    printed = capsys.readouterr().out
    assert "chunk_kda" in printed
    assert "klein-4b" in printed


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v4"])
def test_language_models_whose_weights_have_other_names(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers' class reads the checkpoint itself. Zamba2, which shares our memory, is in test_warmup.py."""
    checkpoint = CHECKPOINTS / f"tiny-{name.replace('_', '-')}"
    command = ["bench", "model", name, "--checkpoint", str(checkpoint), "--device", "cpu", "--dtype", "float32"]
    assert main([*command, "--prompt", "4", "--new", "8", "--out", str(tmp_path)]) == 0
    [path] = tmp_path.iterdir()
    results = read_results(path)
    assert (results.environment["kind"], results.environment["layout"]) == ("model", str(checkpoint))
    assert [r["variant"] for r in results.models] == ["eager", "transformers"]
    for record in results.models:
        assert record["prefill_low"] <= record["prefill_tokens_per_s"] <= record["prefill_high"]
        assert record["new"] == 8
    assert [m.low is not None for m in results.measurements] == [True] * 4
    assert "transformers" in capsys.readouterr().out


def test_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of DeepSeek-V4 the experts alone, as it is published."""
    narrow = {"hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 32, "vocab_size": 99}
    narrow |= {"q_lora_rank": 32, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "n_routed_experts": 8}
    layout = layouts.LAYOUTS["flash-6-layers"]
    monkeypatch.setitem(layouts.LAYOUTS, "flash-6-layers", {**layout, **narrow})
    kept = []
    monkeypatch.setattr(bench_model, "free", kept.append)
    command = ["bench", "model", "deepseek_v4", "--layout", "flash-6-layers", "--mxfp4", "--device", "cpu"]
    assert main([*command, "--dtype", "float32", "--prompt", "4", "--new", "8", "--out", str(tmp_path)]) == 0
    packed = [name for name, module in kept[0].named_modules() if isinstance(module, (MXFP4Linear, MXFP4Experts))]
    assert packed
    assert all(name.endswith(".experts") for name in packed), packed
    results = read_results(next(tmp_path.iterdir()))
    assert results.environment["layout"] == "flash-6-layers-mxfp4"
    assert [r["variant"] for r in results.models] == ["eager"]
    assert "mxfp4_experts" in capsys.readouterr().out


def test_a_step_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    command = ["bench", "model", "flux2", "--checkpoint", str(CHECKPOINTS / "tiny-flux2"), "--device", "cpu"]
    command += ["--dtype", "float32", "--side", "32", "--text", "4", "--mxfp4"]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    variants = {line["variant"]: line for line in lines[1:]}
    assert list(variants) == ["diffusers", "eager", "mxfp4 eager"]
    assert variants["eager"]["difference"] < 1e-5 < variants["mxfp4 eager"]["difference"]
    results = read_results(tmp_path / "flux2-tiny-flux2.jsonl")
    assert [m.ours for m in results.measurements] == [False, True, True]
    assert dict(results.measurements[1].key)["dtype"] == "dtype float32"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["flux2", "--layout", "5b"], "no FLUX.2 layout is named '5b'"),
        (["flux2", "--side", "100"], "expected a multiple of 16 pixels"),
        (["zamba2", "--mxfp4", "--checkpoint", str(CHECKPOINTS / "tiny-zamba2")], "random weights are packed"),
        (["flux2", "--checkpoint", str(CHECKPOINTS / "tiny-zamba2")], "no pipeline of diffusers"),
    ],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", *arguments, "--device", "cpu"]) == 2
    assert why in capsys.readouterr().err


def test_random_weights_have_no_peer_where_names_differ() -> None:
    from xpu_ports.models.kimi_linear import KimiLinearForCausalLM

    model = KimiLinearForCausalLM.from_pretrained(CHECKPOINTS / "tiny-kimi-linear")
    assert bench_model._peer("KimiLinearForCausalLM", model, None, model.dtype, model.device) is None


def test_rates_leave_out_what_a_busy_host_turned_round() -> None:
    seconds = iter([2.0, 1.0, 1.0, 3.0, 1.0, 2.0, 5.0, 4.0, 1.0, 5.0])
    # Of 12 tokens 8 count; of the pairs those that took 2, 1 and 4 seconds longer.
    assert bench_model._rates(lambda tokens: next(seconds), 1, 12) == [2.0, 4.0, 8.0]
    with pytest.raises(ValueError, match="decode more of them with --new"):
        bench_model._rates(lambda tokens: 1.0, 1, 12)
