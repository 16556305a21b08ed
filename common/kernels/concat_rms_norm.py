"""RMS normalization of two hidden states side by side, the first with its residual added, without writing them so.

    s = x + residual,   y = norm([s | x0]) * weight

Source: Glorioso et al., "The Zamba2 Suite" (arXiv:2411.15242), section 2: a shared block reads the residual stream
beside the embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW, dims_used, refuses_rows, rms_norm, row_offset, row_tile
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def concat_rms_norm(
    x: Tensor, residual: Tensor | None, x0: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Add a residual, append another hidden state, and normalize both by their common root mean square.

    Args:
        x: [..., D], a layer's output, or the residual stream itself where there is no residual; any row strides.
        residual: [..., D], what x is added to, or None.
        x0: [..., D], the second half of what is normalized.
        weight: [2 D]; None for ones.
        eps: added to the mean square.

    Returns:
        y: [..., 2 D] in x's dtype, rounded once; with a residual (y, sum), the sum in the residual's dtype. What is
        normalized is the sum as it is stored, so that fused and unfused code agree. No backward of its own.
    """
    dtypes = (x.dtype, x0.dtype) if residual is None else (x.dtype, x0.dtype, residual.dtype)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    total = x if residual is None else (x.to(wide) + residual.to(wide)).to(residual.dtype)
    y = rms_norm.reference(torch.cat([total.to(wide), x0.to(wide)], dim=-1), weight, eps).to(x.dtype)
    return y if residual is None else (y, total)


def _refuses(x: Tensor, residual: Tensor | None, x0: Tensor, weight: Tensor | None, eps: float = 1e-6) -> str | None:
    N = 2 * x.shape[-1]
    if N > LARGEST_ROW:
        return f"rows of {N} elements, more than {LARGEST_ROW}"
    if weight is not None and (weight.shape != (N,) or not weight.is_contiguous()):
        return f"weight has shape {tuple(weight.shape)}, expected ({N},), contiguous"
    if weight is not None and weight.dtype not in _FLOATS:
        return f"weight has dtype {weight.dtype}, not one of float16, bfloat16, float32"
    return refuses_rows(x, None, x0) if residual is None else refuses_rows(x, None, x0, residual)


@kernel
@triton.jit
def _concat_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    x0_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rows,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_r_0,
    stride_r_1,
    stride_r_2,
    stride_x0_0,
    stride_x0_1,
    stride_x0_2,
    eps,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    mask = (offs_m < rows)[:, None] & mask_d[None, :]
    offs_x = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None] + offs_d[None, :]
    offs_x0 = row_offset(offs_m, n1, n2, stride_x0_0, stride_x0_1, stride_x0_2, DIMS)[:, None] + offs_d[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    x0 = tl.load(x0_ptr + offs_x0, mask=mask, other=0.0).to(tl.float32)
    # s = x + residual
    if ADD:
        offs_r = row_offset(offs_m, n1, n2, stride_r_0, stride_r_1, stride_r_2, DIMS)[:, None] + offs_d[None, :]
        residual = tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
        total = rounded(x + residual, total_ptr)
        tl.store(total_ptr + offs_m.to(tl.int64)[:, None] * D + offs_d[None, :], total, mask=mask)
        x = total.to(tl.float32)
    # y = [s | x0] * rsqrt(mean over both) * weight
    rstd = tl.rsqrt(tl.sum(x * x + x0 * x0, axis=1) / (2 * D) + eps)[:, None]
    x *= rstd
    x0 *= rstd
    if WEIGHT:
        x *= tl.load(weight_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
        x0 *= tl.load(weight_ptr + D + offs_d, mask=mask_d, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * (2 * D) + offs_d[None, :]
    tl.store(y_ptrs, x.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + D, x0.to(y_ptr.dtype.element_ty), mask=mask)


@concat_rms_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
def concat_rms_norm_triton(
    x: Tensor, residual: Tensor | None, x0: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    D = x.shape[-1]
    y = torch.empty((*x.shape[:-1], 2 * D), dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    if y.numel() > 0:
        rows = x.numel() // D
        sizes, strides = row_strides(x, x if residual is None else residual, x0)  # type: ignore[misc]
        block_m, block_d, warps = row_tile(D)
        # Two rows are held at once: without more lanes they spill on Intel GPUs.
        warps = min(32, warps * {"max": 2, "xe2": 2, "arc-a": 4}.get(architecture(x.device).name, 1))
        with on_device_of(x):
            _concat_rms_norm_kernel[(cdiv(rows, block_m),)](
                x,
                x if residual is None else residual,
                x0,
                x if weight is None else weight,
                y,
                total,
                rows,
                sizes[1],
                sizes[2],
                *strides[0],
                *strides[1],
                *strides[2],
                eps,
                D=D,
                DIMS=dims_used(sizes),
                ADD=residual is not None,
                WEIGHT=weight is not None,
                BLOCK_M=block_m,
                BLOCK_D=block_d,
                num_warps=warps,
            )
    return y if residual is None else (y, total)
