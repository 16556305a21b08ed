"""moe_experts: numbers beside a sum over all experts, the composition for accelerators, bounds, what is not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.common.ops import Runner, fake
from xpu_ports.common import accuracy
from xpu_ports.common.kernels.moe_experts import moe_experts, moe_experts_pytorch

pytestmark = pytest.mark.op("moe_experts")

SMALL = dict(N=5, E=4, A=2, D=16, F=24)
SIZES = [SMALL, dict(N=1, E=8, A=8, D=8, F=8), dict(N=33, E=3, A=1, D=40, F=16), dict(N=0, E=4, A=2, D=16, F=8)]


def arguments(size: dict, dtype: torch.dtype, **given: Any) -> dict[str, Any]:
    """The op's arguments by name; `given` replaces some."""
    N, E, A, D, width = size.values()
    made = {
        "x": torch.randn(N, D).to(dtype),
        "gate_up": (torch.randn(E, 2 * width, D) * D**-0.5).to(dtype),
        "down": (torch.randn(E, D, width) * width**-0.5).to(dtype),
        "indices": torch.rand(N, E).argsort(-1)[:, :A].contiguous(),
        "weights": torch.rand(N, A),
        "limit": None,
    }
    return made | given


def over_all(x, gate_up, down, indices, weights, limit) -> Tensor:
    """The definition: every expert on every token, weighted with 0 where it was not chosen; fp64."""
    x, gate_up, down, weights = (t.double() for t in (x, gate_up, down, weights))
    share = torch.zeros(x.shape[0], gate_up.shape[0], dtype=torch.double).scatter_add_(1, indices, weights)
    g, u = torch.einsum("nd,efd->nef", x, gate_up).chunk(2, -1)
    if limit is not None:
        g, u = torch.minimum(g, torch.tensor(limit)), torch.clip(u, -limit, limit)
    return torch.einsum("ne,nef,edf->nd", share, g / (1 + torch.exp(-g)) * u, down)


@pytest.fixture
def experts(run: Runner) -> Runner:
    """The products are rounded one by one."""
    run.rounds_once = False
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(experts: Runner, size: dict, limit: float | None, dtype: torch.dtype) -> None:
    given = arguments(size, dtype, limit=limit)
    y = experts(**given)
    assert y.dtype == dtype
    oracle = accuracy.oracle(moe_experts.reference, **given)
    torch.testing.assert_close(oracle, over_all(**given), rtol=1e-6, atol=1e-6)


def test_the_limit_is_one_sided_for_the_gate() -> None:
    """Identity weights: g = x[0], u = x[1]; a gate of -9 stays, one of 9 is cut to 2, and so is what it gates."""
    gate_up, down = torch.eye(2)[None], torch.ones(1, 2, 1)
    x = torch.tensor([[-9.0, 1.0], [9.0, 1.0], [1.0, 9.0], [1.0, -9.0]])
    y = moe_experts(x, gate_up, down, torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1), 2.0)[:, 0]
    g, u = torch.tensor([-9.0, 2.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0, -2.0])
    torch.testing.assert_close(y, F.silu(g) * u)


def test_an_expert_chosen_twice_counts_twice(experts: Runner) -> None:
    given = arguments(SMALL, torch.float32, indices=torch.full((5, 2), 3))
    torch.testing.assert_close(experts(**given).double(), over_all(**given), rtol=1e-5, atol=1e-5)


def test_experts_that_nobody_chose_are_not_read(experts: Runner) -> None:
    given = arguments(SMALL, torch.float32)
    given["indices"] = given["indices"] % 2 * 3
    for name in ("gate_up", "down"):
        given[name][1:3] = float("nan")
    assert experts(**given).isfinite().all()
    wide = {k: v.bfloat16() if k in ("x", "gate_up", "down") else v for k, v in given.items()}
    assert moe_experts_pytorch(**wide).isfinite().all()


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("size", SIZES)
def test_the_composition_for_accelerators(size: dict, limit: float | None) -> None:
    """torch's grouped product runs on the CPU too."""
    given = arguments(size, torch.bfloat16, limit=limit)
    oracle = accuracy.oracle(moe_experts.reference, **given)
    accuracy.assert_close(moe_experts_pytorch(**given), moe_experts.reference(**given), oracle)


def test_a_token_does_not_depend_on_the_others() -> None:
    given = arguments(dict(N=9, E=4, A=2, D=16, F=24), torch.bfloat16)
    one = given | {name: given[name][4:5] for name in ("x", "indices", "weights")}
    assert torch.equal(moe_experts(**given)[4:5], moe_experts(**one))


def test_gradients() -> None:
    names = ("x", "gate_up", "down", "weights")
    given = arguments(SMALL, torch.float64)
    given["weights"] = given["weights"].double()
    for name in names:
        given[name].requires_grad_()
    leaves = [given[name] for name in names]
    got = torch.autograd.grad(moe_experts(**given).square().sum(), leaves)
    expected = torch.autograd.grad(over_all(**given).square().sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(x=torch.randn(5, 16)), "dtypes torch.float32, torch.bfloat16 and torch.bfloat16"),
        (dict(gate_up=torch.randn(4, 16, 48).bfloat16().mT), "gate_up is not contiguous"),
        (dict(down=torch.randn(4, 16, 20).bfloat16()), "rows of 20 elements in down, not a multiple of 8"),
    ],
    ids=["dtypes", "layout", "alignment"],
)
def test_refusals(change: dict, why: str) -> None:
    with FakeTensorMode():
        given = {k: fake(v) for k, v in arguments(SMALL, torch.bfloat16).items()}
        assert moe_experts.choose(**given)[0] == "pytorch"
        backend, reason = moe_experts.choose(**given | {k: fake(v) for k, v in change.items()})
    assert backend == "reference"
    assert why in reason


def test_traced_without_values() -> None:
    """The reference reads which experts were chosen, so its shapes are told apart from it."""
    given = arguments(SMALL, torch.float32)
    compiled = torch.compile(moe_experts, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given.values()), moe_experts(*given.values()))
