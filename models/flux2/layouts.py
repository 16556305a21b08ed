"""Sizes of the released models, for random weights: what their config.json says beside the defaults."""

from __future__ import annotations

from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    # FLUX.2 [dev], 32.2 B parameters: the defaults.
    "dev": {
        "num_layers": 8,
        "num_single_layers": 48,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
        "guidance_embeds": True,
    },
    # FLUX.2 [klein] 4B, and its base model.
    "klein-4b": {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
    # FLUX.2 [klein] 9B, and its base model.
    "klein-9b": {
        "num_layers": 8,
        "num_single_layers": 24,
        "num_attention_heads": 32,
        "joint_attention_dim": 12288,
        "guidance_embeds": False,
    },
}
