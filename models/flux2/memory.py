"""What a picture of FLUX.2 needs beside the weights, from configs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Pixels of a token's side: the VAE's 8, and patches of 2 x 2.
TOKEN_PIXELS = 16


def activation_bytes(
    transformer: Mapping[str, Any], vae: Mapping[str, Any], side: int, text_tokens: int, dtype: torch.dtype
) -> int:
    """About what is alive at once in a step, or while the picture is decoded, whichever is more.

    Args:
        transformer, vae: their config.json.
        side: pixels of a square picture.
        text_tokens: tokens of text.
        dtype: of both.
    """
    D = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    tokens = (side // TOKEN_PIXELS) ** 2 + text_tokens
    # The stream and its norm; queries, keys, values, gate and up in one; rotated and attended; the joint output.
    inner = int(D * transformer.get("mlp_ratio", 3.0))
    single = 2 * D + 3 * D + 2 * inner + 3 * D + D + inner + D
    # The VAE's last blocks: a few feature maps of the picture's size.
    decoded = 3 * side * side * vae["block_out_channels"][0]
    return max(tokens * single, decoded) * dtype.itemsize


def step_operations(transformer: Mapping[str, Any], side: int, text_tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of the weights that a step reads, FLOP in its products), for one picture.

    Args:
        transformer: its config.json, or an entry of layouts.LAYOUTS.
        side: pixels of a square picture.
        text_tokens: tokens of text.
        dtype: of the weights.
    """
    D = transformer["num_attention_heads"] * transformer.get("attention_head_dim", 128)
    inner = int(D * transformer.get("mlp_ratio", 3.0))
    channels, time = transformer.get("in_channels", 128), transformer.get("timestep_guidance_channels", 256)
    double, single = transformer["num_layers"], transformer["num_single_layers"]
    out = transformer.get("patch_size", 1) ** 2 * (transformer.get("out_channels") or channels)
    picture = (side // TOKEN_PIXELS) ** 2
    tokens = picture + text_tokens
    # Elements of weights by the tokens that meet them. Of a double block, each of two streams has its own.
    joint = 4 * D * D + 3 * D * inner
    alone = D * (3 * D + 2 * inner) + (D + inner) * D
    embeddings = (1 + bool(transformer.get("guidance_embeds", True))) * (time * D + D * D)
    once = embeddings + (2 * 3 * 2 + 3 + 2) * D * D
    weights = {
        tokens: double * joint + single * alone,
        picture: channels * D + D * out,
        text_tokens: transformer["joint_attention_dim"] * D,
        1: once,
    }
    elements = sum(weights.values()) + double * joint
    products = sum(2 * count * many for count, many in weights.items())
    # Scores, and the sums of values that they weigh.
    attention = (double + single) * 4 * tokens * tokens * D
    return elements * dtype.itemsize, products + attention
