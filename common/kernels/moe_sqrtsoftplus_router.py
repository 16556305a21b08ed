"""Which experts a token goes to in DeepSeek-V4, by scores or by a table, and how much each counts.

    s = sqrt(softplus(logits)),   chosen = top_k(s + b) or table[token],   w_i = scale s_i / sum_chosen s

Source: DeepSeek-AI, "DeepSeek-V4", section 2.1; its inference code (model.py, class Gate). The bias for the choice
alone is that of "DeepSeek-V3" (arXiv:2412.19437), equation 16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.moe_router import LEAST_SUM, choose_experts, refuses_router
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# A program of the table's router holds the experts of some tokens.
MOST_EXPERTS_OF_A_TOKEN = 32
_TOKENS = 16
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def moe_sqrtsoftplus_router(logits: Tensor, correction_bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores and weight them by the unbiased ones, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point. Their product with the router's matrix belongs in fp32 already.
        correction_bias: [E], floating point, added for the choice alone.
        top_k: experts for a token, at most E.
        scale: what a token's weights sum to.

    Returns:
        weights: [N, top_k], fp32 (fp64 for fp64 logits), the highest biased score first.
        indices: [N, top_k], int64; of equal scores the lower index goes first, on every device. A score that is not a
            number goes before all others, so that the indices are in [0, E) and differ whatever the logits are.
    """
    scores = _scores(logits)
    choice = scores + correction_bias.to(scores.dtype)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k].contiguous()
    return _weights(scores, indices, scale), indices


@op
def moe_hash_router(logits: Tensor, table: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Look up a token's experts and weight them by their scores, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point, as for `moe_sqrtsoftplus_router`.
        table: [V, A], int64, in [0, E): the experts of each token of the vocabulary.
        ids: [N], int64, in [0, V).
        scale: what a token's weights sum to.

    Returns:
        weights: [N, A], fp32 (fp64 for fp64 logits).
        indices: [N, A], int64.
    """
    indices = table[ids]
    return _weights(_scores(logits), indices, scale), indices


def _scores(logits: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # softplus, without a threshold beyond which it is taken for the identity.
    return torch.logaddexp(wide, torch.zeros_like(wide)).sqrt()


def _weights(scores: Tensor, indices: Tensor, scale: float) -> Tensor:
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + LEAST_SUM) * scale


# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _scores_of(logits):
    """sqrt(softplus(x)), of fp32: softplus(x) = max(x, 0) + log(1 + e), e = exp(-|x|)."""
    e = tl.exp(-tl.abs(logits))
    # log(1 + e) = 2 artanh(e / (2 + e)), as a series of terms of one sign: a small e keeps all its digits, as it would
    # not in 1 + e. The first term left out is below 2^-32 of the sum.
    s = e / (2.0 + e)
    square = s * s
    series = tl.full(logits.shape, 1.0 / 17.0, tl.float32)
    for i in tl.static_range(8):
        series = series * square + 1.0 / (15.0 - 2.0 * i)
    return tl.sqrt(tl.maximum(logits, 0.0) + 2.0 * s * series)


@kernel
@triton.jit
def _moe_sqrtsoftplus_router_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    indices_ptr,
    stride_l_n,
    stride_l_e,
    stride_b,
    scale,
    E: tl.constexpr,
    A: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, BLOCK_E)
    mask_e = offs_e < E
    logits = tl.load(logits_ptr + n * stride_l_n + offs_e * stride_l_e, mask=mask_e, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + offs_e * stride_b, mask=mask_e, other=0.0).to(tl.float32)
    scores = _scores_of(logits)
    chosen, indices = choose_experts(scores, scores + bias, offs_e, mask_e, A, BLOCK_A, BLOCK_E)
    offs_a = tl.arange(0, BLOCK_A)
    weights = chosen / (tl.sum(chosen, axis=0) + LEAST_SUM) * scale
    tl.store(weights_ptr + n * A + offs_a, weights, mask=offs_a < A)
    tl.store(indices_ptr + n * A + offs_a, indices.to(tl.int64), mask=offs_a < A)


@moe_sqrtsoftplus_router.implement("triton", "xpu", "cuda", refuses=refuses_router)
def moe_sqrtsoftplus_router_triton(
    logits: Tensor, correction_bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    N, E = logits.shape
    weights = torch.empty((N, top_k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((N, top_k), dtype=torch.int64, device=logits.device)
    if N > 0:
        block_e, arch = next_power_of_2(E), architecture(logits.device)
        with on_device_of(logits):
            _moe_sqrtsoftplus_router_kernel[(N,)](
                logits,
                correction_bias,
                weights,
                indices,
                *logits.stride(),
                correction_bias.stride(0),
                scale,
                E=E,
                A=top_k,
                LEAST_SUM=LEAST_SUM,
                BLOCK_E=block_e,
                BLOCK_A=next_power_of_2(top_k),
                # Within one warp the passes over the scores need no barrier.
                num_warps=max(1, block_e // 256),
                # Several warps spill 128 registers on Intel.
                **grf_options(128 if block_e <= 256 and arch.matrix_units else 256, arch),
            )
    return weights, indices


def _refuses_hash(logits: Tensor, table: Tensor, ids: Tensor, scale: float) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if logits.dim() != 2 or table.dim() != 2 or ids.shape != logits.shape[:1]:
        shapes = f"{tuple(logits.shape)}, {tuple(table.shape)} and {tuple(ids.shape)}"
        return f"logits, table and ids have shapes {shapes}, expected (N, E), (V, A) and (N,)"
    if logits.dtype not in _FLOATS:
        return f"logits have dtype {logits.dtype}, not one of float16, bfloat16, float32"
    if table.dtype != torch.int64 or ids.dtype not in (torch.int32, torch.int64):
        return f"table and ids have dtypes {table.dtype} and {ids.dtype}, not int64 and int32 or int64"
    A = table.shape[1]
    return None if 1 <= A <= MOST_EXPERTS_OF_A_TOKEN else f"{A} experts a token, not 1 to {MOST_EXPERTS_OF_A_TOKEN}"


@kernel
@triton.jit(do_not_specialize=["N"])
def _moe_hash_router_kernel(
    logits_ptr,
    table_ptr,
    ids_ptr,
    weights_ptr,
    indices_ptr,
    N,
    stride_l_n,
    stride_l_e,
    stride_t_v,
    stride_t_a,
    stride_i,
    scale,
    A: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    offs_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_a = tl.arange(0, BLOCK_A)
    mask_n = offs_n < N
    mask = mask_n[:, None] & (offs_a < A)[None, :]
    token = tl.load(ids_ptr + offs_n * stride_i, mask=mask_n, other=0).to(tl.int64)
    table_ptrs = table_ptr + token[:, None] * stride_t_v + offs_a.to(tl.int64)[None, :] * stride_t_a
    indices = tl.load(table_ptrs, mask=mask, other=0).to(tl.int64)
    logits_ptrs = logits_ptr + offs_n[:, None] * stride_l_n + indices * stride_l_e
    scores = tl.where(mask, _scores_of(tl.load(logits_ptrs, mask=mask, other=0.0).to(tl.float32)), 0.0)
    weights = scores / (tl.sum(scores, axis=1) + LEAST_SUM)[:, None] * scale
    places = offs_n[:, None] * A + offs_a[None, :]
    tl.store(weights_ptr + places, weights, mask=mask)
    tl.store(indices_ptr + places, indices, mask=mask)


@moe_hash_router.implement("triton", "xpu", "cuda", refuses=_refuses_hash)
def moe_hash_router_triton(logits: Tensor, table: Tensor, ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    N, A = logits.shape[0], table.shape[1]
    weights = torch.empty((N, A), dtype=torch.float32, device=logits.device)
    indices = torch.empty((N, A), dtype=torch.int64, device=logits.device)
    if N > 0:
        with on_device_of(logits):
            _moe_hash_router_kernel[(cdiv(N, _TOKENS),)](
                logits,
                table,
                ids,
                weights,
                indices,
                N,
                *logits.stride(),
                *table.stride(),
                ids.stride(0),
                scale,
                A=A,
                LEAST_SUM=LEAST_SUM,
                BLOCK_N=_TOKENS,
                BLOCK_A=next_power_of_2(A),
                num_warps=max(1, _TOKENS * next_power_of_2(A) // 128),
            )
    return weights, indices
