"""What a comparison needs to know of a language model, and what a user may choose."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xpu_ports.common.compare.bounds import Bounds
from xpu_ports.common.compare.layers import TRANSFORMERS, Layers, Names
from xpu_ports.common.compare.report import Section

REFERENCES = ("transformers", "diffusers", "reference-path")
QUANT = ("mxfp4",)
CACHES = ("fp8",)


@dataclass(frozen=True)
class Options:
    """What the command line says; see `common/compare/command.py` for the words."""

    checkpoint: str
    device: torch.device
    # None: the one of REFERENCES that fits.
    reference: str | None = None
    # The checkpoint's own when None.
    dtype: torch.dtype | None = None
    backend: str | None = None
    text: Path | None = None
    quant: str | None = None
    cache: str | None = None
    window: int = 256
    windows: int = 8
    # Tokens that are decoded one by one, at the end of the first window.
    steps: int = 32
    yardstick: bool = False
    # Pictures: what to draw.
    prompt: str = "a red three"
    side: int | None = None
    draw_steps: int = 20
    guidance: float = 2.0
    text_tokens: int = 32
    # Where pictures go; None for nowhere.
    out: Path | None = None


@dataclass(frozen=True)
class Subject:
    """A port of a language model beside transformers' class."""

    # Classes with from_pretrained.
    port: Any
    reference: Any
    # By dtype; "mxfp4" for packed weights beside dense ones, "fp8" for an FP8 cache beside a dense one.
    bounds: Mapping[str, Bounds]
    layers: Layers
    reference_layers: Layers = TRANSFORMERS
    names: Names = field(default_factory=Names)
    # Fields of the config in which the port does as transformers does, or transformers as the port, and why.
    aligned: Mapping[str, Any] = field(default_factory=dict)
    reference_aligned: Mapping[str, Any] = field(default_factory=dict)
    alignment: str = ""
    # Packs the layers of a dense port, and rounds their weights to the same values without packing them.
    quantize: Callable[[Any], Any] | None = None
    round_weights: Callable[[Any], Any] | None = None
    # Arguments of from_pretrained for a cache of `Options.cache`.
    caches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # More to measure on the port, such as guesses that are kept.
    more: Callable[[Subject, Options, torch.Tensor], list[Section]] | None = None

    def kinds(self, config: Any) -> dict[int, str]:
        """What each layer is, in the config's words."""
        kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
        return dict(enumerate(kinds))


def load(model_class: Any, options: Options, config_changes: Mapping[str, Any], **kwargs: Any) -> Any:
    """A model on its device, for evaluation; under torchrun a port's layers are divided among its processes.

    Args:
        model_class: with from_pretrained.
        options: checkpoint, dtype and device.
        config_changes: fields of the config to set instead.
        kwargs: of from_pretrained.
    """
    dtype = kwargs.pop("dtype", options.dtype) or "auto"
    if config_changes:
        config = model_class.config_class.from_pretrained(options.checkpoint)
        for name, value in config_changes.items():
            setattr(config, name, value)
        kwargs["config"] = config
    divided = int(os.environ.get("WORLD_SIZE", "1")) > 1 and getattr(model_class, "_parallel_plan", None) is not None
    kwargs |= {"tp_plan": "auto"} if divided else {"device_map": {"": options.device}}
    model = model_class.from_pretrained(options.checkpoint, dtype=dtype, **kwargs)
    return model.eval()


def with_checkpoint(options: Options, **changes: Any) -> Options:
    return dataclasses.replace(options, **changes)
