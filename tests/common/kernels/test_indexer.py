"""The indexer's scores beside a loop, and the choice among them: ties, what is not seen, what is not a number."""

from __future__ import annotations

import pytest
import torch

from tests.common.ops import Runner
from xpu_ports.common.kernels.fp8_pages import cache_rows, index_page_bytes, write_pages
from xpu_ports.common.kernels.indexer import indexer_scores, stable_topk

INF = float("inf")


@pytest.mark.op("indexer_scores")
class TestScores:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, T=1, H=1, C=4), dict(B=2, T=7, H=5, C=33)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, H, C = size.values()
        q, keys = torch.randn(B, T, H, C).to(dtype), torch.randn(B, 12, C).to(dtype)
        start = torch.tensor([13, 2])[:B]
        scores = run(q, torch.randn(B, T, H).to(dtype), keys, 9, start, 4)
        assert scores.dtype == torch.float32
        assert scores.shape == (B, T, 9)

    def test_by_hand(self) -> None:
        """Negative products count nothing, whatever the sign of their weight; weights may be negative."""
        B, T, H, C, S = 2, 5, 3, 4, 6
        q, w, k = (torch.randn(s, dtype=torch.float64) for s in ((B, T, H, C), (B, T, H), (B, S, C)))
        start = torch.tensor([4, 9])
        scores = indexer_scores(q, w, k, S, start, 3)
        for b in range(B):
            for t in range(T):
                for j in range(S):
                    terms = [w[b, t, h] * max(q[b, t, h] @ k[b, j], torch.tensor(0.0)) for h in range(H)]
                    expected = sum(terms) if 3 * j + 2 <= start[b] + t else torch.tensor(-INF).double()
                    torch.testing.assert_close(scores[b, t, j], expected)

    def test_a_single_token_does_not_see_what_is_not_closed(self) -> None:
        q, w, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1), torch.ones(1, 3, 2)
        for position, seen in ((2, 0), (3, 1), (6, 1), (7, 2), (11, 3)):
            scores = indexer_scores(q, w, k, 3, torch.tensor([position]), 4)
            assert (scores > -INF).sum() == seen

    def test_pages(self, run: Runner) -> None:
        pages = torch.zeros(2, 2, index_page_bytes(64, 4), dtype=torch.uint8)
        here = torch.arange(8).expand(2, 8)
        write_pages(torch.randn(2, 8, 64), here, pages, None)
        q, w, start = torch.randn(2, 3, 2, 64), torch.randn(2, 3, 2), torch.tensor([30, 5])
        scores = run(q, w, pages, 7, start, 4)
        keys = cache_rows(pages, here, 64, None)
        torch.testing.assert_close(scores, indexer_scores(q, w, keys.float(), 7, start, 4))


@pytest.mark.op("stable_topk")
class TestTopK:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(("S", "k"), [(1, 1), (37, 5), (300, 300), (4, 9), (0, 3)])
    def test_sizes(self, run: Runner, S: int, k: int, dtype: torch.dtype) -> None:
        indices = run(torch.randn(2, 3, S).to(dtype), k)
        assert indices.dtype == torch.int32
        assert indices.shape == (2, 3, min(k, S))
        assert all(row == sorted(set(row)) for row in indices.flatten(0, 1).tolist())

    def test_the_largest(self) -> None:
        scores = torch.randn(20, 50)
        expected = scores.topk(7).indices.sort().values
        assert torch.equal(stable_topk(scores, 7).long(), expected)

    def test_of_equal_scores_the_lower_place(self, run: Runner) -> None:
        assert run(torch.zeros(2, 3000), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
        assert run(torch.tensor([[0.0, 1.0] * 50]), 60).tolist() == [sorted([*range(1, 100, 2), *range(0, 20, 2)])]
        # The sign of zero is no difference.
        assert run(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2).tolist() == [[0, 1]]

    def test_the_length_behind_does_not_matter(self) -> None:
        """A token's choice in a longer row, whose end it does not see, is that in a shorter one."""
        scores = torch.randn(40, 16).relu() * (torch.rand(40, 16) < 0.3)
        for more in (1, 16, 1000):
            longer = torch.cat([scores, torch.full((40, more), -INF)], dim=1)
            assert torch.equal(stable_topk(longer, 9), stable_topk(scores, 9))

    def test_fewer_than_k(self, run: Runner) -> None:
        scores = torch.tensor([[1.0, -INF, 3.0, -INF], [-INF, -INF, -INF, -INF], [-1.0, -2.0, -3.0, -INF]])
        assert run(scores, 3).tolist() == [[0, 2, -1], [-1, -1, -1], [0, 1, 2]]

    def test_not_a_number(self) -> None:
        """Taken last, and never at a place that is not there."""
        nan = float("nan")
        assert stable_topk(torch.tensor([[nan, 1.0, -INF, -5.0, nan]]), 3).tolist() == [[0, 1, 3]]
        assert stable_topk(torch.full((1, 4), nan), 2).tolist() == [[0, 1]]
