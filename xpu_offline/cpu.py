"""Runs the SPIR-V of a kernel on this CPU through Intel's OpenCL runtime, one program at a time.

A CPU device reads host memory where it lies, so torch tensors are passed by address. Built code is kept on disk.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyopencl as cl
from torch import Tensor

from xpu_offline import memory, spirv

SCALARS = {
    "i1": np.int8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "fp32": np.float32,
    "fp64": np.float64,
}
Grid = tuple[int, int, int]
# Optimization takes most of the time of a check, and what is run is small. Sub-groups need the vectorizer all the same:
# `prepare_environment` turns it on for code without optimization.
_OPTIONS = ["-cl-opt-disable"]
# Programs up to which every pair is told apart.
_EVERY_PAIR = 512


@functools.cache
def _device() -> tuple[cl.Context, cl.CommandQueue]:
    platforms = cl.get_platforms()
    devices = [d for p in platforms for d in p.get_devices(cl.device_type.CPU)]
    if not devices:
        raise RuntimeError("no OpenCL CPU device: run xpu_offline/setup.sh")
    context = cl.Context(devices[:1])
    return context, cl.CommandQueue(context)


def version() -> str:
    """The CPU and its OpenCL driver: what built code is valid for."""
    device = _device()[0].devices[0]
    return f"{device.name} {device.driver_version}"


class Program:
    """One kernel, built for this CPU."""

    def __init__(self, code: bytes, name: str, lanes: int, shared: int, cache: pathlib.Path) -> None:
        self.lanes = lanes
        self.shared = shared
        code = spirv.for_cpu(code)
        # A kernel that asks for the number of programs has to be launched over its whole grid, and so has one whose
        # program ids cannot be set.
        self.one_by_one = spirv.has_program_ids(code) and not spirv.uses_grid_size(code)
        if self.one_by_one:
            code = spirv.program_id_from_offset(code)
        self.kernel = cl.Kernel(_build(code, cache), name)

    def run(self, arguments: list[Any], grid: Grid, programs: Iterable[Grid]) -> None:
        """Run some of the grid's programs, in the order given, one after another (all at once where they count)."""
        queue = _device()[1]
        extra = [cl.LocalMemory(max(self.shared, 1))] if self.kernel.num_args > len(arguments) else []
        self.kernel.set_args(*arguments, *extra)
        local = (self.lanes, 1, 1)
        if self.one_by_one:
            for program in programs:
                cl.enqueue_nd_range_kernel(queue, self.kernel, local, local, global_work_offset=program)
        else:
            cl.enqueue_nd_range_kernel(queue, self.kernel, (grid[0] * self.lanes, *grid[1:]), local)
        queue.finish()


def _build(code: bytes, cache: pathlib.Path) -> cl.Program:
    context, _ = _device()
    key = hashlib.sha256(code + f"{version()} {_OPTIONS}".encode()).hexdigest()
    stored = cache / f"{key}.bin"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)
        if stored.exists():
            return cl.Program(context, context.devices, [stored.read_bytes()]).build()
        program = cl.Program(context, code).build(options=_OPTIONS)
    cache.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(f".{id(program)}")
    partial.write_bytes(program.get_info(cl.program_info.BINARIES)[0])
    partial.replace(stored)
    return program


def programs_of(grid: Grid) -> list[Grid]:
    """The grid's program ids, the first axis fastest."""
    return [(i, j, k) for k in range(grid[2]) for j in range(grid[1]) for i in range(grid[0])]


def launch(program: Program, types: list[str], values: list[Any], grid: Grid, check_writers: bool) -> None:
    """Run a whole grid on the tensors among `values`, guarded, and write the results into them.

    Args:
        types: Triton's name of each argument's type, such as "*bf16", "i32".
        values: tensors and numbers, as many.
        check_writers: also show that no element is written by two programs and that their order does not matter.

    Raises:
        memory.MemoryFaultError: something was written that must not be.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and v.numel() > 0]
    made, owners = memory.copies(tensors)
    where = {id(t): owner for t, owner in zip(tensors, owners, strict=True)}
    arguments = [_argument(t, v, where) for t, v in zip(types, values, strict=True)]
    programs = programs_of(grid)
    program.run(arguments, grid, programs)
    for copy in made:
        copy.check()
    if check_writers and program.one_by_one:
        _check_writers(program, arguments, grid, [c for c in made if c.whole])
    for copy in made:
        copy.write_back()
        copy.release()


def _argument(type_name: str, value: Any, where: dict[int, memory.Copy]) -> Any:
    if not isinstance(value, Tensor):
        return SCALARS[type_name](value)
    owner = where.get(id(value))
    return cl.SVM(owner.address(value) if owner else np.zeros(1, np.uint8))


def _check_writers(program: Program, arguments: list[Any], grid: Grid, copies: list[memory.Copy]) -> None:
    """Raise `MemoryFaultError` if the programs' order matters, or if two programs wrote one element.

    Two different programs differ in a bit of their number, so for some bit one is among those that have it set and
    one among the others: an element that both halves write has two writers.
    """
    programs = programs_of(grid)
    if len(programs) == 1:
        return
    results = [c.data().copy() for c in copies]
    changed = [c.changed() for c in copies]
    for c in copies:
        c.reset()
    program.run(arguments, grid, programs[::-1])
    for c, result in zip(copies, results, strict=True):
        different = np.flatnonzero(c.differs(result))
        if len(different):
            raise memory.MemoryFaultError(
                f"{len(different)} elements depend on the order of the programs, first {different[0]} ({c.describe()})"
            )
    for half, other in _halves(programs, grid):
        written = []
        for part in (half, other):
            bases = [c.marked(where) for c, where in zip(copies, changed, strict=True)]
            program.run(arguments, grid, part)
            written.append([c.differs(base) for c, base in zip(copies, bases, strict=True)])
        for c, first, second in zip(copies, *written, strict=True):
            twice = np.flatnonzero(first & second)
            if len(twice):
                raise memory.MemoryFaultError(
                    f"{len(twice)} elements are written by more than one program, first {twice[0]} ({c.describe()})"
                )
    for c, result in zip(copies, results, strict=True):
        c.data()[:] = result


def _halves(programs: list[Grid], grid: Grid) -> Iterator[tuple[list[Grid], list[Grid]]]:
    """Pairs of halves that between them part any two programs; of a large grid only neighbours along an axis."""
    if len(programs) <= _EVERY_PAIR:
        splits = [[i >> bit & 1 for i in range(len(programs))] for bit in range((len(programs) - 1).bit_length())]
    else:
        splits = [[p[axis] & 1 for p in programs] for axis in range(3) if grid[axis] > 1]
    for split in splits:
        yield (
            [p for p, s in zip(programs, split, strict=True) if s],
            [p for p, s in zip(programs, split, strict=True) if not s],
        )
