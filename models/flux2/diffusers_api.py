"""The one import of diffusers: everything else in this folder takes its names from here."""

from __future__ import annotations

try:
    from diffusers import AutoencoderKLFlux2, DiffusionPipeline, __version__
    from diffusers import Flux2Transformer2DModel as DiffusersFlux2Transformer2DModel
    from diffusers.configuration_utils import register_to_config
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint
    from diffusers.models.transformers.transformer_flux2 import (
        Flux2AttnProcessor,
        Flux2KVAttnProcessor,
        Flux2KVCache,
        Flux2KVLayerCache,
        Flux2KVParallelSelfAttnProcessor,
        Flux2ParallelSelfAttnProcessor,
        Flux2Transformer2DModelOutput,
    )
    from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as CONFIGS
    from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING as QUANTIZERS
    from diffusers.quantizers.base import DiffusersQuantizer
    from diffusers.utils import apply_lora_scale
    from diffusers.utils.logging import disable_progress_bar
except ImportError as error:
    raise ImportError(
        "FLUX.2 runs in diffusers' pipelines, and there is no diffusers with FLUX.2 here: "
        f"pip install 'xpu-ports[flux2]' ({error})"
    ) from error

__all__ = [
    "CONFIGS",
    "QUANTIZERS",
    "AutoencoderKLFlux2",
    "DiffusersFlux2Transformer2DModel",
    "DiffusersQuantizer",
    "DiffusionPipeline",
    "Flux2AttnProcessor",
    "Flux2KVAttnProcessor",
    "Flux2KVCache",
    "Flux2KVLayerCache",
    "Flux2KVParallelSelfAttnProcessor",
    "Flux2ParallelSelfAttnProcessor",
    "Flux2Transformer2DModelOutput",
    "__version__",
    "apply_lora_scale",
    "disable_progress_bar",
    "load_single_file_checkpoint",
    "register_to_config",
    "resolve_tp_shard_specs",
]
