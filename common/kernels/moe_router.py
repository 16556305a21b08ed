"""Which experts a token goes to, and how much each counts: sigmoid scores with a bias for the choice alone.

    s = sigmoid(logits),   chosen = top_k(s + b),   w_i = scale s_i / sum_chosen s

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), equations 13 to 16; Kimi Team, "Kimi Linear"
(arXiv:2510.26692), section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op

# Added to the sum of the chosen scores, so that scores of 0 alone give weights of 0.
LEAST_SUM = 1e-20


@op
def moe_sigmoid_router(logits: Tensor, correction_bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores and weight them by the unbiased ones, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point. Their product with the router's matrix belongs in fp32 already.
        correction_bias: [E], floating point, added for the choice alone: it balances the load of the experts.
        top_k: experts for a token, at most E.
        scale: what a token's weights sum to.

    Returns:
        weights: [N, top_k], fp32 (fp64 for fp64 logits), the highest biased score first.
        indices: [N, top_k], int64; of equal scores the lower index goes first, on every device.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(wide).sigmoid()
    choice = scores + correction_bias.to(wide)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k].contiguous()
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + LEAST_SUM) * scale, indices
