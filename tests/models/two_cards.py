"""Run by the tests in a process of its own: the language models with layers on two cards, neither of which is there.

python two_cards.py turns|halves MODEL_TYPE...

The cards are a device of torch's that has no kernels, with fake tensors on it, which have shapes, dtypes and a device,
and refuse what mixes two. accelerate's hooks run as they are; only what moves a weight is replaced. Prints a line a
model: the device of each layer's cache, by the map and by the tensors in it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.hooks
import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers.cache_utils import DynamicLayer

from xpu_ports import models
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.placement import place_shared_weights

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
CARDS = ("card:0", "card:1")


def place(module: Any, name: str, device: Any, *_: object, tied_params_map: Any = None, **__: object) -> None:
    """accelerate's `set_module_tensor_to_device`, for fake tensors: those that are tied stay so on a device."""
    path, _, last = name.rpartition(".")
    module = module.get_submodule(path)
    old = getattr(module, last)
    if old is None or old.device == torch.device(device):
        return
    known = (tied_params_map or {}).get(id(old), {})
    if device not in known:
        known[device] = nn.Parameter(old.data.to(device), False) if last in module._parameters else old.to(device)
    (module._parameters if last in module._parameters else module._buffers)[last] = known[device]


def begin(layer: Any, keys: Tensor, values: Tensor) -> None:
    """transformers' `lazy_initialization`, which makes an empty tensor in a way that fake ones are not made."""
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values = keys.new_empty(0), values.new_empty(0)
    layer.is_initialized = True


def spread(model: Any, how: str) -> dict[str, str]:
    """Layers on the cards by turns or by halves; what is before them on the first, behind them on the last."""
    n = len(model.model.layers)
    device_map = {f"model.layers.{i}": CARDS[i % 2 if how == "turns" else 2 * i // n] for i in range(n)}
    for name, _ in model.model.named_children():
        if name != "layers":
            device_map[f"model.{name}"] = CARDS[name in ("norm", "final_layernorm", "hc_head")]
    device_map["lm_head"] = CARDS[not model.config.tie_word_embeddings]
    return device_map


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def main(how: str, *model_types: str) -> None:
    _setup_privateuseone_for_python_backend("card")
    accelerate.hooks.set_module_tensor_to_device = place
    FakeTensor.data_ptr = lambda self: id(self)
    DynamicLayer.lazy_initialization = begin
    for model_type in model_types:
        print(json.dumps(run(how, model_type)))


def run(how: str, model_type: str) -> list[tuple[str, list[str]]]:
    """(card by the map, devices of its cache's tensors) of each layer, after a few calls."""
    _, classes = models.PORTS[model_type]
    port = getattr(importlib.import_module(f"xpu_ports.models.{model_type}"), classes["AutoModelForCausalLM"])
    config = port.config_class.from_pretrained(CHECKPOINTS / f"tiny-{model_type.replace('_', '-')}")
    if model_type == "zamba2":
        # Both places of the shared block have the same weights.
        config.num_mem_blocks = 1
    with FakeTensorMode(), torch.no_grad(), use_backend("reference"):
        model = port(config).eval().requires_grad_(False)
        device_map = spread(model, how)
        dispatch_model(model, device_map, main_device=CARDS[0], skip_keys=model._skip_keys_device_placement)
        model.hf_device_map = device_map
        place_shared_weights(model)

        def ids(tokens: int) -> Tensor:
            return torch.ones(2, tokens, dtype=torch.long, device=CARDS[0])

        # A prompt, a step, two tokens behind a past, and a step with padding.
        out = model(ids(7), use_cache=True)
        for tokens, mask in ((1, None), (2, None), (1, ids(11))):
            out = model(ids(tokens), cache=out.cache, use_cache=True, attention_mask=mask)
            assert out.logits.shape == (2, tokens, config.vocab_size)
    found = [sorted({str(t.device) for t in tensors(vars(layer))}) for layer in out.cache.layers]
    return [(device_map[f"model.layers.{i}"], devices) for i, devices in enumerate(found)]


if __name__ == "__main__":
    main(*sys.argv[1:])
