"""DeepSeek-V4's two rotations: layers with compressed entries turn more slowly than those without, by YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


class Positions:
    """Places and angles of new tokens and of the windows that they close, for layers of all kinds, in few launches.

    A token is a window of one. No buffers: frequencies stay fp32 whatever the model's dtype is made.
    """

    # Tables of no more tokens are kept: a decode step's, and those of what is guessed and checked.
    KEPT_TOKENS = 64

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]], width: int, rates: Mapping[str, int]) -> None:
        """Hold what a config says.

        Args:
            parameters: of the rotations "main" and "compress", as `frequencies` takes them.
            width: columns that are rotated.
            rates: tokens of a window by kind of layer.
        """
        self.parameters, self.width, self.rates = dict(parameters), width, dict(rates)
        self._tables: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, start: Tensor, end: Tensor, T: int, kinds: Sequence[str]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of T tokens by themselves, turned as in "main" and as in "compress", then of windows of each of the kinds.

        Args:
            start: [B], int64: tokens of each row before these.
            end: [B], int64: its tokens with those of the T that are its own, which stand first.
            T: new tokens of a row, at most.
            kinds: of layers, whose rates are known.

        Returns:
            For each of them (windows, cos, sin): [B, NW], int64, with NW = ceil(T / rate), from the one that the first
            new token is in, -1 those that are not closed; [B, NW, width / 2] each, fp32, of their first tokens.
        """
        sizes = [T, T, *(-(-T // self.rates[kind]) for kind in kinds)]
        ratios, offsets, turns = self._table(sizes, tuple(kinds), start.device)
        window = start // ratios  # [windows, B]
        if T > 1:
            window = window + offsets
        first = window * ratios
        # In place, where `first` has been made of it.
        window = window.masked_fill_(first + ratios > end, -1).t().split(sizes, dim=1)
        angles = first[..., None].float() * turns  # [windows, B, width / 2]
        cos, sin = (t.transpose(0, 1).split(sizes, dim=1) for t in (angles.cos(), angles.sin()))
        return list(zip(window, cos, sin, strict=True))

    def _table(self, sizes: list[int], kinds: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of each window, [windows, 1], its number, [windows, 1], and frequencies [windows, 1, width / 2]."""
        key = sizes[0], kinds, device
        if key in self._tables:
            return self._tables[key]
        rates = [1, 1, *(self.rates[kind] for kind in kinds)]
        names = ["main", *["compress"] * (1 + len(kinds))]
        with torch.device("cpu"):
            turns = {name: frequencies(self.parameters[name], self.width).to(device) for name in set(names)}
        ratios = torch.cat([torch.full((n, 1), rate, device=device) for n, rate in zip(sizes, rates, strict=True)])
        offsets = torch.cat([torch.arange(n, device=device)[:, None] for n in sizes])
        angles = torch.cat([turns[name].expand(n, 1, -1) for n, name in zip(sizes, names, strict=True)])
        if sizes[0] <= self.KEPT_TOKENS:
            self._tables[key] = ratios, offsets, angles
        return ratios, offsets, angles
