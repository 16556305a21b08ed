"""Checkpoints to load: by compressed-tensors itself, and small models to make them of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def tiny_llama(**overrides: object) -> LlamaForCausalLM:
    """Two layers of random weights, with biases in attention."""
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": False,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides})).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # Of the size that weights have after training, so that a token's logits differ.
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
    return model


def write_with_compressed_tensors(
    model: PreTrainedModel,
    folder: Path,
    presets: dict[str, list[str]],
    ignore: Sequence[str] = ("lm_head",),
    **save: object,
) -> None:
    """Quantize a model in place and save it, with compressed-tensors alone.

    Args:
        model: in any dtype.
        folder: where to.
        presets: "MXFP4" (W4A4), "MXFP4A16" or any other that needs no calibration -> the targets it is for.
        ignore: as compressed-tensors takes it.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    config = QuantizationConfig(
        config_groups=presets, ignore=list(ignore), quantization_status="initialized", format="mxfp4-pack-quantized"
    )
    apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        blocks = module.weight.detach().unflatten(-1, (module.weight_scale.shape[-1], -1))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def configure(folder: Path, change: object) -> None:
    """Edit the quantization config in a folder's config.json: `change(config)`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def prompt(vocabulary: int, tokens: int = 23) -> torch.Tensor:
    return torch.randint(3, vocabulary, (2, tokens))
