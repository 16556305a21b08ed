"""Models with random weights that are the same on any number of ranks, and times that all ranks agree on."""

from __future__ import annotations

import zlib
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig

from xpu_ports.common.parallel import Part, blocks


def random_model(model_class: Any, config: Any, device: torch.device | None = None) -> Any:
    """A model with random weights, or this rank's part of it: the same numbers on any number of ranks.

    Weights are drawn as the model draws them, a module at a time, from a seed that its name gives; of several ranks
    each draws all of a module and keeps its part. Beside what it keeps it holds one module's weights at most.

    Args:
        model_class: with a plan for several ranks.
        config: its `dtype` is the weights'.
        device: where a whole model goes; None for a rank's part, which goes to the rank's device.
    """
    with torch.device("meta"):
        whole = model_class._from_config(deepcopy(config))
    whole.tie_weights()
    names = {name for name, _ in whole.named_parameters()}
    model = whole
    if device is None:
        wanted, device, meshes = model_class.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
        with torch.device("meta"):
            model = model_class._from_config(deepcopy(config))
        model = model_class.maybe_distribute_model(model, wanted, meshes)
        model.to_empty(device=device)
        model.tie_weights()
    seed = torch.initial_seed()
    for path, source in whole.named_modules():
        source.to_empty(device=device, recurse=False)
        torch.manual_seed(zlib.crc32(path.encode()))
        model._init_weights(source)
        if model is not whole:
            _keep(model, model.get_submodule(path), path, source, names)
            source.to_empty(device=torch.device("meta"), recurse=False)
    torch.manual_seed(seed)
    model.tie_weights()
    return model.requires_grad_(False).eval()


@torch.no_grad()
def _keep(model: Any, module: nn.Module, path: str, source: nn.Module, names: set[str]) -> None:
    """Copy a module's own parameters, or the rank's parts of them, and its buffers."""
    for last, own in module.named_parameters(recurse=False, remove_duplicate=False):
        name = f"{path}.{last}".lstrip(".")
        # What is tied has the numbers of its first name.
        if name in names:
            given = getattr(source, last)
            copy_part(own, given, model._parts.get(name, Part(tuple(given.shape), {})))
    for last, buffer in module.named_buffers(recurse=False):
        buffer.copy_(getattr(source, last))


def copy_part(own: Tensor, whole: Tensor, part: Part) -> None:
    """Copy a rank's part of a tensor into `own`."""
    if part.zero:
        own.zero_()
        return
    for at, mine in blocks(part):
        own[mine].copy_(whole[at])


def slowest(seconds: float, model: Any) -> float:
    """The longest time of all ranks, which they then decide alike by; the time itself of a model on one."""
    ranks = getattr(model, "_ranks", None)
    if ranks is None:
        return seconds
    t = torch.tensor([seconds], dtype=torch.float32, device=model.device)
    dist.all_reduce(t, op=dist.ReduceOp.MAX, group=ranks)
    return float(t)
