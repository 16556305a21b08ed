"""Sparse latent attention beside a loop over queries: window, entries, sink, pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner
from xpu_ports.common.kernels.fp8_pages import cache_rows, page_bytes, write_pages
from xpu_ports.common.kernels.sparse_mla import sparse_mla_decode, sparse_mla_prefill

SCALE = 0.3
SPAN, RATIO = 5, 4


def attend(q: Tensor, keys: list[Tensor], sinks: Tensor) -> Tensor:
    """One query, [H, K], on a list of rows."""
    out = torch.zeros_like(q)
    for h in range(q.shape[0]):
        weights = [(SCALE * (q[h] @ key)).exp() for key in keys]
        total = sum(weights) + sinks[h].exp()
        out[h] = sum((w * key for w, key in zip(weights, keys, strict=True)), torch.zeros_like(q[h])) / total
    return out


def in_ring(tokens: Tensor, R: int, length: int) -> Tensor:
    """A ring of R slots after `length` of the tokens [N, K], with noise where none was written."""
    ring = torch.full((R, tokens.shape[1]), 9.0, dtype=tokens.dtype)
    for p in range(length):
        ring[p % R] = tokens[p]
    return ring


def paged(rows: Tensor, rope: int, tokens: int = 4) -> Tensor:
    """Pages of rows [B, S, K]."""
    B, S, K = rows.shape
    pages = torch.zeros(B, -(-S // tokens), page_bytes(K, rope, tokens), dtype=torch.uint8)
    write_pages(rows, torch.arange(S).expand(B, S), pages, rope)
    return pages


@pytest.mark.op("sparse_mla_decode")
class TestDecode:
    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_by_hand(self, chosen: str) -> None:
        B, H, K, lengths = 4, 3, 6, [1, 5, 6, 23]
        q, sinks = torch.randn(B, H, K, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
        tokens, entries = (torch.randn(B, n, K, dtype=torch.float64) for n in (23, 6))
        window = torch.stack([in_ring(tokens[b], 8, n) for b, n in enumerate(lengths)])
        indices = torch.tensor([[-1, -1], [-1, 0], [0, -1], [4, 1]])
        y = sparse_mla_decode(
            q, window, None if chosen == "none" else entries, indices if chosen == "some" else None,
            torch.tensor(lengths), sinks, SPAN, RATIO, 2, SCALE,
        )  # fmt: skip
        for b, n in enumerate(lengths):
            keys = list(tokens[b, max(0, n - SPAN) : n])
            if chosen == "all":
                keys += list(entries[b, : n // RATIO])
            elif chosen == "some":
                keys += [entries[b, j] for j in indices[b].tolist() if j >= 0]
            torch.testing.assert_close(y[b], attend(q[b], keys, sinks))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, H=1, K=8, S=1), dict(B=3, H=5, K=40, S=37)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, H, K, S = size.values()
        q, window, entries = (torch.randn(s).to(dtype) for s in ((B, H, K), (B, 7, K), (B, S, K)))
        lengths = torch.tensor([4, 17, 4 * S])[-B:]
        indices = torch.stack([torch.randperm(S)[: max(1, S // 2)] for _ in range(B)]).int()
        y = run(q, window, entries, indices, lengths, torch.randn(H), SPAN, RATIO, 2, SCALE)
        assert y.dtype == dtype

    @pytest.mark.parametrize("chosen", ["all", "some"])
    def test_pages(self, run: Runner, chosen: str) -> None:
        """Read out of FP8 pages as out of the rows that they hold."""
        B, H, K, rope = 2, 3, 128, 64
        window, entries = paged(torch.randn(B, 8, K), rope), paged(torch.randn(B, 6, K), rope)
        q, sinks, lengths = torch.randn(B, H, K), torch.randn(H), torch.tensor([3, 27])
        indices = torch.tensor([[-1, -1], [5, 2]]) if chosen == "some" else None
        rest = (indices, lengths, sinks, SPAN, RATIO, rope, SCALE)
        y = run(q, window, entries, *rest)
        plain = [cache_rows(t, torch.arange(8).expand(B, 8), K, rope).float() for t in (window, entries)]
        torch.testing.assert_close(y, sparse_mla_decode(q, *plain, *rest))

    def test_the_sink_takes_weight_and_gives_nothing(self) -> None:
        q, window = torch.randn(1, 2, 4), torch.randn(1, 5, 4)

        def y(sink: float) -> Tensor:
            lengths = torch.tensor([5])
            return sparse_mla_decode(q, window, None, None, lengths, torch.full((2,), sink), 5, 1, 2, SCALE)

        none = torch.softmax(SCALE * q[0] @ window[0].T, -1) @ window[0]
        torch.testing.assert_close(y(-100.0)[0], none)
        lse = torch.logsumexp(SCALE * q[0] @ window[0].T, -1, keepdim=True)
        torch.testing.assert_close(y(0.7)[0], none * torch.sigmoid(lse - 0.7))
        assert y(200.0).abs().max() < 1e-30

    def test_a_row_without_tokens(self, run: Runner) -> None:
        q, window, lengths = torch.randn(2, 3, 4), torch.randn(2, 8, 4), torch.tensor([0, 3])
        y = run(q, window, torch.randn(2, 2, 4), None, lengths, torch.zeros(3), SPAN, RATIO, 2, SCALE)
        assert (y[0] == 0).all()

    def test_large_scores(self, run: Runner) -> None:
        q, window = 100 * torch.randn(2, 3, 4), 100 * torch.randn(2, 8, 4)
        run(q, window, None, None, torch.tensor([8, 9]), torch.zeros(3), SPAN, 1, 2, SCALE)


@pytest.mark.op("sparse_mla_prefill")
class TestPrefill:
    @pytest.mark.parametrize("P", [0, 2, SPAN - 1, 9])
    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_by_hand(self, chosen: str, P: int) -> None:
        """P tokens before the new ones, of which some rows have fewer."""
        B, T, H, K = 2, 6, 2, 4
        starts = [0, 0] if P == 0 else [1, 11]
        q, sinks = torch.randn(B, T, H, K, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
        rows, entries = (torch.randn(B, n, K, dtype=torch.float64) for n in (P + T, 5))
        indices = torch.stack([torch.randperm(5)[:3] for _ in range(B * T)]).unflatten(0, (B, T))
        indices[0, 3, 1] = -1
        y = sparse_mla_prefill(
            q, rows, None if chosen == "none" else entries, indices if chosen == "some" else None,
            torch.tensor(starts), sinks, SPAN, RATIO, 2, SCALE,
        )  # fmt: skip
        for b in range(B):
            for t in range(T):
                position = starts[b] + t
                first = max(0, position - SPAN + 1)
                keys = [rows[b, P + p - starts[b]] for p in range(first, position + 1) if P + p - starts[b] >= 0]
                seen = range((position + 1) // RATIO)
                if chosen == "all":
                    keys += [entries[b, j] for j in seen]
                elif chosen == "some":
                    keys += [entries[b, j] for j in indices[b, t].tolist() if j in seen]
                torch.testing.assert_close(y[b, t], attend(q[b, t], keys, sinks))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, T=1, H=1, K=8), dict(B=2, T=13, H=3, K=40)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, H, K = size.values()
        q, rows, entries = (torch.randn(s).to(dtype) for s in ((B, T, H, K), (B, T + 4, K), (B, 7, K)))
        start = torch.tensor([3, 14])[:B]
        indices = torch.randint(-1, 7, (B, T, 3)).int()
        assert run(q, rows, entries, indices, start, torch.randn(H), SPAN, RATIO, 2, SCALE).dtype == dtype

    def test_is_decode_token_by_token(self) -> None:
        """From pages, with a choice among the entries."""
        B, T, H, K, rope = 2, 9, 3, 128, 64
        tokens, sinks = torch.randn(B, T, K), torch.randn(H)
        window, entries = paged(tokens, rope, 9), paged(torch.randn(B, 3, K), rope)
        rows = cache_rows(window, torch.arange(T).expand(B, T), K, rope).float()
        q = torch.randn(B, T, H, K)
        indices = torch.full((B, T, 2), -1)
        indices[:, 3:, 0], indices[:, 7:, 1] = 0, 1
        args = (sinks, SPAN, RATIO, rope, SCALE)
        whole = sparse_mla_prefill(q, rows, entries, indices, torch.zeros(B, dtype=torch.int64), *args)
        for t in range(T):
            # The ring is larger than the window: later tokens are in it already, and not seen.
            one = sparse_mla_decode(q[:, t], window, entries, indices[:, t], torch.full((B,), t + 1), *args)
            torch.testing.assert_close(one, whole[:, t])
