"""One launch for a layer's queries and key: norms, rotation, and the key's row into the cache, quantized or not.

A token's first program has its key, the others some heads each. What a slot of -1 keeps out of the cache is masked in
the kernel, so that nothing on the host depends on what slots hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.fp8_pages import GROUP, decode_e4m3, page_tokens, refuses_pages, token_bytes
from xpu_ports.common.kernels.mla_rope import norm_rope_insert, qnorm_rope_kv_insert, rope_tail
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# A program has whole heads.
MOST_COLUMNS = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _refuses_tail(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    return refuses_heads("x", x, 4) or refuses_angles(x, cos, sin)


def _refuses_insert(
    q: Tensor, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float
) -> str | None:
    refusal = refuses_heads("q", q, 4)
    if refusal is None and kv.shape != (*q.shape[:2], q.shape[3]):
        refusal = f"kv has shape {tuple(kv.shape)}, expected {(*q.shape[:2], q.shape[3])}"
    return refusal or _refuses_rows(kv, weight, cos, sin, slots, store, False)


def _refuses_entries(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float, index: bool
) -> str | None:
    return _refuses_rows(rows, weight, cos, sin, slots, store, index)


def _refuses_rows(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, index: bool
) -> str | None:
    refusal = refuses_heads("a row", rows, 3) or refuses_angles(rows, cos, sin)
    if refusal is not None:
        return refusal
    B, T, K = rows.shape
    if weight.shape != (K,) or not weight.is_contiguous() or weight.dtype not in _FLOATS:
        return f"weight has shape {tuple(weight.shape)} and dtype {weight.dtype}, expected ({K},), contiguous, floating"
    if slots.shape != (B, T) or slots.dtype not in (torch.int32, torch.int64):
        return f"slots are {tuple(slots.shape)}, {slots.dtype}, expected {(B, T)}, int32 or int64"
    if store.dim() != 3 or store.shape[0] != B:
        return f"the store has shape {tuple(store.shape)}, expected {B} rows of tokens or pages"
    if store.dtype == torch.uint8:
        return refuses_pages(store, K, None if index else 2 * cos.shape[-1])
    if store.dtype not in _FLOATS:
        return f"the store has dtype {store.dtype}, not one of float16, bfloat16, float32, uint8"
    if store.shape[2] != K or store.stride(2) != 1:
        return f"the store has {store.shape[2]} columns with stride {store.stride(2)}, expected {K} with stride 1"
    return None


def refuses_heads(name: str, x: Tensor, dims: int) -> str | None:
    """Why a program cannot have heads of x, or None."""
    if not AVAILABLE:
        return WHY_NOT
    if x.dim() != dims:
        return f"{name} has {x.dim()} dimensions, not {dims}"
    if x.dtype not in _FLOATS:
        return f"{name} has dtype {x.dtype}, not one of float16, bfloat16, float32"
    K = x.shape[-1]
    if K % 2 or not 2 <= K <= MOST_COLUMNS:
        return f"{name} has {K} columns, not an even number up to {MOST_COLUMNS}"
    return None if x.stride(-1) == 1 else f"the last dimension of {name} has stride {x.stride(-1)}, not 1"


def refuses_angles(x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why the kernels cannot read the angles of x [B, T, ..., K], or None."""
    (B, T), K = x.shape[:2], x.shape[-1]
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.dtype != sin.dtype:
        return f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}: shape, strides or dtype differ"
    if cos.dtype not in _FLOATS:
        return f"cos has dtype {cos.dtype}, not one of float16, bfloat16, float32"
    if cos.dim() != 3 or cos.shape[0] not in (1, B) or cos.shape[1] != T or not 0 < 2 * cos.shape[2] <= K:
        return f"cos has shape {tuple(cos.shape)}, expected ({B} or 1, {T}, at most {K // 2})"
    if cos.stride(2) != 1 and cos.shape[2] > 1:
        return f"the last dimension of cos has stride {cos.stride(2)}, not 1"
    return None


@triton.jit
def turned(x, cos_ptr, sin_ptr, K: tl.constexpr, N: tl.constexpr, INVERSE: tl.constexpr):
    """x [ROWS, BLOCK_K], fp32, with its last 2 N of K columns rotated in pairs, the others as they are."""
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, PAIRS) - (K // 2 - N)
    turns = (pair >= 0) & (pair < N)
    cos = tl.load(cos_ptr + pair, mask=turns, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + pair, mask=turns, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        sin = -sin
    x1, x2 = tl.split(tl.reshape(x, (ROWS, PAIRS, 2)))
    # What does not turn is not multiplied either: an infinite neighbour would make it NaN.
    y1 = tl.where(turns[None, :], x1 * cos - x2 * sin, x1)
    y2 = tl.where(turns[None, :], x2 * cos + x1 * sin, x2)
    return tl.reshape(tl.join(y1, y2), (ROWS, PAIRS * 2))


@triton.jit
def _turn_heads(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    block,
    stride_x_h,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_H heads of the token that the pointers are at."""
    offs_h, offs_k = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    mask = (offs_h < H)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + (offs_h.to(tl.int64) * stride_x_h)[:, None] + offs_k[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, axis=1) / K + eps)[:, None]
    y = turned(x, cos_ptr, sin_ptr, K, N, INVERSE)
    tl.store(y_ptr + (offs_h * K)[:, None] + offs_k[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
@triton.jit
def _rope_tail_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    T,
    stride_x_b,
    stride_x_t,
    stride_x_h,
    stride_c_b,
    stride_c_t,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    INVERSE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    at = b * stride_c_b + t * stride_c_t
    _turn_heads(
        x_ptr + b * stride_x_b + t * stride_x_t, y_ptr + token * (H * K), cos_ptr + at, sin_ptr + at,
        tl.program_id(1), stride_x_h, 0.0, H, K, N, False, INVERSE, BLOCK_H, BLOCK_K,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- rows and stores


@triton.jit
def encode_e4m3(x):
    """Bytes of e4m3, the nearest, of ties the even one, of x (fp32); what is larger than 448 is made that.

    In integers: not all devices convert right.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 3 of fp32's 23 bits of mantissa are kept, whose exponent has a bias larger by 120.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the last place is 2^-9, which is fp32's at 2^14: a sum with it is rounded there.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(magnitude < (121 << 23), small, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _power_of_2(log2):
    return ((log2 + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantized(x, GROUPS: tl.constexpr):
    """(bytes, log2 of the scales, what the bytes are worth) of x, values of bf16 in fp32; [GROUPS, columns], but the
    scales [GROUPS].
    """
    COLUMNS: tl.constexpr = x.shape[0] // GROUPS
    x = tl.reshape(x, (GROUPS, COLUMNS))
    # Positive numbers are in the order of their bits. The least is 1e-4's.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    top = tl.maximum(top, 0x38D1B717)
    # ceil(log2(a / 448)), exact: 448 is 1.75 2^8, and 0x600000 the mantissa of 1.75.
    log2 = (top >> 23) - 127 - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
    codes = encode_e4m3(x * _power_of_2(-log2)[:, None])
    return codes, log2, decode_e4m3(codes) * _power_of_2(log2)[:, None]


@triton.jit
def _write_page(
    page_ptr,
    at,
    y,
    codes,
    log2,
    K: tl.constexpr,
    OWN: tl.constexpr,
    TOKENS: tl.constexpr,
    INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    """The token `at` of a page: OWN columns as codes with their scales, the others of y [BLOCK_K] in bf16."""
    DATA: tl.constexpr = 2 * K - OWN
    offs_k, offs_s = tl.arange(0, y.shape[0]), tl.arange(0, BLOCK_PAD)
    data_ptr, scales_ptr = page_ptr + at * DATA, page_ptr + TOKENS * DATA
    tl.store(data_ptr + offs_k, codes, mask=offs_k < OWN)
    if OWN < K:
        # bf16 is the upper half of fp32.
        bits, is_tail = y.to(tl.int32, bitcast=True), (offs_k >= OWN) & (offs_k < K)
        tail_ptrs = data_ptr + 2 * offs_k - OWN
        tl.store(tail_ptrs, ((bits >> 16) & 0xFF).to(tl.uint8), mask=is_tail)
        tl.store(tail_ptrs + 1, ((bits >> 24) & 0xFF).to(tl.uint8), mask=is_tail)
    if INDEX:
        # The one scale in fp32, whose bytes need not be aligned.
        scale = tl.sum((log2 + 127) << 23, axis=0)
        tl.store(scales_ptr + at * 4 + offs_s, ((scale >> (8 * offs_s)) & 0xFF).to(tl.uint8), mask=offs_s < 4)
    else:
        groups: tl.constexpr = OWN // GROUP
        padded: tl.constexpr = (groups + 7) // 8 * 8
        offs_g = tl.arange(0, log2.shape[0])
        scales_ptr += at * padded
        tl.store(scales_ptr + offs_g, (log2 + 127).to(tl.uint8), mask=offs_g < groups)
        nothing = tl.zeros((BLOCK_PAD,), dtype=tl.uint8)
        tl.store(scales_ptr + offs_s, nothing, mask=(offs_s >= groups) & (offs_s < padded))


@kernel
@triton.jit
def _insert_kernel(
    q_ptr,
    rows_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    store_ptr,
    turned_ptr,
    kept_ptr,
    T,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_r_b,
    stride_r_t,
    stride_c_b,
    stride_c_t,
    stride_i_b,
    stride_i_t,
    stride_s_b,
    stride_s_s,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    OWN: tl.constexpr,
    TOKENS: tl.constexpr,
    INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    """H heads and a row of each token, or with H = 0 the row; TOKENS of a page, 0 where the store has none."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    cos_ptr += b * stride_c_b + t * stride_c_t
    sin_ptr += b * stride_c_b + t * stride_c_t
    block = tl.program_id(1)
    if block > 0:
        if H > 0:
            _turn_heads(
                q_ptr + b * stride_q_b + t * stride_q_t, turned_ptr + token * (H * K), cos_ptr, sin_ptr, block - 1,
                stride_q_h, eps, H, K, N, True, False, BLOCK_H, BLOCK_K,
            )  # fmt: skip
    else:
        offs_k = tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        x = tl.load(rows_ptr + b * stride_r_b + t * stride_r_t + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * weight
        y = turned(x[None, :], cos_ptr, sin_ptr, K, N, False)
        y = rounded(tl.reshape(y, (BLOCK_K,)), kept_ptr)
        slot = tl.load(slots_ptr + b * stride_i_b + t * stride_i_t).to(tl.int64)
        store_ptr += b * stride_s_b
        kept_ptrs = kept_ptr + token * K + offs_k
        if TOKENS == 0:
            tl.store(kept_ptrs, y, mask=mask_k)
            if slot >= 0:
                tl.store(store_ptr + slot * stride_s_s + offs_k, y, mask=mask_k)
        else:
            wide, is_own = y.to(tl.float32), offs_k < OWN
            codes, log2, values = quantized(tl.where(is_own, wide, 0.0), 1 if INDEX else BLOCK_K // GROUP)
            values = tl.where(is_own, tl.reshape(values, (BLOCK_K,)), wide)
            tl.store(kept_ptrs, values.to(kept_ptr.dtype.element_ty), mask=mask_k)
            if slot >= 0:
                _write_page(
                    store_ptr + slot // TOKENS * stride_s_s, slot % TOKENS, wide, tl.reshape(codes, (BLOCK_K,)), log2,
                    K, OWN, TOKENS, INDEX, GROUP, BLOCK_PAD,
                )  # fmt: skip


class HeadsTile(NamedTuple):
    """Heads of a token that a program takes, and its warps."""

    block_h: int
    warps: int


def _candidates(arch: Architecture, heads: int, K: int) -> Iterator[HeadsTile]:
    """4 to 32 elements a lane on NVIDIA, to what the rule takes on Intel."""
    most = {"nvidia": 32, "arc-a": 4}.get(arch.name, 8)
    for block_h in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            if block_h <= next_power_of_2(heads) and 4 <= block_h * next_power_of_2(K) // (32 * warps) <= most:
                yield HeadsTile(block_h, warps)


@tunable("mla_rope", _candidates)
def tile(arch: Architecture, heads: int, K: int) -> HeadsTile:
    """16 elements a lane on NVIDIA, 2048 a program; fewer where registers are."""
    block_k = next_power_of_2(K)
    elements, a_lane = {"nvidia": (2048, 16), "arc-a": (1024, 4)}.get(arch.name, (1024, 8))
    block_h = min(max(1, elements // block_k), next_power_of_2(heads))
    return HeadsTile(block_h, max(1, block_h * block_k // (32 * a_lane)))


def turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`rope_tail`, or with the sines negative: [B, T, H, K], contiguous."""
    B, T, H, K = x.shape
    y = torch.empty((B, T, H, K), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    block_h, warps = tile(architecture(x.device), H, K)
    with on_device_of(x):
        _rope_tail_kernel[(B * T, cdiv(H, block_h))](
            x,
            cos,
            sin,
            y,
            T,
            *x.stride()[:3],
            # One row of angles serves all of the batch.
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            H=H,
            K=K,
            N=cos.shape[2],
            INVERSE=inverse,
            BLOCK_H=block_h,
            BLOCK_K=next_power_of_2(K),
            num_warps=warps,
        )
    return y


@rope_tail.implement("triton", "xpu", "cuda", refuses=_refuses_tail)
def rope_tail_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return turn(x, cos, sin, False)


def _insert(
    q: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    store: Tensor,
    eps: float,
    index: bool,
) -> tuple[Tensor, Tensor]:
    """What both inserts do; without queries the first result is the second."""
    (B, T, K), N = rows.shape, cos.shape[2]
    H = 0 if q is None else q.shape[2]
    paged = store.dtype == torch.uint8
    kept = torch.empty((B, T, K), dtype=torch.bfloat16 if paged else store.dtype, device=rows.device)
    turned_q = kept if q is None else torch.empty((B, T, H, K), dtype=q.dtype, device=q.device)
    if B * T == 0:
        return turned_q, kept
    block_h, warps = tile(architecture(rows.device), max(1, H), K)
    own = K if index else K - 2 * N
    with on_device_of(rows):
        _insert_kernel[(B * T, 1 + cdiv(H, block_h))](
            rows if q is None else q,
            rows,
            weight,
            cos,
            sin,
            slots,
            store,
            turned_q,
            kept,
            T,
            *((0, 0, 0) if q is None else q.stride()[:3]),
            *rows.stride()[:2],
            0 if cos.shape[0] == 1 else cos.stride(0),
            cos.stride(1),
            *slots.stride(),
            *store.stride()[:2],
            eps,
            H=H,
            K=K,
            N=N,
            OWN=own,
            TOKENS=page_tokens(store, K, None if index else 2 * N) if paged else 0,
            INDEX=index,
            GROUP=GROUP,
            BLOCK_H=block_h,
            BLOCK_K=next_power_of_2(K),
            BLOCK_PAD=next_power_of_2(token_bytes(K, 2 * N)[1]) if paged and not index else 4,
            num_warps=warps,
        )
    return turned_q, kept


@qnorm_rope_kv_insert.implement("triton", "xpu", "cuda", refuses=_refuses_insert)
def qnorm_rope_kv_insert_triton(
    q: Tensor, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _insert(q, kv, weight, cos, sin, slots, store, eps, False)


@norm_rope_insert.implement("triton", "xpu", "cuda", refuses=_refuses_entries)
def norm_rope_insert_triton(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float, index: bool
) -> Tensor:
    return _insert(None, rows, weight, cos, sin, slots, store, eps, index)[1]
