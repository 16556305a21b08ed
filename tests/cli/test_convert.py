"""`xpu-ports convert`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.quant.convert import verify
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
KIMI, ZAMBA2 = CHECKPOINTS / "tiny-kimi-linear", CHECKPOINTS / "tiny-zamba2"
# Rank 16 is no multiple of 32.
ADAPTERS = "re:.*adapter_list.*"


def test_to_mxfp4(cli, tmp_path: Path) -> None:
    """A mixture of experts: names per expert in files, stacked in memory."""
    outcome = cli("convert", KIMI, tmp_path / "k", "--to", "mxfp4", "--activations", "mxfp4", "--verify")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'k'}: ")
    assert lines[-1] == "255 rounded, 70 exactly as in the source, 0 wrong"
    row = next(line for line in lines if line.startswith("model.layers.3.block_sparse_moe.experts.5.w2.weight_packed"))
    assert "bfloat16 to mxfp4" in row
    assert "as planned" in row
    model = KimiLinearForCausalLM.from_pretrained(tmp_path / "k")
    assert isinstance(model.model.layers[3].block_sparse_moe.experts, MXFP4Experts)
    assert model.lm_head.activations == "mxfp4"
    generated = cli("generate", tmp_path / "k", "And God said", "--max-new-tokens", 4, "--device", "cpu")
    assert generated.code == 0, generated.err
    assert generated.out.strip()


def test_zamba2_and_back_to_bf16(cli, tmp_path: Path) -> None:
    packed, dense = tmp_path / "packed", tmp_path / "dense"
    assert cli("convert", ZAMBA2, packed, "--to", "mxfp4", "--ignore", ADAPTERS, "--ignore", "lm_head").code == 0
    model = Zamba2ForCausalLM.from_pretrained(packed)
    assert sum(isinstance(module, MXFP4Linear) for module in model.modules()) > 10
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert config["ignore"][:2] == [ADAPTERS, "lm_head"]
    assert cli("convert", packed, dense, "--to", "bf16").code == 0
    assert load_file(dense / "model.safetensors").keys() == load_file(ZAMBA2 / "model.safetensors").keys()
    generated = cli("generate", dense, "And God said", "--max-new-tokens", 4, "--device", "cpu")
    assert generated.code == 0, generated.err


def test_layouts(cli, tmp_path: Path) -> None:
    assert cli("convert", KIMI, tmp_path / "hf", "--layout", "hf", "--verify").out.endswith("in the source, 0 wrong\n")
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "hf" / "model.safetensors")
    assert cli("convert", tmp_path / "hf", tmp_path / "off", "--layout", "official").code == 0
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "off" / "model.safetensors")


def test_dry_run(cli, tmp_path: Path) -> None:
    outcome = cli("convert", KIMI, tmp_path / "k", "--to", "mxfp4", "--ignore", "lm_head", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert not (tmp_path / "k").exists()
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["tensor", "how", "dtype", "shape", "bytes"]
    rows = {line.split()[0].rstrip(","): line for line in lines if line.startswith(("model.", "lm_head"))}
    assert len(rows) == 325
    # 128 x 320 numbers: half a byte each, and a byte for every 32.
    down = rows["model.layers.0.block_sparse_moe.down_proj.weight_packed"].split()
    assert down[1:] == ["weight_scale", "bfloat16", "to", "mxfp4", "uint8", "128", "x", "160", "21.8", "kB"]
    assert "copied as it is" in rows["lm_head.weight"]
    assert lines[-1].startswith("plain, 325 tensors, 5.7 MB -> 325 conversions, ")
    assert lines[-1].endswith("Nothing was written.")


def test_shards_jobs_and_resume(cli, tmp_path: Path) -> None:
    options = ("--to", "mxfp4", "--shard-size", 0.0006, "--jobs", 2)
    assert "in 4 files of weights" in cli("convert", KIMI, tmp_path / "k", *options).out
    again = cli("convert", KIMI, tmp_path / "k", *options, "--resume")
    assert again.code == 0
    assert "4 of them there already" in again.out


def test_parts_and_their_merging(cli, mistake, tmp_path: Path) -> None:
    options = ("--layout", "hf", "--shard-size", 0.001)
    assert cli("convert", KIMI, tmp_path / "one", *options).code == 0
    shown = cli("convert", KIMI, tmp_path / "k", *options, "--part", "2/2", "--dry-run").out
    assert "model.norm.weight" in shown
    assert "embed_tokens" not in shown
    assert "files of weights" in cli("convert", KIMI, tmp_path / "k", *options, "--part", "2/2", "--verify").out
    assert "found no 1/2; --part 1/2 makes it" in mistake("convert", KIMI, tmp_path / "k", *options, "--merge")
    other = ("--layout", "hf", "--shard-size", 0.002, "--part", "1/2")
    assert "made with --shard-size: expected 0.002" in mistake("convert", KIMI, tmp_path / "k", *other)
    assert cli("convert", KIMI, tmp_path / "k", *options, "--part", "1/2").code == 0
    merged = cli("convert", KIMI, tmp_path / "k", *options, "--merge", "--verify")
    assert "2 parts merged" in merged.out
    assert ", 0 wrong" in merged.out
    one, parts = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "k"))
    assert parts == one


def test_mistakes_about_parts(mistake, tmp_path: Path) -> None:
    for part in ("0/2", "3/2", "2", "a/b", "1/2/3"):
        line = mistake("convert", KIMI, tmp_path / "k", "--to", "bf16", "--part", part)
        assert f"--part: expected I/N with I from 1 to N, as 2/4, found '{part}'" in line
    for option in (("--part", "1/2"), ("--resume",), ("--dry-run",)):
        line = mistake("convert", KIMI, tmp_path / "k", "--to", "bf16", "--merge", *option)
        assert "--merge goes without --part, --resume and --dry-run" in line


def test_verify_fails(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify._rows
    monkeypatch.setattr(
        verify, "_rows", lambda header, name, *more: real(header, name, *more) ^ (name == "lm_head.weight")
    )
    outcome = cli("convert", KIMI, tmp_path / "k", "--to", "mxfp4", "--ignore", "lm_head", "--verify")
    assert outcome.code == 1
    assert "wrong bytes" in outcome.out
    assert outcome.err == "xpu-ports: lm_head.weight is not what the source gives\n"


def test_what_is_to_be_made_must_be_said(mistake, tmp_path: Path) -> None:
    for options in ((), ("--to", "bf16", "--layout", "hf")):
        assert "say what to make: --to mxfp4" in mistake("convert", KIMI, tmp_path / "k", *options)
    assert "--to" in mistake("convert", KIMI, tmp_path / "k", "--to", "int4")


@pytest.mark.parametrize(
    "options", [("--ignore", "lm_head"), ("--scale-rule", "floor"), ("--activations", "none")], ids=lambda o: o[0]
)
def test_options_of_mxfp4_alone(mistake, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert f"{options[0]} is for --to mxfp4" in mistake("convert", KIMI, tmp_path / "k", "--to", "bf16", *options)


def test_sources_that_are_none(mistake, tmp_path: Path) -> None:
    target = tmp_path / "k"
    assert "nowhere: no such folder" in mistake("convert", tmp_path / "nowhere", target, "--to", "bf16")
    assert "`hf download some/model` fetches it first" in mistake("convert", "some/model", target, "--to", "bf16")
    assert "a file, expected the folder" in mistake("convert", KIMI / "config.json", target, "--to", "bf16")
    assert "config.json: expected the model's configuration" in mistake("convert", tmp_path, target, "--to", "bf16")


def test_errors_name_file_key_expected_and_found(mistake, tmp_path: Path) -> None:
    line = mistake("convert", ZAMBA2, tmp_path / "z", "--to", "mxfp4")
    assert "tiny-zamba2/model.safetensors: model.layers." in line
    assert "weight: expected rows of a multiple of 32 values, found 16; --ignore model.layers." in line
    assert not (tmp_path / "z").exists()
    line = mistake("convert", KIMI, tmp_path / "k", "--to", "mxfp4", "--ignore", "lm_haed")
    assert "--ignore: lm_haed: expected the name of a layer, or re: and an expression, found none" in line
    line = mistake("convert", KIMI, tmp_path / "k", "--to", "mxfp4", "--ignore", "re:(")
    assert "expected a regular expression after `re:`" in line


def test_target_in_the_source(mistake, tiny_copy: Path) -> None:
    line = mistake("convert", tiny_copy, tiny_copy / "out", "--to", "bf16")
    assert "expected a folder apart from the source's" in line
    assert not (tiny_copy / "out").exists()


def test_a_target_that_is_not_empty(mistake, tmp_path: Path) -> None:
    shutil.copytree(KIMI, tmp_path / "k")
    assert "expected an empty folder, or none" in mistake("convert", KIMI, tmp_path / "k", "--to", "bf16")


def test_a_model_with_one_layout(mistake, tmp_path: Path, tiny_copy: Path) -> None:
    assert "model_type 'zamba2': its port has one layout only" in mistake(
        "convert", ZAMBA2, tmp_path / "z", "--layout", "hf"
    )
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v9"}))
    line = mistake("convert", tiny_copy, tmp_path / "z", "--layout", "official")
    assert "--layout official of model_type 'deepseek_v9': there is no port of it" in line
