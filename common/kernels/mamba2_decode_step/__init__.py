"""One decode step of a Mamba-2 mixer between its two projections, in two launches.

    z | xBC | dt = zxbcdt
    x, B, C = silu(conv(xBC)),   S = exp(g) S + softplus(dt) x B^T,   y = norm((S C + D x) * silu(z)) * weight

Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.1 and figure 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.causal_conv1d import causal_conv1d_update
from xpu_ports.common.kernels.gated_rms_norm import gated_rms_norm
from xpu_ports.common.kernels.selective_state_update import selective_state_update


@op(mutates=("conv_state", "state"))
def mamba2_decode_step(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor,
    mask: Tensor | None,
    n_groups: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """Convolve, move the state by one token, read it, gate and normalize: one token of every sequence.

    Twelve parameters: a layer has that many tensors, and a torch schema takes no dataclass.

    Args:
        zxbcdt: [B, 2 H P + 2 G N + H], in_proj's output, columns z | x | B | C | dt; any row stride.
        conv_state: [B, H P + 2 G N, S] with S >= W - 1, the last inputs of the convolution, newest last. Written.
        state: [B, H, P, N], fp32 in models. Written.
        conv_weight: [H P + 2 G N, W], the last column meets the current token.
        conv_bias: [H P + 2 G N] or None.
        A_log: [H]; the decay rate is -exp(A_log).
        D: [H] or None.
        dt_bias: [H] or None.
        norm_weight: [H P].
        mask: [B], nonzero where the token counts; a row whose token does not keeps both states and gives 0.
        n_groups: G, of B and C and of the norm; divides H.
        eps: added to the mean square.

    Returns:
        [B, H P] in zxbcdt's dtype. A kernel rounds once, at the end; the reference after each of its three ops.

    Raises:
        ValueError: zxbcdt has another number of columns.
    """
    _, H, P, N = state.shape
    inner, grouped = H * P, n_groups * N
    if zxbcdt.shape[1] != 2 * inner + 2 * grouped + H:
        raise ValueError(f"zxbcdt has {zxbcdt.shape[1]} columns, expected {2 * inner + 2 * grouped + H}")
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * grouped, H], dim=-1)
    xbc = causal_conv1d_update.reference(
        conv_state, xbc[:, None], conv_weight, conv_bias, None if mask is None else mask[:, None]
    )[:, 0]
    x, B, C = xbc.split([inner, grouped, grouped], dim=-1)
    B, C = (t.unflatten(-1, (n_groups, N)) for t in (B, C))
    y = selective_state_update.reference(state, x.unflatten(-1, (H, P)), dt, A_log, B, C, D, dt_bias, mask)
    y = gated_rms_norm.reference(y.flatten(1), z, norm_weight, eps, inner // n_groups)
    return y if mask is None else torch.where(mask.bool()[:, None], y, 0.0)


# Registers the kernels.
from xpu_ports.common.kernels.mamba2_decode_step import triton as _triton  # noqa: E402, F401
