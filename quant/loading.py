"""Packed checkpoints through `from_pretrained`: of every transformers model after `register()`, of ours always."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import CompressedTensorsConfig

from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.common.configuration import find_config, read_config
from xpu_ports.common.weights import StrictLoading
from xpu_ports.quant.mxfp4.quantizer import MXFP4Config, MXFP4Quantizer
from xpu_ports.quant.mxfp4.scheme import FORMAT, METHOD, is_mxfp4

_CONFIGS = cast(dict[str, Any], AUTO_QUANTIZATION_CONFIG_MAPPING)
_QUANTIZERS = cast(dict[str, Any], AUTO_QUANTIZER_MAPPING)
# transformers' own, for every other format of the same method.
_THEIRS = _QUANTIZERS[METHOD]
_DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class _Configs:
    """Stands for the config class of the method in transformers' table: which class it is depends on the format."""

    @staticmethod
    def from_dict(config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        config_class = MXFP4Config if is_mxfp4(config_dict) else CompressedTensorsConfig
        return config_class.from_dict(config_dict, **kwargs)


def _quantizer(quantization_config: Any, **kwargs: Any) -> Any:
    """Stands for the quantizer class of the method in transformers' table."""
    ours = isinstance(quantization_config, MXFP4Config)
    return (MXFP4Quantizer if ours else _THEIRS)(quantization_config, **kwargs)


def register() -> None:
    """Make transformers load `mxfp4-pack-quantized` checkpoints with this package, whatever the model.

    compressed-tensors need not be installed for them. Its other formats go to transformers' own quantizer, as before.
    """
    _CONFIGS[METHOD] = _Configs
    _QUANTIZERS[METHOD] = _quantizer


def unregister() -> None:
    """Undo `register()`: transformers decompresses such checkpoints again, at their first forward."""
    _CONFIGS[METHOD] = CompressedTensorsConfig
    _QUANTIZERS[METHOD] = _THEIRS


def load(path: str | os.PathLike, auto_class: str = "AutoModelForCausalLM", **kwargs: Any) -> Any:
    """Load a packed checkpoint, after `register()`.

    Args:
        path: a folder, or a name on the Hub.
        auto_class: the class of transformers whose `from_pretrained` to call.
        kwargs: for it, such as dtype, device_map or revision.

    Raises:
        CheckpointError: it is not packed, in a format that is not known here, or not whole.
        OSError: the Hub does not have it, or cannot be reached.
    """
    where = find_config(path, **{name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None})
    config = read_config(where).get("quantization_config")
    if not isinstance(config, Mapping) or not is_mxfp4(config):
        found = config if not isinstance(config, Mapping) else {k: config.get(k) for k in ("quant_method", "format")}
        raise CheckpointError(where, "quantization_config", f"format {FORMAT!r} of {METHOD}", repr(found))
    register()
    return getattr(transformers, auto_class).from_pretrained(path, **kwargs)


class PackedLoading(StrictLoading):
    """`StrictLoading` for models that may be packed: goes before `PreTrainedModel` among a model's base classes."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """`StrictLoading.from_pretrained`, after `register()`: the same arguments, results and errors.

        Raises:
            torch.OutOfMemoryError: the device has too little memory; says how to find out what fits.
        """
        register()
        try:
            return super().from_pretrained(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            checkpoint = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            raise torch.OutOfMemoryError(
                f"{error} `xpu-ports plan {checkpoint} --device here` says what fits"
            ) from None
