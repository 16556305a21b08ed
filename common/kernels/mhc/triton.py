"""mHC in two launches before a layer and one behind it.

The first launch reads the streams once: products with fn and the sum of squares, split over programs along a stream,
so that one token's are not one program's. The second adds the parts up, and some of its programs make the layer's
input of the streams, which it finds in the cache if they are few, the others the weights that `mhc_post` takes.

fn is fp32, and its products are wanted in fp32. On matrix units they are products of bf16: three of them hold all bits
of an fp32 number, and one a stream's element in bf16. For many tokens a launch before makes the three of fn once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.mhc import MOST_PARTS, mhc_head, mhc_post, mhc_pre
from xpu_ports.common.kernels.mhc.tiles import in_pieces, load_pieces, load_streams, mixed, product
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.kernels.skinny_linear.triton import in_lane_sum
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton
from xpu_ports.common.tuning import tunable

# A program has some columns of every stream in registers.
MOST_STREAMS = 4
# Programs that share a token's products, at most: whoever adds the parts up reads them all.
MOST_SPLITS = 64
# Columns of fn that a program makes pieces of.
SPLIT_COLUMNS = 1024
# Up to here matrix units, which take 16 tokens at least, gain nothing.
FEW_TOKENS = 2
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _refuses_pre(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    products: Tensor | None = None,
) -> str | None:
    rows = (2 + x.shape[-2]) * x.shape[-2]
    return _refuses_streams(x) or _refuses_weights(x, fn, scale, base, rows, 3) or _refuses_products(x, rows, products)


def _refuses_head(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    products: Tensor | None = None,
) -> str | None:
    rows = x.shape[-2]
    return _refuses_streams(x) or _refuses_weights(x, fn, scale, base, rows, 1) or _refuses_products(x, rows, products)


def refuses_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> str | None:
    refusal = _refuses_streams(x)
    if refusal is not None:
        return refusal
    *tokens, S, D = x.shape
    expected = {"y": (y, (*tokens, D)), "post": (post, (*tokens, S)), "comb": (comb, (*tokens, S, S))}
    for name, (t, shape) in expected.items():
        if t.shape != shape:
            return f"{name} has shape {tuple(t.shape)}, expected {shape}"
        if t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    if y.stride(-1) != 1 and D > 1:
        return f"the last dimension of y has stride {y.stride(-1)}, not 1"
    for name, t in (("post", post), ("comb", comb)):
        if not t.is_contiguous():
            return f"{name} is not contiguous"
    return None if row_strides(y, x.select(-2, 0)) else "the tokens need more than three strides"


def _refuses_streams(x: Tensor) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if x.dtype not in _FLOATS:
        return f"dtype {x.dtype} is not one of float16, bfloat16, float32"
    if not 0 < x.shape[-2] <= MOST_STREAMS:
        return f"{x.shape[-2]} streams, not 1 to {MOST_STREAMS}"
    if x.shape[-1] == 0:
        return "there are no columns"
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return f"the last dimension has stride {x.stride(-1)}, not 1"
    return None if row_strides(x.select(-2, 0)) else "the tokens need more than three strides"


def _refuses_weights(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, R: int, scales: int) -> str | None:
    S, D = x.shape[-2:]
    for name, t, shape in (("fn", fn, (R, S * D)), ("scale", scale, (scales,)), ("base", base, (R,))):
        refusal = refuses_rows(name, t, shape)
        if refusal is not None:
            return refusal
    return None


def refuses_rows(name: str, t: Tensor, shape: tuple[int, ...]) -> str | None:
    if t.shape != shape:
        return f"{name} has shape {tuple(t.shape)}, expected {shape}"
    if t.dtype != torch.float32:
        return f"{name} has dtype {t.dtype}, not float32"
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    return None


def _refuses_products(x: Tensor, R: int, products: Tensor | None) -> str | None:
    if products is None:
        return None
    if products.dim() < 2 or not 0 < products.shape[-2] <= MOST_PARTS:
        return f"products has shape {tuple(products.shape)}, expected 1 to {MOST_PARTS} parts before the last dimension"
    if not products.is_contiguous():
        return "products is not contiguous"
    return refuses_rows("products", products, (*x.shape[:-2], products.shape[-2], R + 1))


# ---------------------------------------------------------------------------------------------- products and squares


@kernel
@triton.jit
def _mhc_split_kernel(fn_ptr, pieces_ptr, K, stride_f, R: tl.constexpr, BLOCK_K: tl.constexpr):
    """fn as its pieces, [3, R, K]."""
    r = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    w0, w1, w2 = in_pieces(tl.load(fn_ptr + r * stride_f + offs_k, mask=mask_k, other=0.0))
    pieces_ptrs = pieces_ptr + r * K + offs_k
    tl.store(pieces_ptrs, w0, mask=mask_k)
    tl.store(pieces_ptrs + R * K, w1, mask=mask_k)
    tl.store(pieces_ptrs + 2 * R * K, w2, mask=mask_k)


@kernel
@triton.jit(do_not_specialize=["splits"])
def _mhc_dot_kernel(
    x_ptr,
    fn_ptr,
    part_ptr,
    N,
    n1,
    n2,
    splits,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    stride_f,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    DIMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T tokens' products with all rows, on some columns of one stream; part is [N, splits, R + 1]."""
    pid = tl.program_id(0)
    split = pid % splits
    stream, part = split % S, split // S
    # From the last tokens to the first: who wrote the streams went the other way, as does who reads them next.
    offs_n = (tl.num_programs(0) // splits - 1 - pid // splits) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask_n = (offs_n < N)[:, None]
    offs_r = tl.arange(0, BLOCK_R)
    x_ptrs = x_ptr + row_offset(offs_n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None]
    x_ptrs += stream.to(tl.int64) * stride_x_s
    fn_ptrs = fn_ptr + (offs_r.to(tl.int64) * stride_f)[None, :] + stream * D
    acc = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K // VECTOR), dtype=tl.float32)
    for d in range(part * BLOCK_K, D, splits // S * BLOCK_K):
        offs_d = d + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptrs + offs_d[None, :], mask=mask_n & (offs_d < D)[None, :], other=0.0)
        mask_w = (offs_d < D)[:, None] & (offs_r < R)[None, :]
        w0, w1, w2 = load_pieces(fn_ptrs + offs_d[:, None], mask_w, R * S * D)
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, (BLOCK_T, BLOCK_K // VECTOR, VECTOR)), axis=2)
        acc += product(x, w0, w1, w2, False)
    part_ptrs = part_ptr + (offs_n.to(tl.int64) * splits + split) * (R + 1)
    tl.store(part_ptrs[:, None] + offs_r[None, :], acc, mask=mask_n & (offs_r < R)[None, :])
    tl.store(part_ptrs + R, tl.sum(squares, axis=1), mask=offs_n < N)


@kernel
@triton.jit(do_not_specialize=["splits"])
def _mhc_few_kernel(
    x_ptr,
    fn_ptr,
    part_ptr,
    N,
    n1,
    n2,
    splits,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    stride_f,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    DIMS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `_mhc_dot_kernel`, of BLOCK_R rows, without matrix units."""
    groups: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    pid = tl.program_id(0)
    split, pid = pid % splits, pid // splits
    stream, part = split % S, split // S
    # Dimensions are [tokens, rows, columns].
    offs_n = pid // groups * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_r = pid % groups * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_n, mask_r = (offs_n < N)[:, None, None], (offs_r < R)[None, :, None]
    x_ptrs = x_ptr + row_offset(offs_n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None, None]
    x_ptrs += stream.to(tl.int64) * stride_x_s
    fn_ptrs = fn_ptr + (offs_r.to(tl.int64) * stride_f)[None, :, None] + stream * D
    acc = tl.zeros((BLOCK_T, BLOCK_R, BLOCK_K // VECTOR), dtype=tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_K // VECTOR), dtype=tl.float32)
    for d in range(part * BLOCK_K, D, splits // S * BLOCK_K):
        offs_d = d + tl.arange(0, BLOCK_K)[None, None, :]
        w = tl.load(fn_ptrs + offs_d, mask=mask_r & (offs_d < D), other=0.0)
        x = tl.load(x_ptrs + offs_d, mask=mask_n & (offs_d < D), other=0.0).to(tl.float32)
        acc += in_lane_sum(w * x, BLOCK_K, VECTOR)
        squares += in_lane_sum(x * x, BLOCK_K, VECTOR)
    part_ptrs = part_ptr + ((offs_n.to(tl.int64) * splits + split) * (R + 1))[:, None]
    mask_n = (offs_n < N)[:, None]
    tl.store(part_ptrs + offs_r[None, :], tl.sum(acc, axis=2), mask=mask_n & (offs_r < R)[None, :])
    # One group of rows says it for all.
    if pid % groups == 0:
        tl.store(part_ptrs + R, tl.sum(squares, axis=2), mask=mask_n)


class DotTile(NamedTuple):
    """Tokens, rows of fn and columns of a stream that a program takes at a time, its warps, and loads in flight."""

    block_t: int
    block_r: int
    block_k: int
    warps: int
    stages: int = 1
    # Registers a thread, where that can be chosen.
    registers: int = 128


def units_for(arch: Architecture, N: int) -> str:
    """What the products of N tokens are made by: "few" without matrix units, "some" and "many" with them."""
    if N <= FEW_TOKENS or not arch.matrix_units:
        return "few"
    return "some" if N <= 64 else "many"


def _dot_candidates(arch: Architecture, R: int, dtype: torch.dtype, units: str) -> Iterator[DotTile]:
    """On NVIDIA, where of operands in pieces more than 2 warps would use units that Triton 3.6 makes wrong code for."""
    if arch.name != "nvidia":
        return
    if units == "few":
        for block_r in (4, 8):
            for block_k in (256, 512, 1024):
                for warps in (2, 4):
                    if block_k >= warps * 128:
                        yield DotTile(1, block_r, block_k, warps)
    else:
        for block_t in (16, 32) if units == "some" else (32, 64, 128):
            for block_k in (32, 64, 128):
                for stages in (1, 2, 3):
                    exact = dtype == torch.bfloat16
                    if block_t * block_k <= (8192 if exact else 4096):
                        warps = 4 if exact and block_t >= 64 else 2
                        yield DotTile(block_t, max(16, next_power_of_2(R)), block_k, warps, stages)


@tunable("mhc_dot", _dot_candidates)
def dot_tile(arch: Architecture, R: int, dtype: torch.dtype, units: str) -> DotTile:
    """The tile for R rows and streams of a dtype.

    Many tokens at a time, so that fn, which every program reads, is read seldom; 24 of its rows are padded to 32. Other
    dtypes than bf16 have three times the operands. On Intel GPUs about the largest that do not spill.
    """
    if units == "few":
        if arch.name == "arc-a":
            return DotTile(2, 4, 256, 4, registers=256)
        return DotTile(1, 8, 512, 4, registers=256)
    block_r, exact = max(16, next_power_of_2(R)), dtype == torch.bfloat16
    if arch.has_grf_modes:
        if not exact:
            return DotTile(16, block_r, 32, 8, registers=256)
        return DotTile(32 if units == "many" else 16, block_r, 64, 4, registers=256)
    if not exact:
        return DotTile(16 if units == "some" else 32, block_r, 32, 2)
    return DotTile(16, block_r, 64, 2, 3) if units == "some" else DotTile(64, block_r, 64, 4, 3)


def parts_of(arch: Architecture, programs: int, S: int, D: int, block_k: int) -> int:
    """How many parts a stream's columns are split into, where there are some programs for each of S streams.

    By shapes alone, so that a captured launch stays right: no more than four programs a unit, which is what the
    registers of most have room for, of blocks that differ by one at most.
    """
    blocks = cdiv(D, block_k)
    wanted = max(1, min(4 * arch.units // (programs * S), MOST_SPLITS // S, blocks))
    return cdiv(blocks, cdiv(blocks, wanted))


def _dot(x: Tensor, fn: Tensor, sizes: list[int], stride_x: list[int], arch: Architecture) -> Tensor:
    """Parts of fn x and of |x|^2, [N, splits, R + 1], fp32."""
    (S, D), R = x.shape[-2:], fn.shape[0]
    N = sizes[0] * sizes[1] * sizes[2]
    units = units_for(arch, N)
    cut = dot_tile(arch, R, x.dtype, units)
    programs = cdiv(N, cut.block_t) * cdiv(R, cut.block_r)
    splits = S * parts_of(arch, programs, S, D, cut.block_k)
    part = torch.empty((N, splits, R + 1), dtype=torch.float32, device=x.device)
    stride_f = fn.stride(0)
    if units == "many":
        pieces = torch.empty((3, R, S * D), dtype=torch.bfloat16, device=x.device)
        _mhc_split_kernel[(R, cdiv(S * D, SPLIT_COLUMNS))](
            fn, pieces, S * D, stride_f, R=R, BLOCK_K=SPLIT_COLUMNS, num_warps=4
        )
        fn, stride_f = pieces, S * D
    run = _mhc_few_kernel if units == "few" else _mhc_dot_kernel
    # Columns that one load gives a lane, of the streams on matrix units and of fn, which is wider, without.
    vector = cut.block_k // (cut.warps * arch.lanes) if units == "few" else 8
    run[(programs * splits,)](
        x,
        fn,
        part,
        N,
        sizes[1],
        sizes[2],
        splits,
        *stride_x,
        x.stride(-2),
        stride_f,
        S=S,
        D=D,
        R=R,
        DIMS=dims_used(sizes),
        VECTOR=max(1, min(vector, 16 // (4 if units == "few" else x.element_size()))),
        BLOCK_T=cut.block_t,
        BLOCK_R=cut.block_r,
        BLOCK_K=cut.block_k,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **grf_options(cut.registers, arch),
    )
    return part


# ------------------------------------------------------------------------------------------------ streams to one, back


@triton.jit
def _entry(x, offs, i):
    """x[i] of a short tensor."""
    return tl.sum(tl.where(offs == i, x, 0.0), axis=0)


@triton.jit
def _parts(part_ptrs, mask_n, first, splits, R: tl.constexpr, COUNT: tl.constexpr, BLOCK_P: tl.constexpr):
    """COUNT columns of some tokens from `first` on, [tokens, COUNT], added up over the parts."""
    offs_p, offs_r = tl.arange(0, BLOCK_P)[None, :, None], tl.arange(0, COUNT)[None, None, :]
    mask = mask_n[:, None, None] & (offs_p < splits) & (first + offs_r <= R)
    ptrs = part_ptrs[:, None, None] + offs_p * (R + 1) + first + offs_r
    return tl.sum(tl.load(ptrs, mask=mask, other=0.0), axis=1)


@triton.jit
def _write_shares(
    part_ptr,
    scale_ptr,
    base_ptr,
    post_ptr,
    comb_ptr,
    block,
    N,
    splits,
    norm_eps,
    eps,
    iterations,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """post and comb of BLOCK_N tokens."""
    offs_n = (block * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    mask_n, mask_s = offs_n < N, offs_s < S
    part_ptrs = part_ptr + offs_n * splits * (R + 1)
    squares = _parts(part_ptrs, mask_n, R, splits, R, 1, BLOCK_P)  # [BLOCK_N, 1]
    rstd = tl.rsqrt(squares / (S * D) + norm_eps)
    # post = 2 sigmoid(a_1 m + b)
    b = tl.load(base_ptr + S + offs_s, mask=mask_s, other=0.0)
    post = _parts(part_ptrs, mask_n, S, splits, R, BLOCK_S, BLOCK_P) * rstd
    post = 2 * tl.sigmoid(post * tl.load(scale_ptr + 1) + b[None, :])
    mask = mask_n[:, None] & mask_s[None, :]
    tl.store(post_ptr + offs_n[:, None] * S + offs_s[None, :], post, mask=mask)
    # comb = softmax(a_2 m + b) + eps; rows and columns beyond S are 0 throughout.
    offs_c = offs_s[:, None] * S + offs_s[None, :]
    mask_c = mask_s[:, None] & mask_s[None, :]
    b = tl.load(base_ptr + 2 * S + offs_c, mask=mask_c, other=0.0)
    offs_p = tl.arange(0, BLOCK_P)[None, :, None, None]
    ptrs = part_ptrs[:, None, None, None] + offs_p * (R + 1) + 2 * S + offs_c[None, None, :, :]
    mask = mask_n[:, None, None, None] & (offs_p < splits) & mask_c[None, None, :, :]
    comb = tl.sum(tl.load(ptrs, mask=mask, other=0.0), axis=1) * rstd[:, :, None]  # [BLOCK_N, S, S]
    comb = tl.where(mask_c[None, :, :], comb * tl.load(scale_ptr + 2) + b[None, :, :], float("-inf"))
    # Rows beyond S have no largest value.
    top = tl.where(mask_s[None, :], tl.max(comb, axis=2), 0.0)
    comb = tl.exp(comb - top[:, :, None])
    comb = comb / tl.where(mask_s[None, :], tl.sum(comb, axis=2), 1.0)[:, :, None]
    comb = tl.where(mask_c[None, :, :], comb + eps, 0.0)
    comb = comb / (tl.sum(comb, axis=1) + eps)[:, None, :]
    for _ in range(iterations - 1):
        comb = comb / (tl.sum(comb, axis=2) + eps)[:, :, None]
        comb = comb / (tl.sum(comb, axis=1) + eps)[:, None, :]
    comb_ptrs = comb_ptr + offs_n[:, None, None] * (S * S) + offs_c[None, :, :]
    tl.store(comb_ptrs, comb, mask=mask_n[:, None, None] & mask_c[None, :, :])


@kernel
@triton.jit(do_not_specialize=["splits", "iterations", "first"])
def _mhc_collapse_kernel(
    x_ptr,
    part_ptr,
    scale_ptr,
    base_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    N,
    n1,
    n2,
    splits,
    first,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    norm_eps,
    eps,
    iterations,
    S: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The first programs, none in the head, make post and comb of BLOCK_N tokens, the others BLOCK_D columns of y."""
    pid = tl.program_id(0)
    if pid < first:
        if R > S:
            _write_shares(
                part_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, pid, N, splits, norm_eps, eps, iterations, S, D, R,
                BLOCK_N, BLOCK_S, BLOCK_P,
            )  # fmt: skip
    else:
        blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
        n = ((pid - first) // blocks).to(tl.int64)
        offs_d = (pid - first) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        x_ptr += row_offset(n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
        x0, x1, x2, x3 = load_streams(x_ptr + offs_d, mask_d, stride_x_s, S)
        offs_p, offs_s = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_S)
        part_ptr += n * splits * (R + 1)
        squares = tl.sum(tl.load(part_ptr + offs_p * (R + 1) + R, mask=offs_p < splits, other=0.0), axis=0)
        rstd = tl.rsqrt(squares / (S * D) + norm_eps)
        mask = (offs_p < splits)[:, None] & (offs_s < S)[None, :]
        m = tl.sum(tl.load(part_ptr + offs_p[:, None] * (R + 1) + offs_s[None, :], mask=mask, other=0.0), axis=0)
        # pre = sigmoid(a_0 m + b) + eps
        b = tl.load(base_ptr + offs_s, mask=offs_s < S, other=0.0)
        pre = tl.sigmoid(m * rstd * tl.load(scale_ptr) + b) + eps
        y = _entry(pre, offs_s, 0) * x0
        if S > 1:
            y += _entry(pre, offs_s, 1) * x1
        if S > 2:
            y += _entry(pre, offs_s, 2) * x2
        if S > 3:
            y += _entry(pre, offs_s, 3) * x3
        tl.store(y_ptr + n * D + offs_d, y.to(y_ptr.dtype.element_ty), mask=mask_d)


@kernel
@triton.jit
def _mhc_post_kernel(
    y_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    n1,
    n2,
    stride_y_0,
    stride_y_1,
    stride_y_2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_x_s,
    S: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    y_ptr += row_offset(n, n1, n2, stride_y_0, stride_y_1, stride_y_2, DIMS)
    x_ptr += row_offset(n, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    y = tl.load(y_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    x0, x1, x2, x3 = load_streams(x_ptr + offs_d, mask_d, stride_x_s, S)
    post_ptr += n * S
    comb_ptr += n * (S * S)
    out_ptr += n * (S * D)
    for k in tl.static_range(S):
        out = mixed(y, x0, x1, x2, x3, post_ptr + k, comb_ptr + k, True, S)
        tl.store(out_ptr + k * D + offs_d, out.to(out_ptr.dtype.element_ty), mask=mask_d)


class StreamTile(NamedTuple):
    """Columns of all streams that a program takes, and its warps."""

    block_d: int
    warps: int


def _stream_candidates(arch: Architecture, D: int, back: bool) -> Iterator[StreamTile]:
    """4 to 16 columns a lane on NVIDIA, to what the rule takes on Intel."""
    most = 16 if arch.name == "nvidia" else stream_tile.rule(arch, D, back).block_d // (32 * 4)
    for block_d in (256, 512, 1024, 2048, 4096):
        for warps in (1, 2, 4, 8):
            if min(4, most) <= block_d // (32 * warps) <= most and block_d <= next_power_of_2(D):
                yield StreamTile(block_d, warps)


@tunable("mhc_streams", _stream_candidates)
def stream_tile(arch: Architecture, D: int, back: bool) -> StreamTile:
    """The tile of `mhc_pre` and `mhc_head`, or, with `back`, of `mhc_post`.

    8 columns a lane, which are 16 bytes of each stream in 16 bits; fewer where registers are.
    """
    a_lane = {"nvidia": 8, "arc-a": 2}.get(arch.name, 4)
    block_d = min(next_power_of_2(D), 128 * a_lane)
    return StreamTile(block_d, max(1, min(4, block_d // (32 * a_lane))))


def _collapse(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    products: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill y, post and comb; in the head, where fn has S rows, y alone."""
    y, post, comb = outputs
    (S, D), R = x.shape[-2:], fn.shape[0]
    sizes, (stride_x,) = row_strides(x.select(-2, 0))  # type: ignore[misc]
    N = sizes[0] * sizes[1] * sizes[2]
    arch = architecture(x.device)
    cut = stream_tile(arch, D, False)
    with on_device_of(x):
        part = _dot(x, fn, sizes, stride_x, arch) if products is None else products
        splits = part.shape[-2]
        block_p = next_power_of_2(splits)
        # The parts of some tokens that are read at a time.
        block_n = max(1, 64 // block_p)
        first = cdiv(N, block_n) if R > S else 0
        _mhc_collapse_kernel[(first + N * cdiv(D, cut.block_d),)](
            x,
            part,
            scale,
            base,
            y,
            post,
            comb,
            N,
            sizes[1],
            sizes[2],
            splits,
            first,
            *stride_x,
            x.stride(-2),
            norm_eps,
            eps,
            iterations,
            S=S,
            D=D,
            R=R,
            DIMS=dims_used(sizes),
            BLOCK_N=block_n,
            BLOCK_S=next_power_of_2(S),
            BLOCK_P=block_p,
            BLOCK_D=cut.block_d,
            num_warps=cut.warps,
        )


@mhc_pre.implement("triton", "xpu", "cuda", refuses=_refuses_pre)
def mhc_pre_triton(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    products: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    *tokens, S, D = x.shape
    y = torch.empty((*tokens, D), dtype=x.dtype, device=x.device)
    post = torch.empty((*tokens, S), dtype=torch.float32, device=x.device)
    comb = torch.empty((*tokens, S, S), dtype=torch.float32, device=x.device)
    if x.numel():
        _collapse(x, fn, scale, base, norm_eps, eps, iterations, products, (y, post, comb))
    return y, post, comb


@mhc_post.implement("triton", "xpu", "cuda", refuses=refuses_post)
def mhc_post_triton(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    S, D = x.shape[-2:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    sizes, (stride_y, stride_x) = row_strides(y, x.select(-2, 0))  # type: ignore[misc]
    block_d, warps = stream_tile(architecture(x.device), D, True)
    with on_device_of(x):
        _mhc_post_kernel[(x.numel() // (S * D), cdiv(D, block_d))](
            y,
            x,
            post,
            comb,
            out,
            sizes[1],
            sizes[2],
            *stride_y,
            *stride_x,
            x.stride(-2),
            S=S,
            D=D,
            DIMS=dims_used(sizes),
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return out


@mhc_head.implement("triton", "xpu", "cuda", refuses=_refuses_head)
def mhc_head_triton(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    products: Tensor | None = None,
) -> Tensor:
    *tokens, _, D = x.shape
    y = torch.empty((*tokens, D), dtype=x.dtype, device=x.device)
    if x.numel():
        _collapse(x, fn, scale, base, norm_eps, eps, 1, products, (y, y, y))
    return y
