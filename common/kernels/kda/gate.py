"""The Triton implementation of `kda_gate`."""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.kernels.activations import softplus
from xpu_ports.common.kernels.kda import kda_gate
from xpu_ports.common.kernels.kda.parts import FLOATS, LARGEST_HEAD
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton


def _refuses(f: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    H, K = f.shape[2:]
    if lower_bound is not None and not lower_bound < 0.0:
        return f"lower_bound is {lower_bound}, which the reference raises for"
    if f.dtype not in FLOATS:
        return f"f has dtype {f.dtype}, not one of float16, bfloat16, float32"
    if f.stride(-1) != 1 and K > 1:
        return f"the last dimension of f has stride {f.stride(-1)}, not 1"
    if K > LARGEST_HEAD:
        return f"heads of {K} channels, more than {LARGEST_HEAD}"
    for name, t, size in (("A_log", A_log, H), ("dt_bias", dt_bias, H * K)):
        if t is not None and (t.shape != (size,) or not t.is_contiguous() or t.dtype not in FLOATS):
            return f"{name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected ({size},), contiguous, floating"
    return None


@kernel
@triton.jit
def _kda_gate_kernel(
    f_ptr,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    rows,
    T,
    lower_bound,
    stride_b,
    stride_t,
    stride_h,
    H: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """g of BLOCK_M heads of tokens."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    h = offs_m % H
    token = offs_m // H
    mask = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
    at = token // T * stride_b + token % T * stride_t + h * stride_h
    x = tl.load(f_ptr + at[:, None] + offs_k[None, :], mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log_ptr + h).to(tl.float32))[:, None]
    if HAS_BIAS:
        x += tl.load(dt_bias_ptr + h[:, None] * K + offs_k[None, :], mask=mask, other=0.0).to(tl.float32)
    g = lower_bound * tl.sigmoid(rate * x) if BOUNDED else -rate * softplus(x)
    tl.store(g_ptr + offs_m[:, None] * K + offs_k[None, :], g, mask=mask)


@kda_gate.implement("triton", "xpu", "cuda", refuses=_refuses)
def kda_gate_triton(f: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None = None) -> Tensor:
    B, T, H, K = f.shape
    g = torch.empty((B, T, H, K), dtype=torch.float32, device=f.device)
    if g.numel() == 0:
        return g
    block_k = next_power_of_2(K)
    # 4 elements a lane: Intel's compiler spills 8 on Arc A.
    block_m = max(1, 1024 // block_k)
    with on_device_of(f):
        _kda_gate_kernel[(cdiv(B * T * H, block_m),)](
            f,
            A_log,
            A_log if dt_bias is None else dt_bias,
            g,
            *(B * T * H, T, 0.0 if lower_bound is None else lower_bound),
            *f.stride()[:3],
            H=H,
            K=K,
            HAS_BIAS=dt_bias is not None,
            BOUNDED=lower_bound is not None,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=8,
        )
    return g
