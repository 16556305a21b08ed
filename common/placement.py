"""Models whose layers are on several devices, as `device_map` spreads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def place_shared_weights(model: Any) -> None:
    """Give each device a copy of the weights that its layers share with those of other devices.

    accelerate ties such weights again after it has moved layers, to the first layer's, which then is on another device
    than the others' inputs. Offloaded weights, which hooks bring, stay as they are.

    Args:
        model: with `hf_device_map`, or on one device, where nothing is done; changed in place.
    """
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    if len(set(places.values())) < 2:
        return
    copies: dict[tuple[int, torch.device], nn.Parameter] = {}
    for name, shared in list(model.named_parameters(remove_duplicate=False)):
        place = _place(places, name)
        if shared.is_meta or place in (None, "disk"):
            continue
        device = torch.device(place)
        if device.type == shared.device.type and device.index in (None, shared.device.index):
            continue
        key = id(shared), device
        if key not in copies:
            copies[key] = nn.Parameter(shared.data.to(device), requires_grad=shared.requires_grad)
        path, _, last = name.rpartition(".")
        model.get_submodule(path)._parameters[last] = copies[key]


def _place(places: dict[str, Any], name: str) -> Any:
    """Of the module in the map that a parameter is in; the map's names do not overlap."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name)
