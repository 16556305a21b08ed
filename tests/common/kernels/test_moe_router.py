"""moe_sigmoid_router: weights beside the oracle, what the bias may change, ties, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, Target, refusal
from xpu_ports.common import tritonlib
from xpu_ports.common.device import use_architecture
from xpu_ports.common.kernels import moe_router as module
from xpu_ports.common.kernels.moe_router import MOST_EXPERTS, moe_router_logits, moe_sigmoid_router

pytestmark = pytest.mark.op("moe_sigmoid_router")

SCALE = 2.446


def apart(N: int, E: int, dtype: torch.dtype) -> Tensor:
    """Logits in a random order, a tenth apart and more, so that every dtype sorts their scores alike."""
    return ((torch.rand(N, E).argsort(-1) - E // 2) * min(0.1, 8 / E)).to(dtype)


SIZES = [
    dict(N=1, E=1, A=1),
    dict(N=7, E=8, A=2),
    dict(N=65, E=64, A=8),
    dict(N=5, E=3, A=3),
    dict(N=2, E=257, A=7),
    dict(N=0, E=8, A=2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
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


def test_ties_that_the_bias_makes(run: Runner) -> None:
    """Of two equal groups the higher takes part with its lowest members, in their order."""
    bias = torch.tensor([0.0, 0.5] * 40)
    _, indices = run(torch.zeros(3, 80), bias, 5, 1.0)
    assert indices.tolist() == [[1, 3, 5, 7, 9]] * 3


def test_an_expert_that_is_never_chosen_unless_all_are(run: Runner) -> None:
    bias = torch.zeros(6)
    bias[[0, 1, 4]] = float("-inf")
    logits = apart(5, 6, torch.float32)
    _, indices = run(logits, bias, 3, 1.0)
    assert (indices.sort(-1).values == torch.tensor([2, 3, 5])).all()
    _, indices = run(logits, bias, 6, 1.0)
    assert (indices[:, 3:] == torch.tensor([0, 1, 4])).all()


def test_not_a_number(run: Runner) -> None:
    """Its token has no weights either, and its indices are those of experts, each once; other tokens keep theirs."""
    logits = apart(4, 40, torch.float32)
    logits[1] = float("nan")
    logits[2, 37] = float("nan")
    weights, indices = run(logits, torch.zeros(40), 3, SCALE)
    assert indices[1].tolist() == [0, 1, 2]
    assert indices[2, 0] == 37
    assert weights[1:3].isnan().all()
    assert weights[[0, 3]].isfinite().all()
    assert all(len(set(row.tolist())) == 3 for row in indices)


def test_float64() -> None:
    """The oracle's own dtype comes out as it goes in."""
    weights, indices = moe_sigmoid_router(apart(5, 16, torch.float64), torch.zeros(16), 3, SCALE)
    assert weights.dtype == torch.float64
    assert indices.dtype == torch.int64


def test_scores_of_zero(run: Runner) -> None:
    """sigmoid(-200) is 0 in fp32: the weights are 0, not 0 / 0."""
    weights, _ = moe_sigmoid_router(torch.full((2, 4), -200.0), torch.zeros(4), 2, SCALE)
    assert (weights == 0).all()
    run(torch.full((2, 4), -20.0) - torch.arange(4), torch.zeros(4), 2, SCALE)


def test_strides(run: Runner) -> None:
    run(apart(5, 16, torch.float32)[:, ::2], torch.zeros(16)[::2], 3, SCALE)
    run(apart(8, 5, torch.float32).T, torch.zeros(8), 3, SCALE)


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


GOOD = dict(logits=torch.zeros(3, 8), correction_bias=torch.zeros(8), top_k=2, scale=1.0)
WIDE = MOST_EXPERTS + 1
REFUSED = {
    "fp64": (dict(logits=torch.zeros(3, 8).double()), "logits has dtype torch.float64"),
    "fp64 bias": (dict(correction_bias=torch.zeros(8).double()), "bias has dtype torch.float64"),
    "dimensions": (dict(logits=torch.zeros(1, 3, 8)), "expected (N, E) and (E,)"),
    "bias": (dict(correction_bias=torch.zeros(7)), "expected (N, E) and (E,)"),
    "experts": (dict(logits=torch.zeros(3, WIDE), correction_bias=torch.zeros(WIDE)), "1025 experts, more than 1024"),
    "chosen": (dict(logits=torch.zeros(3, 40), correction_bias=torch.zeros(40), top_k=33), "33 of 40 experts"),
    "none": (dict(top_k=0), "0 of 8 experts, not 1 to 8"),
    "gradient": (dict(logits=torch.zeros(3, 8, requires_grad=True)), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert refusal(moe_sigmoid_router, **GOOD) == ""
    assert why in refusal(moe_sigmoid_router, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(moe_sigmoid_router, **GOOD)


@pytest.mark.op("moe_router_logits")
class TestLogits:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("size", [dict(N=1, E=1, D=1), dict(N=7, E=37, D=100), dict(N=16, E=8, D=1030)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        N, E, D = size.values()
        assert run(torch.randn(N, D).to(dtype), torch.randn(E, D)).dtype == torch.float32

    def test_no_tokens_or_columns(self, run: Runner) -> None:
        assert run(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)
        assert (run(torch.zeros(2, 0), torch.zeros(3, 0)) == 0).all()

    def test_what_bfloat16_cannot_tell_apart(self, run: Runner) -> None:
        """Weights that differ below bf16's resolution, and a sum that bf16 would end early."""
        weight = torch.ones(2, 512)
        weight[1] += 2.0**-12
        logits = run(torch.ones(1, 512).bfloat16(), weight)
        assert logits.tolist() == [[512.0, 512.125]]

    def test_layouts(self, run: Runner) -> None:
        run(torch.randn(5, 70).bfloat16()[:, 3:67], torch.randn(20, 70)[::2, :64])

    def test_many_rows(self, run: Runner) -> None:
        """Which are read once for all tokens on NVIDIA."""
        if run.target != Target("triton", "cpu") or not tritonlib.INTERPRETED:
            pytest.skip("NVIDIA's way")
        with use_architecture("nvidia"):
            run(torch.randn(5, 70).bfloat16()[:, 3:67], torch.randn(1030, 70).bfloat16()[::2, :64])

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            (dict(x=torch.zeros(3, 8).double()), "x has dtype torch.float64"),
            (dict(weight=torch.zeros(4, 8).double()), "weight has dtype torch.float64"),
            (dict(weight=torch.zeros(4, 7)), "expected (N, D) and (E, D)"),
            (dict(x=torch.zeros(1, 3, 8)), "expected (N, D) and (E, D)"),
            (dict(x=torch.zeros(8, 3).T), "the last dimension of x has stride 3"),
            (dict(weight=torch.zeros(8, 4).T), "the last dimension of weight has stride 4"),
            (dict(x=torch.zeros(33, 8)), "33 tokens, more than 32"),
            (dict(weight=torch.zeros(4, 8, requires_grad=True)), "no backward"),
        ],
    )
    def test_refusals(self, changed: dict, why: str) -> None:
        given = dict(x=torch.zeros(16, 8), weight=torch.zeros(4, 8))
        assert refusal(moe_router_logits, **given) == ""
        assert why in refusal(moe_router_logits, **given | changed)
