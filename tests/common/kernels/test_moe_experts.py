"""moe_experts: numbers beside a sum over all experts, the composition for accelerators, bounds, what is not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.common.ops import Runner, Target, fake, refusal
from xpu_ports.common import accuracy, tritonlib
from xpu_ports.common.device import ARCHITECTURES, Architecture
from xpu_ports.common.kernels.moe_experts import moe_experts, once
from xpu_ports.common.kernels.moe_experts import triton as module
from xpu_ports.common.kernels.moe_experts.triton import LARGEST_N
from xpu_ports.common.kernels.moe_experts.vendor import moe_experts_pytorch

pytestmark = pytest.mark.op("moe_experts")

SMALL = dict(N=5, E=4, A=2, D=16, F=24)
SIZES = [SMALL, dict(N=1, E=8, A=8, D=8, F=8), dict(N=7, E=3, A=1, D=40, F=17), dict(N=0, E=4, A=2, D=16, F=8)]
# More tokens than the kernels take, and rows that they and the grouped product take alike.
MANY = dict(N=65, E=3, A=1, D=40, F=16)


def arguments(size: dict, dtype: torch.dtype, shared: int = 0, **given: Any) -> dict[str, Any]:
    """The op's arguments by name, with a shared expert of some width or without; `given` replaces some."""
    N, E, A, D, width = size.values()
    made = {
        "x": torch.randn(N, D).to(dtype),
        "gate_up": (torch.randn(E, 2 * width, D) * D**-0.5).to(dtype),
        "down": (torch.randn(E, D, width) * width**-0.5).to(dtype),
        "indices": torch.rand(N, E).argsort(-1)[:, :A].contiguous(),
        "weights": torch.rand(N, A),
        "limit": None,
        "shared_gate_up": (torch.randn(2 * shared, D) * D**-0.5).to(dtype) if shared else None,
        "shared_down": (torch.randn(D, shared) * shared**-0.5).to(dtype) if shared else None,
    }
    return made | given


def over_all(x, gate_up, down, indices, weights, limit, shared_gate_up, shared_down) -> Tensor:
    """The definition: every expert on every token, weighted with 0 where it was not chosen; fp64."""
    x, gate_up, down, weights = (t.double() for t in (x, gate_up, down, weights))
    share = torch.zeros(x.shape[0], gate_up.shape[0], dtype=torch.double).scatter_add_(1, indices, weights)

    def activated(gate_up: Tensor) -> Tensor:
        g, u = torch.einsum("nd,efd->nef", x, gate_up).chunk(2, -1)
        if limit is not None:
            g, u = torch.minimum(g, torch.tensor(limit)), torch.clip(u, -limit, limit)
        return g / (1 + torch.exp(-g)) * u

    y = torch.einsum("ne,nef,edf->nd", share, activated(gate_up), down)
    if shared_gate_up is not None:
        y = y + activated(shared_gate_up.double()[None])[:, 0] @ shared_down.double().T
    return y


@pytest.fixture(params=["each", "once"])
def experts(run: Runner, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """The products are rounded one by one. Both ways of the kernels, whichever the architecture at hand has."""
    run.rounds_once = False
    if request.param == "once":
        if run.target != Target("triton", "cpu") or not tritonlib.INTERPRETED:
            pytest.skip("a way of NVIDIA's tiles")
        monkeypatch.setattr(once, "suits", lambda arch, N, A, dtype: N * A <= once.MOST_CHOICES)
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shares", "limit"), [(False, None), (True, None), (True, 0.5)], ids=["", "shared", "limit"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(experts: Runner, size: dict, shares: bool, limit: float | None, dtype: torch.dtype) -> None:
    given = arguments(size, dtype, size["F"] * shares, limit=limit)
    y = experts(**given)
    assert y.dtype == dtype
    oracle = accuracy.oracle(moe_experts.reference, **given)
    torch.testing.assert_close(oracle, over_all(**given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("elsewhere", ["some", "all"])
def test_experts_of_another_device_add_nothing(experts: Runner, elsewhere: str) -> None:
    given = arguments(SMALL, torch.bfloat16, SMALL["F"])
    given["indices"][given["indices"] == 1 if elsewhere == "some" else ...] = SMALL["E"]
    experts(**given)
    here = given["indices"] < SMALL["E"]
    counted = given | {"indices": given["indices"] * here, "weights": given["weights"] * here}
    torch.testing.assert_close(accuracy.oracle(moe_experts.reference, **given), over_all(**counted))


@pytest.mark.parametrize("width", [1, 8, 23])
def test_a_shared_expert_may_be_narrower(experts: Runner, width: int) -> None:
    """As a rank's part of one is."""
    given = arguments(SMALL, torch.bfloat16, width)
    assert not refusal(moe_experts, **given)
    experts(**given)


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


def test_not_a_number_shows_in_its_token_alone(experts: Runner) -> None:
    """With a limit too, which is a comparison that NaN fails."""
    given = arguments(SMALL, torch.bfloat16, 24, limit=0.5)
    given["x"][2, 3] = float("nan")
    y = experts(**given)
    assert y[2].isnan().all()
    assert y[[0, 1, 3, 4]].isfinite().all()


def test_layouts(experts: Runner) -> None:
    """Views: columns of a wider activation, experts and rows with others between, choices that lie by expert."""
    given = arguments(SMALL, torch.bfloat16, 24)
    N, E, A, D, width = SMALL.values()
    views = {
        "x": torch.zeros(N, 2 * D + 3).bfloat16()[:, 3 : D + 3],
        "gate_up": torch.zeros(2 * E, 2 * width, D + 8).bfloat16()[1::2, :, :D],
        "down": torch.zeros(E, D, 2 * width).bfloat16()[:, :, width:],
        "indices": torch.zeros(A, N, dtype=torch.int64).T,
        "weights": torch.zeros(N, 2 * A)[:, ::2],
        "shared_gate_up": torch.zeros(2 * width, D + 8).bfloat16()[:, 8:],
        "shared_down": torch.zeros(2 * D, width).bfloat16()[::2],
    }
    for name, view in views.items():
        assert not view.is_contiguous()
        given[name] = view.copy_(given[name])
    experts(**given)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("shared", [0, 8, 24])
@pytest.mark.parametrize("size", [SMALL, SIZES[1], MANY, SIZES[3]])
def test_the_composition_for_accelerators(size: dict, shared: int, limit: float | None) -> None:
    """torch's grouped product runs on the CPU too."""
    given = arguments(size, torch.bfloat16, shared, limit=limit)
    oracle = accuracy.oracle(moe_experts.reference, **given)
    accuracy.assert_close(moe_experts_pytorch(**given), moe_experts.reference(**given), oracle)


@pytest.mark.parametrize("elsewhere", ["some", "all"])
def test_the_composition_leaves_out_experts_of_another_device(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(MANY, torch.bfloat16)
    given["indices"][given["indices"] == 1 if elsewhere == "some" else ...] = MANY["E"]
    product = F.grouped_mm

    def rest_undefined(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        # What a device leaves in rows behind the last group.
        end = int(offs[-1])
        y = product(x, w, offs=offs)
        return torch.where(torch.arange(len(y))[:, None] < end, y, torch.nan)

    monkeypatch.setattr(F, "grouped_mm", rest_undefined)
    oracle = accuracy.oracle(moe_experts.reference, **given)
    accuracy.assert_close(moe_experts_pytorch(**given), moe_experts.reference(**given), oracle)


def test_a_token_does_not_depend_on_the_others() -> None:
    given = arguments(dict(N=9, E=4, A=2, D=16, F=24), torch.bfloat16, 24)
    one = given | {name: given[name][4:5] for name in ("x", "indices", "weights")}
    assert torch.equal(moe_experts(**given)[4:5], moe_experts(**one))


def test_gradients() -> None:
    names = ("x", "gate_up", "down", "weights", "shared_gate_up", "shared_down")
    given = arguments(SMALL, torch.float64, 7)
    given["weights"] = given["weights"].double()
    for name in names:
        given[name].requires_grad_()
    leaves = [given[name] for name in names]
    got = torch.autograd.grad(moe_experts(**given).square().sum(), leaves)
    expected = torch.autograd.grad(over_all(**given).square().sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


GOOD = arguments(SMALL, torch.bfloat16, 24)
REFUSED = {
    "fp64": (dict(x=GOOD["x"].double()), "dtype torch.float64 is not one of"),
    "x stride": (dict(x=torch.zeros(16, 5).bfloat16().T), "the last dimension of x has stride 5, not 1"),
    "dimensions": (dict(x=GOOD["x"][0]), "expected (N, D) and (E, 2 F, D)"),
    "odd": (dict(gate_up=GOOD["gate_up"][:, 1:]), "expected (N, D) and (E, 2 F, D)"),
    "indices": (dict(indices=torch.zeros(4, 2, dtype=torch.long)), "expected (5, A)"),
    "weights": (dict(weights=torch.zeros(5, 3)), "expected (5, A)"),
    "dtype of indices": (dict(indices=GOOD["indices"].short()), "have dtypes torch.int16"),
    "dtype of gate_up": (dict(gate_up=GOOD["gate_up"].float()), "gate_up has dtype torch.float32"),
    "width": (dict(down=torch.zeros(4, 16, 20).bfloat16()), "down has shape (4, 16, 20), expected (4, 16, 24)"),
    "down stride": (dict(down=torch.zeros(4, 24, 16).bfloat16().mT), "the last dimension of down has stride 16"),
    "width of the shared": (dict(shared_gate_up=torch.zeros(96, 16).bfloat16()), "shared_gate_up has shape (96, 16)"),
    "half of the shared": (dict(shared_down=None), "shared_down has shape None"),
    "gradient": (dict(x=GOOD["x"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert refusal(moe_experts, **GOOD) == ""
    assert why in refusal(moe_experts, **GOOD | changed)


def test_refusal_of_many_tokens() -> None:
    """By their number alone, so that no value has to come from the device."""
    for N in (LARGEST_N, LARGEST_N + 1):
        given = arguments(MANY | dict(N=N), torch.bfloat16)
        why = refusal(moe_experts, **given)
        assert why == ("" if N == LARGEST_N else f"triton: {N} tokens, more than {LARGEST_N}")


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(moe_experts, **GOOD)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(x=torch.randn(65, 40)), "dtypes torch.float32, torch.bfloat16 and torch.bfloat16"),
        (dict(gate_up=torch.randn(3, 40, 32).bfloat16().mT), "gate_up is not contiguous"),
        (dict(down=torch.randn(3, 40, 20).bfloat16()), "rows of 20 elements in down, not a multiple of 8"),
    ],
    ids=["dtypes", "layout", "alignment"],
)
def test_refusals_of_the_composition(change: dict, why: str) -> None:
    with FakeTensorMode():
        given = {k: fake(v) for k, v in arguments(MANY, torch.bfloat16).items()}
        assert moe_experts.choose(**given)[0] == "pytorch"
        backend, reason = moe_experts.choose(**given | {k: fake(v) for k, v in change.items()})
    assert backend == "reference"
    assert why in reason


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("K", [1, 24, 1024, 2304])
def test_tile(arch: Architecture, itemsize: int, K: int) -> None:
    """Powers of two, at least one element for each lane, and not much more columns than there are."""
    cut = module.tile(arch, K, itemsize)
    assert all(n & (n - 1) == 0 and n > 0 for n in (cut.rows, cut.block_k, cut.warps))
    assert cut.block_k <= max(2 * K, 16 // itemsize)
    assert cut.warps == 1 or cut.block_k >= cut.warps * arch.lanes


def test_traced_without_values() -> None:
    """The reference reads which experts were chosen, so its shapes are told apart from it."""
    given = arguments(SMALL, torch.float32)
    compiled = torch.compile(moe_experts, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given.values()), moe_experts(*given.values()))
