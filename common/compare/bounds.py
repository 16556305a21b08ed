"""What a model's accuracy may be, and the verdict on what it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Names of dtypes on the command line and in tables of bounds.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Bounds:
    """How far a port may be from its reference; None where nothing is promised.

    Shares are of the largest logit (`logits`, `decode`) and of what a layer adds to its stream (`layer`).
    """

    # Why these.
    why: str
    # Largest difference of logits.
    logits: float | None = None
    # Mean over tokens of KL(reference || port), in nats.
    kl: float | None = None
    # At least this share of tokens has the same likeliest token.
    top_1: float | None = None
    # Perplexity of the port over that of the reference, and its inverse, less 1.
    perplexity: float | None = None
    # Of 95% of tokens: the error of a layer that is fed the reference's input, beyond the rounding of the sum.
    layer: float | None = None
    # As `logits`, of cached steps beside one forward.
    decode: float | None = None
    # Beside the reference in fp32: the median KL divergence over that of the reference in the same dtype.
    yardstick: float | None = None
    # Diffusion: relative error of the latents after the last step, and the mean difference of the picture's values,
    # which go from 0 to 1.
    latents: float | None = None
    picture: float | None = None


@dataclass(frozen=True)
class Check:
    """A figure, and its bound where there is one."""

    figure: str
    value: float
    bound: float | None = None
    at_least: bool = False

    @property
    def within(self) -> bool:
        """Whether it is; NaN is within no bound."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound
