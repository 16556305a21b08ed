"""Files of safetensors that are written piece by piece, whole once they have their name.

Shapes and dtypes are known from the plan, so the header is written first and every piece has its place. Until all of it
is on the disk, NAME is called `.NAME.partial`; `.NAME.steps` beside it lists the steps whose bytes are on the disk for
certain, so that a killed conversion goes on within the file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch

from xpu_ports.common.checkpoint import DTYPES, SAFETENSORS, CheckpointError
from xpu_ports.quant.convert.steps import Output, Quantize, Step
from xpu_ports.quant.mxfp4.format import NAN_SCALE

# What transformers' shards had at most for long, and tools expect.
SHARD_BYTES = 5 * 10**9
# Elements that all threads together hold at a time, as read.
_ELEMENTS = 1 << 24
# How many bytes may have to be made again after a kill.
_SYNC_BYTES = 1 << 28
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """A file of the target."""

    name: str
    steps: tuple[Step, ...]
    # What stands before the tensors, and where each of those begins in the file.
    header: bytes
    at: dict[str, int]
    size: int


def shards(steps: Sequence[Step], limit: int = SHARD_BYTES, name: str = SAFETENSORS) -> list[Shard]:
    """Deal steps out to files of at most `limit` bytes of tensors; a larger step has a file of its own.

    Args:
        steps: in the order of the files.
        limit: in bytes.
        name: what one file is called, with its folders; several are numbered.
    """
    dealt: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        if dealt[-1] and size + step.bytes > limit:
            dealt.append([])
            size = 0
        dealt[-1].append(step)
        size += step.bytes
    if len(dealt) == 1:
        return [_shard(name, dealt[0])]
    stem = name.removesuffix(".safetensors")
    return [_shard(f"{stem}-{i:05d}-of-{len(dealt):05d}.safetensors", part) for i, part in enumerate(dealt, 1)]


def _shard(name: str, steps: list[Step]) -> Shard:
    outputs = [output for step in steps for output in step.outputs]
    # Wide dtypes first: every tensor is then aligned, as views of the mapped file need it.
    outputs.sort(key=lambda output: -output.dtype.itemsize)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for output in outputs:
        begins[output.name] = at
        entries[output.name] = {
            "dtype": _NAMES[output.dtype], "shape": list(output.shape), "data_offsets": [at, at + output.bytes]
        }  # fmt: skip
        at += output.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, tuple(steps), header, {name: start + begin for name, begin in begins.items()}, start + at)


def is_written(path: Path, shard: Shard) -> bool:
    """Whether a file has the size and the header of a shard."""
    if not path.is_file() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def partial(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.partial")


def steps_file(path: Path) -> Path:
    """Lists what is done of a file that is not whole."""
    return path.with_name(f".{path.name}.steps")


# ------------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def writes(path: Path, key: str | None = None) -> Iterator[None]:
    """Errors of the system become one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "what is finished stays: make room, then --resume"
            raise CheckpointError(path, key, "room on the disk", "none left", hint) from error
        raise CheckpointError(path, key, "a place that can be written", error.strerror or str(error)) from error


def write_file(path: Path, fill: Callable[[BinaryIO], object], mode: Literal["wb", "r+b"] = "wb") -> None:
    """A file that has its name only when all of it is on the disk; if it cannot be written, nothing is left of it.

    Args:
        path: its name in the end.
        fill: writes it.
        mode: "r+b" to go on with what is there of it.
    """
    unfinished = partial(path)
    try:
        with writes(path):
            with unfinished.open(mode) as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            _sync_folder(path.parent)
    except CheckpointError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """Make a new name last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class ShardWriter:
    """Makes one shard."""

    def __init__(self, folder: Path, shard: Shard, threads: int, progress: Callable[[int], None]) -> None:
        """Prepare it.

        Args:
            folder: where it goes.
            shard: what is in it.
            threads: how many steps run at a time.
            progress: told the bytes that are written, those of an earlier run included.
        """
        self.path, self.shard, self.threads, self.progress = folder / shard.name, shard, threads, progress
        # Index of a step that is on the disk -> how many of its blocks are not finite; and those about to be.
        self.done: dict[int, int] = {}
        self._fresh: dict[int, int] = {}
        self._unsynced = 0
        self._lock, self._stop = threading.Lock(), threading.Event()

    def write(self) -> dict[str, int]:
        """Make it, or what is missing of it.

        Returns:
            Packed weight -> how many of its blocks hold NaN or infinity.

        Raises:
            CheckpointError: it cannot be written, or a source file is not what it was.
        """
        journal = steps_file(self.path)
        if partial(self.path).exists() and journal.exists():
            self.done = _read_steps(journal, len(self.shard.steps))
        else:
            with writes(journal):
                journal.unlink(missing_ok=True)
        try:
            write_file(self.path, self._fill, "r+b" if self.done else "wb")
        except CheckpointError:
            with contextlib.suppress(OSError):
                journal.unlink()
            raise
        with writes(journal):
            journal.unlink(missing_ok=True)
        return {self.shard.steps[i].outputs[0].name: bad for i, bad in sorted(self.done.items()) if bad}

    def _fill(self, file: BinaryIO) -> None:
        file.write(self.shard.header)
        for i in self.done:
            self.progress(self.shard.steps[i].bytes)
        todo = [i for i in range(len(self.shard.steps)) if i not in self.done]
        if self.threads == 1:
            for i in todo:
                self._run(i, file)
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                try:
                    for future in [pool.submit(self._run, i, file) for i in todo]:
                        future.result()
                finally:
                    # After an error, the rest need not be made.
                    self._stop.set()
                    pool.shutdown(wait=True, cancel_futures=True)
        self.done |= self._fresh

    def _run(self, i: int, file: BinaryIO) -> None:
        """All of one step."""
        step, bad = self.shard.steps[i], 0
        for a, b in step.ranges(max(1, _ELEMENTS // self.threads)):
            if self._stop.is_set():
                return
            made = step.make(a, b)
            for output, tensor in zip(step.outputs, made, strict=True):
                self._put(file, output, output.bytes // step.count * a, tensor)
            if isinstance(step, Quantize):
                bad += int((made[1] == NAN_SCALE).sum())
        with self._lock, writes(self.path):
            self._fresh[i] = bad
            self._unsynced += step.bytes
            if self._unsynced >= _SYNC_BYTES:
                self._sync(file)

    def _put(self, file: BinaryIO, output: Output, offset: int, tensor: torch.Tensor) -> None:
        with self._lock, writes(self.path, output.name):
            file.seek(self.shard.at[output.name] + offset)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            self.progress(tensor.nbytes)

    def _sync(self, file: BinaryIO) -> None:
        """Bring finished steps to the disk, and only then say that they are."""
        file.flush()
        os.fsync(file.fileno())
        with steps_file(self.path).open("ab") as journal:
            journal.write(b"".join(b"%d %d\n" % item for item in self._fresh.items()))
        self.done |= self._fresh
        self._fresh, self._unsynced = {}, 0


def _read_steps(journal: Path, count: int) -> dict[int, int]:
    """Step -> its blocks that are not finite, of whole lines: the last may have been cut."""
    with writes(journal):
        lines = journal.read_bytes().split(b"\n")[:-1]
    steps = (tuple(map(int, line.split())) for line in lines)
    return {i: bad for i, bad in steps if i < count}
