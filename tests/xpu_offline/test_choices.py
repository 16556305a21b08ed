"""What the dispatch chooses on an XPU, every general refusal, and the launch configuration for each architecture.

No PyTorch for XPU is needed: the tensors are fakes on the device "xpu".
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.xpu_offline.launches import ARCHITECTURES, KERNEL_CASES, arguments, check_form, launches_of, lines, on_xpu
from xpu_ports.common import device, dispatch
from xpu_ports.common.bench.case import Case
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.device import ARCHITECTURES as FACTS
from xpu_ports.common.device import grf_options, use_architecture
from xpu_ports.common.dispatch import OPS, BackendError, use_backend
from xpu_ports.common.tritonlib import tl

RECORDED = pathlib.Path(__file__).with_name("launches.txt")
EVERY_CASE = pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES)
# What has no plan on an architecture or for a dtype, and why; everything else has one.
WITHOUT_PLAN: dict[tuple[str, str | torch.dtype], str] = {
    ("mla_decode", torch.float32): "triton: dtype torch.float32 is not one of float16, bfloat16",
    ("indexer_scores", torch.float32): "triton: q has dtype torch.float32, not one of float16, bfloat16",
}
# Rows whose tensors are bytes and indices: they have no dtype to refuse, and no gradient.
OF_BYTES = ("cache_rows",)
FLOATING = {name: case for name, case in KERNEL_CASES.items() if name not in OF_BYTES}
EVERY_FLOATING_CASE = pytest.mark.parametrize("case", FLOATING.values(), ids=FLOATING)
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


def choose(case: Case, given: list[Any]) -> tuple[str, str]:
    with FakeTensorMode():
        return case.op.choose(*(on_xpu(a) for a in given))


def second_choice(case: Case) -> str:
    """What runs where Triton refuses: a composition of other ops where there is one, which takes all, else torch."""
    names = [i.backend for i in case.op.implementations]
    return [*names[names.index("triton") + 1 :], "reference"][0]


def before_triton(case: Case, reason: str) -> bool:
    """Whether a reason is that of a back end that is preferred to Triton and is not installed here."""
    first = case.op.implementations[0].backend
    return first != "triton" and reason.startswith(f"{first}: ") and "cannot be imported" in reason


def forced_refusal(case: Case, given: list[Any]) -> str:
    with FakeTensorMode(), use_backend("triton"), pytest.raises(BackendError) as error:
        case.op.choose(*(on_xpu(a) for a in given))
    return str(error.value)


def test_every_op_has_a_benchmark_row() -> None:
    """So that the tests below, and the compilation at model sizes, leave none with a kernel out."""
    dispatch.load_ops()
    kernels = {name for name, op in OPS.items() if any(i.backend == "triton" for i in op.implementations)}
    assert kernels <= {case.op.name for case in CASES.values()}


# Rows of several ops have those of each beside them.
OTHERS = [case for name, case in CASES.items() if name not in KERNEL_CASES and len(case.ops) == 1]


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_ops_without_a_kernel(case: Case) -> None:
    """They run on what they have, and say why."""
    backend, reason = choose(case, arguments(case, case.sizes[0], torch.bfloat16))
    assert backend in case.op.backends("xpu")
    assert reason
    assert "triton" in forced_refusal(case, arguments(case, case.sizes[0], torch.bfloat16))


@EVERY_CASE
@EVERY_ARCHITECTURE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_triton_at_model_sizes(case: Case, dtype: torch.dtype, architecture: str) -> None:
    facts = FACTS[architecture]
    for size in case.sizes:
        backend, reason, launches = launches_of(case, size, dtype, architecture)
        why = WITHOUT_PLAN.get((case.op.name, dtype)) or WITHOUT_PLAN.get((case.op.name, architecture))
        if why is not None:
            assert reason.startswith(why)
            assert not launches
            continue
        assert backend == "triton"
        assert reason == "first that does not refuse" or before_triton(case, reason)
        assert launches
        for kernel, grid, options in launches:
            assert 1 <= len(grid) <= 3, kernel
            assert all(0 < n < 2**31 for n in grid), kernel
            # The limit of axes 1 and 2 on other devices; nothing needs more.
            assert all(n < 2**16 for n in grid[1:]), kernel
            warps = options["num_warps"]
            assert warps in (1, 2, 4, 8, 16, 32), kernel
            # 1,024 work-items a work-group.
            assert warps * facts.lanes <= 1024, kernel
            for name, value in options.items():
                assert not name.startswith("BLOCK") or (value > 0 and value & (value - 1) == 0), (kernel, name)


def test_recorded_launches() -> None:
    """A configuration is changed on purpose, with what it changes on each architecture seen."""
    now, before = list(lines()), RECORDED.read_text().splitlines()
    assert now == before, "if this is meant: python -m tests.xpu_offline.launches > tests/xpu_offline/launches.txt"


@EVERY_FLOATING_CASE
def test_fp64_is_refused(case: Case) -> None:
    given = arguments(case, case.sizes[0], torch.float64)
    backend, reason = choose(case, given)
    # A second choice may not take it either.
    assert backend in (second_choice(case), "reference")
    assert "float64" in reason
    assert "float64" in forced_refusal(case, given)


@EVERY_CASE
def test_without_triton_the_reference_runs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(case, case.sizes[0], torch.bfloat16)
    # The implementations as an environment without Triton sees them: each names the missing package.
    for op in OPS.values():
        for i in op.implementations:
            for function in (i.refuses, *_helpers(i.refuses)):
                for name, value in (("AVAILABLE", False), ("WHY_NOT", "Triton cannot be imported: -")):
                    if name in function.__globals__:
                        monkeypatch.setitem(function.__globals__, name, value)
    backend, reason = choose(case, given)
    assert backend == second_choice(case)
    assert reason == "triton: Triton cannot be imported: -" or before_triton(case, reason)
    assert reason.endswith("triton: Triton cannot be imported: -")


def _helpers(function: Any) -> list[Any]:
    return [
        function.__globals__[n]
        for n in function.__code__.co_names
        if callable(function.__globals__.get(n)) and hasattr(function.__globals__[n], "__globals__")
    ]


@EVERY_FLOATING_CASE
def test_gradients_need_a_backward(case: Case) -> None:
    given = arguments(case, case.sizes[0], torch.bfloat16)
    # One is enough, and the last is one that no refusal takes a view of, which autograd cannot do without an XPU.
    [a for a in given if isinstance(a, Tensor) and a.is_floating_point()][-1].requires_grad_()
    backend, reason = choose(case, given)
    if case.op.differentiable:
        assert backend == "triton"
    else:
        assert backend == "reference"
        assert reason == "; ".join(
            f"{i.backend}: no backward, and a gradient is needed" for i in case.op.implementations
        )
        assert "no backward" in forced_refusal(case, given)


@EVERY_CASE
def test_a_last_stride_is_refused(case: Case) -> None:
    """Of the first tensor: no kernel copies it behind the caller's back."""
    given = arguments(case, case.sizes[0], torch.bfloat16)
    x = given[0]
    given[0] = torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]
    backend, reason = choose(case, given)
    if backend == second_choice(case):
        assert "stride" in reason
    else:
        names = set(_stride_arguments(case))
        assert names & {"stride_x_d", "stride_l_e", "stride_s", "STRIDE_S"}, (
            "it takes a last stride that its kernel has no argument for"
        )


def _stride_arguments(case: Case) -> list[str]:
    module = sys.modules[case.op.implementations[0].run.__module__]
    kernels = (getattr(value, "function", value) for value in vars(module).values())
    return [name for kernel in kernels for name in getattr(kernel, "arg_names", ())]


@pytest.mark.parametrize(
    ("version", "words"),
    [((3, 3), ("small", "large")), ((3, 5), ("small", "large")), ((3, 6), ("128", "256")), ((3, 9), ("128", "256"))],
)
def test_grf_words_by_triton_version(version: tuple[int, int], words: tuple[str, str]) -> None:
    for architecture in ARCHITECTURES:
        for registers, word in zip((128, 256), words, strict=True):
            assert grf_options(registers, FACTS[architecture], version) == {"grf_mode": word}
    assert grf_options(256, FACTS["nvidia"], version) == {}


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("Intel(R) Data Center GPU Max 1550", "max"),
        ("Intel(R) Arc(TM) B580 Graphics", "xe2"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "xe2"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "xe2"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc-a"),
        ("Intel(R) Data Center GPU Flex 170", "arc-a"),
        ("Intel(R) Graphics of tomorrow", "xe2"),
    ],
)
def test_architecture_by_name(name: str, architecture: str) -> None:
    assert device.from_xpu_name(name).name == architecture


def test_facts_that_launches_rest_on() -> None:
    assert [FACTS[a].shared_memory for a in ARCHITECTURES] == [131072, 131072, 65536]
    assert [FACTS[a].matrix_units for a in ARCHITECTURES] == [True, True, False]
    assert [FACTS[a].fp64 for a in ARCHITECTURES] == [True, True, False]
    assert [FACTS[a].dot_lanes for a in ARCHITECTURES] == [16, 16, 32]
    with use_architecture("arc-a"):
        assert dataclasses.asdict(device.architecture(torch.device("xpu", 3)))["name"] == "arc-a"


@pytest.mark.parametrize(("args", "options"), [((1, 2), {}), ((1,), {"n": 3, "BLOCK": 2}), ((1, 3), {"SIZE": 2})])
def test_a_launch_in_another_form(args: tuple, options: dict) -> None:
    """A constant that is left out or given by position would be kept with another call's number."""

    def kernel(x_ptr, n, BLOCK: tl.constexpr): ...

    stub = types.SimpleNamespace(fn=kernel)
    check_form(stub, (1, 3), {"BLOCK": 2, "num_warps": 4})
    with pytest.raises(AssertionError, match="kernel: "):
        check_form(stub, args, options)
