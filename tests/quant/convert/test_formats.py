"""Every format that is read, to MXFP4 and to bf16, against numbers from independent code; and what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import xpu_ports.quant
from tests.quant.convert import sources
from tests.quant.convert.sources import load, packed_llama, random_fp8, random_mxfp4, to_bf16, to_mxfp4
from tests.quant.producers import configure, prompt, tiny_llama, write_with_compressed_tensors
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.plan import ToMXFP4, plan_bf16, plan_mxfp4
from xpu_ports.quant.mxfp4.format import quantize
from xpu_ports.quant.mxfp4.linear import MXFP4Linear

TINY_KIMI = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"
QUARK_WEIGHT = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False,
                "scale_calculation_mode": "even"}  # fmt: skip
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": QUARK_WEIGHT, "input_tensors": {**QUARK_WEIGHT, "is_dynamic": True}},
    "layer_quant_config": {},
    "exclude": ["lm_head"],
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP4", "group_size": 32, "exclude_modules": ["lm_head"]}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    xpu_ports.quant.register()
    yield
    xpu_ports.quant.unregister()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, whatever the dtype."""
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*flat)


def groups_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


# --------------------------------------------------------------------------------------------------------------- plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
def test_plain_gives_the_bytes_of_compressed_tensors(tmp_path: Path, dtype: torch.dtype, sharded: bool) -> None:
    pytest.importorskip("compressed_tensors")
    model = tiny_llama().to(dtype)
    model.save_pretrained(tmp_path / "source", max_shard_size="40KB" if sharded else "1GB")
    assert (len(list((tmp_path / "source").glob("*.safetensors"))) > 1) == sharded
    write_with_compressed_tensors(model, tmp_path / "theirs", {"MXFP4A16": ["Linear"]})
    to_mxfp4(tmp_path / "source", tmp_path / "ours", ignore=("lm_head",))
    ours, theirs = load(tmp_path / "ours"), load(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert same(ours[key], tensor), key
    assert groups_of(tmp_path / "ours")["config_groups"] == groups_of(tmp_path / "theirs")["config_groups"]


@pytest.mark.parametrize("rule", ["even", "floor", "rceil"])
@pytest.mark.parametrize("activations", ["mxfp4", None])
def test_options_reach_the_target(tmp_path: Path, rule: str, activations: str | None) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "source")
    to_mxfp4(tmp_path / "source", tmp_path / "target", scale_rule=rule, activations=activations)
    made = load(tmp_path / "target")
    layer = "model.layers.1.mlp.down_proj"
    packed, scale = quantize(model.get_parameter(f"{layer}.weight"), rule)
    assert same(made[f"{layer}.weight_packed"], packed)
    assert same(made[f"{layer}.weight_scale"], scale)
    loaded = xpu_ports.quant.load(tmp_path / "target")
    assert loaded.get_submodule(layer).activations == activations


def test_scale_rules_differ(tmp_path: Path) -> None:
    """Or the test above shows nothing."""
    weight = tiny_llama().get_parameter("model.layers.1.mlp.down_proj.weight")
    scales = [quantize(weight, rule)[1] for rule in ("even", "floor", "rceil")]
    assert not same(scales[0], scales[1])
    assert not same(scales[0], scales[2])


def test_a_converted_checkpoint_generates_and_transformers_reads_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    tiny_llama().bfloat16().save_pretrained(tmp_path / "source")
    to_mxfp4(tmp_path / "source", tmp_path / "target")
    to_bf16(tmp_path / "target", tmp_path / "dense")
    packed = xpu_ports.quant.load(tmp_path / "target")
    assert isinstance(packed.model.layers[0].mlp.down_proj, MXFP4Linear)
    assert packed.generate(prompt(96), max_new_tokens=5, do_sample=False).shape == (2, 28)
    xpu_ports.quant.unregister()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    theirs(prompt(96))
    dense = LlamaForCausalLM.from_pretrained(tmp_path / "dense")
    for name, parameter in dense.named_parameters():
        assert same(parameter.data, theirs.get_parameter(name).data), name


def test_a_tied_head_is_ignored_with_its_embedding(tmp_path: Path) -> None:
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "source")
    to_mxfp4(tmp_path / "source", tmp_path / "target")
    assert groups_of(tmp_path / "target")["ignore"] == ["lm_head"]
    assert "model.embed_tokens.weight" in load(tmp_path / "target")
    assert not any("lm_head" in key for key in load(tmp_path / "target"))
    xpu_ports.quant.load(tmp_path / "target")


@pytest.mark.parametrize(
    ("ignore", "dense"),
    [
        (("model.layers.0.mlp.up_proj",), {"model.layers.0.mlp.up_proj"}),
        ((r"re:.*\.1\.mlp\.(up|down)_proj", "lm_head"),
         {"model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj", "lm_head"}),
        # compressed-tensors matches from the beginning of a name.
        (("re:model.layers.0.mlp",), {f"model.layers.0.mlp.{p}_proj" for p in ("gate", "up", "down")}),
    ],
)  # fmt: skip
def test_ignore(tmp_path: Path, ignore: tuple[str, ...], dense: set[str]) -> None:
    tiny_llama().save_pretrained(tmp_path / "source")
    to_mxfp4(tmp_path / "source", tmp_path / "target", ignore=ignore)
    made, before = load(tmp_path / "target"), load(tmp_path / "source")
    linear = {k.removesuffix(".weight") for k, t in before.items() if t.dim() == 2 and "embed" not in k}
    assert {layer for layer in linear if f"{layer}.weight" in made} == dense
    assert all(same(made[f"{layer}.weight"], before[f"{layer}.weight"]) for layer in dense)
    assert {layer for layer in linear if f"{layer}.weight_packed" in made} == linear - dense
    xpu_ports.quant.load(tmp_path / "target")


@pytest.mark.parametrize("pattern", ["mlp.up_proj", "re:layers", "lm_heed", "model.layers.0.mlp.up_proj.weight"])
def test_a_pattern_that_names_nothing(tmp_path: Path, pattern: str) -> None:
    tiny_llama().save_pretrained(tmp_path / "source")
    with pytest.raises(CheckpointError, match=re.escape(f"--ignore: {pattern}: expected the name of a layer")):
        plan_mxfp4(read_source(tmp_path / "source"), ToMXFP4(ignore=(pattern,)))


def test_a_width_that_does_not_fit(tmp_path: Path) -> None:
    tiny_llama(intermediate_size=80).save_pretrained(tmp_path / "source")
    expected = "mlp.down_proj.weight: expected rows of a multiple of 32 values, found 80; --ignore model.layers.0"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        plan_mxfp4(read_source(tmp_path / "source"), ToMXFP4())
    to_mxfp4(tmp_path / "source", tmp_path / "target", ignore=("re:.*down_proj",))
    xpu_ports.quant.load(tmp_path / "target")


def test_nan_is_told_and_never_zero(tmp_path: Path) -> None:
    model = tiny_llama()
    model.lm_head.weight.data[3, 40] = math.inf
    model.save_pretrained(tmp_path / "source")
    plan = plan_mxfp4(read_source(tmp_path / "source"), ToMXFP4())
    assert sources.write(plan, tmp_path / "target") == {"lm_head.weight_packed": 1}
    to_bf16(tmp_path / "target", tmp_path / "dense")
    assert load(tmp_path / "dense")["lm_head.weight"][3, 32:].isnan().all()


def test_bf16_of_plain(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "source")
    to_bf16(tmp_path / "source", tmp_path / "target")
    made = load(tmp_path / "target")
    assert all(same(made[key], t.bfloat16()) for key, t in load(tmp_path / "source").items())
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    # fp32 in a checkpoint of 16 bits is meant.
    tensors = load(tmp_path / "source") | {"model.norm.weight": torch.ones(64)}
    sources.save(tmp_path / "mixed", {k: t if "norm" in k else t.half() for k, t in tensors.items()},
                 {**config, "dtype": "float16"})  # fmt: skip
    to_bf16(tmp_path / "mixed", tmp_path / "mixed16")
    dtypes = {key: t.dtype for key, t in load(tmp_path / "mixed16").items()}
    assert {dtype for key, dtype in dtypes.items() if "norm" in key} == {torch.float32}
    assert {dtype for key, dtype in dtypes.items() if "norm" not in key} == {torch.bfloat16}


# -------------------------------------------------------------------------------------------------- compressed-tensors


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    pytest.importorskip("compressed_tensors")
    write_with_compressed_tensors(tiny_llama().bfloat16(), tmp_path / "theirs", {"MXFP4": ["Linear"]})
    return tmp_path / "theirs"


def test_compressed_tensors_is_carried_over(theirs: Path, tmp_path: Path) -> None:
    to_mxfp4(theirs, tmp_path / "target")
    made, before = load(tmp_path / "target"), load(theirs)
    assert made.keys() == before.keys()
    assert all(same(made[key], before[key]) for key in before)
    # W4A4, as the source says, and W4A16 on request.
    assert groups_of(tmp_path / "target")["config_groups"]["group_0"]["input_activations"]["dynamic"] is True
    to_mxfp4(theirs, tmp_path / "a16", activations=None)
    assert groups_of(tmp_path / "a16")["config_groups"]["group_0"]["input_activations"] is None


def test_scales_that_are_4_times_too_small(theirs: Path, tmp_path: Path) -> None:
    to_bf16(theirs, tmp_path / "right")
    tensors = {k: t - 2 if k.endswith("weight_scale") else t for k, t in load(theirs).items()}
    save_file(tensors, theirs / "model.safetensors", {"format": "pt"})
    configure(theirs, lambda c: c.update(version="0.13.0"))
    plan = plan_mxfp4(read_source(theirs), ToMXFP4())
    assert any("0.13.0, whose scales are 4 times too small; --fix-scales" in w for w in plan.warnings)
    to_bf16(theirs, tmp_path / "wrong")
    right, wrong = load(tmp_path / "right"), load(tmp_path / "wrong")
    assert torch.equal(right["model.layers.0.mlp.up_proj.weight"], 4 * wrong["model.layers.0.mlp.up_proj.weight"])
    assert not to_bf16(theirs, tmp_path / "fixed", fix_scales=True).warnings
    assert all(same(t, load(tmp_path / "fixed")[key]) for key, t in right.items())
    to_mxfp4(theirs, tmp_path / "packed", fix_scales=True)
    to_bf16(tmp_path / "packed", tmp_path / "again")
    assert all(same(t, load(tmp_path / "again")[key]) for key, t in right.items())
    configure(theirs, lambda c: c.update(version="0.20.1"))
    assert not read_source(theirs).warnings
    with pytest.raises(CheckpointError, match=r"version: expected a version .* before 0.14.*, found '0.20.1'"):
        read_source(theirs, fix_scales=True)


# -------------------------------------------------------------------------------------------------- Quark and ModelOpt


@pytest.mark.parametrize("quantization", [QUARK, MODELOPT], ids=["quark", "modelopt"])
def test_quark_and_modelopt(tmp_path: Path, quantization: dict[str, Any]) -> None:
    packed = packed_llama(tmp_path / "source", quantization)
    to_bf16(tmp_path / "source", tmp_path / "dense")
    to_mxfp4(tmp_path / "source", tmp_path / "target")
    dense, made = load(tmp_path / "dense"), load(tmp_path / "target")
    assert len(packed) == 14
    for key, (codes, scales, values) in packed.items():
        assert same(dense[key], values.bfloat16()), key
        assert same(made[f"{key}_packed"], codes)
        assert same(made[f"{key}_scale"], scales)
    loaded = xpu_ports.quant.load(tmp_path / "target")
    assert loaded.model.layers[0].mlp.down_proj.activations == "mxfp4"
    assert type(loaded.lm_head) is torch.nn.Linear
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "dense").lm_head.weight, loaded.lm_head.weight)


def test_the_config_file_of_modelopt(tmp_path: Path) -> None:
    packed_llama(tmp_path / "source", None)
    stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_MXFP4", "group_size": 32}}
    (tmp_path / "source" / "hf_quant_config.json").write_text(json.dumps(stated))
    source = read_source(tmp_path / "source")
    assert (source.format, source.activations, len(source.quantized)) == ("modelopt", None, 14)
    to_mxfp4(tmp_path / "source", tmp_path / "target")
    assert not (tmp_path / "target" / "hf_quant_config.json").exists()


def test_activations_that_are_not_computed_must_be_chosen(tmp_path: Path) -> None:
    packed_llama(tmp_path / "source", {**MODELOPT, "quant_algo": "W4A8_MXFP4_FP8"})
    with pytest.raises(CheckpointError, match=r"--activations to say which, found inputs as 8 bits"):
        plan_mxfp4(read_source(tmp_path / "source"), ToMXFP4())
    to_mxfp4(tmp_path / "source", tmp_path / "target", activations=None)


# ------------------------------------------------------------------------------------------------------------- gpt-oss


def test_gpt_oss_to_bf16(tmp_path: Path) -> None:
    packed, model = sources.gpt_oss(tmp_path / "source")
    to_bf16(tmp_path / "source", tmp_path / "dense")
    dense = load(tmp_path / "dense")
    for name, (_, _, values) in packed.items():
        assert same(dense[name], values.mT.bfloat16().contiguous()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert all(same(loaded.get_parameter(name).data, p.data) for name, p in model.named_parameters())


def test_gpt_oss_to_mxfp4(tmp_path: Path) -> None:
    packed, model = sources.gpt_oss(tmp_path / "source")
    plan = to_mxfp4(tmp_path / "source", tmp_path / "target", ignore=("re:.*0.mlp.experts.2.down_proj",))
    assert any("packed layers have no place in GptOssForCausalLM" in w for w in plan.warnings)
    made = load(tmp_path / "target")
    prefix = "model.layers.1.mlp.experts"
    codes, scales, values = packed[f"{prefix}.gate_up_proj"]
    bias = model.get_parameter(f"{prefix}.gate_up_proj_bias")
    for e in range(3):
        for i, part in enumerate(("gate_proj", "up_proj")):
            assert same(made[f"{prefix}.{e}.{part}.weight_packed"], codes[e, i::2])
            assert same(made[f"{prefix}.{e}.{part}.weight_scale"], scales[e, i::2])
            assert same(made[f"{prefix}.{e}.{part}.bias"], bias[e, i::2].data)
        assert same(made[f"{prefix}.{e}.down_proj.weight_packed"], packed[f"{prefix}.down_proj"].codes[e])
    ignored = "model.layers.0.mlp.experts.2.down_proj"
    values = packed["model.layers.0.mlp.experts.down_proj"].values[2]
    assert same(made[f"{ignored}.weight"], values.bfloat16())
    ignore = groups_of(tmp_path / "target")["ignore"]
    # What the producer has left dense stays so.
    assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router"} <= set(ignore)
    to_bf16(tmp_path / "target", tmp_path / "dense")
    up = load(tmp_path / "dense")[f"{prefix}.1.up_proj.weight"]
    assert same(up, packed[f"{prefix}.gate_up_proj"].values[1, 1::2].bfloat16())


# --------------------------------------------------------------------------------------------------------- DeepSeek-V4


def test_deepseek_v4_to_bf16(tmp_path: Path) -> None:
    dense = sources.deepseek_v4(tmp_path / "source")
    to_bf16(tmp_path / "source", tmp_path / "target")
    made = load(tmp_path / "target")
    assert made.keys() == dense.keys()
    assert all(same(made[key], dense[key]) for key in dense)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & config.keys()
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(info.values())
    down = loaded.model.layers[2].mlp.experts.down_proj[3]
    assert same(down.data, dense["layers.2.ffn.experts.3.w2.weight"])


def test_deepseek_v4_to_mxfp4(tmp_path: Path) -> None:
    dense = sources.deepseek_v4(tmp_path / "source")
    plan = to_mxfp4(tmp_path / "source", tmp_path / "target", ignore=("re:.*shared_experts.w2",))
    assert any("have no place in DeepseekV4ForCausalLM" in w for w in plan.warnings)
    before, made = load(tmp_path / "source"), load(tmp_path / "target")
    for layer in ("layers.3.ffn.experts.1.w2", "mtp.0.ffn.experts.0.w1"):
        assert same(made[f"{layer}.weight_packed"], before[f"{layer}.weight"].view(torch.uint8))
        assert same(made[f"{layer}.weight_scale"], before[f"{layer}.scale"].view(torch.uint8))
    for layer in ("layers.0.attn.wq_b", "mtp.0.attn.wkv"):
        packed, scale = quantize(dense[f"{layer}.weight"].float())
        assert same(made[f"{layer}.weight_packed"], packed)
        assert same(made[f"{layer}.weight_scale"], scale)
    # Ignored; of a class that computes something of its own; dense in the source.
    for layer in ("layers.0.ffn.shared_experts.w2", "layers.0.attn.wo_a", "layers.2.attn.compressor.wkv"):
        assert same(made[f"{layer}.weight"], dense[f"{layer}.weight"]), layer
    assert not any(key.endswith(".scale") for key in made)
    ignore = groups_of(tmp_path / "target")["ignore"]
    assert {"layers.0.attn.wo_a", "layers.2.attn.compressor.wkv", "layers.1.ffn.gate", "head"} <= set(ignore)


@pytest.mark.parametrize("e8m0", [True, False], ids=["e8m0", "fp32"])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200)], ids=["whole-tiles", "cut-tiles"])
def test_fp8_tiles(tmp_path: Path, shape: tuple[int, int], e8m0: bool) -> None:
    """In pieces of a few rows, which begin within a tile."""
    made = random_fp8(*shape, e8m0=e8m0)
    tensors = {"a.weight": made.codes, "a.weight_scale_inv": made.scales}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sources.save(tmp_path, tensors, {"model_type": "none"}, quantization)
    values = read_source(tmp_path).quantized["a.weight"]
    pieces = [values.rows(a, min(a + 50, shape[0])) for a in range(0, shape[0], 50)]
    assert torch.equal(torch.cat(pieces), made.values)


def test_a_quantized_source_of_an_unknown_model(tmp_path: Path) -> None:
    packed = packed_llama(tmp_path / "source", QUARK)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "model_type": "llama9"}))
    plan = to_mxfp4(tmp_path / "source", tmp_path / "target")
    assert any("model_type: expected one that transformers knows" in w for w in plan.warnings)
    assert same(load(tmp_path / "target")["model.layers.0.mlp.up_proj.weight_packed"],
                packed["model.layers.0.mlp.up_proj.weight"].codes)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- errors


def _drop(key: str) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.pop(key))


def _put(key: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda folder: _edit(folder, lambda tensors: tensors.update({key: tensor}))


def _edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


LAYER = "model.layers.0.mlp.down_proj"
DAMAGE = {
    "no-scale": (_drop(f"{LAYER}.weight_scale"), f"{LAYER}.weight: expected {LAYER}.weight_scale beside it"),
    "stray-scale": (_put("a.weight_scale", torch.zeros(4, 2)), "nothing reads weight_scale"),
    "stray-bytes": (_put("a.b", torch.zeros(4, dtype=torch.uint8)), "expected a tensor of a checkpoint in the format"),
    "scale-shape": (_put(f"{LAYER}.weight_scale", torch.zeros(64, 4, dtype=torch.uint8)),
                    "expected uint8 or float8_e8m0fnu [64, 5], found uint8 [64, 4]"),
    "scale-dtype": (_put(f"{LAYER}.weight_scale", torch.ones(64, 5)), "found float32 [64, 5]"),
    "method": (_config(quantization_config={"quant_method": "gptq"}), "quant_method: expected one of"),
    "no-object": (_config(quantization_config="mxfp4"), "quantization_config: expected an object, found 'mxfp4'"),
    "rotated": (_config(quantization_config={**QUARK, "algo_config": [{"name": "rotation"}]}), "algo_config: expected"),
    "group": (_config(quantization_config={**QUARK, "global_quant_config": {
        "weight": {**QUARK_WEIGHT, "group_size": 16}}}), "weight.group_size: expected 32, found 16"),
    "nvfp4": (_config(quantization_config={**MODELOPT, "quant_algo": "NVFP4"}), "one with MXFP4 in its name"),
    "cache": (_config(quantization_config={**MODELOPT, "kv_cache_quant_algo": "FP8"}), "a cache that is quantized"),
    "nested": (_config(text_config={"quantization_config": {}}), "text_config.quantization_config: expected"),
    "none": (_config(quantization_config=None), "config.json has no quantization_config"),
    "int4": (_config(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
             "format: expected 'mxfp4-pack-quantized', found 'pack-quantized'"),
    "tiles": (_config(quantization_config={"quant_method": "fp8"}), "weight_block_size: expected two sizes"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    packed_llama(tmp_path, QUARK)
    damage, message = DAMAGE[name]
    read_source(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_source(tmp_path)


def test_a_plain_checkpoint_of_an_unknown_model(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _config(model_type="llama9")(tmp_path)
    with pytest.raises(CheckpointError, match=r"model_type: expected one that transformers knows"):
        plan_mxfp4(read_source(tmp_path), ToMXFP4())
    assert any("fp32 tensors are told from the rest" in w for w in plan_bf16(read_source(tmp_path)).warnings)


def test_a_part_of_what_a_model_joins(tmp_path: Path) -> None:
    """Kimi Linear has q, k and v in one layer, which is packed or not."""
    source = read_source(TINY_KIMI)
    expected = "self_attn.q_proj: expected W4A16 as|self_attn.k_proj: expected no quantization as"
    with pytest.raises(CheckpointError, match=expected):
        plan_mxfp4(source, ToMXFP4(ignore=("model.layers.1.self_attn.q_proj",)), KimiLinearForCausalLM)
    # Under the model's name it is the whole.
    plan = plan_mxfp4(source, ToMXFP4(ignore=("model.layers.1.self_attn.qkv_proj",)), KimiLinearForCausalLM)
    dense = {f"model.layers.1.self_attn.{n}_proj" for n in "qkv"}
    assert dense <= set(plan.config["quantization_config"]["ignore"])


def test_nothing_to_quantize(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a linear layer to quantize"):
        plan_mxfp4(read_source(tmp_path), ToMXFP4(ignore=("re:.*",)))


def test_a_layer_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    _drop("model.layers.1.mlp.up_proj.weight")(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj: expected its tensors in the checkpoint"):
        plan_mxfp4(read_source(tmp_path), ToMXFP4())


def test_random_mxfp4_is_read_as_it_was_made(tmp_path: Path) -> None:
    """Rows of a part of a stack, and pieces that begin anywhere."""
    made = random_mxfp4(3, 10, 64)
    stored = {"x.gate_up_proj_blocks": made.codes.unflatten(-1, (2, 16)), "x.gate_up_proj_scales": made.scales}
    sources.save(tmp_path, stored, {"model_type": "none"}, {"quant_method": "mxfp4"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_slice("x.gate_up_proj_blocks").get_shape() == [3, 10, 2, 16]
    plan = plan_mxfp4(read_source(tmp_path), ToMXFP4())
    step = next(s for s in plan.steps if s.outputs[0].name == "x.1.up_proj.weight_packed")
    assert same(torch.cat([step.make(a, a + 1)[0] for a in range(5)]), made.codes[1, 1::2])


def test_a_stack_that_stays_dense_is_told(tmp_path: Path) -> None:
    """gpt-oss as it is in bf16: transformers' class, whose experts are no linear layers."""
    sources.gpt_oss(tmp_path / "source")
    to_bf16(tmp_path / "source", tmp_path / "dense")
    plan = plan_mxfp4(read_source(tmp_path / "dense"), ToMXFP4())
    expected = "model.layers.0.mlp.experts.down_proj and 3 more: a stack of matrices stays as it is"
    assert any(expected in warning for warning in plan.warnings)
