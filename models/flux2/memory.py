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
