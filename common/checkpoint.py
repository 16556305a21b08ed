"""The files of a checkpoint: their headers, their index, and the one error for whatever is wrong with them.

Only headers are read: 8 bytes with the length, then JSON (github.com/huggingface/safetensors, section Format). Their
offsets say how long a file must be, so a truncated one is found without reading it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

# The safetensors library refuses longer headers too.
LONGEST_HEADER = 100_000_000
# How much of two tensors is compared at a time, in bytes.
_PIECE = 1 << 22

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is.

    Args:
        file: which file, or what stands for one.
        key: which tensor of it or which field; None when it is about the file.
        expected: what should be there, in words.
        found: what is there, in words.
        hint: what else helps, in words.
    """

    def __init__(self, file: str | os.PathLike, key: str | None, expected: str, found: str, hint: str = "") -> None:
        # Exceptions are pickled by these arguments.
        super().__init__(os.fspath(file), key, expected, found, hint)
        self.file, self.key, self.expected, self.found, self.hint = os.fspath(file), key, expected, found, hint

    def __str__(self) -> str:
        where = self.file if self.key is None else f"{self.file}: {self.key}"
        return f"{where}: expected {self.expected}, found {self.found}" + (f"; {self.hint}" if self.hint else "")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # The file that holds it, or what else to call the place, and where its bytes lie in it.
    file: str = ""
    begin: int = 0
    end: int = 0
    # The values, where they are at hand anyway.
    values: Tensor | None = None


def describe(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"


# ------------------------------------------------------------------------------------------------------------ headers


def read_header(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes; reads its header only.

    Raises:
        CheckpointError: the file is missing, no safetensors file, truncated, or its header contradicts itself.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise CheckpointError(path, None, "a safetensors file", "no such file")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        if start[8:] != b"{" or length > LONGEST_HEADER:
            raise CheckpointError(path, None, "a safetensors file", *_what_it_is(path))
        if size < 8 + length:
            raise CheckpointError(path, None, f"a header of {length} bytes", f"{size - 8}", "the file is truncated")
        try:
            header = json.loads(start[8:] + file.read(length - 1))
        except ValueError as error:
            raise CheckpointError(path, None, "a header in JSON", f"none: {error}") from None
    header.pop("__metadata__", None)
    tensors = dict(sorted(_entries(path, header, 8 + length), key=lambda item: (item[1].begin, item[1].end)))
    _check_extents(path, tensors, 8 + length, size)
    return tensors


def _what_it_is(path: str) -> tuple[str, str]:
    """(found, hint) for a file that does not begin as a safetensors file does."""
    with open(path, "rb") as file:
        head = file.read(64)
    if not head:
        return "an empty file", ""
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer", "`git lfs pull` fetches the file itself"
    if zipfile.is_zipfile(path):
        return "a zip file, as torch.save writes", ""
    return f"a file that begins with {head[:16]!r}", ""


def _entries(path: str, header: Mapping[str, Any], data: int) -> Iterator[tuple[str, TensorInfo]]:
    for key, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(map(int, entry["shape"]))
            begin, end = map(int, entry["data_offsets"])
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(path, key, "dtype, shape and data_offsets in the header", f"{entry!r}") from None
        if dtype not in DTYPES:
            raise CheckpointError(path, key, f"a dtype out of {', '.join(DTYPES)}", f"{dtype}")
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != size:
            raise CheckpointError(path, key, f"{size} bytes for {dtype} {list(shape)}", f"{end - begin}")
        yield key, TensorInfo(shape, DTYPES[dtype], path, data + begin, data + end)


def _check_extents(path: str, tensors: Mapping[str, TensorInfo], data: int, size: int) -> None:
    """The tensors must lie one after another and end where the file does."""
    at = data
    for key, info in tensors.items():
        if info.begin != at:
            raise CheckpointError(path, key, f"its bytes from offset {at} of the file", f"from {info.begin}")
        at = info.end
    if at != size:
        hint = "the file is truncated" if size < at else "bytes follow the last tensor"
        raise CheckpointError(path, None, f"{at} bytes", f"{size}", hint)


def read_pickle(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """The tensors of a file written by torch.save; its values are mapped, not read, where its format allows.

    Raises:
        CheckpointError: the file is missing, cannot be read, or holds something else than tensors.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise CheckpointError(path, None, "a file written by torch.save", "no such file")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        found, hint = _what_it_is(path)
        if os.path.getsize(path) and not hint:
            found, hint = "one that cannot be read", str(error).partition(". ")[0] or type(error).__name__
        raise CheckpointError(path, None, "a file written by torch.save", found, hint) from None
    if not isinstance(tensors, dict):
        raise CheckpointError(path, None, "a dict of tensors", type(tensors).__name__)
    return of_tensors(tensors, path)


def of_tensors(tensors: Mapping[str, Any], file: str = "state_dict") -> dict[str, TensorInfo]:
    """What `read_header` gives, of tensors at hand; `file` is what to call the place they come from.

    Raises:
        CheckpointError: one of the values is not a tensor.
    """
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(file, key, "a tensor", type(value).__name__)
    return {key: TensorInfo(tuple(t.shape), t.dtype, file, values=t) for key, t in tensors.items()}


def same_values(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors hold the same bytes, read in pieces."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.values is not None and b.values is not None:
        x, y = a.values, b.values
        if x.is_meta or y.is_meta or x.data_ptr() == y.data_ptr():
            return x.data_ptr() == y.data_ptr()
        return torch.equal(x.contiguous().view(torch.uint8), y.to(x.device).contiguous().view(torch.uint8))
    with open(a.file, "rb") as left, open(b.file, "rb") as right:
        left.seek(a.begin)
        right.seek(b.begin)
        for at in range(a.begin, a.end, _PIECE):
            n = min(_PIECE, a.end - at)
            if left.read(n) != right.read(n):
                return False
    return True


# -------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class CheckpointFiles:
    """The weight files of a checkpoint."""

    files: tuple[Path, ...]
    # Of a sharded checkpoint: the index file and what it says, key -> name of the file.
    index: Path | None = None
    weight_map: Mapping[str, str] | None = None

    @property
    def main(self) -> Path:
        """The file to name when something is missing: the index, or the only file."""
        return self.index or self.files[0]


def checkpoint_files(
    folder: str | os.PathLike, variant: str | None = None, use_safetensors: bool | None = None, name: str | None = None
) -> CheckpointFiles:
    """The weight files of a local folder, chosen as transformers does.

    Args:
        folder: where config.json lies.
        variant: as in model.<variant>.safetensors.
        use_safetensors: False takes only .bin files, True only .safetensors files, None prefers the latter.
        name: the file or index to take instead of the usual ones.

    Raises:
        CheckpointError: there are no weights, the index cannot be read, or a file that it names is missing.
    """
    folder = Path(folder)
    names = [n for n in (SAFETENSORS, SAFETENSORS_INDEX) if use_safetensors is not False]
    names += [n for n in (PICKLE, PICKLE_INDEX) if not use_safetensors]
    names = [name] if name else [_with_variant(n, variant) for n in names]
    for path in (folder / n for n in names):
        if path.is_file():
            return read_index(path) if path.suffix == ".json" else CheckpointFiles((path,))
    present = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf", ".pth", ".pt"))
    found = "no such file" if not present else f"only {', '.join(present[:5])}" + (", ..." if present[5:] else "")
    raise CheckpointError(folder, None, " or ".join(names), found)


def _with_variant(name: str, variant: str | None) -> str:
    stem, suffix = name.rsplit(".", 1)
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def read_index(path: str | os.PathLike) -> CheckpointFiles:
    """The files that an index names, all of them there.

    Raises:
        CheckpointError: the index is no JSON, has no weight map, names a path, or names a file that is missing.
    """
    path = Path(path)
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        # transformers reads the metadata too, and needs it to be there.
        weight_map, _ = dict(index["weight_map"]), index["metadata"]
        names = sorted(set(weight_map.values()))
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(path, None, "JSON with metadata and a weight_map of key: file", reason) from None
    for name in names:
        first, count = _first_of(weight_map, name)
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(path, first, "the name of a file in the same folder", repr(name))
        if not (path.parent / name).is_file():
            raise CheckpointError(path, first, f"it in {name}", "no such file", f"{count} keys of the index lie there")
    return CheckpointFiles(tuple(path.parent / name for name in names), path, weight_map)


def _first_of(weight_map: Mapping[str, str], name: str) -> tuple[str, int]:
    keys = [key for key, file in weight_map.items() if file == name]
    return keys[0], len(keys)


def read_headers(checkpoint: CheckpointFiles) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint; checks each file, and the index against what the files hold.

    Raises:
        CheckpointError: a file is damaged, or the index and the files disagree on a key.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in checkpoint.files:
        header = read_header(path) if path.suffix == ".safetensors" else read_pickle(path)
        if checkpoint.weight_map is not None:
            _check_shard(checkpoint, path, header)
        tensors.update(header)
    return tensors


def _check_shard(checkpoint: CheckpointFiles, path: Path, header: Mapping[str, TensorInfo]) -> None:
    weight_map = checkpoint.weight_map
    assert weight_map is not None
    unlisted = [key for key in header if weight_map.get(key) != path.name]
    if unlisted:
        key = unlisted[0]
        says = f"the index says it is in {weight_map[key]}" if key in weight_map else "the index does not list it"
        hint = "; ".join([says, *_more(unlisted)])
        raise CheckpointError(path, key, f"only keys that {checkpoint.main.name} lists here", "this one too", hint)
    absent = [key for key, name in weight_map.items() if name == path.name and key not in header]
    if absent:
        hint = "; ".join([f"{checkpoint.main} lists it there", *_more(absent)])
        raise CheckpointError(path, absent[0], "this key in the file", "none", hint)


def _more(keys: list[str]) -> list[str]:
    return [f"{len(keys) - 1} more like it"] if len(keys) > 1 else []


def on_meta(info: TensorInfo) -> Tensor:
    """An empty tensor of the shape and dtype, without memory."""
    return torch.empty(info.shape, dtype=info.dtype, device="meta")
