"""What Zamba2 needs beside its weights, from the config alone."""

from __future__ import annotations

from typing import Any

import torch


def cache_pieces(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the cache of `batch` sequences of `tokens` tokens: windows, states, keys and values.

    Each is under the parameter whose channels or heads it has, as which it divides among ranks.
    """
    inner = int(config.mamba_expand * config.hidden_size)
    window = (inner + 2 * config.mamba_ngroups * config.mamba_d_state) * config.mamba_d_conv * dtype.itemsize
    state = config.n_mamba_heads * config.mamba_headdim * config.mamba_d_state * torch.float32.itemsize
    row = 2 * config.num_key_value_heads * config.attention_head_dim * dtype.itemsize
    layers, places = config.num_hidden_layers, len(config.hybrid_layer_ids)
    return {
        "mamba.conv1d.weight": batch * layers * window,
        "mamba.A_log": batch * layers * state,
        "self_attn.k_proj.weight": batch * places * tokens * row,
    }


def cache_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the cache of `batch` sequences of `tokens` tokens."""
    return sum(cache_pieces(config, batch, tokens, dtype).values())


def activation_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """About what is alive at once in the widest layer while `tokens` tokens of `batch` sequences are read."""
    D, inner = config.hidden_size, int(config.mamba_expand * config.hidden_size)
    convolved = inner + 2 * config.mamba_ngroups * config.mamba_d_state
    # Embeddings, stream and what is to be added; then the projection, the convolution, the scan, the gated norm.
    mamba = 3 * D + (inner + convolved + config.n_mamba_heads) + convolved + 2 * inner
    attention = 3 * D + config.attention_hidden_size * 5
    mlp = 3 * D + D + 3 * config.intermediate_size
    states = -(-tokens // config.chunk_size) * config.n_mamba_heads * config.mamba_headdim * config.mamba_d_state
    widest = max(tokens * width * dtype.itemsize for width in (mamba, attention, mlp))
    return batch * (widest + states * torch.float32.itemsize)


def weight_reads(config: Any, name: str, tokens: int) -> float:
    """How often a decode step of `tokens` sequences reads a weight: a shared block's at each of its places."""
    if name.endswith("embed_tokens.weight"):
        # Rows for the tokens; where there is no head of its own, all of it for the logits.
        return tokens / config.vocab_size + float(config.tie_word_embeddings)
    _, shared, inner = name.partition(".shared_transformer.")
    if not shared or "adapter_list" in inner:
        return 1.0
    layer = int(name.partition("layers.")[2].partition(".")[0])
    places, blocks = list(config.hybrid_layer_ids), config.num_mem_blocks
    return float(len(places[places.index(layer) % blocks :: blocks]))


def cache_reads(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the cache that a decode step reads and writes: all of it, windows and states twice."""
    return cache_bytes(config, batch, tokens, dtype) + cache_bytes(config, batch, 0, dtype)
