"""Layer normalization whose scale and shift come from a condition, such as the time of a diffusion step.

    y = (x - mean(x)) / sqrt(var(x) + eps) * (1 + scale) + shift

Source: Peebles and Xie, "Scalable Diffusion Models with Transformers" (arXiv:2212.09748), section 3.2, adaLN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW, RowTile, row_candidates
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def ada_layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalize the last dimension to mean 0 and variance 1, then scale it by 1 + scale and shift it.

    Args:
        x: [B, T, D], any strides.
        scale: [B or 1, T or 1, D], such as a slice of a projection; any strides.
        shift: [B or 1, T or 1, D].
        eps: added to the variance.

    Returns:
        [B, T, D] in x's dtype, contiguous, rounded once: everything before is fp32 (fp64 for fp64). No backward of its
        own.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    centred = x_wide - x_wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (y * (1.0 + scale.to(wide)) + shift.to(wide)).to(x.dtype).contiguous()


def refuses_conditioned(x: Tensor, others: tuple[Tensor, ...], conditions: tuple[Tensor, ...]) -> str | None:
    """Why a row kernel cannot take tensors [B, T, D] and what is [B or 1, T or 1, D] beside them, or None."""
    if not AVAILABLE:
        return WHY_NOT
    if x.dim() != 3:
        return f"x has {x.dim()} dimensions, not 3"
    for t in (x, *others, *conditions):
        if t.dtype not in _FLOATS:
            return f"dtype {t.dtype} is not one of float16, bfloat16, float32"
        if t.dim() != 3 or t.shape[2] != x.shape[2]:
            return f"shapes {tuple(x.shape)} and {tuple(t.shape)} differ"
        if t.stride(2) != 1 and t.shape[2] > 1:
            return f"the last dimension has stride {t.stride(2)}, not 1"
    for t in others:
        if t.shape != x.shape:
            return f"shapes {tuple(x.shape)} and {tuple(t.shape)} differ"
    for t in conditions:
        if any(size not in (1, whole) for size, whole in zip(t.shape[:2], x.shape[:2], strict=True)):
            return f"a condition of shape {tuple(t.shape)} does not fit {tuple(x.shape)}"
    return None


def condition_strides(t: Tensor) -> tuple[int, int]:
    """Strides of batch and time, 0 where one row serves all."""
    stride_b, stride_t = (0 if size == 1 else stride for size, stride in zip(t.shape[:2], t.stride()[:2], strict=True))
    return stride_b, stride_t


def _refuses(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> str | None:
    if x.shape[-1] > LARGEST_ROW:
        return f"rows of {x.shape[-1]} elements, more than {LARGEST_ROW}"
    return refuses_conditioned(x, (), (scale, shift))


@triton.jit
def modulated(x, scale, shift, mask_d, eps, D: tl.constexpr):
    """The norm of rows x [BLOCK_M, BLOCK_D] of D elements, fp32."""
    # Divided exactly: of a constant row a mean that is off by its last bit comes back 1 / sqrt(eps) times as large.
    centred = tl.where(mask_d, x - tl.div_rn(tl.sum(x, axis=1), D * 1.0)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)[:, None]
    # y = (x - mean) * rstd * (1 + scale) + shift
    return centred * rstd * (1.0 + scale.to(tl.float32)) + shift.to(tl.float32)


@triton.jit
def load_rows(ptr, row, mask, T, stride_b, stride_t, SINGLE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of [B, T, D], [rows, BLOCK_D] in their dtype, which takes few registers until they are needed.

    SINGLE: B is 1, and there is nothing to divide, for which a program would wait before it asks for anything.
    """
    if SINGLE:
        at = row.to(tl.int64) * stride_t
    else:
        at = (row // T).to(tl.int64) * stride_b + (row % T).to(tl.int64) * stride_t
    return tl.load(ptr + at[:, None] + tl.arange(0, BLOCK_D)[None, :], mask=mask, other=0.0)


@kernel
@triton.jit
def _ada_layer_norm_kernel(
    x_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    rows,
    T,
    stride_x_b,
    stride_x_t,
    stride_scale_b,
    stride_scale_t,
    stride_shift_b,
    stride_shift_t,
    eps,
    D: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = (offs_d < D)[None, :]
    mask = mask_d if BLOCK_M == 1 else (row < rows)[:, None] & mask_d
    x = load_rows(x_ptr, row, mask, T, stride_x_b, stride_x_t, SINGLE, BLOCK_D)
    # Asked for with x, not after the sums.
    scale = load_rows(scale_ptr, row, mask, T, stride_scale_b, stride_scale_t, SINGLE, BLOCK_D)
    shift = load_rows(shift_ptr, row, mask, T, stride_shift_b, stride_shift_t, SINGLE, BLOCK_D)
    y = modulated(x.to(tl.float32), scale, shift, mask_d, eps, D)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * D + offs_d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _candidates(arch: Architecture, D: int) -> Iterator[RowTile]:
    # Of 16 bits scale and shift have a register together: with x they count for two.
    return row_candidates(arch, D, 2)


@tunable("ada_layer_norm", _candidates)
def tile(arch: Architecture, D: int) -> RowTile:
    """8 elements a lane of each of the three, which is 16 bytes in 16 bits; a quarter where registers are few."""
    block_d = next_power_of_2(D)
    block_m = max(1, min(16, 1024 // block_d))
    if arch.name == "nvidia" and block_d >= 2048:
        # 32 elements a lane: sums of fewer warps wait less for each other.
        return RowTile(1, block_d, min(16, block_d // 1024))
    return RowTile(block_m, block_d, max(1, min(32, block_m * block_d // (64 if arch.name == "arc-a" else 256))))


@ada_layer_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
def ada_layer_norm_triton(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-6) -> Tensor:
    B, T, D = x.shape
    y = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block_m, block_d, warps = tile(architecture(x.device), D)
    with on_device_of(x):
        _ada_layer_norm_kernel[(cdiv(B * T, block_m),)](
            x,
            scale,
            shift,
            y,
            B * T,
            T,
            *x.stride()[:2],
            *condition_strides(scale),
            *condition_strides(shift),
            eps,
            D=D,
            SINGLE=B == 1,
            BLOCK_M=block_m,
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return y
