"""What the dispatch chooses on an XPU and how the kernels are launched there, found with fake tensors on a CPU.

python -m tests.xpu_offline.launches > tests/xpu_offline/launches.txt
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

# Before a kernel is decorated: no compiler is needed here.
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.runtime.jit import KernelInterface

from xpu_offline.unfilled import arguments
from xpu_ports.common.bench.case import Case
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.device import use_architecture

ARCHITECTURES = ("max", "xe2", "arc-a")
# The benchmark rows of ops with a kernel.
KERNEL_CASES = {
    name: case
    for name, case in CASES.items()
    if case.has_kernel and any(i.backend == "triton" for i in case.op.implementations)
}
Launch = tuple[str, tuple[int, ...], dict[str, Any]]


def on_xpu(value: Any) -> Any:
    """A fake tensor on an XPU with the shape, strides and dtype of a tensor; inside a `FakeTensorMode`."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="xpu:0", requires_grad=value.requires_grad
    )


@contextlib.contextmanager
def captured() -> Iterator[list[Launch]]:
    """Inside, launches are noted instead of done: kernel, grid and keyword arguments."""
    launches: list[Launch] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
        def noted(*args: Any, **options: Any) -> None:
            check_form(kernel, args, options)
            launches.append((kernel.fn.__name__.removeprefix("_"), grid, options))

        return noted

    with (
        mock.patch.object(KernelInterface, "__getitem__", launch),
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        # torch for the CPU cannot copy to such a tensor, and there is nothing to copy.
        mock.patch.object(torch.Tensor, "copy_", lambda self, *args, **kwargs: self),
    ):
        yield launches


def check_form(kernel: Any, args: tuple, options: dict[str, Any]) -> None:
    """The form that `tritonlib.Kernel` takes: what changes from launch to launch by position, constants by name."""
    parameters = inspect.signature(kernel.fn).parameters
    constants = [name for name, p in parameters.items() if "constexpr" in str(p.annotation)]
    changing = [name for name in parameters if name not in constants]
    name, given = kernel.fn.__name__, list(parameters)[: len(args)]
    assert given == changing, f"{name}: {given} by position, not {changing}"
    assert set(constants) <= options.keys(), f"{name}: {set(constants) - options.keys()} not by name"


def launches_of(case: Case, size: str, dtype: torch.dtype, architecture: str) -> tuple[str, str, list[Launch]]:
    """(back end, reason, launches) of a call on an XPU of an architecture."""
    given = arguments(case, size, dtype)
    with use_architecture(architecture), FakeTensorMode(), captured() as launches:
        fakes = [on_xpu(a) for a in given]
        backend, reason = case.op.choose(*fakes)
        for implementation in case.op.implementations:
            if implementation.backend == backend:
                implementation.run(*fakes)
    return backend, reason, launches


def lines() -> Iterator[str]:
    """The launches of every benchmark row at its smallest and largest size; equal architectures on one line."""
    for case in KERNEL_CASES.values():
        for size in dict.fromkeys((case.sizes[0], case.sizes[-1])):
            for dtype in (torch.bfloat16, torch.float32):
                by_launch: dict[str, list[str]] = {}
                for architecture in ARCHITECTURES:
                    _, _, launches = launches_of(case, size, dtype, architecture)
                    text = "; ".join(_text(launch) for launch in launches) or "none"
                    by_launch.setdefault(text, []).append(architecture)
                for text, names in by_launch.items():
                    yield f"{case.name} {size} {str(dtype).removeprefix('torch.')} on {', '.join(names)}: {text}"


def _text(launch: Launch) -> str:
    kernel, grid, options = launch
    shown = [f"{k}={v}" for k, v in options.items() if k.startswith(("BLOCK", "num_", "grf_"))]
    return " ".join([kernel, "x".join(map(str, grid)), *shown])


if __name__ == "__main__":
    print("\n".join(lines()))
