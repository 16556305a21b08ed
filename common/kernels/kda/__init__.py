"""Kimi Delta Attention: a delta rule whose state decays by a factor of its own in every channel of the keys.

    S[t] = Diag(exp(g[t])) S[t-1],   S[t] += beta[t] k[t] (v[t] - S[t]^T k[t])^T,   o[t] = scale S[t]^T q[t]

`chunk_kda` runs it over sequences with matrix products, `recurrent_kda` token by token in place, and `kda_gate` makes
the log-decays g.

Sources: Kimi Team, "Kimi Linear" (arXiv:2510.26692), section 3; Yang et al., "Gated Delta Networks"
(arXiv:2412.06464), for the chunked form with one decay a head.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op

# Tokens that one system of equations couples, in the reference and in the kernels.
CHUNK = 64
# Added to the sum of squares that q and k are normalized by.
L2_EPS = 1e-6


@op
def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    """Log-decays of what the forget projection gives.

    Args:
        f: [B, T, H, K], any strides.
        A_log: [H], log of the rate.
        dt_bias: [H * K], added to f; None for zeros.
        lower_bound: negative, the log-decay that none goes below: lower_bound sigmoid(exp(A_log) (f + dt_bias)). None
            for the unbounded -exp(A_log) softplus(f + dt_bias).

    Returns:
        g: [B, T, H, K], natural log, at most 0; fp32 (fp64 for fp64), contiguous.

    Raises:
        ValueError: lower_bound is not negative.
    """
    if lower_bound is not None and not lower_bound < 0.0:
        raise ValueError(f"lower_bound is {lower_bound}, expected a negative number or None")
    wide = torch.promote_types(f.dtype, torch.float32)
    x = f.to(wide)
    if dt_bias is not None:
        x = x + dt_bias.to(wide).view(f.shape[2:])
    rate = torch.exp(A_log.to(wide))[:, None]
    g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return g.contiguous()


def _empty_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs of the right shapes, without values."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = torch.empty(
        (sequences, q.shape[2], q.shape[3], v.shape[3]),
        dtype=torch.promote_types(q.dtype, torch.float32),
        device=q.device,
    )
    return torch.empty(v.shape, dtype=q.dtype, device=q.device), state


@op(fake=_empty_outputs)
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over sequences.

    Args:
        q, k: [B, T, H, K], any strides.
        v: [B, T, H, V].
        g: [B, T, H, K], fp32 in models, natural log, at most 0: a log-decay for each channel of the keys.
        beta: [B, T, H], the step of the delta rule, in [0, 1] in models.
        initial_state: [B, H, K, V] or None for zeros.
        scale: of the outputs; K^-0.5 in models.
        l2norm: divide q and k by sqrt(sum of squares + 1e-6), each head by its own.
        cu_seqlens: [S + 1], int32, from 0 to T, not decreasing: S sequences lie one after the other along T, the
            batch is 1, and the states are [S, H, K, V]. None for one sequence a row.

    Returns:
        (o, state): o [B, T, H, V] in q's dtype, and the state after the last token, [B, H, K, V] in fp32 (fp64 for
        fp64), contiguous. Kernels round the operands of products to bf16 for bf16 and to tf32 for fp16 inputs, so
        that the state is as accurate as these are.
    """
    if cu_seqlens is not None:
        return _each_sequence(q, k, v, g, beta, initial_state, scale, l2norm, cu_seqlens)
    wide = torch.promote_types(q.dtype, torch.float32)
    B, T, H, K = q.shape
    state = q.new_zeros(B, H, K, v.shape[3], dtype=wide) if initial_state is None else initial_state.to(wide).clone()
    outputs = [v.new_zeros(B, 0, H, v.shape[3], dtype=wide)]
    for start in range(0, T, CHUNK):
        chunk = [t[:, start : start + CHUNK].to(wide) for t in (q, k, v, g, beta)]
        o, state = _one_chunk(*chunk, state, l2norm)  # type: ignore[arg-type, call-arg]
        outputs.append(o)
    return (torch.cat(outputs, 1) * scale).to(q.dtype), state


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, l2norm: bool
) -> tuple[Tensor, Tensor]:
    """(o, state) after at most CHUNK tokens; o without the scale."""
    if l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    q, k, v, g, beta = (t.transpose(1, 2) for t in (q, k, v, g, beta[..., None]))  # [B, H, C, ...]
    C = q.shape[2]
    g = g.cumsum(2)  # log-decay since the chunk's start
    # The decay from j to i lies inside the sum over channels, and only differences of log-decays may be exponentiated:
    # exp(-g[j]) alone overflows. scores[i, j] = sum_d x[i, d] k[j, d] exp(g[i, d] - g[j, d]) for j <= i
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    decay = (g[:, :, :, None] - g[:, :, None]).masked_fill(~causal[..., None], float("-inf")).exp()  # [B, H, C, C, K]
    decayed_k = decay * k[:, :, None]
    qk = torch.einsum("bhid,bhijd->bhij", q, decayed_k)
    kk = torch.einsum("bhid,bhijd->bhij", k, decayed_k)
    # What the tokens write, u[i] = beta[i] (v[i] - k[i] . S[i]), where S[i] holds what those before it wrote: a
    # triangular system, (I + beta kk below the diagonal) u = beta (v - (k exp(g)) . S)
    rest = beta * (v - torch.einsum("bhid,bhde->bhie", k * g.exp(), state))
    u = torch.linalg.solve_triangular((beta * kk).tril(-1), rest, upper=False, unitriangular=True)
    o = torch.einsum("bhid,bhde->bhie", q * g.exp(), state) + qk @ u
    last = g[:, :, -1:]
    state = state * last.mT.exp() + torch.einsum("bhid,bhie->bhde", k * (last - g).exp(), u)
    return o.transpose(1, 2), state


def _each_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
    l2norm: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """The reference on each of the sequences that lie along T."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outputs = [v.new_zeros(1, 0, *v.shape[2:], dtype=q.dtype)]
    states = [q.new_zeros(0, *q.shape[2:], v.shape[3], dtype=wide)]
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        part = (t[:, start:end] for t in (q, k, v, g, beta))
        state = None if initial_state is None else initial_state[s : s + 1]
        o, state = chunk_kda.reference(*part, state, scale, l2norm)
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


@op(mutates=("state",))
def recurrent_kda(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float = 1.0,
    l2norm: bool = False,
    mask: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Move the state by a few tokens, one after the other, and read it after each.

    Args:
        state: [B, H, K, V], fp32 in models; with `slots` [S, H, K, V]. Written.
        q, k, v, g, beta, scale, l2norm: as `chunk_kda` takes them. T is 1 in a decode step.
        mask: [B, T], nonzero where the token counts; one that does not leaves the state as it is and gives 0.
        slots: [B], int32 or int64, in [-1, S): which state is a sequence's, no two sequences' the same. A sequence with
            -1 has none: it writes nothing and gives 0. None for state b of sequence b.

    Returns:
        o: [B, T, H, V] in q's dtype.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (t.to(wide) for t in (q, k, v, g, beta))
    if l2norm:
        q, k = l2_normalized(q), l2_normalized(k)
    moved = state.to(wide) if slots is None else state.to(wide)[slots.clamp(min=0)]
    outputs = v.new_empty(v.shape)
    for t in range(q.shape[1]):
        decayed = moved * g[:, t, :, :, None].exp()
        delta = v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], decayed)
        after = decayed + (beta[:, t, :, None] * k[:, t])[..., None] * delta[:, :, None]
        o = torch.einsum("bhd,bhde->bhe", q[:, t], after) * scale
        if mask is not None:
            counts = mask[:, t].bool()[:, None, None]
            o, after = torch.where(counts, o, 0.0), torch.where(counts[..., None], after, moved)
        moved = after
        outputs[:, t] = o
    if slots is None:
        state.copy_(moved)
    elif slots.shape[0]:
        outputs = torch.where((slots >= 0)[:, None, None, None], outputs, 0.0)
        # Which sequence each state is of; by shapes alone, so that it can be traced.
        owner = slots == torch.arange(state.shape[0], device=slots.device)[:, None]  # [S, B]
        owned = owner.any(1)[:, None, None, None]
        state.copy_(torch.where(owned, moved[owner.int().argmax(1)].to(state.dtype), state))
    return outputs.to(dtype)


def l2_normalized(x: Tensor) -> Tensor:
    """x over its norm along the last dimension; zeros stay zeros."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


# Register themselves with the ops above.
from xpu_ports.common.kernels.kda import gate as _gate  # noqa: E402, F401
from xpu_ports.common.kernels.kda import recurrent as _recurrent  # noqa: E402, F401
from xpu_ports.common.kernels.kda import triton as _triton  # noqa: E402, F401
