"""Which Kimi Linear configurations run, and the keys of the published config.json that transformers does not have."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import KimiLinearConfig

from xpu_ports.common.configuration import ConfigChecks, Fault, Legacy, integer, list_of, number, one_of

# Keys of the published config.json with one value that the model can run.
_ONLY = {
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}


def linear_attn_config(config: Any) -> dict[str, Any]:
    """The published description of the delta attention layers; layers are counted from 1."""
    numbered = list(enumerate(config.layer_types, 1))
    return {
        "head_dim": config.linear_head_dim,
        "num_heads": config.linear_num_heads,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        "kda_layers": [i for i, kind in numbered if kind == "linear_attention"],
        "full_attn_layers": [i for i, kind in numbered if kind == "full_attention"],
    }


def published_config(config: KimiLinearConfig) -> KimiLinearConfig:
    """A copy that also has the keys that the published code and serving engines read."""
    config = deepcopy(config)
    config.linear_attn_config = linear_attn_config(config)
    for name, value in {**_ONLY, "use_grouped_topk": True}.items():
        setattr(config, name, value)
    kinds = config.mlp_layer_types
    dense = kinds.count("dense")
    if kinds == ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        config.first_k_dense_replace = dense
    return config


def _layers(config: Any) -> Fault | None:
    for name in ("layer_types", "mlp_layer_types"):
        found = len(getattr(config, name) or ())
        if found != config.num_hidden_layers:
            return Fault(name, f"num_hidden_layers = {config.num_hidden_layers} entries", f"{found}")
    return None


def _published_layers(config: Any) -> Fault | None:
    """What linear_attn_config says, where a file has it, is what runs: layer_types goes before it."""
    given = getattr(config, "linear_attn_config", None) or {}
    bound = given.get("gate_lower_bound")
    if bound is not None:
        return Fault("linear_attn_config.gate_lower_bound", "none: this model's decay has no bound", f"{bound}")
    for name, value in linear_attn_config(config).items():
        if given.get(name, value) != value:
            return Fault(f"linear_attn_config.{name}", f"{value}, which the other fields say", f"{given[name]}")
    dense = config.mlp_layer_types.index("sparse") if "sparse" in config.mlp_layer_types else config.num_hidden_layers
    given_dense = getattr(config, "first_k_dense_replace", None)
    if given_dense is not None and min(given_dense, config.num_hidden_layers) != dense:
        return Fault("first_k_dense_replace", f"{dense}, which mlp_layer_types says", f"{given_dense}")
    return None


def _heads(config: Any) -> Fault | None:
    heads = config.num_attention_heads
    if config.num_key_value_heads != heads:
        expected = f"num_attention_heads = {heads}: every head has keys of its own, made of the latent"
        return Fault("num_key_value_heads", expected, f"{config.num_key_value_heads}")
    return None


def _experts(config: Any) -> Fault | None:
    if config.num_experts_per_tok > config.num_local_experts:
        expected = f"at most num_experts = {config.num_local_experts}"
        return Fault("num_experts_per_token", expected, f"{config.num_experts_per_tok}")
    return None


def _default_layers(config: Any) -> str | None:
    default = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(config.num_hidden_layers)]
    if config.layer_types != default or config.num_hidden_layers < 5:
        return None
    return (
        "full attention runs in layers 4, 8, ... counted from 0, which is transformers' default where neither "
        "layer_types nor linear_attn_config says; the published models have it in layers 3, 7, ... and the last"
    )


_BOOLEAN = one_of(True, False)
_WIDTH = integer(1)
KIMI_LINEAR_CHECKS = ConfigChecks(
    fields={
        "vocab_size": _WIDTH,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "moe_intermediate_size": _WIDTH,
        "num_hidden_layers": integer(1),
        "num_attention_heads": integer(1),
        "num_key_value_heads": integer(1, or_none=True),
        "kv_lora_rank": _WIDTH,
        # The published model projects queries in one step.
        "q_lora_rank": one_of(None),
        "qk_nope_head_dim": _WIDTH,
        "qk_rope_head_dim": _WIDTH,
        "v_head_dim": _WIDTH,
        "linear_head_dim": _WIDTH,
        "linear_num_heads": integer(1),
        "linear_conv_kernel_dim": integer(2),
        "num_experts": integer(1),
        "num_experts_per_token": integer(1),
        "num_shared_experts": integer(1),
        # One group is no grouping; the router has no other.
        "num_expert_group": one_of(1),
        "topk_group": one_of(1),
        "moe_renormalize": one_of(True),
        "routed_scaling_factor": number(0, without_low=True),
        "rms_norm_eps": number(0, without_low=True),
        "attention_dropout": number(0, below=1),
        "attention_bias": one_of(False),
        "hidden_act": one_of("silu"),
        "tie_word_embeddings": one_of(False),
        "layer_types": list_of("linear_attention", "full_attention", or_none=True),
        "mlp_layer_types": list_of("dense", "sparse", or_none=True),
        "output_router_logits": _BOOLEAN,
    },
    across=(_layers, _published_layers, _heads, _experts),
    legacy={
        **{name: Legacy("of the published code", only=value) for name, value in _ONLY.items()},
        "gate_lower_bound": Legacy("a bound of the decay, which this model does not have", only=None),
        "use_grouped_topk": Legacy("with one group there is no grouping"),
        "linear_attn_config": Legacy("the delta attention layers, compared with the fields"),
        "first_k_dense_replace": Legacy("the number of dense layers, compared with mlp_layer_types"),
    },
    notes=(_default_layers,),
)
