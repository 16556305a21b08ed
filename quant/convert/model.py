"""What a checkpoint's model says of its tensors: which are weights of linear layers, and which stay in fp32.

The model is built on the meta device from config.json, as a port's class or as transformers' own.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from xpu_ports.common.checkpoint import CONFIG, CheckpointError, TensorInfo
from xpu_ports.common.weights import tied_groups
from xpu_ports.quant.mxfp4.packing import Unit, places, units
from xpu_ports.quant.mxfp4.scheme import LINEAR


class Kind(enum.Enum):
    """What a matrix of a checkpoint is in the model."""

    LINEAR = "the weight of a linear layer, or of experts that the model can hold packed"
    TIED = "such a weight that is an embedding's too"
    JOINED = "experts' weights, which the model's loader joins, but not when they are packed"
    OTHER = "something else: an embedding, a router, a layer that computes something of its own"


@dataclass(frozen=True)
class Layer:
    """A matrix as it stands in files."""

    kind: Kind
    # The name of its module in the model, and the names of that one's class and of the class's bases.
    unit: str
    classes: tuple[str, ...] = LINEAR


def transformers_class(config: PreTrainedConfig, where: Path) -> type[PreTrainedModel]:
    """transformers' own class of a config's architecture.

    Raises:
        CheckpointError: it has none.
    """
    names = config.architectures or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        raise CheckpointError(where, "architectures", "a model class of transformers", repr(names))
    return cls


def read_config(folder: Path) -> PreTrainedConfig:
    """transformers' config object, without what it says of quantization.

    Raises:
        CheckpointError: transformers does not know its model type.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(folder / CONFIG, "model_type", "one that transformers knows", reason) from None
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def build(folder: Path, port: Any = None, values: Mapping[str, Any] | None = None) -> Any:
    """The model of a checkpoint, without memory for its tensors.

    Args:
        folder: where config.json lies.
        port: its class, of transformers or diffusers; transformers' own when left out.
        values: what config.json says, for a class of diffusers.

    Raises:
        CheckpointError: transformers does not know the model.
    """
    if port is not None and not issubclass(port, PreTrainedModel):
        with torch.device("meta"):
            return port.from_config({k: v for k, v in (values or {}).items() if k != "quantization_config"})
    config = read_config(folder)
    cls: Any = port or transformers_class(config, folder / CONFIG)
    with torch.device("meta"), init.no_init_weights():
        return cls._from_config(config)


def layers(model: nn.Module, dense: Mapping[str, TensorInfo]) -> dict[str, Layer]:
    """The matrices of a checkpoint that have a place in the model, by their names in files without `.weight`.

    Args:
        model: on the meta device.
        dense: key -> shape as of tensors that are not quantized.
    """
    unit_of: dict[str, Unit] = {key: unit for unit in units(model) for key in unit.keys}
    expected, tied_units = model.state_dict(), tied(model)
    found: dict[str, Layer] = {}
    for name, key in places(model, dense):
        if len(dense[f"{name}.weight"].shape) != 2:
            continue
        unit = unit_of.get(key)
        if unit is not None:
            kind = Kind.TIED if unit.name in tied_units else Kind.LINEAR
            found[name] = Layer(kind, unit.name, unit.classes)
        else:
            joined = len(expected[key].shape) == 3
            found[name] = Layer(Kind.JOINED if joined else Kind.OTHER, key.removesuffix(".weight"))
    return found


def tied(model: nn.Module) -> set[str]:
    """Linear layers, by their names in the model, whose weight is an embedding's: files may lack it under that name."""
    roots = {name: group[0] for group in tied_groups(model) for name in group}
    packable = {key for unit in units(model) for key in unit.keys}
    return {unit.name for unit in units(model) if any(roots.get(key, key) not in packable for key in unit.keys)}


def embeddings(model: nn.Module, dense: Mapping[str, TensorInfo]) -> set[str]:
    """Names in files, without `.weight`, of tensors that are an embedding's."""
    keys = {f"{name}.weight" for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Embedding)}
    return {layer for layer, key in places(model, dense) if key in keys}


def kept_in_fp32(model: Any) -> re.Pattern[str]:
    """Matches the keys that the model's class keeps in fp32 whatever the dtype of the rest."""
    if not isinstance(model, PreTrainedModel):
        # diffusers' classes name modules.
        modules = model._keep_in_fp32_modules or ()
        return re.compile("|".join(rf"(?:(?:.*\.)?{re.escape(name)}\.)" for name in modules) or r"(?!)")
    plan = model._get_dtype_plan(torch.bfloat16)
    patterns = [pattern.replace("*", ".*") for pattern, dtype in plan.items() if dtype == torch.float32]
    return re.compile("|".join(f"(?:{p})" for p in patterns) or r"(?!)")
