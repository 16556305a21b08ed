"""The state from chunk to chunk, and what the queries read of it."""

from __future__ import annotations

from torch import Tensor

from xpu_ports.common.kernels.kda import CHUNK
from xpu_ports.common.kernels.kda.parts import Call, Options, Products
from xpu_ports.common.kernels.kda.scores import Chunks
from xpu_ports.common.kernels.ssd_chunk_scan.parts import load_rows, locate, operand
from xpu_ports.common.tritonlib import cdiv, kernel, tl, triton


@kernel
@triton.jit
def _walk_kernel(
    v_ptr,
    initial_ptr,
    cu_ptr,
    G_ptr,
    q_start_ptr,
    k_start_ptr,
    k_end_ptr,
    qk_ptr,
    M_ptr,
    o_ptr,
    states_ptr,
    writes_ptr,
    final_ptr,
    T,
    sequences,
    stride_v_b,
    stride_v_t,
    stride_v_h,
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
    OUTPUTS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V columns of one head's state through a whole sequence.

    Gives o, or with OUTPUTS off what it is made of: the state at the start of every chunk, states [slots, H, K, V],
    and what its tokens write into it, writes [slots, H, CHUNK, V].
    """
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    h = (pid // V_BLOCKS % H).to(tl.int64)
    sequence = pid // (V_BLOCKS * H)
    if VARLEN:
        # The chunks of the sequences before it.
        offs_s = tl.arange(0, BLOCK_S)
        begins = tl.load(cu_ptr + offs_s, mask=offs_s < sequence, other=0)
        ends = tl.load(cu_ptr + 1 + offs_s, mask=offs_s < sequence, other=0)
        slot = tl.sum(((ends - begins + CHUNK - 1) // CHUNK).to(tl.int32), 0)
    else:
        slot = sequence * tl.cdiv(T, CHUNK)
    index, row, start, length = _sequence(sequence, cu_ptr, T, VARLEN)
    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid % V_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < K, offs_v < V
    state_mask = mask_k[:, None] & mask_v[None, :]
    v_ptr += row * stride_v_b + start * stride_v_t + h * stride_v_h
    o_ptr += ((row * T + start) * H + h) * V
    head = slot.to(tl.int64) * H + h
    # Offsets within a chunk, 32 bits; the pointers move from chunk to chunk.
    keys = offs_t[:, None] * K + offs_k[None, :]
    pairs = offs_t[:, None] * CHUNK + offs_t[None, :]
    G_ptr += (head * CHUNK + CHUNK - 1) * K
    q_start_ptr += head * CHUNK * K
    k_start_ptr += head * CHUNK * K
    k_end_ptr += head * CHUNK * K
    qk_ptr += head * CHUNK * CHUNK
    M_ptr += head * CHUNK * CHUNK
    states_ptr += head * K * V
    writes_ptr += head * CHUNK * V
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if HAS_INITIAL:
        offs = index * stride_i_b + h * stride_i_h + offs_k[:, None] * stride_i_k + offs_v[None, :] * stride_i_v
        state += tl.load(initial_ptr + offs, mask=state_mask, other=0.0).to(tl.float32)

    for c in range(tl.cdiv(length, CHUNK)):
        first = c * CHUNK
        k_start = tl.load(k_start_ptr + keys, mask=mask_k[None, :], other=0.0)
        M = tl.load(M_ptr + pairs)
        v = load_rows(v_ptr, stride_v_t, first, offs_t, offs_v, length, V).to(tl.float32)
        before = operand(state, DOT)
        # u = M (v - (k exp(G)) . state)
        u = v - tl.dot(k_start, before, input_precision=PRECISION)
        u = operand(tl.dot(M, operand(u, DOT), input_precision=PRECISION), DOT)
        if OUTPUTS:
            # o = (scale q exp(G)) . state + qk u
            q_start = tl.load(q_start_ptr + keys, mask=mask_k[None, :], other=0.0)
            o = tl.dot(q_start, before, input_precision=PRECISION)
            o = tl.dot(tl.load(qk_ptr + pairs), u, o, input_precision=PRECISION)
            at = first.to(tl.int64) * H * V + offs_t[:, None] * (H * V) + offs_v[None, :]
            mask = (offs_t + first < length)[:, None] & mask_v[None, :]
            tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(states_ptr + offs_k[:, None] * V + offs_v[None, :], before, mask=state_mask)
            tl.store(writes_ptr + offs_t[:, None] * V + offs_v[None, :], u, mask=mask_v[None, :])
        # state = exp(G[-1]) state + (k exp(G[-1] - G))^T u
        state *= tl.exp2(tl.load(G_ptr + offs_k, mask=mask_k, other=0.0))[:, None]
        k_end = tl.load(k_end_ptr + keys, mask=mask_k[None, :], other=0.0)
        state = tl.dot(tl.trans(k_end), u, state, input_precision=PRECISION)
        G_ptr += H * CHUNK * K
        q_start_ptr += H * CHUNK * K
        k_start_ptr += H * CHUNK * K
        k_end_ptr += H * CHUNK * K
        qk_ptr += H * CHUNK * CHUNK
        M_ptr += H * CHUNK * CHUNK
        states_ptr += H * K * V
        writes_ptr += H * CHUNK * V

    final = final_ptr + (index * H + h) * K * V + offs_k[:, None] * V + offs_v[None, :]
    tl.store(final, state, mask=state_mask)


@triton.jit
def _sequence(sequence, cu_ptr, T, VARLEN: tl.constexpr):
    """(sequence, its row in the batch, first token, tokens)."""
    index = sequence.to(tl.int64)
    if VARLEN:
        begin = tl.load(cu_ptr + sequence).to(tl.int32)
        end = tl.load(cu_ptr + sequence + 1).to(tl.int32)
        row = index * 0
    else:
        begin = 0
        end = T
        row = index
    return index, row, begin, end - begin


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


def walk(
    call: Call, products: Products, made: Chunks, options: Options, outputs: Options | None, o: Tensor, final: Tensor
) -> None:
    """Write o and the final state; o in a kernel of its own where that has options."""
    T, H, K = call.q.shape[1:]
    V, device = call.v.shape[3], call.q.device
    shared = {**call.constants(), "V": V, **products.constants()}
    states = writes = made.G
    if outputs is not None:
        states, writes = (call.empty(size, V, dtype=products.dtype) for size in (K, CHUNK))
    initial = call.v if call.initial_state is None else call.initial_state
    _walk_kernel[(call.sequences * H * cdiv(V, options.block_v(V)),)](
        *(call.v, initial, call.bounds(), made.G, made.q_start, made.k_start, made.k_end, made.qk, made.M),
        *(o, states, writes, final, T, call.sequences, *call.v.stride()[:3]),
        *((0, 0, 0, 0) if call.initial_state is None else call.initial_state.stride()),
        **shared,
        HAS_INITIAL=call.initial_state is not None,
        OUTPUTS=outputs is None,
        BLOCK_K=options.block_k(K),
        BLOCK_V=options.block_v(V),
        **options.launch(device),
    )
    if outputs is None:
        return
    block_t = 32
    _outputs_kernel[(call.slots * (CHUNK // block_t) * H * cdiv(V, outputs.block_v(V)),)](
        *(made.q_start, made.qk, states, writes, call.bounds(), o, T, call.sequences),
        **shared,
        BLOCK_T=block_t,
        BLOCK_K=outputs.block_k(K),
        BLOCK_V=outputs.block_v(V),
        **outputs.launch(device),
    )
