"""Zamba2 from a folder: what a sound one may look like, and one plain error for everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Zamba2Config
from transformers import Zamba2ForCausalLM as TransformersZamba2

import xpu_ports.models
from xpu_ports.common.configuration import load_config
from xpu_ports.common.weights import CheckpointError, expected_tensors
from xpu_ports.models.zamba2 import Zamba2ForCausalLM, Zamba2Model
from xpu_ports.models.zamba2.configuration_checks import ZAMBA2_CHECKS
from xpu_ports.models.zamba2.layouts import LAYOUTS, layout_config
from xpu_ports.models.zamba2.modeling_zamba2 import ACTIVATIONS

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-zamba2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-zamba2."""
    return Path(shutil.copytree(CHECKPOINT, tmp_path / "zamba2"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    TransformersZamba2.from_pretrained(CHECKPOINT).save_pretrained(folder, max_shard_size="1MB")
    return folder


@pytest.fixture
def sharded(shards: Path, tmp_path: Path) -> Path:
    """tiny-zamba2 in four files."""
    return Path(shutil.copytree(shards, tmp_path / "sharded"))


def configure(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any], name: str = "model.safetensors") -> None:
    tensors = {key: t.clone() for key, t in load_file(folder / name).items()}
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def error_of(folder: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Zamba2ForCausalLM.from_pretrained(folder, **options)
    error = caught.value
    for part in (error.file, error.key or "", error.expected, error.found):
        assert part in str(error)
    return error


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -------------------------------------------------------------------------------------------------- sound checkpoints


def test_a_sound_checkpoint_has_the_weights_that_transformers_loads(folder: Path, sharded: Path) -> None:
    expected = TransformersZamba2.from_pretrained(folder).state_dict()
    for path in (folder, sharded):
        assert same(Zamba2ForCausalLM.from_pretrained(path).state_dict(), expected)


def test_the_base_models_file_loads_into_the_head(folder: Path, tmp_path: Path) -> None:
    Zamba2Model.from_pretrained(folder).save_pretrained(tmp_path / "base")
    assert "layers.0.mamba.D" in load_file(tmp_path / "base" / "model.safetensors")
    model = Zamba2ForCausalLM.from_pretrained(tmp_path / "base")
    assert same(model.state_dict(), Zamba2ForCausalLM.from_pretrained(folder).state_dict())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_files_of_the_released_layouts() -> None:
    assert {name: len(expected_tensors(Zamba2ForCausalLM, layout_config(name))) for name in LAYOUTS} == {
        "1.2b": 406,
        "2.7b": 531,
        "7b": 786,
    }


@pytest.fixture
def cycling(tmp_path: Path) -> Path:
    """A checkpoint where two shared blocks run at four places, with random weights."""
    kinds = ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid", "hybrid"]
    config = Zamba2Config(
        vocab_size=16, hidden_size=8, num_hidden_layers=6, layers_block_type=kinds, n_mamba_heads=2, mamba_d_state=4,
        num_attention_heads=2, num_mem_blocks=2, adapter_rank=2, intermediate_size=8,
    )  # fmt: skip
    Zamba2ForCausalLM(config).save_pretrained(tmp_path / "cycling")
    return tmp_path / "cycling"


BLOCKS = {"model.layers.4": "model.layers.1", "model.layers.5": "model.layers.2"}


def repeat(tensors: dict[str, Tensor]) -> None:
    """Write the shared blocks out at all their places, as some tools for fine-tuning do."""
    for place, first in BLOCKS.items():
        for key in [k for k in tensors if k.startswith(f"{first}.shared_transformer.")]:
            tensors[key.replace(first, place)] = tensors[key].clone()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def test_repeated_shared_blocks_are_accepted_where_they_are_equal(cycling: Path) -> None:
    expected = Zamba2ForCausalLM.from_pretrained(cycling).state_dict()
    assert not any(key.startswith("model.layers.4.shared") for key in load_file(cycling / "model.safetensors"))
    edit(cycling, repeat)
    model = Zamba2ForCausalLM.from_pretrained(cycling)
    assert same(model.state_dict(), expected)
    places = [model.model.layers[i].shared_transformer.self_attn.q_proj.weight for i in (1, 2, 4, 5)]
    assert places[0] is places[2]
    assert places[1] is places[3]


def test_repeated_shared_blocks_that_differ(cycling: Path) -> None:
    name = "shared_transformer.self_attn.q_proj.weight"
    edit(cycling, repeat)
    edit(cycling, lambda t: t[f"model.layers.5.{name}"][-1].add_(1))
    error = error_of(cycling)
    assert error.key == f"model.layers.5.{name}"
    assert error.expected == f"the values of model.layers.2.{name}, which it is tied to"


def test_one_of_the_places_of_a_shared_block_is_enough(cycling: Path) -> None:
    expected = Zamba2ForCausalLM.from_pretrained(cycling).state_dict()

    def move(tensors: dict[str, Tensor]) -> None:
        for key in [k for k in tensors if k.startswith("model.layers.2.shared_transformer.")]:
            tensors[key.replace("layers.2", "layers.5")] = tensors.pop(key)

    edit(cycling, move)
    assert same(Zamba2ForCausalLM.from_pretrained(cycling).state_dict(), expected)


def test_shared_blocks_stay_shared_with_an_untied_head(cycling: Path) -> None:
    edit(cycling, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    configure(cycling, tie_word_embeddings=False)
    layers = Zamba2ForCausalLM.from_pretrained(cycling).model.layers
    assert layers[1].shared_transformer.input_layernorm.weight is layers[4].shared_transformer.input_layernorm.weight


# -------------------------------------------------------------------------------------------------- config.json

CONFIG_FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # What config.json says, then: the key named, and what is said to be expected, and found.
    "model-type": ({"model_type": "mamba2"}, "model_type", "'zamba2'", "'mamba2'"),
    "hidden-act": ({"hidden_act": "relu"}, "hidden_act", "'gelu' or 'gelu_pytorch_tanh' or 'silu'", "'relu'"),
    "conv-bias": ({"use_conv_bias": False}, "use_conv_bias", "True", "False"),
    "groups": ({"mamba_ngroups": 3}, "mamba_ngroups", "a divisor of n_mamba_heads = 8", "3"),
    "groups-of-width": ({"mamba_ngroups": 512}, "mamba_ngroups", "mamba_expand * hidden_size = 256", "512"),
    "mamba-heads": ({"n_mamba_heads": 7}, "n_mamba_heads", "a divisor of mamba_expand * hidden_size = 256", "7"),
    "mamba-head-width": ({"mamba_headdim": 64}, "mamba_headdim", "32, which follows from the other fields", "64"),
    "layers": ({"num_hidden_layers": 9}, "num_hidden_layers", "validate_layer_type accepts", "9; "),
    "layer-kinds": ({"layers_block_type": ["x"] * 8}, "layers_block_type", "a list of 'linear_attention'", "['x', "),
    "blocks": ({"num_mem_blocks": 3}, "num_mem_blocks", "at most the 2 hybrid layers", "3"),
    "hybrid-ids": ({"hybrid_layer_ids": [1, 5]}, "hybrid_layer_ids", "[2, 5], which follows", "[1, 5]"),
    "kv-heads": ({"num_key_value_heads": 3}, "num_key_value_heads", "a divisor of num_attention_heads = 4", "3"),
    "heads": ({"num_attention_heads": 6}, "num_attention_heads", "a divisor of 2 * hidden_size = 256", "6"),
    "head-width": ({"attention_head_dim": 32}, "attention_head_dim", "64, which follows from", "32"),
    "rope": (
        {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_parameters.rope_type",
        "one of default, dynamic", "'spiral'",
    ),
    "odd-rotary": (
        {"num_attention_heads": 256, "num_key_value_heads": 256, "attention_head_dim": 1, "kv_channels": 0,
         "num_query_groups": 256}, "attention_head_dim", "an even number, for rotary positions", "1",
    ),
    "chunk": ({"chunk_size": 0}, "chunk_size", "an integer >= 1", "0"),
    "conv": ({"mamba_d_conv": 1}, "mamba_d_conv", "an integer >= 2", "1"),
    "type": ({"hidden_size": "128"}, "hidden_size", "an integer >= 1", "'128'"),
    "type-without-a-row": ({"use_cache": "yes"}, "use_cache", "bool", "'yes'"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps", "a number > 0", "0"),
    "our-switch": ({"clamp_prefill_dt": 1}, "clamp_prefill_dt", "True or False", "1"),
    "old-adapters": (
        {"use_shared_attention_lora": False}, "use_shared_attention_lora",
        "True, the value of use_shared_attention_adapter", "False",
    ),
    "old-rank": ({"lora_rank": 8}, "lora_rank", "16, the value of adapter_rank", "8"),
    "old-window": ({"sliding_window": 512}, "sliding_window", "None", "512"),
    "old-mlp": ({"use_shared_mlp_adapter": False}, "use_shared_mlp_adapter", "True", "False"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_what_config_json_must_not_say(folder: Path, fault: str) -> None:
    values, key, expected, found = CONFIG_FAULTS[fault]
    configure(folder, **values)
    error = error_of(folder)
    assert (error.file, error.key) == (str(folder / "config.json"), key)
    assert expected in error.expected
    assert error.found.startswith(found)


def test_the_activations_allowed_are_those_the_model_computes() -> None:
    assert ZAMBA2_CHECKS.fields["hidden_act"].text == " or ".join(map(repr, ACTIVATIONS))


def test_layers_of_a_config_changed_by_hand(folder: Path) -> None:
    config = Zamba2Config.from_pretrained(folder)
    config.num_hidden_layers = 9
    error = error_of(folder, config=config)
    assert (error.file, error.key, error.found) == ("Zamba2Config", "layers_block_type", "8")
    with pytest.raises(CheckpointError, match="expected num_hidden_layers = 9 entries, found 8"):
        Zamba2ForCausalLM(config)


# As published for the 7B: by transformers 4.49, and by Zyphra's fork before it.
PUBLISHED: dict[str, dict[str, Any]] = {
    "4.49": {
        "adapter_rank": 128, "attention_head_dim": 224, "attention_hidden_size": 7168, "chunk_size": 256,
        "intermediate_size": 14336, "kv_channels": 112, "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2,
        "mamba_headdim": 64, "n_mamba_heads": 112, "num_logits_to_keep": 1, "num_query_groups": 32,
        "time_step_limit": None, "use_conv_bias": True, "use_long_context": False, "use_mamba_kernels": True,
        "use_mem_eff_path": False, "use_shared_attention_adapter": False, "use_shared_mlp_adapter": True,
    },
    "before": {
        "conv_dimension": 4, "expansion_factor": 2, "ffn_hidden_size": 14336, "ft_lora": False,
        "gated_linear_unit": True, "kv_channels": 112, "lora_rank": 128, "n_mamba_heads": 112, "mamba_headdim": 64,
        "num_logits_to_keep": 1, "num_query_groups": 32, "sliding_window": None, "state_size": 64,
        "use_mamba_kernels": True, "use_shared_attention_lora": False, "use_shared_block_lora": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("age", PUBLISHED)
def test_published_configs_load_without_a_word(tmp_path: Path, age: str, caplog: pytest.LogCaptureFixture) -> None:
    ids = LAYOUTS["7b"]["hybrid"]
    common = {
        "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 81,
        "layers_block_type": ["hybrid" if i in ids else "mamba" for i in range(81)], "mamba_ngroups": 2,
        "num_attention_heads": 32, "num_key_value_heads": 32, "num_mem_blocks": 2, "use_mem_rope": True,
        "rope_theta": 10000, "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "vocab_size": 32000, "pad_token_id": 0,
        "transformers_version": "4.43.0.dev0", "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(common | PUBLISHED[age]))
    config = load_config(Zamba2Config, tmp_path, ZAMBA2_CHECKS)
    assert config.hybrid_layer_ids == list(ids)
    assert caplog.records == []
    assert len(expected_tensors(Zamba2ForCausalLM, config)) == 786


def test_a_long_context_comes_with_a_word_on_rope(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, use_long_context=True, max_position_embeddings=16384)
    Zamba2ForCausalLM.from_pretrained(folder)
    # 10000 * 8^(64 / 62).
    assert "leaves rope_theta at 10000, as transformers 5 does; transformers 4 used 85550.4" in caplog.text


def test_unknown_keys_are_one_warning_also_through_auto_classes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    configure(folder, unsloth_fixed=True)
    xpu_ports.models.register("zamba2")
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), Zamba2ForCausalLM)
    assert [r.getMessage() for r in caplog.records if "nothing reads" in r.getMessage()] == [
        f"{folder / 'config.json'}: nothing reads unsloth_fixed"
    ]
    configure(folder, hidden_act="relu")
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_act: expected 'gelu'"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"config\.json: hidden_act: expected 'gelu'"):
        AutoModelForCausalLM.from_pretrained(folder, config=AutoConfig.from_pretrained(folder))


# -------------------------------------------------------------------------------------------------------- the weights

D = "model.layers.0.mamba.D"
WEIGHT_FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str, str]] = {
    # What is done to the weights, then: the key named, and what is expected, and found.
    "missing": (lambda t: t.pop(D), D, "a tensor of shape [8]", "none"),
    "extra": (lambda t: t.update({f"{D}2": torch.zeros(2)}), f"{D}2", "no such tensor in Zamba2", "float32 [2]"),
    "shape": (lambda t: t.update({D: torch.zeros(9)}), D, "shape [8]", "[9]"),
    "dtype": (lambda t: t.update({D: torch.zeros(8).int()}), D, "a dtype like torch.bfloat16", "torch.int32"),
    "head-differs": (
        lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}), "lm_head.weight",
        "the values of model.embed_tokens.weight, which it is tied to", "other values",
    ),
    "adapter-of-another-block": (
        lambda t: t.update({"model.layers.2.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.0.weight":
                            torch.zeros(16, 128)}),
        "model.layers.2.shared_transformer.feed_forward.gate_up_proj_adapter_list.1.0.weight",
        "no such tensor in Zamba2", "float32 [16, 128]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_fault_in_the_only_file(folder: Path, fault: str) -> None:
    change, key, expected, found = WEIGHT_FAULTS[fault]
    edit(folder, change)
    error = error_of(folder)
    assert (error.file, error.key, error.found) == (str(folder / "model.safetensors"), key, found)
    assert expected in error.expected


def test_a_checkpoint_of_another_size(folder: Path) -> None:
    configure(folder, intermediate_size=384)
    error = error_of(folder)
    assert error.key == "model.layers.2.shared_transformer.feed_forward.down_proj.weight"
    assert (error.expected, error.found) == ("shape [128, 384]", "[128, 320]")
    assert error.hint == "5 more of another shape"


@pytest.mark.parametrize(
    ("damage", "expected", "found"),
    [
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-1]), "3912720 bytes", "3912719", id="truncated"),
        pytest.param(
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3912720\n"),
            "a safetensors file", "a Git LFS pointer", id="lfs",
        ),
    ],
)  # fmt: skip
def test_damaged_file(folder: Path, damage: Callable[[Path], Any], expected: str, found: str) -> None:
    damage(folder / "model.safetensors")
    error = error_of(folder)
    assert (error.file, error.key) == (str(folder / "model.safetensors"), None)
    assert (error.expected, error.found) == (expected, found)


def test_damaged_file_where_transformers_would_read_the_dtype_from_it(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    assert Zamba2ForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    (folder / "model.safetensors").write_bytes(b"")
    assert error_of(folder).found == "an empty file"


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    error = error_of(folder)
    assert (error.file, error.found) == (str(folder), "no such file")
    (folder / "config.json").unlink()
    error = error_of(folder)
    assert (error.file, error.found) == (str(folder / "config.json"), "no such file")


def test_missing_and_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    error = error_of(sharded)
    assert (error.file, error.key, error.hint) == (str(shard), None, "the file is truncated")
    assert (error.expected, error.found) == (f"{len(data)} bytes", f"{len(data) // 2}")
    shard.unlink()
    error = error_of(sharded)
    assert (error.file, error.found) == (str(sharded / "model.safetensors.index.json"), "no such file")
    assert error.expected == f"it in {shard.name}"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"][error.key] == shard.name


def test_missing_key_of_shards(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = index["weight_map"].pop(D)
    edit(sharded, lambda t: t.pop(D), shard)
    error = error_of(sharded)
    assert (error.file, error.key, error.expected) == (str(sharded / shard), D, "this key in the file")
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    error = error_of(sharded)
    assert (error.file, error.key) == (str(sharded / "model.safetensors.index.json"), D)
    assert error.expected == "a tensor of shape [8]"
