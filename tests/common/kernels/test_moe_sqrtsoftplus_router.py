"""DeepSeek-V4's routers: weights beside the oracle, what the bias may change, ties, the table of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tests.common.ops import Runner
from xpu_ports.common.kernels.moe_sqrtsoftplus_router import moe_hash_router, moe_sqrtsoftplus_router

SCALE = 1.5


def score(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(logit)) if logit < 30 else logit + math.exp(-logit))


@pytest.mark.op("moe_sqrtsoftplus_router")
class TestByScores:
    @pytest.mark.parametrize(
        "size", [dict(N=1, E=1, A=1), dict(N=7, E=8, A=2), dict(N=5, E=257, A=6), dict(N=0, E=8, A=2)]
    )
    def test_sizes(self, run: Runner, size: dict) -> None:
        N, E, A = size.values()
        # In a random order, apart enough for fp32 to sort them as fp64 does.
        logits = (torch.rand(N, E).argsort(-1) - E // 2) * 0.03
        weights, indices = run(logits, torch.linspace(0, 1e-3, E), A, SCALE)
        assert weights.dtype == torch.float32
        assert indices.dtype == torch.int64
        torch.testing.assert_close(weights.sum(-1), torch.full((N,), SCALE))
        assert all(len(set(row)) == A for row in indices.tolist())

    def test_by_hand(self) -> None:
        logits = torch.tensor([[0.0, 1.0, 25.0, -1.0]])
        weights, indices = moe_sqrtsoftplus_router(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), 2, SCALE)
        assert indices.tolist() == [[3, 2]]
        total = score(-1.0) + score(25.0)
        expected = torch.tensor([[SCALE * score(-1.0) / total, SCALE * score(25.0) / total]])
        torch.testing.assert_close(weights, expected)

    def test_the_bias_chooses_and_does_not_weigh(self, run: Runner) -> None:
        logits, bias = torch.randn(9, 8), torch.zeros(8)
        bias[[3, 5]] = 50.0
        weights, indices = run(logits, bias, 2, 1.0)
        assert (indices.sort(-1).values == torch.tensor([3, 5])).all()
        scores = torch.nn.functional.softplus(logits).sqrt().gather(-1, indices)
        torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))

    def test_of_equal_scores_the_lower_index_goes_first(self, run: Runner) -> None:
        _, indices = run(torch.zeros(4, 100), torch.zeros(100), 6, 1.0)
        assert indices.tolist() == [list(range(6))] * 4

    def test_scores_that_vanish(self) -> None:
        """sqrt(softplus(-200)) is 0 in fp32: the weights are 0, not 0 / 0."""
        weights, _ = moe_sqrtsoftplus_router(torch.full((2, 4), -220.0), torch.zeros(4), 2, SCALE)
        assert (weights == 0).all()

    def test_not_a_number(self) -> None:
        logits = torch.full((1, 8), float("nan"))
        _, indices = moe_sqrtsoftplus_router(logits, torch.zeros(8), 3, SCALE)
        assert indices.tolist() == [[0, 1, 2]]


@pytest.mark.op("moe_hash_router")
class TestByTable:
    def test_sizes(self, run: Runner) -> None:
        table = torch.stack([torch.randperm(8)[:3] for _ in range(20)])
        ids = torch.tensor([0, 19, 7, 7, 3])
        weights, indices = run(torch.randn(5, 8), table, ids, SCALE)
        assert torch.equal(indices, table[ids])
        torch.testing.assert_close(weights.sum(-1), torch.full((5,), SCALE))

    def test_by_hand(self) -> None:
        """The table says which, in its order; the scores say how much."""
        weights, indices = moe_hash_router(
            torch.tensor([[2.0, 0.0, -3.0]]), torch.tensor([[1, 0], [2, 0]]), torch.tensor([1]), SCALE
        )
        assert indices.tolist() == [[2, 0]]
        total = score(-3.0) + score(2.0)
        torch.testing.assert_close(weights, torch.tensor([[SCALE * score(-3.0) / total, SCALE * score(2.0) / total]]))
