"""What models share in how they treat a sequence: masks of tokens, the convolution's window, attention written out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask


def last_inputs(x: Tensor, state: Tensor | None, mask: Tensor | None, W: int) -> Tensor:
    """The last W inputs that count, newest last: what the convolution must know of the past.

    Args:
        x: [B, T, D], the new inputs.
        state: [B, D, W], the ones before, or None for zeros.
        mask: [B, T], nonzero where an input counts, or None.
        W: how many.

    Returns:
        [B, D, W].
    """
    x = x.transpose(1, 2)
    if mask is None and x.shape[2] >= W:
        return x[:, :, -W:]
    before = x.new_zeros(x.shape[0], x.shape[1], W) if state is None else state[:, :, -W:]
    window = torch.cat([before, x[:, :, -W:] if mask is None else x], dim=-1)
    if mask is None:
        return window[:, :, -W:]
    positions = torch.arange(window.shape[2], device=x.device)
    counts = torch.cat([mask.new_ones(mask.shape[0], W), mask], dim=-1).bool()
    last = torch.where(counts, positions, -1).sort(dim=-1).values[:, None, -W:]  # [B, 1, W]
    return window.gather(2, last.expand(-1, window.shape[1], -1))


def mask_of_tokens(attention_mask: Tensor | None, T: int) -> Tensor | None:
    """The mask of the T new tokens, [B, T], or None where all count.

    One token a row is masked without looking at the values, which would wait for the device; more than one is a
    prefill, where one look saves the masking in every layer.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    mask = attention_mask[:, -T:]
    if T > 1 and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def causal_mask(
    config: Any, x: Tensor, attention_mask: Tensor | None, cache: Cache | None, position_ids: Tensor | None
) -> Any:
    """What transformers' mask function makes for full attention; without it where one token sees all that there is."""
    alone = attention_mask is None and x.shape[1] == 1 and type(cache) is DynamicCache
    if alone and config._attn_implementation == "sdpa":
        return None
    return create_causal_mask(
        config=config, inputs_embeds=x, attention_mask=attention_mask, cache=cache, position_ids=position_ids
    )


def eager_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention written out, which also gives the weights; the interface is transformers'."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ v).transpose(1, 2), weights
