"""A conversion in parts, each by a process or a machine of its own, and what makes one checkpoint of them.

Every part plans the whole and makes a range of its shards, so that names, headers and bytes are those of a conversion
in one go. A part that is done leaves `part-00002-of-00004.index.json`, which lists its tensors and says of what source
and with what options it was made; while it is at work a hidden file says so. `merge` compares what the parts say with
each other and with its own plan, writes the one index and config.json, and removes theirs.

Merging is a step of its own, for one reason: parts on several machines may end at once, where no lock can be relied on
to choose which of them merges, or lie in folders that are brought together later.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xpu_ports.common.checkpoint import CheckpointError, read_header
from xpu_ports.quant.convert import writer
from xpu_ports.quant.convert.formats import Source
from xpu_ports.quant.convert.shards import Shard, is_written, partial, steps_file
from xpu_ports.quant.convert.writer import Job

# Bytes of each tensor, from its middle, by which sources are told apart that differ in numbers alone.
_SAMPLE = 256
_INDEX = re.compile(r"part-\d{5,}-of-\d{5,}\b.*\.json")
_STATE = re.compile(r"\.xpu-ports-convert\.part-\d{5,}-of-\d{5,}\.json")
# What must be equal in all parts, in the order in which differences are told.
_SAME = ("parts", "made with", "source", "plan")


@dataclass(frozen=True)
class Part:
    """A range of a conversion's shards."""

    # Counted from 1.
    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def index(self) -> str:
        """The file that is there when it is done."""
        return f"part-{self.number:05d}-of-{self.count:05d}.index.json"

    @property
    def state(self) -> str:
        """The file that is there until then."""
        return f".xpu-ports-convert.part-{self.number:05d}-of-{self.count:05d}.json"


def part_job(whole: Job, part: Part, options: Mapping[str, str]) -> Job:
    """What a part has to make.

    Args:
        whole: the conversion in one go.
        part: which part.
        options: what the plan was made by, in words; the other parts must have the same.

    Raises:
        CheckpointError: there are fewer shards than parts, or a source file cannot be read.
    """
    total = len(whole.shards)
    if part.count > total:
        hint = "--shard-size makes smaller ones" if whole.plan.config is not None else ""
        raise CheckpointError(whole.target, None, f"a file for each of {part.count} parts", f"{total} in all", hint)
    first, last = ((part.number - 1 + i) * total // part.count for i in (0, 1))
    shards = whole.shards[first:last]
    identity = {"part": part.number, **_identity(whole, part.count, options)}
    index = {**identity, "weight_map": _weight_map(shards)}
    return replace(
        whole, shards=shards, texts={part.index: writer.as_json(index)}, copied={}, state=part.state, begun=identity
    )


def _weight_map(shards: Sequence[Shard]) -> dict[str, str]:
    return {name: shard.name for shard in shards for name in shard.at}


def _identity(whole: Job, count: int, options: Mapping[str, str]) -> dict[str, Any]:
    """What the parts of a conversion have in common."""
    version = importlib.metadata.version("xpu-ports")
    made_with = {"xpu-ports": version, **options}
    return {"parts": count, "made with": made_with, "source": _fingerprints(whole.plan.source), "plan": whole.digest}


def _fingerprints(source: Source) -> dict[str, str]:
    """Of each file its size, its header and a sample of its bytes, hashed: copies on other machines have the same."""
    stored = (source.stored(key) for key in source.found)
    files = {piece.info.file for one in stored for piece in (one, *(s for s, _, _ in getattr(one, "segments", ())))}
    return {Path(file).name: _fingerprint(Path(file)) for file in sorted(files)}


def _fingerprint(path: Path) -> str:
    places = sorted((info.begin, info.end) for info in read_header(path).values())
    hashed = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb", buffering=0) as file:
        hashed.update(file.read(places[0][0] if places else -1))
        for begin, end in places:
            size = min(_SAMPLE, end - begin)
            file.seek(begin + (end - begin - size) // 2)
            hashed.update(file.read(size))
    return hashed.hexdigest()


# ---------------------------------------------------------------------------------------------------------- the target


def check_target(job: Job, whole: Job, resume: bool) -> list[Shard]:
    """Look at the target before a part is made; gives its shards that are still to be made.

    Other parts may be there, and may be at work.

    Args:
        job: the part.
        whole: of which it is one.
        resume: this part may have been begun.

    Raises:
        CheckpointError: the folder has something else in it, or parts of another conversion, or this part was begun.
    """
    writer.check_place(job)
    present = _names(job.target)
    _check_alike(job.target, _read(job.target, present), job.begun, "as asked for")
    _check_foreign(job.target, present, _files(whole, unfinished=True))
    (index,) = job.texts
    own = [job.state, index, *(name for shard in job.shards for name in _forms(shard))]
    own = [name for name in own if (job.target / name).exists()]
    if own and not resume:
        raise CheckpointError(job.target, None, "nothing of this part", own[0], "--resume goes on with what is there")
    # What these two say has been compared.
    if own and not {job.state, index} & set(own):
        raise CheckpointError(job.target, None, "this part, begun before", f"{own[0]} alone")
    return writer.to_do(job)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _forms(shard: Shard) -> tuple[str, ...]:
    """What a shard may be called, until it is whole and then."""
    path = Path(shard.name)
    return shard.name, partial(path).as_posix(), steps_file(path).as_posix()


def _read(folder: Path, present: Collection[str]) -> dict[str, dict[str, Any]]:
    """What parts say that are done or at work, by the names of their files."""
    found = {}
    for name in present:
        if _INDEX.fullmatch(name) or _STATE.fullmatch(name):
            try:
                said = json.loads((folder / name).read_text(encoding="utf-8"))
            except FileNotFoundError:
                # Done meanwhile.
                continue
            except (ValueError, OSError) as error:
                raise CheckpointError(folder / name, None, "the index of a part", str(error)) from error
            if not isinstance(said, dict) or not {"part", *_SAME} <= said.keys():
                raise CheckpointError(folder / name, None, "the index of a part", "something else")
            found[name] = said
    return found


def _check_alike(folder: Path, found: Mapping[str, Mapping[str, Any]], ours: Mapping[str, Any], whose: str) -> None:
    """All parts are of one conversion.

    Args:
        folder: where they are.
        found: what they say, by the names of their files.
        ours: what all must say.
        whose: who says how many there are.
    """
    for name, said in found.items():
        for key, expected, got in _differences(ours, said):
            like = whose if key == "parts" else "as asked for"
            hint = "a part of another conversion"
            raise CheckpointError(folder / name, key, f"{expected}, {like}", got, hint)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(what, what it is here, what it is there)."""
    for field in _SAME:
        a, b, prefix = ours[field], theirs[field], f"{field} "
        if not (isinstance(a, dict) and isinstance(b, dict)):
            a, b, prefix = {field: a}, {field: b}, ""
        for key in a | b:
            if a.get(key) != b.get(key):
                yield prefix + key, str(a.get(key, "none")), str(b.get(key, "none"))


def _files(whole: Job, unfinished: bool) -> set[str]:
    """What the shards may be called in the target, or the folder that they are in."""
    names = (name for shard in whole.shards for name in _forms(shard))
    found = {Path(name).parts[0] for name in names if unfinished or not name.endswith(".partial")}
    # Of a merge that was killed before it had begun.
    return found | {partial(whole.target / writer.STATE).name}


def _check_foreign(folder: Path, present: Collection[str], known: Collection[str]) -> None:
    """Nothing is in the target but parts of the conversion, and what else may be."""
    for name in present:
        plain = name.removeprefix(".").removesuffix(".partial") if name.endswith(".partial") else name
        is_part = any(pattern.fullmatch(plain) for pattern in (_INDEX, _STATE))
        if not is_part and not {name, plain} & set(known):
            raise CheckpointError(folder, None, "parts of this conversion alone", f"{name} in it")


# --------------------------------------------------------------------------------------------------------------- merge


def merge(whole: Job, options: Mapping[str, str]) -> int:
    """Make one checkpoint of a folder with all parts; gives how many there were.

    A merge that is killed can be done again.

    Args:
        whole: the conversion in one go.
        options: what the parts were made with.

    Raises:
        CheckpointError: a part is missing, not done, there twice or of another conversion, or a file of one is missing.
    """
    writer.check_place(whole)
    present = _names(whole.target)
    found = _read(whole.target, present)
    first, count = next(((name, said["parts"]) for name, said in found.items()), ("", 0))
    if found:
        _check_alike(whole.target, found, _identity(whole, count, options), f"as in {first}")
    complete = writer.is_complete(whole)
    if not complete:
        _check_all_there(whole, found, count)
    known = _files(whole, unfinished=False)
    if complete or (writer.STATE in present and writer.is_ours(whole, present)):
        known |= {writer.STATE} | {Path(name).parts[0] for name in (*whole.texts, *whole.copied)}
    _check_foreign(whole.target, present, known)
    writer.write(whole, [], 1, lambda _: None)
    for name in found:
        (whole.target / name).unlink()
    return count


def _check_all_there(whole: Job, found: Mapping[str, Mapping[str, Any]], count: int) -> None:
    if not found:
        raise CheckpointError(whole.target, None, "parts to merge", "none", "--part makes one")
    done = {name: said for name, said in found.items() if _INDEX.fullmatch(name)}
    by_number: dict[int, str] = {}
    for name, said in done.items():
        part = Part(said["part"], count)
        if part.number in by_number:
            raise CheckpointError(whole.target, None, f"part {part} once", f"{by_number[part.number]} and {name}")
        by_number[part.number] = name
    for name, said in found.items():
        if name not in done:
            part = Part(said["part"], count)
            raise CheckpointError(
                whole.target, None, f"part {part} done", name, f"--part {part} --resume goes on with it"
            )
    missing = [str(Part(i, count)) for i in range(1, count + 1) if i not in by_number]
    if missing:
        hint = f"--part {missing[0]} makes it; each leaves its files and {Part(1, count).index} or the like"
        raise CheckpointError(
            whole.target, None, f"parts 1/{count} to {count}/{count}", f"no {', '.join(missing)}", hint
        )
    listed = {key: (name, file) for name, said in done.items() for key, file in said["weight_map"].items()}
    planned = _weight_map(whole.shards)
    for key, file in planned.items():
        if listed.get(key, ("", None))[1] != file:
            raise CheckpointError(whole.target, key, f"{file} in the index of a part", str(listed.get(key, "none")))
    for shard in whole.shards:
        path = whole.target / shard.name
        if not is_written(path, shard):
            size = f"{path.stat().st_size} bytes, or another header" if path.exists() else "no such file"
            name = listed[next(iter(shard.at))][0]
            raise CheckpointError(path, None, f"{shard.size} bytes, as {name} says", size, "was it copied whole?")
