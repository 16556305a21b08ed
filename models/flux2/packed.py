"""MXFP4 weights for FLUX.2's transformer: diffusers' side of loading and saving them, and packing in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xpu_ports.common.checkpoint import CheckpointFiles, read_headers
from xpu_ports.models.flux2.diffusers_api import CONFIGS, QUANTIZERS, DiffusersQuantizer
from xpu_ports.quant.mxfp4.linear import MXFP4Linear
from xpu_ports.quant.mxfp4.packing import SCALE, choose, pack, units
from xpu_ports.quant.mxfp4.quantize import quantization_config
from xpu_ports.quant.mxfp4.quantizer import MXFP4Config
from xpu_ports.quant.mxfp4.scheme import METHOD, read_scheme

# What comes in, what goes out, and what tells the time: 1% of the weights, and every error in it meets all blocks.
DENSE = ("x_embedder", "context_embedder", "re:time_guidance_embed\\..*", "norm_out.linear", "proj_out")


class MXFP4Quantizer(DiffusersQuantizer):
    """Loads layers packed and leaves them so; `model.dequantize()` makes them dense."""

    # diffusers' word for: takes quantized checkpoints only.
    requires_calibration = True
    is_serializable = True
    is_trainable = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._files: Sequence[str] = ()

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: Any) -> list[str]:
        """The one place where diffusers tells the files, before the model is changed."""
        alone = isinstance(checkpoint_files, (str, os.PathLike))
        self._files = [os.fspath(checkpoint_files)] if alone else checkpoint_files
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        scheme = read_scheme(self.quantization_config.to_dict(), f"the config of {type(model).__name__}")
        pack(model, choose(model, scheme, read_headers(CheckpointFiles(tuple(map(Path, self._files))))))
        return model

    def maybe_update_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scales with a dtype of their own are the same bytes."""
        typed = torch.float8_e8m0fnu
        return {
            key: t.view(torch.uint8) if key.endswith(f".{SCALE}") and t.dtype == typed else t
            for key, t in state_dict.items()
        }

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return model

    def _dequantize(self, model: Any) -> nn.Module:
        for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, MXFP4Linear)]:
            model.set_submodule(name, layer.dequantize(model.dtype))
        # diffusers takes the quantizer off, and would save its config.
        kept = {key: value for key, value in model.config.items() if key != "quantization_config"}
        model._internal_dict = type(model.config)(kept)
        return model


def register() -> None:
    """Make diffusers load `mxfp4-pack-quantized` checkpoints with this package."""
    CONFIGS[METHOD] = MXFP4Config
    QUANTIZERS[METHOD] = MXFP4Quantizer


def quantize_transformer(
    model: Any, activations: str | None = None, scale_rule: str = "even", ignore: Sequence[str] = DENSE
) -> Any:
    """Pack the linear layers of a transformer, a layer at a time.

    Args:
        model: changed in place; not quantized yet.
        activations: None for W4A16, "mxfp4" for W4A4.
        scale_rule: how a block's scale is chosen, see `quant.mxfp4.format.quantize`.
        ignore: names of layers that stay dense, or `re:` and an expression.

    Returns:
        The model.

    Raises:
        ValueError: it is quantized already, or a layer's width is not a multiple of 32.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantized already")
    config = quantization_config(activations, ignore)
    scheme = read_scheme(config, type(model).__name__)
    groups = {unit.name: scheme.group_of(unit.name, unit.classes) for unit in units(model)}
    chosen = {name: group for name, group in groups.items() if group is not None}
    pack(model, chosen, lambda old, group: MXFP4Linear.from_linear(old, group.activations, scale_rule))  # type: ignore[arg-type]
    model.hf_quantizer = MXFP4Quantizer(MXFP4Config(config))
    model.is_quantized, model.quantization_method = True, METHOD
    model.register_to_config(quantization_config=model.hf_quantizer.quantization_config)
    return model
