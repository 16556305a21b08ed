"""The shape of the released Kimi Linear checkpoints, to build a model of without downloading one.

Source: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct; the Base model's says the same.
"""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig

# Layers with full attention, counted from 0: every fourth, and the last, which ends the pattern early.
FULL_ATTENTION = (3, 7, 11, 15, 19, 23, 26)
LAYERS = 27


def layout_config(**overrides: Any) -> KimiLinearConfig:
    """The config of the 48B, whose other fields are the config class's defaults.

    Args:
        overrides: fields to set instead, to make it narrower.
    """
    kinds = ["full_attention" if i in FULL_ATTENTION else "linear_attention" for i in range(LAYERS)]
    return KimiLinearConfig(**{"num_hidden_layers": LAYERS, "layer_types": kinds, **overrides})
