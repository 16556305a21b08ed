"""The scan with the state in registers: for devices whose programs can hold it.

A program owns the state of one head over a segment of one sequence and walks the segment tile by tile: states at the
tiles' boundaries never reach memory. Where batch times heads fill the device, a segment is a whole sequence and one
launch does everything. Where they do not, sequences are cut into a few segments whose start states come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xpu_ports.common.kernels.ssd_chunk_scan.parts import (
    Call,
    Products,
    Tile,
    add_outer,
    decay_to_end,
    decay_within,
    load_rows,
    load_steps,
    locate,
    operand,
    rate_and_bias,
    steps_and_decays,
)
from xpu_ports.common.kernels.ssd_chunk_scan.states import segment_states
from xpu_ports.common.tritonlib import cdiv, kernel, tl, triton


@kernel
@triton.jit
def _walk_kernel(
    x_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    dt_ptr,
    A_log_ptr,
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
    stride_B_b,
    stride_B_t,
    stride_B_g,
    stride_C_b,
    stride_C_t,
    stride_C_g,
    stride_dt_b,
    stride_dt_t,
    stride_dt_h,
    stride_s_b,
    stride_s_h,
    stride_s_p,
    stride_s_n,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    VARLEN: tl.constexpr,
    SEGMENTED: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_START: tl.constexpr,
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
    h = (pid // P_BLOCKS % H).to(tl.int64)
    slot = pid // (P_BLOCKS * H)
    _, row, start, length = locate(slot, cu_ptr, T, segment, sequences, VARLEN, SEGMENTED, BLOCK_S)
    slot = slot.to(tl.int64)
    offs_t = tl.arange(0, BLOCK_T)
    offs_p = pid % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = tl.arange(0, BLOCK_N)
    x_ptr += row * stride_x_b + start * stride_x_t + h * stride_x_h
    B_ptr += row * stride_B_b + start * stride_B_t + h // HEADS_PER_GROUP * stride_B_g
    C_ptr += row * stride_C_b + start * stride_C_t + h // HEADS_PER_GROUP * stride_C_g
    dt_ptr += row * stride_dt_b + start * stride_dt_t + h * stride_dt_h
    y_ptr += ((row * T + start) * H + h) * P
    rate, bias = rate_and_bias(h, A_log_ptr, dt_bias_ptr, HAS_BIAS)
    skip = tl.load(D_ptr + h).to(tl.float32) if HAS_D else 0.0
    state_mask = (offs_n < N)[:, None] & (offs_p < P)[None, :]
    state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    if HAS_START:
        offs = slot * stride_s_b + h * stride_s_h + offs_n[:, None] * stride_s_n + offs_p[None, :] * stride_s_p
        state += tl.load(start_ptr + offs, mask=state_mask, other=0.0).to(tl.float32)

    # The steps of the next tile are loaded early: the sums over them would wait for the load otherwise.
    raw = load_steps(dt_ptr, stride_dt_t, 0, offs_t, length)
    for c in range(tl.cdiv(length, BLOCK_T)):
        first = c * BLOCK_T
        dt, g = steps_and_decays(raw, offs_t + first < length, bias, rate, dt_min)
        raw = load_steps(dt_ptr, stride_dt_t, first + BLOCK_T, offs_t, length)
        C = operand(load_rows(C_ptr, stride_C_t, first, offs_t, offs_n, length, N), DOT)
        B = operand(load_rows(B_ptr, stride_B_t, first, offs_t, offs_n, length, N), DOT)
        x = load_rows(x_ptr, stride_x_t, first, offs_t, offs_p, length, P)
        weight = dt * tl.exp2(decay_to_end(g))
        last = tl.sum(g, 0)
        g = tl.cumsum(g, 0)
        # y[i] = exp(g[i]) C[i] . state
        y = tl.dot(C, operand(state, DOT), input_precision=PRECISION) * tl.exp2(g)[:, None]
        # y[i] += sum_{j <= i} exp(g[i] - g[j]) (C[i] . B[j]) dt[j] x[j]
        scores = decay_within(tl.dot(C, tl.trans(B), input_precision=PRECISION), g, dt, offs_t, DOT)
        y = tl.dot(operand(scores, DOT), operand(x, DOT), y, input_precision=PRECISION)
        if HAS_D:
            y += skip * x.to(tl.float32)
        y_offs = first.to(tl.int64) * H * P + offs_t[:, None] * (H * P) + offs_p[None, :]
        y_mask = (offs_t + first < length)[:, None] & (offs_p < P)[None, :]
        tl.store(y_ptr + y_offs, y.to(y_ptr.dtype.element_ty), mask=y_mask)
        # state = exp(last) state + sum_j exp(last - g[j]) dt[j] x[j] B[j]^T
        state = add_outer(state * tl.exp2(last), x, weight, B, TERMS, False, DOT, PRECISION)

    if not SEGMENTED:
        offs = (slot * H + h) * P * N + offs_p[None, :] * N + offs_n[:, None]
        tl.store(final_ptr + offs, state, mask=state_mask)


@dataclass(frozen=True)
class Walk:
    """How a call runs this way."""

    products: Products
    # Programs that keep the device busy: below, sequences are cut into segments of at least `shortest` tokens.
    programs: int
    shortest: int
    # The scan's tile holds all columns of the state.
    states: Tile
    scan: Tile

    def segment(self, call: Call) -> int:
        """Tokens a segment: a whole sequence, or as few as it takes to have enough programs."""
        batch, T, H, P = call.x.shape
        programs = batch * H * cdiv(P, self.scan.blocks(call)["BLOCK_P"])
        segments = max(1, min(self.programs // programs, T // self.shortest))
        step = max(self.states.t, self.scan.t)
        return max(step, cdiv(cdiv(T, segments), step) * step)

    def launch(self, call: Call, y: Tensor, final: Tensor) -> None:
        """Write y and the final state."""
        T, H, P = call.x.shape[1:]
        segment = self.segment(call)
        segmented = segment < T
        slots = call.sequences
        start, strides = call.start()
        if segmented:
            slots = call.slots(segment)
            start = segment_states(call, self.products, self.states, segment, final).mT
            strides = start.stride()
        blocks = self.scan.blocks(call)
        _walk_kernel[(slots * H * cdiv(P, blocks["BLOCK_P"]),)](
            *(call.x, call.B, call.C, call.x if call.D is None else call.D, *call.steps(), start, call.bounds()),
            *(y, final, T, segment, call.sequences, call.dt_min),
            *(*call.x.stride()[:3], *call.B.stride()[:3], *call.C.stride()[:3], *call.dt.stride(), *strides),
            **call.constants(),
            **self.products.constants(),
            **blocks,
            **self.scan.options(call),
            SEGMENTED=segmented,
            HEADS_PER_GROUP=H // call.B.shape[2],
            HAS_D=call.D is not None,
            HAS_BIAS=call.dt_bias is not None,
            HAS_START=segmented or call.initial_state is not None,
            # The state is a result where the segment is the sequence; otherwise it only reaches y.
            TERMS=1 if segmented else self.products.terms,
        )
