"""The activation of a gated feed-forward layer: GeGLU and SwiGLU, with a low-rank adapter's output added on the way.

    g | u = gate_up + adapter,   y = act(g) * u

With a limit c, act(min(g, c)) * min(max(u, -c), c).

Sources: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6; Glorioso et al., "The Zamba2
Suite" (arXiv:2411.15242), section 2, for adapters on a shared layer; for the limit the inference code of DeepSeek-V4,
class Expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.device import architecture
from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels import activations
from xpu_ports.common.kernels.rms_norm import dims_used, refuses_rows, row_offset
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, on_device_of, tl, triton

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


@op
def gated_activation(gate_up: Tensor, adapter: Tensor | None, activation: str, limit: float | None = None) -> Tensor:
    """act(first half) * second half of the last dimension.

    Args:
        gate_up: [..., 2 F], the fused projection's output, or a slice of a wider one: any row strides.
        adapter: [..., 2 F], added to it in fp32; any row strides. None for nothing.
        activation: "gelu" (by the error function), "gelu_tanh" or "silu".
        limit: the first half's upper bound and the bound of both signs of the second, NaN stays; None for no bounds.

    Returns:
        [..., F] in gate_up's dtype, rounded once. No backward of its own.

    Raises:
        ValueError: the last dimension is odd, or the activation is unknown.
    """
    half = half_of(gate_up.shape[-1], activation)
    total = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    if adapter is not None:
        total = total + adapter.to(total.dtype)
    gate, up = total[..., :half], total[..., half:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)


def half_of(width: int, activation: str) -> int:
    """Half of the columns.

    Raises:
        ValueError: they are odd in number, or the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if width % 2:
        raise ValueError(f"the last dimension is {width}, which has no halves")
    return width // 2


def _refuses(gate_up: Tensor, adapter: Tensor | None, activation: str, limit: float | None = None) -> str | None:
    return refuses_rows(gate_up, None) if adapter is None else refuses_rows(gate_up, None, adapter)


@kernel
@triton.jit
def _gated_activation_kernel(
    x_ptr,
    adapter_ptr,
    y_ptr,
    limit,
    n1,
    n2,
    stride_x_0,
    stride_x_1,
    stride_x_2,
    stride_a_0,
    stride_a_1,
    stride_a_2,
    F: tl.constexpr,
    DIMS: tl.constexpr,
    ADAPTER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    tiles: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0)
    row = pid // tiles
    offs = pid % tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = offs < F
    x_ptr += row_offset(row, n1, n2, stride_x_0, stride_x_1, stride_x_2, DIMS)
    gate = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + F + offs, mask=mask, other=0.0).to(tl.float32)
    if ADAPTER:
        adapter_ptr += row_offset(row, n1, n2, stride_a_0, stride_a_1, stride_a_2, DIMS)
        gate += tl.load(adapter_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(adapter_ptr + F + offs, mask=mask, other=0.0).to(tl.float32)
    if LIMIT:
        gate, up = activations.limit_both(gate, up, limit)
    # y = act(g) * u
    if ACTIVATION == "gelu":
        y = activations.gelu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        y = activations.gelu_tanh(gate) * up
    else:
        y = activations.silu(gate) * up
    tl.store(y_ptr + row.to(tl.int64) * F + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@gated_activation.implement("triton", "xpu", "cuda", refuses=_refuses)
def gated_activation_triton(
    gate_up: Tensor, adapter: Tensor | None, activation: str, limit: float | None = None
) -> Tensor:
    half = half_of(gate_up.shape[-1], activation)
    y = torch.empty((*gate_up.shape[:-1], half), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    rows = y.numel() // half
    # 8 elements a lane are 16 bytes a load, and spill on Arc A; a few rows alone are cut finer, for more programs.
    block, warps = (1024, 4) if rows > 16 else (256, 2)
    if architecture(gate_up.device).name == "arc-a":
        warps *= 2
    block = min(block, next_power_of_2(half))
    sizes, strides = row_strides(gate_up, gate_up if adapter is None else adapter)  # type: ignore[misc]
    with on_device_of(gate_up):
        _gated_activation_kernel[(rows * cdiv(half, block),)](
            gate_up,
            gate_up if adapter is None else adapter,
            y,
            0.0 if limit is None else limit,
            sizes[1],
            sizes[2],
            *strides[0],
            *strides[1],
            F=half,
            DIMS=dims_used(sizes),
            ADAPTER=adapter is not None,
            ACTIVATION=activation,
            LIMIT=limit is not None,
            BLOCK_F=block,
            num_warps=warps,
        )
    return y
