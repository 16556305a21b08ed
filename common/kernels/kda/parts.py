"""What the kernels of Kimi Delta Attention share: what they take, the call, and launch options.

Within the chunked kernels log-decays are kept in base 2, as differences that are at most 0 before they are
exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.kernels.kda import CHUNK, L2_EPS
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, next_power_of_2, tl, triton

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Programs hold all channels of the keys.
LARGEST_HEAD = 256
_L2_EPS = tl.constexpr(L2_EPS)


def refuses_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> str | None:
    """Why no kernel takes such tokens, or None."""
    if not AVAILABLE:
        return WHY_NOT
    B, T, H, K = q.shape
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dtype not in FLOATS or t.dtype != q.dtype:
            return f"{name} has dtype {t.dtype}, where q, k and v share one of float16, bfloat16, float32"
    for name, t in (("g", g), ("beta", beta)):
        if t.dtype not in FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    for name, t in (("q", q), ("k", k), ("v", v), ("g", g)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    for name, t, shape in (("k", k, q.shape), ("g", g, q.shape), ("beta", beta, (B, T, H))):
        if t.shape != shape:
            return f"{name} has shape {tuple(t.shape)}, expected {tuple(shape)}"
    if v.shape[:3] != (B, T, H):
        return f"v has shape {tuple(v.shape)}, expected ({B}, {T}, {H}, V)"
    if K > LARGEST_HEAD:
        return f"heads of {K} channels, more than {LARGEST_HEAD}"
    return None


@dataclass(frozen=True)
class Options:
    """Launch options of one kernel, with the width of its blocks where it has a choice."""

    warps: int
    stages: int = 1
    # Registers of a thread on devices with a choice.
    registers: int = 128
    # Channels of the keys and of the values in one step.
    k: int = LARGEST_HEAD
    v: int = 32
    # Tokens in one step.
    t: int = 32

    def block_k(self, K: int) -> int:
        return min(self.k, max(16, next_power_of_2(K)))

    def block_v(self, V: int) -> int:
        return min(self.v, max(16, next_power_of_2(V)))

    def launch(self, device: torch.device) -> dict[str, Any]:
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            **grf_options(self.registers, architecture(device)),
        }


@dataclass(frozen=True)
class Products:
    """How the matrix products are computed."""

    # Operands: "bf16", "tf32" (fp32 with tf32's precision) or "fp32", and Triton's input_precision for them.
    dot: str
    precision: str
    # input_precision for the products of 16x16 blocks in fp32 that invert the systems of equations.
    solve: str

    def constants(self) -> dict[str, Any]:
        return {"DOT": self.dot, "PRECISION": self.precision}

    @property
    def dtype(self) -> torch.dtype:
        """What operands are kept in between kernels."""
        return torch.bfloat16 if self.dot == "bf16" else torch.float32


@dataclass(frozen=True)
class Call:
    """The arguments of `chunk_kda`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    scale: float
    l2norm: bool
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def slots(self) -> int:
        """Chunks: with cu_seqlens as many as there can be, since the host cannot see it."""
        B, T = self.q.shape[:2]
        return B * -(-T // CHUNK) if self.cu_seqlens is None else T // CHUNK + self.sequences

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[slots, H, *shape] on the call's device."""
        return torch.empty((self.slots, self.q.shape[2], *shape), dtype=dtype, device=self.q.device)

    def constants(self) -> dict[str, Any]:
        """What every kernel is specialized for."""
        varlen = self.cu_seqlens is not None
        bound = next_power_of_2(self.sequences) if varlen else 1
        return {"H": self.q.shape[2], "K": self.q.shape[3], "VARLEN": varlen, "CHUNK": CHUNK, "BLOCK_S": bound}

    def start(self) -> tuple[Tensor, tuple[int, ...]]:
        """The initial state, or what stands in for it and is never read, and its strides."""
        state = self.initial_state
        return (self.q, (0, 0, 0, 0)) if state is None else (state, state.stride())

    def bounds(self) -> Tensor:
        """cu_seqlens, or what stands in for it and is never read."""
        return self.q if self.cu_seqlens is None else self.cu_seqlens


@triton.jit
def inverse_norm(x, AXIS: tl.constexpr):
    """What x is multiplied by to have norm 1 along an axis."""
    return tl.rsqrt(tl.sum(x * x, AXIS) + _L2_EPS)


@triton.jit
def sequence_at(sequence, cu_ptr, T, VARLEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_S: tl.constexpr):
    """(sequence, its row in the batch, first token, tokens, first chunk)."""
    index = sequence.to(tl.int64)
    if VARLEN:
        offs_s = tl.arange(0, BLOCK_S)
        begins = tl.load(cu_ptr + offs_s, mask=offs_s < sequence, other=0)
        ends = tl.load(cu_ptr + 1 + offs_s, mask=offs_s < sequence, other=0)
        slot = tl.sum(((ends - begins + CHUNK - 1) // CHUNK).to(tl.int32), 0)
        begin = tl.load(cu_ptr + sequence).to(tl.int32)
        end = tl.load(cu_ptr + sequence + 1).to(tl.int32)
        row = index * 0
    else:
        slot = sequence * tl.cdiv(T, CHUNK)
        begin = 0
        end = T
        row = index
    return index, row, begin, end - begin, slot
