"""selective_state_update: numbers, groups, masks, tiny and large steps, strides, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import selective_state_update as module
from xpu_ports.common.kernels.selective_state_update import LARGEST_STATE, selective_state_update
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan

pytestmark = pytest.mark.op("selective_state_update")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, H=1, P=1, N=1, G=1),
    dict(B=3, H=2, P=7, N=5, G=1),
    dict(B=2, H=4, P=60, N=16, G=2),
    dict(B=1, H=8, P=64, N=64, G=8),
    dict(B=1, H=3, P=64, N=128, G=1),
    dict(B=2, H=1, P=13, N=97, G=1),
    dict(B=1, H=1, P=4, N=512, G=1),
]


def arguments(
    size: dict, dtype: torch.dtype = torch.float32, state_dtype: torch.dtype = torch.float32, layout: str = "contiguous"
) -> dict:
    """One call's, by name, without a mask. Decays and steps as Zamba2's layers have them."""
    B, H, P, N, G = size.values()
    return dict(
        state=normal(B, H, P, N, dtype=state_dtype),
        x=normal(B, H, P, dtype=dtype, layout=layout),
        dt=normal(B, H, dtype=dtype, layout=layout),
        A_log=torch.rand(H) * 3 - 1,
        B=normal(B, G, N, dtype=dtype, layout=layout),
        C=normal(B, G, N, dtype=dtype, layout=layout),
        D=torch.randn(H),
        dt_bias=torch.rand(H) * 8 - 7,
        mask=None,
    )


def by_number(
    state: Tensor, x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """(y, state), one number at a time, fp64."""
    (batch, H, P, N), G = state.shape, B.shape[1]
    y, moved = torch.zeros_like(x), state.clone()
    for b in range(batch):
        for h in range(H if mask[b] else 0):
            g = h // (H // G)
            step = math.log1p(math.exp(float(dt[b, h] + dt_bias[h])))
            decay = math.exp(-math.exp(float(A_log[h])) * step)
            for p in range(P):
                for n in range(N):
                    moved[b, h, p, n] = decay * state[b, h, p, n] + step * x[b, h, p] * B[b, g, n]
                y[b, h, p] = sum(moved[b, h, p, n] * C[b, g, n] for n in range(N)) + D[h] * x[b, h, p]
    return y, moved


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size", [dict(B=2, H=8, P=p, N=n, G=g) for p in (64, 80) for n in (64, 128, 256) for g in (1, 2, 8)]
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_of_the_state(run: Runner, state_dtype: torch.dtype) -> None:
    y, state = run(**arguments(SIZES[2], torch.bfloat16, state_dtype))
    assert (y.dtype, state.dtype) == (torch.bfloat16, state_dtype)


@pytest.mark.parametrize("left_out", ["D", "dt_bias"])
def test_without(run: Runner, left_out: str) -> None:
    run(**arguments(SIZES[1]) | {left_out: None})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask(run: Runner, dtype: torch.dtype) -> None:
    """A row whose token does not count keeps its state bit for bit and gives 0, whatever the token holds."""
    given = arguments(dict(B=4, H=2, P=7, N=5, G=1))
    counts = torch.tensor([True, False, True, False])
    given["x"][1] = float("nan")
    given["dt"][3] = float("nan")
    y, state = run(**given | dict(mask=counts.to(dtype)))
    assert (y[~counts] == 0).all()
    assert torch.equal(state[~counts], given["state"][~counts])
    assert not torch.equal(state[counts], given["state"][counts])


def test_strided_mask(run: Runner) -> None:
    run(**arguments(SIZES[1]) | dict(mask=torch.tensor([1, 9, 0, 9, 1, 9])[::2]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(**arguments(SIZES[2], torch.bfloat16, layout=layout))


@pytest.mark.parametrize("layout", ["slice", "gap", "transposed"])
def test_layout_of_the_state(run: Runner, layout: str) -> None:
    """The state may be part of a larger cache, of which nothing else is written."""
    size = dict(B=2, H=4, P=10, N=16, G=2)
    run(**arguments(size) | dict(state=normal(2, 4, 10, 16, dtype=torch.float32, layout=layout)))


def test_slices_of_one_projection(run: Runner) -> None:
    """x, B and C as Mamba-2 hands them over: columns of the convolution's output."""
    given = arguments(SIZES[2], torch.bfloat16)
    projection = torch.randn(2, 4 * 60 + 2 * 2 * 16).bfloat16()
    x, B, C = projection.split([240, 32, 32], dim=-1)
    run(**given | dict(x=x.unflatten(-1, (4, 60)), B=B.unflatten(-1, (2, 16)), C=C.unflatten(-1, (2, 16))))


def test_no_rows(run: Runner) -> None:
    y, state = run(**arguments(dict(B=0, H=2, P=7, N=5, G=1)))
    assert (y.shape, state.shape) == ((0, 2, 7), (0, 2, 7, 5))


def test_no_step_leaves_the_state_as_it_is(run: Runner) -> None:
    given = arguments(SIZES[1])
    _, state = run(**given | dict(dt=torch.full_like(given["dt"], float("-inf"))))
    assert torch.equal(state, given["state"])


@pytest.mark.parametrize("step", [-30.0, -25.0, -10.0, 19.0, 21.0, 60.0])
def test_size_of_the_step(run: Runner, step: float) -> None:
    """softplus keeps its relative accuracy where it is tiny, and does not overflow where it is large."""
    given = arguments(SIZES[1]) | dict(dt_bias=None, D=None)
    given["state"].zero_()
    _, state = run(**given | dict(dt=torch.full_like(given["dt"], step)))
    assert state.isfinite().all()
    assert (state != 0).any()


def test_formula() -> None:
    given = accuracy.to_double(list(arguments(dict(B=2, H=4, P=3, N=5, G=2)).values())[:-1])
    given.append(torch.tensor([True, False]))
    y, state = by_number(*given)
    moved = given[0].clone()
    accuracy.assert_close(selective_state_update.reference(moved, *given[1:]), y, y)
    accuracy.assert_close(moved, state, state, "state")


def test_one_rounding() -> None:
    assert_rounded_once(selective_state_update, **arguments(dict(B=8, H=8, P=32, N=16, G=2), torch.bfloat16))


def test_many_steps_are_the_scan() -> None:
    """The decode step is the recurrence that prefill runs."""
    T, H, P, N, G = 9, 4, 3, 5, 2
    x, dt, B, C = (torch.randn(2, T, *s, dtype=torch.float64) for s in ((H, P), (H,), (G, N), (G, N)))
    A_log, D, dt_bias = (torch.randn(H, dtype=torch.float64) for _ in range(3))
    state = torch.randn(2, H, P, N, dtype=torch.float64)
    expected, last = ssd_chunk_scan.reference(x, dt, A_log, B, C, D, dt_bias, state, 4)
    steps = [
        selective_state_update.reference(state, x[:, t], dt[:, t], A_log, B[:, t], C[:, t], D, dt_bias, None)
        for t in range(T)
    ]
    accuracy.assert_close(torch.stack(steps, 1), expected, expected)
    accuracy.assert_close(state, last, last, "state")


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, H=4, P=3, N=5, G=2)) | dict(mask=torch.ones(2))
WIDE = LARGEST_STATE + 1
REFUSED = {
    **{
        f"{name} fp64": ({name: GOOD[name].double()}, f"{name} has dtype torch.float64")
        for name in ("state", "x", "dt", "B", "C")
    },
    **{
        f"{name} fp64": ({name: GOOD[name].double()}, f"{name} has shape (4,) and dtype torch.float64")
        for name in ("A_log", "D", "dt_bias")
    },
    **{f"{name} stride": ({name: GOOD[name].mT.contiguous().mT}, f"dimension of {name} has stride") for name in "xBC"},
    "state stride": (dict(state=GOOD["state"].mT.contiguous().mT), "dimension of state has stride"),
    "x shape": (dict(x=torch.zeros(2, 4, 2)), "shape (2, 4, 2) where (2, 4, 3)"),
    "dt shape": (dict(dt=torch.zeros(2, 3)), "shape (2, 3) where (2, 4)"),
    "C shape": (dict(C=torch.zeros(2, 1, 5)), "shape (2, 1, 5) where (2, 2, 5)"),
    "groups": (dict(B=torch.zeros(2, 3, 5), C=torch.zeros(2, 3, 5)), "a divisor of 4"),
    "width of B": (dict(B=torch.zeros(2, 2, 4), C=torch.zeros(2, 2, 4)), "B has shape (2, 2, 4)"),
    "rows of B": (dict(B=torch.zeros(1, 2, 5), C=torch.zeros(1, 2, 5)), "B has shape (1, 2, 5)"),
    "mask": (dict(mask=torch.ones(2, 1)), "mask has shape (2, 1)"),
    "wide state": (
        dict(state=torch.zeros(2, 4, 3, WIDE), B=torch.zeros(2, 2, WIDE), C=torch.zeros(2, 2, WIDE)),
        "a state of 513, more than 512",
    ),
    **{f"{name} shape": ({name: torch.zeros(3)}, f"{name} has shape (3,)") for name in ("A_log", "D", "dt_bias")},
    "A_log stride": (dict(A_log=torch.zeros(8)[::2]), "A_log has shape (4,)"),
    "gradient": (dict(x=GOOD["x"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(selective_state_update, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(selective_state_update, **GOOD)


@pytest.mark.parametrize("layout", ["1.2B", "2.7B", "7B"])
def test_taken(layout: str) -> None:
    """Zamba2's layouts are, and the call that the refusals above differ from in one thing each."""
    assert refusal(selective_state_update, **GOOD) == ""
    assert refusal(selective_state_update, **GOOD | dict(D=None, dt_bias=None, mask=None)) == ""
    H, N, G = {"1.2B": (64, 128, 1), "2.7B": (80, 64, 1), "7B": (112, 64, 2)}[layout]
    assert refusal(selective_state_update, **arguments(dict(B=1, H=H, P=64, N=N, G=G), torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) for k, v in GOOD.items()}
    given["x"].requires_grad_()
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        selective_state_update(**given)
