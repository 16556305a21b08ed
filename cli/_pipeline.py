"""The folders of a diffusers pipeline, here or on the Hub, by their configs and headers alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from xpu_ports.cli import _common

INDEX = "model_index.json"
# What diffusers and transformers call the weights of a part.
NAMES = ("diffusion_pytorch_model", "model")


def is_pipeline(checkpoint: str) -> bool:
    """Whether it is a pipeline and not a model; the Hub is asked where there is no such folder."""
    folder = Path(checkpoint).expanduser()
    if folder.exists() or not _common.may_be_on_hub(checkpoint):
        return (folder / INDEX).is_file()
    from transformers.utils import cached_file

    # None where there is none, and where the Hub cannot be reached: who reads the config next says so.
    found = cached_file(
        checkpoint,
        INDEX,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found is not None


def read_part(checkpoint: str, name: str) -> dict[str, Any]:
    """A JSON file of the pipeline.

    Raises:
        UserError: it is not there, or no JSON.
    """
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        path = folder / name
    else:
        import huggingface_hub

        path = Path(huggingface_hub.hf_hub_download(checkpoint, name))
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _common.UserError(f"{checkpoint}: {name}: {error}") from error


# Shape and bytes of a tensor.
Size = tuple[tuple[int, ...], int]


def part_sizes(checkpoint: str, part: str) -> dict[str, Size] | None:
    """Shape and bytes of each tensor of a part; None for one without weights."""
    folder = Path(checkpoint).expanduser()
    return _local(folder / part) if folder.is_dir() else _remote(checkpoint, part)


def _local(folder: Path) -> dict[str, Size] | None:
    from xpu_ports.common.checkpoint import checkpoint_files, read_headers

    for name in NAMES:
        for file in (f"{name}.safetensors", f"{name}.safetensors.index.json"):
            if (folder / file).is_file():
                tensors = read_headers(checkpoint_files(folder, name=file))
                return {key: (t.shape, math.prod(t.shape) * t.dtype.itemsize) for key, t in tensors.items()}
    return None


def _remote(repository: str, part: str) -> dict[str, Size] | None:
    import huggingface_hub

    for name in NAMES:
        index = f"{part}/{name}.safetensors.index.json"
        if huggingface_hub.file_exists(repository, index):
            files = sorted(set(read_part(repository, index)["weight_map"].values()))
        elif huggingface_hub.file_exists(repository, f"{part}/{name}.safetensors"):
            files = [f"{name}.safetensors"]
        else:
            continue
        headers = [huggingface_hub.parse_safetensors_file_metadata(repository, f"{part}/{file}") for file in files]
        tensors = {key: t for header in headers for key, t in header.tensors.items()}
        return {key: (tuple(t.shape), t.data_offsets[1] - t.data_offsets[0]) for key, t in tensors.items()}
    return None
