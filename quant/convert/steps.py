"""What a conversion does to each tensor, in pieces: no step holds more than a few rows of its tensors at a time.

A `Step` makes one or more tensors of the target out of parts of the source. All of its outputs have the same rows, and
`make(a, b)` gives the rows from a to b of each. Sources are read with plain reads: pages of a mapped file would count
as this process's memory.
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.quant.mxfp4.format import BLOCK, dequantize, quantize


@dataclass(frozen=True)
class Output:
    """A tensor of the target."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of the source."""

    key: str
    info: TensorInfo

    @property
    def bytes(self) -> int:
        return self.info.end - self.info.begin

    def read(self, begin: int, end: int) -> Tensor:
        """Its bytes from begin to end, uint8.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        data = bytearray(end - begin)
        try:
            with open(self.info.file, "rb", buffering=0) as file:
                file.seek(self.info.begin + begin)
                view, got = memoryview(data), 0
                while got < len(data):
                    n = file.readinto(view[got:])
                    if not n:
                        break
                    got += n
        except OSError as error:
            raise CheckpointError(self.info.file, self.key, "a readable file", str(error.strerror)) from error
        if got < len(data):
            raise CheckpointError(
                self.info.file, self.key, f"{len(data)} bytes", f"{got}", "the file was cut meanwhile"
            )
        return torch.frombuffer(data, dtype=torch.uint8)

    def rows(self, begin: int, end: int, width: int) -> Tensor:
        """[end - begin, width]: the tensor as a matrix of rows of `width` elements."""
        size = width * self.info.dtype.itemsize
        return self.read(begin * size, end * size).view(self.info.dtype).view(end - begin, width)


@dataclass(frozen=True)
class Pieced(Stored):
    """A tensor that stands in pieces, or is a piece of another."""

    # (tensor, first byte, byte after the last), in order.
    segments: tuple[tuple[Stored, int, int], ...] = ()

    def read(self, begin: int, end: int) -> Tensor:
        parts = [stored.read(first, last) for stored, first, last in cut(self.segments, begin, end)]
        return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def cut(segments: Sequence[tuple[Stored, int, int]], begin: int, end: int) -> Iterator[tuple[Stored, int, int]]:
    """The segments of the bytes from begin to end of what segments make."""
    at = 0
    for stored, first, last in segments:
        a, b = max(begin - at, 0), min(end - at, last - first)
        if a < b:
            yield stored, first + a, first + b
        at += last - first


# -------------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Rows:
    """Some rows of a tensor that is taken as a matrix: `count` of them from `first`, every `step`-th."""

    count: int
    first: int = 0
    step: int = 1

    def of(self, stored: Stored, a: int, b: int, width: int) -> Tensor:
        """Rows a to b of these, [b - a, width]."""
        begin = self.first + self.step * a
        return stored.rows(begin, begin + self.step * (b - a - 1) + 1, width)[:: self.step]


class Values(ABC):
    """Numbers of the source as a matrix, however they are stored."""

    # How to call the way they are stored.
    kind: str
    stored: tuple[Stored, ...]
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def count(self) -> int:
        return math.prod(self.shape[:-1])

    @abstractmethod
    def rows(self, a: int, b: int) -> Tensor:
        """Rows a to b, [b - a, width], in a dtype that holds them exactly where one does."""


class Dense(Values):
    """Floats as they are."""

    def __init__(self, stored: Stored, shape: tuple[int, ...] | None = None, rows: Rows | None = None) -> None:
        self.stored, self.shape = (stored,), stored.info.shape if shape is None else shape
        self.kind = str(stored.info.dtype).removeprefix("torch.")
        self._rows = rows or Rows(self.count)

    def rows(self, a: int, b: int) -> Tensor:
        return self._rows.of(self.stored[0], a, b, self.width)


class MXFP4(Values):
    """Packed codes and a scale for every 32 of them."""

    kind = "mxfp4"

    def __init__(
        self, codes: Stored, scales: Stored, shape: tuple[int, ...], rows: Rows | None = None, shift: int = 0
    ) -> None:
        """Describe them.

        Args:
            codes: bytes of [..., K/2], however shaped and typed.
            scales: bytes of [..., K/32].
            shape: that of the numbers, [..., K].
            rows: which rows of them; all when left out.
            shift: added to the scale bytes, for files whose exponents are off.
        """
        self.stored, self.shape, self.shift = (codes, scales), shape, shift
        self._rows = rows or Rows(self.count)

    def packed(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """uint8 [b - a, K/2] and [b - a, K/32] of rows a to b."""
        codes, scales = (
            self._rows.of(stored, a, b, self.width // part).view(torch.uint8)
            for stored, part in zip(self.stored, (2, BLOCK), strict=True)
        )
        # Exponents below 0 have wrapped around in the file, and do so back.
        return codes, scales + self.shift if self.shift else scales

    def rows(self, a: int, b: int) -> Tensor:
        codes, scales = self.packed(a, b)
        return dequantize(codes.contiguous(), scales.contiguous(), torch.float32)


class FP8(Values):
    """E4M3 numbers with a scale for each tile."""

    kind = "fp8"

    def __init__(self, weight: Stored, scales: Stored, tile: tuple[int, int]) -> None:
        self.stored, self.shape, self.tile = (weight, scales), weight.info.shape, tile

    def rows(self, a: int, b: int) -> Tensor:
        weight, scales = self.stored
        height, width = self.tile
        first, last = a // height, (b - 1) // height + 1
        grid = scales.rows(first, last, scales.info.shape[1]).to(torch.float32)
        grid = grid[torch.arange(a, b) // height - first][:, torch.arange(self.width) // width]
        return weight.rows(a, b, self.width).to(torch.float32) * grid


# --------------------------------------------------------------------------------------------------------------- steps


class Step(ABC):
    """Makes tensors of the target."""

    # In a word or two.
    label: str
    outputs: tuple[Output, ...]
    stored: tuple[Stored, ...]
    # Rows of each output, and elements that one of them needs at a time.
    count: int
    width: int

    @property
    def bytes(self) -> int:
        return sum(output.bytes for output in self.outputs)

    def ranges(self, elements: int) -> Iterator[tuple[int, int]]:
        """Ranges of rows of about so many elements."""
        step = max(1, elements // max(1, self.width))
        return ((a, min(a + step, self.count)) for a in range(0, self.count, step))

    @abstractmethod
    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        """Rows a to b of every output, contiguous."""

    def compared(self, a: int, b: int, made: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """(the source's numbers, the numbers that the made rows a to b stand for); None where bytes are copied."""
        return None


class Copy(Step):
    """Bytes of the source, from one place or joined from several."""

    def __init__(
        self, output: Output, segments: Sequence[tuple[Stored, int, int]], label: str = "copied as it is"
    ) -> None:
        """Describe it.

        Args:
            output: as large as the segments together.
            segments: (tensor, first byte, byte after the last), in the output's order.
            label: what it is called.
        """
        self.outputs, self.segments, self.label = (output,), tuple(segments), label
        self.stored = tuple({s.key: s for s, _, _ in segments}.values())
        self._ends = list(itertools.accumulate(end - begin for _, begin, end in segments))
        assert (self._ends or [0])[-1] == output.bytes, output.name
        # A row is a byte, and an "element" has four.
        self.count, self.width = output.bytes, 1

    @classmethod
    def whole(cls, stored: Stored, name: str | None = None) -> Copy:
        output = Output(name or stored.key, stored.info.dtype, stored.info.shape)
        return cls(output, [(stored, 0, stored.bytes)])

    def ranges(self, elements: int) -> Iterator[tuple[int, int]]:
        return super().ranges(4 * elements)

    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        parts = []
        at = bisect.bisect_right(self._ends, a)
        while a < b:
            stored, begin, end = self.segments[at]
            offset = a - (self._ends[at] - (end - begin))
            n = min(b - a, end - begin - offset)
            parts.append(stored.read(begin + offset, begin + offset + n))
            a, at = a + n, at + 1
        return (parts[0] if len(parts) == 1 else torch.cat(parts),)


class Convert(Step):
    """Numbers in another dtype, or out of a quantized layout."""

    def __init__(self, name: str, values: Values, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
        """Describe it; `shape` is the output's, where it is not the values'."""
        self.outputs, self.values = (Output(name, dtype, values.shape if shape is None else shape),), values
        self.stored, self.count, self.width = values.stored, values.count, values.width
        self.label = f"{values.kind} to {str(dtype).removeprefix('torch.')}"

    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        return (self.values.rows(a, b).to(self.outputs[0].dtype).contiguous(),)

    def compared(self, a: int, b: int, made: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        return self.values.rows(a, b), made[0]


class ConvertTransposed(Step):
    """A stack of packed matrices [E, N, K] as numbers [E, K, N]; a row is a matrix."""

    def __init__(self, name: str, values: MXFP4, dtype: torch.dtype) -> None:
        experts, outer, inner = values.shape
        self.outputs, self.values = (Output(name, dtype, (experts, inner, outer)),), values
        self.stored, self.count, self.width = values.stored, experts, outer * inner
        self.label = f"mxfp4 to {str(dtype).removeprefix('torch.')}, transposed"

    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        return (self._numbers(a, b).to(self.outputs[0].dtype).mT.contiguous(),)

    def compared(self, a: int, b: int, made: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        return self._numbers(a, b).mT, made[0].view(b - a, *self.outputs[0].shape[1:])

    def _numbers(self, a: int, b: int) -> Tensor:
        _, outer, inner = self.values.shape
        return self.values.rows(a * outer, b * outer).view(-1, outer, inner)


class _Packing(Step):
    """A weight as packed codes and scales."""

    def __init__(self, layer: str, values: Values) -> None:
        N, K = values.shape
        self.values = values
        self.outputs = (
            Output(f"{layer}.weight_packed", torch.uint8, (N, K // 2)),
            Output(f"{layer}.weight_scale", torch.uint8, (N, K // BLOCK)),
        )
        self.stored, self.count, self.width = values.stored, values.count, values.width

    def compared(self, a: int, b: int, made: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        codes, scales = (t.view(b - a, -1) for t in made)
        return self.values.rows(a, b), dequantize(codes, scales, torch.float32)


class Quantize(_Packing):
    """Numbers rounded to MXFP4."""

    def __init__(self, layer: str, values: Values, scale_rule: str) -> None:
        super().__init__(layer, values)
        self.scale_rule, self.label = scale_rule, f"{values.kind} to mxfp4"

    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        return quantize(self.values.rows(a, b), self.scale_rule)


class Carry(_Packing):
    """MXFP4 of another layout, bit by bit."""

    values: MXFP4

    def __init__(self, layer: str, values: MXFP4) -> None:
        super().__init__(layer, values)
        self.label = f"mxfp4 carried over, scales times {2**values.shift}" if values.shift else "mxfp4 carried over"

    def make(self, a: int, b: int) -> tuple[Tensor, ...]:
        codes, scales = self.values.packed(a, b)
        return codes.contiguous(), scales.contiguous()
