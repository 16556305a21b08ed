"""chunk_kda: numbers against the reference, the reference against the recurrence, real log-decays, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.common.kernels.test_kda_recurrent import by_token
from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.device import ARCHITECTURES, use_architecture
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels.kda import chunk_kda, kda_gate, parts, recurrent_kda
from xpu_ports.common.kernels.kda import triton as module
from xpu_ports.common.kernels.kda.parts import LARGEST_HEAD, Options
from xpu_ports.common.kernels.kda.triton import MOST_SEQUENCES
from xpu_ports.common.kernels.kda.walk import Walk

pytestmark = pytest.mark.op("chunk_kda")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Heads of few different sizes: each is compiled for itself.
SIZES = [
    dict(B=1, T=1, H=1, K=24, V=40),
    dict(B=1, T=15, H=2, K=7, V=12),
    dict(B=2, T=63, H=1, K=16, V=8),
    dict(B=1, T=64, H=1, K=16, V=8),
    dict(B=1, T=65, H=1, K=24, V=40),
    dict(B=1, T=17, H=1, K=128, V=64),
    dict(B=1, T=16, H=1, K=64, V=128),
]
TOKENS = ("q", "k", "v", "g", "beta")


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict:
    """One call's, by name. Log-decays as layers are initialized: rates of 1 to 16, steps of 1 to 100 thousandths."""
    B, T, H, K, V = size.values()
    step = torch.exp(torch.rand(H * K) * 4.6 - 6.9)
    dt_bias = step + torch.log(-torch.expm1(-step))
    return dict(
        q=normal(B, T, H, K, dtype=dtype, layout=layout),
        k=normal(B, T, H, K, dtype=dtype, layout=layout),
        v=normal(B, T, H, V, dtype=dtype, layout=layout),
        g=kda_gate.reference(torch.randn(B, T, H, K), torch.log(1 + 15 * torch.rand(H)), dt_bias),
        beta=torch.rand(B, T, H),
        initial_state=torch.randn(B, H, K, V),
        scale=K**-0.5,
        l2norm=True,
    )


@pytest.fixture
def run(run: Runner) -> Runner:
    """Of which the fp32 results count as the inputs' dtype: kernels round the operands of products to its bits."""
    # The solution of a system of equations has its rounding errors multiplied: the reference's are no single one.
    run.rounds_once = False
    return run


def measured_as(run: Runner, given: dict) -> dict:
    """The arguments, with which the run's operands are set."""
    run.operands = given["q"].dtype
    return given


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    o, state = run(**measured_as(run, arguments(size, dtype)))
    B, T, H, K, V = size.values()
    assert (o.dtype, o.shape) == (dtype, (B, T, H, V))
    assert (state.dtype, state.shape) == (torch.float32, (B, H, K, V))
    assert state.is_contiguous()


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size",
    [dict(B=2, T=t, H=2, K=k, V=v) for t in (63, 65, 130) for k, v in ((128, 128), (128, 64), (64, 128))]
    + [dict(B=1, T=1000, H=1, K=128, V=64), dict(B=1, T=70, H=1, K=256, V=128)],
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**measured_as(run, arguments(size, dtype)))


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
        run(**measured_as(run, arguments(dict(B=1, T=66, H=1, K=40, V=36), dtype)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plans_for_packed_sequences(run: Runner, name: str) -> None:
    lengths = [65, 0, 1]
    given = arguments(dict(B=1, T=sum(lengths), H=1, K=16, V=16), torch.bfloat16)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    with plans_of(name, run):
        run(**measured_as(run, given | dict(initial_state=torch.randn(3, 1, 16, 16))), cu_seqlens=bounds)


def test_walk(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk on every device: no plan for an Intel GPU has it, and their compiler is to take it all the same."""
    plan = module.plan(torch.bfloat16, 16, ARCHITECTURES["max"])
    walk = dataclasses.replace(plan, rest=Walk(Options(2, v=16)))
    monkeypatch.setattr(module, "plan", lambda dtype, K, device: walk)
    run(**measured_as(run, strong(dict(B=1, T=70, H=1, K=16, V=8), torch.bfloat16)))


def test_from_zeros(run: Runner) -> None:
    run(**measured_as(run, arguments(SIZES[1]) | dict(initial_state=None)))


def test_without_norm(run: Runner) -> None:
    given = arguments(SIZES[4])
    run(**measured_as(run, given | dict(l2norm=False, k=given["k"] * 24**-0.5)))


def test_norm_of_nothing(run: Runner) -> None:
    """A key of zeros writes nothing and a query of zeros reads nothing: no 0 / 0."""
    given = arguments(SIZES[1])
    o, _ = run(**measured_as(run, given | dict(q=torch.zeros_like(given["q"]), k=torch.zeros_like(given["k"]))))
    assert (o == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    given = arguments(dict(B=2, T=18, H=2, K=7, V=12), torch.bfloat16, layout)
    run(**measured_as(run, given | dict(beta=normal(2, 18, 2, dtype=torch.bfloat16, layout=layout).abs().clamp(max=1))))


@pytest.mark.parametrize("layout", ["slice", "gap", "transposed"])
def test_layout_of_the_initial_state(run: Runner, layout: str) -> None:
    """Also one whose last dimension is strided, as a cache [V, K] seen as [K, V] is."""
    given = arguments(dict(B=2, T=5, H=2, K=7, V=12))
    run(**measured_as(run, given | dict(initial_state=normal(2, 2, 7, 12, dtype=torch.bfloat16, layout=layout))))
    run(**measured_as(run, given | dict(initial_state=normal(2, 2, 12, 7, dtype=torch.bfloat16, layout=layout).mT)))


@pytest.mark.parametrize("size", [dict(B=0, T=5, H=2, K=4, V=3), dict(B=2, T=0, H=2, K=4, V=3)])
@pytest.mark.parametrize("started", [True, False], ids=["state", "zeros"])
def test_nothing(run: Runner, size: dict, started: bool) -> None:
    given = arguments(size)
    o, state = run(**measured_as(run, given | ({} if started else dict(initial_state=None))))
    assert o.shape == given["v"].shape
    assert torch.equal(state, given["initial_state"] if started else torch.zeros_like(given["initial_state"]))


def strong(size: dict, dtype: torch.dtype = torch.float32) -> dict:
    """Arguments with gates as trained layers have them: most near 0, some channels of some tokens at -30."""
    given = arguments(size, dtype)
    given["g"] = -30 * torch.rand_like(given["g"]) ** 12
    given["g"][torch.rand_like(given["g"]) < 0.05] = -30.0
    return given


@FLOATS
@pytest.mark.parametrize("gate", [-30.0, -5.0, -1.4, None], ids=str)
def test_strong_log_decays(run: Runner, gate: float | None, dtype: torch.dtype) -> None:
    """exp(-G) alone would overflow after three tokens of -30, and after 63 of -1.4."""
    given = strong(dict(B=1, T=70, H=1, K=16, V=8), dtype)
    if gate is not None:
        given["g"] = torch.full_like(given["g"], gate)
    if run.target.backend == "reference":
        pytest.skip("against the recurrence below")
    o, state = run(**measured_as(run, given))
    assert o.isfinite().all()
    assert state.isfinite().all()


@pytest.mark.parametrize("lengths", [[5, 0, 66, 1], [0, 0, 3]], ids=lambda lengths: "-".join(map(str, lengths)))
@pytest.mark.parametrize("started", [True, False], ids=["state", "zeros"])
def test_packed_sequences(run: Runner, lengths: list[int], started: bool) -> None:
    """Sequences one after the other are as if each ran alone."""
    given = arguments(dict(B=1, T=sum(lengths), H=1, K=24, V=40))
    initial = torch.randn(len(lengths), 1, 24, 40) if started else None
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    o, state = run(**measured_as(run, given | dict(initial_state=initial)), cu_seqlens=bounds)
    assert state.shape == (len(lengths), 1, 24, 40)
    for s, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        alone = {name: given[name][:, start:end] for name in TOKENS}
        alone["initial_state"] = None if initial is None else initial[s : s + 1]
        for got, name, oracle, expected in zip(
            (o[:, start:end], state[s : s + 1]),
            ("o", "state"),
            accuracy.oracle(chunk_kda.reference, **given | alone),
            chunk_kda.reference(**given | alone),
            strict=True,
        ):
            accuracy.assert_close(got, expected, oracle, f"{name} of sequence {s}")


def test_nan_stays_in_its_sequence(run: Runner) -> None:
    """Neither a state nor a token that is no number reaches another sequence or head."""
    given = arguments(dict(B=1, T=20, H=2, K=7, V=12))
    initial = torch.randn(3, 2, 7, 12)
    initial[1, 0] = float("nan")
    # The first of its sequence: the reference spoils a chunk as a whole.
    given["v"][0, 14, 1] = float("nan")
    bounds = torch.tensor([0, 6, 14, 20], dtype=torch.int32)
    o, state = run(**measured_as(run, given | dict(initial_state=initial)), cu_seqlens=bounds)
    assert o[0, :14, 1].isfinite().all()
    assert o[0, :6].isfinite().all()
    assert o[0, 14:, 0].isfinite().all()
    assert o[0, 6:14, 0].isnan().all()
    assert state[0].isfinite().all()
    assert state[1, 1].isfinite().all()
    assert state[2, 0].isfinite().all()


# ------------------------------------------------------------------------------ the reference, by the published formula


def doubled(given: dict) -> dict:
    return {name: accuracy.to_double(value) for name, value in given.items()}


def assert_formula(given: dict) -> None:
    got = chunk_kda.reference(**given)
    expected = by_token(*given.values())
    for a, b, name in zip(got, expected, ("o", "state"), strict=True):
        accuracy.assert_close(a, b, b, name)


@pytest.mark.parametrize("T", [0, 1, 15, 16, 63, 64, 65, 130])
def test_formula(T: int) -> None:
    assert_formula(doubled(arguments(dict(B=2, T=T, H=2, K=5, V=3))))


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128)])
def test_formula_at_models_widths(sizes: tuple[int, int]) -> None:
    assert_formula(doubled(strong(dict(B=1, T=65, H=1, K=sizes[0], V=sizes[1]))))


@pytest.mark.full
def test_formula_of_a_thousand_tokens() -> None:
    assert_formula(doubled(strong(dict(B=1, T=1000, H=1, K=128, V=64))))


@pytest.mark.parametrize("changed", [dict(initial_state=None), dict(l2norm=False)], ids=["zeros", "without norm"])
def test_formula_without(changed: dict) -> None:
    given = doubled(arguments(dict(B=1, T=9, H=2, K=5, V=3)))
    given["k"] *= 0.4
    assert_formula(given | changed)


@pytest.mark.parametrize("gate", [-30.0, -5.0, 0.0])
def test_formula_of_equal_log_decays(gate: float) -> None:
    given = doubled(arguments(dict(B=1, T=70, H=1, K=5, V=3)))
    assert_formula(given | dict(g=torch.full_like(given["g"], gate)))


def test_one_rounding() -> None:
    assert_rounded_once(chunk_kda, **arguments(dict(B=2, T=70, H=4, K=16, V=16), torch.bfloat16))


def test_continues_where_it_stopped() -> None:
    """In chunks of other lengths, and token by token."""
    given = doubled(strong(dict(B=2, T=90, H=2, K=4, V=3)))
    expected, last = chunk_kda.reference(**given)
    outputs, state = [], given["initial_state"]
    for start, end in ((0, 6), (6, 7), (7, 71), (71, 90)):
        part = {name: given[name][:, start:end] for name in TOKENS}
        o, state = chunk_kda.reference(**given | part | dict(initial_state=state))
        outputs.append(o)
    accuracy.assert_close(torch.cat(outputs, 1), expected, expected)
    accuracy.assert_close(state, last, last, "state")
    state = given["initial_state"].clone()
    o = recurrent_kda.reference(state, *(given[name] for name in TOKENS), given["scale"], True)
    accuracy.assert_close(o, expected, expected)
    accuracy.assert_close(state, last, last, "state")


def test_the_initial_state_is_not_returned() -> None:
    """Also where no token changes it: a cache would be written twice."""
    given = arguments(dict(B=1, T=0, H=2, K=3, V=5))
    _, state = chunk_kda(**given)
    state += 1
    assert not torch.equal(state, given["initial_state"])


def test_gradcheck() -> None:
    given = doubled(arguments(dict(B=1, T=4, H=1, K=2, V=3)))
    tensors = {name: v.requires_grad_() for name, v in given.items() if isinstance(v, Tensor)}

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_kda(**dict(zip(tensors, values, strict=True)), scale=0.5, l2norm=True)

    with use_backend(None):
        assert torch.autograd.gradcheck(function, tuple(tensors.values()))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=5, H=2, K=3, V=6))
ONE = arguments(dict(B=1, T=5, H=2, K=3, V=6))
BOUNDS = torch.tensor([0, 5], dtype=torch.int32)
REFUSED = {
    **{f"{n} fp64": (GOOD | {n: v.double()}, f"{n} has dtype") for n, v in GOOD.items() if isinstance(v, Tensor)},
    "q and v differ": (GOOD | dict(v=GOOD["v"].half()), "v has dtype torch.float16, where q, k and v share"),
    **{
        f"{name} stride": (GOOD | {name: GOOD[name].mT.contiguous().mT}, f"the last dimension of {name} has stride")
        for name in ("q", "k", "v", "g")
    },
    "g of a head": (GOOD | dict(g=torch.zeros(2, 5, 2)), "g has shape (2, 5, 2)"),
    "beta shape": (GOOD | dict(beta=torch.zeros(2, 6, 2)), "beta has shape (2, 6, 2)"),
    "state [V, K]": (GOOD | dict(initial_state=torch.zeros(2, 2, 6, 3)), "initial_state has shape (2, 2, 6, 3)"),
    "wide heads": (arguments(dict(B=1, T=1, H=1, K=LARGEST_HEAD + 1, V=4)), "heads of 257 channels, more than 256"),
    "batch of sequences": (GOOD | dict(initial_state=None, cu_seqlens=BOUNDS), "cu_seqlens is torch.int32 at batch 2"),
    "states of sequences": (GOOD | dict(cu_seqlens=BOUNDS), "initial_state has shape (2, 2, 3, 6)"),
    "64-bit bounds": (ONE | dict(cu_seqlens=BOUNDS.long()), "cu_seqlens is torch.int64 at batch 1"),
    "sequences": (
        ONE | dict(initial_state=None, cu_seqlens=torch.zeros(MOST_SEQUENCES + 2, dtype=torch.int32)),
        "8193 sequences, more than 8192",
    ),
    "gradient": (GOOD | dict(q=GOOD["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(given: dict, why: str) -> None:
    assert why in refusal(chunk_kda, **given)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "AVAILABLE", False)
    monkeypatch.setattr(parts, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(chunk_kda, **GOOD)


def test_taken() -> None:
    """The calls that the refusals above differ from in one thing each, and a model's."""
    assert refusal(chunk_kda, **GOOD) == ""
    assert refusal(chunk_kda, **ONE | dict(cu_seqlens=BOUNDS)) == ""
    assert refusal(chunk_kda, **GOOD | dict(initial_state=None)) == ""
    assert refusal(chunk_kda, **arguments(dict(B=1, T=2, H=32, K=128, V=128), torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in GOOD.items()}
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        chunk_kda(**given | dict(q=given["q"].clone().requires_grad_()))
