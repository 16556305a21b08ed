"""Models divided among ranks without a checkpoint, and times that all ranks agree on."""

from __future__ import annotations

import zlib
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig


def random_model(model_class: Any, config: Any) -> Any:
    """This rank's part of a model with random weights, on the rank's device; nothing is made that it does not keep.

    What ranks have whole is the same on all of them.

    Args:
        model_class: with a plan for several ranks.
        config: its `dtype` is the weights'.
    """
    wanted, device, meshes = model_class.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
    with torch.device("meta"):
        model = model_class._from_config(deepcopy(config))
    model = model_class.maybe_distribute_model(model, wanted, meshes)
    model.to_empty(device=device)
    model.tie_weights()
    model.init_weights()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                generator = torch.Generator(p.device).manual_seed(zlib.crc32(name.encode()))
                p.normal_(0.0, config.initializer_range, generator=generator)
    return model.requires_grad_(False).eval()


def slowest(seconds: float, model: Any) -> float:
    """The longest time of all ranks, which they then decide alike by; the time itself of a model on one."""
    ranks = getattr(model, "_ranks", None)
    if ranks is None:
        return seconds
    t = torch.tensor([seconds], dtype=torch.float32, device=model.device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=ranks)
    return float(t)
