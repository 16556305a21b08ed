"""Root mean square layer normalization, alone and after a residual addition, with its backward.

    y = x / sqrt(mean(x^2) + eps) * weight

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467), equation 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

LARGEST_ROW = 16384
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Normalize the last dimension by its root mean square.

    Args:
        x: [..., N], floating point, any row strides.
        weight: [N], floating point; None for ones.
        eps: added to the mean square.

    Returns:
        [..., N] in x's dtype, rounded once: everything before is fp32 (fp64 for fp64).
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y.to(x.dtype)


@op
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add a residual and normalize the sum: the step between two layers of a pre-norm network.

    Args:
        x: [..., N], a layer's output.
        residual: [..., N], what it is added to.
        weight: [N]; None for ones.
        eps: added to the mean square.

    Returns:
        (y, sum): the normalized sum in x's dtype, and the sum in the residual's dtype. What is normalized is the sum
        as it is stored, so that fused and unfused code agree.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    total = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    y = rms_norm.reference(total.to(wide), weight, eps)
    return y.to(x.dtype), total


@op
def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` with respect to x and weight, the root mean square computed again.

    Args:
        dy: [..., N], the gradient of the output.
        x: [..., N], the input of the forward.
        weight: [N] or None.
        eps: the forward's.

    Returns:
        (dx, dweight): dx like x; dweight [N] in fp32 (fp64 for fp64), summed over all rows.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    dy, x_wide = dy.to(wide), x.to(wide)
    rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    x_hat = x_wide * rstd
    dweight = (dy * x_hat).flatten(0, -2).sum(0) if x.dim() > 1 else dy * x_hat
    dx_hat = dy if weight is None else dy * weight.to(wide)
    dx = rstd * (dx_hat - x_hat * (dx_hat * x_hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), dweight


@rms_norm.differentiate(setup_context=lambda ctx, inputs, output: _save_for_backward(ctx, inputs))
def _rms_norm_grad(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, *weight = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, x, weight[0] if weight else None, ctx.eps)
    return dx, dweight.to(weight[0].dtype) if weight else None, None


@add_rms_norm.differentiate(setup_context=lambda ctx, inputs, output: _save_sum_for_backward(ctx, inputs, output))
def _add_rms_norm_grad(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    total, *weight = ctx.saved_tensors
    dx, dweight = rms_norm_backward(dy, total, weight[0] if weight else None, ctx.eps)
    dx = dx + dtotal
    return dx.to(ctx.x_dtype), dx, dweight.to(weight[0].dtype) if weight else None, None


def _save_for_backward(ctx: Any, inputs: tuple) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(*(t for t in (x, weight) if t is not None))


def _save_sum_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    x, _, weight, ctx.eps = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(*(t for t in (output[1], weight) if t is not None))


def refuses_rows(x: Tensor, weight: Tensor | None, *others: Tensor) -> str | None:
    """Why a row kernel cannot take x and tensors of its shape, or None. Shared by the norms."""
    if not AVAILABLE:
        return WHY_NOT
    N = x.shape[-1]
    for t in (x, *others):
        if t.dtype not in _FLOATS:
            return f"dtype {t.dtype} is not one of float16, bfloat16, float32"
        if t.shape != x.shape:
            return f"shapes {tuple(x.shape)} and {tuple(t.shape)} differ"
        if t.stride(-1) != 1 and N > 1:
            return f"the last dimension has stride {t.stride(-1)}, not 1"
    if weight is not None and (weight.shape != (N,) or not weight.is_contiguous()):
        return f"weight has shape {tuple(weight.shape)}, expected ({N},), contiguous"
    if weight is not None and weight.dtype not in _FLOATS:
        return f"weight has dtype {weight.dtype}, not one of float16, bfloat16, float32"
    if row_strides(x, *others) is None:
        return "the rows need more than three strides"
    return None


def _refuses(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, weight)


def _refuses_add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, weight, residual)


def _refuses_backward(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, weight, dy)


@triton.jit
def row_offset(row, n1, n2, stride_0, stride_1, stride_2, DIMS: tl.constexpr):
    """Where a row starts, in elements: rows are numbered through three strided dimensions of sizes (., n1, n2)."""
    row = row.to(tl.int64)
    if DIMS == 1:
        return row * stride_2
    if DIMS == 2:
        return (row // n2) * stride_1 + (row % n2) * stride_2
    return (row // n2 // n1) * stride_0 + (row // n2 % n1) * stride_1 + (row % n2) * stride_2


@kernel
@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
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
    eps,
    N: tl.constexpr,
    DIMS: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    offs_x = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None] + offs_n[None, :]
    offs_y = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        offs_r = row_offset(offs_m, n1, n2, stride_r_0, stride_r_1, stride_r_2, DIMS)[:, None] + offs_n[None, :]
        residual = tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
        total = rounded(x + residual, total_ptr)
        tl.store(total_ptr + offs_y, total, mask=mask)
        x = total.to(tl.float32)
    # y = x * rsqrt(mean(x^2) + eps) * weight
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)[:, None]
    if WEIGHT:
        y = y * tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    n1,
    n2,
    stride_dy_0,
    stride_dy_1,
    stride_dy_2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    eps,
    rows_per_program,
    N: tl.constexpr,
    DIMS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask = offs_n < N
    if WEIGHT:
        weight = tl.load(weight_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_N,), dtype=tl.float32)
    start = pid.to(tl.int64) * rows_per_program
    for i in range(tl.minimum(rows_per_program, rows - start)):
        row = start + i
        offs_dy = row_offset(row, n1, n2, stride_dy_0, stride_dy_1, stride_dy_2, DIMS) + offs_n
        offs_x = row_offset(row, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS) + offs_n
        dy = tl.load(dy_ptr + offs_dy, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + eps)
        x_hat = x * rstd
        dweight += dy * x_hat
        if WEIGHT:
            dy = dy * weight
        # dx = rstd * (dx_hat - x_hat * mean(dx_hat * x_hat))
        dx = rstd * (dy - x_hat * (tl.sum(dy * x_hat, axis=0) / N))
        tl.store(dx_ptr + row * N + offs_n, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + pid.to(tl.int64) * N + offs_n, dweight, mask=mask)


class RowTile(NamedTuple):
    """Rows and columns of a program of a row kernel, and its warps."""

    block_m: int
    block_n: int
    warps: int


def row_tile(N: int, inputs: int = 1) -> RowTile:
    """The tile of a row kernel: short rows are taken several at a time.

    16 elements a lane for one input, so that loads are 16 bytes wide and two are in flight; 8 of each for two inputs.
    """
    block_n = next_power_of_2(N)
    block_m = max(1, min(16, 2048 // inputs // block_n))
    return RowTile(block_m, block_n, max(1, min(16, inputs * block_m * block_n // 512)))


def row_candidates(arch: Architecture, N: int, inputs: int) -> Iterator[RowTile]:
    """2 to 32 elements a lane and input on NVIDIA, to what the rule takes on Intel: beyond, they spill."""
    block_n = next_power_of_2(N)
    most = 32 if arch.name == "nvidia" else 16 // inputs
    for block_m in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8, 16, 32):
            a_lane = block_m * block_n // (32 * warps)
            if 2 <= a_lane <= most and block_m * block_n <= max(8192, block_n):
                yield RowTile(block_m, block_n, warps)


def few_rows(arch: Architecture, rows: int) -> bool:
    """Whether there are fewer rows than programs that hide the latency of memory: four a unit."""
    return rows < 4 * arch.units


def _candidates(arch: Architecture, N: int, add: bool, few: bool) -> Iterator[RowTile]:
    return row_candidates(arch, N, 2 if add else 1)


@tunable("rms_norm", _candidates)
def tile(arch: Architecture, N: int, add: bool, few: bool) -> RowTile:
    """The tile of `rms_norm` and, with `add`, of `add_rms_norm`. A table may tell few rows from many."""
    return row_tile(N)


@rms_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
def rms_norm_triton(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, x, weight, y, y, eps, add=False)
    return y


@add_rms_norm.implement("triton", "xpu", "cuda", refuses=_refuses_add)
def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    _launch_forward(x, residual, weight, y, total, eps, add=True)
    return y, total


def _launch_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, y: Tensor, total: Tensor, eps: float, add: bool
) -> None:
    N = x.shape[-1]
    if y.numel() == 0:
        return
    rows = y.numel() // N
    sizes, (stride_x, stride_r) = row_strides(x, residual)  # type: ignore[misc]
    arch = architecture(x.device)
    block_m, block_n, warps = tile(arch, N, add, few_rows(arch, rows))
    with on_device_of(x):
        _rms_norm_kernel[(cdiv(rows, block_m),)](
            x,
            residual,
            x if weight is None else weight,
            y,
            total,
            rows,
            sizes[1],
            sizes[2],
            *stride_x,
            *stride_r,
            eps,
            N=N,
            DIMS=dims_used(sizes),
            ADD=add,
            WEIGHT=weight is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=warps,
        )


@rms_norm_backward.implement("triton", "xpu", "cuda", refuses=_refuses_backward)
def rms_norm_backward_triton(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    N = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros(N, dtype=torch.float32, device=x.device)
    rows = dx.numel() // N
    # A few programs a unit, each over a run of rows, so that the weight's gradient is a short second sum.
    rows_per_program = cdiv(rows, 4 * architecture(x.device).units)
    programs = cdiv(rows, rows_per_program)
    partial = torch.empty((programs, N), dtype=torch.float32, device=x.device)
    sizes, (stride_dy, stride_x) = row_strides(dy, x)  # type: ignore[misc]
    block_n = next_power_of_2(N)
    with on_device_of(x):
        _rms_norm_backward_kernel[(programs,)](
            dy,
            x,
            x if weight is None else weight,
            dx,
            partial,
            rows,
            sizes[1],
            sizes[2],
            *stride_dy,
            *stride_x,
            eps,
            rows_per_program,
            N=N,
            DIMS=dims_used(sizes),
            WEIGHT=weight is not None,
            BLOCK_N=block_n,
            # Half as many elements a lane on Intel, where 16 of each of dy, x and their products spill.
            num_warps=max(1, min(32, block_n // (256 if architecture(x.device).has_grf_modes else 512))),
        )
    return dx, partial.sum(0)


def dims_used(sizes: list[int]) -> int:
    """How many of the three row dimensions are larger than 1, at least one: what a kernel has to decode."""
    if sizes[0] > 1:
        return 3
    return 2 if sizes[1] > 1 else 1
