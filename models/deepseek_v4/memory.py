"""What DeepSeek-V4 needs beside its weights, from the config alone."""

from __future__ import annotations

from typing import Any

import torch

from xpu_ports.models.deepseek_v4.caching import DeepseekV4Cache

# Queries that attend at once.
TILE = 1024


def cache_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype, cache_dtype: str | None = None) -> int:
    """Bytes of the cache of `batch` sequences of `tokens` tokens, made without data."""
    return _cache(config, batch, tokens, dtype, cache_dtype).memory()


def cache_pieces(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """The same: all heads share the rows and entries, so that no part of them is a rank's."""
    return {"": cache_bytes(config, batch, tokens, dtype)}


def _cache(config: Any, batch: int, tokens: int, dtype: torch.dtype, cache_dtype: str | None) -> DeepseekV4Cache:
    cache = DeepseekV4Cache(config, cache_dtype)
    for layer in cache.layers:
        layer.lazy_initialization(torch.empty(batch, 1, config.head_dim, dtype=dtype, device="meta"))
        layer.reserve(tokens // layer.ratio if layer.ratio else 0)
    return cache


def activation_bytes(config: Any, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """About what is alive at once in the widest layer while `tokens` tokens of `batch` sequences are read."""
    D, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    # Four streams before and after; queries before and after rotation, the output.
    streams = 2 * config.hc_mult * D
    attention = streams + 3 * queries + config.q_lora_rank + 2 * config.head_dim
    experts = streams + 2 * D + config.num_experts_per_tok * (2 * D + 3 * config.moe_intermediate_size)
    # Scores of a tile with the keys that it looks at, in fp32.
    keys = config.sliding_window + min(config.index_topk, tokens)
    tile = min(tokens, TILE) * config.num_attention_heads * keys * torch.float32.itemsize
    return batch * (tokens * max(attention, experts) * dtype.itemsize + tile)


def weight_reads(config: Any, name: str, tokens: int) -> float:
    """How often a decode step of `tokens` sequences reads a weight: of the experts those that some token chooses.

    Tokens that choose at random leave a share of (1 - chosen / experts)^tokens of the experts alone.
    """
    if name.startswith("mtp."):
        return 0.0
    if ".mlp.experts." in name:
        return 1.0 - (1.0 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    return tokens / config.vocab_size if name.endswith(("embed_tokens.weight", "tid2eid")) else 1.0


def cache_reads(config: Any, batch: int, tokens: int, dtype: torch.dtype, cache_dtype: str | None = None) -> int:
    """Bytes of the cache that a decode step reads: of the entries that an indexer scores, those that it chooses."""
    total = 0.0
    for layer in _cache(config, batch, tokens, dtype, cache_dtype).layers:
        stores = layer.memory()
        entries = tokens // layer.ratio if layer.ratio else 0
        chosen = min(1.0, config.index_topk / entries) if entries and "index_entries" in stores else 1.0
        total += sum(size * (chosen if name == "entries" else 1.0) for name, size in stores.items())
    return round(total)
