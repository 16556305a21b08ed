"""The one import of Triton: `from xpu_ports.common.tritonlib import AVAILABLE, tl, triton`.

PyTorch for XPU and for CUDA bring a Triton of their own; a CPU build has none. Without it the names are inert
stand-ins, so that modules with kernels still import and their references run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common import dispatch, replay


class Inert:
    """Stands in for `triton` and `tl`: attributes and calls give itself, a decorated function stays as it is."""

    def __getattr__(self, name: str) -> Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Inert):
            return args[0]
        return self

    def __getitem__(self, item: Any) -> Inert:
        return self


def _repair_bf16() -> None:
    """Make the interpreter multiply bf16: up to 3.9 it multiplies the integers that hold their bits.

    Its cast to fp32 takes numbers below 2^-126 for others.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, create_fmul = InterpreterBuilder.create_dot, InterpreterBuilder.create_fmul

    def widen(t: Any) -> Any:
        return (np.atleast_1d(t.data).astype(np.uint32) << 16).view(np.float32)

    def dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        a, b = (TensorHandle(widen(t), tl.float32) if t.dtype.scalar == tl.bfloat16 else t for t in (a, b))
        return create_dot(self, a, b, *args)

    def fmul(self: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return create_fmul(self, a, b)
        # To the nearest, where its casts round down.
        with np.errstate(over="ignore", invalid="ignore"):
            product = widen(a) * widen(b)
        bits = product.view(np.uint32)
        rounded = np.where(np.isnan(product), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return TensorHandle(rounded.astype(np.uint16), a.dtype.scalar)

    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.create_fmul = fmul


try:
    import triton
    import triton.language as tl

    AVAILABLE = True
    WHY_NOT = ""
except ImportError as error:
    triton = tl = Inert()  # type: ignore[assignment]
    AVAILABLE = False
    WHY_NOT = f"Triton cannot be imported: {error}"

# Set before the first import of a kernel: Triton decides at `@triton.jit` whether a kernel is interpreted.
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    dispatch.EMULATED_ON_CPU.add("triton")
    _repair_bf16()


class Kernel:
    """An entry kernel, launched as Triton's own are, `kernel[grid](...)`, at a fraction of the cost on the host.

    Triton binds and specializes the arguments at every launch, which takes longer than most of these kernels run. The
    compiled kernel is kept here by all that specialization looks at: dtypes and alignment of pointers, which integers
    are 1 or divisible by 16 or need 64 bits, constants and options. The arguments stand in the kernel's order, tensors
    and numbers by position, constants by name.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.names = list(inspect.signature(function.fn).parameters)
        self._fixed: dict[tuple, Fixed] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        key = tuple(constants.items())
        fixed = self._fixed.get(key)
        if fixed is None:
            fixed = self._fixed[key] = self.fix(**constants)
        fixed(grid, *args)

    def fix(self, **constants: Any) -> Fixed:
        """The kernel with its constants and options, for a wrapper that keeps it from call to call."""
        return Fixed(self, constants)


class Fixed:
    """A kernel with its constants: `fixed(grid, *args)` launches it."""

    def __init__(self, kernel: Kernel, constants: dict[str, Any]) -> None:
        self.function = kernel.function
        self.names = kernel.names
        self.constants = constants
        # By the types of the arguments.
        self._bound: dict[tuple, _Bound] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        first = args[0]
        watching = replay.watching()
        recording = watching if isinstance(watching, replay.Recording) else None
        if type(first) not in replay.PLAIN_TENSORS or first.device.type == "cpu":
            # Interpreted, intercepted or faked.
            launch = functools.partial(self.function[grid], **self.constants)
            with _ANYWHERE if recording is None else recording.launching():
                launch(*args)
            if recording is not None:
                recording.launched(launch, args, _CPU)
                recording.spoiled |= first.device.type != "cpu"
            return
        kinds = tuple(map(type, args))
        bound = self._bound.get(kinds)
        if bound is None:
            bound = self._bound[kinds] = _Bound(kinds)
        index = first.device.index
        seen, passed = bound.specialize(args, index, addresses=first.is_cuda)
        kept = bound.kept.get(seen)
        x, y, z = (*grid, 1, 1)[:3]
        if kept is None:
            with _ANYWHERE if recording is None else recording.launching():
                kept = bound.kept[seen] = self.function[grid](*args, **self.constants)
            bound.tail = tuple(self.constants[name] for name in self.names[len(args) :])
        elif _hooked():
            kept[x, y, z](*passed, *bound.tail)
        else:
            # What `kept[grid]` runs, without what it gathers for hooks at every launch.
            stream = _stream(index, first.is_cuda)
            kept.run(x, y, z, stream, kept.function, kept.packed_metadata, None, None, None, *passed, *bound.tail)
        if recording is not None and kept is None:
            # Interpreted: nothing was compiled.
            recording.spoiled = True
        elif recording is not None:
            head = x, y, z, replay.STREAM, kept.function, kept.packed_metadata, None, None, None
            recording.launched(kept.run, (*head, *args, *bound.tail), _driver(first.is_cuda))


def _stream(index: int, cuda: bool) -> Any:
    """The current stream of a device, as Triton's launchers take it."""
    if cuda:
        return torch._C._cuda_getCurrentRawStream(index)
    return triton.runtime.driver.active.get_current_stream(index)


def _hooked() -> bool:
    """Whether a profiler listens to Triton's launches; taken for so where this Triton keeps its hooks elsewhere."""
    try:
        return bool(triton.knobs.runtime.launch_enter_hook.calls or triton.knobs.runtime.launch_exit_hook.calls)
    except AttributeError:
        return True


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's device the current one for a launch; free where it is the current one already."""
    return _switch(x.get_device()) or _ANYWHERE


def _switch(index: int) -> contextlib.AbstractContextManager | None:
    if index < 0 or torch.accelerator.current_device_index() == index:
        return None
    return torch.accelerator.device_index(index)


_ANYWHERE = contextlib.nullcontext()


def _driver(cuda: bool) -> replay.Driver:
    stream = torch._C._cuda_getCurrentRawStream if cuda else functools.partial(_stream, cuda=False)
    return replay.Driver(stream, _switch, _hooked)


# Of interpreted launches.
_CPU = replay.Driver(lambda index: None, lambda index: None, lambda: False)


class _Bound:
    """What arguments of given types are specialized on, and by it the compiled kernels."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        self.integers = [i for i, kind in enumerate(kinds) if kind is int]
        self.pointers = [i for i, kind in enumerate(kinds) if kind not in (int, float, bool, type(None))]
        self.kept: dict[tuple, Any] = {}
        # The constants of the kernel, which stand behind the arguments.
        self.tail: tuple = ()

    def specialize(self, args: tuple, device: int, addresses: bool) -> tuple[tuple, list]:
        """What Triton's compiler sees of the arguments, and the arguments to launch with.

        Args:
            addresses: pass tensors by address. CUDA's launcher takes it as it is, but asks the driver about each
                tensor; XPU's does not take addresses above 2^63, which its memory has.
        """
        passed = list(args)
        seen: list[Any] = [device]
        for i in self.pointers:
            value = args[i]
            address = value.data_ptr()
            seen += value.dtype, address & 15
            if addresses:
                passed[i] = address
        # 1 is a constant; else what counts is whether 16 divides it and whether it needs 64 bits.
        seen += ["1" if v == 1 else (v & 15 == 0) + 2 * (v >> 31) for v in [args[i] for i in self.integers]]
        return tuple(seen), passed


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Launch nothing inside a `with` block: to see how kernels would be launched, on tensors without data."""
    call = Fixed.__call__
    Fixed.__call__ = lambda *args: None  # type: ignore[method-assign]
    try:
        with replay.off():
            yield
    finally:
        Fixed.__call__ = call  # type: ignore[method-assign]


def kernel(function: Any) -> Any:
    """Make a `Kernel` of a `@triton.jit` function that is launched with a grid; a stand-in stays as it is."""
    return Kernel(function) if hasattr(function, "fn") else function


def version() -> tuple[int, int]:
    """Triton's (major, minor), read off the module: on XPU its distribution has another name. (0, 0) without it."""
    if not AVAILABLE:
        return (0, 0)
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
