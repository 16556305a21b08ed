"""Activations to MXFP4.

Source: as `xpu_ports.quant.mxfp4.format`, whose `quantize` this is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.rms_norm import dims_used, refuses_rows, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.format import BLOCK, SCALE_RULES, quantize
from xpu_ports.quant.mxfp4.kernels.decoding import power


def _fake(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    *leading, K = x.shape
    return x.new_empty((*leading, K // 2), dtype=torch.uint8), x.new_empty((*leading, K // BLOCK), dtype=torch.uint8)


@op(fake=_fake)
def mxfp4_quantize(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    """Round to MXFP4, a scale for each block of 32.

    Args:
        x: [..., K], floating point, any row strides; K is a multiple of 32.
        scale_rule: "even", "floor" or "rceil": how a block's scale comes from its largest magnitude.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], byte for byte what `format.quantize` gives.

    Raises:
        ValueError: K is not a multiple of 32, or the rule does not exist.
    """
    return quantize(x, scale_rule)


def _refuses(x: Tensor, scale_rule: str = "even") -> str | None:
    if x.dim() == 0 or x.shape[-1] % BLOCK or scale_rule not in SCALE_RULES:
        return f"shape {tuple(x.shape)} or rule {scale_rule!r} that nothing takes"
    return refuses_rows(x, None)


@triton.jit
def _wide(x):
    """x in fp32; of bf16 by its bits, so that denormal numbers stay."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _magnitude_code(y):
    """The code of y >= 0, in scales: how many of the midpoints lie below, ties to the even code."""
    code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32) + (y >= 1.75).to(tl.int32)
    return code + (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32) + (y > 5.0).to(tl.int32)


@triton.jit
def _magnitude(y):
    """y >= 0, in scales, to the nearest number that has a code."""
    code = _magnitude_code(y).to(tl.float32)
    # 0.5 apart up to 2, code 4; 3, 4 and 6 come after.
    return tl.where(code <= 4.0, code * 0.5, tl.where(code < 7.0, code - 2.0, 6.0))


@kernel
@triton.jit
def _quantize_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    rows,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    K: tl.constexpr,
    DIMS: tl.constexpr,
    ADDED: tl.constexpr,
    DECODED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """BLOCK_B blocks of 32 of BLOCK_M rows: to codes and scales, or to the numbers that these stand for, in place."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    at_m = offs_m.to(tl.int64)
    mask_b = (offs_m < rows)[:, None] & (offs_b < K // 32)[None, :]
    mask = mask_b[:, :, None]
    # [M, blocks, 16]: the even elements and the odd ones.
    offs_k = 32 * offs_b[None, :, None] + 2 * tl.arange(0, 16)[None, None, :]
    x_ptrs = x_ptr + row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None, None] + offs_k
    even, odd = _wide(tl.load(x_ptrs, mask=mask, other=0.0)), _wide(tl.load(x_ptrs + 1, mask=mask, other=0.0))
    # As integers magnitudes have the order of the numbers, infinity and then NaN at the end.
    low, high = even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)
    largest = tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=2)
    finite = largest < 0x7F800000
    byte = tl.minimum(tl.maximum(((largest + ADDED) >> 23) - 2, 0), 252)
    # 2^(127 - byte)
    inverse = tl.where(finite, (254 - byte) << 23, 0).to(tl.float32, bitcast=True)[:, :, None]
    even, odd = tl.abs(even) * inverse, tl.abs(odd) * inverse
    byte = tl.where(finite, byte, 255)
    if DECODED:
        scale = power(byte)[:, :, None]
        even, odd = _magnitude(even) * scale, _magnitude(odd) * scale
        y = tl.join(tl.where(low < 0, -even, even), tl.where(high < 0, -odd, odd))
        y = tl.reshape(y.to(packed_ptr.dtype.element_ty), (BLOCK_M, BLOCK_B * 32))
        offs_y = tl.program_id(1) * (BLOCK_B * 32) + tl.arange(0, BLOCK_B * 32)
        mask_y = (offs_m < rows)[:, None] & (offs_y < K)[None, :]
        tl.store(packed_ptr + at_m[:, None] * K + offs_y[None, :], y, mask=mask_y)
    else:
        low = _magnitude_code(even) | ((low >> 28) & 8)
        high = _magnitude_code(odd) | ((high >> 28) & 8)
        packed = tl.where(finite[:, :, None], low | (high << 4), 0).to(tl.uint8)
        tl.store(packed_ptr + at_m[:, None, None] * (K // 2) + offs_k // 2, packed, mask=mask)
        tl.store(scale_ptr + at_m[:, None] * (K // 32) + offs_b[None, :], byte.to(tl.uint8), mask=mask_b)


# What is added to the bits of the largest magnitude so that its exponent is the scale's plus two: the mantissa's carry.
_ADDED = {"floor": 0, "even": 0x200000, "rceil": 0x3FFFFF}


@mxfp4_quantize.implement("triton", "xpu", "cuda", refuses=_refuses)
def mxfp4_quantize_triton(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    *leading, K = x.shape
    packed = torch.empty((*leading, K // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*leading, K // BLOCK), dtype=torch.uint8, device=x.device)
    _launch(x, packed, scale, scale_rule, decoded=False)
    return packed, scale


def round_rows(x: Tensor) -> Tensor:
    """x rounded to MXFP4 by the rule "even", as the bf16 numbers that the codes stand for, contiguous."""
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _launch(x, y, y, "even", decoded=True)
    return y


def _launch(x: Tensor, packed: Tensor, scale: Tensor, scale_rule: str, decoded: bool) -> None:
    K = x.shape[-1]
    if x.numel() == 0:
        return
    rows = x.numel() // K
    sizes, (stride_x,) = row_strides(x)  # type: ignore[misc]
    block_b = min(32, next_power_of_2(K // BLOCK))
    block_m = max(1, 16 // block_b)
    with on_device_of(x):
        _quantize_kernel[(cdiv(rows, block_m), cdiv(K // BLOCK, block_b))](
            x,
            packed,
            scale,
            rows,
            sizes[1],
            sizes[2],
            *stride_x,
            K=K,
            DIMS=dims_used(sizes),
            ADDED=_ADDED[scale_rule],
            DECODED=decoded,
            BLOCK_M=block_m,
            BLOCK_B=block_b,
            num_warps=4,
        )
