"""Benchmark rows of DeepSeek-V4's ops, at the widths of its smaller published model.

Letters beside the house's: S residual streams, or slots and entries; R rank, C indexer's columns; N rotated pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.bench.case import Args, Case, Chain, Draw, Sample, count, sample_index
from xpu_ports.common.kernels.compress import compress_csa, compress_hca
from xpu_ports.common.kernels.fp8_pages import PAGE_TOKENS, cache_rows, index_page_bytes, page_bytes, token_bytes
from xpu_ports.common.kernels.indexer import indexer_scores, stable_topk
from xpu_ports.common.kernels.mhc import mhc_head, mhc_post, mhc_post_products, mhc_pre, product_columns
from xpu_ports.common.kernels.mla_rope import (
    inverse_rope_grouped_out,
    norm_rope_insert,
    qnorm_rope_kv_insert,
    rope_tail,
)
from xpu_ports.common.kernels.moe_sqrtsoftplus_router import moe_hash_router, moe_sqrtsoftplus_router
from xpu_ports.common.kernels.sparse_mla import sparse_mla_decode, sparse_mla_prefill

Size = Mapping[str, int]

EPS = 1e-6
WINDOW, ROPE, RATIO, HEAVY = 128, 64, 4, 128


def _ends(*positions: int) -> Sample:
    """The first and the last of the arguments at these positions and of all outputs."""

    def sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
        rows = sorted({0, outputs[0].shape[0] - 1})
        picked = (sample_index(a, rows) if i in positions else a for i, a in enumerate(args))
        return tuple(picked), [sample_index(t, rows) for t in outputs]

    return sample


def _wide(draw: Draw, *shape: int) -> Tensor:
    return draw(*shape, dtype=torch.promote_types(draw.dtype, torch.float32))


def _numbers(draw: Draw, value: int, *shape: int) -> Tensor:
    """An integer tensor of one value."""
    return draw.uniform(value, value, *shape, dtype=torch.int64)


def _pages(draw: Draw, B: int, S: int, K: int) -> Tensor:
    """Full pages of positive e4m3 with scales around 1 and normal bf16 behind them."""
    P, (data, scales) = -(-S // PAGE_TOKENS), token_bytes(K, ROPE)
    pages = draw.uniform(0, 100, B, P, page_bytes(K, ROPE), dtype=torch.uint8)
    tokens, rest = pages[..., : PAGE_TOKENS * (data + scales)].split([PAGE_TOKENS * data, PAGE_TOKENS * scales], -1)
    tail = draw(B, P, PAGE_TOKENS, ROPE, dtype=torch.bfloat16).view(torch.uint8)
    tokens.unflatten(-1, (PAGE_TOKENS, data))[..., K - ROPE :] = tail
    rest.copy_(draw.uniform(120, 124, *rest.shape, dtype=torch.uint8))
    return pages


# ----------------------------------------------------------------------------------------------------------- streams


def _mhc(size: Size, draw: Draw) -> Args:
    T, S, D = (size[letter] for letter in "TSD")
    n = (2 + S) * S
    return draw(T, S, D), _wide(draw, n, S * D) * (S * D) ** -0.5, _wide(draw, 3), _wide(draw, n), EPS, EPS, 20


def _mhc_post(size: Size, draw: Draw) -> Args:
    T, S, D = (size[letter] for letter in "TSD")
    return draw(T, D), draw(T, S, D), _wide(draw, T, S).sigmoid(), _wide(draw, T, S, S).softmax(-1)


def _mhc_given(size: Size, draw: Draw) -> Args:
    """Streams of size 1, so that the squares' parts are the numbers of columns."""
    x, fn, *rest = _mhc(size, draw)
    (T, S, D), R = x.shape, fn.shape[0]
    columns = product_columns(T, D)
    parts = -(-D // columns)
    products = _wide(draw, T, parts, R + 1) * parts**-0.5
    products[..., R] = S * columns
    return x, fn, *rest, products


def _mhc_post_products(size: Size, draw: Draw) -> Args:
    S, D = size["S"], size["D"]
    return *_mhc_post(size, draw), _wide(draw, (2 + S) * S, S * D) * (S * D) ** -0.5


def _mhc_post_pre(size: Size, draw: Draw) -> Args:
    return *_mhc_post_products(size, draw), _wide(draw, 3), _wide(draw, (2 + size["S"]) * size["S"])


def _post_products_then_pre(
    post_products: Callable[..., Any], pre: Callable[..., Any], *given: Tensor
) -> tuple[Tensor, ...]:
    y, x, post, comb, fn, scale, base = given
    streams, products = post_products(y, x, post, comb, fn)
    return streams, *pre(streams, fn, scale, base, EPS, EPS, 20, products)


def _post_then_pre(put_back: Callable[..., Any], pre: Callable[..., Any], *given: Tensor) -> tuple[Tensor, ...]:
    y, x, post, comb, fn, scale, base = given
    streams = put_back(y, x, post, comb)
    return streams, *pre(streams, fn, scale, base, EPS, EPS, 20)


def _streams_between(args: Args) -> int:
    """The second op's reading of the streams, below zero: it counts."""
    return -args[1].numel() * args[1].element_size()


def _first_and_last_64(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    """As many tokens as are many to `product_columns`."""
    T = outputs[0].shape[0]
    rows = sorted({*range(min(T, 64)), *range(max(0, T - 64), T)})
    return (*(sample_index(a, rows) for a in args[:4]), args[4]), [sample_index(t, rows) for t in outputs]


def _mhc_head(size: Size, draw: Draw) -> Args:
    T, S, D = (size[letter] for letter in "TSD")
    return draw(T, S, D), _wide(draw, S, S * D) * (S * D) ** -0.5, _wide(draw, 1), _wide(draw, S), EPS, EPS


# ----------------------------------------------------------------------------------------------------------- entries


def _csa(size: Size, draw: Draw) -> Args:
    B, T, C = (size[letter] for letter in "BTC")
    x, bias = _wide(draw, B, T, 4 * C), _wide(draw, RATIO, 2 * C)
    return x, bias, _wide(draw, B, 2 * RATIO + 32, 4 * C), _numbers(draw, 1023, B), _numbers(draw, T, B)


def _hca(size: Size, draw: Draw) -> Args:
    B, T, C = (size[letter] for letter in "BTC")
    x, bias = _wide(draw, B, T, 2 * C), _wide(draw, 128, C)
    return x, bias, _wide(draw, B, 128 + 32, 2 * C), _numbers(draw, 1023, B), _numbers(draw, T, B)


def _rest_of_the_ring(args: Args) -> int:
    """Bytes of the ring, read and written, beyond the windows before the new tokens and these."""
    x, bias, state, *_ = args
    slots = state.shape[1]
    read = (2 if bias.shape[0] == RATIO else 1) * bias.shape[0] - 1
    return (2 * slots - read - min(x.shape[1], slots)) * state[:, 0].numel() * state.element_size()


def _scores(size: Size, draw: Draw) -> Args:
    B, T, S, H, C = (size[letter] for letter in "BTSHC")
    return draw(B, T, H, C), draw(B, T, H), draw(B, S, C), S, _numbers(draw, RATIO * S, B), RATIO


def _scores_of_pages(size: Size, draw: Draw) -> Args:
    q, weights, keys, *rest = _scores(size, draw)
    B, S, C = keys.shape
    pages = draw.uniform(0, 100, B, -(-S // PAGE_TOKENS), index_page_bytes(C), dtype=torch.uint8)
    pages[..., PAGE_TOKENS * C :] = torch.full((PAGE_TOKENS,), 2.0**-3, device=pages.device).view(torch.uint8)
    return q, weights, pages, *rest


def _scores_flops(size: Size) -> int:
    return 2 * size["B"] * size["T"] * size["S"] * size["H"] * size["C"]


def _topk(size: Size, draw: Draw) -> Args:
    return _wide(draw, size["T"], size["S"]), size["A"]


def _rows(size: Size, draw: Draw) -> Args:
    B, S, K = (size[letter] for letter in "BSK")
    return _pages(draw, B, S, K), draw.uniform(0, S, B, S, dtype=torch.int64), K, ROPE


# ----------------------------------------------------------------------------------------------------- around attention


def _angles(size: Size, draw: Draw) -> tuple[Tensor, Tensor]:
    angles = draw.uniform(0.0, 6.28, size["B"], size["T"], size["N"], dtype=torch.float32)
    return angles.cos(), angles.sin()


def _slots(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).repeat(x.shape[0], 1)


def _insert(size: Size, draw: Draw) -> Args:
    B, T, H, K = (size[letter] for letter in "BTHK")
    q = draw(B, T, H, K)
    return q, draw(B, T, K), _wide(draw, K), *_angles(size, draw), _slots(q), draw(B, T, K), EPS


def _insert_paged(size: Size, draw: Draw) -> Args:
    q, kv, weight, cos, sin, slots, *_ = _insert(size, draw)
    # The root of the mean square is 1, the weight a value of bf16 and the turn by 90 degrees: no row is next to a tie.
    weight, cos, sin = weight.bfloat16().float(), cos * 0, sin * 0 + 1
    return q, kv.sign(), weight, cos, sin, slots, _pages(draw, *kv.shape), EPS


def _not_inserted(args: Args) -> int:
    """Bytes of a store that are not read, and of pages also those that are not written."""
    *_, slots, store, _ = args
    if store.dtype != torch.uint8:
        return store.numel() * store.element_size()
    return 2 * store.numel() - page_bytes(args[0].shape[-1], ROPE) // PAGE_TOKENS * slots.numel()


def _insert_entries(size: Size, draw: Draw) -> Args:
    B, T, K = (size[letter] for letter in "BTK")
    rows = _wide(draw, B, T, K)
    return rows, _wide(draw, K), *_angles(size, draw), _slots(rows), draw(B, T, K), EPS, False


def _not_inserted_entries(args: Args) -> int:
    return _not_inserted(args[:-1])


def _tail(size: Size, draw: Draw) -> Args:
    B, T, H, K = (size[letter] for letter in "BTHK")
    return draw(B, T, H, K), *_angles(size, draw)


def _out(size: Size, draw: Draw) -> Args:
    G, R = size["G"], size["R"]
    o, cos, sin = _tail(size, draw)
    width = size["H"] * size["K"] // G
    return o, cos, sin, draw(G * R, width) * width**-0.5


def _out_flops(size: Size) -> int:
    return 2 * size["B"] * size["T"] * size["R"] * size["H"] * size["K"]


# --------------------------------------------------------------------------------------------------------- attention


def _decode(size: Size, draw: Draw) -> Args:
    B, H, K, S, A = (size[letter] for letter in "BHKSA")
    # A places in rising order, one in each stretch of S // A entries.
    step = S // A
    indices = draw.uniform(0, step, B, A, dtype=torch.int64)
    indices = (indices + step * _slots(indices)).int()
    window, entries = _pages(draw, B, WINDOW, K), _pages(draw, B, S, K)
    lengths, sinks = _numbers(draw, RATIO * S, B), _wide(draw, H)
    return draw(B, H, K), window, entries, indices, lengths, sinks, WINDOW, RATIO, ROPE, K**-0.5


def _decode_closed(size: Size, draw: Draw) -> Args:
    q, window, entries, _, lengths, sinks, span, _, *rest = _decode({**size, "A": 1}, draw)
    return q, window, entries, None, lengths // RATIO * HEAVY, sinks, span, HEAVY, *rest


def _decode_flops(size: Size) -> int:
    return 4 * size["B"] * size["H"] * size["K"] * (WINDOW + size.get("A", size["S"]))


def _softmax(size: Size) -> int:
    return 5 * size["B"] * size.get("T", 1) * size["H"] * (WINDOW + size.get("A", size["S"]))


def _not_chosen(args: Args) -> int:
    """Bytes of the pages beyond the rows that count, each with its scales."""
    q, window, entries, indices, lengths, _, _, ratio, *_ = args
    (B, _, K), S = q.shape, entries.shape[1] * PAGE_TOKENS
    many = B * indices.shape[1] if indices is not None else int((lengths // ratio).clamp(max=S).sum())
    return window.numel() + entries.numel() - page_bytes(K, ROPE) // PAGE_TOKENS * (B * WINDOW + many)


def _prefill(size: Size, draw: Draw) -> Args:
    B, T, H, K, S = (size[letter] for letter in "BTHKS")
    rows, entries = draw(B, WINDOW - 1 + T, K), draw(B, S, K)
    start, sinks = _numbers(draw, RATIO * S - T, B), _wide(draw, H)
    return draw(B, T, H, K), rows, entries, None, start, sinks, WINDOW, RATIO, ROPE, K**-0.5


def _prefill_named(size: Size, draw: Draw) -> Args:
    q, rows, entries, _, start, *rest = _prefill(size, draw)
    B, T, A, step = size["B"], size["T"], size["A"], size["S"] // size["A"]
    indices = draw.uniform(0, step, B * T, A, dtype=torch.int64)
    indices = (indices + step * _slots(indices)).int().unflatten(0, (B, T))
    # All are closed for the first token too.
    return q, rows, _pages(draw, *entries.shape), indices, start + T, *rest


def _prefill_flops(size: Size) -> int:
    return 4 * size["B"] * size["T"] * size["H"] * size["K"] * (WINDOW + size.get("A", size["S"]))


# ------------------------------------------------------------------------------------------------------------ routers


def _router(size: Size, draw: Draw) -> Args:
    return _wide(draw, size["T"], size["E"]), _wide(draw, size["E"]) * 0.1, size["A"], 1.5


def _hash(size: Size, draw: Draw) -> Args:
    T, E, A, V = (size[letter] for letter in "TEAV")
    table, ids = draw.uniform(0, E, V, A, dtype=torch.int64), draw.uniform(0, V, T, dtype=torch.int64)
    return _wide(draw, T, E), table, ids, 1.5


def _other_tokens(args: Args) -> int:
    """Bytes of the table beyond the tokens' rows, and of the scores beyond those of the experts in them."""
    logits, table, ids, _ = args
    V, A = table.shape
    others = logits.shape[0] * max(0, logits.shape[1] - A) * logits.element_size()
    return (V - ids.unique().numel()) * A * table.element_size() + others


_TOKENS = "T1-S4-D4096", "T64-S4-D4096", "T4096-S4-D4096", "T4096-S4-D7168"
_ENTRIES = "B1-T1-C512", "B64-T1-C512", "B1-T4096-C512"
# The ring of a window of 128 tokens is larger than a prompt's.
_LONG_ENTRIES = "B1-T1-C512", "B1-T4096-C512", "B64-T1-C512"
_HEADS = "B1-T1-H64-K512-N32", "B64-T1-H64-K512-N32", "B1-T4096-H64-K512-N32"

CASES = (
    Case(
        "mhc_pre",
        mhc_pre,
        _TOKENS,
        _mhc,
        {},
        _ends(0),
        lambda size: 2 * size["T"] * 24 * 4 * size["D"],
        elementwise=count(TSD=4, TSS=60),
    ),
    Case(
        "mhc_pre.products",
        mhc_pre,
        _TOKENS,
        _mhc_given,
        {},
        _ends(0, 7),
        unread=lambda args: args[1].numel() * args[1].element_size(),
        elementwise=count(TSD=2, TSS=60),
    ),
    Case("mhc_post", mhc_post, _TOKENS, _mhc_post, {}, _ends(0, 1, 2, 3), elementwise=count(TSSD=2, TSD=2)),
    Case(
        "mhc_post_products",
        mhc_post_products,
        _TOKENS,
        _mhc_post_products,
        {},
        _first_and_last_64,
        lambda size: 2 * size["T"] * 24 * 4 * size["D"],
        elementwise=count(TSSD=2, TSD=4),
    ),
    *(
        Case(
            name,
            chain,
            _TOKENS,
            _mhc_post_pre,
            {},
            _ends(0, 1, 2, 3),
            lambda size: 2 * size["T"] * 24 * 4 * size["D"],
            unread=_streams_between,
            elementwise=count(TSSD=2, TSD=6, TSS=60),
        )
        for name, chain in (
            ("mhc_post_products.pre", Chain(_post_products_then_pre, mhc_post_products, mhc_pre)),
            ("mhc_post.pre", Chain(_post_then_pre, mhc_post, mhc_pre)),
        )
    ),
    Case("mhc_head", mhc_head, _TOKENS, _mhc_head, {}, _ends(0), elementwise=count(TSSD=2, TSD=4)),
    Case(
        "compress_csa",
        compress_csa,
        _ENTRIES,
        _csa,
        {},
        _ends(0, 2, 3, 4),
        unread=_rest_of_the_ring,
        elementwise=count(BTC=12),
    ),
    Case(
        "compress_hca",
        compress_hca,
        _LONG_ENTRIES,
        _hca,
        {},
        _ends(0, 2, 3, 4),
        unread=_rest_of_the_ring,
        elementwise=count(BTC=6),
    ),
    *(
        Case(
            name,
            indexer_scores,
            ("B1-T1-S16384-H64-C128", "B1-T1024-S16384-H64-C128", "B64-T1-S4096-H64-C128"),
            inputs,
            {},
            _ends(0, 1, 2, 4),
            _scores_flops,
            compiles=False,
            elementwise=count(BTSH=3),
        )
        for name, inputs in (("indexer_scores", _scores), ("indexer_scores.pages", _scores_of_pages))
    ),
    Case(
        "stable_topk",
        stable_topk,
        ("T1-S16384-A512", "T1-S262144-A512", "T64-S16384-A512", "T1024-S16384-A512"),
        _topk,
        {},
        _ends(0),
        elementwise=count(TS=1),
    ),
    Case("cache_rows", cache_rows, ("B1-S127-K512", "B64-S127-K512"), _rows, {}, _ends(0, 1), elementwise=count(BSK=1)),
    Case(
        "qnorm_rope_kv_insert",
        qnorm_rope_kv_insert,
        _HEADS,
        _insert,
        {},
        _ends(0, 1, 3, 4, 5, 6),
        unread=_not_inserted,
        compiles=False,
        elementwise=count(BTHK=3, BTHN=6, BTK=4, BTN=6),
    ),
    Case(
        "qnorm_rope_kv_insert.pages",
        qnorm_rope_kv_insert,
        _HEADS,
        _insert_paged,
        {},
        _ends(0, 1, 3, 4, 5, 6),
        unread=_not_inserted,
        compiles=False,
        elementwise=count(BTHK=3, BTHN=6, BTK=7, BTN=6),
    ),
    Case(
        "norm_rope_insert",
        norm_rope_insert,
        ("B1-T1-K512-N32", "B64-T1-K512-N32", "B1-T1024-K512-N32"),
        _insert_entries,
        {},
        _ends(0, 2, 3, 4, 5),
        unread=_not_inserted_entries,
        compiles=False,
        elementwise=count(BTK=4, BTN=6),
    ),
    Case(
        "rope_tail",
        rope_tail,
        tuple(s.replace("K512", "K128") for s in _HEADS),
        _tail,
        {},
        _ends(0, 1, 2),
        elementwise=count(BTHN=6),
    ),
    Case(
        "inverse_rope_grouped_out",
        inverse_rope_grouped_out,
        tuple(f"{size}-G8-R1024" for size in _HEADS),
        _out,
        {},
        _ends(0, 1, 2),
        _out_flops,
        elementwise=count(BTHN=6),
    ),
    Case(
        "sparse_mla_decode",
        sparse_mla_decode,
        ("B1-H64-K512-S4096-A512", "B8-H64-K512-S4096-A512", "B64-H64-K512-S4096-A512", "B64-H128-K512-S4096-A1024"),
        _decode,
        {},
        _ends(0, 1, 2, 3, 4),
        _decode_flops,
        _not_chosen,
        elementwise=_softmax,
    ),
    Case(
        "sparse_mla_decode.closed",
        sparse_mla_decode,
        ("B1-H64-K512-S1024", "B64-H64-K512-S1024"),
        _decode_closed,
        {},
        _ends(0, 1, 2, 4),
        _decode_flops,
        _not_chosen,
        elementwise=_softmax,
    ),
    Case(
        "sparse_mla_prefill",
        sparse_mla_prefill,
        ("B1-T256-H64-K512-S512", "B1-T1024-H64-K512-S512"),
        _prefill,
        {},
        _ends(0, 1, 2, 4),
        _prefill_flops,
        elementwise=_softmax,
    ),
    Case(
        "sparse_mla_prefill.named",
        sparse_mla_prefill,
        ("B1-T256-H64-K512-S2048-A512", "B1-T1024-H64-K512-S2048-A512"),
        _prefill_named,
        {},
        _ends(0, 1, 2, 3, 4),
        _prefill_flops,
        elementwise=_softmax,
    ),
    Case(
        "moe_sqrtsoftplus_router",
        moe_sqrtsoftplus_router,
        tuple(f"T{T}-E256-A6" for T in (1, 32, 4096)),
        _router,
        {},
        _ends(0),
        elementwise=count(TE=7),
    ),
    Case(
        "moe_hash_router",
        moe_hash_router,
        tuple(f"T{T}-E256-A6-V129280" for T in (1, 32, 4096)),
        _hash,
        {},
        _ends(0, 2),
        unread=_other_tokens,
        elementwise=count(TA=8),
    ),
)
