"""Kernels in Gluon that read arguments in boxes: what NVIDIA's tensor memory accelerator copies by a descriptor.

A descriptor has a matrix's address, sizes and strides and the size of a box, and is a kernel's argument by value.
Triton makes it at each launch from an object that holds a tensor, which is neither what `tritonlib` launches with,
addresses, nor what `replay` can keep. Here a launch takes the tensor or its address; sizes and stride are arguments of
the kernel as well, by which the descriptor is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xpu_ports.common.gluonlib import TensorDescriptor, gl

# Arguments of a launcher before the kernel's own.
_BEFORE = 9


class Box(NamedTuple):
    """How an argument is read: the names of the arguments that hold rows, columns and the stride of rows, in elements.

    `shape` tells the box's size, rows and 128 bytes, from the kernel's constants.
    """

    rows: str
    columns: str
    stride: str
    shape: Callable[[Mapping[str, Any]], tuple[int, int]]


def boxed(**boxes: Box) -> Callable[[Any], Any]:
    """Let a `@gluon.jit` kernel's arguments of these names be tensors; they need addresses divisible by 16."""
    return lambda function: _Boxed(function, boxes) if hasattr(function, "fn") else function


class _Matrix:
    """What Triton's launchers read of a descriptor's object, on an address."""

    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(self, address: int, rows: int, columns: int, stride: int) -> None:
        self.address = address
        self.base = self
        self.shape = rows, columns
        self.strides = stride, 1

    def data_ptr(self) -> int:
        return self.address


class _Boxed:
    """A kernel to `tritonlib.Kernel`, launched with tensors."""

    def __init__(self, function: Any, boxes: dict[str, Box]) -> None:
        self.function = function
        self.fn = function.fn
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        names = function.arg_names
        self.boxes = {names.index(name): box for name, box in boxes.items()}
        # The places of each and of rows, columns and stride.
        self.places = [
            (at, *(names.index(name) for name in (box.rows, box.columns, box.stride))) for at, box in self.boxes.items()
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Kept]:
        def launch(*args: Any, **constants: Any) -> _Kept:
            values = list(args)
            for at, rows, columns, stride in self.places:
                layout = gl.NVMMASharedLayout(128, 8 * args[at].element_size(), 2)
                shape = list(self.boxes[at].shape(constants))
                values[at] = TensorDescriptor(args[at], [args[rows], args[columns]], [args[stride], 1], shape, layout)
            return _Kept(self.function[grid](*values, **constants), self.places)

        return launch


class _Kept:
    """A compiled kernel as `tritonlib` keeps it, launched with addresses."""

    def __init__(self, kept: Any, places: list[tuple[int, ...]]) -> None:
        self.kept = kept
        self.places = places
        self.function = kept.function
        self.packed_metadata = kept.packed_metadata

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self.kept[grid](*self._described(args))

    def run(self, *args: Any) -> None:
        self.kept.run(*args[:_BEFORE], *self._described(args[_BEFORE:]))

    def _described(self, args: tuple) -> list[Any]:
        values = list(args)
        for at, rows, columns, stride in self.places:
            values[at] = _Matrix(args[at], args[rows], args[columns], args[stride])
        return values
