"""Attention over a window of single tokens and over compressed entries, in one softmax with a sink.

    y = sum_s p_s c_s,   p_s = exp(a q . c_s) / (exp(sink) + sum_s exp(a q . c_s))

One row c of a token, or of an entry, is key and value of all heads. A token sees the last `span` tokens, itself the
last, and of the entries those that `indices` names, or all that are closed: entry j holds tokens j ratio to
j ratio + ratio - 1. The sink, one number a head, takes weight and gives nothing.

Tokens are kept in a ring, position p at slot p mod its slots; entry j is at slot j. Either may be FP8 pages, whose
rows are read as they lie (see `fp8_pages`).

Source: DeepSeek-AI, "DeepSeek-V4", sections 2.3.1 and 2.3.2; its inference code (model.py, class Attention, and
kernel.py, sparse_attn); for the sink OpenAI, gpt-oss, `sdpa` of model.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.fp8_pages import cache_rows, store_slots


def _fake(q: Tensor, *others: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@op(fake=_fake)
def sparse_mla_decode(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> Tensor:
    """Attend with the newest token of each row, which is in the window already.

    Args:
        q: [B, H, K], floating point.
        window: [B, R, K], floating point, or pages [B, P, bytes], uint8, of at least `span` slots.
        entries: [B, S, K] or pages, as window; None for none.
        indices: [B, A], integers: the entries to look at, each once, all closed; one below 0 is none. None for all
            that are closed.
        lengths: [B], integers: tokens of each row, the newest included.
        sinks: [H], floating point, fp32 in models.
        span: tokens of the window.
        ratio: tokens of an entry.
        rope: how many last columns are bf16 in pages.
        scale: factor on q . c.

    Returns:
        [B, H, K] in q's dtype, computed in fp32 (fp64 for fp64); 0 in a row without tokens. A kernel rounds the
        weights that it sums the rows with to q's dtype; on Hopper also parts of sums to fp16, times powers of two.
    """
    K, lengths = q.shape[-1], lengths.long()[:, None]
    positions = lengths - span + torch.arange(span, device=q.device)
    slots = torch.where(positions >= 0, positions % store_slots(window, K, rope), -1)
    rows = [cache_rows.reference(window, slots, K, rope)]
    if entries is not None:
        if indices is None:
            j = torch.arange(store_slots(entries, K, rope), device=q.device)
            indices = torch.where(j < lengths // ratio, j, -1)
        rows.append(cache_rows.reference(entries, indices, K, rope))
        slots = torch.cat([slots, indices.long()], dim=-1)
    return _attend(q[:, None], torch.cat(rows, dim=1), slots[:, None] >= 0, sinks, scale)[:, 0]


@op(fake=_fake)
def sparse_mla_prefill(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    start: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> Tensor:
    """Attend with T new tokens of each row.

    Args:
        q: [B, T, H, K], floating point.
        rows: [B, P + T, K], floating point: P tokens before the new ones, of which those at positions below 0 do not
            count, and these.
        entries: [B, S, K], floating point, or pages [B, P, bytes], uint8, the new tokens' own included; None for none.
        indices: [B, T, A], integers: the entries to look at, each once, of which those closed count; one below 0 is
            none. None for all that are closed.
        start: [B], integers: the first new token's position in its row.
        sinks: [H], floating point, fp32 in models.
        span: tokens of the window.
        ratio: tokens of an entry.
        rope: how many last columns are bf16 in pages.
        scale: factor on q . c.

    Returns:
        [B, T, H, K] in q's dtype, computed as `sparse_mla_decode` does.
    """
    (B, T, _, K), P = q.shape, rows.shape[1] - q.shape[1]
    t, start = torch.arange(T, device=q.device)[:, None], start.long()[:, None, None]
    s = torch.arange(P + T, device=q.device)
    seen = (s <= P + t) & (s > P + t - span) & (start - P + s >= 0)  # [B, T, P + T]
    if entries is not None:
        S = store_slots(entries, K, rope)
        j = torch.arange(S, device=q.device)
        closed = j < (start + t + 1) // ratio  # [B, T, S]
        if indices is not None:
            named = torch.zeros((B, T, S + 1), dtype=torch.bool, device=q.device)
            named = named.scatter(2, torch.where(indices < 0, S, indices).long(), True)[..., :S]
            closed = closed & named
        compressed = cache_rows.reference(entries, j.expand(B, -1), K, rope)
        rows, seen = torch.cat([rows, compressed.to(rows.dtype)], dim=1), torch.cat([seen, closed], dim=2)
    return _attend(q, rows, seen, sinks, scale)


def _attend(q: Tensor, rows: Tensor, seen: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q [B, T, H, K] on rows [B, S, K] where seen [B, T, S]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows, sinks = rows.to(wide), sinks.to(wide)[:, None]
    scores = torch.einsum("bthk,bsk->bths", q.to(wide), rows) * scale
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True) + (sinks - largest).exp()
    # A row that does not count may hold anything, in a cache that has been used before.
    rows = torch.where(seen.any(1)[..., None], rows, 0.0)
    return (torch.einsum("bths,bsk->bthk", weights, rows) / total).to(q.dtype)


# Registers itself with the ops above.
from xpu_ports.common.kernels.sparse_mla import triton as _triton  # noqa: E402, F401
