"""The shapes of the released DeepSeek-V4 checkpoints, to build a model of without downloading one.

Source: config.json of deepseek-ai/DeepSeek-V4-Flash and deepseek-ai/DeepSeek-V4-Pro.
"""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV4Config

YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
# Layers that the published checkpoints do not have in FP4, which is the experts' alone.
NOT_PACKED = (r"re:^(?!.*\.experts\.).*",)
# Tokens of an entry by layer, the last entry that of the MTP layer; all other fields are the config class's defaults.
LAYOUTS: dict[str, dict[str, Any]] = {
    "flash": {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
    # With the layer that guesses, so that decoding with it is measured too.
    "flash-6-layers": {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
        "n_routed_experts": 64,
        "mtp": True,
    },
    "pro": {
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "index_topk": 1024,
    },
}


def layout_config(name: str = "flash", **overrides: Any) -> DeepseekV4Config:
    """The config of a released model, or of the first layers of one with fewer experts, which fits a GPU.

    Args:
        name: "flash", "flash-6-layers" or "pro".
        overrides: fields to set instead, to make it narrower.

    Raises:
        ValueError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"no DeepSeek-V4 layout is named {name!r}; there are: {', '.join(LAYOUTS)}")
    return DeepseekV4Config(**{"rope_scaling": dict(YARN), **LAYOUTS[name], **overrides})
