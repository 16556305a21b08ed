"""The feed-forward layers of a mixture of experts, each on the tokens that were sent to it.

    y_n = sum_a w_na mlp_e(x_n) + mlp_shared(x_n),   e = indices_na
    mlp_e(x) = down_e (silu(g) * u),   g | u = gate_up_e x

With a limit c (DeepSeek-V4) g is cut to at most c and u to [-c, c] before the activation.

Sources: Shazeer et al., "Outrageously Large Neural Networks" (arXiv:1701.06538), equation 1; Shazeer, "GLU Variants
Improve Transformer" (arXiv:2002.05202), equation 6; DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437),
equation 12, for the shared expert; for the limit the inference code of DeepSeek-V4, class Expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.gated_mlp import gated_activation


def _fake(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op(fake=_fake)
def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts, and all through a shared one, and add up what they give.

    Args:
        x: [N, D], floating point.
        gate_up: [E, 2 F, D] in x's dtype, the gate's rows first.
        down: [E, D, F] in x's dtype.
        indices: [N, A], int64, in [0, E]; a token's experts need not differ. E is an expert that another device has: it
            adds nothing here.
        weights: [N, A], fp32, what each of them counts.
        limit: the gate's upper bound and the bound of both signs of what it gates; None for no bounds.
        shared_gate_up: [2 S, D] in x's dtype, an expert that every token goes through, with a weight of 1; None for
            none. Its width S need not be F.
        shared_down: [D, S] in x's dtype; None where shared_gate_up is.

    Returns:
        [N, D] in x's dtype. All products are rounded to x's dtype, the activation between them and the sum over
        experts are computed in fp32 (fp64 for fp64); a kernel may leave out the products' roundings. Only chosen
        experts' weights are read.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in indices[indices < gate_up.shape[0]].unique().tolist():
        token, place = (indices == expert).nonzero(as_tuple=True)
        h = mlp(x[token], gate_up[expert], down[expert], limit)
        y = y.index_add(0, token, h.to(wide) * weights[token, place, None].to(wide))
    if shared_gate_up is not None and shared_down is not None:
        y = y + mlp(x, shared_gate_up, shared_down, limit).to(wide)
    return y.to(x.dtype)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    """One expert on [N, D]."""
    return F.linear(gated_activation.reference(F.linear(x, gate_up), None, "silu", limit), down)


# Registered in this order, which is that of preference.
from xpu_ports.common.kernels.moe_experts import triton as _triton  # noqa: E402, F401
from xpu_ports.common.kernels.moe_experts import vendor as _vendor  # noqa: E402, F401
