"""Reads a finished conversion again: every byte as the source gives it, and how far rounding has moved each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo, describe, read_header
from xpu_ports.quant.convert.shards import Shard
from xpu_ports.quant.convert.steps import Step, Stored
from xpu_ports.quant.convert.writer import Job

_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class Checked:
    """A step of a conversion, read again."""

    name: str
    label: str
    # The RMS of the error over the RMS of the source; of numbers that are finite in the source.
    relative: float
    largest: float
    # None where the bytes are right, else which tensor is not.
    wrong: str | None = None


def verify(job: Job, progress: Callable[[int], None] = lambda _: None) -> Iterator[Checked]:
    """Compare a target with its source, a tensor at a time.

    Raises:
        CheckpointError: a file is missing, damaged, or has other tensors than planned.
    """
    for shard in job.shards:
        path = job.target / shard.name
        header = read_header(path)
        _check_header(path, header, shard)
        for step in shard.steps:
            yield _check_step(step, header, progress)


def _check_header(path: Path, header: dict[str, TensorInfo], shard: Shard) -> None:
    outputs = {output.name: output for step in shard.steps for output in step.outputs}
    for name in sorted(outputs.keys() ^ header.keys()):
        expected, found = ("it", "none") if name in outputs else ("no such tensor", describe(header[name]))
        raise CheckpointError(path, name, expected, found)
    for name, info in header.items():
        output = outputs[name]
        if (info.shape, info.dtype) != (output.shape, output.dtype):
            expected = describe(TensorInfo(output.shape, output.dtype))
            raise CheckpointError(path, name, expected, describe(info))


def _check_step(step: Step, header: dict[str, TensorInfo], progress: Callable[[int], None]) -> Checked:
    error = size = largest = 0.0
    wrong: str | None = None
    for a, b in step.ranges(_ELEMENTS):
        made = step.make(a, b)
        stored = [_rows(header, output.name, output.bytes // step.count, a, b) for output in step.outputs]
        for output, want, got in zip(step.outputs, made, stored, strict=True):
            if not torch.equal(want.view(-1).view(torch.uint8), got):
                wrong = wrong or output.name
        shaped = [got.view(want.dtype).view(want.shape) for want, got in zip(made, stored, strict=True)]
        pair = step.compared(a, b, shaped)
        if pair is not None:
            moved, total, most = _distance(*pair)
            error, size, largest = error + moved, size + total, max(largest, most)
        progress(sum(t.nbytes for t in stored))
    relative = math.sqrt(error / size) if size else math.sqrt(error)
    return Checked(step.outputs[0].name, step.label, relative, largest, wrong)


def _rows(header: dict[str, TensorInfo], name: str, row: int, a: int, b: int) -> Tensor:
    return Stored(name, header[name]).read(a * row, b * row)


def _distance(exact: Tensor, rounded: Tensor) -> tuple[float, float, float]:
    """(sum of squared differences, sum of squares, largest difference), where the source is finite."""
    exact = exact.to(torch.promote_types(exact.dtype, torch.float32))
    finite = exact.isfinite()
    exact = exact.where(finite, 0)
    difference = (rounded.to(exact.dtype).where(finite, 0) - exact).abs_()
    if not difference.numel():
        return 0.0, 0.0, 0.0
    squares = difference.square().sum(dtype=torch.float64), exact.square().sum(dtype=torch.float64)
    return float(squares[0]), float(squares[1]), float(difference.max())
