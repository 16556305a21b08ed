"""The state space dual form of Mamba-2: a scan over time computed chunk by chunk with matrix products.

    S[t] = exp(g[t]) S[t-1] + dt[t] x[t] B[t]^T,   y[t] = S[t] C[t] + D x[t],   g = -exp(A_log) dt

Source: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6 and listing 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op


def _empty_outputs(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of the right shapes, without values."""
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = torch.empty(
        (sequences, *x.shape[2:], B.shape[-1]), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
    )
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), state


@op(fake=_empty_outputs)
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the Mamba-2 recurrence over sequences.

    Args:
        x: [B, T, H, P], any strides.
        dt: [B, T, H], the step before bias and softplus; -inf makes a token leave the state as it is.
        A_log: [H], log of the decay rate; the rate is -exp(A_log).
        B, C: [B, T, G, N], in and out of the state; G divides H, head h uses group h // (H / G).
        D: [H], the skip weight, or None.
        dt_bias: [H] or None.
        initial_state: [B, H, P, N] or None for zeros.
        chunk_size: tokens a chunk of this reference; changes speed and rounding, not the result. Kernels may choose.
        dt_min: smallest step after softplus; 0 for the published recurrence.
        cu_seqlens: [S + 1], int32, from 0 to T, not decreasing: S sequences lie one after the other along T, the
            batch is 1, and the states are [S, H, P, N]. None for one sequence a row.

    Returns:
        (y, state): y [B, T, H, P] in x's dtype, and the state after the last token, [B, H, P, N] in fp32 (fp64 for
        fp64), contiguous.
    """
    if cu_seqlens is not None:
        return _each_sequence(
            cu_seqlens, x, dt, B, C, initial_state, A_log, D=D, dt_bias=dt_bias, chunk_size=chunk_size, dt_min=dt_min
        )
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    wide = torch.promote_types(x.dtype, torch.float32)
    dt = step_size(dt, dt_bias, wide).clamp(min=dt_min)
    g = dt * -torch.exp(A_log.to(wide))  # log-decay, [B, T, H]
    pad = -T % chunk_size
    x_dt, B, C = (F.pad(t.to(wide), (0, 0, 0, 0, 0, pad)) for t in (x * dt[..., None], B, C))
    g, x_dt, B, C = (t.unflatten(1, (-1, chunk_size)) for t in (F.pad(g, (0, 0, 0, pad)), x_dt, B, C))
    B, C = (t.repeat_interleave(H // G, dim=3) for t in (B, C))  # [B, NC, L, H, N]
    g = g.cumsum(2)  # log-decay since the chunk's start, [B, NC, L, H]
    last = g[:, :, -1]

    # Within a chunk: y[i] = sum_{j <= i} exp(g[i] - g[j]) (C[i] . B[j]) dt[j] x[j]
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    decay = (g[:, :, :, None] - g[:, :, None]).masked_fill(~causal[:, :, None], float("-inf")).exp()
    scores = torch.einsum("bcihn,bcjhn->bcijh", C, B) * decay
    y = torch.einsum("bcijh,bcjhp->bcihp", scores, x_dt)

    # Between chunks: what each chunk adds to the state, and the state at each chunk's start.
    added = torch.einsum("bcjhn,bcjhp->bchpn", B * (last[:, :, None] - g).exp()[..., None], x_dt)
    state = x.new_zeros(batch, H, P, N, dtype=wide) if initial_state is None else initial_state.to(wide)
    starts = []
    for c in range(added.shape[1]):
        starts.append(state)
        state = state * last[:, c].exp()[..., None, None] + added[:, c]
    if starts:
        y = y + torch.einsum("bcihn,bchpn->bcihp", C, torch.stack(starts, 1)) * g.exp()[..., None]
    y = y.flatten(1, 2)[:, :T]
    if D is not None:
        y = y + D[:, None].to(wide) * x.to(wide)
    return y.to(x.dtype), state.clone() if not starts else state


def _each_sequence(
    cu_seqlens: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    A_log: Tensor,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The reference on each of the sequences that lie along T."""
    ys, states = [x[:, :0]], []
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = None if initial_state is None else initial_state[s : s + 1]
        x_s, dt_s, B_s, C_s = (t[:, start:end] for t in (x, dt, B, C))
        y, state = ssd_chunk_scan.reference(x_s, dt_s, A_log, B_s, C_s, initial_state=state, **others)
        ys.append(y)
        states.append(state)
    empty = x.new_zeros(0, *x.shape[2:], B.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.cat(ys, 1), torch.cat([empty, *states])


def step_size(dt: Tensor, dt_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """softplus(dt + dt_bias) in `dtype`."""
    dt = dt.to(dtype)
    return F.softplus(dt if dt_bias is None else dt + dt_bias.to(dtype))


# Registers itself with the op above.
from xpu_ports.common.kernels.ssd_chunk_scan import triton as _triton  # noqa: E402, F401
