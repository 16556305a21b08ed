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

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# A program of the kernels holds the tokens of a window and some of their columns.
LARGEST_WINDOW = 256
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


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


# ------------------------------------------------------------------------------------------------------------ kernels


def _refuses_csa(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> str | None:
    return _refuses(x, bias, state, start, count, 2)


def _refuses_hca(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> str | None:
    return _refuses(x, bias, state, start, count, 1)


def _refuses(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor, halves: int) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if x.dim() != 3 or bias.dim() != 2 or state.dim() != 3 or state.shape[0] != x.shape[0]:
        return f"shapes {tuple(x.shape)}, {tuple(bias.shape)} and {tuple(state.shape)} do not go together"
    (r, columns), slots = bias.shape, state.shape[1]
    if x.shape[2] != 2 * columns or state.shape[2] != 2 * columns or columns % halves:
        return f"x, bias and state have {x.shape[2]}, {columns} and {state.shape[2]} columns, not 2 n, n and 2 n"
    for name, t in (("x", x), ("bias", bias), ("state", state)):
        if t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    if not 1 <= halves * r <= LARGEST_WINDOW:
        return f"{halves * r} tokens to average, not 1 to {LARGEST_WINDOW}"
    if slots < halves * r:
        return f"a ring of {slots} tokens does not hold {halves * r}"
    for name, t in (("start", start), ("count", count)):
        if t.shape != x.shape[:1] or t.dtype not in (torch.int32, torch.int64):
            return f"{name} has shape {tuple(t.shape)} and dtype {t.dtype}, not ({x.shape[0]},), int32 or int64"
    return None


@triton.jit
def _average(
    x_ptr,
    bias_ptr,
    state_ptr,
    y_ptrs,
    window,
    start,
    end,
    offs_c,
    R,
    stride_x_t,
    stride_b_r,
    stride_s_r,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Some columns of a window's average; tokens are of x from `start` on, else of the ring, and end before `end`."""
    before: tl.constexpr = (HALVES - 1) * RATIO
    mask_c = offs_c < C
    if (window + 1) * RATIO <= end:
        place = tl.arange(0, BLOCK_P)
        token = window * RATIO - before + place
        exists = (place < before + RATIO) & (token >= 0)
        # u of the first projection for the window before, of the second for its own; z is HALVES C columns on.
        columns = tl.where(place < before, 0, (HALVES - 1) * C)[:, None] + offs_c[None, :]
        z_columns = HALVES * C
        mask = exists[:, None] & mask_c[None, :]
        new, old = mask & (token >= start)[:, None], mask & (token < start)[:, None]
        x_ptrs = x_ptr + (token - start)[:, None] * stride_x_t + columns
        state_ptrs = state_ptr + (token % R)[:, None] * stride_s_r + columns
        # Of a token that does not exist nothing is read: its slot may hold anything.
        z = tl.load(x_ptrs + z_columns, mask=new, other=0.0).to(tl.float32)
        z += tl.load(state_ptrs + z_columns, mask=old, other=0.0).to(tl.float32)
        z += tl.load(bias_ptr + (token % RATIO)[:, None] * stride_b_r + columns, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(exists[:, None], z, float("-inf"))
        weights = tl.exp(z - tl.max(z, axis=0)[None, :])
        u = tl.load(x_ptrs, mask=new, other=0.0).to(tl.float32)
        u += tl.load(state_ptrs, mask=old, other=0.0).to(tl.float32)
        y = tl.sum(weights * u, axis=0) / tl.sum(weights, axis=0)
        tl.store(y_ptrs, y, mask=mask_c)
    else:
        tl.store(y_ptrs, tl.zeros(offs_c.shape, tl.float32), mask=mask_c)


# The number of tokens changes with every piece: one kernel for all.
@kernel
@triton.jit(do_not_specialize=["first", "windows", "kept"])
def _compress_kernel(
    x_ptr,
    bias_ptr,
    state_ptr,
    start_ptr,
    count_ptr,
    y_ptr,
    first,
    windows,
    kept,
    R,
    stride_x_b,
    stride_x_t,
    stride_b_r,
    stride_s_b,
    stride_s_r,
    stride_start,
    stride_count,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Programs from `first` on: the windows, then the last `kept` tokens or less, which go into the ring."""
    item, b = (first + tl.program_id(0)).to(tl.int64), tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(start_ptr + b * stride_start).to(tl.int64)
    count = tl.load(count_ptr + b * stride_count).to(tl.int64)
    x_ptr += b * stride_x_b
    state_ptr += b * stride_s_b
    if item < windows:
        _average(
            x_ptr,
            bias_ptr,
            state_ptr,
            y_ptr + (b * windows + item) * C + offs_c,
            start // RATIO + item,
            start,
            start + count,
            offs_c,
            R,
            stride_x_t,
            stride_b_r,
            stride_s_r,
            RATIO,
            C,
            HALVES,
            BLOCK_P,
        )
    else:
        t = tl.maximum(count - kept, 0) + item - windows
        x_ptrs = x_ptr + t * stride_x_t + offs_c
        state_ptrs = state_ptr + (start + t) % R * stride_s_r + offs_c
        mask = offs_c < tl.where(t < count, C, 0)
        for part in tl.static_range(2 * HALVES):
            token = tl.load(x_ptrs + part * C, mask=mask, other=0.0)
            tl.store(state_ptrs + part * C, token.to(state_ptr.dtype.element_ty), mask=mask)


@compress_hca.implement("triton", "xpu", "cuda", refuses=_refuses_hca)
def compress_hca_triton(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return _compress(x, bias, state, start, count, 1)


@compress_csa.implement("triton", "xpu", "cuda", refuses=_refuses_csa)
def compress_csa_triton(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor) -> Tensor:
    return _compress(x, bias, state, start, count, 2)


def _compress(x: Tensor, bias: Tensor, state: Tensor, start: Tensor, count: Tensor, halves: int) -> Tensor:
    """One launch where no new token takes a slot that is still read, else one that reads and then one that writes.

    What is read ends halves r - 1 tokens before the first new one, at most; its slots are free for as many tokens as
    the ring has beyond these.
    """
    (B, T, _), r, R = x.shape, bias.shape[0], state.shape[1]
    C, windows, kept = bias.shape[1] // halves, closed_windows(T, r), min(T, R)
    y = torch.empty((B, windows, C), dtype=torch.float32, device=x.device)
    if B * T * C == 0:
        return y
    arch = architecture(x.device)
    block_p = next_power_of_2(halves * r)
    # So many numbers of u, and as many of z.
    numbers = 2048 if arch.name == "arc-a" else 4096
    block_c = min(next_power_of_2(C), numbers // block_p)
    items = windows + kept
    apart = halves * r + T > R + 1
    launches = [(0, windows), (windows, items)] if apart else [(0, items)]
    with on_device_of(x):
        for first, last in launches:
            _compress_kernel[(last - first, cdiv(C, block_c), B)](
                x,
                bias,
                state,
                start,
                count,
                y,
                first,
                windows,
                kept,
                R,
                *x.stride()[:2],
                bias.stride(0),
                *state.stride()[:2],
                start.stride(0),
                count.stride(0),
                RATIO=r,
                C=C,
                HALVES=halves,
                BLOCK_P=block_p,
                BLOCK_C=block_c,
                # 16 numbers a lane; 8 on Intel, which has fewer registers, and 4 on Arc A.
                num_warps=16 if arch.has_grf_modes else 8,
            )
    return y
