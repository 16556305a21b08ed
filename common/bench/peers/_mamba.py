"""What mamba-ssm and vLLM want spelled out that is one number a head."""

from __future__ import annotations

import torch
from torch import Tensor


def per_column(
    state: Tensor, dt: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dt [B, H, P], A [H, P, N], D [H, P], dt_bias [H, P]) as expanded views, by which both know a scalar decay."""
    _, H, P, N = state.shape
    A = -torch.exp(A_log)
    return (
        dt[..., None].expand(-1, H, P),
        A[:, None, None].expand(H, P, N),
        D[:, None].expand(H, P),
        dt_bias[:, None].expand(H, P),
    )
