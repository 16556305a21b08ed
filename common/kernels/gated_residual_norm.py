"""A layer's gated output added to the residual stream, and the norm of the sum that the next layer begins with.

    s = x + gate * y
    n = (s - mean(s)) / sqrt(var(s) + eps) * (1 + scale) + shift

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers" (arXiv:2212.09748), section 3.2, adaLN-Zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.ada_layer_norm import (
    ada_layer_norm,
    condition_strides,
    load_rows,
    modulated,
    refuses_conditioned,
    tile,
)
from xpu_ports.common.kernels.gated_residual import gated_residual, gated_sum
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton


@op
def gated_residual_norm(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """`gated_residual`, and `ada_layer_norm` of what it returns.

    Args:
        x: [B, T, D], the residual stream, any strides.
        y: [B, T, D], a layer's output, any strides.
        gate: [B or 1, T or 1, D], such as a slice of a projection; any strides.
        scale: [B or 1, T or 1, D], of the norm.
        shift: [B or 1, T or 1, D].
        eps: added to the variance.
        limit: the sum is clipped to [-limit, limit] before it is rounded, NaN stays; None for no clip.

    Returns:
        (sum, norm), each [B, T, D] in x's dtype, contiguous. What is normalized is the sum as it is stored, so that
        fused and unfused code agree. No backward of its own.
    """
    total = gated_residual.reference(x, y, gate, limit)
    return total, ada_layer_norm.reference(total, scale, shift, eps)


def _refuses(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, limit: float | None = None
) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_conditioned(x, (y,), (gate, scale, shift))


@kernel
@triton.jit
def _gated_residual_norm_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    total_ptr,
    norm_ptr,
    rows,
    T,
    limit,
    stride_x_b,
    stride_x_t,
    stride_y_b,
    stride_y_t,
    stride_gate_b,
    stride_gate_t,
    stride_scale_b,
    stride_scale_t,
    stride_shift_b,
    stride_shift_t,
    eps,
    D: tl.constexpr,
    CLIP: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < D)[None, :]
    mask = mask_d if BLOCK_M == 1 else (row < rows)[:, None] & mask_d
    offs = row.to(tl.int64)[:, None] * D + offs_d[None, :]
    x = load_rows(x_ptr, row, mask, T, stride_x_b, stride_x_t, SINGLE, BLOCK_D)
    y = load_rows(y_ptr, row, mask, T, stride_y_b, stride_y_t, SINGLE, BLOCK_D)
    gate = load_rows(gate_ptr, row, mask, T, stride_gate_b, stride_gate_t, SINGLE, BLOCK_D)
    scale = load_rows(scale_ptr, row, mask, T, stride_scale_b, stride_scale_t, SINGLE, BLOCK_D)
    shift = load_rows(shift_ptr, row, mask, T, stride_shift_b, stride_shift_t, SINGLE, BLOCK_D)
    # s = x + gate * y
    total = rounded(gated_sum(x, y, gate, limit, CLIP), total_ptr)
    tl.store(total_ptr + offs, total, mask=mask)
    norm = modulated(total.to(tl.float32), scale, shift, mask_d, eps, D)
    tl.store(norm_ptr + offs, norm.to(norm_ptr.dtype.element_ty), mask=mask)


@gated_residual_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
def gated_residual_norm_triton(
    x: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    B, T, D = x.shape
    total, norm = (torch.empty((B, T, D), dtype=x.dtype, device=x.device) for _ in range(2))
    if total.numel() == 0:
        return total, norm
    # The norm's own tile: sums in another order would differ from it in their last bits.
    block_m, block_d, warps = tile(architecture(x.device), D)
    with on_device_of(x):
        _gated_residual_norm_kernel[(cdiv(B * T, block_m),)](
            x,
            y,
            gate,
            scale,
            shift,
            total,
            norm,
            B * T,
            T,
            0.0 if limit is None else limit,
            *x.stride()[:2],
            *y.stride()[:2],
            *condition_strides(gate),
            *condition_strides(scale),
            *condition_strides(shift),
            eps,
            D=D,
            CLIP=limit is not None,
            SINGLE=B == 1,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return total, norm
