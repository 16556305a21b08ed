"""What the kernels of `ssd_chunk_scan` share: the call, its launch options, and the steps of the recurrence.

Log-decays are kept in base 2, as differences that are at most 0 before they are exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.kernels.activations import softplus
from xpu_ports.common.tritonlib import next_power_of_2, tl, triton

_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Products:
    """How the matrix products are computed."""

    # Operands: "bf16", "tf32" (fp32 with tf32's precision) or "fp32", and Triton's input_precision for them.
    dot: str
    precision: str
    # Operands that x times its weight is split into in the products that reach the final state, an fp32 result.
    terms: int
    # Whether the products of these operands are one product in a loop: Intel's compiler takes several in a row for a
    # chain and lays the warps along their rows alone. Others keep more products under way when they see all.
    rolled: bool = False

    def constants(self) -> dict[str, Any]:
        return {"DOT": self.dot, "PRECISION": self.precision}


@dataclass(frozen=True)
class Tile:
    """Tile and launch options of one kernel. Widths are cut to the power of two that holds what there is."""

    # Tokens, channels of a head, columns of the state.
    t: int
    p: int
    n: int
    warps: int
    stages: int = 1
    registers: int = 128

    def blocks(self, call: Call) -> dict[str, int]:
        """BLOCK_T, BLOCK_P and BLOCK_N for a call; 16 is the least that a product takes."""
        p, n = (max(16, next_power_of_2(size)) for size in (call.x.shape[3], call.B.shape[3]))
        return {"BLOCK_T": self.t, "BLOCK_P": min(self.p, p), "BLOCK_N": min(self.n, n)}

    def options(self, call: Call) -> dict[str, Any]:
        grf = grf_options(self.registers, architecture(call.x.device))
        return {"num_warps": self.warps, "num_stages": self.stages, **grf}


@dataclass(frozen=True)
class Call:
    """The arguments of the op."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    dt_min: float
    cu_seqlens: Tensor | None

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def slots(self, segment: int) -> int:
        """Segments of that many tokens: with cu_seqlens as many as there can be, since the host cannot see it."""
        batch, T = self.x.shape[:2]
        return batch * -(-T // segment) if self.cu_seqlens is None else T // segment + self.sequences

    def empty(self, *shape: int) -> Tensor:
        """An fp32 tensor on the call's device."""
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    def constants(self) -> dict[str, Any]:
        """What every kernel is specialized for."""
        varlen = self.cu_seqlens is not None
        bound = next_power_of_2(self.sequences) if varlen else 1
        return {"H": self.x.shape[2], "P": self.x.shape[3], "N": self.B.shape[3], "VARLEN": varlen, "BLOCK_S": bound}

    def steps(self) -> tuple[Tensor, Tensor, Tensor]:
        """dt, A_log and dt_bias; an argument that is left out is never read, another stands in for it."""
        return self.dt, self.A_log, self.A_log if self.dt_bias is None else self.dt_bias

    def bounds(self) -> Tensor:
        return self.x if self.cu_seqlens is None else self.cu_seqlens

    def start(self) -> tuple[Tensor, tuple[int, ...]]:
        """The initial state and its strides, [B, H, P, N]."""
        state = self.initial_state
        return (self.x, (0, 0, 0, 0)) if state is None else (state, state.stride())


@triton.jit
def locate(
    slot,
    cu_ptr,
    T,
    segment,
    sequences,
    VARLEN: tl.constexpr,
    SEGMENTED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """(sequence, its row in the batch, first token, tokens) of a segment; 0 tokens beyond the last segment.

    Sequences of equal length have equally many segments. With cu_seqlens their number is bounded by the host and
    counted here, so nothing is read back.
    """
    if VARLEN:
        sequence = slot
        index = 0
        if SEGMENTED:
            offs = tl.arange(0, BLOCK_S)
            begins = tl.load(cu_ptr + offs, mask=offs < sequences, other=0)
            ends = tl.load(cu_ptr + 1 + offs, mask=offs < sequences, other=0)
            counts = ((ends - begins + segment - 1) // segment).to(tl.int32)
            sequence = tl.sum((tl.cumsum(counts, 0) <= slot).to(tl.int32), 0)
            index = slot - tl.sum(tl.where(offs < sequence, counts, 0), 0)
        inside = sequence < sequences
        begin = tl.load(cu_ptr + sequence, mask=inside, other=0).to(tl.int32)
        end = tl.load(cu_ptr + sequence + 1, mask=inside, other=0).to(tl.int32)
        row = sequence.to(tl.int64) * 0
    else:
        segments = tl.cdiv(T, segment)
        sequence = slot // segments
        index = slot % segments
        begin = 0
        end = T
        row = sequence.to(tl.int64)
    start = begin + index * segment
    return sequence.to(tl.int64), row, start.to(tl.int64), tl.minimum(end - start, segment)


@triton.jit
def rate_and_bias(h, A_log_ptr, dt_bias_ptr, HAS_BIAS: tl.constexpr):
    """The rate of a head's log-decay in base 2, and what is added to its steps."""
    rate = -tl.exp(tl.load(A_log_ptr + h).to(tl.float32)) * _LOG2_E
    bias = tl.load(dt_bias_ptr + h).to(tl.float32) if HAS_BIAS else 0.0
    return rate, bias


@triton.jit
def load_steps(ptr, stride, first, offs_t, length):
    """dt of the tokens first + offs_t of a segment."""
    at = offs_t + first
    return tl.load(ptr + at.to(tl.int64) * stride, mask=(at >= 0) & (at < length), other=0.0)


@triton.jit
def load_rows(ptr, stride, first, offs_t, offs, length, WIDTH: tl.constexpr):
    """Columns `offs` of the tokens first + offs_t of a segment, 0 outside of it and from column WIDTH on."""
    at = offs_t + first
    mask = (at < length)[:, None] & (offs < WIDTH)[None, :]
    return tl.load(ptr + at.to(tl.int64)[:, None] * stride + offs[None, :], mask=mask, other=0.0)


@triton.jit
def steps_and_decays(raw, mask, bias, rate, dt_min):
    """(dt, g): the step and its log-decay in base 2, both 0 outside the segment. All [BLOCK_T], fp32."""
    dt = softplus(raw.to(tl.float32) + bias)
    # Not tl.maximum, which would turn NaN into a number.
    dt = tl.where(mask, tl.where(dt < dt_min, dt_min, dt), 0.0)
    return dt, dt * rate


@triton.jit
def decay_to_end(g):
    """sum of g[j + 1:] for each j. Summed from the end: as total minus cumsum it would lose what matters, the small."""
    rest = tl.cumsum(g, 0, reverse=True) - g
    return tl.where(rest > 0.0, 0.0, rest)


@triton.jit
def decay_within(scores, g, dt, offs_t, DOT: tl.constexpr):
    """scores[i, j] exp(g[i] - g[j]) dt[j] for j <= i, else 0; g is the log-decay since the tile's start."""
    causal = offs_t[:, None] >= offs_t[None, :]
    if DOT == "fp32":
        return scores * tl.where(causal, tl.exp2(g[:, None] - g[None, :]) * dt[None, :], 0.0)
    # dt as part of the exponent costs an ulp of g and saves its way into the layout of the scores' columns.
    return scores * tl.exp2(tl.where(causal, g[:, None] - (g - tl.log2(dt))[None, :], float("-inf")))


@triton.jit
def _round_tf32(x):
    """fp32 rounded to the 10 mantissa bits that a tf32 product reads; the matrix unit itself would truncate."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, DOT: tl.constexpr):
    """x as an operand of a product."""
    x = x.to(tl.bfloat16) if DOT == "bf16" else x.to(tl.float32)
    return _round_tf32(x) if DOT == "tf32" else x


@triton.jit
def _leading(x, DOT: tl.constexpr):
    """(x as an operand, what that leaves of x)."""
    part = operand(x, DOT)
    if DOT == "bf16":
        # Intel's compiler takes a conversion to 16 bits and back for nothing; it does not see through a bitcast.
        part = part.to(tl.uint16, bitcast=True).to(tl.bfloat16, bitcast=True)
    return part, x - part.to(tl.float32)


@triton.jit
def add_outer(
    state, x, weight, B, TERMS: tl.constexpr, ROLLED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):
    """state + sum_t weight[t] B[t] x[t]^T, [N, P], the products weight x split into TERMS operands."""
    rest = x.to(tl.float32) * weight[:, None]
    B = tl.trans(B)
    if ROLLED:
        for _ in range(TERMS):
            part, rest = _leading(rest, DOT)
            state = tl.dot(B, part, state, input_precision=PRECISION)
    else:
        # A sum of its own: the matrix units of NVIDIA cut off what is small beside the accumulator, at every step.
        added = tl.zeros(state.shape, dtype=tl.float32)
        for _ in tl.static_range(TERMS):
            part, rest = _leading(rest, DOT)
            added = tl.dot(B, part, added, input_precision=PRECISION)
        state += added
    return state
