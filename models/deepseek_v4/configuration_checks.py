"""Which DeepSeek-V4 configurations run, and what the keys of the published config.json mean."""

from __future__ import annotations

from typing import Any

from xpu_ports.common.configuration import ConfigChecks, Fault, Legacy, integer, list_of, number, one_of
from xpu_ports.models.deepseek_v4.caching import CACHE_DTYPES

ATTENTION = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def _layers(config: Any) -> Fault | None:
    for name in ("layer_types", "mlp_layer_types"):
        found = len(getattr(config, name) or ())
        if found != config.num_hidden_layers:
            return Fault(name, f"num_hidden_layers = {config.num_hidden_layers} entries", f"{found}")
    return None


def _rates(config: Any) -> Fault | None:
    for kind in set(config.layer_types) - {"sliding_attention"}:
        rate = config.compress_rates.get(kind)
        if type(rate) is not int or rate < 1:
            return Fault(f"compress_rates.{kind}", "an integer >= 1", f"{rate!r}")
    return None


def _rotary(config: Any) -> Fault | None:
    rope = config.qk_rope_head_dim
    if rope % 2 or not 0 < rope < min(config.head_dim, config.index_head_dim + 1):
        expected = "an even number of columns, fewer than head_dim and at most index_head_dim"
        return Fault("partial_rotary_factor", expected, f"{rope}")
    for name in ("main", "compress"):
        found = config.rope_parameters[name].get("rope_type", "default")
        if found not in ("default", "yarn"):
            return Fault(f"rope_parameters.{name}.rope_type", "'default' or 'yarn'", f"{found!r}")
        factor = config.rope_parameters[name].get("attention_factor", 1.0)
        if factor != 1.0:
            return Fault(f"rope_parameters.{name}.attention_factor", "1.0: nothing is scaled by it", f"{factor}")
    return None


def _groups(config: Any) -> Fault | None:
    if config.num_attention_heads % config.o_groups:
        expected = f"a divisor of num_attention_heads = {config.num_attention_heads}"
        return Fault("o_groups", expected, f"{config.o_groups}")
    return None


def _experts(config: Any) -> Fault | None:
    if config.num_experts_per_tok > config.n_routed_experts:
        expected = f"at most n_routed_experts = {config.n_routed_experts}"
        return Fault("num_experts_per_tok", expected, f"{config.num_experts_per_tok}")
    return None


def _pages(config: Any) -> Fault | None:
    own = config.head_dim - config.qk_rope_head_dim
    if getattr(config, "cache_dtype", "auto") == "fp8" and (own % 64 or config.index_head_dim % 4):
        expected = "not 'fp8' where head_dim less the rotary columns is no multiple of 64"
        return Fault("cache_dtype", expected, f"'fp8' with {own} columns")
    return None


def _mtp(config: Any) -> Fault | None:
    if getattr(config, "mtp", False) and config.num_nextn_predict_layers < 1:
        return Fault("mtp", "false: there are num_nextn_predict_layers = 0 of its layers", "True")
    return None


def _default_layers(config: Any) -> str | None:
    n = config.num_hidden_layers
    default = [ATTENTION[2]] * min(n, 2) + [ATTENTION[1 if i % 2 else 2] for i in range(max(n - 2, 0))]
    if config.layer_types != default or n < 3:
        return None
    return (
        "layers 0 to 2 are heavily compressed, which is transformers' default where neither layer_types nor "
        "compress_ratios says; the published models have a compressed sparse one in layer 2"
    )


_WIDTH = integer(1)
_POSITIVE = number(0, without_low=True)
DEEPSEEK_V4_CHECKS = ConfigChecks(
    fields={
        **{
            name: _WIDTH
            for name in (
                *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
                *("head_dim", "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "sliding_window", "o_groups"),
                *("o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters"),
            )
        },
        "num_nextn_predict_layers": integer(0),
        # All heads share one key.
        "num_key_value_heads": one_of(1),
        "n_shared_experts": one_of(1),
        "scoring_func": one_of("sqrtsoftplus"),
        "norm_topk_prob": one_of(True),
        "routed_scaling_factor": _POSITIVE,
        "swiglu_limit": _POSITIVE,
        "hc_eps": _POSITIVE,
        "rms_norm_eps": _POSITIVE,
        "hidden_act": one_of("silu"),
        "attention_bias": one_of(False),
        "mlp_bias": one_of(False),
        "attention_dropout": one_of(0.0, 0),
        "router_jitter_noise": one_of(0.0, 0),
        "tie_word_embeddings": one_of(False),
        "layer_types": list_of(*ATTENTION, or_none=True),
        "mlp_layer_types": list_of("hash_moe", "moe", or_none=True),
    },
    across=(_layers, _rates, _rotary, _groups, _experts, _pages, _mtp),
    legacy={
        "topk_method": Legacy("of the published code", only="noaux_tc"),
        "compress_ratios": Legacy("tokens of an entry of each layer, which layer_types is made of"),
        "compress_rate_csa": Legacy("the name before compress_rates"),
        "compress_rate_hca": Legacy("the name before compress_rates"),
        "num_hash_layers": Legacy("how many first layers choose experts by token, which mlp_layer_types is made of"),
        "expert_dtype": Legacy("how files of published checkpoints hold the experts"),
    },
    switches={"cache_dtype": one_of(*CACHE_DTYPES), "mtp": one_of(True, False)},
    notes=(_default_layers,),
)
