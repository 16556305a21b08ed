"""ssd_chunk_scan: numbers, chunk and segment boundaries, groups, packed sequences, tiny and large steps, refusals."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.device import ARCHITECTURES, use_architecture
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan
from xpu_ports.common.kernels.ssd_chunk_scan import triton as module
from xpu_ports.common.kernels.ssd_chunk_scan.parts import Products, Tile
from xpu_ports.common.kernels.ssd_chunk_scan.triton import LARGEST_N, MOST_SEQUENCES
from xpu_ports.common.kernels.ssd_chunk_scan.walk import Walk

pytestmark = pytest.mark.op("ssd_chunk_scan")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, T=1, H=1, P=1, N=1, G=1),
    dict(B=2, T=1, H=4, P=16, N=16, G=2),
    dict(B=1, T=31, H=2, P=20, N=12, G=1),
    dict(B=1, T=32, H=2, P=32, N=16, G=2),
    dict(B=2, T=33, H=2, P=8, N=64, G=1),
    dict(B=1, T=61, H=3, P=60, N=17, G=1),
    dict(B=1, T=97, H=8, P=5, N=7, G=8),
    dict(B=1, T=65, H=1, P=64, N=128, G=1),
]
# The architectures that differ in more than sizes: "cpu" runs as "nvidia" does, "xe2" as "max".
PLANS = ("nvidia", "max", "arc-a")
# Long enough for a few programs to be cut into segments on the smallest device.
SEGMENTED = dict(B=1, T=701, H=1, P=16, N=16, G=1)


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict:
    """One call's, by name, with an initial state. Decays and steps as Zamba2's layers have them."""
    B, T, H, P, N, G = size.values()
    return dict(
        x=normal(B, T, H, P, dtype=dtype, layout=layout),
        dt=normal(B, T, H, dtype=dtype, layout=layout),
        A_log=torch.rand(H) * 3 - 1,
        B=normal(B, T, G, N, dtype=dtype, layout=layout),
        C=normal(B, T, G, N, dtype=dtype, layout=layout),
        D=torch.randn(H),
        dt_bias=torch.rand(H) * 8 - 7,
        initial_state=normal(B, H, P, N, dtype=torch.float32),
        chunk_size=16,
    )


def by_token(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_min: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(y, state) of the recurrence as published, one token and head at a time, fp64."""
    (batch, T, H, P), (G, N) = x.shape, B.shape[2:]
    state = torch.zeros(batch, H, P, N, dtype=torch.float64) if initial_state is None else initial_state.clone()
    y = torch.empty_like(x)
    for b in range(batch):
        for t in range(T):
            for h in range(H):
                g = h // (H // G)
                raw = float(dt[b, t, h]) + (0.0 if dt_bias is None else float(dt_bias[h]))
                step = max(math.log1p(math.exp(raw)), dt_min)
                decay = math.exp(-math.exp(float(A_log[h])) * step)
                state[b, h] = decay * state[b, h] + step * x[b, t, h, :, None] * B[b, t, g, None, :]
                y[b, t, h] = state[b, h] @ C[b, t, g] + (0.0 if D is None else D[h] * x[b, t, h])
    return y, state


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    y, state = run(**arguments(size, dtype))
    B, T, H, P, N, _ = size.values()
    assert (y.dtype, y.shape) == (dtype, (B, T, H, P))
    assert (state.dtype, state.shape) == (torch.float32, (B, H, P, N))
    assert state.is_contiguous()


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size",
    [dict(B=2, T=t, H=4, P=64, N=n, G=g) for t in (63, 256, 300) for n in (64, 128) for g in (1, 2)]
    + [dict(B=1, T=2000, H=2, P=64, N=64, G=1), dict(B=1, T=257, H=1, P=80, N=256, G=1)],
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


@FLOATS
def test_segments(run: Runner, dtype: torch.dtype) -> None:
    """A short batch of long sequences is cut along time, and put together again."""
    run(**arguments(SEGMENTED, dtype))
    run(**arguments(SEGMENTED, dtype) | dict(initial_state=None))


@contextlib.contextmanager
def plans_of(name: str, run: Runner) -> Iterator[None]:
    """Tiles, operands and kernels of an architecture; the interpreter takes them all."""
    if run.target.backend != "triton" or os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("needs the interpreter")
    with use_architecture(name):
        yield


@pytest.mark.parametrize("name", ARCHITECTURES)
@FLOATS
def test_plans(run: Runner, name: str, dtype: torch.dtype) -> None:
    with plans_of(name, run):
        run(**arguments(dict(B=1, T=70, H=2, P=64, N=24, G=1), dtype))


@pytest.mark.parametrize("name", PLANS)
def test_plans_where_nothing_is_even(run: Runner, name: str) -> None:
    """More than a chunk, channels and columns beyond a tile, two groups."""
    given = arguments(dict(B=1, T=265, H=2, P=20, N=35, G=2), torch.bfloat16)
    with plans_of(name, run):
        run(**given | dict(D=None, dt_bias=None, initial_state=None), dt_min=0.1)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("lengths", [[260, 1, 0, 30], [5, 0, 40, 1]], ids=lambda lengths: "-".join(map(str, lengths)))
def test_plans_for_packed_sequences(run: Runner, name: str, lengths: list[int]) -> None:
    size = dict(B=1, T=sum(lengths), H=1, P=16, N=16, G=1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with plans_of(name, run):
        run(**arguments(size, torch.bfloat16) | dict(initial_state=torch.randn(4, 1, 16, 16)), cu_seqlens=bounds)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("step", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_with_a_step_that_is_no_number(run: Runner, name: str, step: float, dtype: torch.dtype) -> None:
    """It spoils its own head from its own token on, and nothing else."""
    given = arguments(dict(B=1, T=75, H=2, P=8, N=8, G=1), dtype)
    # The first of a chunk of the reference, which spoils a chunk as a whole.
    given["dt"][0, 48, 1] = step
    with plans_of(name, run):
        y, state = run(**given)
    assert y[0, :48].isfinite().all()
    assert y[0, :, 0].isfinite().all()
    assert y[0, 48:, 1].isnan().all()
    assert state[0, 0].isfinite().all()
    assert state[0, 1].isnan().all()


@pytest.mark.parametrize("size", [dict(B=1, T=45, H=2, P=20, N=17, G=1), SEGMENTED], ids=["whole", "segments"])
def test_walk(run: Runner, monkeypatch: pytest.MonkeyPatch, size: dict) -> None:
    """The walk on every device: no plan for an Intel GPU has it, and their compiler is to take it all the same."""
    tile = Tile(32, 16, LARGEST_N, warps=8)
    walk = Walk(Products("bf16", "ieee", 3), 4, 256, tile, tile)
    monkeypatch.setattr(module, "plan", lambda dtype, device: walk)
    run(**arguments(size, torch.bfloat16))


@pytest.mark.parametrize("left_out", ["D", "dt_bias", "initial_state"])
def test_without(run: Runner, left_out: str) -> None:
    run(**arguments(SIZES[2]) | {left_out: None})


@pytest.mark.parametrize("dt_min", [1e-3, 0.5])
def test_smallest_step(run: Runner, dt_min: float) -> None:
    run(**arguments(SIZES[2]), dt_min=dt_min)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(**arguments(dict(B=2, T=37, H=4, P=10, N=16, G=2), torch.bfloat16, layout))


@pytest.mark.parametrize("layout", ["slice", "gap", "transposed"])
def test_layout_of_the_initial_state(run: Runner, layout: str) -> None:
    size = dict(B=2, T=5, H=4, P=10, N=16, G=2)
    run(**arguments(size) | dict(initial_state=normal(2, 4, 10, 16, dtype=torch.bfloat16, layout=layout)))


def test_slices_of_one_projection(run: Runner) -> None:
    """x, B and C as Mamba-2 hands them over: columns of the convolution's output."""
    given = arguments(dict(B=2, T=19, H=4, P=10, N=16, G=2), torch.bfloat16)
    x, B, C = torch.randn(2, 19, 4 * 10 + 2 * 2 * 16).bfloat16().split([40, 32, 32], dim=-1)
    run(**given | dict(x=x.unflatten(-1, (4, 10)), B=B.unflatten(-1, (2, 16)), C=C.unflatten(-1, (2, 16))))


@pytest.mark.parametrize("size", [dict(B=0, T=5, H=2, P=4, N=3, G=1), dict(B=2, T=0, H=2, P=4, N=3, G=1)])
@pytest.mark.parametrize("started", [True, False], ids=["state", "zeros"])
def test_nothing(run: Runner, size: dict, started: bool) -> None:
    given = arguments(size)
    y, state = run(**given | ({} if started else dict(initial_state=None)))
    assert y.shape == given["x"].shape
    assert torch.equal(state, given["initial_state"] if started else torch.zeros_like(given["initial_state"]))


@pytest.mark.parametrize("size", [SIZES[5], SEGMENTED], ids=["chunks", "segments"])
def test_no_step_leaves_the_state_as_it_is(run: Runner, size: dict) -> None:
    """A token with dt = -inf is as if it were not there, at the start, at the end and across a whole chunk."""
    given = arguments(size)
    T = size["T"]
    counts = torch.ones(T, dtype=torch.bool)
    for start, end in ((0, 3), (7, 8), (20, 57), (T - 2, T)):
        counts[start:end] = False
    given["dt"][:, ~counts] = float("-inf")
    y, state = run(**given)
    kept = {name: given[name][:, counts] for name in ("x", "dt", "B", "C")}
    expected = accuracy.oracle(ssd_chunk_scan.reference, **given | kept)
    y_without, state_without = run(**given | kept)
    accuracy.assert_close(state, state_without, expected[1], "state")
    accuracy.assert_close(y[:, counts], y_without, expected[0])


def test_no_steps_at_all(run: Runner) -> None:
    given = arguments(SIZES[4])
    _, state = run(**given | dict(dt=torch.full_like(given["dt"], float("-inf"))))
    assert torch.equal(state, given["initial_state"])


@FLOATS
@pytest.mark.parametrize("step", [-14.0, -8.0, 3.0, 12.0, 30.0])
def test_size_of_the_step(run: Runner, step: float, dtype: torch.dtype) -> None:
    """Tiny steps keep their relative accuracy; large ones decay to 0 and neither overflow nor turn into NaN."""
    given = arguments(dict(B=1, T=50, H=2, P=4, N=8, G=1), dtype) | dict(dt_bias=None, D=None, initial_state=None)
    y, state = run(**given | dict(dt=torch.full_like(given["dt"], step)))
    assert y.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.parametrize(
    "lengths", [[37], [5, 0, 40, 1], [0, 0, 3], [300, 1, 260, 2]], ids=lambda lengths: "-".join(map(str, lengths))
)
@pytest.mark.parametrize("started", [True, False], ids=["state", "zeros"])
def test_packed_sequences(run: Runner, lengths: list[int], started: bool) -> None:
    """Sequences one after the other are as if each ran alone."""
    T, S = sum(lengths), len(lengths)
    given = arguments(dict(B=1, T=T, H=2, P=8, N=8, G=1))
    initial = torch.randn(S, 2, 8, 8) if started else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    y, state = run(**given | dict(initial_state=initial), cu_seqlens=bounds)
    assert state.shape == (S, 2, 8, 8)
    for s, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        alone = {name: given[name][:, start:end] for name in ("x", "dt", "B", "C")}
        alone["initial_state"] = None if initial is None else initial[s : s + 1]
        for got, name, oracle, expected in zip(
            (y[:, start:end], state[s : s + 1]),
            ("y", "state"),
            accuracy.oracle(ssd_chunk_scan.reference, **given | alone),
            ssd_chunk_scan.reference(**given | alone),
            strict=True,
        ):
            accuracy.assert_close(got, expected, oracle, f"{name} of sequence {s}")


# ------------------------------------------------------------------------------ the reference, by the published formula


def doubled(size: dict) -> dict:
    return {name: accuracy.to_double(value) for name, value in arguments(size).items()}


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 8, 64])
@pytest.mark.parametrize("T", [1, 3, 7, 8, 9, 31])
def test_formula(T: int, chunk_size: int) -> None:
    given = doubled(dict(B=2, T=T, H=4, P=3, N=5, G=2)) | dict(chunk_size=chunk_size)
    got = ssd_chunk_scan.reference(**given)
    for a, b, name in zip(got, by_token(*list(given.values())[:-1]), ("y", "state"), strict=True):
        accuracy.assert_close(a, b, b, name)


@pytest.mark.parametrize("left_out", ["D", "dt_bias", "initial_state"])
def test_formula_without(left_out: str) -> None:
    given = doubled(dict(B=1, T=9, H=4, P=3, N=5, G=2)) | {left_out: None, "chunk_size": 4}
    got = ssd_chunk_scan.reference(**given)
    for a, b in zip(got, by_token(*list(given.values())[:-1]), strict=True):
        accuracy.assert_close(a, b, b)


def test_formula_with_a_smallest_step() -> None:
    given = doubled(dict(B=1, T=9, H=4, P=3, N=5, G=2)) | dict(chunk_size=4)
    got = ssd_chunk_scan.reference(**given, dt_min=0.1)
    for a, b in zip(got, by_token(*list(given.values())[:-1], dt_min=0.1), strict=True):
        accuracy.assert_close(a, b, b)


def test_formula_of_tokens_without_a_step() -> None:
    given = doubled(dict(B=1, T=9, H=2, P=3, N=5, G=1)) | dict(chunk_size=4)
    given["dt"][0, [0, 4, 5, 6, 7]] = float("-inf")
    got = ssd_chunk_scan.reference(**given)
    for a, b in zip(got, by_token(*list(given.values())[:-1]), strict=True):
        accuracy.assert_close(a, b, b)


def test_one_rounding() -> None:
    assert_rounded_once(ssd_chunk_scan, **arguments(dict(B=2, T=40, H=4, P=16, N=16, G=2), torch.bfloat16))


def test_continues_where_it_stopped() -> None:
    given = doubled(dict(B=2, T=21, H=2, P=3, N=5, G=1)) | dict(chunk_size=4)
    expected, last = ssd_chunk_scan.reference(**given)
    ys, state = [], given["initial_state"]
    for start, end in ((0, 6), (6, 7), (7, 21)):
        part = {name: given[name][:, start:end] for name in ("x", "dt", "B", "C")}
        y, state = ssd_chunk_scan.reference(**given | part | dict(initial_state=state))
        ys.append(y)
    accuracy.assert_close(torch.cat(ys, 1), expected, expected)
    accuracy.assert_close(state, last, last, "state")


def test_the_initial_state_is_not_returned() -> None:
    """Also where no token changes it: a cache would be written twice."""
    given = arguments(dict(B=1, T=0, H=2, P=3, N=5, G=1))
    _, state = ssd_chunk_scan(**given)
    state += 1
    assert not torch.equal(state, given["initial_state"])


def test_gradcheck() -> None:
    given = doubled(dict(B=1, T=5, H=2, P=2, N=3, G=1)) | dict(chunk_size=2)
    tensors = {name: v.requires_grad_() for name, v in given.items() if isinstance(v, Tensor)}

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return ssd_chunk_scan(**dict(zip(tensors, values, strict=True)), chunk_size=2)

    with use_backend(None):
        assert torch.autograd.gradcheck(function, tuple(tensors.values()))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=5, H=4, P=3, N=6, G=2))
ONE = arguments(dict(B=1, T=5, H=4, P=3, N=6, G=2))
BOUNDS = torch.tensor([0, 5], dtype=torch.int32)
REFUSED = {
    **{f"{n} fp64": (GOOD | {n: v.double()}, f"{n} has dtype") for n, v in GOOD.items() if isinstance(v, Tensor)},
    "x and B differ": (GOOD | dict(B=GOOD["B"].half()), "B has dtype torch.float16"),
    **{
        f"{name} stride": (GOOD | {name: GOOD[name].mT.contiguous().mT}, f"last dimension of {name} has stride")
        for name in ("x", "B", "C", "initial_state")
    },
    **{
        f"{name} shape": (GOOD | {name: torch.zeros(3)}, f"{name} has shape (3,)") for name in ("A_log", "D", "dt_bias")
    },
    "D stride": (GOOD | dict(D=torch.zeros(8)[::2]), "D has shape (4,)"),
    "wide state": (
        GOOD | dict(B=torch.zeros(2, 5, 2, LARGEST_N + 1), C=torch.zeros(2, 5, 2, LARGEST_N + 1), initial_state=None),
        "a state of 257 columns, more than 256",
    ),
    "batch of sequences": (GOOD | dict(cu_seqlens=BOUNDS), "cu_seqlens is torch.int32 at batch 2"),
    "64-bit bounds": (ONE | dict(cu_seqlens=BOUNDS.long()), "cu_seqlens is torch.int64 at batch 1"),
    "strided bounds": (ONE | dict(cu_seqlens=torch.zeros(4, dtype=torch.int32)[::2]), "expected contiguous int32"),
    "sequences": (
        ONE | dict(cu_seqlens=torch.zeros(MOST_SEQUENCES + 2, dtype=torch.int32)),
        "8193 sequences, more than 8192",
    ),
    "gradient": (GOOD | dict(x=GOOD["x"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(given: dict, why: str) -> None:
    assert why in refusal(ssd_chunk_scan, **given)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(ssd_chunk_scan, **GOOD)


@pytest.mark.parametrize("layout", ["1.2B", "2.7B", "7B"])
def test_taken(layout: str) -> None:
    """Zamba2's layouts are, and the calls that the refusals above differ from in one thing each."""
    assert refusal(ssd_chunk_scan, **GOOD) == ""
    assert refusal(ssd_chunk_scan, **ONE | dict(cu_seqlens=BOUNDS)) == ""
    assert refusal(ssd_chunk_scan, **GOOD | dict(D=None, dt_bias=None, initial_state=None)) == ""
    H, N, G = {"1.2B": (64, 128, 1), "2.7B": (80, 64, 1), "7B": (112, 64, 2)}[layout]
    size = dict(B=1, T=2, H=H, P=64, N=N, G=G)
    assert refusal(ssd_chunk_scan, **arguments(size, torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in GOOD.items()}
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        ssd_chunk_scan(**given | dict(x=given["x"].clone().requires_grad_()))
