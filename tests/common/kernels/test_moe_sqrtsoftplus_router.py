"""DeepSeek-V4's routers: weights beside the oracle, what the bias may change, ties, the table of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tests.common.ops import Runner, refusal
from xpu_ports.common.kernels import moe_router
from xpu_ports.common.kernels import moe_sqrtsoftplus_router as module
from xpu_ports.common.kernels.moe_sqrtsoftplus_router import moe_hash_router, moe_sqrtsoftplus_router

SCALE = 1.5


def score(logit: float) -> float:
    return math.sqrt(math.log1p(math.exp(logit)) if logit < 30 else logit + math.exp(-logit))


@pytest.mark.op("moe_sqrtsoftplus_router")
class TestByScores:
    @pytest.mark.parametrize(
        "size",
        [
            dict(N=1, E=1, A=1),
            dict(N=7, E=8, A=2),
            dict(N=5, E=257, A=6),
            dict(N=3, E=384, A=8),
            dict(N=0, E=8, A=2),
        ],
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

    def test_scores_that_vanish(self, run: Runner) -> None:
        """sqrt(softplus(-220)) is 0 in fp32: the weights are 0, not 0 / 0."""
        if run.target.backend == "reference":
            # In fp64 it is not.
            weights, _ = moe_sqrtsoftplus_router(torch.full((2, 8), -220.0), torch.zeros(8), 2, SCALE)
            assert (weights == 0).all()
        # Where nothing is left of 1 + exp(x) but the 1.
        run(torch.full((2, 8), -25.0) - torch.arange(8.0), torch.zeros(8), 2, SCALE)

    @pytest.mark.parametrize(
        "logit", [-60.0, -40.0, -17.0, -9.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 9.0, 25.0, 90.0]
    )
    def test_every_size_of_a_score(self, run: Runner, logit: float) -> None:
        """Beside one of another size, so that its weight shows all its digits."""
        logits = torch.tensor([[logit, logit - 0.5] + [-200.0] * 6])
        weights, _ = run(logits, torch.zeros(8), 2, SCALE)
        first, second = score(logit), score(logit - 0.5)
        expected = [SCALE * first / (first + second), SCALE * second / (first + second)]
        torch.testing.assert_close(weights[0], torch.tensor(expected), rtol=1e-5, atol=0)

    def test_not_a_number(self, run: Runner) -> None:
        logits = torch.randn(3, 8)
        logits[0] = float("nan")
        logits[1, 5] = float("nan")
        weights, indices = run(logits, torch.zeros(8), 2, SCALE)
        assert indices[0].tolist() == [0, 1]
        assert indices[1, 0] == 5
        assert weights[:2].isnan().all()
        assert weights[2].isfinite().all()

    def test_strides(self, run: Runner) -> None:
        run(torch.randn(8, 7).T, torch.randn(16)[::2], 2, SCALE)


@pytest.mark.op("moe_hash_router")
class TestByTable:
    def test_sizes(self, run: Runner) -> None:
        table = torch.stack([torch.randperm(8)[:3] for _ in range(20)])
        ids = torch.tensor([0, 19, 7, 7, 3])
        weights, indices = run(torch.randn(5, 8), table, ids, SCALE)
        assert torch.equal(indices, table[ids])
        torch.testing.assert_close(weights.sum(-1), torch.full((5,), SCALE))

    @pytest.mark.parametrize("N", [0, 1, 16, 17])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_numbers_of_tokens(self, run: Runner, N: int, dtype: torch.dtype) -> None:
        weights, _ = run(torch.randn(N, 8).to(dtype), torch.randint(8, (20, 3)), torch.randint(20, (N,)), SCALE)
        assert weights.shape == (N, 3)
        assert weights.dtype == torch.float32

    def test_not_a_number(self, run: Runner) -> None:
        """Where it is not looked up it does not matter."""
        logits, table = torch.randn(2, 8), torch.tensor([[1, 0, 5], [2, 0, 3]])
        logits[:, 5] = float("nan")
        weights, _ = run(logits, table, torch.tensor([0, 1]), SCALE)
        assert weights[0].isnan().all()
        assert weights[1].isfinite().all()

    def test_strides(self, run: Runner) -> None:
        table = torch.randint(8, (3, 20)).T
        run(torch.randn(8, 5).T, table, torch.tensor([0, 19, 7, 7, 3, 1, 2, 0, 9, 4])[::2].int(), SCALE)

    def test_by_hand(self) -> None:
        """The table says which, in its order; the scores say how much."""
        weights, indices = moe_hash_router(
            torch.tensor([[2.0, 0.0, -3.0]]), torch.tensor([[1, 0], [2, 0]]), torch.tensor([1]), SCALE
        )
        assert indices.tolist() == [[2, 0]]
        total = score(-3.0) + score(2.0)
        torch.testing.assert_close(weights, torch.tensor([[SCALE * score(-3.0) / total, SCALE * score(2.0) / total]]))


SCORES = dict(logits=torch.zeros(3, 8), correction_bias=torch.zeros(8), top_k=2, scale=1.0)
TABLE = dict(
    logits=torch.zeros(3, 8), table=torch.zeros(20, 2).long(), ids=torch.zeros(3, dtype=torch.int64), scale=1.0
)
REFUSED_SCORES = {
    "fp64": (dict(logits=torch.zeros(3, 8).double()), "logits has dtype torch.float64"),
    "bias": (dict(correction_bias=torch.zeros(7)), "expected (N, E) and (E,)"),
    "experts": (dict(logits=torch.zeros(3, 1025), correction_bias=torch.zeros(1025)), "1025 experts, more than 1024"),
    "none": (dict(top_k=0), "0 of 8 experts, not 1 to 8"),
    "gradient": (dict(logits=torch.zeros(3, 8, requires_grad=True)), "no backward"),
}
REFUSED_TABLE = {
    "fp64": (dict(logits=torch.zeros(3, 8).double()), "logits have dtype torch.float64"),
    "dimensions": (dict(logits=torch.zeros(1, 3, 8)), "expected (N, E), (V, A) and (N,)"),
    "ids": (dict(ids=torch.zeros(2).long()), "expected (N, E), (V, A) and (N,)"),
    "table dtype": (dict(table=torch.zeros(20, 2).int()), "dtypes torch.int32 and torch.int64, not int64"),
    "ids dtype": (dict(ids=torch.zeros(3).short()), "dtypes torch.int64 and torch.int16, not int64"),
    "experts": (dict(table=torch.zeros(20, 33).long()), "33 experts a token, not 1 to 32"),
    "gradient": (dict(logits=torch.zeros(3, 8, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED_SCORES.values(), ids=REFUSED_SCORES)
def test_refusals_by_scores(changed: dict, why: str) -> None:
    assert refusal(moe_sqrtsoftplus_router, **SCORES) == ""
    assert why in refusal(moe_sqrtsoftplus_router, **SCORES | changed)


@pytest.mark.parametrize(("changed", "why"), REFUSED_TABLE.values(), ids=REFUSED_TABLE)
def test_refusals_by_table(changed: dict, why: str) -> None:
    assert refusal(moe_hash_router, **TABLE) == ""
    assert why in refusal(moe_hash_router, **TABLE | changed)


def test_refusals_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (module, moe_router):
        monkeypatch.setattr(where, "AVAILABLE", False)
        monkeypatch.setattr(where, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(moe_sqrtsoftplus_router, **SCORES)
    assert "no module" in refusal(moe_hash_router, **TABLE)
