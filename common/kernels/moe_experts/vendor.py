"""The experts for many tokens: rows ordered by expert, and PyTorch's grouped products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.moe_experts import moe_experts
from xpu_ports.common.kernels.skinny_linear import linear


def _refuses(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> str | None:
    if x.dtype != torch.bfloat16 or gate_up.dtype != x.dtype or down.dtype != x.dtype:
        dtypes = f"{x.dtype}, {gate_up.dtype} and {down.dtype}"
        return f"dtypes {dtypes}; torch's grouped product takes bfloat16 without a loop"
    for name, t in (("gate_up", gate_up), ("down", down)):
        if not t.is_contiguous():
            return f"{name} is not contiguous"
        if t.shape[2] % 8:
            return f"rows of {t.shape[2]} elements in {name}, not a multiple of 8"
    return None


@moe_experts.implement("pytorch", "xpu", "cuda", refuses=_refuses)
def moe_experts_pytorch(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    N, A = indices.shape
    if indices.numel() == 0:
        y = torch.zeros_like(x)
    else:
        # Rows ordered by expert; nothing here waits for the device.
        flat, E = indices.flatten(), gate_up.shape[0]
        order = flat.argsort(stable=True)
        sizes = torch.zeros(E + 1, dtype=torch.int32, device=x.device)
        sizes.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        # Rows of expert E, which another device has, come behind the last end: they are not computed.
        ends = sizes[:E].cumsum(0, dtype=torch.int32)
        h = gated_activation(F.grouped_mm(x[order // A], gate_up.mT, offs=ends), None, "silu", limit)  # [N A, F]
        h = F.grouped_mm(h, down.mT, offs=ends)  # [N A, D]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(N * A, device=x.device))
        # Those count nothing. The row in their place is one that is computed, or zeros where none is.
        here = flat < E
        h[:1].masked_fill_(ends[-1:, None] == 0, 0.0)
        y = (h[place * here].unflatten(0, (N, A)).float() * (weights * here.view(N, A))[..., None]).sum(1)
    if shared_gate_up is not None:
        y = y + linear(gated_activation(linear(x, shared_gate_up), None, "silu", limit), shared_down)
    return y.to(x.dtype)
