"""Attention's output turned back and projected: in one launch for a token or two, else before the vendor's product.

Where tokens are few, reading the weight is all that takes time: each program turns what it needs itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.kernels.mla_rope import inverse_rope_grouped_out
from xpu_ports.common.kernels.mla_rope.triton import refuses_angles, refuses_heads, turn, turned
from xpu_ports.common.kernels.moe_experts.triton import tile, vector
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.kernels.skinny_linear.triton import in_lane_sum
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of, tl, triton

# From here on every token reading the weight from the cache for itself takes longer than a product.
FEW_TOKENS = 2


def _refuses(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> str | None:
    refusal = refuses_heads("o", o, 4) or refuses_angles(o, cos, sin)
    if refusal is not None:
        return refusal
    H, K = o.shape[2:]
    if weight.dim() != 2 or weight.dtype != o.dtype:
        return f"weight has {weight.dim()} dimensions and dtype {weight.dtype}, expected 2 and {o.dtype}"
    rows, width = weight.shape
    if width == 0 or width % K or H * K % width or rows % (H * K // width):
        return f"weight has shape {tuple(weight.shape)}, expected rows for each of some groups of {H} heads of {K}"
    if weight.stride(1) != 1:
        return f"the last dimension of weight has stride {weight.stride(1)}, not 1"
    return None


@kernel
@triton.jit
def _few_out_kernel(
    o_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    y_ptr,
    tokens,
    T,
    stride_o_b,
    stride_o_t,
    stride_o_h,
    stride_c_b,
    stride_c_t,
    stride_w,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """BLOCK_R of one group's ROWS for one token; programs of the same rows run side by side."""
    blocks: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    token, pid = (pid % tokens).to(tl.int64), pid // tokens
    b, t, group = token // T, token % T, pid // blocks
    offs_r = pid % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    w_ptrs = weight_ptr + ((group * ROWS + offs_r).to(tl.int64) * stride_w)[None, :, None]
    mask_r = (offs_r < ROWS)[None, :, None]
    o_ptr += b * stride_o_b + t * stride_o_t + (group * HEADS).to(tl.int64) * stride_o_h
    cos_ptr += b * stride_c_b + t * stride_c_t
    sin_ptr += b * stride_c_b + t * stride_c_t
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    acc = tl.zeros((1, BLOCK_R, BLOCK_K // VECTOR), dtype=tl.float32)
    for h in range(HEADS):
        for k in tl.static_range(0, K, BLOCK_K):
            mask_k = k + offs_k < K
            w = tl.load(w_ptrs + (h * K + k + offs_k), mask=mask_r & mask_k, other=0.0).to(tl.float32)
            x = tl.load(o_ptr + (k + offs_k), mask=mask_k, other=0.0).to(tl.float32)
            if k + BLOCK_K > K - 2 * N:
                # Of the columns from k on, as if these were a head of K - k.
                x = tl.reshape(turned(tl.reshape(x, (1, BLOCK_K)), cos_ptr, sin_ptr, K - k, N, True), (1, 1, BLOCK_K))
            acc += in_lane_sum(w * rounded(x, o_ptr).to(tl.float32), BLOCK_K, VECTOR)
        o_ptr += stride_o_h
    y = tl.sum(tl.sum(acc, axis=2), axis=0)
    y_ptrs = y_ptr + (token * GROUPS + group) * ROWS + offs_r
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=offs_r < ROWS)


@inverse_rope_grouped_out.implement("triton", "xpu", "cuda", refuses=_refuses)
def inverse_rope_grouped_out_triton(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    (B, T, H, K), (rows, width) = o.shape, weight.shape
    groups = H * K // width
    y = torch.empty((B, T, rows), dtype=o.dtype, device=o.device)
    if y.numel() == 0:
        return y
    if B * T > FEW_TOKENS:
        x = turn(o, cos, sin, True).view(B * T, groups, width).transpose(0, 1)
        out = y.view(B * T, groups, rows // groups).transpose(0, 1)
        torch.bmm(x, weight.unflatten(0, (groups, -1)).mT, out=out)
        return y
    arch = architecture(o.device)
    cut = tile(arch, K, o.element_size())
    with on_device_of(o):
        _few_out_kernel[(B * T * groups * cdiv(rows // groups, cut.rows),)](
            o,
            cos,
            sin,
            weight,
            y,
            B * T,
            T,
            *o.stride()[:3],
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            weight.stride(0),
            ROWS=rows // groups,
            GROUPS=groups,
            HEADS=width // K,
            K=K,
            N=cos.shape[2],
            BLOCK_R=cut.rows,
            BLOCK_K=cut.block_k,
            VECTOR=vector(cut, weight, arch),
            num_warps=cut.warps,
            **grf_options(cut.registers, arch),
        )
    return y
