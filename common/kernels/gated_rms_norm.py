"""RMS normalization with a gate, before or after it, by groups, with an optional residual.

    gate first (Mamba-2):  y = norm(s * act(z)) * weight        norm over each group of `group_size` columns
    norm first (KDA):      y = norm(s) * weight * act(z)         s = x + residual

Sources: Dao and Gu, "Transformers are SSMs" (arXiv:2405.21060), section 7.1, for gate first and groups; Kimi Team,
"Kimi Linear" (arXiv:2510.26692), section 3, for norm first with a sigmoid.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rms_norm import (
    LARGEST_ROW,
    RowTile,
    dims_used,
    few_rows,
    refuses_rows,
    row_candidates,
    row_offset,
    row_tile,
)
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

ACTIVATIONS = ("silu", "sigmoid")


@op
def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalize the last dimension by its root mean square, gated by act(z).

    Args:
        x: [..., N], floating point, any row strides.
        z: [..., N], the gate before its activation; any row strides, so a slice of a wider projection.
        weight: [N]; None for ones.
        eps: added to the mean square.
        group_size: columns that share a mean square; divides N. All of them when left out.
        norm_before_gate: True for norm(s) * act(z), False for norm(s * act(z)).
        activation: "silu" or "sigmoid".
        residual: [..., N], added to x first, in fp32.
        prenorm: also return the sum s = x + residual (x where there is no residual).
        residual_in_fp32: return that sum in fp32 instead of the residual's dtype (x's without a residual).

    Returns:
        y: [..., N] in x's dtype, rounded once; with `prenorm` (y, sum). The inputs are left alone.

    Raises:
        ValueError: group_size does not divide N, or the activation is unknown.
    """
    N = x.shape[-1]
    group_size = check_arguments(N, group_size, activation)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    gate = torch.sigmoid(z.to(wide)) if activation == "sigmoid" else torch.nn.functional.silu(z.to(wide))
    y = total if norm_before_gate else total * gate
    groups = y.unflatten(-1, (N // group_size, group_size))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        y = y * weight.to(wide)
    if norm_before_gate:
        y = y * gate
    if not prenorm:
        return y.to(x.dtype)
    return y.to(x.dtype), total.to(total_dtype(x, residual, residual_in_fp32), copy=True)


def total_dtype(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    """The dtype of the sum that `prenorm` returns."""
    dtype = x.dtype if residual is None else residual.dtype
    return torch.promote_types(dtype, torch.float32) if residual_in_fp32 else dtype


def check_arguments(N: int, group_size: int | None, activation: str) -> int:
    """The group size to use.

    Raises:
        ValueError: it does not divide N, or the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if group_size is None:
        return N
    if group_size <= 0 or N % group_size:
        raise ValueError(f"group_size is {group_size}, which does not divide the {N} columns")
    return group_size


def _refuses(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> str | None:
    if (group_size or x.shape[-1]) > LARGEST_ROW:
        return f"groups of {group_size or x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, weight, z) if residual is None else refuses_rows(x, weight, z, residual)


@kernel
@triton.jit
def _gated_rms_norm_kernel(
    x_ptr,
    z_ptr,
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
    stride_z_0,
    stride_z_1,
    stride_z_2,
    stride_r_0,
    stride_r_1,
    stride_r_2,
    eps,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    DIMS: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
    WEIGHT: tl.constexpr,
    ADD: tl.constexpr,
    STORE_TOTAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tl.arange(0, BLOCK_N)
    offs_n = tl.program_id(1) * GROUP + offs_g
    mask = (offs_m < rows)[:, None] & (offs_g < GROUP)[None, :]
    offs_x = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None] + offs_n[None, :]
    offs_z = row_offset(offs_m, n1, n2, stride_z_0, stride_z_1, stride_z_2, DIMS)[:, None] + offs_n[None, :]
    offs_y = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs_z, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        offs_r = row_offset(offs_m, n1, n2, stride_r_0, stride_r_1, stride_r_2, DIMS)[:, None] + offs_n[None, :]
        x += tl.load(residual_ptr + offs_r, mask=mask, other=0.0).to(tl.float32)
    if STORE_TOTAL:
        tl.store(total_ptr + offs_y, x.to(total_ptr.dtype.element_ty), mask=mask)
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate *= z
    if not NORM_FIRST:
        x *= gate
    # y = s * rsqrt(mean(s^2) + eps) * weight, over one group
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / GROUP + eps)[:, None]
    if WEIGHT:
        y *= tl.load(weight_ptr + offs_n, mask=offs_g < GROUP, other=0.0).to(tl.float32)[None, :]
    if NORM_FIRST:
        y *= gate
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


def _candidates(arch: Architecture, N: int, few: bool) -> Iterator[RowTile]:
    return row_candidates(arch, N, inputs=2)


@tunable("gated_rms_norm", _candidates)
def tile(arch: Architecture, N: int, few: bool) -> RowTile:
    """The tile for groups of N columns. A table may tell few rows from many."""
    return row_tile(N, inputs=2)


@gated_rms_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
def gated_rms_norm_triton(
    x: Tensor,
    z: Tensor,
    weight: Tensor | None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    N = x.shape[-1]
    group_size = check_arguments(N, group_size, activation)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = y
    if prenorm:
        total = torch.empty(x.shape, dtype=total_dtype(x, residual, residual_in_fp32), device=x.device)
    if y.numel() > 0:
        rows = y.numel() // N
        sizes, strides = row_strides(x, z, *(() if residual is None else (residual,)))  # type: ignore[misc]
        arch = architecture(x.device)
        block_m, block_n, warps = tile(arch, group_size, few_rows(arch, rows))
        with on_device_of(x):
            _gated_rms_norm_kernel[(cdiv(rows, block_m), N // group_size)](
                x,
                z,
                x if residual is None else residual,
                x if weight is None else weight,
                y,
                total,
                rows,
                sizes[1],
                sizes[2],
                *strides[0],
                *strides[1],
                *strides[-1],
                eps,
                N=N,
                GROUP=group_size,
                DIMS=dims_used(sizes),
                NORM_FIRST=norm_before_gate,
                SIGMOID=activation == "sigmoid",
                WEIGHT=weight is not None,
                ADD=residual is not None,
                STORE_TOTAL=prenorm,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=warps,
            )
    return (y, total) if prenorm else y


@op
def gated_square_sum(x: Tensor, z: Tensor) -> Tensor:
    """What a norm behind the gate sums up: the squares of x * silu(z).

    For a group whose columns several devices have, each of which adds its own.

    Args:
        x: [..., N], floating point, any row strides.
        z: [..., N], the gate before its activation; any row strides.

    Returns:
        [...] in fp32, or x's dtype where that is wider.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * torch.nn.functional.silu(z.to(wide))).square().sum(-1)


def _refuses_square_sum(x: Tensor, z: Tensor) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, None, z)


@kernel
@triton.jit
def _gated_square_sum_kernel(
    x_ptr,
    z_ptr,
    y_ptr,
    rows,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_z_0,
    stride_z_1,
    stride_z_2,
    N: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    offs_x = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None] + offs_n[None, :]
    offs_z = row_offset(offs_m, n1, n2, stride_z_0, stride_z_1, stride_z_2, DIMS)[:, None] + offs_n[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs_z, mask=mask, other=0.0).to(tl.float32)
    # sum((x * silu(z))^2)
    x *= z * tl.sigmoid(z)
    tl.store(y_ptr + offs_m, tl.sum(x * x, axis=1), mask=offs_m < rows)


@gated_square_sum.implement("triton", "xpu", "cuda", refuses=_refuses_square_sum)
def gated_square_sum_triton(x: Tensor, z: Tensor) -> Tensor:
    N = x.shape[-1]
    y = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if y.numel() > 0:
        sizes, strides = row_strides(x, z)  # type: ignore[misc]
        arch = architecture(x.device)
        block_m, block_n, warps = tile(arch, N, few_rows(arch, y.numel()))
        with on_device_of(x):
            _gated_square_sum_kernel[(cdiv(y.numel(), block_m),)](
                x,
                z,
                y,
                y.numel(),
                sizes[1],
                sizes[2],
                *strides[0],
                *strides[1],
                N=N,
                DIMS=dims_used(sizes),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=warps,
            )
    return y


@op
def gated_norm_by_sum(x: Tensor, z: Tensor, weight: Tensor, square_sum: Tensor, columns: int, eps: float) -> Tensor:
    """`gated_rms_norm` with the gate first, of some columns of a group whose squares are summed up already.

    Args:
        x: [..., N], floating point, any row strides.
        z: [..., N], the gate before its activation; any row strides.
        weight: [N].
        square_sum: [...], what `gated_square_sum` gives, added up over all that have columns of the group.
        columns: of the whole group.
        eps: added to the mean square.

    Returns:
        [..., N] in x's dtype, rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * torch.nn.functional.silu(z.to(wide))
    factor = torch.rsqrt(square_sum.to(wide) / columns + eps)
    return (y * factor[..., None] * weight.to(wide)).to(x.dtype)


def _refuses_by_sum(x: Tensor, z: Tensor, weight: Tensor, square_sum: Tensor, columns: int, eps: float) -> str | None:
    if not square_sum.is_contiguous() or square_sum.shape != x.shape[:-1]:
        return f"square_sum has shape {tuple(square_sum.shape)}, expected {tuple(x.shape[:-1])}, contiguous"
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_rows(x, weight, z)


@kernel
@triton.jit
def _gated_norm_by_sum_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    rows,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_z_0,
    stride_z_1,
    stride_z_2,
    columns,
    eps,
    N: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None] & (offs_n < N)[None, :]
    offs_x = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None] + offs_n[None, :]
    offs_z = row_offset(offs_m, n1, n2, stride_z_0, stride_z_1, stride_z_2, DIMS)[:, None] + offs_n[None, :]
    x = tl.load(x_ptr + offs_x, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs_z, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
    total = tl.load(sum_ptr + offs_m, mask=offs_m < rows, other=0.0).to(tl.float32)
    # y = x * silu(z) * rsqrt(sum / columns + eps) * weight
    y = x * (z * tl.sigmoid(z)) * tl.rsqrt(total / columns + eps)[:, None] * w[None, :]
    tl.store(y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@gated_norm_by_sum.implement("triton", "xpu", "cuda", refuses=_refuses_by_sum)
def gated_norm_by_sum_triton(
    x: Tensor, z: Tensor, weight: Tensor, square_sum: Tensor, columns: int, eps: float
) -> Tensor:
    N = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        sizes, strides = row_strides(x, z)  # type: ignore[misc]
        arch, rows = architecture(x.device), y.numel() // N
        block_m, block_n, warps = tile(arch, N, few_rows(arch, rows))
        with on_device_of(x):
            _gated_norm_by_sum_kernel[(cdiv(rows, block_m),)](
                x,
                z,
                weight,
                square_sum,
                y,
                rows,
                sizes[1],
                sizes[2],
                *strides[0],
                *strides[1],
                columns,
                eps,
                N=N,
                DIMS=dims_used(sizes),
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                num_warps=warps,
            )
    return y
