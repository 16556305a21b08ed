"""Small models and calls for the tests of FLUX.2: ours beside diffusers' class, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from xpu_ports.models.flux2 import Flux2Transformer2DModel

TINY = str(Path(__file__).resolve().parents[3] / "checkpoints" / "tiny-flux2")
# As in the released models, small; the axes differ, so that none stands for another.
CONFIG: dict[str, Any] = dict(
    in_channels=8,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=64,
    num_attention_heads=2,
    joint_attention_dim=24,
    timestep_guidance_channels=32,
    axes_dims_rope=(16, 20, 12, 16),
    guidance_embeds=True,
)


def pair(**changed: Any) -> tuple[Flux2Transformer2DModel, nn.Module]:
    """Ours and diffusers', with the same random weights, no norm's weight among them 1."""
    theirs = diffusers.Flux2Transformer2DModel(**CONFIG | changed).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm_" in name and parameter.dim() == 1:
                parameter.normal_(1.0, 0.3)
    ours = Flux2Transformer2DModel(**CONFIG | changed).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def positions(side: int, text: int, references: int = 0) -> dict[str, Tensor]:
    """Ids of reference pictures, one of `side` x `side` tokens, and text, as pipelines make them."""
    pictures = [
        torch.cartesian_prod(torch.tensor([time]), torch.arange(side), torch.arange(side), torch.tensor([0]))
        for time in [*range(10, 10 * references + 1, 10), 0]
    ]
    zero = torch.tensor([0])
    return dict(img_ids=torch.cat(pictures), txt_ids=torch.cartesian_prod(zero, zero, zero, torch.arange(text)))


def call(model: nn.Module, B: int = 2, side: int = 3, text: int = 5, references: int = 0) -> dict[str, Any]:
    """Arguments of one step."""
    config = model.config
    S = side * side * (1 + references)
    return dict(
        hidden_states=torch.randn(B, S, config.in_channels),
        encoder_hidden_states=torch.randn(B, text, config.joint_attention_dim),
        timestep=torch.rand(B),
        guidance=1.0 + 3.0 * torch.rand(B) if config.guidance_embeds else None,
        **positions(side, text, references),
    )


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest value."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
