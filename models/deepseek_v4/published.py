"""Published files: FP8 and FP4 weights and their scales, given to the loader as the numbers that they stand for.

What a tensor is goes by its own dtype: E4M3 with a scale for each tile, in E8M0 or fp32; packed E2M1 with an E8M0 scale
for every 32 columns; and whatever is a float already. All become dense, since the products of this model have no
other form yet: e4m3 and E2M1 times powers of two are exact in bf16. Nothing is read before the loader asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from xpu_ports.common.checkpoint import CONFIG
from xpu_ports.common.configuration import find_config, known_keys, load_config, read_config
from xpu_ports.common.weights import StrictLoading
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.steps import Dense, Values

METHOD = "fp8"
_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class DenseOnDemand(torch.Tensor):
    """The numbers of a tensor in files: `t[...]` or slices read them; until then there are shape and dtype alone."""

    numbers: Values

    @staticmethod
    def __new__(cls: type, numbers: Values, dtype: torch.dtype) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"{func} on a tensor that is not read yet")

    def __getitem__(self, item: Any) -> Tensor:
        rows, shape = self.numbers.count, self.numbers.shape
        if item is Ellipsis or len(shape) < 2:
            return self.numbers.rows(0, rows).to(self.dtype).view(shape)[item]
        first, *others = item
        a, b, _ = first.indices(shape[0])
        each = rows // shape[0]
        return self.numbers.rows(a * each, b * each).to(self.dtype).view(b - a, *shape[1:])[:, *others]


def dense_weights(folder: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a published checkpoint, quantized ones as bf16.

    Raises:
        CheckpointError: it is damaged, or a tensor lacks its scales or has some of another shape.
    """
    source = read_source(Path(folder))
    tensors: dict[str, Tensor] = {
        key: DenseOnDemand(values, torch.bfloat16) for key, values in source.quantized.items()
    }
    return tensors | {key: DenseOnDemand(Dense(stored), stored.info.dtype) for key, stored in source.rest().items()}


def published_folder(path: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Where a checkpoint lies whose config.json says FP8, fetched from the Hub when `path` is a name there; or None.

    Args:
        path: what `from_pretrained` was given.
        kwargs: its arguments.
    """
    if path is None or kwargs.get("state_dict") is not None:
        return None
    download = {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, subfolder, CONFIG)):
        # An adapter, or nothing: the loader says what is missing.
        return None
    said = read_config(find_config(path, subfolder=subfolder, **download)).get("quantization_config")
    if not isinstance(said, Mapping) or said.get("quant_method") != METHOD:
        return None
    folder = os.fspath(path) if os.path.isdir(path) else snapshot_download(os.fspath(path), **download)
    return os.path.join(folder, subfolder)


def checkpoint_config(model_class: type[StrictLoading], path: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """The config of a checkpoint, to be changed before a model is made of it.

    Args:
        model_class: the model.
        path: where its config.json lies, or a name on the Hub.
        config: what the caller gives instead, or None.
        kwargs: its arguments; those that are the config's are taken out.

    Raises:
        CheckpointError: the model cannot run it.
    """
    if isinstance(config, PreTrainedConfig):
        return deepcopy(config)
    config_class: Any = model_class.config_class
    names = known_keys(config_class) - {"dtype", "torch_dtype"}
    overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    download = {name: kwargs[name] for name in (*_DOWNLOAD, "subfolder") if kwargs.get(name) is not None}
    loaded = load_config(config_class, config or path, model_class._config_checks, overrides, **download)
    loaded.name_or_path = str(path)
    return loaded


def drop_quantization(config: Any) -> None:
    """Take out what a config says of how files hold weights."""
    for name in ("quantization_config", "expert_dtype"):
        if hasattr(config, name):
            delattr(config, name)


def generation_config(folder: str) -> GenerationConfig | None:
    """What generation_config.json says, where there is one."""
    has_one = os.path.isfile(os.path.join(folder, "generation_config.json"))
    return GenerationConfig.from_pretrained(folder) if has_one else None
