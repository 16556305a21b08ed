"""Reading headers and indexes: every way in which a file can be wrong is named."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from xpu_ports.common.checkpoint import (
    DTYPES,
    CheckpointError,
    checkpoint_files,
    of_tensors,
    read_header,
    read_headers,
    read_index,
    read_pickle,
    same_values,
)

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_header_says_what_the_file_holds(file: Path) -> None:
    header = read_header(file)
    assert {key: (info.shape, info.dtype) for key, info in header.items()} == {
        "a": ((2, 3), torch.float32),
        "b": ((5,), torch.bfloat16),
    }
    data = file.read_bytes()
    for key, info in header.items():
        assert data[info.begin : info.end] == TENSORS[key].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d not in (torch.complex64,)], ids=str)
def test_header_knows_the_dtypes_that_safetensors_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"x": torch.zeros(3, dtype=torch.uint8).to(torch.float32).to(dtype)}, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors")["x"].dtype == dtype


def test_header_of_an_empty_file_of_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors") == {}


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str | None, str, str]] = {
    # What is done to the file, then: the key named, and what the message says is expected, and found.
    "missing": (lambda p: p.unlink(), None, "a safetensors file", "no such file"),
    "empty": (lambda p: p.write_bytes(b""), None, "a safetensors file", "an empty file"),
    "lfs": (lambda p: p.write_bytes(LFS), None, "a safetensors file", "a Git LFS pointer"),
    "html": (lambda p: p.write_bytes(b"<!DOCTYPE html>"), None, "a safetensors file", "begins with b'<!DOCTYPE html>'"),
    "torch": (lambda p: torch.save(TENSORS, p), None, "a safetensors file", "a zip file, as torch.save writes"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), None, "{} bytes", "{-1}"),
    "cut-in-header": (lambda p: p.write_bytes(p.read_bytes()[:40]), None, "a header of", "32"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"\0"), None, "{} bytes", "{+1}"),
    "huge-header": (lambda p: write(p, {}, length=1 << 40), None, "a safetensors file", "a file that begins with"),
    "no-json": (lambda p: write(p, b"{,}"), None, "a header in JSON", "none"),
    "no-offsets": (lambda p: write(p, {"a": {"dtype": "F32", "shape": [2]}}), "a", "data_offsets", "'F32'"),
    "dtype": (lambda p: write(p, {"a": entry("F7")}, b"0" * 8), "a", "a dtype out of BOOL", "F7"),
    "size": (lambda p: write(p, {"a": entry(shape=[3])}, b"0" * 8), "a", "12 bytes for F32 [3]", "8"),
    "hole": (lambda p: write(p, {"a": entry(offsets=[8, 16])}, b"0" * 16), "a", "its bytes from offset", "from"),
    "overlap": (lambda p: write(p, {"a": entry(), "b": entry()}, b"0" * 8), "b", "its bytes from offset", "from"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file(file: Path, damage: str) -> None:
    size = file.stat().st_size
    do, key, expected, found = DAMAGES[damage]
    do(file)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    error = caught.value
    assert (error.file, error.key) == (str(file), key)
    assert expected.replace("{}", str(size)) in error.expected
    assert found.replace("{-1}", str(size - 1)).replace("{+1}", str(size + 1)) in error.found
    for part in (error.file, error.key or "", error.expected, error.found):
        assert part in str(error)


def test_a_truncated_file_is_called_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="the file is truncated"):
        read_header(file)


def test_an_lfs_pointer_comes_with_the_way_out(file: Path) -> None:
    file.write_bytes(LFS)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_header(file)


def test_error_survives_pickling() -> None:
    error = CheckpointError("f", "k", "this", "that", "so there")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "f: k: expected this, found that; so there"
    assert (again.file, again.key, again.expected, again.found) == ("f", "k", "this", "that")


# --------------------------------------------------------------------------------------------------------- torch.save


def test_pickle_tells_shapes_and_dtypes(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    found = read_pickle(tmp_path / "pytorch_model.bin")
    assert {k: (i.shape, i.dtype) for k, i in found.items()} == {k: (t.shape, t.dtype) for k, t in TENSORS.items()}


@pytest.mark.parametrize(
    ("do", "found"),
    [
        pytest.param(lambda p: p.unlink(), "no such file", id="missing"),
        pytest.param(lambda p: p.write_bytes(LFS), "a Git LFS pointer", id="lfs"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-200]), "one that cannot be read", id="cut"),
        pytest.param(lambda p: p.write_bytes(b""), "an empty file", id="empty"),
        pytest.param(lambda p: p.write_bytes(b"<!DOCTYPE html>"), "one that cannot be read", id="html"),
        pytest.param(lambda p: torch.save([1], p), "list", id="list"),
        pytest.param(lambda p: torch.save({"a": {"b": 1}}, p), "dict", id="nested"),
    ],
)
def test_damaged_pickle(tmp_path: Path, do: Callable[[Path], Any], found: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    do(path)
    with pytest.raises(CheckpointError) as caught:
        read_pickle(path)
    assert caught.value.file == str(path)
    assert found in caught.value.found


# -------------------------------------------------------------------------------------------------------------- values


def test_equal_and_different_values_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small pieces, so that the last one is the one that differs.
    monkeypatch.setattr("xpu_ports.common.checkpoint._PIECE", 7)
    x = torch.arange(20, dtype=torch.float32)
    y = x.clone()
    y[-1] += 1
    save_file({"x": x, "same": x.clone(), "other": y, "shape": x.reshape(4, 5).clone()}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert same_values(header["x"], header["same"])
    assert not same_values(header["x"], header["other"])
    assert not same_values(header["x"], header["shape"])


def test_equal_and_different_values_at_hand() -> None:
    nan = torch.tensor([[1.0, float("nan")]])
    found = of_tensors({"x": nan, "view": nan[:], "same": nan.clone(), "other": -nan, "half": nan.half()})
    assert same_values(found["x"], found["view"])
    assert same_values(found["x"], found["same"])
    assert not same_values(found["x"], found["other"])
    assert not same_values(found["x"], found["half"])


# --------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for i, (key, tensor) in enumerate(TENSORS.items()):
        save_file({key: tensor}, tmp_path / f"model-{i}.safetensors")
    set_index(tmp_path, {"a": "model-0.safetensors", "b": "model-1.safetensors"})
    return tmp_path


def set_index(folder: Path, weight_map: Any, **other: Any) -> None:
    index = {"metadata": {}, "weight_map": weight_map, **other}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_as_one(sharded: Path) -> None:
    files = checkpoint_files(sharded)
    assert [path.name for path in files.files] == ["model-0.safetensors", "model-1.safetensors"]
    assert files.main.name == "model.safetensors.index.json"
    assert set(read_headers(files)) == {"a", "b"}


@pytest.mark.parametrize(
    ("names", "options", "chosen"),
    [
        (["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"], {}, "model.safetensors"),
        (["model.safetensors", "pytorch_model.bin"], {"use_safetensors": False}, "pytorch_model.bin"),
        (["pytorch_model.bin"], {}, "pytorch_model.bin"),
        (["model.safetensors", "model.fp16.safetensors"], {"variant": "fp16"}, "model.fp16.safetensors"),
        (["model.safetensors", "other.safetensors"], {"name": "other.safetensors"}, "other.safetensors"),
    ],
)
def test_files_are_chosen_as_transformers_does(
    tmp_path: Path, names: list[str], options: dict[str, Any], chosen: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert checkpoint_files(tmp_path, **options).main.name == chosen


def test_the_index_of_a_variant(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").rename(sharded / "model.safetensors.index.fp16.json")
    assert checkpoint_files(sharded, variant="fp16").main.name == "model.safetensors.index.fp16.json"


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint_files(tmp_path)
    assert caught.value.file == str(tmp_path)
    assert "model.safetensors or" in caught.value.expected
    assert caught.value.found == "no such file"
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found only consolidated\.00\.pth"):
        checkpoint_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or model\.safetensors\.index\.json, found"):
        checkpoint_files(tmp_path, use_safetensors=True)


INDEX_FAULTS: dict[str, tuple[Any, str | None, str, str]] = {
    "names-a-missing-file": ({"a": "model-0.safetensors", "b": "gone.safetensors"}, "b", "it in gone", "no such file"),
    "names-a-path": ({"a": "../model-0.safetensors"}, "a", "the name of a file in the same folder", "'../model"),
    "no-map": ([1], None, "a weight_map", "TypeError"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_broken_index(sharded: Path, fault: str) -> None:
    weight_map, key, expected, found = INDEX_FAULTS[fault]
    set_index(sharded, weight_map)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_files(sharded)
    error = caught.value
    assert (error.file, error.key) == (str(sharded / "model.safetensors.index.json"), key)
    assert expected in error.expected
    assert found in error.found


@pytest.mark.parametrize("text", ["{,", "[]", '{"weight_map": {}}'], ids=["no-json", "list", "no-metadata"])
def test_index_that_transformers_could_not_read(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON with metadata and a weight_map"):
        read_index(sharded / "model.safetensors.index.json")


SHARD_FAULTS: dict[str, tuple[dict[str, str], str, str, str, str]] = {
    # The map, then: the shard and the key named, and what is expected and found.
    "shard-lacks-a-key": (
        {"a": "model-0.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"},
        "model-1.safetensors", "c", "this key in the file", "none",
    ),
    "index-lacks-a-key": (
        {"x": "model-0.safetensors", "b": "model-1.safetensors"},
        "model-0.safetensors", "a", "only keys that model.safetensors.index.json lists here", "this one too",
    ),
    "index-says-another-shard": (
        {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-0.safetensors"},
        "model-0.safetensors", "a", "only keys that model.safetensors.index.json lists here", "this one too",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_index_and_shards_disagree(sharded: Path, fault: str) -> None:
    weight_map, shard, key, expected, found = SHARD_FAULTS[fault]
    set_index(sharded, weight_map)
    with pytest.raises(CheckpointError) as caught:
        read_headers(checkpoint_files(sharded))
    error = caught.value
    assert (error.file, error.key, error.expected, error.found) == (str(sharded / shard), key, expected, found)
    assert "index" in error.hint


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    path = sharded / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model-1\.safetensors: expected \d+ bytes, found \d+; the file is trunc"
    ):
        read_headers(checkpoint_files(sharded))
