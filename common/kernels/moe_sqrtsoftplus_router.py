"""Which experts a token goes to in DeepSeek-V4, by scores or by a table, and how much each counts.

    s = sqrt(softplus(logits)),   chosen = top_k(s + b) or table[token],   w_i = scale s_i / sum_chosen s

Source: DeepSeek-AI, "DeepSeek-V4", section 2.1; its inference code (model.py, class Gate). The bias for the choice
alone is that of "DeepSeek-V3" (arXiv:2412.19437), equation 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.moe_router import LEAST_SUM


@op
def moe_sqrtsoftplus_router(logits: Tensor, correction_bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores and weight them by the unbiased ones, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point. Their product with the router's matrix belongs in fp32 already.
        correction_bias: [E], floating point, added for the choice alone.
        top_k: experts for a token, at most E.
        scale: what a token's weights sum to.

    Returns:
        weights: [N, top_k], fp32 (fp64 for fp64 logits), the highest biased score first.
        indices: [N, top_k], int64; of equal scores the lower index goes first, on every device. A score that is not a
            number goes before all others, so that the indices are in [0, E) and differ whatever the logits are.
    """
    scores = _scores(logits)
    choice = scores + correction_bias.to(scores.dtype)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k].contiguous()
    return _weights(scores, indices, scale), indices


@op
def moe_hash_router(logits: Tensor, table: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Look up a token's experts and weight them by their scores, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point, as for `moe_sqrtsoftplus_router`.
        table: [V, A], int64, in [0, E): the experts of each token of the vocabulary.
        ids: [N], int64, in [0, V).
        scale: what a token's weights sum to.

    Returns:
        weights: [N, A], fp32 (fp64 for fp64 logits).
        indices: [N, A], int64.
    """
    indices = table[ids]
    return _weights(_scores(logits), indices, scale), indices


def _scores(logits: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # softplus, without a threshold beyond which it is taken for the identity.
    return torch.logaddexp(wide, torch.zeros_like(wide)).sqrt()


def _weights(scores: Tensor, indices: Tensor, scale: float) -> Tensor:
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + LEAST_SUM) * scale
