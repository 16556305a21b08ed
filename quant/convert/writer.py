"""Writes a planned conversion: shard by shard, each under a name of its own until all of it is on the disk.

Shapes and dtypes are known from the plan, so a shard's header is written first and every piece has its place. What
carries a final name is whole: a conversion that is killed leaves finished shards, one file named `.NAME.partial`, and
`.xpu-ports-convert.json`, by which `resume` knows that the same conversion goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from xpu_ports.common.checkpoint import CONFIG, DTYPES, SAFETENSORS, SAFETENSORS_INDEX, CheckpointError
from xpu_ports.quant.convert.formats import MODELOPT_CONFIG
from xpu_ports.quant.convert.plan import Plan
from xpu_ports.quant.convert.steps import Output, Quantize, Step
from xpu_ports.quant.mxfp4.format import NAN_SCALE

STATE = ".xpu-ports-convert.json"
# As large as transformers' shards were for long; what tools expect.
SHARD_BYTES = 5 * 10**9
# Elements that all threads together hold at a time, as read.
_ELEMENTS = 1 << 24
_PARTIAL = ".*.partial"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Files that are not copied: other weights, and what is only true of the source's quantization.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_OF_THE_SOURCE = (CONFIG, MODELOPT_CONFIG, "recipe.yaml")


@dataclass(frozen=True)
class Shard:
    """A file of the target."""

    name: str
    steps: tuple[Step, ...]
    # What stands before the tensors, and where each of those begins in the file.
    header: bytes
    at: dict[str, int]
    size: int


def shards(steps: Sequence[Step], limit: int = SHARD_BYTES) -> list[Shard]:
    """Deal steps out to files of at most `limit` bytes of tensors; a larger step has a file of its own."""
    dealt: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        if dealt[-1] and size + step.bytes > limit:
            dealt.append([])
            size = 0
        dealt[-1].append(step)
        size += step.bytes
    if len(dealt) == 1:
        return [_shard(SAFETENSORS, dealt[0])]
    stem = SAFETENSORS.removesuffix(".safetensors")
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


# ------------------------------------------------------------------------------------------------------------ the whole


@dataclass(frozen=True)
class Job:
    """A plan and where it goes."""

    plan: Plan
    target: Path
    shards: tuple[Shard, ...]
    # Name -> content of the small files that are written, and the files that are copied.
    texts: dict[str, bytes]
    copied: tuple[Path, ...]
    # The same for the same source and options alone.
    fingerprint: str

    @property
    def size(self) -> int:
        """Bytes of the whole target."""
        copied = sum(path.stat().st_size for path in self.copied)
        return sum(shard.size for shard in self.shards) + sum(map(len, self.texts.values())) + copied


def job(plan: Plan, target: Path, shard_bytes: int = SHARD_BYTES) -> Job:
    """Lay a plan out in files."""
    parts = shards(plan.steps, shard_bytes)
    texts: dict[str, bytes] = {}
    if len(parts) > 1:
        weight_map = {output.name: part.name for part in parts for step in part.steps for output in step.outputs}
        index = {"metadata": {"total_size": sum(step.bytes for step in plan.steps)}, "weight_map": weight_map}
        texts[SAFETENSORS_INDEX] = _json(index)
    # Last: a folder without it is no checkpoint.
    texts[CONFIG] = _json(plan.config)
    folder = plan.source.folder
    copied = tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and path.name not in _OF_THE_SOURCE
    )
    files = {Path(info.file).name: Path(info.file).stat() for info in plan.source.found.values()}
    hashed = hashlib.sha256(json.dumps(sorted((n, s.st_size, s.st_mtime_ns) for n, s in files.items())).encode())
    for step in plan.steps:
        hashed.update(f"{step.label} {getattr(step, 'scale_rule', '')} {[s.key for s in step.stored]}".encode())
    for content in (*(part.name.encode() + part.header for part in parts), *texts.values()):
        hashed.update(content)
    return Job(plan, target, tuple(parts), texts, copied, hashed.hexdigest())


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def check_target(job: Job, resume: bool) -> list[Shard]:
    """Look at the target before anything is written; gives the shards that are still to be made.

    Raises:
        CheckpointError: it is in the source, has something in it, is of another conversion, or the disk is too small.
    """
    source, target = job.plan.source.folder.resolve(), job.target.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(job.target, None, "a folder apart from the source's", f"one within the other: {source}")
    if job.target.exists() and not job.target.is_dir():
        raise CheckpointError(job.target, None, "a folder, or nothing yet", "a file")
    present = sorted(path.name for path in job.target.iterdir()) if job.target.is_dir() else []
    # What was killed before it had a name is nobody's.
    present = [name for name in present if not fnmatch.fnmatch(name, _PARTIAL)]
    if present and not resume:
        hint = "--resume goes on with what is there" if STATE in present else ""
        raise CheckpointError(job.target, None, "an empty folder, or none", f"{present[0]} in it", hint)
    if present and not _is_ours(job, present):
        hint = "another source, other options, or not begun by this command"
        raise CheckpointError(job.target, None, "the same conversion, begun before", "something else", hint)
    todo = [shard for shard in job.shards if not is_written(job.target / shard.name, shard)]
    done = sum(shard.size for shard in job.shards if shard not in todo)
    free = _free(job.target) + sum(path.stat().st_size for path in job.target.glob(_PARTIAL))
    if todo and free < job.size - done:
        raise CheckpointError(job.target, None, f"{job.size - done} bytes free", f"{free}", "nothing has been written")
    return todo


def _is_ours(job: Job, present: Sequence[str]) -> bool:
    """Whether this conversion was begun in the folder, or is complete in it."""
    if STATE in present:
        with contextlib.suppress(ValueError, OSError):
            return json.loads((job.target / STATE).read_text()) == {"fingerprint": job.fingerprint}
        return False
    texts = all(name in present and (job.target / name).read_bytes() == text for name, text in job.texts.items())
    return texts and all(is_written(job.target / shard.name, shard) for shard in job.shards)


def is_written(path: Path, shard: Shard) -> bool:
    """Whether a file has the size and the header of a shard."""
    if not path.is_file() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as file:
        return file.read(len(shard.header)) == shard.header


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent.resolve()
    return shutil.disk_usage(path).free


def write(job: Job, todo: Sequence[Shard], threads: int, progress: Callable[[int], None]) -> dict[str, int]:
    """Make the shards that are missing, then the small files.

    Args:
        job: what to write.
        todo: its shards that are not there yet.
        threads: how many steps run at a time.
        progress: told the bytes of the target that have been written since it was last told.

    Returns:
        Packed weight -> how many of its blocks hold NaN or infinity.

    Raises:
        CheckpointError: the target cannot be written, its disk is full, or a source file is not what it was.
    """
    not_finite: dict[str, int] = {}
    with _writes(job.target, None):
        job.target.mkdir(parents=True, exist_ok=True)
    with _locked(job):
        for path in job.target.glob(_PARTIAL):
            path.unlink()
        for shard in todo:
            _write_file(job.target / shard.name, functools.partial(_fill, shard, threads, progress, not_finite))
        for path in job.copied:
            _write_file(job.target / path.name, functools.partial(_copy, path))
        for name, text in job.texts.items():
            _write_file(job.target / name, functools.partial(_put, text))
        (job.target / STATE).unlink()
    return not_finite


@contextlib.contextmanager
def _locked(job: Job) -> Iterator[None]:
    """The state file is there, and no other process of this command works in the folder."""
    path = job.target / STATE
    with _writes(path, None):
        if not path.exists():
            _write_file(path, functools.partial(_put, _json({"fingerprint": job.fingerprint})))
        with path.open("rb") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                # Windows has no such lock; there the folder is the user's to watch.
                pass
            except BlockingIOError:
                raise CheckpointError(job.target, None, "one conversion at a time", "another at work") from None
            yield


def _put(text: bytes, file: BinaryIO) -> None:
    file.write(text)


def _copy(path: Path, file: BinaryIO) -> None:
    with path.open("rb") as stream:
        shutil.copyfileobj(stream, file)


def _write_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """A file that has its name only when all of it is on the disk; nothing is left of it after an error."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _writes(path, None):
            with partial.open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    """Make a new name last through a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def _writes(path: Path, key: str | None) -> Iterator[None]:
    """Errors of the system become one that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "what is finished stays: make room, then --resume"
            raise CheckpointError(path, key, "room on the disk", "none left", hint) from error
        raise CheckpointError(path, key, "a place that can be written", error.strerror or str(error)) from error


def _fill(
    shard: Shard, threads: int, progress: Callable[[int], None], not_finite: dict[str, int], file: BinaryIO
) -> None:
    """All tensors of a shard."""
    file.write(shard.header)
    lock, stop = threading.Lock(), threading.Event()
    elements = max(1, _ELEMENTS // threads)

    def put(output: Output, offset: int, tensor: torch.Tensor) -> None:
        with lock, _writes(Path(file.name).with_name(shard.name), output.name):
            file.seek(shard.at[output.name] + offset)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
            progress(tensor.nbytes)

    def work(step: Step) -> None:
        for a, b in step.ranges(elements):
            if stop.is_set():
                return
            made = step.make(a, b)
            for output, tensor in zip(step.outputs, made, strict=True):
                put(output, output.bytes // step.count * a, tensor)
            bad = int((made[1] == NAN_SCALE).sum()) if isinstance(step, Quantize) else 0
            if bad:
                not_finite[step.outputs[0].name] = not_finite.get(step.outputs[0].name, 0) + bad

    if threads == 1:
        for step in shard.steps:
            work(step)
        return
    with ThreadPoolExecutor(threads) as pool:
        try:
            for future in [pool.submit(work, step) for step in shard.steps]:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
