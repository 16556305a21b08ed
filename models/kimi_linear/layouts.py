"""The shape of the released Kimi Linear checkpoints, to build a model of without downloading one.

Source: config.json of moonshotai/Kimi-Linear-48B-A3B-Instruct; the Base model's says the same.
"""

from __future__ import annotations

from typing import Any

from transformers import KimiLinearConfig

# Layers with full attention, counted from 0: every fourth, and the last, which ends the pattern early.
FULL_ATTENTION = (3, 7, 11, 15, 19, 23, 26)
# Layers of each layout: the whole model, and the start of it, of which two copies fit a GPU.
LAYOUTS = {"48b": 27, "48b-8-layers": 8}


def layout_config(name: str = "48b", **overrides: Any) -> KimiLinearConfig:
    """The config of the 48B or of its first layers; all other fields are the config class's defaults.

    Args:
        name: "48b" or "48b-8-layers".
        overrides: fields to set instead, to make it narrower.

    Raises:
        ValueError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"no Kimi Linear layout is named {name!r}; there are: {', '.join(LAYOUTS)}")
    layers = LAYOUTS[name]
    kinds = ["full_attention" if i in FULL_ATTENTION else "linear_attention" for i in range(layers)]
    return KimiLinearConfig(**{"num_hidden_layers": layers, "layer_types": kinds, **overrides})
