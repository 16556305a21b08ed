"""A benchmark row: an op's inputs by size, the work that a call must do, and who else does the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.dispatch import Op

Args = tuple[Any, ...]
# From an op's arguments to a call without arguments: whatever it prepares is not timed.
Prepare = Callable[..., Callable[[], Any]]
# From the letters of a size, {"T": 256, "N": 4096}, to a number of operations.
Formula = Callable[[Mapping[str, int]], int]
# From (arguments, outputs) to a part of both that the reference can be run on in fp64 within a second or so.
Sample = Callable[[Args, list[Tensor]], tuple[Args, list[Tensor]]]


# Elements that are drawn where only shapes are asked for.
SMALL = 1 << 21


class PeerMissingError(Exception):
    """A peer is not installed here, or has nothing for this device."""


@dataclass(frozen=True)
class Work:
    """The least that a call must do."""

    # Bytes of device memory: every input that counts read once, every output written once.
    moved: int
    # Floating-point operations in products of matrices, which matrix units can do.
    flops: int = 0
    # The others, element by element: an addition, a product, a comparison, an exponential is one each.
    elementwise: int = 0


@dataclass(frozen=True)
class Draw:
    """Random tensors on one device: `draw(T, N)` is normal, in the benchmark's dtype."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Uniform in [low, high)."""
        unit = torch.rand(shape, generator=self.generator, device=self.device, dtype=torch.float32)
        return (low + (high - low) * unit).to(dtype or self.dtype)


class _ShapesOfLarge(Draw):
    """Draws small tensors, such as masks and the experts of tokens, and of large ones the shape."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if math.prod(shape) <= SMALL:
            return super().__call__(*shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if math.prod(shape) <= SMALL:
            return super().uniform(low, high, *shape, dtype=dtype)
        return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


def count(**operations: int) -> Formula:
    """The formula of so many operations for each element of tensors by their letters: count(TN=4, TD=1)."""

    def formula(size: Mapping[str, int]) -> int:
        return sum(each * math.prod(size[letter] for letter in letters) for letters, each in operations.items())

    return formula


class Chain(Op):
    """Ops called one after another, as one op to a row that is of all of them; it has the first one's name."""

    def __init__(self, calls: Callable[..., Any], *ops: Op) -> None:
        """Calls are `calls(*ops, *arguments)`, and those of the references `calls(*references, *arguments)`."""
        self.ops = ops
        self.name = ops[0].name
        self.mutates = ()
        # It has none of its own.
        self.implementations = []
        self.signature = inspect.signature(calls)
        self.reference = functools.partial(calls, *(op.reference for op in ops))
        self.overload = functools.partial(calls, *(op.overload for op in ops))
        self._call = functools.partial(calls, *ops)

    def __repr__(self) -> str:
        return f"<ops {', '.join(op.name for op in self.ops)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def backends(self, device: str) -> list[str]:
        """Those that all the ops have."""
        first, *others = (op.backends(device) for op in self.ops)
        return [name for name in first if all(name in names for names in others)]


@dataclass(frozen=True)
class Case:
    """One row of the registry. `name` is the op's, with a suffix where an op has several rows."""

    name: str
    op: Op
    # Ids from small to large: letters of the house (T tokens, N columns, ...), each with its number.
    sizes: tuple[str, ...]
    # The op's arguments for a size.
    inputs: Callable[[Mapping[str, int], Draw], Args]
    # Name -> "module:function", imported when it is its turn; the function is a `Prepare`.
    peers: Mapping[str, str] = field(default_factory=dict)
    # What the error is measured on; everything when left out.
    sample: Sample = lambda args, outputs: (args, outputs)
    flops: Formula = lambda size: 0
    # Bytes of the arguments that a call has no need to read.
    unread: Callable[[Args], int] = lambda args: 0
    # Whether the reference compiles within seconds: one with a loop over time does not.
    compiles: bool = True
    # Whether an op that has a kernel has it for these sizes: not where they are another back end's.
    has_kernel: bool = True
    # Floating-point operations outside of products.
    elementwise: Formula = lambda size: 0

    @property
    def ops(self) -> tuple[Op, ...]:
        """What is called."""
        return self.op.ops if isinstance(self.op, Chain) else (self.op,)

    def draw(self, size: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Args:
        """Arguments of one call, from a seed.

        Raises:
            ValueError: the id lacks a letter that this row's own ids have, or has one that they have not.
        """
        letters = self._letters(size)
        generator = torch.Generator(device).manual_seed(seed)
        return self.inputs(letters, Draw(device, dtype, generator))

    def _letters(self, size: str) -> dict[str, int]:
        letters = parse_size(size)
        known = {letter for s in self.sizes for letter in parse_size(s)}
        required = set.intersection(*(set(parse_size(s)) for s in self.sizes))
        if not required <= set(letters) <= known:
            raise ValueError(f"{self.name}: size {size!r} does not have the letters of {self.sizes[0]!r}")
        return letters

    def work(self, size: str, args: Args, outputs: list[Tensor]) -> Work:
        """Bytes by the arguments and outputs themselves; `outputs` includes what the op mutates."""
        moved = sum(t.numel() * t.element_size() for t in (*_tensors(args), *outputs)) - self.unread(args)
        letters = parse_size(size)
        return Work(moved, self.flops(letters), self.elementwise(letters))

    def work_without_data(self, size: str, dtype: torch.dtype) -> Work:
        """The work of a call at a size that need not fit this machine: its large tensors have a shape alone.

        Raises:
            ValueError: the size is not one of this row.
        """
        draw = _ShapesOfLarge(torch.device("cpu"), dtype, torch.Generator().manual_seed(0))
        args = self.inputs(self._letters(size), draw)
        outputs = self.op.overload(*_on_meta(args))
        return self.work(size, args, flatten_outputs(outputs) + self.mutated(args))

    def mutated(self, args: Args) -> list[Tensor]:
        """The arguments that a call writes into."""
        names = list(self.op.signature.parameters)
        return [args[names.index(name)] for name in self.op.mutates]

    def peer(self, name: str) -> Prepare:
        """The peer's `Prepare`.

        Raises:
            PeerMissingError: its package cannot be imported.
        """
        module, _, function = self.peers[name].partition(":")
        try:
            return getattr(importlib.import_module(module), function)
        except ImportError as error:
            raise PeerMissingError(f"not installed: {error}") from error


def parse_size(size: str) -> dict[str, int]:
    """{"T": 256, "N": 4096} of "T256-N4096".

    Raises:
        ValueError: a part is not a capital letter and a number, or a letter comes twice.
    """
    parts = size.split("-")
    matches = [re.fullmatch(r"([A-Z])(\d+)", part) for part in parts]
    letters = {m[1]: int(m[2]) for m in matches if m}
    if len(letters) != len(parts):
        raise ValueError(f"{size!r} is not a size such as 'T256-N4096'")
    return letters


def sample_rows(args: Args, outputs: list[Tensor], rows: int = 64) -> tuple[Args, list[Tensor]]:
    """The same few rows, evenly spaced with the first and the last, of everything with two dimensions or more."""
    count = math.prod(outputs[0].shape[:-1])
    step = max(1, (count - 1) // (rows - 1))
    picked = sorted({*range(0, count, step), count - 1})

    def take(value: Any) -> Any:
        return sample_index(value.flatten(0, -2), picked) if isinstance(value, Tensor) and value.dim() > 1 else value

    return tuple(take(a) for a in args), [take(t) for t in outputs]


def sample_index(t: Tensor, rows: list[int]) -> Tensor:
    """Entries of the first dimension, copied."""
    return t[torch.tensor(rows, device=t.device)]


def flatten_outputs(outputs: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    return list(_tensors((outputs,)))


def copy_args(args: Args) -> Args:
    """Arguments that a call may write into; strides are kept, so that a slice of a wider tensor stays one."""
    return tuple(_copy(a) for a in args)


def _copy(t: Any) -> Any:
    if isinstance(t, list):
        return [_copy(entry) for entry in t]
    if not isinstance(t, Tensor):
        return t
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    storage = torch.empty(span, dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, t.stride()).copy_(t)


def _on_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    return value.to("meta") if isinstance(value, Tensor) else value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and in their tuples and lists, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def prepare_op(op: Callable[..., Any]) -> Prepare:
    """A `Prepare` that has nothing to prepare."""
    return lambda *args: functools.partial(op, *args)
