"""The dispatch: what is forced, what is chosen, what is counted, and how ops behave under autograd and the compiler."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
import os
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tests.common.ops import each_tensor, fake
from xpu_ports.common import dispatch
from xpu_ports.common.dispatch import (
    OPS,
    BackendError,
    Decision,
    Op,
    explain,
    load_ops,
    record,
    reset_explain,
    use_backend,
)
from xpu_ports.common.kernels.fp8_pages import page_bytes

load_ops()

_serial = itertools.count()


def throwaway(reference: Callable[..., Any], **options: Any) -> Op:
    """An op under a name of its own: torch.library keeps a name for as long as the process lives."""
    reference.__name__ = f"throwaway_{next(_serial)}"
    made = dispatch.op(**options)(reference) if options else dispatch.op(reference)
    assert isinstance(made, Op)
    return made


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Leave neither throw-away ops nor a choice of the environment nor ledger lines to other tests."""
    before = dict(OPS)
    dispatch._from_environment = None
    torch.compiler.reset()
    reset_explain()
    yield
    OPS.clear()
    OPS.update(before)
    dispatch._from_environment = None


def refuses_negative(x: Tensor, factor: float = 2.0) -> str | None:
    return "a negative factor" if factor < 0 else None


@pytest.fixture
def scale() -> Op:
    """x * factor by its reference; "first" adds 1 and "second" adds 2 and, as kernels do, both lose the gradient."""

    def reference(x: Tensor, factor: float = 2.0) -> Tensor:
        """Multiply."""
        return x * factor

    op = throwaway(reference)

    @op.implement("first", "cpu", refuses=refuses_negative)
    def first(x: Tensor, factor: float = 2.0) -> Tensor:
        return x.detach() * factor + 1

    @op.implement("second", "cpu", "xpu", refuses=lambda x, factor=2.0: "odd" if len(x) % 2 else None)
    def second(x: Tensor, factor: float = 2.0) -> Tensor:
        return x.detach() * factor + 2

    return op


ONE, TWO = torch.zeros(1), torch.zeros(2)


def test_order_of_choice(scale: Op) -> None:
    assert scale(TWO).tolist() == [1.0, 1.0]
    assert scale(TWO, -1.0).tolist() == [2.0, 2.0]
    assert scale(ONE, -1.0).tolist() == [0.0]
    assert scale.backends("cpu") == ["first", "second", "reference"]
    assert scale.backends("xpu") == ["second", "reference"]
    assert scale.backends("cuda") == ["reference"]


def test_choose_tells_and_does_not_count(scale: Op) -> None:
    assert scale.choose(TWO) == ("first", "first that does not refuse")
    assert scale.choose(ONE, -1.0) == ("reference", "first: a negative factor; second: odd")
    with use_backend("second"):
        assert scale.choose(TWO) == ("second", "forced")
    assert explain(show=False) == []


def test_keywords_and_defaults(scale: Op) -> None:
    assert scale(x=TWO, factor=3.0).tolist() == [1.0, 1.0]
    assert scale(TWO, factor=-3.0).tolist() == [2.0, 2.0]
    with pytest.raises(TypeError, match="needs a tensor"):
        scale(factor=2.0)


def test_forced_raises_with_the_refusal(scale: Op) -> None:
    with (
        use_backend("first"),
        pytest.raises(BackendError, match=r"'first'.*on cpu: first: a negative factor$") as error,
    ):
        scale(TWO, -1.0)
    assert scale.name in str(error.value)


def test_forced_raises_where_the_device_is_another(scale: Op) -> None:
    with FakeTensorMode(), use_backend("first"), pytest.raises(BackendError, match="it runs on cpu"):
        scale.choose(torch.empty(2, device="xpu"))


def test_forced_raises_where_the_op_has_no_such_back_end(scale: Op) -> None:
    other = throwaway(lambda_reference())
    with use_backend("first"), pytest.raises(BackendError, match="no such back end"):
        other(TWO)


def lambda_reference() -> Callable[..., Any]:
    def reference(x: Tensor) -> Tensor:
        """Copy."""
        return x.clone()

    return reference


def test_error_lists_every_refusal(scale: Op) -> None:
    """Two implementations of one name, for instance for two architectures."""

    @scale.implement("first", "cpu", refuses=lambda x, factor=2.0: "also refuses")
    def third(x: Tensor, factor: float = 2.0) -> Tensor:
        return x

    with use_backend("first"), pytest.raises(BackendError, match="first: a negative factor; first: also refuses"):
        scale(TWO, -1.0)


def test_forced_reference(scale: Op) -> None:
    with use_backend("reference"):
        assert scale(TWO).tolist() == [0.0, 0.0]
    assert scale(TWO).tolist() == [1.0, 1.0]


def test_choice_for_one_op_goes_before_one_for_all(scale: Op) -> None:
    other = throwaway(lambda_reference())
    with use_backend("reference"), use_backend("second", op=scale.name):
        assert scale.choose(TWO)[0] == "second"
        assert other.choose(TWO) == ("reference", "forced")
        with use_backend("first"):
            assert scale.choose(TWO)[0] == "second"
        with use_backend("first", op=scale.name):
            assert scale.choose(TWO)[0] == "first"
        assert scale.choose(TWO)[0] == "second"
    assert scale.choose(TWO) == ("first", "first that does not refuse")
    assert other.choose(TWO) == ("reference", "no other back end for cpu")


def test_none_gives_the_choice_back(scale: Op) -> None:
    free = ("first", "first that does not refuse")
    with use_backend("reference"):
        with use_backend(None):
            assert scale.choose(TWO) == free
        with use_backend(None, op=scale.name):
            assert scale.choose(TWO) == free
        assert scale.choose(TWO) == ("reference", "forced")
    with use_backend("second", op=scale.name), use_backend(None, op=scale.name):
        assert scale.choose(TWO) == free


def test_block_ends_with_an_error(scale: Op) -> None:
    with contextlib.suppress(KeyError), use_backend("reference"):
        raise KeyError
    assert scale.choose(TWO)[0] == "first"


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"no op is named 'rms_nrom'; did you mean 'rms_norm'\? Known ops: .*rms_norm"):
        use_backend("triton", op="rms_nrom").__enter__()
    with pytest.raises(ValueError, match=r"no op is named 'q'\. Known ops"):
        use_backend("triton", op="q").__enter__()
    with pytest.raises(ValueError, match=r"no back end is named 'tritn'\. Known back ends: .*reference.*triton"):
        use_backend("tritn").__enter__()


def test_environment(scale: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, f"{scale.name}=second, reference")
    other = throwaway(lambda_reference())
    assert scale(TWO).tolist() == [2.0, 2.0]
    assert scale.choose(TWO) == ("second", "forced")
    assert other.choose(TWO) == ("reference", "forced")
    with use_backend("first", op=scale.name):
        assert scale.choose(TWO)[0] == "first"
        assert other.choose(TWO) == ("reference", "forced")
    with use_backend(None):
        assert scale.choose(TWO) == ("first", "first that does not refuse")
    with pytest.raises(BackendError, match="odd"):
        scale(ONE)


@pytest.mark.parametrize(
    ("value", "status", "output"),
    [
        ("add_rms_norm=triton,reference", 0, "reference forced"),
        ("triton", 1, "BackendError: rms_norm: back end 'triton' was asked for and cannot run this call on cpu"),
    ],
)
def test_environment_of_a_process(value: str, status: int, output: str) -> None:
    code = """
        import torch
        from xpu_ports.common.dispatch import explain
        from xpu_ports.common.kernels.rms_norm import rms_norm
        rms_norm(torch.zeros(2, 8), None)
        print(explain(show=False)[0].backend, explain(show=False)[0].reason)
    """
    environment = {**os.environ, dispatch.ENVIRONMENT: value, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, output in (done.stderr if status else done.stdout)) == (status, True), done.stderr


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("rms_norm=tritn", "XPU_PORTS_BACKEND='rms_norm=tritn': no back end is named 'tritn'"),
        ("rmsnorm=triton", r"no op is named 'rmsnorm'; did you mean 'rms_norm'\?"),
        ("rms_norm=", "no back end is named ''"),
    ],
)
def test_environment_with_unknown_names(monkeypatch: pytest.MonkeyPatch, value: str, why: str) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, value)
    with pytest.raises(ValueError, match=why):
        OPS["rms_norm"](torch.zeros(2, 8), None)


def test_choices_as_text(scale: Op) -> None:
    with use_backend("first", op=scale.name), dispatch.use_choices("reference", "--backend"):
        assert scale.choose(TWO) == ("reference", "forced")
    with pytest.raises(ValueError, match="--backend='tritn': no back end"):
        dispatch.use_choices("tritn", "--backend").__enter__()


def test_emulated_back_end_runs_on_the_cpu_only_when_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    op = throwaway(lambda_reference())

    @op.implement("emulated", "xpu", refuses=lambda x: None)
    def emulated(x: Tensor) -> Tensor:
        return x + 5

    with use_backend("emulated"), pytest.raises(BackendError, match="runs on xpu"):
        op(TWO)
    monkeypatch.setattr(dispatch, "EMULATED_ON_CPU", {"emulated"})
    assert op(TWO).tolist() == [0.0, 0.0]
    with use_backend("emulated"):
        assert op(TWO).tolist() == [5.0, 5.0]


def test_threads_do_not_see_each_others_choice(scale: Op) -> None:
    seen = {}
    inside, checked = threading.Event(), threading.Event()

    def forces() -> None:
        with use_backend("reference"):
            inside.set()
            checked.wait(10)
            seen["forcing"] = scale.choose(TWO)[0]

    thread = threading.Thread(target=forces)
    thread.start()
    assert inside.wait(10)
    seen["other"] = scale.choose(TWO)[0]
    checked.set()
    thread.join(10)
    assert seen == {"forcing": "reference", "other": "first"}
    with use_backend("second"):
        assert contextvars.copy_context().run(lambda: scale.choose(TWO)[0]) == "second"


# ------------------------------------------------------------------------------------------------------------ ledger


def test_ledger_counts_and_reasons(scale: Op) -> None:
    for _ in range(3):
        scale(TWO)
    scale(TWO, -1.0)
    with use_backend("reference"):
        scale(TWO)
    with use_backend("first"), contextlib.suppress(BackendError):
        scale(TWO, -1.0)
    assert explain(show=False) == [
        Decision(scale.name, "first", "cpu", "first that does not refuse", 3),
        Decision(scale.name, "reference", "cpu", "forced", 1),
        Decision(scale.name, "second", "cpu", "first: a negative factor", 1),
    ]
    reset_explain()
    assert explain(show=False) == []


def test_ledger_keeps_the_reason_of_a_fallback(scale: Op) -> None:
    scale(ONE, -1.0)
    assert explain(show=False)[0].reason == "first: a negative factor; second: odd"


def test_explain_prints(scale: Op, capsys: pytest.CaptureFixture) -> None:
    assert "no op has been called" in str(explain())
    scale(TWO)
    record("decode step", "eager", "cpu", "shapes change", calls=7)
    capsys.readouterr()
    explanation = explain()
    lines = capsys.readouterr().out.splitlines()
    assert lines == str(explanation).splitlines()
    assert [line.split()[0] for line in lines] == ["op", "decode", scale.name]
    assert "7" in lines[1]
    assert lines[1].endswith("shapes change")
    assert lines[2].endswith("first that does not refuse")


def test_ledger_counts_a_call_with_a_gradient_once(cube: Op) -> None:
    cube(torch.ones(2, requires_grad=True)).sum().backward()
    assert [(d.backend, d.calls) for d in explain(show=False)] == [("fast", 1)]


# ----------------------------------------------------------------------------------------- schemas, outputs, mutation


def test_registered_twice() -> None:
    made = throwaway(lambda_reference())

    def reference(x: Tensor) -> Tensor:
        return x

    reference.__name__ = made.name
    with pytest.raises(RuntimeError, match=r"registered twice.*two names"):
        dispatch.op(reference)


@pytest.mark.parametrize(
    "implementation",
    [
        lambda x: x,
        lambda x, scale=2.0: x,
        lambda x, factor: x,
        lambda x, factor=3.0: x,
        lambda factor=2.0, x=None: x,
        lambda x, factor=2.0, fast=True: x,
    ],
    ids=["missing", "renamed", "no default", "other default", "order", "more"],
)
def test_implementation_with_other_parameters(scale: Op, implementation: Callable) -> None:
    with pytest.raises(TypeError, match=r"parameters .* differ from the reference's"):
        scale.implement("wrong", "cpu", refuses=lambda *a: None)(implementation)
    assert "wrong" not in scale.backends("cpu")


def test_tuple_outputs() -> None:
    def reference(x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two of them."""
        return x + 1, x + 2 if y is None else y + 2

    op = throwaway(reference)
    assert [t.tolist() for t in op(ONE, None)] == [[1.0], [2.0]]
    assert [t.tolist() for t in op.overload(ONE, ONE)] == [[1.0], [2.0]]
    torch.library.opcheck(op.overload, (ONE, None))
    torch.library.opcheck(op.overload, (ONE, ONE.clone()))


def variable(x: Tensor, both: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """One or two."""
    return (x + 1, x + 2) if both else x + 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_variable_outputs(compiled: bool) -> None:
    op = throwaway(lambda_of(variable))
    call = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    assert call(ONE).tolist() == [1.0]
    assert [t.tolist() for t in call(ONE, True)] == [[1.0], [2.0]]
    assert type(call(ONE, both=True)) is tuple
    torch.library.opcheck(op.overload, (ONE,))
    torch.library.opcheck(op.overload, (ONE, True))


def lambda_of(function: Callable) -> Callable:
    def reference(x: Tensor, both: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        return function(x, both)

    return reference


@pytest.fixture
def accumulate() -> Op:
    def reference(state: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """state += x where the mask is set; returns twice the state."""
        state += x if mask is None else x * mask
        return state * 2

    op = throwaway(reference, mutates=("state",))

    @op.implement("fast", "cpu", refuses=lambda state, x, mask: "mask" if mask is not None else None)
    def fast(state: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        state.add_(x)
        return state * 2

    return op


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_mutation(accumulate: Op, backend: str, compiled: bool) -> None:
    def steps(state: Tensor, x: Tensor) -> Tensor:
        return accumulate(state, x, None) + accumulate(state, x, None)

    call = torch.compile(steps, fullgraph=True, backend="aot_eager") if compiled else steps
    state = torch.zeros(2)
    with use_backend(backend):
        assert call(state, torch.ones(2)).tolist() == [6.0, 6.0]
    assert state.tolist() == [2.0, 2.0]
    assert [(d.backend, d.calls) for d in explain(show=False)] == [(backend, 2)]


def test_mutation_is_in_the_schema(accumulate: Op) -> None:
    arguments = {a.name: a for a in accumulate.overload._schema.arguments}
    assert arguments["state"].alias_info.is_write
    assert arguments["x"].alias_info is None
    torch.library.opcheck(accumulate.overload, (torch.zeros(2), torch.ones(2), None))
    torch.library.opcheck(accumulate.overload, (torch.zeros(2), torch.ones(2), torch.ones(2)))


def test_mutates_an_unknown_argument() -> None:
    with pytest.raises(ValueError, match="stat"):
        throwaway(lambda_reference(), mutates=("stat",))


def test_fake_of_its_own() -> None:
    def reference(x: Tensor) -> Tensor:
        """Reads a value, which a fake tensor does not have."""
        return x.new_full((4,), float(x.sum()))

    op = throwaway(reference, fake=lambda x: x.new_empty(4))
    with FakeTensorMode():
        assert op(torch.empty(3)).shape == (4,)
    torch.library.opcheck(op.overload, (torch.ones(3),))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(3)).tolist() == [3.0] * 4


# ------------------------------------------------------------------------------------------------ every op of the ports


def _ssd(T: int = 5) -> tuple:
    return (
        torch.randn(1, T, 2, 4),
        torch.randn(1, T, 2),
        torch.randn(2),
        torch.randn(1, T, 1, 3),
        torch.randn(1, T, 1, 3),
        torch.randn(2),
        None,
        None,
        4,
    )


def _kda(B: int, T: int) -> tuple:
    """q, k, v, g and beta; V is not K."""
    q, k, g = torch.randn(3, B, T, 2, 4)
    return q, k, torch.randn(B, T, 2, 3), -g.abs(), torch.rand(B, T, 2)


def _compress(halves: int) -> tuple:
    """A piece of two rows, four tokens an entry."""
    x, bias = torch.randn(2, 6, 4 * halves), torch.randn(4, 2 * halves)
    return x, bias, torch.randn(2, 4 * halves + 1, 4 * halves), torch.tensor([0, 5]), torch.tensor([6, 3])


def _pages() -> Tensor:
    """FP8 pages of two tokens each, 64 columns and 64 that are rotated."""
    return torch.zeros(2, 3, page_bytes(128, 64, 2), dtype=torch.uint8)


# Arguments of one call of each op, and of one with the options that change its outputs.
def _latent() -> tuple[Tensor, Tensor]:
    """Queries and rows that its kernel takes: not fp32."""
    return torch.randn(2, 4, 10).bfloat16(), torch.randn(2, 5, 10).bfloat16()


def _mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Packed weights and scales near 1."""
    *outer, K = shape
    packed = torch.randint(256, (*outer, K // 2), dtype=torch.uint8)
    return packed, torch.randint(125, 130, (*outer, K // 32), dtype=torch.uint8)


CALLS: dict[str, Callable[[], tuple]] = {
    "linear": lambda: (torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)),
    "norm_linear": lambda: (torch.randn(3, 8), None, torch.randn(8), torch.randn(5, 8)),
    "norm_linear with residual": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(5, 8)),
    "gated_norm_linear": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(5, 8), None, 4),
    "adapted_linears": lambda: (
        torch.randn(3, 8),
        [torch.randn(5, 8), torch.randn(6, 8)],
        [torch.randn(2, 8), torch.randn(2, 8)],
        [torch.randn(5, 2), torch.randn(6, 2)],
    ),
    "moe_sigmoid_router": lambda: (torch.randn(5, 8), torch.randn(8), 2, 2.446),
    "moe_router_logits": lambda: (torch.randn(5, 8), torch.randn(4, 8)),
    "mla_decode": lambda: (*_latent(), None, 8, 0.5),
    "mla_decode with a mask": lambda: (*_latent(), torch.zeros(2, 5), 8, 0.5),
    "mxfp4_quantize": lambda: (torch.randn(3, 64), "floor"),
    "mxfp4_linear": lambda: (torch.randn(3, 64), *_mxfp4(5, 64), torch.randn(5)),
    "mxfp4_linear_a4": lambda: (torch.randn(3, 64), *_mxfp4(5, 64)),
    "mxfp4_grouped_linear": lambda: (torch.randn(3, 64), *_mxfp4(4, 5, 64), torch.tensor([2, 0, 2])),
    "mxfp4_grouped_linear with two each": lambda: (
        *(torch.randn(3, 64), *_mxfp4(4, 5, 64), torch.tensor([[2, 0], [0, 1], [3, 3]])),
    ),
    "mxfp4_experts": lambda: (
        *(torch.randn(2, 32), *_mxfp4(4, 64, 32), *_mxfp4(4, 32, 32)),
        *(torch.randint(4, (2, 2)), torch.rand(2, 2)),
    ),
    "moe_experts": lambda: (
        *(torch.randn(5, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6)),
        *(torch.randint(4, (5, 2)), torch.rand(5, 2)),
    ),
    "rms_norm": lambda: (torch.randn(3, 8), torch.randn(8)),
    "rms_norm without weight": lambda: (torch.randn(3, 8), None, 1e-3),
    "add_rms_norm": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)),
    "rms_norm_backward": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)),
    "gated_rms_norm": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)),
    "gated_square_sum": lambda: (torch.randn(3, 8), torch.randn(3, 8)),
    "gated_norm_by_sum": lambda: (torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.rand(3), 16, 1e-5),
    "gated_rms_norm with prenorm": lambda: (
        *(torch.randn(3, 8), torch.randn(3, 8), None, 1e-5, 4),
        *(True, "sigmoid", torch.randn(3, 8), True, True),
    ),
    "norm_glu": lambda: (*(torch.randn(s) for s in ((3, 8), (8,), (10, 8), (2, 8), (10, 2))), "gelu"),
    "norm_glu without an adapter": lambda: (torch.randn(3, 8), None, torch.randn(10, 8), None, None, "silu", 1e-3),
    "causal_conv1d": lambda: (torch.randn(1, 6, 4), torch.randn(4, 3), None, torch.randn(1, 4, 2)),
    "causal_conv1d_update": lambda: (torch.randn(1, 4, 3), torch.randn(1, 2, 4), torch.randn(4, 3), None, None),
    "ssd_chunk_scan": _ssd,
    "selective_state_update": lambda: (
        *(torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4), torch.randn(2, 2), torch.randn(2)),
        *(torch.randn(2, 1, 3), torch.randn(2, 1, 3), torch.randn(2), torch.randn(2), torch.tensor([1, 0])),
    ),
    "mamba2_decode_step": lambda: (
        *(torch.randn(2, 24), torch.randn(2, 14, 3), torch.randn(2, 2, 4, 3), torch.randn(14, 3), torch.randn(14)),
        *(torch.randn(2), torch.randn(2), torch.randn(2), torch.randn(8), torch.tensor([1, 0])),
    ),
    "mamba2_decode_linear": lambda: (
        *(torch.randn(2, 24), torch.randn(2, 14, 3), torch.randn(2, 2, 4, 3), torch.randn(14, 3), torch.randn(14)),
        *(torch.randn(2), torch.randn(2), torch.randn(2), torch.randn(8), torch.tensor([1, 0])),
        *(torch.randn(5, 8), torch.randn(5)),
    ),
    "concat_rms_norm": lambda: (torch.randn(3, 8), None, torch.randn(3, 8), torch.randn(16)),
    "concat_rms_norm with residual": lambda: (*(torch.randn(3, 8) for _ in range(3)), torch.randn(16)),
    "gated_activation": lambda: (torch.randn(3, 8), torch.randn(3, 8), "gelu"),
    "rotary_embedding": lambda: (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8), *torch.randn(2, 1, 3, 4)),
    "rotary_angles": lambda: (torch.tensor([[0, 7, 9]]), torch.rand(4), 1.5),
    "rotary_insert": lambda: (
        *(torch.randn(2, 3, 4, 8), *torch.randn(2, 2, 3, 2, 8), *torch.randn(2, 1, 3, 4), torch.tensor([4, 0, 2])),
        *torch.randn(2, 2, 2, 5, 8),
    ),
    "greedy_tokens": lambda: (
        *(torch.randn(3, 9), torch.zeros(3, dtype=torch.long), torch.tensor([True, False, True])),
        *(torch.tensor([4, 7]), torch.tensor(0)),
    ),
    "greedy_tokens without an end": lambda: (
        *(torch.randn(3, 9), torch.zeros(3, dtype=torch.long), torch.ones(3, dtype=torch.bool), None, None),
    ),
    "kda_gate": lambda: (torch.randn(2, 3, 2, 4), torch.randn(2), torch.randn(8)),
    "kda_gate with a bound": lambda: (torch.randn(2, 3, 2, 4), torch.randn(2), None, -5.0),
    "chunk_kda": lambda: (*_kda(1, 5), None, 0.5),
    "chunk_kda from a state": lambda: (*_kda(2, 70), torch.randn(2, 2, 4, 3), 0.5, True),
    "recurrent_kda": lambda: (torch.randn(2, 2, 4, 3), *_kda(2, 3), 0.5, True, torch.tensor([[1, 0, 1], [1, 1, 0]])),
    "recurrent_kda in slots": lambda: (
        *(torch.randn(3, 2, 4, 3), *_kda(2, 3), 0.5, True, None, torch.tensor([2, -1])),
    ),
    "ada_layer_norm": lambda: (torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(1, 1, 8)),
    "gated_residual": lambda: (torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 1, 8)),
    "gated_residual with a limit": lambda: (*torch.randn(2, 2, 3, 8), torch.randn(1, 1, 8), 0.5),
    "gated_residual_norm": lambda: (*torch.randn(2, 2, 3, 8), *torch.randn(3, 2, 1, 8), 1e-6, 0.5),
    "concat_swiglu": lambda: (torch.randn(2, 3, 4), torch.randn(2, 3, 12)),
    "qk_norm_rope": lambda: (
        *(torch.randn(2, 3, 4, 64), torch.randn(2, 3, 2, 64), [torch.randn(64)], [torch.randn(64)]),
        torch.randn(3, 32),
    ),
    "decode_attention": lambda: (torch.randn(2, 4, 8), *torch.randn(2, 2, 2, 5, 8), None, 0.5),
    "decode_attention with a mask": lambda: (torch.randn(2, 4, 8), *torch.randn(2, 2, 2, 5, 8), torch.zeros(2, 5), 0.5),
    "mhc_pre": lambda: (torch.randn(3, 4, 8), torch.randn(24, 32), torch.randn(3), torch.randn(24), 1e-6, 1e-6, 3),
    "mhc_post": lambda: (torch.randn(3, 8), torch.randn(3, 4, 8), torch.rand(3, 4), torch.rand(3, 4, 4)),
    "mhc_pre with products": lambda: (
        *(torch.randn(3, 4, 8), torch.randn(24, 32), torch.randn(3), torch.randn(24), 1e-6, 1e-6, 3),
        torch.rand(3, 2, 25),
    ),
    "mhc_post_products": lambda: (
        *(torch.randn(3, 8), torch.randn(3, 4, 8), torch.rand(3, 4), torch.rand(3, 4, 4), torch.randn(24, 32)),
    ),
    "mhc_post_products of parts": lambda: (
        *(torch.randn(3, 72), torch.randn(3, 4, 72), torch.rand(3, 4), torch.rand(3, 4, 4), torch.randn(4, 288)),
    ),
    "mhc_head": lambda: (torch.randn(3, 4, 8), torch.randn(4, 32), torch.randn(1), torch.randn(4), 1e-6, 1e-6),
    "mhc_head with products": lambda: (
        *(torch.randn(3, 4, 8), torch.randn(4, 32), torch.randn(1), torch.randn(4), 1e-6, 1e-6),
        torch.rand(3, 2, 5),
    ),
    "compress_csa": lambda: _compress(2),
    "compress_hca": lambda: _compress(1),
    "indexer_scores": lambda: (
        *(torch.randn(2, 3, 2, 4).bfloat16(), torch.randn(2, 3, 2), torch.randn(2, 6, 4).bfloat16(), 5),
        *(torch.tensor([9, 20]), 4),
    ),
    "indexer_scores on pages": lambda: (
        *(torch.randn(2, 3, 2, 64).bfloat16(), torch.randn(2, 3, 2), torch.zeros(2, 3, 136, dtype=torch.uint8), 5),
        *(torch.tensor([9, 20]), 4),
    ),
    "stable_topk": lambda: (torch.randn(2, 3, 9), 4),
    "cache_rows": lambda: (torch.randn(2, 5, 8), torch.tensor([[0, -1, 4], [1, 1, 2]]), 8, 4),
    "cache_rows of pages": lambda: (_pages(), torch.tensor([[0, -1, 4], [1, 1, 2]]), 128, 64),
    "rope_tail": lambda: (torch.randn(2, 3, 2, 8), *torch.randn(2, 2, 3, 2)),
    "qnorm_rope_kv_insert": lambda: (
        *(torch.randn(2, 3, 2, 8), torch.randn(2, 3, 8), torch.randn(8), *torch.randn(2, 2, 3, 2)),
        *(torch.tensor([[0, 1, 2], [3, -1, -1]]), torch.randn(2, 5, 8), 1e-6),
    ),
    "norm_rope_insert": lambda: (
        *(torch.randn(2, 3, 8), torch.randn(8), *torch.randn(2, 2, 3, 2)),
        *(torch.tensor([[0, 1, 2], [3, -1, -1]]), torch.randn(2, 5, 8), 1e-6, False),
    ),
    "norm_rope_insert into pages": lambda: (
        *(torch.randn(2, 3, 128), torch.randn(128), *torch.randn(2, 2, 3, 32)),
        *(torch.tensor([[0, 1, 2], [3, -1, -1]]), _pages(), 1e-6, False),
    ),
    "inverse_rope_grouped_out": lambda: (torch.randn(2, 3, 4, 8), *torch.randn(2, 2, 3, 2), torch.randn(6, 16)),
    "sparse_mla_decode": lambda: (
        *(torch.randn(2, 3, 8), torch.randn(2, 6, 8), None, None, torch.tensor([3, 9])),
        *(torch.randn(3), 4, 4, 2, 0.5),
    ),
    "sparse_mla_decode on pages": lambda: (
        *(torch.randn(2, 3, 128), _pages(), _pages(), torch.tensor([[0, -1], [1, 2]]), torch.tensor([4, 12])),
        *(torch.randn(3), 4, 4, 64, 0.5),
    ),
    "sparse_mla_prefill": lambda: (
        *(torch.randn(2, 5, 3, 8), torch.randn(2, 8, 8), torch.randn(2, 4, 8), torch.zeros(2, 5, 2).int()),
        *(torch.tensor([3, 9]), torch.randn(3), 4, 4, 2, 0.5),
    ),
    "moe_sqrtsoftplus_router": lambda: (torch.randn(5, 8), torch.randn(8), 2, 1.5),
    "moe_hash_router": lambda: (torch.randn(3, 8), torch.randint(8, (5, 2)), torch.tensor([4, 0, 4]), 1.5),
}
MUTATING = {
    "qk_norm_rope": {"q", "k"},
    "rotary_insert": {"keys", "values"},
    "greedy_tokens": {"tokens", "unfinished"},
    "compress_csa": {"state"},
    "compress_hca": {"state"},
    "qnorm_rope_kv_insert": {"store"},
    "norm_rope_insert": {"store"},
    "recurrent_kda": {"state"},
    "causal_conv1d_update": {"state"},
    "selective_state_update": {"state"},
    "mamba2_decode_step": {"conv_state", "state"},
    "mamba2_decode_linear": {"conv_state", "state"},
}


def test_every_op_has_a_row() -> None:
    missing = set(OPS) - {call.split()[0] for call in CALLS}
    assert not missing, f"give a call of each of {sorted(missing)} in CALLS"


def _op_and_arguments(call: str) -> tuple[Op, tuple]:
    return OPS[call.split()[0]], CALLS[call]()


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call: str) -> None:
    op, arguments = _op_and_arguments(call)
    torch.library.opcheck(op.overload, arguments)
    if op.differentiable:
        torch.library.opcheck(op.overload, _with_gradients(arguments))


def _with_gradients(arguments: tuple) -> tuple:
    return tuple(a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)


def test_schemas_of_mutating_ops() -> None:
    for name, op in OPS.items():
        written = {a.name for a in op.overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert written == set(op.mutates) == MUTATING.get(name, set()), name


@pytest.mark.parametrize("call", CALLS)
def test_an_xpu_chooses_triton(call: str) -> None:
    """Wherever there is a kernel; no XPU is needed to ask."""
    op, arguments = _op_and_arguments(call)
    with FakeTensorMode():
        chosen = op.choose(*(fake(a) for a in arguments))[0]
    has_kernel = any(i.backend == "triton" for i in op.implementations)
    assert (chosen == "triton") == has_kernel, chosen


def _outputs(function: Callable[..., Any], arguments: Iterable[Any]) -> list[Tensor]:
    outputs = function(*(a.clone() if isinstance(a, Tensor) else a for a in arguments))
    return [outputs] if isinstance(outputs, Tensor) else list(outputs or ())


@pytest.mark.parametrize("call", CALLS)
def test_fake_tensors(call: str) -> None:
    op, arguments = _op_and_arguments(call)
    expected = _outputs(op.reference, arguments)
    with FakeTensorMode() as mode:
        got = _outputs(op, [each_tensor(a, mode.from_tensor) for a in arguments])
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in expected]
    assert explain(show=False) == []


@pytest.mark.parametrize("call", ["rms_norm", "add_rms_norm", "gated_rms_norm with prenorm", "ssd_chunk_scan"])
def test_fake_tensors_on_an_xpu(call: str) -> None:
    """Only ops whose fakes index nothing: torch for the CPU cannot index such a tensor."""
    op, arguments = _op_and_arguments(call)
    expected = _outputs(op.reference, arguments)
    with FakeTensorMode():
        got = op(*(fake(a) for a in arguments))
    got = [got] if isinstance(got, Tensor) else got
    assert [(t.shape, t.dtype, t.device.type) for t in got] == [(t.shape, t.dtype, "xpu") for t in expected]


@pytest.mark.parametrize("call", CALLS)
def test_compiled_equals_eager(call: str) -> None:
    op, arguments = _op_and_arguments(call)
    copies = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
    expected = op.reference(*copies)
    got = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*arguments)
    for a, b in zip(*([t] if isinstance(t, Tensor) else t or () for t in (got, expected)), strict=True):
        assert torch.equal(a, b)
    for name, a, b in zip(op.signature.parameters, arguments, copies, strict=False):
        assert not isinstance(a, Tensor) or torch.equal(a, b), f"{name} after the call"
    assert [(d.op, d.backend) for d in explain(show=False)] == [(op.name, "reference")]


# ------------------------------------------------------------------------------------------- the compiler and gradients


def test_compiled_graph_honours_the_choice_when_it_runs(scale: Op) -> None:
    compiled = torch.compile(lambda x: scale(x) * 10, fullgraph=True, backend="aot_eager")
    assert compiled(TWO).tolist() == [10.0, 10.0]
    with use_backend("second"):
        assert compiled(TWO).tolist() == [20.0, 20.0]
    with use_backend("reference"):
        assert compiled(TWO).tolist() == [0.0, 0.0]
    with use_backend("second"), pytest.raises(BackendError, match="odd"):
        compiled(ONE)
    assert [d.calls for d in explain(show=False)] == [1, 1, 1]


@pytest.mark.timeout(300)
def test_inductor(scale: Op) -> None:
    """One graph, with code of Inductor's around the op: needs a C++ compiler on a CPU."""
    x = torch.randn(16)
    compiled = torch.compile(lambda x: torch.relu(scale(x.sin()) * 10), fullgraph=True)
    try:
        got = compiled(x)
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"Inductor cannot compile here: {error}")
    torch.testing.assert_close(got, torch.relu((x.sin() * 2 + 1) * 10))
    with use_backend("second"):
        torch.testing.assert_close(compiled(x), torch.relu((x.sin() * 2 + 2) * 10))


@pytest.fixture
def cube() -> Op:
    """x^3 with a back end and a registered backward that says 5 where autograd would say 3 x^2."""

    def reference(x: Tensor) -> Tensor:
        """Cube."""
        return x**3

    op = throwaway(reference)

    @op.implement("fast", "cpu", refuses=lambda x: "empty" if x.numel() == 0 else None)
    def fast(x: Tensor) -> Tensor:
        return x.detach() ** 3

    @op.differentiate(setup_context=lambda ctx, inputs, output: None)
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 5

    return op


def gradient(function: Callable, x: Tensor) -> list[float]:
    return torch.autograd.grad(function(x).sum(), x)[0].tolist()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_an_op_with_a_backward(cube: Op, compiled: bool) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    call = torch.compile(cube, fullgraph=True, backend="aot_eager") if compiled else cube
    assert gradient(call, x) == [5.0, 5.0]
    assert [(d.backend, d.calls) for d in explain(show=False)] == [("fast", 1)]


def test_gradient_of_the_reference_is_autograds(cube: Op) -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    with use_backend("reference"):
        assert gradient(cube, x) == [12.0, 27.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradient_of_an_op_without_a_backward(scale: Op, compiled: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    call = torch.compile(scale, fullgraph=True, backend="aot_eager") if compiled else scale
    assert gradient(call, x) == [2.0, 2.0]
    assert call(x).tolist() == [2.0, 2.0]
    with torch.no_grad():
        assert call(x).tolist() == [3.0, 3.0]


def test_no_backward_is_a_refusal(scale: Op) -> None:
    x = torch.ones(2, requires_grad=True)
    backend, reason = scale.choose(x)
    assert backend == "reference"
    assert reason.count("no backward") == 2
    with use_backend("first"), pytest.raises(BackendError, match="no backward"):
        scale(x)
    with torch.no_grad():
        assert scale.choose(x)[0] == "first"
    assert scale.choose(x.detach())[0] == "first"


class Later(torch.Tensor):
    """Has no memory of its own, as a sum that ranks have not waited for; torch's dispatch gives what it stands for."""

    @staticmethod
    def __new__(cls, value: Tensor) -> Later:
        later = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)
        later.value = value
        return later

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = functools.partial(tree_map_only, Later, lambda later: later.value)
        return func(*unwrap(args), **unwrap(kwargs or {}))


@pytest.mark.parametrize("grad", [False, True])
def test_a_tensor_subclass_behind_the_first_tensor_reaches_back_ends_unwrapped(grad: bool) -> None:
    seen = []

    def add_later(x: Tensor, y: Tensor, more: list[Tensor]) -> Tensor:
        return x + y + more[0]

    added = throwaway(add_later)

    @added.implement("own", "cpu", refuses=lambda x, y, more: None)
    def add_own(x: Tensor, y: Tensor, more: list[Tensor]) -> Tensor:
        seen.extend(map(type, (x, y, *more)))
        return x + y + more[0]

    x = torch.ones(3)
    with torch.set_grad_enabled(grad):
        for y, z in ((Later(2 * x), 3 * x), (2 * x, Later(3 * x))):
            assert added(x, y, [z]).equal(torch.full((3,), 6.0))
    assert seen == [Tensor] * 6


def test_gradient_through_a_tensor_subclass(scale: Op) -> None:
    """Such tensors go through torch's own dispatch, where an op without a backward would lose the gradient."""

    class Tagged(Tensor):
        pass

    x = torch.ones(2).as_subclass(Tagged).requires_grad_()
    assert gradient(scale, x) == [2.0, 2.0]
    with torch.no_grad():
        assert scale(x).tolist() == [3.0, 3.0]


def test_parameters_are_plain_tensors(scale: Op) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert scale(parameter).tolist() == [1.0, 1.0]
    assert [d.calls for d in explain(show=False)] == [1]


# ---------------------------------------------------------------------------------------------------------- overhead

# In direct calls of an implementation that does nothing, so that a slow or busy machine changes nothing: 4 microseconds
# where such a call takes 58 nanoseconds.
LARGEST_OVERHEAD = 70


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_overhead(grad: bool) -> None:
    """A call costs at most as much as 70 direct calls of the implementation more than one."""

    def reference(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6, causal: bool = True) -> Tensor:
        """Nothing."""
        return x

    op = throwaway(reference)

    @op.implement("fast", "cpu", refuses=lambda x, y, weight, eps=1e-6, causal=True: None)
    def fast(x: Tensor, y: Tensor, weight: Tensor | None, eps: float = 1e-6, causal: bool = True) -> Tensor:
        return x

    x = torch.zeros(2)

    def seconds(function: Callable) -> float:
        calls = range(200)
        start = time.thread_time()
        for _ in calls:
            function(x, x, None, 1e-5, causal=False)
        return (time.thread_time() - start) / len(calls)

    # Other processes on the machine can only add to it: the first of many medians within the limit settles it.
    medians = []
    with torch.set_grad_enabled(grad):
        while len(medians) < 60 and min(medians, default=math.inf) > LARGEST_OVERHEAD:
            medians.append(statistics.median(seconds(op) / seconds(fast) - 1 for _ in range(25)))
    assert min(medians) <= LARGEST_OVERHEAD, f"{min(medians):.0f} direct calls"


def test_a_forced_back_end_without_backward_is_not_swapped_when_compiled(scale: Op) -> None:
    """Eager raises; a compiled call must not run the reference quietly instead."""
    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: scale(x).sum(), fullgraph=True, backend="aot_eager")
    with use_backend("first"), pytest.raises(torch._dynamo.exc.Unsupported, match="BackendError"):
        compiled(x)
    torch._dynamo.reset()
    compiled(x).backward()
    assert x.grad is not None
