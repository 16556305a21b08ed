"""recurrent_kda: numbers, masks, real log-decays, strides, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels.kda import kda_gate, parts, recurrent_kda
from xpu_ports.common.kernels.kda.parts import LARGEST_HEAD

pytestmark = pytest.mark.op("recurrent_kda")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, T=1, H=1, K=3, V=1),
    dict(B=2, T=1, H=2, K=24, V=12),
    dict(B=2, T=3, H=1, K=7, V=40),
    dict(B=1, T=1, H=1, K=128, V=64),
    dict(B=1, T=1, H=1, K=64, V=128),
]


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict:
    """One call's, by name. Log-decays as layers are initialized: rates of 1 to 16, steps of 1 to 100 thousandths."""
    B, T, H, K, V = size.values()
    step = torch.exp(torch.rand(H * K) * 4.6 - 6.9)
    dt_bias = step + torch.log(-torch.expm1(-step))
    return dict(
        state=normal(B, H, K, V, dtype=torch.float32),
        q=normal(B, T, H, K, dtype=dtype, layout=layout),
        k=normal(B, T, H, K, dtype=dtype, layout=layout),
        v=normal(B, T, H, V, dtype=dtype, layout=layout),
        g=kda_gate.reference(torch.randn(B, T, H, K), torch.log(1 + 15 * torch.rand(H)), dt_bias),
        beta=torch.rand(B, T, H),
        scale=K**-0.5,
        l2norm=True,
        mask=None,
    )


def by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, scale: float, l2norm: bool
) -> tuple[Tensor, Tensor]:
    """(o, state), one token of one head at a time, as matrices, fp64."""
    B, T, H, K = q.shape
    state = torch.zeros(B, H, K, v.shape[3], dtype=torch.float64) if state is None else state.clone()
    o = torch.empty_like(v)
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(T):
                q_t, k_t = q[b, t, h], k[b, t, h]
                if l2norm:
                    q_t, k_t = (x / (x @ x + 1e-6).sqrt() for x in (q_t, k_t))
                decay = torch.diag(g[b, t, h].exp())
                # S = (I - beta k k^T) Diag(exp(g)) S + beta k v^T
                erase = torch.eye(K, dtype=torch.float64) - beta[b, t, h] * torch.outer(k_t, k_t)
                S = erase @ decay @ S + beta[b, t, h] * torch.outer(k_t, v[b, t, h])
                o[b, t, h] = scale * S.T @ q_t
            state[b, h] = S
    return o, state


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    o, state = run(**arguments(size, dtype))
    B, T, H, K, V = size.values()
    assert (o.dtype, o.shape) == (dtype, (B, T, H, V))
    assert state.shape == (B, H, K, V)


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size", [dict(B=2, T=t, H=2, K=k, V=v) for t in (2, 17, 64) for k, v in ((128, 128), (128, 64), (96, 128))]
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


def test_without_norm(run: Runner) -> None:
    given = arguments(SIZES[1])
    run(**given | dict(l2norm=False, k=given["k"] * 0.2))


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_state(run: Runner, state_dtype: torch.dtype) -> None:
    given = arguments(SIZES[1], torch.bfloat16)
    _, state = run(**given | dict(state=given["state"].to(state_dtype)))
    assert state.dtype == state_dtype


def test_norm_of_nothing(run: Runner) -> None:
    """A key of zeros writes nothing and a query of zeros reads nothing: no 0 / 0."""
    given = arguments(SIZES[1])
    o, _ = run(**given | dict(q=torch.zeros_like(given["q"]), k=torch.zeros_like(given["k"])))
    assert (o == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask(run: Runner, dtype: torch.dtype) -> None:
    """A token that does not count is as if it were not there, whatever it holds."""
    given = arguments(dict(B=4, T=3, H=1, K=7, V=5))
    counts = torch.tensor([[1, 1, 1], [0, 0, 1], [1, 0, 1], [0, 0, 0]], dtype=torch.bool)
    for name in ("q", "k", "v", "g", "beta"):
        given[name][~counts] = float("nan")
    o, state = run(**given | dict(mask=counts.to(dtype)))
    assert (o[~counts] == 0).all()
    assert torch.equal(state[3], given["state"][3])
    kept = {name: given[name][2:3, [0, 2]] for name in ("q", "k", "v", "g", "beta")}
    alone = given["state"][2:3].clone()
    expected = recurrent_kda.reference(**given | kept | dict(state=alone))
    torch.testing.assert_close(o[2:3, [0, 2]], expected)
    torch.testing.assert_close(state[2:3], alone)


def test_masked_tokens_never_write(run: Runner) -> None:
    """A state that is NaN where no token counts stays as it is, bit for bit, and none but its own sequence's."""
    given = arguments(dict(B=3, T=1, H=2, K=7, V=5))
    given["state"][1] = float("nan")
    o, state = run(**given | dict(mask=torch.tensor([[1], [0], [1]])))
    assert (o[1] == 0).all()
    assert torch.equal(state[1].view(torch.int32), given["state"][1].view(torch.int32))
    assert state[[0, 2]].isfinite().all()
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("T", [1, 3])
def test_slots(run: Runner, T: int, dtype: torch.dtype) -> None:
    """States anywhere in a larger pool; sequences without one write nothing, whatever they hold."""
    given = arguments(dict(B=5, T=T, H=2, K=7, V=20))
    slots = torch.tensor([3, -1, 0, 6, -1])
    for name in ("q", "k", "v", "g", "beta"):
        given[name][slots < 0] = float("nan")
    pool = torch.randn(7, 2, 7, 20)
    pool[[1, 5]] = float("nan")
    o, state = run(**given | dict(state=pool, slots=slots.to(dtype)))
    assert (o[slots < 0] == 0).all()
    others = [1, 2, 4, 5]
    assert torch.equal(state[others].view(torch.int32), pool[others].view(torch.int32))
    taken = slots >= 0
    alone = {name: given[name][taken] for name in ("q", "k", "v", "g", "beta")}
    states = pool[slots[taken]]
    expected = recurrent_kda.reference(**given | alone | dict(state=states))
    torch.testing.assert_close(o[taken], expected)
    torch.testing.assert_close(state[slots[taken]], states)


def test_slots_with_a_mask(run: Runner) -> None:
    given = arguments(dict(B=3, T=2, H=1, K=7, V=5)) | dict(state=torch.randn(4, 1, 7, 5))
    every_other = torch.tensor([2, 9, -1, 9, 1, 9])[::2]
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    _, state = run(**given | dict(mask=mask, slots=every_other))
    assert torch.equal(state[[0, 1, 3]], given["state"][[0, 1, 3]])
    assert not torch.equal(state[2], given["state"][2])


def test_nan_stays_in_its_sequence_and_column(run: Runner) -> None:
    given = arguments(dict(B=2, T=2, H=2, K=7, V=5))
    given["state"][1, 0, 3, 2] = float("nan")
    o, state = run(**given)
    assert o[1, :, 0, 2].isnan().all()
    assert int(o.isnan().sum()) == 2
    assert int(state.isnan().any(2).sum()) == 1


def test_strided_mask(run: Runner) -> None:
    run(**arguments(dict(B=2, T=2, H=1, K=7, V=5)) | dict(mask=torch.tensor([[1, 9, 0, 9], [1, 9, 1, 9]])[:, ::2]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    given = arguments(dict(B=2, T=3, H=2, K=7, V=12), torch.bfloat16, layout)
    run(**given | dict(beta=normal(2, 3, 2, dtype=torch.bfloat16, layout=layout).abs()))


@pytest.mark.parametrize("layout", ["slice", "gap", "transposed"])
def test_layout_of_the_state(run: Runner, layout: str) -> None:
    """The state may be part of a larger cache, of which nothing else is written."""
    given = arguments(dict(B=2, T=1, H=2, K=7, V=12))
    run(**given | dict(state=normal(2, 2, 7, 12, dtype=torch.float32, layout=layout)))


def test_log_decays_of_minus_thirty(run: Runner) -> None:
    given = arguments(dict(B=1, T=4, H=2, K=16, V=8))
    given["g"][torch.rand_like(given["g"]) < 0.3] = -30.0
    o, state = run(**given)
    assert o.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.parametrize("size", [dict(B=0, T=1, H=2, K=7, V=5), dict(B=2, T=0, H=2, K=7, V=5)])
def test_nothing(run: Runner, size: dict) -> None:
    given = arguments(size)
    o, state = run(**given)
    assert o.shape == given["v"].shape
    assert torch.equal(state, given["state"])


@pytest.mark.parametrize("l2norm", [True, False])
def test_formula(l2norm: bool) -> None:
    given = {k: accuracy.to_double(v) for k, v in arguments(dict(B=2, T=5, H=2, K=5, V=3)).items()}
    given |= dict(l2norm=l2norm)
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    o, state = by_token(q, k, v, g, beta, given["state"], given["scale"], l2norm)
    moved = given["state"].clone()
    accuracy.assert_close(recurrent_kda.reference(**given | dict(state=moved)), o, o)
    accuracy.assert_close(moved, state, state, "state")


def test_one_rounding() -> None:
    assert_rounded_once(recurrent_kda, **arguments(dict(B=8, T=4, H=4, K=16, V=32), torch.bfloat16))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=3, H=2, K=5, V=4)) | dict(mask=torch.ones(2, 3))
WIDE = arguments(dict(B=1, T=1, H=1, K=LARGEST_HEAD + 1, V=4))
REFUSED = {
    **{
        f"{name} fp64": (GOOD | {name: GOOD[name].double()}, f"{name} has dtype torch.float64")
        for name in ("state", "q", "k", "v", "g", "beta")
    },
    "q and k differ": (GOOD | dict(k=GOOD["k"].half()), "k has dtype torch.float16, where q, k and v share"),
    **{
        f"{name} stride": (GOOD | {name: GOOD[name].mT.contiguous().mT}, f"the last dimension of {name} has stride")
        for name in ("state", "q", "k", "v", "g")
    },
    "state shape": (GOOD | dict(state=torch.zeros(2, 2, 4, 5)), "state has shape (2, 2, 4, 5), expected (2, 2, 5, 4)"),
    "k shape": (GOOD | dict(k=torch.zeros(2, 3, 2, 4)), "k has shape (2, 3, 2, 4)"),
    "g of a head": (GOOD | dict(g=torch.zeros(2, 3, 2)), "g has shape (2, 3, 2)"),
    "beta shape": (GOOD | dict(beta=torch.zeros(2, 4, 2)), "beta has shape (2, 4, 2)"),
    "v shape": (GOOD | dict(v=torch.zeros(2, 2, 2, 4)), "v has shape (2, 2, 2, 4)"),
    "mask shape": (GOOD | dict(mask=torch.ones(2)), "mask has shape (2,)"),
    "slots shape": (GOOD | dict(slots=torch.zeros(3, dtype=torch.int64)), "slots has shape (3,)"),
    "slots dtype": (GOOD | dict(slots=torch.zeros(2)), "dtype torch.float32, expected (2,), int32 or int64"),
    "wide heads": (WIDE, "heads of 257 channels, more than 256"),
    "gradient": (GOOD | dict(q=GOOD["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(given: dict, why: str) -> None:
    assert why in refusal(recurrent_kda, **given)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AVAILABLE", False)
    monkeypatch.setattr(parts, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(recurrent_kda, **GOOD)


def test_taken() -> None:
    """The call that the refusals above differ from in one thing each, and a model's."""
    assert refusal(recurrent_kda, **GOOD) == ""
    assert refusal(recurrent_kda, **arguments(dict(B=1, T=1, H=32, K=128, V=128), torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in GOOD.items()}
    given["q"].requires_grad_()
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        recurrent_kda(**given)
