"""The Triton implementation of `chunk_kda`: which calls it takes, and how each device runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.kda import chunk_kda
from xpu_ports.common.kernels.kda.parts import FLOATS, Call, Options, Products, refuses_tokens
from xpu_ports.common.kernels.kda.scores import chunks
from xpu_ports.common.kernels.kda.walk import walk
from xpu_ports.common.tritonlib import on_device_of

# Every program reads all of cu_seqlens.
MOST_SEQUENCES = 8192


@dataclass(frozen=True)
class Plan:
    """How a call runs."""

    products: Products
    prepare: Options
    scores: Options
    solve: Options
    walk: Options
    # For a kernel of their own; None where the walk makes the outputs as well.
    outputs: Options | None = None

    def launch(self, call: Call, o: Tensor, final: Tensor) -> None:
        """Write o and the final state."""
        made = chunks(call, self.products, self.prepare, self.scores, self.solve)
        walk(call, self.products, made, self.walk, self.outputs, o, final)


def plan(dtype: torch.dtype, device: Architecture) -> Plan | None:
    """How tensors of a dtype run on an architecture; None where they do not."""
    if device.name in ("max", "xe2", "arc-a"):
        return _intel(dtype) if device.matrix_units else None
    # Not fp16 operands for fp16: the state may leave its range where o does not.
    products = {
        torch.bfloat16: Products("bf16", "ieee", "tf32x3"),
        torch.float16: Products("tf32", "tf32", "tf32x3"),
        torch.float32: Products("fp32", "tf32x3", "tf32x3"),
    }[dtype]
    if dtype == torch.bfloat16:
        return Plan(products, Options(16), Options(2, k=32), Options(1), Options(4, 2, v=32))
    return Plan(products, Options(16), Options(4, k=32), Options(1), Options(8, 1, v=16))


def _intel(dtype: torch.dtype) -> Plan:
    """Programs without chains of large products: more warps, outputs apart from the state."""
    products = {
        torch.bfloat16: Products("bf16", "ieee", "ieee"),
        torch.float16: Products("tf32", "tf32", "ieee"),
        torch.float32: Products("fp32", "ieee", "ieee"),
    }[dtype]
    return Plan(
        products,
        prepare=Options(16),
        scores=Options(4, registers=256, k=16),
        solve=Options(1, registers=256),
        walk=Options(16, registers=256, v=16),
        outputs=Options(8, registers=256, k=32, v=64),
    )


def _refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> str | None:
    why = refuses_tokens(q, k, v, g, beta)
    if why is not None:
        return why
    if not architecture(q.device).matrix_units:
        return "no matrix units, without which products with a state of this size spill registers"
    if initial_state is not None:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        expected = (sequences, q.shape[2], q.shape[3], v.shape[3])
        if initial_state.shape != expected:
            return f"initial_state has shape {tuple(initial_state.shape)}, expected {expected}"
        if initial_state.dtype not in FLOATS:
            return f"initial_state has dtype {initial_state.dtype}, not one of float16, bfloat16, float32"
    if cu_seqlens is None:
        return None
    if q.shape[0] != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
        return f"cu_seqlens is {cu_seqlens.dtype} at batch {q.shape[0]}, expected contiguous int32 at batch 1"
    if cu_seqlens.shape[0] - 1 > MOST_SEQUENCES:
        return f"{cu_seqlens.shape[0] - 1} sequences, more than {MOST_SEQUENCES}"
    return None


@chunk_kda.implement("triton", "xpu", "cuda", refuses=_refuses)
def chunk_kda_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float = 1.0,
    l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    call = Call(q, k, v, g, beta, initial_state, scale, l2norm, cu_seqlens)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    final = torch.empty((call.sequences, *q.shape[2:], v.shape[3]), dtype=torch.float32, device=q.device)
    how = plan(q.dtype, architecture(q.device))
    assert how is not None, "refused"
    if final.numel():
        with on_device_of(q):
            how.launch(call, o, final)
    return o, final
