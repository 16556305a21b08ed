"""DeepSeek-V4's two rotations: layers with compressed entries turn more slowly than those without, by YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def frequencies(parameters: Mapping[str, Any], width: int) -> Tensor:
    """The angle of each pair of columns from one position to the next, [width / 2], fp32.

    With YaRN (arXiv:2309.00071, section 3.2) pairs that turn fewer than beta_slow times in the context trained on are
    divided by the factor, those that turn more than beta_fast times are left alone. Neither cos and sin nor the scores
    are scaled by YaRN's mscale: this model was trained without.

    Args:
        parameters: rope_theta, rope_type "default" or "yarn", and for the latter factor,
            original_max_position_embeddings, beta_fast and beta_slow.
        width: columns that are rotated.
    """
    theta = parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    if parameters["rope_type"] == "default":
        return plain
    trained = parameters["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """The pair that turns so often in the context trained on."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(parameters.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair(parameters.get("beta_slow") or 1)), width - 1)
    slow = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / parameters["factor"] * slow + plain * (1 - slow)


class Rotation:
    """cos and sin of positions. No buffer: frequencies stay fp32 whatever the model's dtype is made."""

    def __init__(self, parameters: Mapping[str, Any], width: int) -> None:
        self.parameters, self.width = dict(parameters), width
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, T, width / 2], fp32, of positions [B, T]."""
        angles = positions[..., None].float() * self.frequencies(positions.device)
        return angles.cos(), angles.sin()

    def frequencies(self, device: torch.device) -> Tensor:
        """The function of this name, on a device: made once."""
        if device not in self._frequencies:
            with torch.device("cpu"):
                self._frequencies[device] = frequencies(self.parameters, self.width).to(device)
        return self._frequencies[device]
