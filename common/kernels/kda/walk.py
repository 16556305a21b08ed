"""The state from chunk to chunk in registers, with the outputs: for devices whose programs can hold one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xpu_ports.common.kernels.kda.parts import Call, Options, Products, sequence_at
from xpu_ports.common.kernels.kda.scores import Chunks
from xpu_ports.common.kernels.ssd_chunk_scan.parts import load_rows, operand
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
    final_ptr,
    T,
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
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_V columns of one head's state through a whole sequence, and those of o."""
    V_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    h = (pid // V_BLOCKS % H).to(tl.int64)
    sequence = pid // (V_BLOCKS * H)
    index, row, start, length, slot = sequence_at(sequence, cu_ptr, T, VARLEN, CHUNK, BLOCK_S)
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
        # o = (scale q exp(G)) . state + qk u
        q_start = tl.load(q_start_ptr + keys, mask=mask_k[None, :], other=0.0)
        o = tl.dot(q_start, before, input_precision=PRECISION)
        o = tl.dot(tl.load(qk_ptr + pairs), u, o, input_precision=PRECISION)
        at = first.to(tl.int64) * H * V + offs_t[:, None] * (H * V) + offs_v[None, :]
        mask = (offs_t + first < length)[:, None] & mask_v[None, :]
        tl.store(o_ptr + at, o.to(o_ptr.dtype.element_ty), mask=mask)
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

    final = final_ptr + (index * H + h) * K * V + offs_k[:, None] * V + offs_v[None, :]
    tl.store(final, state, mask=state_mask)


@dataclass(frozen=True)
class Walk:
    """How a call runs this way."""

    tile: Options

    def launch(self, call: Call, products: Products, made: Chunks, o: Tensor, final: Tensor) -> None:
        """Write o and the final state."""
        T, H, K = call.q.shape[1:]
        V = call.v.shape[3]
        initial, strides = call.start()
        _walk_kernel[(call.sequences * H * cdiv(V, self.tile.block_v(V)),)](
            *(call.v, initial, call.bounds(), made.G, made.q_start, made.k_start, made.k_end, made.qk, made.M),
            *(o, final, T, *call.v.stride()[:3], *strides),
            **call.constants(),
            **products.constants(),
            V=V,
            HAS_INITIAL=call.initial_state is not None,
            BLOCK_K=self.tile.block_k(K),
            BLOCK_V=self.tile.block_v(V),
            **self.tile.launch(call.q.device),
        )
