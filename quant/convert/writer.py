"""Writes a planned conversion: its shards one after another, then the small files, config.json last.

A conversion that is killed leaves finished shards, one that is not under its name yet, and `.xpu-ports-convert.json`,
by which `resume` knows that the same conversion goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from xpu_ports.common.checkpoint import CONFIG, CheckpointError
from xpu_ports.quant.convert.formats import MODELOPT_CONFIG, index_name
from xpu_ports.quant.convert.plan import Plan
from xpu_ports.quant.convert.processes import write_shards
from xpu_ports.quant.convert.shards import (
    SHARD_BYTES,
    Shard,
    ShardWriter,
    is_written,
    partial,
    shards,
    steps_file,
    write_file,
    writes,
)
from xpu_ports.quant.convert.steps import Step

STATE = ".xpu-ports-convert.json"
# Says what a pipeline of diffusers is made of.
PIPELINE = "model_index.json"
# Files that are not copied: other weights, and what is only true of the source's quantization.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_OF_THE_SOURCE = (CONFIG, MODELOPT_CONFIG, "recipe.yaml")


@dataclass(frozen=True)
class Job:
    """A plan and where it goes."""

    plan: Plan
    target: Path
    shards: tuple[Shard, ...]
    # Name -> content of the small files that are written, and the files that are copied: name -> where from.
    texts: dict[str, bytes]
    copied: dict[str, Path]
    # The same for the same source and options alone.
    fingerprint: str
    # The same for the same plan, whatever the source's files are like.
    digest: str
    # The file that is there as long as this is not done, and what it says.
    state: str = STATE
    begun: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> Iterator[Step]:
        """Of its shards."""
        return (step for shard in self.shards for step in shard.steps)

    @property
    def size(self) -> int:
        """Bytes of the whole target."""
        copied = sum(path.stat().st_size for path in self.copied.values())
        return sum(shard.size for shard in self.shards) + sum(map(len, self.texts.values())) + copied


def job(plan: Plan, target: Path, shard_bytes: int = SHARD_BYTES) -> Job:
    """Lay a plan out in files."""
    source = plan.source
    weights = plan.weights or source.weights
    # Of files that have no config, none says that there are several.
    folder = f"{source.part}/" if source.part and plan.config is not None else ""
    parts = shards(plan.steps, shard_bytes if plan.config is not None else sys.maxsize, folder + weights)
    texts: dict[str, bytes] = {}
    copied: dict[str, Path] = {}
    if len(parts) > 1:
        weight_map = {
            output.name: part.name.removeprefix(folder)
            for part in parts
            for step in part.steps
            for output in step.outputs
        }
        index = {"metadata": {"total_size": sum(step.bytes for step in plan.steps)}, "weight_map": weight_map}
        texts[folder + index_name(weights)] = as_json(index)
    if plan.config is not None:
        # Last: a folder without it is no checkpoint.
        texts[folder + CONFIG] = as_json(plan.config)
        copied = {} if source.alone else _beside(source.folder, folder)
    if folder:
        copied |= _beside(source.root) | _other_parts(source.root, source.part)
        texts[PIPELINE] = copied.pop(PIPELINE).read_bytes()
    files = {Path(info.file).name: Path(info.file).stat() for info in plan.source.found.values()}
    hashed = hashlib.sha256()
    for step in plan.steps:
        hashed.update(f"{step.label} {getattr(step, 'scale_rule', '')} {[s.key for s in step.stored]}".encode())
    for content in (*(part.name.encode() + part.header for part in parts), *texts.values()):
        hashed.update(content)
    digest = hashed.hexdigest()
    hashed.update(json.dumps(sorted((n, s.st_size, s.st_mtime_ns) for n, s in files.items())).encode())
    if folder:
        # These may be large, and are not copied again.
        hashed.update(json.dumps([(n, p.stat().st_size, p.stat().st_mtime_ns) for n, p in copied.items()]).encode())
    fingerprint = hashed.hexdigest()
    return Job(plan, target, tuple(parts), texts, copied, fingerprint, digest, begun={"fingerprint": fingerprint})


def _beside(folder: Path, prefix: str = "") -> dict[str, Path]:
    """The small files of a folder that stay true, by their names in the target."""
    return {
        prefix + path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and path.name not in _OF_THE_SOURCE
    }


def _other_parts(root: Path, part: str) -> dict[str, Path]:
    """All files of the other parts that a pipeline names."""
    named = json.loads((root / PIPELINE).read_text(encoding="utf-8"))
    return {
        path.relative_to(root).as_posix(): path
        for name in sorted(named)
        if name != part and (root / name).is_dir()
        for path in sorted((root / name).rglob("*"))
        if path.is_file() and not any(p.startswith(".") for p in path.relative_to(root).parts)
    }


def as_json(value: Any) -> bytes:
    """A small file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def check_target(job: Job, resume: bool) -> list[Shard]:
    """Look at the target before anything is written; gives the shards that are still to be made.

    Raises:
        CheckpointError: it is in the source, has something in it, is of another conversion, or the disk is too small.
    """
    check_place(job)
    present = sorted(path.name for path in job.target.iterdir()) if job.target.is_dir() else []
    # Killed before even the state was whole.
    present = [name for name in present if name != partial(job.target / STATE).name]
    if present and not resume:
        hint = "--resume goes on with what is there" if STATE in present else ""
        raise CheckpointError(job.target, None, "an empty folder, or none", f"{present[0]} in it", hint)
    if present and not is_ours(job, present):
        hint = "another source, other options, or not begun by this command"
        raise CheckpointError(job.target, None, "the same conversion, begun before", "something else", hint)
    return to_do(job)


def check_place(job: Job) -> None:
    """The target is a folder, or nothing yet, apart from the source.

    Raises:
        CheckpointError: it is not.
    """
    source, target = job.plan.source.root.resolve(), job.target.resolve()
    apart = target != source and source not in target.parents and target not in source.parents
    if not apart and not (job.plan.source.alone and target != source):
        raise CheckpointError(job.target, None, "a folder apart from the source's", f"one within the other: {source}")
    if job.target.exists() and not job.target.is_dir():
        raise CheckpointError(job.target, None, "a folder, or nothing yet", "a file")


def to_do(job: Job) -> list[Shard]:
    """The shards that are still to be made, for which there is room.

    Raises:
        CheckpointError: the disk is too small.
    """
    todo = [shard for shard in job.shards if not is_written(job.target / shard.name, shard)]
    done = sum(shard.size for shard in job.shards if shard not in todo)
    done += sum(path.stat().st_size for name, path in job.copied.items() if _is_copied(job, name))
    there = [partial(job.target / shard.name) for shard in todo]
    # Blocks of 512 bytes; a file with holes has fewer than its size says.
    free = free_bytes(job.target) + sum(512 * getattr(path.stat(), "st_blocks", 0) for path in there if path.exists())
    if todo and free < job.size - done:
        raise CheckpointError(job.target, None, f"{job.size - done} bytes free", f"{free}", "nothing has been written")
    return todo


def is_ours(job: Job, present: Collection[str]) -> bool:
    """Whether this conversion was begun in the folder, or is complete in it.

    Args:
        job: the conversion.
        present: names of what is in the folder.
    """
    if job.state in present:
        with contextlib.suppress(ValueError, OSError):
            return json.loads((job.target / job.state).read_text()) == job.begun
        return False
    return is_complete(job)


def is_complete(job: Job) -> bool:
    """Whether all that a conversion makes is there."""
    texts = all(
        (job.target / name).is_file() and (job.target / name).read_bytes() == text for name, text in job.texts.items()
    )
    return texts and all(is_written(job.target / shard.name, shard) for shard in job.shards)


def _is_copied(job: Job, name: str) -> bool:
    """Whether a file has been copied: it has its name only when it is whole."""
    path = job.target / name
    return path.is_file() and path.stat().st_size == job.copied[name].stat().st_size


def free_bytes(path: Path) -> int:
    """Room on the disk that a folder is on, or will be."""
    while not path.exists():
        path = path.parent.resolve()
    return shutil.disk_usage(path).free


def write(
    job: Job, todo: Sequence[Shard], threads: int, progress: Callable[[int], None], processes: int = 1
) -> dict[str, int]:
    """Make the shards that are missing, then the small files.

    Args:
        job: what to write.
        todo: its shards that are not there yet.
        threads: how many steps of a shard run at a time.
        progress: told the bytes of the target that have been written since it was last told.
        processes: how many shards are made at a time.

    Returns:
        Packed weight -> how many of its blocks hold NaN or infinity.

    Raises:
        CheckpointError: the target cannot be written, its disk is full, or a source file is not what it was.
    """
    not_finite: dict[str, int] = {}
    names = [shard.name for shard in job.shards], job.copied, job.texts
    with writes(job.target):
        for folder in {(job.target / name).parent for name in itertools.chain(*names)}:
            folder.mkdir(parents=True, exist_ok=True)
    with _locked(job) as lock:
        for shard in job.shards:
            if shard not in todo:
                # Killed between its name and this.
                steps_file(job.target / shard.name).unlink(missing_ok=True)
        if processes > 1:
            not_finite = write_shards(job.target, todo, processes, threads, lock, progress)
        else:
            for shard in todo:
                not_finite |= ShardWriter(job.target, shard, threads, progress).write()
        for name, path in job.copied.items():
            if "/" not in name or not _is_copied(job, name):
                write_file(job.target / name, functools.partial(_copy, path))
        for name, text in job.texts.items():
            write_file(job.target / name, functools.partial(_put, text))
    with writes(job.target / job.state):
        (job.target / job.state).unlink()
    return not_finite


@contextlib.contextmanager
def _locked(job: Job) -> Iterator[int]:
    """The state file is there, and no other process of this command does the same; gives what holds the lock."""
    path = job.target / job.state
    with writes(path):
        if not path.exists():
            write_file(path, functools.partial(_put, as_json(job.begun)))
        with path.open("rb") as file:
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:
                # Windows has no such lock; there the folder is the user's to watch.
                pass
            except BlockingIOError:
                raise CheckpointError(job.target, None, "one conversion at a time", "another at work") from None
            yield file.fileno()


def _put(text: bytes, file: BinaryIO) -> None:
    file.write(text)


def _copy(path: Path, file: BinaryIO) -> None:
    with path.open("rb") as stream:
        shutil.copyfileobj(stream, file)
