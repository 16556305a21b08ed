"""moe_sigmoid_router: weights beside the oracle, what the bias may change, ties, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner
from xpu_ports.common.kernels.moe_router import moe_sigmoid_router

pytestmark = pytest.mark.op("moe_sigmoid_router")

SCALE = 2.446


def apart(N: int, E: int, dtype: torch.dtype) -> Tensor:
    """Logits in a random order, a tenth apart and more, so that every dtype sorts their scores alike."""
    return ((torch.rand(N, E).argsort(-1) - E // 2) * min(0.1, 8 / E)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "size", [dict(N=1, E=1, A=1), dict(N=7, E=8, A=2), dict(N=33, E=64, A=8), dict(N=5, E=3, A=3), dict(N=0, E=8, A=2)]
)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    N, E, A = size.values()
    # bf16 has not the digits to keep that many apart.
    E = min(E, 40) if dtype == torch.bfloat16 else E
    bias = torch.linspace(0.0, 1e-3, E)[torch.randperm(E)]
    weights, indices = run(apart(N, E, dtype), bias, A, SCALE)
    assert weights.shape == indices.shape == (N, A)
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert indices.dtype == torch.int64
    torch.testing.assert_close(weights.sum(-1), torch.full_like(weights[:, 0], SCALE))
    assert all(len(set(row.tolist())) == A for row in indices)


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    weights, indices = moe_sigmoid_router(logits, torch.tensor([0.0, 0.0, 0.0, 1.0]), 2, 3.0)
    assert indices.tolist() == [[3, 2]]
    s = logits.sigmoid()[0]
    torch.testing.assert_close(weights, 3.0 * torch.stack([s[3], s[2]])[None] / (s[3] + s[2]))


def test_the_bias_chooses_and_does_not_weigh(run: Runner) -> None:
    """A bias far above the scores: any trace of it in the weights would make them equal."""
    logits = apart(9, 8, torch.float32)
    bias = torch.tensor([0.0, 0, 0, 50.0, 0, 50.0, 0, 0])
    weights, indices = run(logits, bias, 2, 1.0)
    assert (indices.sort(-1).values == torch.tensor([3, 5])).all()
    scores = logits.sigmoid().gather(-1, indices)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_a_bias_below_the_resolution_of_bfloat16_decides(run: Runner) -> None:
    """1 + 2^-12 is 1 in bf16: a bias or scores rounded to it would tie and take the lower index."""
    bias = torch.tensor([1.0, 1.0 + 2.0**-12, 1.0 - 2.0**-12])
    _, indices = run(torch.zeros(3, 3, dtype=torch.bfloat16), bias, 1, 1.0)
    assert indices.tolist() == [[1]] * 3


def test_of_equal_scores_the_lower_index_goes_first(run: Runner) -> None:
    weights, indices = run(torch.zeros(4, 100), torch.zeros(100), 8, 1.0)
    assert indices.tolist() == [list(range(8))] * 4
    assert weights.unique().tolist() == [0.125]


def test_scores_of_zero(run: Runner) -> None:
    """sigmoid(-200) is 0 in fp32: the weights are 0, not 0 / 0."""
    weights, _ = moe_sigmoid_router(torch.full((2, 4), -200.0), torch.zeros(4), 2, SCALE)
    assert (weights == 0).all()
    run(torch.full((2, 4), -20.0) - torch.arange(4), torch.zeros(4), 2, SCALE)


def test_strides(run: Runner) -> None:
    run(apart(5, 16, torch.float32).repeat(1, 2)[:, ::2][:, :8], torch.zeros(16)[::2], 3, SCALE)


def test_gradients(run: Runner) -> None:
    logits = apart(6, 8, torch.float32).requires_grad_()
    bias = torch.zeros(8)
    grads = [torch.randn(6, 2), torch.zeros(6, 2, dtype=torch.int64)]
    weights, _ = moe_sigmoid_router(logits, bias, 2, SCALE)
    (got,) = torch.autograd.grad(weights, logits, grads[0])
    wide = logits.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(moe_sigmoid_router(wide, bias, 2, SCALE)[0], wide, grads[0].double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    # Weights that always sum to the scale do not move when all chosen ones are scaled alike.
    assert got.abs().sum() > 0
