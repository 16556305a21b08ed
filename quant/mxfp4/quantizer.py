"""transformers' side of MXFP4: the config object in `config.quantization_config`, and the quantizer of a load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from xpu_ports.common.checkpoint import CONFIG, CheckpointError, CheckpointFiles, read_headers
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear
from xpu_ports.quant.mxfp4.packing import SCALE, choose, move_ties, pack
from xpu_ports.quant.mxfp4.scheme import read_scheme


class MXFP4Config(QuantizationConfigMixin):
    """A checkpoint's `quantization_config`, kept as it stands in the file, so that saving writes it again."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = deepcopy(dict(values))
        self.quant_method = QuantizationMethod.COMPRESSED_TENSORS

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return deepcopy(self.values)

    def get(self, key: str, default: Any = None) -> Any:
        """transformers asks a config that it is given again as if it were the dict from the file."""
        return self.values.get(key, default)


class MXFP4Quantizer(HfQuantizer):
    """Loads layers packed and leaves them so; `model.dequantize()` makes them dense."""

    # transformers' word for: takes quantized checkpoints only.
    requires_calibration = True
    is_trainable = False
    # Names and shapes of a model's tensors are its file's, so `StrictLoading` can compare them.
    keeps_tensors = True
    quantization_config: MXFP4Config

    def __init__(self, quantization_config: MXFP4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._typed_scales = False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        scheme = read_scheme(self.quantization_config.values, _where(model.config.name_or_path))
        if not checkpoint_files:
            raise CheckpointError("state_dict", None, "files, to load packed weights from", "a state dict")
        # transformers gives the files of an index, whose own consistency is not looked at here.
        found = read_headers(CheckpointFiles(tuple(map(Path, checkpoint_files))))
        pack(model, choose(model, scheme, found))
        self._typed_scales = any(info.dtype == torch.float8_e8m0fnu for info in found.values())
        return model

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Scales with a dtype of their own are the same bytes."""
        return [WeightConverter([SCALE], SCALE, [_ScaleBytes()])] if self._typed_scales else []

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """No conversion of numbers for scales."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        return None if stored in ("F8_E8M0", torch.float8_e8m0fnu) else super().get_new_dtype(converter, param, dtype)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        if any(isinstance(module, MXFP4Experts) for module in model.modules()):
            raise NotImplementedError("packed experts are not made dense")
        if getattr(model, "_parts", None):
            raise NotImplementedError("layers that are divided among ranks are not made dense")
        made: dict[int, nn.Linear] = {}
        layers = model.named_modules(remove_duplicate=False)
        for name, layer in [(n, m) for n, m in layers if isinstance(m, MXFP4Linear)]:
            dense = layer.dequantize(dtype or model.dtype)
            # Layers that shared their bytes share their numbers.
            dense.weight = made.setdefault(id(layer.weight_packed), dense).weight
            model.set_submodule(name, dense)
        move_ties(model, ("",))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _ScaleBytes(ConversionOps):
    """float8_e8m0fnu to uint8 and, as files should have it, uint8 again."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        [tensors] = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: [tensor.view(torch.uint8)]}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def _where(name: str | os.PathLike | None) -> str:
    """The config.json of a local checkpoint; the name of one on the Hub."""
    name = os.fspath(name or "config")
    return os.path.join(name, CONFIG) if os.path.isdir(name) else name
