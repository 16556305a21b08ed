"""The scan with the states in memory: for devices whose programs cannot hold one, and whose compiler spills chained
products.

Sequences are cut into chunks. The products C B^T within the chunks are computed once for the heads of a group and the
states at the chunks' starts as in `states`, both into memory. Then every tile of y is a sum of products whose operands
are loaded, so that warps share it along both sides and no program needs more than a slice of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xpu_ports.common.kernels.ssd_chunk_scan.parts import (
    Call,
    Products,
    Tile,
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
def _scores_kernel(
    B_ptr,
    C_ptr,
    cu_ptr,
    scores_ptr,
    T,
    chunk,
    sequences,
    tiles,
    stride_B_b,
    stride_B_t,
    stride_B_g,
    stride_C_b,
    stride_C_t,
    stride_C_g,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    VARLEN: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """C[i] . B[j] of the tokens j of the chunk of i, scores [B, T, G, chunk]; of tiles with a j <= i only."""
    pid = tl.program_id(0)
    i = pid // tiles % tiles * BLOCK_T
    j = pid % tiles * BLOCK_T
    group = (pid // (tiles * tiles) % G).to(tl.int64)
    slot = pid // (tiles * tiles * G)
    _, row, start, length = locate(slot, cu_ptr, T, chunk, sequences, VARLEN, True, BLOCK_S)
    if (j > i) | (i >= length):
        return
    offs_t = tl.arange(0, BLOCK_T)
    B_ptr += row * stride_B_b + start * stride_B_t + group * stride_B_g
    C_ptr += row * stride_C_b + start * stride_C_t + group * stride_C_g
    scores = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        C = operand(load_rows(C_ptr, stride_C_t, i, offs_t, offs_n, length, N), DOT)
        B = operand(load_rows(B_ptr, stride_B_t, j, offs_t, offs_n, length, N), DOT)
        scores = tl.dot(C, tl.trans(B), scores, input_precision=PRECISION)
    at = ((row * T + start + i + offs_t[:, None]) * G + group) * chunk + j + offs_t[None, :]
    tl.store(scores_ptr + at, scores, mask=(offs_t + i < length)[:, None])


@kernel
@triton.jit
def _outputs_kernel(
    x_ptr,
    C_ptr,
    D_ptr,
    dt_ptr,
    A_log_ptr,
    dt_bias_ptr,
    scores_ptr,
    states_ptr,
    cu_ptr,
    y_ptr,
    T,
    chunk,
    sequences,
    tiles,
    dt_min,
    stride_x_b,
    stride_x_t,
    stride_x_h,
    stride_C_b,
    stride_C_t,
    stride_C_g,
    stride_dt_b,
    stride_dt_t,
    stride_dt_h,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """y of a tile of tokens, from the state at their chunk's start and the tokens of the chunk before them."""
    P_BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    pid = tl.program_id(0)
    h = (pid // P_BLOCKS % H).to(tl.int64)
    i = pid // (P_BLOCKS * H) % tiles * BLOCK_T
    slot = pid // (P_BLOCKS * H * tiles)
    _, row, start, length = locate(slot, cu_ptr, T, chunk, sequences, VARLEN, True, BLOCK_S)
    if i >= length:
        return
    offs_t = tl.arange(0, BLOCK_T)
    offs_p = pid % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    group = h // (H // G)
    x_ptr += row * stride_x_b + start * stride_x_t + h * stride_x_h
    C_ptr += row * stride_C_b + start * stride_C_t + group * stride_C_g
    dt_ptr += row * stride_dt_b + start * stride_dt_t + h * stride_dt_h
    scores_ptr += ((row * T + start) * G + group) * chunk
    states_ptr += (slot.to(tl.int64) * H + h) * N * P
    rate, bias = rate_and_bias(h, A_log_ptr, dt_bias_ptr, HAS_BIAS)

    # y[i] = C[i] . state
    y = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    for n in range(0, N, BLOCK_N):
        offs_n = n + tl.arange(0, BLOCK_N)
        C = operand(load_rows(C_ptr, stride_C_t, i, offs_t, offs_n, length, N), DOT)
        state_mask = (offs_n < N)[:, None] & (offs_p < P)[None, :]
        state = tl.load(states_ptr + offs_n[:, None] * P + offs_p[None, :], mask=state_mask, other=0.0)
        y = tl.dot(C, operand(state, DOT), y, input_precision=PRECISION)
    # Tile by tile, as if the state went on: y[i] = exp(last) y[i] + sum_j exp(last - g[j]) (C[i] . B[j]) dt[j] x[j]
    for tile in range(i // BLOCK_T + 1):
        j = tile * BLOCK_T
        raw = load_steps(dt_ptr, stride_dt_t, j, offs_t, length)
        dt, g = steps_and_decays(raw, offs_t + j < length, bias, rate, dt_min)
        scores = load_rows(scores_ptr + j, G * chunk, i, offs_t, offs_t, length, BLOCK_T)
        x = load_rows(x_ptr, stride_x_t, j, offs_t, offs_p, length, P)
        if j < i:
            scores *= (dt * tl.exp2(decay_to_end(g)))[None, :]
            g = tl.zeros_like(g) + tl.sum(g, 0)
        else:
            # and to the token itself: y[i] = exp(g[i]) y[i] + sum_{j <= i} exp(g[i] - g[j]) (C[i] . B[j]) dt[j] x[j]
            g = tl.cumsum(g, 0)
            scores = decay_within(scores, g, dt, offs_t, DOT)
        y = tl.dot(operand(scores, DOT), operand(x, DOT), y * tl.exp2(g)[:, None], input_precision=PRECISION)
    if HAS_D:
        x = load_rows(x_ptr, stride_x_t, i, offs_t, offs_p, length, P)
        y += tl.load(D_ptr + h).to(tl.float32) * x.to(tl.float32)
    at = ((row * T + start + i + offs_t[:, None]) * H + h) * P + offs_p[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(offs_t + i < length)[:, None] & (offs_p < P)[None, :])


@dataclass(frozen=True)
class Blocks:
    """How a call runs this way."""

    products: Products
    # Tokens from one state in memory to the next, at most; a multiple of the tiles' tokens.
    chunk: int
    states: Tile
    scores: Tile
    outputs: Tile

    def segment(self, call: Call) -> int:
        """Tokens a chunk: not more than there are."""
        step = max(tile.t for tile in (self.states, self.scores, self.outputs))
        return min(self.chunk, cdiv(max(1, call.x.shape[1]), step) * step)

    def launch(self, call: Call, y: Tensor, final: Tensor) -> None:
        """Write y and the final state."""
        batch, T, H, P = call.x.shape
        G, chunk = call.B.shape[2], self.segment(call)
        states = segment_states(call, self.products, self.states, chunk, final)
        scores = call.empty(batch, T, G, chunk)
        slots, shared = states.shape[0], {**call.constants(), **self.products.constants(), "G": G}
        tiles = chunk // self.scores.t
        _scores_kernel[(slots * G * tiles * tiles,)](
            *(call.B, call.C, call.bounds(), scores, T, chunk, call.sequences, tiles),
            *(*call.B.stride()[:3], *call.C.stride()[:3]),
            **shared,
            **self.scores.blocks(call),
            **self.scores.options(call),
        )
        blocks, tiles = self.outputs.blocks(call), chunk // self.outputs.t
        _outputs_kernel[(slots * tiles * H * cdiv(P, blocks["BLOCK_P"]),)](
            *(call.x, call.C, call.x if call.D is None else call.D, *call.steps(), scores, states, call.bounds(), y),
            *(T, chunk, call.sequences, tiles, call.dt_min),
            *(*call.x.stride()[:3], *call.C.stride()[:3], *call.dt.stride()),
            **shared,
            **blocks,
            **self.outputs.options(call),
            HAS_D=call.D is not None,
            HAS_BIAS=call.dt_bias is not None,
        )
