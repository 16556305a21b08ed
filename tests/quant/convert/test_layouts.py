"""Changes of names: Kimi Linear between the published layout and transformers' own, and rules by themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import KimiLinearForCausalLM as TransformersKimi

from tests.quant.convert import sources
from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.common.conversion import Fuse, Rename, Rule, Split
from xpu_ports.common.weights import expected_tensors
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.kimi_linear.weight_rules import hf_rules
from xpu_ports.quant.convert import model
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.layouts import plan_layout
from xpu_ports.quant.convert.plan import ToMXFP4, plan_mxfp4

TINY = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"


def convert(source: Path, target: Path, layout: str) -> dict[str, Tensor]:
    config = model.read_config(source)
    plan = plan_layout(read_source(source), layout, hf_rules(config), expected_tensors(TransformersKimi, config))
    sources.write(plan, target)
    return sources.load(target)


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, tensor in a.items():
        assert tensor.dtype == b[key].dtype, key
        assert torch.equal(tensor, b[key]), key


def test_kimi_linear_to_the_names_of_transformers(tmp_path: Path) -> None:
    made = convert(TINY, tmp_path / "hf", "hf")
    theirs = TransformersKimi.from_pretrained(TINY)
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=False)
    equal({k: t.to(made[k].dtype) for k, t in sources.load(tmp_path / "theirs").items()}, made)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((TINY / "config.json").read_text())
    loaded = KimiLinearForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    equal(dict(KimiLinearForCausalLM.from_pretrained(TINY).state_dict()), dict(loaded))


def test_kimi_linear_there_and_back(tmp_path: Path) -> None:
    convert(TINY, tmp_path / "hf", "hf")
    back = convert(tmp_path / "hf", tmp_path / "back", "official")
    # The first layer's MLP is called block_sparse_moe in files that transformers writes, and mlp where published.
    published = {k.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): t for k, t in sources.load(TINY).items()}
    equal(back, published)
    KimiLinearForCausalLM.from_pretrained(tmp_path / "back").save_pretrained(tmp_path / "ours")
    assert sources.load(tmp_path / "ours").keys() == back.keys()
    # What has the names already keeps them.
    equal(convert(tmp_path / "back", tmp_path / "again", "official"), back)
    equal(convert(tmp_path / "hf", tmp_path / "hf2", "hf"), sources.load(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.2.block_sparse_moe.experts.3.w1.weight"),
         r"model.layers.2.mlp.experts.3.w1.weight: expected it, found none; with .* it makes .*gate_up_proj"),
        (lambda t: t.pop("model.layers.2.self_attn.k_conv1d.weight"), r"k_conv1d.weight: expected it, found none"),
        (lambda t: t.pop("model.norm.weight"), r"model.norm.weight: expected it, or what it is made of, found none"),
        (lambda t: t.update({"model.extra.weight": torch.ones(3)}),
         r"model.extra.weight: expected a tensor of the model, found one without a place"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"expected shape \[128\] for model.norm.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_conv1d.weight": torch.ones(128, 1, 4, dtype=torch.half)}),
         r"expected torch.float16 \[128, 1, 4\] like|expected torch.bfloat16 \[128, 1, 4\] like"),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(3)}),
         r"expected model.layers.0.mlp.up_proj.weight once, found .* too"),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, damage, message: str) -> None:
    tensors = load_file(TINY / "model.safetensors")
    damage(tensors)
    (tmp_path / "config.json").write_bytes((TINY / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path, tmp_path / "target", "hf")
    assert not (tmp_path / "target").exists()


def test_a_quantized_source(tmp_path: Path) -> None:
    sources.packed_llama(tmp_path, {"quant_method": "modelopt", "quant_algo": "MXFP4"})
    with pytest.raises(CheckpointError, match=r"quantization_config: expected none, to change names, found format mod"):
        plan_layout(read_source(tmp_path), "hf", (), {})


FILES = {
    "a.1.x": torch.arange(6).view(3, 2), "a.1.y": torch.arange(6, 12).view(3, 2), "b.q": torch.arange(12).view(4, 3),
    "c.0.u": torch.arange(4).view(2, 2), "c.1.u": torch.arange(4, 8).view(2, 2), "c.0.v": torch.ones(2, 2).long(),
    "c.1.v": torch.zeros(2, 2).long(), "old": torch.ones(5),
}  # fmt: skip
RULES: tuple[Rule, ...] = (
    Rename("old", "new"),
    Fuse(("a.{i}.x", "a.{i}.y"), "a.{i}.xy", dim=1),
    Fuse(("c.{e}.u", "c.{e}.v"), "c.uv", dim=2, stack="e"),
    Split("b.q", ("b.q1", "b.q2"), shares=(3, 1)),
)
MODEL = {
    "a.1.xy": torch.cat([FILES["a.1.x"], FILES["a.1.y"]], 1),
    "c.uv": torch.cat([torch.stack([FILES[f"c.{e}.{n}"] for e in range(2)]) for n in "uv"], 2),
    "b.q1": FILES["b.q"][:3], "b.q2": FILES["b.q"][3:], "new": FILES["old"],
}  # fmt: skip


@pytest.mark.parametrize(("layout", "before", "after"), [("hf", FILES, MODEL), ("official", MODEL, FILES)])
def test_rules_by_themselves(tmp_path: Path, layout: str, before: dict, after: dict) -> None:
    """Joined along the last dimension, stacked, parted unevenly."""
    source = sources.save(tmp_path / "source", before, {"model_type": "none"})
    expected = {key: TensorInfo(tuple(t.shape), t.dtype) for key, t in MODEL.items()}
    sources.write(plan_layout(read_source(source), layout, RULES, expected), tmp_path / "target")
    equal(sources.load(tmp_path / "target"), dict(after))


def test_stacked_experts_are_not_left_dense_in_silence(tmp_path: Path) -> None:
    """transformers' names have all experts in one tensor, which files that are packed cannot have."""
    convert(TINY, tmp_path / "hf", "hf")
    with pytest.raises(CheckpointError, match=r"gate_up_proj: expected a matrix an expert.*--layout official makes it"):
        plan_mxfp4(read_source(tmp_path / "hf"), ToMXFP4(), KimiLinearForCausalLM)
