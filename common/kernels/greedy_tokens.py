"""The next token of each row by its largest logit, and whether the row has ended with it.

    token = argmax(logits) where the row goes on, else pad;   the row goes on where token is none of eos

A row's logits are split over programs, whose results are joined in a second, small launch: read by one alone, as
torch's argmax does, the logits of one row take longer than most layers.

Source: transformers' greedy decoding, `GenerationMixin._sample`, and its `EosTokenCriteria` (version 5.24).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# Logits that a program takes, and the most of a row: the second launch holds two numbers for each program of the first.
BLOCK = 1024
MOST_LOGITS = 1 << 21
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op(mutates=("tokens", "unfinished"))
def greedy_tokens(logits: Tensor, tokens: Tensor, unfinished: Tensor, eos: Tensor | None, pad: Tensor | None) -> None:
    """Choose the most likely token of each row.

    Args:
        logits: [B, V], floating point, any row stride. Of equal ones the first counts, and NaN is the largest.
        tokens: [B], int64, written; any stride, such as that of a column of all tokens.
        unfinished: [B], bool, True where a row goes on; written where there are tokens that end it.
        eos: [E], int64, the tokens that end a row; None where none does, and then all rows go on.
        pad: int64, of no dimension or one element, what stands in rows that have ended; given with `eos`.

    Returns:
        None: tokens and unfinished are the results.

    Raises:
        ValueError: eos without a pad.
    """
    chosen = logits.argmax(dim=-1)
    if eos is not None:
        if pad is None:
            raise ValueError("rows can end, and there is no pad for them")
        chosen = torch.where(unfinished, chosen, pad)
        unfinished.logical_and_((chosen[:, None] != eos).all(dim=-1))
    tokens.copy_(chosen)


def _refuses(logits: Tensor, tokens: Tensor, unfinished: Tensor, eos: Tensor | None, pad: Tensor | None) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if logits.dtype not in _FLOATS:
        return f"dtype {logits.dtype} is not one of float16, bfloat16, float32"
    if logits.dim() != 2 or not 0 < logits.shape[1] <= MOST_LOGITS:
        return f"logits are {tuple(logits.shape)}, not [B, 1 to {MOST_LOGITS}]"
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        return f"the last dimension of the logits has stride {logits.stride(1)}, not 1"
    B = logits.shape[0]
    if tokens.shape != (B,) or tokens.dtype != torch.int64:
        return f"tokens are {tuple(tokens.shape)} of {tokens.dtype}, expected ({B},) of int64"
    if unfinished.shape != (B,) or unfinished.dtype != torch.bool:
        return f"unfinished is {tuple(unfinished.shape)} of {unfinished.dtype}, expected ({B},) of bool"
    if eos is None:
        return None
    if eos.dim() != 1 or eos.dtype != torch.int64 or not eos.is_contiguous() or eos.device != logits.device:
        return f"eos is {tuple(eos.shape)} of {eos.dtype} on {eos.device}, expected int64, contiguous, with the logits"
    if pad is None or pad.numel() != 1 or pad.dtype != torch.int64 or pad.device != logits.device:
        return "pad is not one number of int64 with the logits"
    return None


@triton.jit
def _first_of_the_largest(keys, offs):
    """(the largest key, the lowest offset of those that have it)."""
    top = tl.max(keys, axis=0)
    return top, tl.min(tl.where(keys == top, offs, 0x7FFFFFFF), axis=0)


@kernel
@triton.jit
def _largest_logits_kernel(
    logits_ptr,
    parts_ptr,
    stride_b,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = offs < V
    x = tl.load(logits_ptr + b * stride_b + offs, mask=mask, other=0.0).to(tl.float32)
    # Integers in the order of the numbers: the bits, of negative ones those of the magnitude turned. Both zeros are 0.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where(x != x, 0x7FFFFFFF, keys)
    # Lower than any number's.
    keys = tl.where(mask, keys, -0x7FFFFFFF - 1)
    top, first = _first_of_the_largest(keys, offs)
    parts_ptr += (b * tl.num_programs(1) + part) * 2
    tl.store(parts_ptr, top)
    tl.store(parts_ptr + 1, first)


@kernel
@triton.jit
def _choose_tokens_kernel(
    parts_ptr,
    tokens_ptr,
    unfinished_ptr,
    eos_ptr,
    pad_ptr,
    stride_t,
    stride_u,
    PARTS: tl.constexpr,
    E: tl.constexpr,
    ENDS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_PARTS)
    parts_ptr += b * (2 * PARTS)
    mask = offs < PARTS
    keys = tl.load(parts_ptr + 2 * offs, mask=mask, other=-0x7FFFFFFF - 1)
    firsts = tl.load(parts_ptr + 2 * offs + 1, mask=mask, other=0x7FFFFFFF)
    _, token = _first_of_the_largest(keys, firsts)
    token = token.to(tl.int64)
    if ENDS:
        unfinished_ptr += b * stride_u
        goes_on = tl.load(unfinished_ptr) != 0
        token = tl.where(goes_on, token, tl.load(pad_ptr))
        offs_e = tl.arange(0, BLOCK_E)
        eos = tl.load(eos_ptr + offs_e, mask=offs_e < E, other=-1)
        ended = tl.sum(((eos == token) & (offs_e < E)).to(tl.int32), axis=0) > 0
        tl.store(unfinished_ptr, goes_on & (ended == 0))
    tl.store(tokens_ptr + b * stride_t, token)


@greedy_tokens.implement("triton", "xpu", "cuda", refuses=_refuses)
def greedy_tokens_triton(
    logits: Tensor, tokens: Tensor, unfinished: Tensor, eos: Tensor | None, pad: Tensor | None
) -> None:
    B, V = logits.shape
    if B == 0:
        return
    block = min(BLOCK, next_power_of_2(V))
    parts = torch.empty((B, cdiv(V, block), 2), dtype=torch.int32, device=logits.device)
    E = 0 if eos is None else eos.shape[0]
    with on_device_of(logits):
        _largest_logits_kernel[(B, cdiv(V, block))](
            logits, parts, logits.stride(0), V=V, BLOCK_V=block, num_warps=max(1, min(4, block // 256))
        )
        _choose_tokens_kernel[(B,)](
            parts,
            tokens,
            unfinished,
            tokens if eos is None else eos,
            tokens if pad is None else pad,
            tokens.stride(0),
            unfinished.stride(0),
            PARTS=parts.shape[1],
            E=E,
            ENDS=eos is not None,
            BLOCK_PARTS=next_power_of_2(parts.shape[1]),
            BLOCK_E=next_power_of_2(E),
            num_warps=max(1, min(8, parts.shape[1] // 128)),
        )
