"""Triton kernels of `ssd_chunk_scan`.

A program owns the state of one head over a segment of one sequence and walks the segment chunk by chunk, the state in
registers: states at chunk boundaries never reach memory. Where batch times heads fill the device, a segment is a
whole sequence and one launch does everything. Where they do not, sequences are cut into a few segments:

    1. what each segment adds to the state, and its decay (a product over all its tokens, no chunks),
    2. the state at each segment's start, one after the other: a few megabytes,
    3. the scan of every segment from its start state.

Log-decays are kept in base 2, as differences that are at most 0 before they are exponentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, next_power_of_2, on_device_of, tl, triton

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# The state of one head and BLOCK_P channels stays in registers.
LARGEST_N = 256
# Every program of a segmented launch reads all of cu_seqlens.
MOST_SEQUENCES = 8192
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in fp32, accurate where exp(x) is small; x itself above 20, as in torch."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log1p by Kahan: the rounding error of u cancels in log(u) / (u - 1).
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _steps(raw, mask, bias, rate, dt_min):
    """(dt, g): the step and its log-decay in base 2, both 0 outside the segment. All [BLOCK_T], fp32."""
    dt = tl.where(mask, tl.maximum(softplus(raw + bias), dt_min), 0.0)
    return dt, dt * rate


@triton.jit
def _decay_to_end(g):
    """sum of g[j + 1:] for each j. Summed from the end: as total minus cumsum it would lose what matters, the small."""
    return tl.minimum(tl.cumsum(g, 0, reverse=True) - g, 0.0)


@triton.jit
def _round_tf32(x):
    """fp32 rounded to the 10 mantissa bits that a tf32 product reads; the matrix unit itself would truncate."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def _operand(x, DOT: tl.constexpr):
    """x as an operand of a product: DOT is "bf16", "tf32" (fp32 with tf32's precision) or "fp32"."""
    x = x.to(tl.bfloat16) if DOT == "bf16" else x.to(tl.float32)
    return _round_tf32(x) if DOT == "tf32" else x


@triton.jit
def _add_outer(
    state, x, weight, B, N_ROWS: tl.constexpr, TERMS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr
):
    """state + sum_t weight[t] x[t] B[t]^T, the products weight x split into TERMS operands.

    The state is [N, P] with N_ROWS, else [P, N].
    """
    rest = x.to(tl.float32) * weight[:, None]
    if not N_ROWS:
        rest = tl.trans(rest)
    for term in tl.static_range(TERMS):
        part = _operand(rest, DOT)
        if N_ROWS:
            state = tl.dot(tl.trans(B), part, state, input_precision=PRECISION)
        else:
            state = tl.dot(part, B, state, input_precision=PRECISION)
        if term + 1 < TERMS:
            rest -= part.to(tl.float32)
    return state


@triton.jit
def _locate(
    slot,
    cu_ptr,
    T,
    segment,
    sequences,
    VARLEN: tl.constexpr,
    SEGMENTED: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """(sequence, first token, tokens) of a segment; 0 tokens for a slot beyond the last segment.

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
    else:
        segments = tl.cdiv(T, segment)
        sequence = slot // segments
        index = slot % segments
        begin = 0
        end = T
    start = begin + index * segment
    return sequence, start, tl.minimum(end - start, segment)


@triton.jit
def _segment_states_kernel(
    x_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    dt_bias_ptr,
    cu_ptr,
    states_ptr,
    decays_ptr,
    T,
    segment,
    sequences,
    dt_min,
    stride_x_b,
    stride_x_t,
    stride_x_h,
    stride_dt_b,
    stride_dt_t,
    stride_dt_h,
    stride_B_b,
    stride_B_t,
    stride_B_g,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VARLEN: tl.constexpr,
    N_ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What a segment adds to the state, states [slots, H, P, N], and its log-decay, decays [slots, H]."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    h = pid // P_BLOCKS % H
    slot = pid // (P_BLOCKS * H)
    sequence, start, length = _locate(slot, cu_ptr, T, segment, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    row = 0 if VARLEN else sequence
    row, start, slot, h = row.to(tl.int64), start.to(tl.int64), slot.to(tl.int64), h.to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_p = pid % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    x_ptr += row * stride_x_b + start * stride_x_t + h * stride_x_h
    dt_ptr += row * stride_dt_b + start * stride_dt_t + h * stride_dt_h
    B_ptr += row * stride_B_b + start * stride_B_t + h // HEADS_PER_GROUP * stride_B_g
    rate = -tl.exp(tl.load(A_log_ptr + h).to(tl.float32)) * _LOG2_E
    bias = tl.load(dt_bias_ptr + h).to(tl.float32) if HAS_BIAS else 0.0

    # Backwards, so that the decay of a token up to the segment's end is known when it is met.
    chunks = tl.cdiv(length, BLOCK_T)
    state = tl.zeros((BLOCK_N, BLOCK_P) if N_ROWS else (BLOCK_P, BLOCK_N), dtype=tl.float32)
    after = 0.0
    first = (chunks - 1) * BLOCK_T
    raw_next = tl.load(dt_ptr + first.to(tl.int64) * stride_dt_t + offs_t * stride_dt_t, mask=offs_t + first < length)
    for c in range(chunks):
        first = (chunks - 1 - c) * BLOCK_T
        first64 = first.to(tl.int64)
        mask = offs_t + first < length
        dt, g = _steps(raw_next.to(tl.float32), mask, bias, rate, dt_min)
        ahead = offs_t + first >= BLOCK_T
        raw_next = tl.load(dt_ptr + (first64 - BLOCK_T) * stride_dt_t + offs_t * stride_dt_t, mask=ahead)
        x_mask = mask[:, None] & (offs_p < P)[None, :]
        x = tl.load(x_ptr + first64 * stride_x_t + offs_t[:, None] * stride_x_t + offs_p[None, :], x_mask, 0.0)
        B_mask = mask[:, None] & (offs_n < N)[None, :]
        B = tl.load(B_ptr + first64 * stride_B_t + offs_t[:, None] * stride_B_t + offs_n[None, :], B_mask, 0.0)
        # added = sum_j exp(last - g[j]) dt[j] x[j] B[j]^T
        weight = dt * tl.exp2(_decay_to_end(g) + after)
        state = _add_outer(state, x, weight, _operand(B, DOT), N_ROWS, TERMS, DOT, PRECISION)
        after += tl.sum(g, 0)

    if pid % P_BLOCKS == 0:
        tl.store(decays_ptr + slot * H + h, after)
    offs = (slot * H + h) * P * N + offs_p[:, None] * N + offs_n[None, :]
    state = tl.trans(state) if N_ROWS else state
    tl.store(states_ptr + offs, state, mask=(offs_p < P)[:, None] & (offs_n < N)[None, :])


@triton.jit
def _pass_states_kernel(
    states_ptr,
    decays_ptr,
    initial_ptr,
    final_ptr,
    cu_ptr,
    T,
    segment,
    stride_i_b,
    stride_i_h,
    stride_i_p,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    VARLEN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn what segments add into the states at their starts, in place, and store the last one."""
    sequence = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < P * N
    if VARLEN:
        offs_s = tl.arange(0, BLOCK_S)
        begins = tl.load(cu_ptr + offs_s, mask=offs_s < sequence, other=0)
        ends = tl.load(cu_ptr + 1 + offs_s, mask=offs_s < sequence, other=0)
        slot = tl.sum(((ends - begins + segment - 1) // segment).to(tl.int32), 0)
        length = tl.load(cu_ptr + sequence + 1) - tl.load(cu_ptr + sequence)
        segments = ((length + segment - 1) // segment).to(tl.int32)
    else:
        segments = tl.cdiv(T, segment)
        slot = sequence * segments
    slot, sequence = slot.to(tl.int64), sequence.to(tl.int64)
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_INITIAL:
        offs_i = sequence * stride_i_b + h * stride_i_h + offs // N * stride_i_p + offs % N
        state += tl.load(initial_ptr + offs_i, mask=mask, other=0.0).to(tl.float32)
    for k in range(segments):
        head = (slot + k) * H + h
        added = tl.load(states_ptr + head * P * N + offs, mask=mask, other=0.0)
        tl.store(states_ptr + head * P * N + offs, state, mask=mask)
        # state = state * exp(last) + added
        state = state * tl.exp2(tl.load(decays_ptr + head)) + added
    tl.store(final_ptr + (sequence * H + h) * P * N + offs, state, mask=mask)


@triton.jit
def _scan_kernel(
    x_ptr,
    dt_ptr,
    A_log_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_bias_ptr,
    start_ptr,
    cu_ptr,
    y_ptr,
    final_ptr,
    T,
    segment,
    sequences,
    dt_min,
    stride_x_b,
    stride_x_t,
    stride_x_h,
    stride_dt_b,
    stride_dt_t,
    stride_dt_h,
    stride_B_b,
    stride_B_t,
    stride_B_g,
    stride_C_b,
    stride_C_t,
    stride_C_g,
    stride_s_b,
    stride_s_h,
    stride_s_p,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr,
    VARLEN: tl.constexpr,
    SEGMENTED: tl.constexpr,
    N_ROWS: tl.constexpr,
    TERMS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """y of a segment from its start state; the state after it where the segment is a whole sequence."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    h = pid // P_BLOCKS % H
    slot = pid // (P_BLOCKS * H)
    sequence, start, length = _locate(slot, cu_ptr, T, segment, sequences, VARLEN, SEGMENTED, BLOCK_S)
    row = 0 if VARLEN else sequence
    row, start, slot, h = row.to(tl.int64), start.to(tl.int64), slot.to(tl.int64), h.to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_p = pid % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    x_ptr += row * stride_x_b + start * stride_x_t + h * stride_x_h
    dt_ptr += row * stride_dt_b + start * stride_dt_t + h * stride_dt_h
    B_ptr += row * stride_B_b + start * stride_B_t + h // HEADS_PER_GROUP * stride_B_g
    C_ptr += row * stride_C_b + start * stride_C_t + h // HEADS_PER_GROUP * stride_C_g
    y_ptr += ((row * T + start) * H + h) * P
    rate = -tl.exp(tl.load(A_log_ptr + h).to(tl.float32)) * _LOG2_E
    bias = tl.load(dt_bias_ptr + h).to(tl.float32) if HAS_BIAS else 0.0
    skip = tl.load(D_ptr + h).to(tl.float32) if HAS_D else 0.0
    state_mask = (offs_p < P)[:, None] & (offs_n < N)[None, :]
    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    if HAS_START:
        start_ptr += slot * stride_s_b + h * stride_s_h
        offs = offs_p[:, None] * stride_s_p + offs_n[None, :]
        state += tl.load(start_ptr + offs, mask=state_mask, other=0.0).to(tl.float32)
    state = tl.trans(state) if N_ROWS else state

    causal = offs_t[:, None] >= offs_t[None, :]
    raw_next = tl.load(dt_ptr + offs_t * stride_dt_t, mask=offs_t < length)
    for c in range(tl.cdiv(length, BLOCK_T)):
        first = c * BLOCK_T
        first64 = first.to(tl.int64)
        mask = offs_t + first < length
        dt, g = _steps(raw_next.to(tl.float32), mask, bias, rate, dt_min)
        # The next chunk's steps, now: the scan over them waits for the load otherwise.
        ahead = offs_t + first + BLOCK_T < length
        raw_next = tl.load(dt_ptr + (first64 + BLOCK_T) * stride_dt_t + offs_t * stride_dt_t, mask=ahead)
        x_mask = mask[:, None] & (offs_p < P)[None, :]
        N_mask = mask[:, None] & (offs_n < N)[None, :]
        C = tl.load(C_ptr + first64 * stride_C_t + offs_t[:, None] * stride_C_t + offs_n[None, :], N_mask, 0.0)
        B = tl.load(B_ptr + first64 * stride_B_t + offs_t[:, None] * stride_B_t + offs_n[None, :], N_mask, 0.0)
        x = tl.load(x_ptr + first64 * stride_x_t + offs_t[:, None] * stride_x_t + offs_p[None, :], x_mask, 0.0)
        C, B = _operand(C, DOT), _operand(B, DOT)
        weight = dt * tl.exp2(_decay_to_end(g))
        last = tl.sum(g, 0)
        g = tl.cumsum(g, 0)
        # y[i] = exp(g[i]) C[i] . state
        state_cols = _operand(state, DOT) if N_ROWS else tl.trans(_operand(state, DOT))
        y = tl.dot(C, state_cols, input_precision=PRECISION) * tl.exp2(g)[:, None]
        # y[i] += sum_{j <= i} exp(g[i] - g[j]) (C[i] . B[j]) dt[j] x[j]
        scores = tl.dot(C, tl.trans(B), input_precision=PRECISION)
        if DOT == "fp32":
            scores *= tl.exp2(tl.where(causal, g[:, None] - g[None, :], float("-inf"))) * dt[None, :]
        else:
            # dt as part of the exponent costs an ulp of g and saves its way into the layout of the scores' columns.
            scores *= tl.exp2(tl.where(causal, g[:, None] - (g - tl.log2(dt))[None, :], float("-inf")))
        y = tl.dot(_operand(scores, DOT), _operand(x, DOT), y, input_precision=PRECISION)
        if HAS_D:
            y += skip * x.to(tl.float32)
        y_offs = first64 * H * P + offs_t[:, None] * (H * P) + offs_p[None, :]
        tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=x_mask)
        # state = exp(last) state + sum_j exp(last - g[j]) dt[j] x[j] B[j]^T
        state = _add_outer(state * tl.exp2(last), x, weight, B, N_ROWS, TERMS, DOT, PRECISION)

    if not SEGMENTED:
        state = tl.trans(state) if N_ROWS else state
        offs = (slot * H + h) * P * N + offs_p[:, None] * N + offs_n[None, :]
        tl.store(final_ptr + offs, state, mask=state_mask)


@dataclass(frozen=True)
class _Launch:
    """Tile and launch options of one of the two big kernels."""

    block_t: int
    block_p: int
    warps: int
    stages: int
    registers: int = 128


@dataclass(frozen=True)
class _Plan:
    """How a call runs: operands of the products, segments, and the launches."""

    # Operands: "bf16", "tf32" or "fp32", and Triton's input_precision for them.
    dot: str
    precision: str
    # Operands that the products which reach the final state are split into.
    terms: int
    # The state's tile is [N, P] instead of [P, N].
    n_rows: bool
    # Programs that keep the device busy: below, sequences are cut into segments of at least `shortest` tokens.
    programs: int
    shortest: int
    states: _Launch
    scan: _Launch


def plan(dtype: torch.dtype, device: Architecture) -> _Plan:
    """The plan for tensors of a dtype on an architecture."""
    programs, shortest = 2 * device.units, 256
    # Intel's compiler lays all warps along the rows of chained products: many rows, few columns a warp.
    n_rows = device.name != "nvidia"
    small = _Launch(32, 32, 8, 1, 256)
    if dtype == torch.bfloat16:
        states, scan = small, small
        if device.name == "nvidia":
            states, scan = _Launch(64, 64, 4, 3), _Launch(64, 64, 4, 2)
        return _Plan("bf16", "ieee", 3, n_rows, programs, shortest, states, scan)
    if dtype == torch.float16:
        # Not fp16 operands: the state and the scores may leave its range where y does not.
        return _Plan("tf32", "tf32", 2, n_rows, programs, shortest, small, small)
    return _Plan("fp32", "tf32x3" if device.name == "nvidia" else "ieee", 1, n_rows, programs, shortest, small, small)


def _refuses(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    for name, t in (("x", x), ("B", B), ("C", C)):
        if t.dtype not in _FLOATS or t.dtype != x.dtype:
            return f"{name} has dtype {t.dtype}; x, B and C share one of float16, bfloat16, float32"
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            return f"the last dimension of {name} has stride {t.stride(-1)}, not 1"
    for name, t in (("dt", dt), ("A_log", A_log), ("D", D), ("dt_bias", dt_bias), ("initial_state", initial_state)):
        if t is not None and t.dtype not in _FLOATS:
            return f"{name} has dtype {t.dtype}, not one of float16, bfloat16, float32"
    for name, t in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        if t is not None and (t.shape != x.shape[2:3] or not t.is_contiguous()):
            return f"{name} has shape {tuple(t.shape)}, expected ({x.shape[2]},), contiguous"
    if B.shape[-1] > LARGEST_N:
        return f"a state of {B.shape[-1]} columns, more than {LARGEST_N}"
    if initial_state is not None and initial_state.stride(-1) != 1 and B.shape[-1] > 1:
        return f"the last dimension of initial_state has stride {initial_state.stride(-1)}, not 1"
    if cu_seqlens is None:
        return None
    if x.shape[0] != 1 or cu_seqlens.dtype != torch.int32 or not cu_seqlens.is_contiguous():
        return f"cu_seqlens is {cu_seqlens.dtype} at batch {x.shape[0]}, expected contiguous int32 at batch 1"
    if cu_seqlens.shape[0] - 1 > MOST_SEQUENCES:
        return f"{cu_seqlens.shape[0] - 1} sequences, more than {MOST_SEQUENCES}"
    return None


@ssd_chunk_scan.implement("triton", "xpu", "cuda", refuses=_refuses)
def ssd_chunk_scan_triton(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    chunk_size: int = 256,
    dt_min: float = 0.0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    how = plan(x.dtype, architecture(x.device))
    return launch(how, x, dt, A_log, B, C, D, dt_bias, initial_state, dt_min, cu_seqlens)


def segment_length(how: _Plan, sequences: int, tokens: int, heads: int) -> int:
    """Tokens a segment: the whole sequence, or as short as it takes to have `how.programs` programs.

    Args:
        sequences: how many.
        tokens: of the longest sequence, as far as the host knows.
        heads: programs that a segment takes.
    """
    segments = max(1, min(how.programs // max(1, sequences * heads), tokens // how.shortest))
    step = max(how.states.block_t, how.scan.block_t)
    return max(step, cdiv(cdiv(tokens, segments), step) * step)


def launch(
    how: _Plan,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_min: float,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run the kernels as planned."""
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    final = torch.empty((sequences, H, P, N), dtype=torch.float32, device=x.device)
    if final.numel() == 0:
        return y, final
    block_n = max(16, next_power_of_2(N))
    varlen = cu_seqlens is not None
    segment = segment_length(how, 1 if varlen else batch, T, H * cdiv(P, how.scan.block_p))
    segmented = segment < T
    shapes = {"H": H, "P": P, "N": N, "VARLEN": varlen, "BLOCK_S": next_power_of_2(sequences) if varlen else 1}
    heads = {"HEADS_PER_GROUP": H // G, "HAS_BIAS": dt_bias is not None, "BLOCK_N": block_n}
    products = {"DOT": how.dot, "PRECISION": how.precision, "N_ROWS": how.n_rows}
    x_dt_B = (*x.stride()[:3], *dt.stride(), *B.stride()[:3])
    cu_seqlens = x if cu_seqlens is None else cu_seqlens
    dt_bias = A_log if dt_bias is None else dt_bias
    start, has_start, slots = initial_state, initial_state is not None, sequences
    with on_device_of(x):
        if segmented:
            # As many segments as there can be: the host does not know how long the sequences are.
            slots = T // segment + sequences if varlen else sequences * cdiv(T, segment)
            start = torch.empty((slots, H, P, N), dtype=torch.float32, device=x.device)
            decays = torch.empty((slots, H), dtype=torch.float32, device=x.device)
            _segment_states_kernel[(slots * H * cdiv(P, how.states.block_p),)](
                *(x, dt, A_log, B, dt_bias, cu_seqlens, start, decays, T, segment, sequences, dt_min, *x_dt_B),
                **shapes,
                **heads,
                **products,
                **_options(how.states, x),
                TERMS=how.terms,
            )
            initial, strides = (x, (0, 0, 0)) if initial_state is None else (initial_state, initial_state.stride()[:3])
            _pass_states_kernel[(sequences * H, cdiv(P * N, 1024))](
                *(start, decays, initial, final, cu_seqlens, T, segment, *strides),
                **shapes,
                HAS_INITIAL=has_start,
                BLOCK=1024,
                num_warps=4,
            )
            has_start = True
        start_strides = (0, 0, 0) if start is None else start.stride()[:3]
        _scan_kernel[(slots * H * cdiv(P, how.scan.block_p),)](
            *(x, dt, A_log, B, C, x if D is None else D, dt_bias, x if start is None else start, cu_seqlens, y, final),
            *(T, segment, sequences, dt_min, *x_dt_B, *C.stride()[:3], *start_strides),
            **shapes,
            **heads,
            **products,
            **_options(how.scan, x),
            HAS_D=D is not None,
            HAS_START=has_start,
            SEGMENTED=segmented,
            TERMS=1 if segmented else how.terms,
        )
    return y, final


def _options(how: _Launch, x: Tensor) -> dict[str, Any]:
    return {
        "BLOCK_T": how.block_t,
        "BLOCK_P": how.block_p,
        "num_warps": how.warps,
        "num_stages": how.stages,
        **grf_options(how.registers, architecture(x.device)),
    }
