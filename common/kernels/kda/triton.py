"""The Triton implementation of `chunk_kda`: which calls it takes, and how each device runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.kernels.kda import chunk_kda
from xpu_ports.common.kernels.kda.blocks import Blocks
from xpu_ports.common.kernels.kda.parts import FLOATS, Call, Options, Products, refuses_tokens
from xpu_ports.common.kernels.kda.scores import chunks
from xpu_ports.common.kernels.kda.walk import Walk
from xpu_ports.common.tritonlib import on_device_of

# Every program reads all of cu_seqlens.
MOST_SEQUENCES = 8192
# Channels of the keys up to which shared memory holds what a chunk of a walk loads, twice.
_WIDEST_WALK = 128


@dataclass(frozen=True)
class Plan:
    """How a call runs."""

    products: Products
    prepare: Options
    scores: Options
    solve: Options
    # The state from chunk to chunk, and the outputs.
    rest: Walk | Blocks

    def launch(self, call: Call, o: Tensor, final: Tensor) -> None:
        """Write o and the final state."""
        made = chunks(call, self.products, self.prepare, self.scores, self.solve)
        self.rest.launch(call, self.products, made, o, final)


def plan(dtype: torch.dtype, K: int, device: Architecture) -> Plan:
    """How tensors of a dtype with K channels a head run on an architecture."""
    if device.name in ("max", "xe2", "arc-a"):
        return _intel(dtype, device.matrix_units)
    # At most 2 warps, or 32 rows, a product. Beyond that Hopper's compiler takes warp group instructions, and programs
    # with several of these access memory that is not theirs, which fails now and then: seen with Triton 3.6, and in
    # triton-lang/triton#10486.
    if dtype == torch.bfloat16 and K <= _WIDEST_WALK:
        # M is rounded to bf16, less than what tf32 keeps.
        products = Products("bf16", "ieee", "tf32")
        return Plan(products, Options(4), Options(1, k=32, t=16), Options(1), Walk(Options(2, 2, v=16)))
    # Not fp16 operands for fp16: the state may leave its range where o does not.
    products = {
        torch.bfloat16: Products("bf16", "ieee", "tf32x3"),
        torch.float16: Products("tf32", "tf32", "tf32x3"),
        torch.float32: Products("fp32", "tf32x3", "tf32x3"),
    }[dtype]
    tile = Options(4, k=32, v=64, t=32)
    return Plan(products, Options(16), Options(4, k=32, t=16), Options(1), Blocks(tile, Options(2, k=32, v=16), tile))


def _intel(dtype: torch.dtype, matrix_units: bool) -> Plan:
    """Tiles of which Intel's compiler spills no register at the models' sizes."""
    products = {
        torch.bfloat16: Products("bf16", "ieee", "ieee"),
        torch.float16: Products("tf32", "tf32", "ieee"),
        torch.float32: Products("fp32", "ieee", "ieee"),
    }[dtype if matrix_units else torch.float32]
    slices = 16 if products.dot == "fp32" else 32
    return Plan(
        products,
        prepare=Options(16),
        scores=Options(4 if matrix_units else 8, registers=256, k=16, t=16),
        solve=Options(1, registers=256),
        rest=Blocks(
            weigh=Options(8, registers=256, k=32, v=64, t=32),
            steps=Options(8, registers=256, k=slices, v=16),
            outputs=Options(8 if matrix_units else 16, registers=256, k=32, v=64, t=32),
        ),
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
    if final.numel():
        with on_device_of(q):
            plan(q.dtype, q.shape[3], architecture(q.device)).launch(call, o, final)
    return o, final
