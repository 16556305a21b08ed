"""One decode step of the Mamba-2 recurrence, the state updated in place.

    S = exp(g) S + dt x B^T,   y = S C + D x,   g = -exp(A_log) dt,   dt = softplus(dt + dt_bias)

Source: Gu and Dao, "Mamba" (arXiv:2312.00752), section 3; Dao and Gu (arXiv:2405.21060) for groups and scalar decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.ssd_chunk_scan import step_size


@op(mutates=("state",))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Move the state by one token and read it.

    Args:
        state: [B, H, P, N], fp32 in models. Written.
        x: [B, H, P], any strides.
        dt: [B, H], the step before bias and softplus.
        A_log: [H]; the decay rate is -exp(A_log).
        B, C: [B, G, N]; G divides H, head h uses group h // (H / G).
        D: [H] or None.
        dt_bias: [H] or None.
        mask: [B], nonzero where the token counts; a row whose token does not keeps its state and gives 0.

    Returns:
        y: [B, H, P] in x's dtype.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    H, G = x.shape[1], B.shape[1]
    dt = step_size(dt, dt_bias, wide)
    decay = torch.exp(dt * -torch.exp(A_log.to(wide)))[..., None, None]
    B, C = (t.to(wide).repeat_interleave(H // G, dim=1) for t in (B, C))  # [B, H, N]
    x_wide = x.to(wide)
    moved = state.to(wide) * decay + (dt[..., None] * x_wide)[..., None] * B[:, :, None]
    y = torch.einsum("bhpn,bhn->bhp", moved, C)
    if D is not None:
        y = y + D[:, None].to(wide) * x_wide
    if mask is not None:
        valid = mask.bool()
        y = torch.where(valid[:, None, None], y, 0.0)
        moved = torch.where(valid[:, None, None, None], moved, state.to(wide))
    state.copy_(moved)
    return y.to(x.dtype)
