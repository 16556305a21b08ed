"""One kernel for the linear layers of a few rows: each program reads some rows of a weight once, from end to end.

Nothing is split along K, so there is nothing to add up afterwards. A norm costs no pass of its own: its factor is one
number a row, so that the products and the sum of squares run side by side and the factor is applied at the end,
    rstd * sum_k(w[n, k] * (s[k] * norm_weight[k])).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.activations import gelu, gelu_tanh, silu
from xpu_ports.common.kernels.gated_mlp import half_of
from xpu_ports.common.kernels.gated_rms_norm import check_arguments
from xpu_ports.common.kernels.rms_norm import dims_used, refuses_rows, row_offset
from xpu_ports.common.kernels.rounding import rounded
from xpu_ports.common.kernels.skinny_linear import (
    MOST_LAYERS,
    adapted_linears,
    check_adapter,
    check_layers,
    gated_norm_linear,
    linear,
    norm_glu,
    norm_linear,
)
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import (
    AVAILABLE,
    WHY_NOT,
    Fixed,
    cdiv,
    kernel,
    next_power_of_2,
    on_device_of,
    tl,
    triton,
)
from xpu_ports.common.tuning import tunable

# From here on a matrix product of the vendor's library is faster; on NVIDIA of a large weight from fewer rows on, since
# matrix units multiply it with all rows at once.
LARGEST_M = 8
LARGEST_M_OF_LARGE = 4
LARGE_BYTES = 1 << 24


def refuses_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    return _refuses_input(x) or _refuses_layer(x, weight, bias) or _refuses_large(x, weight)


def _refuses_large(x: Tensor, weight: Tensor) -> str | None:
    rows, size = x.numel() // x.shape[-1], weight.numel() * weight.element_size()
    if rows <= LARGEST_M_OF_LARGE or size < LARGE_BYTES or x.element_size() > 2:
        return None
    if architecture(x.device).name != "nvidia":
        return None
    return f"{rows} rows and a weight of {size >> 20} MB, more than {LARGEST_M_OF_LARGE} rows beside so large a one"


def _refuses_norm(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> str | None:
    others = () if residual is None else (residual,)
    return _refuses_input(x, norm_weight, *others) or _refuses_layer(x, weight, bias)


def _refuses_gated_norm(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    group_size: int | None = None,
    eps: float = 1e-5,
) -> str | None:
    return _refuses_input(y, norm_weight, z) or _refuses_layer(y, weight, bias)


def _refuses_adapted(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> str | None:
    if len(weights) > MOST_LAYERS:
        return f"{len(weights)} layers, more than {MOST_LAYERS}"
    refusal = _refuses_input(x)
    for weight in weights:
        refusal = refusal or _refuses_matrix(weight, x.dtype, weight.shape[0], x.shape[-1])
    for weight, up, down in zip(weights, b, a, strict=False):
        # One rank for all.
        refusal = refusal or _refuses_matrix(up, x.dtype, weight.shape[0], a[0].shape[0])
        refusal = refusal or _refuses_matrix(down, x.dtype, a[0].shape[0], x.shape[-1])
    return refusal


def _refuses_glu(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    activation: str,
    eps: float = 1e-6,
) -> str | None:
    refusal = _refuses_input(x, norm_weight) or _refuses_layer(x, weight, None)
    if refusal is None and a is not None and b is not None:
        refusal = _refuses_matrix(b, x.dtype, weight.shape[0], a.shape[0])
        refusal = refusal or _refuses_matrix(a, x.dtype, a.shape[0], x.shape[-1])
    return refusal


def _refuses_input(x: Tensor, norm_weight: Tensor | None = None, *others: Tensor) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if x.dim() == 0 or x.shape[-1] == 0:
        return "there are no columns"
    if x.numel() // x.shape[-1] > LARGEST_M:
        return f"{x.numel() // x.shape[-1]} rows, more than {LARGEST_M}"
    return refuses_rows(x, norm_weight, *others)


def _refuses_layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    N = weight.shape[0]
    if bias is not None and (bias.shape != (N,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        return f"bias has shape {tuple(bias.shape)} and dtype {bias.dtype}, expected ({N},), contiguous, {x.dtype}"
    return _refuses_matrix(weight, x.dtype, N, x.shape[-1])


def _refuses_matrix(weight: Tensor, dtype: torch.dtype, N: int, K: int) -> str | None:
    if weight.shape != (N, K):
        return f"a weight has shape {tuple(weight.shape)}, expected {(N, K)}"
    if weight.dtype != dtype:
        return f"a weight has dtype {weight.dtype}, the input {dtype}"
    if weight.stride(1) != 1 and K > 1:
        return f"the last dimension of a weight has stride {weight.stride(1)}, not 1"
    return None


@triton.jit
def in_lane_sum(x, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """[M, N, BLOCK_K] -> [M, N, BLOCK_K / VECTOR]: what one load gives a lane is added up within the lane."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], BLOCK_K // VECTOR, VECTOR)), axis=3)


@triton.jit
def _gated(y, GLU: tl.constexpr):
    """act(g) * u of neighbours g and u: [M, N] -> [M, N / 2]."""
    pairs = tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2))
    is_gate = (tl.arange(0, 2) == 0)[None, None, :]
    gate = tl.sum(tl.where(is_gate, pairs, 0.0), axis=2)
    up = tl.sum(tl.where(is_gate, 0.0, pairs), axis=2)
    if GLU == "gelu":
        gate = gelu(gate)
    elif GLU == "gelu_tanh":
        gate = gelu_tanh(gate)
    else:
        gate = silu(gate)
    return gate * up


@kernel
@triton.jit
def _skinny_linear_kernel(
    x_ptr,
    other_ptr,
    norm_weight_ptr,
    total_ptr,
    w0_ptr,
    w1_ptr,
    w2_ptr,
    up0_ptr,
    up1_ptr,
    up2_ptr,
    down_ptr,
    bias_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    rows,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_o_0,
    stride_o_1,
    stride_o_2,
    N0,
    N1,
    N2,
    stride_w0,
    stride_w1,
    stride_w2,
    stride_up0,
    stride_up1,
    stride_up2,
    eps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DIMS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    LAYERS: tl.constexpr,
    GLU: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_N outputs of one of up to three layers for all rows; GROUPS x GROUP is K.

    With GLU, an activation's name, those are BLOCK_N / 2 of the first half, each beside its own of the second.
    """
    pid = tl.program_id(0)
    first = pid == 0
    layer, N = 0, N0
    w_ptr, up_ptr, y_ptr, stride_w, stride_up = w0_ptr, up0_ptr, y0_ptr, stride_w0, stride_up0
    if LAYERS > 1:
        tiles = tl.cdiv(N0, BLOCK_N)
        if pid >= tiles:
            pid -= tiles
            layer, N = 1, N1
            w_ptr, up_ptr, y_ptr, stride_w, stride_up = w1_ptr, up1_ptr, y1_ptr, stride_w1, stride_up1
            if LAYERS > 2:
                tiles = tl.cdiv(N1, BLOCK_N)
                if pid >= tiles:
                    pid -= tiles
                    layer, N = 2, N2
                    w_ptr, up_ptr, y_ptr, stride_w, stride_up = w2_ptr, up2_ptr, y2_ptr, stride_w2, stride_up2
    # Dimensions are [M, N, K].
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    if GLU != "":
        offs_n = offs_n // 2 + offs_n % 2 * (N // 2)
        # Past the first half are only rows of blocks that reach beyond it.
        mask_n = (pid * BLOCK_N + tl.arange(0, BLOCK_N) < N)[None, :, None]
    else:
        mask_n = (offs_n < N)[None, :, None]
    offs_k = tl.arange(0, BLOCK_K)[None, None, :]
    mask_m = (offs_m < rows)[:, None, None]
    x_ptrs = x_ptr + row_offset(offs_m, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)[:, None, None]
    other_ptrs = other_ptr + row_offset(offs_m, n1, n2, stride_o_0, stride_o_1, stride_o_2, DIMS)[:, None, None]
    w_ptrs = w_ptr + (offs_n.to(tl.int64) * stride_w)[None, :, None]
    if R > 0:
        offs_r = tl.arange(0, BLOCK_R)[None, None, :]
        up_ptrs = up_ptr + (offs_n.to(tl.int64) * stride_up)[None, :, None] + offs_r
        down_ptrs = down_ptr + ((layer * rows + offs_m) * R)[:, None, None] + offs_r
        up = tl.load(up_ptrs, mask=mask_n & (offs_r < R), other=0.0)
        down = tl.load(down_ptrs, mask=mask_m & (offs_r < R), other=0.0)

    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K // VECTOR), dtype=tl.float32)
    for g in range(GROUPS):
        part = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K // VECTOR), dtype=tl.float32)
        squares = tl.zeros((BLOCK_M, 1, BLOCK_K // VECTOR), dtype=tl.float32)
        for k in tl.range(0, GROUP, BLOCK_K, num_stages=STAGES):
            mask_k = k + offs_k < GROUP
            at = g * GROUP + k + offs_k
            # The weights first: nothing else has to come from memory.
            w = tl.load(w_ptrs + at, mask=mask_n & mask_k, other=0.0).to(tl.float32)
            x = tl.load(x_ptrs + at, mask=mask_m & mask_k, other=0.0).to(tl.float32)
            if ADD:
                other = tl.load(other_ptrs + at, mask=mask_m & mask_k, other=0.0).to(tl.float32)
                total = rounded(x + other, total_ptr)
                if first:
                    total_ptrs = total_ptr + (offs_m * (GROUPS * GROUP))[:, None, None] + at
                    tl.store(total_ptrs, total, mask=mask_m & mask_k)
                x = total.to(tl.float32)
            if GATE:
                x *= silu(tl.load(other_ptrs + at, mask=mask_m & mask_k, other=0.0).to(tl.float32))
            if NORM:
                squares += in_lane_sum(x * x, BLOCK_K, VECTOR)
                if NORM_WEIGHT:
                    x *= tl.load(norm_weight_ptr + at, mask=mask_k, other=0.0).to(tl.float32)
            part += in_lane_sum(w * x, BLOCK_K, VECTOR)
        if NORM:
            part *= tl.rsqrt(tl.sum(squares, axis=2) / GROUP + eps)[:, :, None]
        acc += part
    y = tl.sum(acc, axis=2)
    if R > 0:
        y += tl.sum(up.to(tl.float32) * down, axis=2)
    if BIAS:
        y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    if GLU != "":
        y = _gated(y, GLU)
        N = N // 2
        offs_n = pid * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < rows)[:, None] & (offs_n < N)[None, :])


@dataclass(frozen=True)
class Tile:
    """How a layer is cut: outputs and columns that a program takes at a time, its warps, loads in flight."""

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    # Registers a thread, where that can be chosen.
    registers: int = 128

    def vector(self, itemsize: int, lanes: int) -> int:
        """Columns that one load gives a lane: 16 bytes, or less where there is less for it."""
        return max(1, min(16 // itemsize, self.block_k // (self.warps * lanes)))


# Outputs of a program, columns of a lane and registers by M, on Intel GPUs: about the largest that do not spill.
_XE = {1: (4, 4, 128), 2: (2, 4, 128), 4: (4, 2, 256), 8: (2, 2, 256)}
_XE_HPG = {1: (2, 4, 128), 2: (4, 2, 256), 4: (2, 2, 256), 8: (1, 1, 256)}


def _fitted(arch: Architecture, K: int, vector: int, block_n: int, block_k: int, warps: int, registers: int) -> Tile:
    """A tile with no more columns than there are, and at least one load of `vector` columns for each lane."""
    columns = max(vector, next_power_of_2(K))
    warps = max(1, min(warps, columns // (arch.lanes * vector)))
    return Tile(block_n, min(columns, max(block_k, warps * arch.lanes * vector)), warps, registers=registers)


def candidates(arch: Architecture, M: int, N: int, K: int, itemsize: int, fused: str = "") -> Iterator[Tile]:
    """One or two loads a lane on NVIDIA, with at most 256 products; on Intel up to what is known not to spill."""
    vector, registers = 16 // itemsize, 128
    if arch.name == "nvidia":
        most_n = max(1, min(4, 256 // (vector * M)))
        loads: tuple[int, ...] = (1, 2)
    else:
        most_n, columns, registers = (_XE_HPG if arch.name == "arc-a" else _XE)[M]
        vector, loads = min(vector, columns), (1,)
    for log_n in range(most_n.bit_length()):
        for load in loads:
            for warps in (2, 4, 8):
                if load * vector * M << log_n <= 256:
                    width = warps * arch.lanes * vector * load
                    yield _fitted(arch, K, vector, 1 << log_n, width, warps, registers)


@tunable("skinny_linear", candidates)
def tile(arch: Architecture, M: int, N: int, K: int, itemsize: int, fused: str = "") -> Tile:
    """The tile of a call: N is of all its layers, M a power of two, K the columns of one group.

    A program's lanes stand along K, up to 16 bytes each; whatever stands along N and M is held by every lane. NVIDIA's
    tiles are those that measured best for the layers of a 1.2B model on an H200. `fused` says what comes with the
    product, as `_fused` names it: a table may tell these kernels apart.
    """
    vector, registers = 16 // itemsize, 128
    if arch.name == "nvidia":
        if N <= 1024:
            block_n, block_k, warps = 1, 2048, 8
        elif M == 1:
            block_n, block_k, warps = 2, 1024 if N >= 12000 else 2048, 4
        elif M == 2:
            block_n, block_k, warps = 4, 1024 if N >= 12000 else 2048, 4
        else:
            block_n, block_k, warps = (4, 512, 2) if N >= 12000 else (4, 1024, 4)
    else:
        block_n, columns, registers = (_XE_HPG if arch.name == "arc-a" else _XE)[M]
        if N <= 1024:
            block_n = 1
        vector, warps = min(vector, columns), 4
        block_k = warps * arch.lanes * vector
    return _fitted(arch, K, vector, block_n, block_k, warps, registers)


def _fused(norm: bool, adds: bool, gates: bool, low_rank: bool) -> str:
    """What comes with a product, in a word; "" where nothing does."""
    if norm:
        return "add_norm" if adds else "gated_norm" if gates else "norm"
    return "low_rank" if low_rank else ""


def launch(
    x: Tensor,
    weights: list[Tensor],
    outputs: list[Tensor],
    bias: Tensor | None = None,
    other: Tensor | None = None,
    norm_weight: Tensor | None = None,
    total: Tensor | None = None,
    low_rank: tuple[Tensor, list[Tensor]] | None = None,
    norm: bool = False,
    group_size: int | None = None,
    eps: float = 0.0,
    glu: str = "",
) -> None:
    """Fill outputs[i], contiguous [rows, N_i], in any floating dtype.

    Args:
        x, weights, bias, norm_weight, group_size, eps: the ops'.
        other: what x is added to where there is `total`, else its gate; None for neither.
        total: where the sum goes.
        low_rank: (x A_i^T for all layers [LAYERS, rows, R] in fp32, B_i); None for no adapters.
        norm: normalize.
        glu: the activation of a gated layer, whose two halves are the one weight's; "" for none.
    """
    K = x.shape[-1]
    rows, outputs_of = x.numel() // K, tuple(w.shape[0] for w in weights)
    if rows == 0 or (not any(outputs_of) and total is None):
        return
    down, ups = (x, weights) if low_rank is None else low_rank
    sizes, (stride_x, stride_o) = row_strides(x, x if other is None else other)  # type: ignore[misc]
    adds = total is not None
    programs, launch = _plan(
        architecture(x.device),
        rows,
        outputs_of,
        K,
        group_size or K,
        0 if low_rank is None else down.shape[-1],
        x.element_size(),
        dims_used(sizes),
        (norm, adds, other is not None and not adds, norm_weight is not None, bias is not None),
        glu,
    )
    last = MOST_LAYERS - len(weights)
    weights, ups, outputs = ([*ts, *ts[-1:] * last] for ts in (weights, ups, outputs))
    with on_device_of(x):
        launch(
            (programs,),
            x,
            x if other is None else other,
            x if norm_weight is None else norm_weight,
            x if total is None else total,
            *weights,
            *ups,
            down,
            x if bias is None else bias,
            *outputs,
            rows,
            sizes[1],
            sizes[2],
            *stride_x,
            *stride_o,
            *outputs_of,
            *outputs_of[-1:] * last,
            *[w.stride(0) for w in weights],
            *[up.stride(0) for up in ups],
            eps,
        )


@functools.cache
def _plan(
    arch: Architecture,
    rows: int,
    outputs: tuple[int, ...],
    K: int,
    group: int,
    R: int,
    itemsize: int,
    dims: int,
    parts: tuple[bool, ...],
    glu: str,
) -> tuple[int, Fixed]:
    """Programs of a launch and the kernel with its constants, kept: a model's layers come in few sizes.

    Args:
        outputs: of each layer.
        group: columns of a group of the norm.
        R: the adapters' rank, 0 for none.
        dims: leading dimensions with a stride of their own.
        parts: whether it normalizes, adds, gates, has a norm's weight and a bias.
        glu: the activation behind it, or "".
    """
    norm, adds, gates, norm_weight, bias = parts
    block_m = next_power_of_2(rows)
    cut = tile(arch, block_m, sum(outputs), group, itemsize, _fused(norm, adds, gates, R > 0))
    # A gated layer's outputs come in pairs.
    block_n = max(2, cut.block_n) if glu else cut.block_n
    fixed = _skinny_linear_kernel.fix(
        GROUP=group,
        GROUPS=K // group,
        DIMS=dims,
        NORM=norm,
        ADD=adds,
        GATE=gates,
        NORM_WEIGHT=norm_weight,
        BIAS=bias,
        LAYERS=len(outputs),
        GLU=glu,
        R=R,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=cut.block_k,
        BLOCK_R=next_power_of_2(R),
        VECTOR=cut.vector(itemsize, arch.lanes),
        STAGES=cut.stages,
        num_warps=cut.warps,
        **grf_options(cut.registers, arch),
    )
    # At least one, which writes the sum.
    return max(1, sum(cdiv(n, block_n) for n in outputs)), fixed


tile.dependents.append(_plan.cache_clear)


def _output(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


@linear.implement("triton", "xpu", "cuda", refuses=refuses_linear)
def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _output(x, weight)
    launch(x, [weight], [y], bias)
    return y


@norm_linear.implement("triton", "xpu", "cuda", refuses=_refuses_norm)
def norm_linear_triton(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    y = _output(x, weight)
    total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    launch(x, [weight], [y], bias, residual, norm_weight, total, norm=True, eps=eps)
    return y if total is None else (y, total)


@gated_norm_linear.implement("triton", "xpu", "cuda", refuses=_refuses_gated_norm)
def gated_norm_linear_triton(
    y: Tensor,
    z: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    group_size: int | None = None,
    eps: float = 1e-5,
) -> Tensor:
    group_size = check_arguments(y.shape[-1], group_size, "silu")
    out = _output(y, weight)
    launch(y, [weight], [out], bias, z, norm_weight, norm=True, group_size=group_size, eps=eps)
    return out


@adapted_linears.implement("triton", "xpu", "cuda", refuses=_refuses_adapted)
def adapted_linears_triton(x: Tensor, weights: list[Tensor], a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    check_layers(weights, a, b)
    outputs = [_output(x, weight) for weight in weights]
    low_rank = None
    if a:
        rows = x.numel() // x.shape[-1]
        down = torch.empty((len(a), rows, a[0].shape[0]), dtype=torch.float32, device=x.device)
        launch(x, a, list(down.unbind()))
        low_rank = (down, b)
    launch(x, weights, outputs, low_rank=low_rank)
    return outputs


@norm_glu.implement("triton", "xpu", "cuda", refuses=_refuses_glu)
def norm_glu_triton(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    activation: str,
    eps: float = 1e-6,
) -> Tensor:
    half = half_of(weight.shape[0], activation)
    downs, ups = check_adapter(a, b)
    y = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    low_rank = None
    if downs:
        rows = x.numel() // x.shape[-1]
        down = torch.empty((1, rows, downs[0].shape[0]), dtype=torch.float32, device=x.device)
        launch(x, downs, list(down.unbind()), norm_weight=norm_weight, norm=True, eps=eps)
        low_rank = (down, ups)
    launch(x, [weight], [y], norm_weight=norm_weight, low_rank=low_rank, norm=True, eps=eps, glu=activation)
    return y
