"""A window of tokens made one: each column is an average of the window's, weighted by a softmax over its tokens.

    c_w = sum_t softmax_t(z_t + b_(t mod r)) u_t,   t in window w, the tokens w r to w r + r - 1

u and z are projections of a token, b the position's bias. `compress_hca` does just that. `compress_csa` projects each
token twice: window w is averaged over its own tokens in the second projection together with the window before in the
first, 2 r of them; the first window has none before.

A sequence comes in pieces of any length. What a window needs of earlier pieces is in a ring of the last R tokens,
token p at p mod R. Nothing else is carried: after a step back to fewer tokens, up to R minus a window's tokens of them,
the ring is as good as before.

Source: DeepSeek-AI, "DeepSeek-V4", sections 2.3.1, equations 9 to 12, and 2.3.2, equations 20 to 23; its inference code
(model.py, class Compressor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op


def closed_windows(T: int, r: int) -> int:
    """How many windows of r tokens T more can close, at most."""
    return -(-T // r)


def _fake(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    B, T, _ = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.empty((B, closed_windows(T, bias.shape[0]), bias.shape[1]), dtype=wide, device=x.device)


@op(mutates=("state",), fake=_fake)
def compress_hca(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Average the windows that new tokens close.

    Args:
        x: [B, T, 2 C], floating point: u | z of each new token.
        bias: [r, C], floating point.
        state: [B, R, 2 C], floating point, R at least r: the ring of u | z, written where new tokens go.
        start: [B], integers: tokens of each row before these.
        count: [B], integers: how many of the T are the row's; those behind are not read or written.

    Returns:
        [B, ceil(T / r), C], fp32 (fp64 for fp64): windows start // r and on; 0 where the window is not closed.
    """
    pool = _pool(x, bias, state, start, count, 0)
    _remember(x, state, start, count)
    return pool


def _fake_csa(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return _fake(x, bias[:, : bias.shape[1] // 2], state, start, count)


@op(mutates=("state",), fake=_fake_csa)
def compress_csa(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    """Average the windows that new tokens close, each with the one before it.

    Args:
        x: [B, T, 4 C], floating point: u_a | u_b | z_a | z_b of each new token; a goes to the next window.
        bias: [r, 2 C], floating point: of z_a | z_b.
        state: [B, R, 4 C], floating point, R at least 2 r: the ring of x, written where new tokens go.
        start: [B], integers: tokens of each row before these.
        count: [B], integers: how many of the T are the row's; those behind are not read or written.

    Returns:
        [B, ceil(T / r), C], fp32 (fp64 for fp64): windows start // r and on; 0 where the window is not closed.
    """
    pool = _pool(x, bias, state, start, count, bias.shape[0])
    _remember(x, state, start, count)
    return pool


def _pool(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor, before: int) -> Tensor:
    """The averages, over `before` tokens in the first halves and a window's in the second; all of u, z without any."""
    (B, T, _), r = x.shape, bias.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = torch.arange(B, device=x.device)[:, None, None]
    start, count = start.long()[:, None], count.long()[:, None]
    window = start // r + torch.arange(closed_windows(T, r), device=x.device)  # [B, NW]
    tokens = window[..., None] * r + torch.arange(-before, r, device=x.device)  # [B, NW, before + r]
    new = x[rows, (tokens - start[..., None]).clamp(0, max(T - 1, 0))].to(wide)
    old = state[rows, tokens % state.shape[1]].to(wide)
    u, z = torch.where((tokens >= start[..., None])[..., None], new, old).chunk(2, dim=-1)
    z = z + bias.to(wide)[torch.arange(-before, r, device=x.device) % r]
    if before:
        # The first projection of the window before, the second of the window itself.
        u, z = (torch.cat([t[:, :, :r].chunk(2, -1)[0], t[:, :, r:].chunk(2, -1)[1]], dim=2) for t in (u, z))
    missing = (tokens < 0)[..., None]
    weights = z.masked_fill(missing, float("-inf")).softmax(dim=2)
    closed = (window + 1) * r <= start + count
    # A slot that is not written yet may hold anything.
    u = u.masked_fill(missing, 0.0)
    return torch.where(closed[..., None], (weights * u).sum(2), 0.0)


def _remember(x: Tensor, state: Tensor, start: Tensor, count: Tensor) -> None:
    """Put the last new tokens into the ring."""
    T, R = x.shape[1], state.shape[1]
    t = torch.arange(T, device=x.device)
    kept = (t < count[:, None]) & (t >= count[:, None] - R)
    b, t = kept.nonzero(as_tuple=True)
    state[b, (start.long()[b] + t) % R] = x.detach()[b, t].to(state.dtype)
