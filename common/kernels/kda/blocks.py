"""The state from chunk to chunk for compilers that spill chained products: one product in each loop, operands loaded.

    u = M v + w . state,   w = -M (k exp(G)),   o = (scale q exp(G)) . state + qk u

w and M v are made for all chunks at once. What is left to do one after the other takes a slice of the state at a time,
chosen inside a loop: Intel's compiler keeps an address a lane for each element of an operand that products in a row
read from shared memory, and these spill. The outputs are made for all chunks at once again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xpu_ports.common.kernels.kda import CHUNK
from xpu_ports.common.kernels.kda.parts import Call, Options, Products, sequence_at
from xpu_ports.common.kernels.kda.scores import Chunks
from xpu_ports.common.kernels.ssd_chunk_scan.parts import load_rows, locate, operand
from xpu_ports.common.tritonlib import cdiv, kernel, next_power_of_2, tl, triton


@kernel
@triton.jit
def _weigh_kernel(
    v_ptr,
    k_start_ptr,
    M_ptr,
    cu_ptr,
    w_ptr,
    u_ptr,
    T,
    sequences,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    H: tl.constexpr,
    K: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_T rows and BLOCK_N columns of w [slots, H, CHUNK, K] or of u = M v [slots, H, CHUNK, V]."""
    K_BLOCKS: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    N_BLOCKS: tl.constexpr = K_BLOCKS + (V + BLOCK_N - 1) // BLOCK_N
    T_BLOCKS: tl.constexpr = CHUNK // BLOCK_T
    pid = tl.program_id(0)
    n = pid % N_BLOCKS
    i = pid // N_BLOCKS % T_BLOCKS * BLOCK_T
    h = (pid // (N_BLOCKS * T_BLOCKS) % H).to(tl.int64)
    slot = pid // (N_BLOCKS * T_BLOCKS * H)
    _, row, start, length = locate(slot, cu_ptr, T, CHUNK, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    offs_t = i + tl.arange(0, BLOCK_T)
    offs_j = tl.arange(0, BLOCK_J)
    head = slot.to(tl.int64) * H + h
    M_ptr += head * CHUNK * CHUNK + offs_t[:, None] * CHUNK + offs_j[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    if n < K_BLOCKS:
        offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
        for j in range(0, i + BLOCK_T, BLOCK_J):
            x = load_rows(k_start_ptr + head * CHUNK * K, K, j, offs_j, offs_n, CHUNK, K)
            acc = tl.dot(tl.load(M_ptr + j), x, acc, input_precision=PRECISION)
        at = head * CHUNK * K + offs_t[:, None] * K + offs_n[None, :]
        tl.store(w_ptr + at, operand(-acc, DOT), mask=(offs_n < K)[None, :])
    else:
        offs_n = (n - K_BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        v_ptr += row * stride_v_b + start * stride_v_t + h * stride_v_h
        for j in range(0, i + BLOCK_T, BLOCK_J):
            x = operand(load_rows(v_ptr, stride_v_t, j, offs_j, offs_n, length, V), DOT)
            acc = tl.dot(tl.load(M_ptr + j), x, acc, input_precision=PRECISION)
        at = head * CHUNK * V + offs_t[:, None] * V + offs_n[None, :]
        tl.store(u_ptr + at, operand(acc, DOT), mask=(offs_n < V)[None, :])


@triton.jit
def _slice(state, offs_s, s):
    """Rows s of a state [slices, rows, columns]."""
    return tl.sum(tl.where(offs_s == s, state, 0.0), 0)


@kernel
@triton.jit
def _steps_kernel(
    initial_ptr,
    cu_ptr,
    G_ptr,
    k_end_ptr,
    w_ptr,
    u_ptr,
    states_ptr,
    writes_ptr,
    final_ptr,
    T,
    stride_i_b,
    stride_i_h,
    stride_i_k,
    stride_i_v,
    H: tl.constexpr,
    K: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V columns of one head's state through a whole sequence, in slices of BLOCK_K rows.

    Gives the state at the start of every chunk, states [slots, H, K, V], and what its tokens write into it,
    writes [slots, H, CHUNK, V].
    """
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    h = (pid // V_BLOCKS % H).to(tl.int64)
    sequence = pid // (V_BLOCKS * H)
    index, _, _, length, slot = sequence_at(sequence, cu_ptr, T, VARLEN, CHUNK, BLOCK_S)
    offs_t = tl.arange(0, CHUNK)
    offs_s = tl.arange(0, SLICES)[:, None, None]
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = (offs_v < V)[None, :]
    head = slot.to(tl.int64) * H + h
    values = offs_t[:, None] * V + offs_v[None, :]
    G_ptr += (head * CHUNK + CHUNK - 1) * K
    k_end_ptr += head * CHUNK * K
    w_ptr += head * CHUNK * K
    u_ptr += head * CHUNK * V
    states_ptr += head * K * V
    writes_ptr += head * CHUNK * V
    rows = offs_s * BLOCK_K + offs_k[None, :, None]
    whole = (rows < K) & mask_v[None, :, :]
    state = tl.zeros((SLICES, BLOCK_K, BLOCK_V), dtype=tl.float32)
    if HAS_INITIAL:
        offs = index * stride_i_b + h * stride_i_h + rows * stride_i_k + offs_v[None, None, :] * stride_i_v
        state += tl.load(initial_ptr + offs, mask=whole, other=0.0).to(tl.float32)

    for _ in range(tl.cdiv(length, CHUNK)):
        # u = M (v - (k exp(G)) . state)
        u = tl.load(u_ptr + values, mask=mask_v, other=0.0).to(tl.float32)
        for s in range(SLICES):
            at = s * BLOCK_K + offs_k
            before = operand(_slice(state, offs_s, s), DOT)
            tl.store(states_ptr + at[:, None] * V + offs_v[None, :], before, mask=(at < K)[:, None] & mask_v)
            w = tl.load(w_ptr + offs_t[:, None] * K + at[None, :], mask=(at < K)[None, :], other=0.0)
            u = tl.dot(w, before, u, input_precision=PRECISION)
        u = operand(u, DOT)
        tl.store(writes_ptr + values, u, mask=mask_v)
        # state = exp(G[-1]) state + (k exp(G[-1] - G))^T u
        for s in range(SLICES):
            at = s * BLOCK_K + offs_k
            moved = _slice(state, offs_s, s) * tl.exp2(tl.load(G_ptr + at, mask=at < K, other=0.0))[:, None]
            k_end = tl.load(k_end_ptr + offs_t[None, :] * K + at[:, None], mask=(at < K)[:, None], other=0.0)
            moved = tl.dot(k_end, u, moved, input_precision=PRECISION)
            state = tl.where(offs_s == s, moved[None, :, :], state)
        G_ptr += H * CHUNK * K
        k_end_ptr += H * CHUNK * K
        w_ptr += H * CHUNK * K
        u_ptr += H * CHUNK * V
        states_ptr += H * K * V
        writes_ptr += H * CHUNK * V

    tl.store(final_ptr + (index * H + h) * K * V + rows * V + offs_v[None, None, :], state, mask=whole)


@kernel
@triton.jit
def _outputs_kernel(
    q_start_ptr,
    qk_ptr,
    states_ptr,
    writes_ptr,
    cu_ptr,
    o_ptr,
    T,
    sequences,
    H: tl.constexpr,
    K: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    V: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_T rows and BLOCK_V columns of a chunk's o, from the state at its start and what its tokens write."""
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = CHUNK // BLOCK_T
    pid = tl.program_id(0)
    h = (pid // V_BLOCKS % H).to(tl.int64)
    i = pid // (V_BLOCKS * H) % BLOCKS * BLOCK_T
    slot = pid // (V_BLOCKS * H * BLOCKS)
    _, row, start, length = locate(slot, cu_ptr, T, CHUNK, sequences, VARLEN, True, BLOCK_S)
    if length <= i:
        return
    offs_t = i + tl.arange(0, BLOCK_T)
    offs_v = pid % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = (offs_v < V)[None, :]
    head = slot.to(tl.int64) * H + h
    o = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        offs_k = at + tl.arange(0, BLOCK_K)
        mask_k = offs_k < K
        keys = head * CHUNK * K + offs_t[:, None] * K + offs_k[None, :]
        q_start = tl.load(q_start_ptr + keys, mask=mask_k[None, :], other=0.0)
        values = head * K * V + offs_k[:, None] * V + offs_v[None, :]
        state = tl.load(states_ptr + values, mask=mask_k[:, None] & mask_v, other=0.0)
        o = tl.dot(q_start, state, o, input_precision=PRECISION)
    for at in range(0, i + BLOCK_T, BLOCK_T):
        offs_j = at + tl.arange(0, BLOCK_T)
        qk = tl.load(qk_ptr + head * CHUNK * CHUNK + offs_t[:, None] * CHUNK + offs_j[None, :])
        values = head * CHUNK * V + offs_j[:, None] * V + offs_v[None, :]
        o = tl.dot(qk, tl.load(writes_ptr + values, mask=mask_v, other=0.0), o, input_precision=PRECISION)
    rows = (row * T + start + offs_t[:, None]) * H + h
    mask = (offs_t < length)[:, None] & mask_v
    tl.store(o_ptr + rows * V + offs_v[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Blocks:
    """How a call runs this way."""

    # Rows of M, columns of M and of w or u in one step.
    weigh: Options
    steps: Options
    outputs: Options

    def launch(self, call: Call, products: Products, made: Chunks, o: Tensor, final: Tensor) -> None:
        """Write o and the final state."""
        T, H, K = call.q.shape[1:]
        V, device = call.v.shape[3], call.q.device
        shared = {**call.constants(), **products.constants(), "V": V}
        w, u, states, writes = (
            call.empty(*shape, dtype=products.dtype) for shape in ((CHUNK, K), (CHUNK, V), (K, V), (CHUNK, V))
        )
        columns = cdiv(K, self.weigh.v) + cdiv(V, self.weigh.v)
        _weigh_kernel[(call.slots * H * (CHUNK // self.weigh.t) * columns,)](
            *(call.v, made.k_start, made.M, call.bounds(), w, u, T, call.sequences, *call.v.stride()[:3]),
            **shared,
            BLOCK_T=self.weigh.t,
            BLOCK_J=self.weigh.k,
            BLOCK_N=self.weigh.v,
            **self.weigh.launch(device),
        )
        initial, strides = call.start()
        block_k, block_v = self.steps.block_k(K), self.steps.block_v(V)
        _steps_kernel[(call.sequences * H * cdiv(V, block_v),)](
            *(initial, call.bounds(), made.G, made.k_end, w, u, states, writes, final, T, *strides),
            **shared,
            HAS_INITIAL=call.initial_state is not None,
            SLICES=next_power_of_2(cdiv(K, block_k)),
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            **self.steps.launch(device),
        )
        block_k, block_v = self.outputs.block_k(K), self.outputs.block_v(V)
        _outputs_kernel[(call.slots * (CHUNK // self.outputs.t) * H * cdiv(V, block_v),)](
            *(made.q_start, made.qk, states, writes, call.bounds(), o, T, call.sequences),
            **shared,
            BLOCK_T=self.outputs.t,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            **self.outputs.launch(device),
        )
