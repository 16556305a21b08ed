"""The experts of a mixture in MXFP4: each token through those that it chose, and what they give added up.

    y = sum_a weights_a W2_e (silu(g) * u),   g | u = W1_e x,   e = indices_a

With a limit c, silu(min(g, c)) * min(max(u, -c), c). Sources: as `moe_experts`, and `mxfp4_grouped_linear` for the
layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.gated_mlp import gated_activation, gated_activation_triton
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_grouped_linear import (
    LARGEST_UNSORTED,
    check_arguments,
    multiply,
    mxfp4_grouped_linear,
)
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import row
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.triton import refuses_weight
from xpu_ports.quant.mxfp4.kernels.mxfp4_quantize import round_rows


def _fake(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    round_inputs: bool = False,
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op(fake=_fake)
def mxfp4_experts(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    round_inputs: bool = False,
) -> Tensor:
    """Send each token through its experts and add up what they give, as `moe_experts` does.

    Args:
        x: [M, D], floating point.
        gate_up_packed, gate_up_scale: [E, 2 F, D/2] and [E, 2 F, D/32], uint8, the gate's rows first.
        down_packed, down_scale: [E, D, F/2] and [E, D, F/32], uint8.
        indices: [M, A], int64, in [0, E]; a token's experts need not differ. E is an expert that another device has: it
            adds nothing here.
        weights: [M, A], floating point, what each of them counts.
        limit: the gate's upper bound and the bound of both signs of what it gates; None for no bounds.
        round_inputs: W4A4 instead of W4A16: both layers' inputs are rounded to MXFP4.

    Returns:
        [M, D] in x's dtype. Both products are rounded to it, the activation and the sum are computed in fp32 (fp64 for
        fp64); a kernel may leave out the first product's rounding. Only chosen experts' weights are read.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    _check(x, gate_up_packed, gate_up_scale, down_packed, down_scale, indices, weights)
    M, A = indices.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    h = dequantize(*quantize(x), x.dtype) if round_inputs else x
    h = mxfp4_grouped_linear.reference(h, gate_up_packed, gate_up_scale, indices)  # [M, A, 2 F]
    h = gated_activation.reference(h, None, "silu", limit).flatten(0, 1)  # [M A, F]
    h = dequantize(*quantize(h), x.dtype) if round_inputs else h
    y = mxfp4_grouped_linear.reference(h, down_packed, down_scale, indices.flatten()).view(M, A, x.shape[1])
    here = (indices < down_packed.shape[0])[..., None]
    return torch.where(here, y.to(wide) * weights[..., None].to(wide), 0.0).sum(1).to(x.dtype)


def _check(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    indices: Tensor,
    weights: Tensor,
) -> None:
    check_arguments(x, gate_up_packed, gate_up_scale, indices)
    E, width, _ = gate_up_packed.shape
    if down_packed.shape != (E, x.shape[1], width // 4) or width % 2:
        raise ValueError(
            f"down_packed {tuple(down_packed.shape)} does not belong to gate_up_packed {tuple(gate_up_packed.shape)}"
        )
    if down_scale.shape != (E, x.shape[1], width // 64):
        raise ValueError(f"down_scale {tuple(down_scale.shape)} for down_packed {tuple(down_packed.shape)}")
    if indices.dim() != 2 or weights.shape != indices.shape:
        raise ValueError(f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)}, expected [M, A] both")


def _refuses(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    round_inputs: bool = False,
) -> str | None:
    if indices.dtype != torch.int64:
        return f"indices have dtype {indices.dtype}, not torch.int64"
    if weights.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights have dtype {weights.dtype}, not one of float32, bfloat16, float16"
    refusal = refuses_weight(x, gate_up_packed, gate_up_scale)
    if refusal is not None:
        return refusal
    # What a kernel in between leaves has x's dtype, and rows as wide as down_packed's.
    return refuses_weight(x.new_empty((1, 2 * down_packed.shape[-1])), down_packed, down_scale)


@kernel
@triton.jit
def _add_up_kernel(
    y_ptr,
    indices_ptr,
    weights_ptr,
    out_ptr,
    E,
    D,
    stride_i_m,
    stride_i_a,
    stride_w_m,
    stride_w_a,
    A: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """BLOCK_D columns of a token's sum of y [M, A, D]; what expert E gives is any number and counts nothing."""
    m = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for a in tl.static_range(A):
        columns = tl.where(tl.load(indices_ptr + m * stride_i_m + a * stride_i_a) < E, D, 0)
        weight = tl.load(weights_ptr + m * stride_w_m + a * stride_w_a).to(tl.float32)
        y = tl.load(y_ptr + (m * A + a) * D + offs_d, mask=offs_d < columns, other=0.0)
        total += weight * y.to(tl.float32)
    tl.store(out_ptr + m * D + offs_d, total.to(out_ptr.dtype.element_ty), mask=offs_d < D)


@mxfp4_experts.implement("triton", "xpu", "cuda", refuses=_refuses)
def mxfp4_experts_triton(
    x: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    indices: Tensor,
    weights: Tensor,
    limit: float | None = None,
    round_inputs: bool = False,
) -> Tensor:
    _check(x, gate_up_packed, gate_up_scale, down_packed, down_scale, indices, weights)
    (M, D), A = x.shape, indices.shape[1]
    E, F = gate_up_packed.shape[0], gate_up_packed.shape[1] // 2
    if M * A * D * F == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    flat = indices.reshape(-1)
    given = round_rows(x) if round_inputs else x
    if M * A <= LARGEST_UNSORTED and architecture(x.device).name == "nvidia" and row.suits(given, gate_up_scale):
        h = torch.empty((M * A, F), dtype=x.dtype, device=x.device)
        row.launch_gated(given, gate_up_packed, gate_up_scale, h, flat, A, limit)
    else:
        gate_up = torch.empty((M * A, 2 * F), dtype=x.dtype, device=x.device)
        multiply(given, gate_up_packed, gate_up_scale, gate_up, flat)
        h = gated_activation_triton(gate_up, None, "silu", limit)
    y = torch.empty((M, A, D), dtype=x.dtype, device=x.device)
    multiply(round_rows(h) if round_inputs else h, down_packed, down_scale, y, flat)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(256 if M <= 16 else 1024, next_power_of_2(D))
    with on_device_of(x):
        _add_up_kernel[(M, cdiv(D, block))](
            y,
            indices,
            weights,
            out,
            E,
            D,
            *indices.stride(),
            *weights.stride(),
            A=A,
            BLOCK_D=block,
            num_warps=max(1, block // 256),
        )
    return out
