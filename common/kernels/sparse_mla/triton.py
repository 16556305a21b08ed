"""The Triton implementations of both ops: which calls they take, and how each device runs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture, grf_options
from xpu_ports.common.kernels.fp8_pages import GROUP, page_tokens, refuses_pages, store_slots
from xpu_ports.common.kernels.sparse_mla import hopper, sparse_mla_decode, sparse_mla_prefill
from xpu_ports.common.kernels.sparse_mla.kernels import _join_kernel, _sparse_mla_kernel
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, next_power_of_2, on_device_of

# A program holds the sums of all columns for its heads.
LARGEST_HEAD = 512
# Parts that the keys of one token are split into, at most.
MOST_SPLITS = 64
_INTEGERS = (torch.int32, torch.int64)
# bf16 that add up to a number: 8 bits of the mantissa each.
_PARTS = {torch.uint8: 1, torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def _refuses_decode(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dim() != 3:
        return f"q has {q.dim()} dimensions, not 3"
    why = _refuses(q, window, entries, indices, lengths, sinks, span, rope)
    if why is None and store_slots(window, q.shape[2], rope) < span:
        why = f"the window has {store_slots(window, q.shape[2], rope)} slots, fewer than {span}"
    return why


def _refuses_prefill(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    start: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if q.dim() != 4:
        return f"q has {q.dim()} dimensions, not 4"
    why = _refuses(q, rows, entries, indices, start, sinks, span, rope)
    if why is None and (rows.dtype == torch.uint8 or rows.shape[1] < q.shape[1]):
        return f"rows are {tuple(rows.shape)} in {rows.dtype}, not the {q.shape[1]} new tokens and those before them"
    return why


def _refuses(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    span: int,
    rope: int,
) -> str | None:
    """What both ops refuse."""
    B, H, K = q.shape[0], *q.shape[-2:]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"q has dtype {q.dtype}, not one of float16, bfloat16, float32"
    if q.stride(-1) != 1 and K > 1:
        return f"the last dimension of q has stride {q.stride(-1)}, not 1"
    if not 0 < K <= LARGEST_HEAD:
        return f"heads of {K} columns, not 1 to {LARGEST_HEAD}"
    if span < 1:
        return f"a window of {span} tokens, not at least 1"
    for name, store in (("the window", window), ("entries", entries)):
        why = None if store is None else _refuses_store(name, store, B, K, rope)
        if why is not None:
            return why
    if sinks.shape != (H,) or sinks.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"sinks are {tuple(sinks.shape)} in {sinks.dtype}, not ({H},) in float16, bfloat16 or float32"
    if lengths.shape != (B,) or lengths.dtype not in _INTEGERS:
        return f"the tokens of each row are {tuple(lengths.shape)} in {lengths.dtype}, not ({B},) in int32 or int64"
    if indices is None:
        return None
    if indices.shape[:-1] != q.shape[:-2] or indices.dtype not in _INTEGERS:
        return f"indices are {tuple(indices.shape)} in {indices.dtype}, not some for each token in int32 or int64"
    return "indices, and no entries" if entries is None else None


def _refuses_store(name: str, store: Tensor, B: int, K: int, rope: int) -> str | None:
    if store.dim() != 3 or store.shape[0] != B:
        return f"{name} has shape {tuple(store.shape)}, not ({B}, ...) in 3 dimensions"
    if store.dtype == torch.uint8:
        why = refuses_pages(store, K, rope)
        if why is None and (rope % 2 or any(n % 4 for n in (store.storage_offset(), *store.stride()[:2]))):
            why = f"{name} has tokens at addresses that 4 does not divide"
        return why
    if store.dtype not in _PARTS or store.shape[2] != K:
        return f"{name} is {tuple(store.shape)} in {store.dtype}, not {K} columns in float16, bfloat16 or float32"
    if store.stride(2) != 1 and K > 1:
        return f"the last dimension of {name} has stride {store.stride(2)}, not 1"
    return None


@dataclass(frozen=True)
class Tile:
    """What one program takes: heads, keys at a time, its warps."""

    heads: int
    keys: int
    warps: int
    # Columns of a score's product at a time; 0 for all of them, of rows that are read once for scores and values.
    chunk: int = 0
    # Blocks of keys in flight; of pages instead whether the next block's rows are on their way.
    stages: int = 1
    ahead: bool = False
    # Registers a thread, where that can be chosen.
    registers: int = 128


def tile(arch: Architecture, tokens: int, H: int, width: int, rope: int, parts: int, paged: bool, named: bool) -> Tile:
    """The tile for so many queries of H heads of `width` columns, a power of two, and operands of so many bf16.

    paged: the window is. named: some entries are chosen.
    """
    if arch.has_grf_modes:
        # Twice the keys spill on Max and Xe2 beside the decoding of pages, and so do fewer warps or registers.
        chunk = (GROUP if parts == 1 else 16) if arch.matrix_units else 32
        return Tile(16, 16, 16, min(chunk, width), registers=256)
    if parts > 1 or rope > GROUP:
        return Tile(16, 16, 4, min(GROUP, width))
    few = tokens * cdiv(H, 64) < 4
    # On an H200 64 heads share a token's decoding and are what its matrix units take at once, but then a program has
    # a multiprocessor for itself, whose latencies few tokens do not hide: rows are on their way while others are
    # attended to, those of pages undecoded, for which alone there are registers.
    if paged:
        return Tile(64, 64, 8, ahead=True) if H > 32 and not few else Tile(16, 32, 4)
    # Few rows that need no decoding are best read by as many programs as there are multiprocessors: of 64 heads the
    # window alone takes 6.5 us instead of 11.9 for 4 tokens, 9.7 instead of 13.8 for 32, 12.9 instead of 17.7 for 64.
    if not named and tokens * cdiv(H, 16) <= arch.units:
        return Tile(16, 32 if tokens * cdiv(H, 16) <= arch.units // 8 else 64, 4)
    if not named and tokens * cdiv(H, 32) <= arch.units:
        return Tile(32, 64, 8)
    if H > 32 and not few:
        # Copies of chosen rows ahead pay for many tokens only: without them 8 take 15.2 us instead of 17.1, 32 take
        # 29.4 instead of 31.8.
        return Tile(64, 64, 8, stages=1 if named and tokens * cdiv(H, 64) <= arch.units else 2)
    return Tile(16, 32, 4)


def split(arch: Architecture, programs: int, blocks: int) -> int:
    """How many parts the keys are split into: by shapes alone, so that a captured launch stays right."""
    parts = max(1, min(arch.units // programs, blocks, MOST_SPLITS))
    # The longest part is what a call waits for: fewer parts of that length have less to join.
    return parts if arch.has_grf_modes else cdiv(blocks, cdiv(blocks, parts))


def join_tile(arch: Architecture, parts: int) -> tuple[int, int]:
    """(columns, warps) of a program that joins so many parts, a power of two."""
    if arch.has_grf_modes:
        return max(16, 1024 // parts), 4
    # A thread has all parts of its four columns, up to 16: nothing is exchanged.
    return (512, 4) if parts <= 16 else (128, 2)


def _attend(
    q: Tensor,
    window: Tensor,
    before: int,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> Tensor:
    """One token a row on a ring of `before` slots; T tokens, q [B, T, H, K], on rows with so many before these."""
    decode = q.dim() == 3
    B, T, (H, K) = q.shape[0], 1 if decode else q.shape[1], q.shape[-2:]
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if y.numel() == 0:
        return y
    if entries is not None and entries.numel() == 0:
        entries = indices = None
    stores = [window] if entries is None else [window, entries]
    # Products of fp16 are those of matrix units; beside bf16 it is a sum of two.
    fp16 = q.dtype == torch.float16 and all(s.dtype == torch.float16 for s in stores)
    parts = [1 if fp16 else _PARTS[t.dtype] for t in (q, window, window if entries is None else entries)]
    tokens = [page_tokens(s, K, rope) if s.dtype == torch.uint8 else 0 for s in stores]
    alike = entries is not None and window.dtype == entries.dtype and tokens[0] == tokens[-1]
    slots = 0 if entries is None else store_slots(entries, K, rope)
    named = slots if indices is None else indices.shape[-1]
    arch = architecture(q.device)
    width = max(16, next_power_of_2(K))
    cut = tile(arch, B * T, H, width, rope, max(parts), tokens[0] > 0, indices is not None)
    pages = tokens[0] > 0 and (entries is None or alike)
    programs = B * T * cdiv(H, cut.heads)
    blocks = cdiv(span, cut.keys) + cdiv(named, cut.keys)
    splits = split(arch, programs, blocks)
    if decode and pages and cut.heads == hopper.HEADS and cut.keys == hopper.KEYS and hopper.takes(q, rope):
        with on_device_of(q):
            hopper.launch(
                q, window, before, entries, indices, lengths, sinks, y,
                span, ratio, slots, named, tokens[0], splits, scale,
            )  # fmt: skip
        return y
    out, tops = y, y
    if splits > 1:
        out = torch.empty((B * T * H * splits, K), dtype=torch.float32, device=q.device)
        tops = torch.empty((B * T * H * splits, 2), dtype=torch.float32, device=q.device)
    # A page's tokens are found in words.
    strides = [(s.stride(0), s.stride(1) // 4 if s.dtype == torch.uint8 else s.stride(1)) for s in stores]
    of_q, of_indices = q.stride()[:-1], (0, 0, 0) if indices is None else indices.stride()
    if decode:
        # No view with a dimension of tokens: its stride is never used.
        of_q, of_indices = (of_q[0], 0, of_q[1]), (of_indices[0], 0, of_indices[-1])
    with on_device_of(q):
        _sparse_mla_kernel[(programs, splits)](
            q,
            window,
            stores[-1],
            q if indices is None else indices,
            lengths,
            sinks,
            out,
            tops,
            T,
            before,
            slots,
            named,
            scale,
            *of_q,
            *strides[0],
            *strides[-1],
            *of_indices,
            lengths.stride(0),
            sinks.stride(0),
            1,
            H=H,
            K=K,
            ROPE=rope,
            SPAN=span,
            RATIO=ratio,
            DECODE=decode,
            ENTRIES=entries is not None,
            NAMED=indices is not None,
            ALIKE=alike,
            # Where a program has one block, there is none to load ahead.
            AHEAD=cut.ahead and alike and tokens[0] > 0 and splits < blocks,
            TOKENS_W=tokens[0],
            TOKENS_E=tokens[-1],
            PARTS_Q=parts[0],
            PARTS_W=parts[1],
            PARTS_E=parts[2],
            SPLIT=splits > 1,
            WHOLE=cut.chunk == 0,
            CHUNK=cut.chunk,
            BLOCK_H=cut.heads,
            BLOCK_S=cut.keys,
            BLOCK_K=width,
            num_warps=cut.warps,
            num_stages=cut.stages,
            **grf_options(cut.registers, arch),
        )
        if splits > 1:
            block_splits = next_power_of_2(splits)
            columns, warps = join_tile(arch, block_splits)
            block_k = min(width, columns)
            _join_kernel[(B * T * H, cdiv(K, block_k))](
                out, tops, y, splits, K=K, BLOCK_SPLITS=block_splits, BLOCK_K=block_k, num_warps=warps
            )
    return y


@sparse_mla_decode.implement("triton", "xpu", "cuda", refuses=_refuses_decode)
def sparse_mla_decode_triton(
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    lengths: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> Tensor:
    ring = store_slots(window, q.shape[2], rope)
    return _attend(q, window, ring, entries, indices, lengths, sinks, span, ratio, rope, scale)


@sparse_mla_prefill.implement("triton", "xpu", "cuda", refuses=_refuses_prefill)
def sparse_mla_prefill_triton(
    q: Tensor,
    rows: Tensor,
    entries: Tensor | None,
    indices: Tensor | None,
    start: Tensor,
    sinks: Tensor,
    span: int,
    ratio: int,
    rope: int,
    scale: float,
) -> Tensor:
    before = rows.shape[1] - q.shape[1]
    return _attend(q, rows, before, entries, indices, start, sinks, span, ratio, rope, scale)
