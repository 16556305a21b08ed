"""One or a few rows of x against a weight in MXFP4, without matrix units: what reading the weight takes, no more.

For Intel GPUs; NVIDIA's have `fragments`. Used by the linear layers and by the grouped one, whose rows each have an
expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.quant.mxfp4.kernels.decoding import code_pair, number, power


@triton.jit
def _add_products(acc, words, x_low, x_high, J: tl.constexpr):
    """acc, [M, N, blocks], with the products of the nibbles J and J + 4 and their columns of x, [M, blocks]."""
    pair = code_pair(words, J)
    acc += number(pair << 16, False)[None] * x_low[:, None, :]
    acc += number(pair & -0x10000, False)[None] * x_high[:, None, :]
    return acc


@triton.jit
def _add_word(acc, words, x_ptrs, mask):
    """acc, [M, N, blocks], with words [N, blocks] times their eight columns of x, at [M, blocks, 8]."""
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    acc = _add_products(acc, words, x0, x4, 0)
    acc = _add_products(acc, words, x1, x5, 1)
    acc = _add_products(acc, words, x2, x6, 2)
    return _add_products(acc, words, x3, x7, 3)


@kernel
@triton.jit
def _vector_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    experts_ptr,
    y_ptr,
    rows,
    N,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_w_e,
    stride_w_n,
    stride_s_e,
    stride_s_n,
    share,
    E,
    K: tl.constexpr,
    DIMS: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """BLOCK_N outputs of BLOCK_M rows, of one row and its expert where GROUPED; BLOCK_B blocks of 32 at a time."""
    row = tl.program_id(1).to(tl.int64)
    offs_m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_b = tl.arange(0, BLOCK_B)
    mask_m, mask_n = offs_m < rows, offs_n < N
    at_n = offs_n.to(tl.int64)
    # Of words the blocks come first, since lanes stand along the first dimension: each lane has whole blocks.
    words_ptrs = words_ptr + (at_n[None, :] * stride_w_n + 4 * offs_b[:, None])[:, :, None] + tl.arange(0, 4)
    scale_ptrs = scale_ptr + at_n[:, None] * stride_s_n + offs_b[None, :]
    if GROUPED:
        expert = tl.load(experts_ptr + row).to(tl.int64)
        if expert >= E:
            # Another device has it.
            return
        words_ptrs += expert * stride_w_e
        scale_ptrs += expert * stride_s_e
        x_at = row_offset(offs_m // share, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    else:
        x_at = row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    x_ptrs = x_ptr + (x_at[:, None] + 32 * offs_b[None, :])[:, :, None] + tl.arange(0, 8)
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_B), dtype=tl.float32)
    for b in range(0, K // 32, BLOCK_B):
        mask_b = b + offs_b < K // 32
        mask_x = (mask_m[:, None] & mask_b[None, :])[:, :, None]
        # The weights first: nothing else has to come from memory.
        words = tl.load(words_ptrs + 4 * b, mask=(mask_b[:, None] & mask_n[None, :])[:, :, None], other=0)
        scale = tl.load(scale_ptrs + b, mask=mask_n[:, None] & mask_b[None, :], other=0)
        even, odd = tl.split(tl.reshape(words, (BLOCK_B, BLOCK_N, 2, 2)))
        words0, words2 = tl.split(even)
        words1, words3 = tl.split(odd)
        part = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_B), dtype=tl.float32)
        part = _add_word(part, tl.trans(words0), x_ptrs + 32 * b, mask_x)
        part = _add_word(part, tl.trans(words1), x_ptrs + (32 * b + 8), mask_x)
        part = _add_word(part, tl.trans(words2), x_ptrs + (32 * b + 16), mask_x)
        part = _add_word(part, tl.trans(words3), x_ptrs + (32 * b + 24), mask_x)
        acc += part * power(scale)[None]
    y = tl.sum(acc, axis=2)
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@dataclass(frozen=True)
class Vector:
    """How the work is cut: outputs of a program, blocks of 32 columns at a time, warps, registers a thread."""

    block_n: int
    block_b: int
    warps: int
    registers: int = 128


def plan(arch: Architecture, M: int, K: int) -> Vector:
    """For M rows at a time, a power of two. A lane takes one block of each of its outputs."""
    block_b = min(128, next_power_of_2(cdiv(K, 32)))
    return Vector(max(1, (2 if arch.name == "arc-a" else 4) // M), block_b, max(1, block_b // 32), 256)


def launch(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    block_m: int,
    experts: Tensor | None = None,
    share: int = 1,
) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype; with experts, one a row, row i reads row i // share of x."""
    N, K = packed.shape[-2], x.shape[-1]
    rows = y.numel() // N
    sizes, (stride_x,) = row_strides(x)  # type: ignore[misc]
    arch = architecture(x.device)
    cut = plan(arch, block_m, K)
    words = packed.view(torch.int32)
    grouped = experts is not None
    with on_device_of(x):
        _vector_kernel[(cdiv(N, cut.block_n), cdiv(rows, block_m))](
            x,
            words,
            scale,
            x if bias is None else bias,
            x if experts is None else experts,
            y,
            rows,
            N,
            sizes[1],
            sizes[2],
            *stride_x,
            words.stride(0) if grouped else 0,
            words.stride(-2),
            scale.stride(0) if grouped else 0,
            scale.stride(-2),
            share,
            packed.shape[0],
            K=K,
            DIMS=dims_used(sizes),
            BIAS=bias is not None,
            GROUPED=grouped,
            BLOCK_M=block_m,
            BLOCK_N=cut.block_n,
            BLOCK_B=cut.block_b,
            num_warps=cut.warps,
            **grf_options(cut.registers, arch),
        )
