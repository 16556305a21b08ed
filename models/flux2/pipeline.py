"""A diffusers pipeline with the port as its transformer."""

from __future__ import annotations

from typing import Any

import torch

from xpu_ports.models.flux2.diffusers_api import DiffusionPipeline
from xpu_ports.models.flux2.modeling_flux2 import Flux2Transformer2DModel

# What concerns the files of all parts alike.
_FILES = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "token",
    "variant",
    "use_safetensors",
)


def load_pipeline(
    path: str, dtype: torch.dtype | dict[str, torch.dtype] = torch.bfloat16, **kwargs: Any
) -> DiffusionPipeline:
    """Load the pipeline that a folder or a repository names (FLUX.2 dev, Klein, ...), with our transformer.

    Args:
        path: a folder in diffusers' layout, or a repository on the Hub.
        dtype: of all parts, the published files' own when left out; or of each by its name, "default" for the others.
            Left out, diffusers would load some parts in fp32 and others not.
        kwargs: as `DiffusionPipeline.from_pretrained` takes them.

    Raises:
        CheckpointError: the transformer's files are not what its config says.
    """
    if "transformer" not in kwargs:
        own = dtype if isinstance(dtype, torch.dtype) else dtype.get("transformer", dtype.get("default"))
        files = {name: kwargs[name] for name in _FILES if name in kwargs}
        kwargs["transformer"] = Flux2Transformer2DModel.from_pretrained(
            path, subfolder="transformer", dtype=own, **files
        )
    return DiffusionPipeline.from_pretrained(path, dtype=dtype, **kwargs)
