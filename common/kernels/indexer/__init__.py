"""The lightning indexer: which compressed entries a token's attention looks at.

    score_j = sum_h w_h relu(q_h . k_j),   chosen = the k largest of those that are closed at the token

Source: DeepSeek-AI, "DeepSeek-V4", section 2.3.1, equations 13 to 17; its inference code (model.py, class Indexer).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.fp8_pages import cache_rows


@op
def indexer_scores(q: Tensor, weights: Tensor, keys: Tensor, entries: int, start: Tensor, ratio: int) -> Tensor:
    """How much each entry matters to each token.

    Args:
        q: [B, T, H, C], floating point.
        weights: [B, T, H], floating point, of either sign, with the scales that shall count in it.
        keys: [B, S, C], floating point, or pages of the indexer's layout [B, P, bytes], uint8 (see `fp8_pages`).
        entries: E, how many entries to score: at least those that any token sees, at most those that fit.
        start: [B], integers: the first token's position in its row.
        ratio: tokens of an entry: entry j is seen from position (j + 1) ratio - 1 on.

    Returns:
        [B, T, E], fp32 (fp64 for fp64), minus infinity where the token does not see the entry.
    """
    (B, T, H, C), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    j = torch.arange(entries, device=q.device)
    k = cache_rows.reference(keys, j.expand(B, -1), C, None).to(wide)
    scores = torch.zeros((B, T, entries), dtype=wide, device=q.device)
    # One head at a time: all at once would be H times the memory.
    for h in range(H):
        scores = scores + (q[:, :, h].to(wide) @ k.mT).relu() * weights[:, :, h, None].to(wide)
    seen = (start[:, None] + torch.arange(1, T + 1, device=q.device)) // ratio  # [B, T]
    return scores.masked_fill(j >= seen[..., None], float("-inf"))


@op
def stable_topk(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest scores; of equal ones the lower place is taken, on every device and in every length.

    Args:
        scores: [..., S], floating point; minus infinity is never taken, what is not a number only when all others are.
        k: how many, at least 1.

    Returns:
        [..., min(k, S)], int32, in rising order and then -1 where there are fewer.
    """
    order = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, scores)
    chosen = order.argsort(dim=-1, descending=True, stable=True)[..., :k]
    never = order.gather(-1, chosen) == float("-inf")
    last = scores.shape[-1]
    chosen = chosen.masked_fill(never, last).sort(dim=-1).values
    return chosen.masked_fill(chosen == last, -1).int()


# Registers the kernels.
from xpu_ports.common.kernels.indexer import scores as _scores  # noqa: E402, F401
from xpu_ports.common.kernels.indexer import topk as _topk  # noqa: E402, F401
