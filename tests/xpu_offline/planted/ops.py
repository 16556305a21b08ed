"""Ops that double rows: one that is right, and one with each fault that the XPU check has to catch."""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.tritonlib import next_power_of_2, tl, triton


def _never(x: Tensor) -> None:
    return None


@triton.jit
def _good_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.0, mask=offs < N)


@op
def planted_good(x: Tensor) -> Tensor:
    """2 x for x [M, N]."""
    return x * 2.0


@planted_good.implement("triton", "xpu", refuses=_never)
def planted_good_triton(x: Tensor) -> Tensor:
    return _launch(_good_kernel, x, x.shape[0])


@triton.jit
def _constant_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.001, mask=offs < N)


@op
def planted_constant(x: Tensor) -> Tensor:
    """2 x, by a kernel with a wrong constant."""
    return x * 2.0


@planted_constant.implement("triton", "xpu", refuses=_never)
def planted_constant_triton(x: Tensor) -> Tensor:
    return _launch(_constant_kernel, x, x.shape[0])


@triton.jit
def _unmasked_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.0)


@op
def planted_unmasked(x: Tensor) -> Tensor:
    """2 x, by a kernel that stores a whole block at the tail."""
    return x * 2.0


@planted_unmasked.implement("triton", "xpu", refuses=_never)
def planted_unmasked_triton(x: Tensor) -> Tensor:
    return _launch(_unmasked_kernel, x, x.shape[0])


@triton.jit
def _overflow_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.0, mask=offs < N)


@op
def planted_overflow(x: Tensor) -> Tensor:
    """2 x, by a kernel whose addresses are 32-bit products."""
    return x * 2.0


@planted_overflow.implement("triton", "xpu", refuses=_never)
def planted_overflow_triton(x: Tensor) -> Tensor:
    return _launch(_overflow_kernel, x, x.shape[0])


@triton.jit
def _twice_kernel(x_ptr, y_ptr, M, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.minimum(tl.program_id(0), M - 1).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.0, mask=offs < N)


@op
def planted_twice(x: Tensor) -> Tensor:
    """2 x, the last row written by two programs, with the same values."""
    return x * 2.0


@planted_twice.implement("triton", "xpu", refuses=_never)
def planted_twice_triton(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    M, N = x.shape
    _twice_kernel[(M + 1,)](x, y, M, N, x.stride(0), N, BLOCK=next_power_of_2(N), num_warps=1)
    return y


@triton.jit
def _unwritten_kernel(x_ptr, y_ptr, N, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_x + offs, mask=offs < N)
    tl.store(y_ptr + row * stride_y + offs, x * 2.0, mask=offs < N - 1)


@op
def planted_unwritten(x: Tensor) -> Tensor:
    """2 x, by a kernel that leaves the last element of a row out."""
    return x * 2.0


@planted_unwritten.implement("triton", "xpu", refuses=_never)
def planted_unwritten_triton(x: Tensor) -> Tensor:
    return _launch(_unwritten_kernel, x, x.shape[0])


@triton.jit
def _never_launched_kernel(x_ptr):
    tl.store(x_ptr, 0.0)


@triton.jit
def _spilling_kernel(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs[:, None] * stride_a + (k + offs_k)[None, :])
        b = tl.load(b_ptr + (k + offs_k)[:, None] * stride_b + offs[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs[:, None] * stride_c + offs[None, :], acc.to(c_ptr.dtype.element_ty))


def launch_spilling() -> None:
    """A product of 128 x 128 by two warps: far more accumulators than registers."""
    a, b, c = (torch.empty(128, 128, dtype=torch.bfloat16) for _ in range(3))
    _spilling_kernel[(1,)](a, b, c, 128, 128, 128, 128, BLOCK=128, BLOCK_K=32, num_warps=2)


@triton.jit
def _shared_kernel(x_ptr, y_ptr, stride_x, stride_y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :])
    tl.store(y_ptr + columns[:, None] * stride_y + rows[None, :], tl.trans(x))


def launch_shared() -> None:
    """A transposition of 64 KB, which with its padding takes 70 KB of shared memory."""
    x, y = torch.empty(128, 128), torch.empty(128, 128)
    _shared_kernel[(1,)](x, y, 128, 128, ROWS=128, COLUMNS=128, num_warps=16)


def _launch(kernel: object, x: Tensor, programs: int) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    N = x.shape[1]
    kernel[(programs,)](x, y, N, x.stride(0), N, BLOCK=next_power_of_2(N), num_warps=1)  # type: ignore[index]
    return y
