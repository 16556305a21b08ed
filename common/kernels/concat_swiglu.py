"""What a parallel block's output projection reads: attention beside the activated MLP, without `torch.cat`.

    y = [x | silu(g) * u]

Sources: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (arXiv:2302.05442), section 2, for
parallel blocks; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels import activations
from xpu_ports.common.kernels.rms_norm import dims_used, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@op
def concat_swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    """Copy one tensor and append silu(first half) * second half of another.

    Args:
        x: [..., D], any row strides.
        gate_up: [..., 2 F] in x's dtype, such as a slice of a wider projection: any row strides.

    Returns:
        [..., D + F], contiguous, the activated part rounded once. No backward of its own.

    Raises:
        ValueError: the last dimension of gate_up is odd.
    """
    half = _half(gate_up)
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    return torch.cat([x, (F.silu(wide[..., :half]) * wide[..., half:]).to(x.dtype)], dim=-1)


def _half(gate_up: Tensor) -> int:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"the last dimension is {gate_up.shape[-1]}, which has no halves")
    return gate_up.shape[-1] // 2


def _refuses(x: Tensor, gate_up: Tensor) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if x.dtype not in _FLOATS or gate_up.dtype != x.dtype:
        return f"dtypes {x.dtype} and {gate_up.dtype} are not one of float16, bfloat16, float32"
    if x.shape[:-1] != gate_up.shape[:-1]:
        return f"the rows of {tuple(x.shape)} and {tuple(gate_up.shape)} differ"
    for t in (x, gate_up):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension has stride {t.stride(-1)}, not 1"
    if row_strides(x, gate_up) is None:
        return "the rows need more than three strides"
    return None


@kernel
@triton.jit
def _concat_swiglu_kernel(
    x_ptr,
    gate_up_ptr,
    y_ptr,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_g_0,
    stride_g_1,
    stride_g_2,
    D: tl.constexpr,
    F: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The first programs of a row copy, the others activate.
    copies: tl.constexpr = (D + BLOCK - 1) // BLOCK
    tiles: tl.constexpr = copies + (F + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    row = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    y_ptr += row * (D + F)
    if tile < copies:
        offs = tile * BLOCK + tl.arange(0, BLOCK)
        mask = offs < D
        x_ptr += row_offset(row, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask), mask=mask)
    else:
        offs = (tile - copies) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < F
        gate_up_ptr += row_offset(row, n1, n2, stride_g_0, stride_g_1, stride_g_2, DIMS)
        gate = tl.load(gate_up_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + F + offs, mask=mask, other=0.0).to(tl.float32)
        # y = silu(g) * u
        y = activations.silu(gate) * up
        tl.store(y_ptr + D + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@concat_swiglu.implement("triton", "xpu", "cuda", refuses=_refuses)
def concat_swiglu_triton(x: Tensor, gate_up: Tensor) -> Tensor:
    D, half = x.shape[-1], _half(gate_up)
    y = torch.empty((*x.shape[:-1], D + half), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = y.numel() // (D + half)
    # 8 elements a lane of gate and up; half of it where registers are few.
    block = min(1024, next_power_of_2(max(D, half)))
    warps = max(1, block // (128 if architecture(x.device).name == "arc-a" else 256))
    sizes, strides = row_strides(x, gate_up)  # type: ignore[misc]
    with on_device_of(x):
        _concat_swiglu_kernel[(rows * (cdiv(D, block) + cdiv(half, block)),)](
            x,
            gate_up,
            y,
            sizes[1],
            sizes[2],
            *strides[0],
            *strides[1],
            D=D,
            F=half,
            DIMS=dims_used(sizes),
            BLOCK=block,
            num_warps=warps,
        )
    return y
