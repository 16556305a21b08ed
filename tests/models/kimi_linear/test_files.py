"""Kimi Linear's files: the published layout, transformers' two, what saving writes, what config.json may say."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import KimiLinearConfig
from transformers import KimiLinearForCausalLM as TransformersKimi

from xpu_ports.common.weights import CheckpointError
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM, KimiLinearModel

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"

# config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct with tiny-kimi-linear's sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 320,
    "kv_lora_rank": 64,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "head_dim": 32,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1024,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 4,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 32,
    "vocab_size": 2048,
}
# The published names of one layer of each kind; layer 0 has the dense MLP.
DELTA = [
    *(f"{name}_proj.weight" for name in ("q", "k", "v", "f_a", "f_b", "b", "g_a", "g_b", "o")),
    *(f"{name}_conv1d.weight" for name in "qkv"), "A_log", "dt_bias", "o_norm.weight",
]  # fmt: skip
LATENT = [
    f"{name}.weight" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
]  # fmt: skip
MLP = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
EXPERTS = [
    "gate.weight", "gate.e_score_correction_bias", *(f"shared_experts.{name}" for name in MLP),
    *(f"experts.{e}.w{w}.weight" for e in range(8) for w in (1, 2, 3)),
]  # fmt: skip


def published_names() -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for i in range(8):
        prefix = f"model.layers.{i}."
        names |= {f"{prefix}{name}_layernorm.weight" for name in ("input", "post_attention")}
        names |= {f"{prefix}self_attn.{name}" for name in (LATENT if i in (3, 7) else DELTA)}
        names |= {f"{prefix}mlp.{n}" for n in MLP} if i == 0 else {f"{prefix}block_sparse_moe.{n}" for n in EXPERTS}
    return names


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """tiny-kimi-linear as its authors' own code would have written it."""
    tensors = {
        key.replace("layers.0.block_sparse_moe", "layers.0.mlp"): t
        for key, t in load_file(CHECKPOINT / "model.safetensors").items()
    }
    assert tensors.keys() == published_names()
    return write(tmp_path_factory.mktemp("files") / "published", tensors, PUBLISHED)


def load(folder: Path, cls: type = KimiLinearForCausalLM, dtype: torch.dtype = torch.float32):
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()


@torch.no_grad()
def logits(model) -> Tensor:
    return model(torch.arange(3, 60)[None] * 7 % 2048).logits


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(load(CHECKPOINT))


def test_the_published_layout_loads(published, expected):
    assert torch.equal(logits(load(published)), expected)


def test_transformers_own_names_load(tmp_path, expected):
    """What it writes with its conversion turned off."""
    load(CHECKPOINT, TransformersKimi).save_pretrained(tmp_path, save_original_format=False)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.self_attn.forget_gate.A_log"} <= keys
    # The same weights, at addresses by which a CPU's products may go about them differently.
    torch.testing.assert_close(logits(load(tmp_path)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("source", ["published", "transformers"])
def test_saving_writes_the_published_layout(source, published, tmp_path, expected):
    model = load(published if source == "published" else CHECKPOINT)
    before = model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == before
    assert load_file(tmp_path / "model.safetensors").keys() == published_names()
    config = json.loads((tmp_path / "config.json").read_text())
    same = PUBLISHED.keys() - {"dtype", "transformers_version", "rope_scaling", "rope_theta"}
    assert {name: config[name] for name in same} == {name: PUBLISHED[name] for name in same}
    assert torch.equal(logits(load(tmp_path)), expected)
    assert torch.equal(logits(load(tmp_path, TransformersKimi)), logits(load(CHECKPOINT, TransformersKimi)))


def test_saving_a_new_model(tmp_path):
    config = KimiLinearConfig.from_pretrained(CHECKPOINT, num_hidden_layers=3)
    config.layer_types = ["linear_attention", "full_attention", "linear_attention"]
    config.mlp_layer_types = ["dense", "dense", "sparse"]
    model = KimiLinearForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["linear_attn_config"]["kda_layers"] == [1, 3]
    assert written["linear_attn_config"]["full_attn_layers"] == [2]
    assert written["first_k_dense_replace"] == 2
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_bfloat16_checkpoint_keeps_its_bits(published, tmp_path):
    """Saved as loaded: the same values; what is kept in fp32 is written in fp32."""
    load(published, dtype=torch.bfloat16).save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (published, tmp_path))
    assert before.keys() == after.keys()
    for key, t in after.items():
        assert torch.equal(t.float(), before[key].float()), key
    float32 = [key.split(".") for key, t in after.items() if t.dtype == torch.float32]
    wide = {parts[-2] if parts[-1] == "weight" else parts[-1] for parts in float32}
    assert wide == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "gate", "e_score_correction_bias"}
    assert after["model.layers.1.self_attn.q_proj.weight"].dtype == torch.bfloat16


def test_the_base_model(published, tmp_path, expected):
    base = load(published, KimiLinearModel)
    base.save_pretrained(tmp_path / "base")
    head = load_file(published / "model.safetensors")["lm_head.weight"].float()
    with torch.no_grad():
        h = load(tmp_path / "base", KimiLinearModel)(torch.arange(3, 60)[None] * 7 % 2048).last_hidden_state
    assert torch.equal(h @ head.T, expected)


@pytest.mark.parametrize("key", sorted(n for n in published_names() if ".0." in n or ".3.self" in n)[::3])
def test_a_tensor_that_is_not_there(published, tmp_path, key):
    tensors = load_file(published / "model.safetensors")
    del tensors[key]
    with pytest.raises(CheckpointError):
        KimiLinearForCausalLM.from_pretrained(write(tmp_path, tensors, PUBLISHED))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a bounded decay": ({"gate_lower_bound": -5.0}, "gate_lower_bound"),
    "bounded in the sub-config": ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound"),
    "rotary positions": ({"mla_use_nope": False}, "mla_use_nope"),
    "a softmax router": ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
    "groups": ({"num_expert_group": 2}, "num_expert_group"),
    "weights that do not sum to one": ({"moe_renormalize": False}, "moe_renormalize"),
    "low-rank queries": ({"q_lora_rank": 16}, "q_lora_rank"),
    "layers that predict further": ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    "fewer key heads": ({"num_key_value_heads": 2}, "num_key_value_heads"),
    "more experts a token than experts": ({"num_experts_per_token": 9}, "num_experts_per_token"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "two answers on the layers": ({"layer_types": ["linear_attention"] * 7 + ["full_attention"]}, "kda_layers"),
    "two answers on the dense ones": ({"mlp_layer_types": ["sparse"] * 8}, "first_k_dense_replace"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_config_json_must_not_say(published, tmp_path, fault):
    change, key = FAULTS[fault]
    config = PUBLISHED | change
    config["linear_attn_config"] = PUBLISHED["linear_attn_config"] | change.get("linear_attn_config", {})
    shutil.copy(published / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        KimiLinearForCausalLM.from_pretrained(tmp_path)
    assert key in error.value.key


def test_the_published_config_loads_without_a_word(published, caplog):
    with caplog.at_level(logging.WARNING, "xpu_ports"):
        load(published)
    assert not [r for r in caplog.records if r.name.startswith("xpu_ports")]


def test_a_config_that_does_not_say_which_layers(tmp_path, caplog):
    """transformers then puts full attention where the published models do not have it."""
    silent = {k: v for k, v in PUBLISHED.items() if k != "linear_attn_config"}
    KimiLinearForCausalLM(KimiLinearConfig(**silent | {"linear_head_dim": 32, "linear_num_heads": 4})).save_pretrained(
        tmp_path
    )
    with caplog.at_level(logging.WARNING, "xpu_ports"):
        load(tmp_path)
    assert "full attention runs in layers 4, 8, ... counted from 0" in caplog.text
