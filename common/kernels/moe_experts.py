"""The feed-forward layers of a mixture of experts, each on the tokens that were sent to it.

    y_n = sum_a w_na down_e (silu(g) * u),   g | u = gate_up_e x_n,   e = indices_na

With a limit c (DeepSeek-V4) g is cut to at most c and u to [-c, c] before the activation.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), equation 1; Shazeer, "GLU Variants
Improve Transformer" (arXiv:2002.05202), equation 6; for the limit the inference code of DeepSeek-V4, class Expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.gated_mlp import gated_activation


def _fake(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, limit: float | None = None
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op(fake=_fake)
def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, limit: float | None = None
) -> Tensor:
    """Send each token through its experts and add up what they give.

    Args:
        x: [N, D], floating point.
        gate_up: [E, 2 F, D] in x's dtype, the gate's rows first.
        down: [E, D, F] in x's dtype.
        indices: [N, A], int64, in [0, E); a token's experts need not differ.
        weights: [N, A], fp32, what each of them counts.
        limit: the gate's upper bound and the bound of both signs of what it gates; None for no bounds.

    Returns:
        [N, D] in x's dtype. Both products are rounded to x's dtype, the activation between them and the sum over
        experts are computed in fp32 (fp64 for fp64). Only chosen experts' weights are read.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in indices.unique().tolist():
        token, place = (indices == expert).nonzero(as_tuple=True)
        h = F.linear(_activate(F.linear(x[token], gate_up[expert]), limit), down[expert])
        y = y.index_add(0, token, h.to(wide) * weights[token, place, None].to(wide))
    return y.to(x.dtype)


def _activate(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(g) * u of g | u, [..., 2 F] to [..., F]."""
    g, u = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (F.silu(g) * u).to(gate_up.dtype)


def _refuses(
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, limit: float | None = None
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
    x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, limit: float | None = None
) -> Tensor:
    N, A = indices.shape
    if indices.numel() == 0:
        return torch.zeros_like(x)
    # Rows ordered by expert; nothing here waits for the device.
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    sizes = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=x.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    ends = sizes.cumsum(0, dtype=torch.int32)
    h = F.grouped_mm(x[order // A], gate_up.mT, offs=ends)  # [N A, 2 F]
    h = gated_activation(h, None, "silu") if limit is None else _activate(h, limit)
    h = F.grouped_mm(h, down.mT, offs=ends)  # [N A, D]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(N * A, device=x.device))
    return (h[place].unflatten(0, (N, A)).float() * weights[..., None]).sum(1).to(x.dtype)
