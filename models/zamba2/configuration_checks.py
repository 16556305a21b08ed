"""Which Zamba2 configurations run, and what the keys of older config.json files meant."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from xpu_ports.common.configuration import (
    ConfigChecks,
    Fault,
    Legacy,
    integer,
    list_of,
    number,
    one_of,
)

_BOOLEAN = one_of(True, False)
# For a long context transformers 4 multiplied rope_theta by this, to the power d / (d - 2); transformers 5 does not.
_LONG_CONTEXT = 8


def _mamba_heads(config: Any) -> Fault | None:
    d_inner = config.mamba_expand * config.hidden_size
    if d_inner % config.n_mamba_heads:
        return Fault("n_mamba_heads", f"a divisor of mamba_expand * hidden_size = {d_inner}", f"{config.n_mamba_heads}")
    return None


def _mamba_groups(config: Any) -> Fault | None:
    d_inner = config.mamba_expand * config.hidden_size
    if config.n_mamba_heads % config.mamba_ngroups or d_inner % config.mamba_ngroups:
        expected = f"a divisor of n_mamba_heads = {config.n_mamba_heads} and of mamba_expand * hidden_size = {d_inner}"
        return Fault("mamba_ngroups", expected, f"{config.mamba_ngroups}")
    return None


def _layers(config: Any) -> Fault | None:
    if len(config.layers_block_type) != config.num_hidden_layers:
        expected = f"num_hidden_layers = {config.num_hidden_layers} entries"
        return Fault("layers_block_type", expected, f"{len(config.layers_block_type)}")
    return None


def _blocks(config: Any) -> Fault | None:
    hybrid = config.layers_block_type.count("hybrid")
    if hybrid and config.num_mem_blocks > hybrid:
        return Fault("num_mem_blocks", f"at most the {hybrid} hybrid layers", f"{config.num_mem_blocks}")
    return None


def _attention_heads(config: Any) -> Fault | None:
    width, heads = 2 * config.hidden_size, config.num_attention_heads
    if width % heads:
        return Fault("num_attention_heads", f"a divisor of 2 * hidden_size = {width}", f"{heads}")
    if heads % config.num_key_value_heads:
        return Fault(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}", f"{config.num_key_value_heads}"
        )
    return None


def _rope(config: Any) -> Fault | None:
    if not config.use_mem_rope:
        return None
    kinds = {"default", *ROPE_INIT_FUNCTIONS}
    found = (config.rope_parameters or {}).get("rope_type")
    if found not in kinds:
        return Fault("rope_parameters.rope_type", f"one of {', '.join(sorted(kinds))}", repr(found))
    if config.attention_head_dim % 2:
        return Fault("attention_head_dim", "an even number, for rotary positions", f"{config.attention_head_dim}")
    return None


def _long_context(config: Any) -> str | None:
    if not (config.use_long_context and config.use_mem_rope):
        return None
    d, theta = config.attention_head_dim, config.rope_parameters["rope_theta"]
    scaled = theta * _LONG_CONTEXT ** (d / (d - 2))
    return (
        f"use_long_context raises max_position_embeddings to {config.max_position_embeddings} and leaves rope_theta at "
        f"{theta:g}, as transformers 5 does; transformers 4 used {scaled:.6g}, which rope_parameters can say"
    )


ZAMBA2_CHECKS = ConfigChecks(
    fields={
        "vocab_size": integer(1),
        "max_position_embeddings": integer(1),
        "hidden_size": integer(1),
        "num_hidden_layers": integer(1),
        "intermediate_size": integer(1, or_none=True),
        "layers_block_type": list_of("linear_attention", "mamba", "hybrid", or_none=True),
        "mamba_d_state": integer(1),
        "mamba_d_conv": integer(2),
        "mamba_expand": integer(1),
        "mamba_ngroups": integer(1),
        "n_mamba_heads": integer(1),
        "chunk_size": integer(1),
        "num_attention_heads": integer(1),
        "num_key_value_heads": integer(1, or_none=True),
        "num_mem_blocks": integer(1),
        "adapter_rank": integer(1),
        "rms_norm_eps": number(0, without_low=True),
        "attention_dropout": number(0, below=1),
        "time_step_min": number(0, without_low=True),
        "time_step_max": number(0, without_low=True),
        "time_step_floor": number(0),
        # Those that the model's gated MLP computes; every published config says gelu.
        "hidden_act": one_of("gelu", "gelu_pytorch_tanh", "silu"),
        # The convolution always has its bias.
        "use_conv_bias": one_of(True),
        "add_bias_linear": _BOOLEAN,
        "use_shared_attention_adapter": _BOOLEAN,
        "use_mem_rope": _BOOLEAN,
        "use_long_context": _BOOLEAN,
        "tie_word_embeddings": _BOOLEAN,
    },
    across=(_mamba_heads, _mamba_groups, _layers, _blocks, _attention_heads, _rope),
    derived=(
        "attention_hidden_size",
        "attention_head_dim",
        "mamba_headdim",
        "kv_channels",
        "num_query_groups",
        "hybrid_layer_ids",
    ),
    legacy={
        "time_step_limit": Legacy("bounds of dt that training did not apply"),
        "use_shared_mlp_adapter": Legacy("the shared MLP always has its adapters", only=True),
        "use_shared_block_lora": Legacy("the shared MLP always has its adapters", only=True),
        "use_shared_attention_lora": Legacy(
            "the name before transformers 4.49", same_as="use_shared_attention_adapter"
        ),
        "lora_rank": Legacy("the name before transformers 4.49", same_as="adapter_rank"),
        "ffn_hidden_size": Legacy("the name before transformers 4.49", same_as="intermediate_size"),
        "state_size": Legacy("the name before transformers 4.49", same_as="mamba_d_state"),
        "conv_dimension": Legacy("the name before transformers 4.49", same_as="mamba_d_conv"),
        "expansion_factor": Legacy("the name before transformers 4.49", same_as="mamba_expand"),
        "gated_linear_unit": Legacy("the shared MLP is always gated", only=True),
        "bias_gelu_fusion": Legacy("a fusion of the training code"),
        "ft_lora": Legacy("adapters of the fine-tuning code, not supported", only=False),
        "sliding_window": Legacy("attention always sees the whole past", only=None),
        "use_low_rank_mamba_proj": Legacy("in_proj is always one matrix", only=False),
    },
    switches={"clamp_prefill_dt": _BOOLEAN},
    notes=(_long_context,),
)
