"""Calls of ops made again without the code that led to their launches.

A launch wrapper allocates and launches, and what it allocates and launches follows from the shapes, strides, dtypes
and alignment of its tensors and from its other arguments. So what it did for one call is right for each further call
that is alike in these, with other addresses. `Recording` watches a call, `Plan` does the same again: on a slow host a
wrapper and its refusals take far longer than its kernels.

A call is not kept where the wrapper does anything else: another operator of torch's, one tensor for two arguments, a
launch on memory that came from neither the arguments nor the call.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Device types whose calls are kept.
DEVICES = {"cuda", "xpu"}
# Those of them whose launchers take addresses for tensors, and need not ask the driver about each then. XPU's does not
# take addresses above 2^63, which its memory has.
BY_ADDRESS = {"cuda"}
# Stands for the current stream among the arguments of a launch.
STREAM = object()
OFF = object()
# What watches this context's calls: nothing, a `Recording`, or OFF where none may be kept or made again.
_WATCHING: contextvars.ContextVar[Any] = contextvars.ContextVar("xpu_ports_watching", default=None)
watching = _WATCHING.get

PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_ALLOCATES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
# What follows from dtypes alone.
_TELLS = {torch.ops.aten.promote_types.default}
# Whose value is part of what a call is alike in, with its type: 1, 1.0 and True are equal to Python.
_PLAIN_VALUES = frozenset((type(None), bool, int, str, torch.dtype))


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Keep no calls, and make none again, inside a `with` block: where wrappers go by other than their arguments."""
    token = _WATCHING.set(OFF)
    try:
        yield
    finally:
        _WATCHING.reset(token)


def describe(values: Any, index: int, key: list[Any], pool: list[Any], addresses: bool) -> bool:
    """Append to `key` all that a wrapper can see of its arguments, to `pool` the tensors or their addresses.

    Args:
        index: the device that all tensors have to be on.

    Returns:
        Whether there are only arguments that this can be said of.

    Raises:
        RuntimeError: a tensor has no memory of its own, such as one of torch.vmap's.
    """
    for value in values:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            address = value.data_ptr()
            key += value.shape, value.stride(), value.dtype
            if value.get_device() != index:
                return False
            if address & 15:
                key += len(pool), address & 15
            if addresses:
                pool.append(address)
                continue
            # A wrapper sees where a tensor begins in its memory: the address says it too, if that begins evenly.
            if (value.storage_offset() * value.itemsize ^ address) & 15:
                return False
            pool.append(value)
        elif kind in _PLAIN_VALUES:
            key += kind, value
        elif kind is float:
            # 0.0 and -0.0 are equal too.
            key += kind, value or str(value)
        elif kind is list or kind is tuple:
            key += kind, len(value)
            if not describe(value, index, key, pool, addresses):
                return False
        else:
            return False
    return True


class Driver(NamedTuple):
    """What launches need besides their arguments."""

    # The current stream of a device by its index, as launchers take it.
    stream: Callable[[int], Any]
    # A context in which a device is the current one, None where it is that already.
    switch: Callable[[int], contextlib.AbstractContextManager | None]
    # Whether a profiler listens to launches.
    hooked: Callable[[], bool]


class _Part(NamedTuple):
    """A part of an argument, or of memory that the call allocates."""

    # Where that stands among them, and the bytes in it before the part.
    place: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, whole: Tensor) -> Tensor:
        start = (whole.storage_offset() * whole.element_size() + self.offset) // self.dtype.itemsize
        if whole.dtype == self.dtype:
            return whole.as_strided(self.size, self.stride, start)
        return whole.new_empty(0, dtype=self.dtype).set_(whole.untyped_storage(), start, self.size, self.stride)


@dataclass(frozen=True)
class Plan:
    """What one call did, to be done again on a pool: arguments, memory made, parts of both, constants, the stream."""

    # The ledger's lines, to be counted.
    lines: list[tuple[str, str, str, str]]
    made: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    parts: list[_Part]
    constants: list[Any]
    # Each with what takes its arguments from the pool.
    launches: list[tuple[Callable[..., Any], Callable[[list[Any]], tuple]]]
    # What takes the outputs from the memory made.
    outputs: Callable[[list[Tensor]], Any]
    driver: Driver
    # Launch with addresses, not with tensors.
    addresses: bool

    def run(self, x: Tensor, index: int, pool: list[Any]) -> Any:
        """Do it again.

        Args:
            x, index: the first tensor of the call, and which device it is on.
            pool: what `describe` made of the arguments; filled up here.
        """
        made = [x.new_empty_strided(size, stride, dtype=dtype) for size, stride, dtype in self.made]
        if self.addresses:
            pool += [t.data_ptr() for t in made]
            for part in self.parts:
                pool.append(pool[part.place] + part.offset)
        else:
            pool += made
            for part in self.parts:
                pool.append(part.of(pool[part.place]))
        pool += self.constants
        pool.append(self.driver.stream(index))
        switch = self.driver.switch(index)
        if switch is None:
            for run, arguments in self.launches:
                run(*arguments(pool))
        else:
            with switch:
                for run, arguments in self.launches:
                    run(*arguments(pool))
        return self.outputs(made)


class _NotKeptError(Exception):
    """A call cannot be kept."""


class Recording(TorchDispatchMode):
    """Watches one call: a context around the wrapper, to which launches and the ledger report."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.lines: list[tuple[str, str, str, str]] = []
        # Whether it did something that a plan does not do again.
        self.spoiled = False
        self._made: list[Tensor] = []
        self._launches: list[tuple[Callable[..., Any], Sequence[Any]]] = []
        self._driver: Driver | None = None
        self._launching = False

    def __enter__(self) -> Recording:
        self._token = _WATCHING.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _WATCHING.reset(self._token)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._launching:
            return result
        if func in _ALLOCATES and result.device == self.inputs[0].device:
            self._made.append(result)
        elif not func.is_view and func not in _TELLS:
            self.spoiled = True
        return result

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Inside, what torch is asked for is a launcher's business."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def launched(self, run: Callable[..., Any], values: Sequence[Any], driver: Driver) -> None:
        """A launch was made that `run(*values)` makes; the stream among the values is STREAM."""
        self._launches.append((run, values))
        self._driver = driver

    def plan(self, outputs: Any, addresses: bool) -> Plan | None:
        """How to make the call again, which gave these outputs; None where it did what cannot be kept."""
        if self.spoiled or self._driver is None:
            return None
        places = _Places(self.inputs, self._made)
        try:
            launches = [(run, _getter([places.of(value) for value in values])) for run, values in self._launches]
            given = places.given(outputs)
        except _NotKeptError:
            return None
        return Plan(
            lines=self.lines,
            made=[(tuple(t.shape), t.stride(), t.dtype) for t in self._made],
            parts=list(places.parts),
            constants=places.constants[::-1],
            launches=launches,
            outputs=given,
            driver=self._driver,
            addresses=addresses,
        )


class _Places:
    """Where arguments of launches stand in a plan's pool: tensors and parts from its front, others from its end."""

    def __init__(self, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        self.inputs = len(inputs)
        self.tensors = [*inputs, *made]
        self.parts: dict[_Part, int] = {}
        self.constants: list[Any] = []
        self._place = {id(t): i for i, t in enumerate(self.tensors)}
        # Of whom memory is; None where two share it, for a part of it may be of either.
        self._owner: dict[int, int | None] = {}
        for i, t in enumerate(self.tensors):
            memory = t.untyped_storage().data_ptr()
            self._owner[memory] = None if memory in self._owner or memory == 0 else i

    def of(self, value: Any) -> int:
        """The place of one argument of a launch, counted from the pool's end where it is negative."""
        if value is STREAM:
            return -1
        if not isinstance(value, Tensor):
            self.constants.append(value)
            return -1 - len(self.constants)
        found = self._find(value)
        return found if isinstance(found, int) else len(self.tensors) + self.parts.setdefault(found, len(self.parts))

    def given(self, outputs: Any) -> Callable[[list[Tensor]], Any]:
        """What takes outputs like these from the memory that a plan makes."""
        if outputs is None:
            return lambda made: None
        kind, several = type(outputs), isinstance(outputs, (list, tuple))
        found = [self._find(t) for t in (outputs if several else [outputs])]
        places = [(f.place if isinstance(f, _Part) else f) - self.inputs for f in found]
        if min(places, default=0) < 0:
            raise _NotKeptError
        whole = not any(isinstance(f, _Part) for f in found)
        if whole and (not several or (kind is tuple and len(places) > 1)):
            return itemgetter(*places)

        # Of this call's tensors nothing stays: a plan lives on.
        def give(made: list[Tensor]) -> Any:
            tensors = [
                f.of(made[place]) if isinstance(f, _Part) else made[place]
                for f, place in zip(found, places, strict=True)
            ]
            return kind(tensors) if several else tensors[0]

        return give

    def _find(self, tensor: Any) -> int | _Part:
        """Which tensor it is, or a part of which: torch may have made another object of it."""
        if not isinstance(tensor, Tensor):
            raise _NotKeptError
        if id(tensor) in self._place:
            return self._place[id(tensor)]
        place = self._owner.get(tensor.untyped_storage().data_ptr())
        if place is None:
            raise _NotKeptError
        whole = self.tensors[place]
        offset = tensor.data_ptr() - whole.data_ptr()
        part = _Part(place, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return place if part == _Part(place, 0, tuple(whole.shape), whole.stride(), whole.dtype) else part


def _getter(places: list[int]) -> Callable[[list[Any]], tuple]:
    if len(places) == 1:
        return lambda pool: (pool[places[0]],)
    return itemgetter(*places)
