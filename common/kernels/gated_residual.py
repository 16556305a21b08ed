"""A layer's output added to the residual stream through a gate that comes from a condition.

    s = x + gate * y

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers" (arXiv:2212.09748), section 3.2, adaLN-Zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.ada_layer_norm import condition_strides, refuses_conditioned
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton


@op
def gated_residual(x: Tensor, y: Tensor, gate: Tensor, limit: float | None = None) -> Tensor:
    """x + gate * y, kept within a range.

    Args:
        x: [B, T, D], the residual stream, any strides.
        y: [B, T, D], a layer's output, any strides.
        gate: [B or 1, T or 1, D], such as a slice of a projection; any strides.
        limit: the sum is clipped to [-limit, limit] before it is rounded, NaN stays; None for no clip. FLUX.2 has the
            largest fp16 number here where it runs in fp16.

    Returns:
        [B, T, D] in x's dtype, contiguous, rounded once. No backward of its own.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) + gate.to(wide) * y.to(wide)
    if limit is not None:
        total = total.clip(-limit, limit)
    return total.to(x.dtype).contiguous()


def _refuses(x: Tensor, y: Tensor, gate: Tensor, limit: float | None = None) -> str | None:
    return refuses_conditioned(x, (y,), (gate,))


@triton.jit
def gated_sum(x, y, gate, limit, CLIP: tl.constexpr):
    """x + gate * y in fp32, clipped where asked for."""
    total = x.to(tl.float32) + gate.to(tl.float32) * y.to(tl.float32)
    if CLIP:
        # Comparisons let NaN through.
        total = tl.where(total > limit, limit, total)
        total = tl.where(total < -limit, -limit, total)
    return total


@kernel
@triton.jit
def _gated_residual_kernel(
    x_ptr,
    y_ptr,
    gate_ptr,
    out_ptr,
    T,
    limit,
    stride_x_b,
    stride_x_t,
    stride_y_b,
    stride_y_t,
    stride_gate_b,
    stride_gate_t,
    D: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tiles: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    row = (pid // tiles).to(tl.int64)
    b, t = row // T, row % T
    offs_d = pid % tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = offs_d < D
    x = tl.load(x_ptr + b * stride_x_b + t * stride_x_t + offs_d, mask=mask, other=0.0)
    y = tl.load(y_ptr + b * stride_y_b + t * stride_y_t + offs_d, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + b * stride_gate_b + t * stride_gate_t + offs_d, mask=mask, other=0.0)
    # s = x + gate * y
    total = gated_sum(x, y, gate, limit, CLIP)
    tl.store(out_ptr + row * D + offs_d, total.to(out_ptr.dtype.element_ty), mask=mask)


@gated_residual.implement("triton", "xpu", "cuda", refuses=_refuses)
def gated_residual_triton(x: Tensor, y: Tensor, gate: Tensor, limit: float | None = None) -> Tensor:
    B, T, D = x.shape
    out = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    # 8 elements a lane of each of the three; half of it where registers are few.
    block_d = min(1024, next_power_of_2(D))
    warps = max(1, block_d // (128 if architecture(x.device).name == "arc-a" else 256))
    with on_device_of(x):
        _gated_residual_kernel[(B * T * cdiv(D, block_d),)](
            x,
            y,
            gate,
            out,
            T,
            0.0 if limit is None else limit,
            *x.stride()[:2],
            *y.stride()[:2],
            *condition_strides(gate),
            D=D,
            CLIP=limit is not None,
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return out
