"""DeepSeek-V4's files: the published layout, transformers' two, what saving writes, what config.json may say."""

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
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers import DeepseekV4ForCausalLM as TransformersV4

import xpu_ports.models
from xpu_ports.common.weights import CheckpointError
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4Model

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"

# config.json of deepseek-ai/DeepSeek-V4-Flash with tiny-deepseek-v4's sizes.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "compress_rate_hca": 16,
    "compress_ratios": [0, 128, 4, 128, 4, 0, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 2,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": 16,
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 64,
    "pad_token_id": 0,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 32,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 2048,
}
KINDS = ("sliding", "hca", "csa", "hca", "csa", "sliding")
EXPERTS = [f"experts.{e}.w{w}.weight" for e in range(8) for w in (1, 2, 3)]
COMPRESSOR = ["ape", "norm.weight", "wkv.weight", "wgate.weight"]


def published_names() -> set[str]:
    names = {"embed.weight", "norm.weight", "head.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"}
    for i, kind in enumerate(KINDS):
        attention = [f"{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")]
        attention += ["attn_sink"] + [f"compressor.{name}" for name in COMPRESSOR if kind != "sliding"]
        if kind == "csa":
            attention += [f"indexer.compressor.{name}" for name in COMPRESSOR]
            attention += ["indexer.wq_b.weight", "indexer.weights_proj.weight"]
        experts = [*EXPERTS, "gate.weight", "gate.tid2eid" if i < 2 else "gate.bias"]
        experts += [f"shared_experts.w{w}.weight" for w in (1, 2, 3)]
        names |= {f"layers.{i}.{name}" for name in ("attn_norm.weight", "ffn_norm.weight")}
        names |= {f"layers.{i}.hc_{a}_{b}" for a in ("attn", "ffn") for b in ("fn", "base", "scale")}
        names |= {f"layers.{i}.attn.{name}" for name in attention} | {f"layers.{i}.ffn.{name}" for name in experts}
    return names


# Kept in fp32 by both: what published files hold in fp32, and norms.
WIDE = ("hc_", "attn_sink", "ape", "gate.bias", "norm.weight")


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def published_name(key: str) -> str:
    """The published name of what transformers has written."""
    key = key.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
    return key.replace(".attn.norm.", ".attn.kv_norm.")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """tiny-deepseek-v4 as its authors write it: their names, a layer of MTP, fp32 where they have it."""
    tensors = {published_name(key): t for key, t in load_file(CHECKPOINT / "model.safetensors").items()}
    tensors = {key: t.float() if any(w in key for w in WIDE[:4]) else t for key, t in tensors.items()}
    assert {key for key in tensors if not key.startswith("mtp.")} == published_names()
    assert {"mtp.0.e_proj.weight", "mtp.0.attn.attn_sink", "mtp.0.hc_head_fn"} <= tensors.keys()
    return write(tmp_path_factory.mktemp("files") / "published", tensors, PUBLISHED)


def load(folder: Path, cls: type = DeepseekV4ForCausalLM, dtype: torch.dtype = torch.float32):
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()


@torch.no_grad()
def logits(model) -> Tensor:
    return model(torch.arange(3, 103)[None] * 7 % 2048).logits


def same(a: Tensor, b: Tensor) -> bool:
    """Logits of the same weights in fp32, which may lie at other addresses: sums may be in another order."""
    return (a - b).abs().max().item() <= 1e-4


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits(load(CHECKPOINT))


def test_the_published_layout_loads(published, expected):
    model = load(published)
    assert same(logits(model), expected)
    assert model.config.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}


def test_transformers_own_names_load(tmp_path, expected):
    """What it writes with its conversion turned off."""
    load(CHECKPOINT, TransformersV4).save_pretrained(tmp_path, save_original_format=False)
    keys = load_file(tmp_path / "model.safetensors").keys()
    assert {
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.2.self_attn.compressor.indexer.q_b_proj.weight",
    } <= keys
    assert same(logits(load(tmp_path)), expected)


@pytest.mark.parametrize("source", ["published", "transformers"])
def test_saving_writes_the_published_layout(source, published, tmp_path, expected):
    load(published if source == "published" else CHECKPOINT).save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == published_names()
    assert same(logits(load(tmp_path)), expected)
    theirs = load(tmp_path, TransformersV4)
    assert same(logits(theirs), logits(load(CHECKPOINT, TransformersV4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_in_fp32(published, tmp_path, dtype):
    """Saved as loaded: the same values, wide where the published files are wide."""
    model = load(published, dtype=dtype)
    model.save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (published, tmp_path))
    for key, t in after.items():
        assert torch.equal(t.float(), before[key].float()), key
        wide = any(w in key for w in WIDE) or dtype == torch.float32
        assert t.dtype == (torch.int64 if "tid2eid" in key else torch.float32 if wide else dtype), key
    # A sink that bf16 does not have.
    assert model.model.layers[0].self_attn.sinks.dtype == torch.float32


def test_the_base_model(published, tmp_path, expected):
    base = load(published, DeepseekV4Model)
    base.save_pretrained(tmp_path / "base")
    names = load_file(tmp_path / "base" / "model.safetensors").keys()
    assert names == published_names() - {"head.weight"}
    head = load_file(published / "model.safetensors")["head.weight"].float()
    with torch.no_grad():
        h = load(tmp_path / "base", DeepseekV4Model)(torch.arange(3, 103)[None] * 7 % 2048).last_hidden_state
    assert same(h @ head.T, expected)


def test_auto_classes(published, expected):
    xpu_ports.models.register("deepseek_v4")
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    assert type(model) is DeepseekV4ForCausalLM
    assert same(logits(model), expected)


@pytest.mark.parametrize(
    "key", sorted(n for n in published_names() if n.startswith(("layers.0.", "layers.2.a", "h")))[::4]
)
def test_a_tensor_that_is_not_there(published, tmp_path, key):
    tensors = load_file(published / "model.safetensors")
    del tensors[key]
    with pytest.raises(CheckpointError):
        DeepseekV4ForCausalLM.from_pretrained(write(tmp_path, tensors, PUBLISHED))


def test_a_tensor_too_many(published, tmp_path):
    tensors = load_file(published / "model.safetensors") | {"layers.0.attn.compressor.ape": torch.zeros(4, 128)}
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.compressor\.ape"):
        DeepseekV4ForCausalLM.from_pretrained(write(tmp_path, tensors, PUBLISHED))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantized_bytes_are_not_taken_for_numbers(published, tmp_path, dtype):
    tensors = load_file(published / "model.safetensors")
    tensors["layers.2.attn.wq_a.weight"] = torch.ones(64, 128).to(dtype)
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.wq_a\.weight"):
        DeepseekV4ForCausalLM.from_pretrained(write(tmp_path, tensors, PUBLISHED))


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "scores by sigmoid": ({"scoring_func": "sigmoid"}, "scoring_func"),
    "another choice": ({"topk_method": "group_limited_greedy"}, "topk_method"),
    "weights that do not sum to one": ({"norm_topk_prob": False}, "norm_topk_prob"),
    "several keys": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "two shared experts": ({"n_shared_experts": 2}, "n_shared_experts"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "groups that divide no heads": ({"o_groups": 3}, "o_groups"),
    "more experts a token than experts": ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "all columns rotated": ({"qk_rope_head_dim": 128}, "partial_rotary_factor"),
    "tied embeddings": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "another rotation": (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "rope_parameters.compress.rope_type",
    ),
    "a scaled amplitude": (
        {
            "rope_scaling": {
                "type": "yarn", "factor": 4, "original_max_position_embeddings": 256, "attention_factor": 1.2
            }
        },
        "rope_parameters.compress.attention_factor",
    ),
    "a cache that is not there": ({"cache_dtype": "int4"}, "cache_dtype"),
    "pages of odd groups": ({"cache_dtype": "fp8", "head_dim": 96, "qk_rope_head_dim": 48}, "cache_dtype"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_config_json_must_not_say(published, tmp_path, fault):
    change, key = FAULTS[fault]
    shutil.copy(published / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(CheckpointError) as error:
        DeepseekV4ForCausalLM.from_pretrained(tmp_path)
    assert error.value.key == key


def test_the_published_config_loads_without_a_word(published, caplog):
    with caplog.at_level(logging.WARNING, "xpu_ports"):
        load(published)
    assert not [r for r in caplog.records if r.name.startswith("xpu_ports")]


def test_a_config_that_does_not_say_which_layers(tmp_path, caplog):
    """transformers then compresses layer 2 heavily, which the published models do not."""
    silent = {k: v for k, v in PUBLISHED.items() if k != "compress_ratios"}
    DeepseekV4ForCausalLM(DeepseekV4Config(**silent)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "xpu_ports"):
        load(tmp_path)
    assert "layers 0 to 2 are heavily compressed" in caplog.text
