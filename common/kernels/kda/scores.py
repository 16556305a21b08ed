"""What a chunk's tokens see of each other, before there is a state: three kernels, each over all chunks at once.

For the tokens i, j of a chunk, with G the log-decays summed from its start:

    qk[i, j] = scale sum_d q[i, d] k[j, d] exp(G[i, d] - G[j, d])   for j <= i
    A[i, j]  = beta[i] sum_d k[i, d] k[j, d] exp(G[i, d] - G[j, d])   for j < i
    M        = (I + A)^-1 Diag(beta)

A decay of its own in every channel does not factor out of the sum, and exp(-G) overflows. So the decay is split at a
token m between the two, exp(G[i] - G[m]) exp(G[m] - G[j]), both exponents at most 0: for j in an earlier block of 16
than i, the end of the block before i's; within a block, the middle of the smallest of its aligned halves, quarters, ...
that holds both. Each of these is a matrix product under a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from xpu_ports.common.kernels.kda import CHUNK
from xpu_ports.common.kernels.kda.parts import Call, Options, Products, inverse_norm
from xpu_ports.common.kernels.ssd_chunk_scan.parts import load_rows, locate, operand
from xpu_ports.common.tritonlib import kernel, tl, triton

_LOG2_E = tl.constexpr(1.4426950408889634)
# Rows that forward substitution inverts at once.
_BLOCK = 16


@kernel
@triton.jit
def _prepare_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    cu_ptr,
    G_ptr,
    norms_ptr,
    q_start_ptr,
    k_start_ptr,
    k_end_ptr,
    T,
    sequences,
    scale,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_g_b,
    stride_g_t,
    stride_g_h,
    H: tl.constexpr,
    K: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Log-decays summed from a chunk's start, and q and k as the state at its start and end meets them."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    slot = pid // H
    _, row, start, length = locate(slot, cu_ptr, T, CHUNK, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, BLOCK_K)
    q_ptr += row * stride_q_b + start * stride_q_t + h * stride_q_h
    k_ptr += row * stride_k_b + start * stride_k_t + h * stride_k_h
    g_ptr += row * stride_g_b + start * stride_g_t + h * stride_g_h
    head = slot.to(tl.int64) * H + h
    at = head * CHUNK * K + offs_t[:, None] * K + offs_k[None, :]
    mask = (offs_k < K)[None, :]
    g = load_rows(g_ptr, stride_g_t, 0, offs_t, offs_k, length, K).to(tl.float32) * _LOG2_E
    q = load_rows(q_ptr, stride_q_t, 0, offs_t, offs_k, length, K).to(tl.float32)
    k = load_rows(k_ptr, stride_k_t, 0, offs_t, offs_k, length, K).to(tl.float32)
    G = tl.cumsum(g, 0)
    tl.store(G_ptr + at, G, mask=mask)
    if L2NORM:
        q_norm = inverse_norm(q, 1)
        k_norm = inverse_norm(k, 1)
        tl.store(norms_ptr + head * 2 * CHUNK + offs_t, q_norm)
        tl.store(norms_ptr + head * 2 * CHUNK + CHUNK + offs_t, k_norm)
        q *= q_norm[:, None]
        k *= k_norm[:, None]
    decay = tl.exp2(G)
    tl.store(q_start_ptr + at, operand(q * decay * scale, DOT), mask=mask)
    tl.store(k_start_ptr + at, operand(k * decay, DOT), mask=mask)
    # Summed from the end: as total minus G it would lose what matters, the small.
    rest = tl.cumsum(g, 0, reverse=True) - g
    tl.store(k_end_ptr + at, operand(k * tl.exp2(tl.where(rest > 0.0, 0.0, rest)), DOT), mask=mask)


@triton.jit
def _halves(
    q,
    k,
    G,
    G_ptr,
    first,
    offs_i,
    offs_k,
    K: tl.constexpr,
    HALF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(q k^T, k k^T, pairs) under the decay between i in the second and j in the first half of the same 2 HALF rows.

    It holds for these pairs; all other products are finite and mean nothing.
    """
    second = offs_i // HALF % 2 == 1
    group = offs_i // (2 * HALF)
    middle = first + group * (2 * HALF) + HALF - 1
    G_m = tl.load(G_ptr + middle[:, None] * K + offs_k[None, :], mask=(offs_k < K)[None, :], other=0.0)
    decay = tl.exp2(tl.where(second[:, None], G - G_m, G_m - G))
    q = operand(q * decay, DOT)
    k = operand(k * decay, DOT)
    pairs = second[:, None] & (offs_i // HALF % 2 == 0)[None, :] & (group[:, None] == group[None, :])
    earlier = tl.trans(k)
    return tl.dot(q, earlier, input_precision=PRECISION), tl.dot(k, earlier, input_precision=PRECISION), pairs


@kernel
@triton.jit
def _scores_kernel(
    q_ptr,
    k_ptr,
    beta_ptr,
    cu_ptr,
    G_ptr,
    norms_ptr,
    A_ptr,
    qk_ptr,
    T,
    sequences,
    scale,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_b_b,
    stride_b_t,
    stride_b_h,
    H: tl.constexpr,
    K: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    L2NORM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T rows of qk and A, both [slots, H, CHUNK, CHUNK]."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK_T
    pid = tl.program_id(0)
    first = pid % BLOCKS * BLOCK_T
    h = (pid // BLOCKS % H).to(tl.int64)
    slot = pid // (BLOCKS * H)
    _, row, start, length = locate(slot, cu_ptr, T, CHUNK, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    offs_i = tl.arange(0, BLOCK_T)
    offs_j = tl.arange(0, CHUNK)
    head = slot.to(tl.int64) * H + h
    q_ptr += row * stride_q_b + start * stride_q_t + h * stride_q_h
    k_ptr += row * stride_k_b + start * stride_k_t + h * stride_k_h
    beta_ptr += row * stride_b_b + start * stride_b_t + h * stride_b_h
    G_ptr += head * CHUNK * K
    before_q = tl.zeros((BLOCK_T, CHUNK), dtype=tl.float32)
    before_k = tl.zeros((BLOCK_T, CHUNK), dtype=tl.float32)
    within_q = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    within_k = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for at in range(0, K, BLOCK_K):
        offs_k = at + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < K)[None, :]
        q = load_rows(q_ptr, stride_q_t, first, offs_i, offs_k, length, K).to(tl.float32)
        k = load_rows(k_ptr, stride_k_t, first, offs_i, offs_k, length, K).to(tl.float32)
        G = tl.load(G_ptr + (first + offs_i)[:, None] * K + offs_k[None, :], mask=mask_k, other=0.0)
        if first > 0:
            G_b = tl.load(G_ptr + (first - 1) * K + offs_k[None, :], mask=mask_k, other=0.0)
            earlier = load_rows(k_ptr, stride_k_t, 0, offs_j, offs_k, tl.minimum(first, length), K).to(tl.float32)
            mask_j = (offs_j < first)[:, None]
            G_j = tl.load(G_ptr + offs_j[:, None] * K + offs_k[None, :], mask=mask_j & mask_k, other=0.0)
            earlier = tl.trans(operand(earlier * tl.exp2(tl.where(mask_j, G_b - G_j, 0.0)), DOT))
            since = tl.exp2(G - G_b)
            before_q = tl.dot(operand(q * since, DOT), earlier, before_q, input_precision=PRECISION)
            before_k = tl.dot(operand(k * since, DOT), earlier, before_k, input_precision=PRECISION)
        for level in tl.static_range(LEVELS):
            s_q, s_k, pairs = _halves(q, k, G, G_ptr, first, offs_i, offs_k, K, BLOCK_T // 2 >> level, DOT, PRECISION)
            within_q = tl.where(pairs, within_q + s_q, within_q)
            within_k = tl.where(pairs, within_k + s_k, within_k)
        same = offs_i[:, None] == offs_i[None, :]
        within_q = tl.where(same, within_q + tl.sum(q * k, 1)[:, None], within_q)

    beta = tl.load(beta_ptr + (first + offs_i) * stride_b_t, mask=first + offs_i < length, other=0.0).to(tl.float32)
    left_q = scale + tl.zeros((BLOCK_T,), dtype=tl.float32)
    if L2NORM:
        norms_ptr += head * 2 * CHUNK
        left_q *= tl.load(norms_ptr + first + offs_i)
        beta *= tl.load(norms_ptr + CHUNK + first + offs_i)
        right = tl.load(norms_ptr + CHUNK + offs_j)[None, :]
        before_q *= right
        before_k *= right
        right = tl.load(norms_ptr + CHUNK + first + offs_i)[None, :]
        within_q *= right
        within_k *= right
    rows = head * CHUNK * CHUNK + (first + offs_i)[:, None] * CHUNK
    outside = ((offs_j < first) | (offs_j >= first + BLOCK_T))[None, :]
    tl.store(qk_ptr + rows + offs_j[None, :], operand(before_q * left_q[:, None], DOT), mask=outside)
    tl.store(A_ptr + rows + offs_j[None, :], before_k * beta[:, None], mask=outside)
    tl.store(qk_ptr + rows + first + offs_i[None, :], operand(within_q * left_q[:, None], DOT))
    tl.store(A_ptr + rows + first + offs_i[None, :], within_k * beta[:, None])


@triton.jit
def _load_block(A_ptr, i: tl.constexpr, j: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Block (i, j) of A."""
    offs = tl.arange(0, BLOCK)
    return tl.load(A_ptr + (i * BLOCK + offs)[:, None] * CHUNK + (j * BLOCK + offs)[None, :])


@triton.jit
def _eliminate(X, A_ptr, i, BLOCK_AT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Row i of the inverse X of a diagonal block: that of I less row i of A times the rows of the inverse above it."""
    offs = tl.arange(0, BLOCK)
    a = tl.load(A_ptr + (BLOCK_AT + i) * CHUNK + BLOCK_AT + offs)
    above = tl.sum(X * a[:, None], 0)
    return tl.where(offs[:, None] == i, X - above[None, :], X)


@triton.jit
def _store_block(
    M_ptr,
    X,
    beta_ptr,
    stride_b_t,
    i: tl.constexpr,
    j: tl.constexpr,
    length,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Block (i, j) of M: columns of the inverse times beta, which is 0 from the chunk's last token on."""
    offs = tl.arange(0, BLOCK)
    columns = j * BLOCK + offs
    beta = tl.load(beta_ptr + columns * stride_b_t, mask=columns < length, other=0.0).to(tl.float32)
    at = (i * BLOCK + offs)[:, None] * CHUNK + columns[None, :]
    tl.store(M_ptr + at, operand(X * beta[None, :], DOT))


# One code for all lengths and widths: it is long, and none of it depends on them.
@kernel
@triton.jit(do_not_specialize=["T", "sequences", "stride_b_b", "stride_b_t", "stride_b_h"])
def _solve_kernel(
    A_ptr,
    beta_ptr,
    cu_ptr,
    M_ptr,
    T,
    sequences,
    stride_b_b,
    stride_b_t,
    stride_b_h,
    H: tl.constexpr,
    VARLEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """M of one chunk, [slots, H, CHUNK, CHUNK], by blocks of 16: those on the diagonal, then from left to right."""
    pid = tl.program_id(0)
    h = (pid % H).to(tl.int64)
    slot = pid // H
    _, row, start, length = locate(slot, cu_ptr, T, CHUNK, sequences, VARLEN, True, BLOCK_S)
    if length <= 0:
        return
    beta_ptr += row * stride_b_b + start * stride_b_t + h * stride_b_h
    head = slot.to(tl.int64) * H + h
    A_ptr += head * CHUNK * CHUNK
    M_ptr += head * CHUNK * CHUNK
    # X = (I + A)^-1: X[i, j] = -X[i, i] sum_{j <= l < i} A[i, l] X[l, j]
    same = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
    X00 = tl.where(same, 1.0, 0.0) + tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    X11 = X00
    X22 = X00
    X33 = X00
    # Forward substitution in fp32, a row of each of the four at a time.
    for i in range(1, BLOCK):
        X00 = _eliminate(X00, A_ptr, i, 0, CHUNK, BLOCK)
        X11 = _eliminate(X11, A_ptr, i, BLOCK, CHUNK, BLOCK)
        X22 = _eliminate(X22, A_ptr, i, 2 * BLOCK, CHUNK, BLOCK)
        X33 = _eliminate(X33, A_ptr, i, 3 * BLOCK, CHUNK, BLOCK)
    A10 = _load_block(A_ptr, 1, 0, CHUNK, BLOCK)
    A21 = _load_block(A_ptr, 2, 1, CHUNK, BLOCK)
    A32 = _load_block(A_ptr, 3, 2, CHUNK, BLOCK)
    X10 = -tl.dot(X11, tl.dot(A10, X00, input_precision=PRECISION), input_precision=PRECISION)
    X21 = -tl.dot(X22, tl.dot(A21, X11, input_precision=PRECISION), input_precision=PRECISION)
    X32 = -tl.dot(X33, tl.dot(A32, X22, input_precision=PRECISION), input_precision=PRECISION)
    A20 = _load_block(A_ptr, 2, 0, CHUNK, BLOCK)
    A31 = _load_block(A_ptr, 3, 1, CHUNK, BLOCK)
    s = tl.dot(A20, X00, input_precision=PRECISION)
    X20 = -tl.dot(X22, tl.dot(A21, X10, s, input_precision=PRECISION), input_precision=PRECISION)
    s = tl.dot(A31, X11, input_precision=PRECISION)
    X31 = -tl.dot(X33, tl.dot(A32, X21, s, input_precision=PRECISION), input_precision=PRECISION)
    A30 = _load_block(A_ptr, 3, 0, CHUNK, BLOCK)
    s = tl.dot(A30, X00, input_precision=PRECISION)
    s = tl.dot(A31, X10, s, input_precision=PRECISION)
    X30 = -tl.dot(X33, tl.dot(A32, X20, s, input_precision=PRECISION), input_precision=PRECISION)
    none = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    _store_block(M_ptr, X00, beta_ptr, stride_b_t, 0, 0, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X11, beta_ptr, stride_b_t, 1, 1, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X22, beta_ptr, stride_b_t, 2, 2, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X33, beta_ptr, stride_b_t, 3, 3, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X10, beta_ptr, stride_b_t, 1, 0, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X21, beta_ptr, stride_b_t, 2, 1, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X32, beta_ptr, stride_b_t, 3, 2, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X20, beta_ptr, stride_b_t, 2, 0, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X31, beta_ptr, stride_b_t, 3, 1, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, X30, beta_ptr, stride_b_t, 3, 0, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 0, 1, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 0, 2, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 0, 3, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 1, 2, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 1, 3, length, CHUNK, BLOCK, DOT)
    _store_block(M_ptr, none, beta_ptr, stride_b_t, 2, 3, length, CHUNK, BLOCK, DOT)


@dataclass(frozen=True)
class Chunks:
    """What the three kernels leave, all [slots, H, ...], operands in the products' dtype."""

    # [CHUNK, K] fp32: log-decays in base 2 from the chunk's start; those of tokens past its last are 0.
    G: Tensor
    # [CHUNK, K]: scale q exp(G), k exp(G) and k exp(G[-1] - G).
    q_start: Tensor
    k_start: Tensor
    k_end: Tensor
    # [CHUNK, CHUNK]; 0 in the rows and columns past the last token.
    qk: Tensor
    M: Tensor


def chunks(call: Call, products: Products, prepare: Options, scores: Options, solve: Options) -> Chunks:
    """Run the three kernels."""
    T, H, K = call.q.shape[1:]
    dtype, device = products.dtype, call.q.device
    made = Chunks(
        call.empty(CHUNK, K),
        *(call.empty(CHUNK, K, dtype=dtype) for _ in range(3)),
        *(call.empty(CHUNK, CHUNK, dtype=dtype) for _ in range(2)),
    )
    A = call.empty(CHUNK, CHUNK)
    norms = call.empty(2, CHUNK) if call.l2norm else made.G
    shared = {**call.constants(), "DOT": products.dot}
    _prepare_kernel[(call.slots * H,)](
        *(call.q, call.k, call.g, call.bounds(), made.G, norms, made.q_start, made.k_start, made.k_end),
        *(T, call.sequences, call.scale, *call.q.stride()[:3], *call.k.stride()[:3], *call.g.stride()[:3]),
        **shared,
        L2NORM=call.l2norm,
        BLOCK_K=prepare.block_k(K),
        **prepare.launch(device),
    )
    _scores_kernel[(call.slots * H * (CHUNK // scores.t),)](
        *(call.q, call.k, call.beta, call.bounds(), made.G, norms, A, made.qk),
        *(T, call.sequences, call.scale, *call.q.stride()[:3], *call.k.stride()[:3], *call.beta.stride()),
        **shared,
        L2NORM=call.l2norm,
        PRECISION=products.precision,
        LEVELS=scores.t.bit_length() - 1,
        BLOCK_T=scores.t,
        BLOCK_K=scores.block_k(K),
        **scores.launch(device),
    )
    _solve_kernel[(call.slots * H,)](
        *(A, call.beta, call.bounds(), made.M, T, call.sequences, *call.beta.stride()),
        **{name: value for name, value in shared.items() if name != "K"},
        PRECISION=products.solve,
        BLOCK=_BLOCK,
        **solve.launch(device),
    )
    return made
