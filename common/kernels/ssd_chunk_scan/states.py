"""The state at the start of every segment: what each segment adds by itself, then from one segment to the next."""

from __future__ import annotations

from torch import Tensor

from xpu_ports.common.kernels.ssd_chunk_scan.parts import (
    Call,
    Products,
    Tile,
    add_outer,
    decay_to_end,
    load_rows,
    load_steps,
    locate,
    operand,
    rate_and_bias,
    steps_and_decays,
)
from xpu_ports.common.tritonlib import cdiv, kernel, tl, triton


@kernel
@triton.jit
def _segment_states_kernel(
    x_ptr,
    B_ptr,
    dt_ptr,
    A_log_ptr,
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
    stride_B_b,
    stride_B_t,
    stride_B_g,
    stride_dt_b,
    stride_dt_t,
    stride_dt_h,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    VARLEN: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TERMS: tl.constexpr,
    ROLLED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """What a segment adds to the state, states [slots, H, N, P], and its log-decay, decays [slots, H]."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    N_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    part = pid % (P_BLOCKS * N_BLOCKS)
    h = (pid // (P_BLOCKS * N_BLOCKS) % H).to(tl.int64)
    slot = pid // (P_BLOCKS * N_BLOCKS * H)
    _, row, start, length = locate(slot, cu_ptr, T, segment, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    offs_t = tl.arange(0, BLOCK_T)
    offs_p = part % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_n = part // P_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptr += row * stride_x_b + start * stride_x_t + h * stride_x_h
    B_ptr += row * stride_B_b + start * stride_B_t + h // HEADS_PER_GROUP * stride_B_g
    dt_ptr += row * stride_dt_b + start * stride_dt_t + h * stride_dt_h
    rate, bias = rate_and_bias(h, A_log_ptr, dt_bias_ptr, HAS_BIAS)

    # Backwards, so that the decay of a token up to the segment's end is known when it is met.
    tiles = tl.cdiv(length, BLOCK_T)
    state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    after = 0.0
    raw = load_steps(dt_ptr, stride_dt_t, (tiles - 1) * BLOCK_T, offs_t, length)
    for c in range(tiles):
        first = (tiles - 1 - c) * BLOCK_T
        dt, g = steps_and_decays(raw, offs_t + first < length, bias, rate, dt_min)
        raw = load_steps(dt_ptr, stride_dt_t, first - BLOCK_T, offs_t, length)
        x = load_rows(x_ptr, stride_x_t, first, offs_t, offs_p, length, P)
        B = load_rows(B_ptr, stride_B_t, first, offs_t, offs_n, length, N)
        # added = sum_j exp(last - g[j]) dt[j] x[j] B[j]^T
        weight = dt * tl.exp2(decay_to_end(g) + after)
        state = add_outer(state, x, weight, operand(B, DOT), TERMS, ROLLED, DOT, PRECISION)
        after += tl.sum(g, 0)

    head = slot.to(tl.int64) * H + h
    if part == 0:
        tl.store(decays_ptr + head, after)
    states = states_ptr + head * N * P + offs_n[:, None] * P + offs_p[None, :]
    tl.store(states, state, mask=(offs_n < N)[:, None] & (offs_p < P)[None, :])


@kernel
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
    stride_i_n,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Turn what segments add into the states at their starts, in place, and store the last one."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    sequence = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)
    offs_p = tl.program_id(1) % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    offs_n = tl.program_id(1) // P_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = (offs_p < P) & (offs_n < N)
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
    sequence = sequence.to(tl.int64)
    state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    if HAS_INITIAL:
        offs = sequence * stride_i_b + h * stride_i_h + offs_p * stride_i_p + offs_n * stride_i_n
        state += tl.load(initial_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    head = slot.to(tl.int64) * H + h
    states_ptr += head * N * P + offs_n * P + offs_p
    for _ in range(segments):
        added = tl.load(states_ptr, mask=mask, other=0.0)
        tl.store(states_ptr, state, mask=mask)
        # state = state * exp(last) + added
        state = state * tl.exp2(tl.load(decays_ptr + head)) + added
        states_ptr += H * N * P
        head += H
    final = final_ptr + (sequence * H + h) * P * N + offs_p * N + offs_n
    tl.store(final, state, mask=mask)


def segment_states(call: Call, products: Products, tile: Tile, segment: int, final: Tensor) -> Tensor:
    """The states at the segments' starts, [slots, H, N, P] in fp32; `final` is written."""
    H, P, N = call.x.shape[2], call.x.shape[3], call.B.shape[3]
    slots = call.slots(segment)
    states, decays = call.empty(slots, H, N, P), call.empty(slots, H)
    blocks = tile.blocks(call)
    programs = slots * H * cdiv(P, blocks["BLOCK_P"]) * cdiv(N, blocks["BLOCK_N"])
    _segment_states_kernel[(programs,)](
        *(call.x, call.B, *call.steps(), call.bounds(), states, decays),
        *(call.x.shape[1], segment, call.sequences, call.dt_min),
        *(*call.x.stride()[:3], *call.B.stride()[:3], *call.dt.stride()),
        **call.constants(),
        **products.constants(),
        **blocks,
        **tile.options(call),
        HEADS_PER_GROUP=H // call.B.shape[2],
        HAS_BIAS=call.dt_bias is not None,
        TERMS=products.terms,
        ROLLED=products.rolled,
    )
    initial, strides = call.start()
    _pass_states_kernel[(call.sequences * H, cdiv(P, 32) * cdiv(N, 16))](
        *(states, decays, initial, final, call.bounds(), call.x.shape[1], segment, *strides),
        **call.constants(),
        HAS_INITIAL=call.initial_state is not None,
        BLOCK_P=32,
        BLOCK_N=16,
        num_warps=8,
    )
    return states
