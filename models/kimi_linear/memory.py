"""What Kimi Linear needs beside its weights, from the config alone."""

from __future__ import annotations

from typing import Any

import torch


def cache_pieces(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the cache of `batch` sequences of `tokens` tokens: windows, states, latents.

    Each is under the parameter whose channels or heads it has, as which it divides among ranks; latents have none.
    """
    H, K = config.linear_num_heads, config.linear_head_dim
    window = 3 * H * K * config.linear_conv_kernel_dim * dtype.itemsize
    state = H * K * K * torch.float32.itemsize
    row = (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    linear = config.layer_types.count("linear_attention")
    full = len(config.layer_types) - linear
    return {
        "self_attn.conv1d.weight": batch * linear * window,
        "self_attn.A_log": batch * linear * state,
        "": batch * full * tokens * row,
    }


def cache_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the cache of `batch` sequences of `tokens` tokens."""
    return sum(cache_pieces(config, batch, tokens, dtype).values())


def activation_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """About what is alive at once in the widest layer while `tokens` tokens of `batch` sequences are read."""
    D, HK = config.hidden_size, config.linear_num_heads * config.linear_head_dim
    # The two streams; q, k and v, convolved, the gates in fp32, what the chunks make of them, the output.
    delta = 2 * D + 2 * 3 * HK + 2 * HK + 4 * HK + 2 * HK
    head = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = 2 * D + config.num_attention_heads * (3 * head + 2 * config.v_head_dim)
    # Tokens gathered by expert, gate and up, their product, the output.
    experts = 3 * D + config.num_experts_per_tok * (2 * D + 3 * config.moe_intermediate_size)
    mlp = 3 * D + 3 * config.intermediate_size
    return batch * tokens * max(delta, latent, experts, mlp) * dtype.itemsize


def weight_reads(config: Any, name: str, tokens: int) -> float:
    """How often a decode step of `tokens` sequences reads a weight: of the experts those that some token chooses.

    Tokens that choose at random leave a share of (1 - chosen / experts)^tokens of the experts alone.
    """
    if ".experts." in name:
        return 1.0 - (1.0 - config.num_experts_per_tok / config.num_local_experts) ** tokens
    return tokens / config.vocab_size if name.endswith("embed_tokens.weight") else 1.0


def cache_reads(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the cache that a decode step reads and writes: all of it, windows and states twice."""
    return cache_bytes(config, batch, tokens, dtype) + cache_bytes(config, batch, 0, dtype)
