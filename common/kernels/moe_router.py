"""Which experts a token goes to, and how much each counts: sigmoid scores with a bias for the choice alone.

    logits = x W^T,   s = sigmoid(logits),   chosen = top_k(s + b),   w_i = scale s_i / sum_chosen s

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), equations 13 to 16; Kimi Team, "Kimi Linear"
(arXiv:2510.26692), section 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.moe_experts.triton import dot_rows, tile, vector
from xpu_ports.common.kernels.skinny_linear.triton import LARGEST_M
from xpu_ports.common.kernels.skinny_linear.triton import launch as launch_skinny
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, kernel, next_power_of_2, on_device_of, tl, triton

# Added to the sum of the chosen scores, so that scores of 0 alone give weights of 0.
LEAST_SUM = 1e-20
# A program holds all scores of a token.
MOST_EXPERTS = 1024
# The choice is a loop with a pass over the scores for each expert chosen.
MOST_CHOSEN = 32
# From here on a matrix product of the vendor's library is faster.
LARGEST_N = 32
# Rows of a weight from which on each is read once for some tokens, on NVIDIA; fewer come from the cache as fast.
MANY_ROWS = 512
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def moe_router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Scores of all experts before their activation, in fp32: small differences decide who is chosen.

    Args:
        x: [N, D], floating point.
        weight: [E, D], floating point; fp32 in models.

    Returns:
        [N, E], fp32 (fp64 for fp64), of products and sums in fp32.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


def _refuses_logits(x: Tensor, weight: Tensor) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    for name, t in (("x", x), ("weight", weight)):
        if t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
        if t.dim() != 2 or t.shape[1] != x.shape[-1]:
            return f"x and weight have shapes {tuple(x.shape)} and {tuple(weight.shape)}, expected (N, D) and (E, D)"
        if t.stride(1) != 1 and t.shape[1] > 1:
            return f"the last dimension of {name} has stride {t.stride(1)}, not 1"
    return f"{x.shape[0]} tokens, more than {LARGEST_N}" if x.shape[0] > LARGEST_N else None


@kernel
@triton.jit
def _moe_router_logits_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    N,
    stride_x_n,
    stride_w_e,
    E: tl.constexpr,
    D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """BLOCK_E experts for one token; programs of the same experts run side by side."""
    pid = tl.program_id(0)
    n = (pid % N).to(tl.int64)
    offs_e = pid // N * BLOCK_E + tl.arange(0, BLOCK_E)
    w_ptrs = w_ptr + offs_e.to(tl.int64) * stride_w_e
    acc = dot_rows(x_ptr + n * stride_x_n, w_ptrs, offs_e < E, D, D, BLOCK_K, VECTOR)
    tl.store(y_ptr + n * E + offs_e, tl.sum(tl.sum(acc, axis=2), axis=0), mask=offs_e < E)


@moe_router_logits.implement("triton", "xpu", "cuda", refuses=_refuses_logits)
def moe_router_logits_triton(x: Tensor, weight: Tensor) -> Tensor:
    (N, D), E = x.shape, weight.shape[0]
    y = torch.empty((N, E), dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y
    if D == 0:
        return y.zero_()
    arch = architecture(x.device)
    if arch.name == "nvidia" and E >= MANY_ROWS and 1 < N <= LARGEST_M and x.dtype == weight.dtype:
        launch_skinny(x, [weight], [y])
        return y
    cut = tile(arch, D, weight.element_size())
    # There are few rows of weights: one for each program.
    with on_device_of(x):
        _moe_router_logits_kernel[(N * E,)](
            x,
            weight,
            y,
            N,
            x.stride(0),
            weight.stride(0),
            E=E,
            D=D,
            BLOCK_E=1,
            BLOCK_K=cut.block_k,
            VECTOR=vector(cut, weight, arch),
            num_warps=cut.warps,
            **grf_options(cut.registers, arch),
        )
    return y


@op
def moe_sigmoid_router(logits: Tensor, correction_bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts by biased scores and weight them by the unbiased ones, which are made to sum to `scale`.

    Args:
        logits: [N, E], floating point. Their product with the router's matrix belongs in fp32 already.
        correction_bias: [E], floating point, added for the choice alone: it balances the load of the experts.
        top_k: experts for a token, at most E.
        scale: what a token's weights sum to.

    Returns:
        weights: [N, top_k], fp32 (fp64 for fp64 logits), the highest biased score first.
        indices: [N, top_k], int64; of equal scores the lower index goes first, on every device. A score that is not a
            number goes before all others, so that the indices are in [0, E) and differ whatever the logits are.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = logits.to(wide).sigmoid()
    choice = scores + correction_bias.to(wide)
    indices = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k].contiguous()
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + LEAST_SUM) * scale, indices


def refuses_router(logits: Tensor, correction_bias: Tensor, top_k: int, scale: float) -> str | None:
    """Why `choose_experts` cannot take these scores, or None."""
    if not AVAILABLE:
        return WHY_NOT
    if logits.dim() != 2 or correction_bias.shape != logits.shape[1:]:
        shapes = f"{tuple(logits.shape)} and {tuple(correction_bias.shape)}"
        return f"logits and bias have shapes {shapes}, expected (N, E) and (E,)"
    for name, t in (("logits", logits), ("bias", correction_bias)):
        if t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    E = logits.shape[1]
    if E > MOST_EXPERTS:
        return f"{E} experts, more than {MOST_EXPERTS}"
    if not 0 < top_k <= min(E, MOST_CHOSEN):
        return f"{top_k} of {E} experts, not 1 to {min(E, MOST_CHOSEN)}"
    return None


@triton.jit
def choose_experts(scores, choice, offs_e, mask_e, A: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr):
    """The scores and indices, [BLOCK_A] each, of the A experts with the largest `choice`, the largest first.

    Whatever the scores are made of: `scores`, `choice` and `mask_e` are [BLOCK_E], offs_e is 0, 1, ... of them.
    """
    offs_a = tl.arange(0, BLOCK_A)
    chosen = tl.zeros((BLOCK_A,), dtype=tl.float32)
    indices = tl.zeros((BLOCK_A,), dtype=tl.int32)
    # Comparisons with NaN fail: none would be the largest.
    choice = tl.where(choice != choice, float("inf"), choice)
    free = mask_e
    for a in range(A):
        largest = tl.max(tl.where(free, choice, float("-inf")), axis=0)
        e = tl.min(tl.where(free & (choice == largest), offs_e, BLOCK_E), axis=0)
        score = tl.sum(tl.where(offs_e == e, scores, 0.0), axis=0)
        chosen = tl.where(offs_a == a, score, chosen)
        indices = tl.where(offs_a == a, e, indices)
        free = free & (offs_e != e)
    return chosen, indices


@kernel
@triton.jit
def _moe_sigmoid_router_kernel(
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
    scores = tl.sigmoid(logits)
    chosen, indices = choose_experts(scores, scores + bias, offs_e, mask_e, A, BLOCK_A, BLOCK_E)
    offs_a = tl.arange(0, BLOCK_A)
    weights = chosen / (tl.sum(chosen, axis=0) + LEAST_SUM) * scale
    tl.store(weights_ptr + n * A + offs_a, weights, mask=offs_a < A)
    tl.store(indices_ptr + n * A + offs_a, indices.to(tl.int64), mask=offs_a < A)


@moe_sigmoid_router.implement("triton", "xpu", "cuda", refuses=refuses_router)
def moe_sigmoid_router_triton(
    logits: Tensor, correction_bias: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    N, E = logits.shape
    weights = torch.empty((N, top_k), dtype=torch.float32, device=logits.device)
    indices = torch.empty((N, top_k), dtype=torch.int64, device=logits.device)
    if N > 0:
        block_e = next_power_of_2(E)
        with on_device_of(logits):
            _moe_sigmoid_router_kernel[(N,)](
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
            )
    return weights, indices
