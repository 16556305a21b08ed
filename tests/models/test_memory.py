"""What memory a plan says a cache takes, beside caches that are there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from xpu_ports import models

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NAMES = ["zamba2", "kimi_linear", "deepseek_v4"]


def tensors_of(value: Any, seen: set[int]) -> int:
    """Bytes of the tensors that an object holds, each once."""
    if isinstance(value, Tensor):
        new = id(value) not in seen
        seen.add(id(value))
        return value.numel() * value.element_size() if new else 0
    if isinstance(value, dict):
        return sum(tensors_of(v, seen) for v in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensors_of(v, seen) for v in value)
    return 0


def held(cache: Any) -> int:
    seen: set[int] = set()
    return sum(tensors_of(vars(layer), seen) for layer in cache.layers)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_caches_take_what_the_plan_says(name: str) -> None:
    """Of a batch in bf16, at a length that is no multiple of anything, and after a step more."""
    dtype = torch.bfloat16
    _, classes = models.PORTS[name]
    port = getattr(importlib.import_module(f"xpu_ports.models.{name}"), classes["AutoModelForCausalLM"])
    model = port.from_pretrained(CHECKPOINTS / f"tiny-{name.replace('_', '-')}", dtype=dtype).eval()
    memory = importlib.import_module(f"xpu_ports.models.{name}.memory")
    ids = torch.randint(3, 100, (3, 53))
    cache = model(ids, use_cache=True).cache
    assert held(cache) == memory.cache_bytes(model.config, 3, 53, dtype)
    model(ids[:, :1], cache=cache, use_cache=True)
    assert held(cache) == memory.cache_bytes(model.config, 3, 54, dtype)


class Alive(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                at, size = storage.data_ptr(), storage.nbytes()
                if at in inputs or at in self._known or size == 0:
                    continue
                self._known.add(at)
                self.bytes += size
                self.most = max(self.most, self.bytes)
                weakref.finalize(storage, self._gone, at, size)
        return out

    def _gone(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.bytes -= size


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_activations_are_of_the_right_size(name: str) -> None:
    """An estimate for kernels: the reference ops, which keep more, take a few times as much and no less."""
    _, classes = models.PORTS[name]
    port = getattr(importlib.import_module(f"xpu_ports.models.{name}"), classes["AutoModel"])
    model = port.from_pretrained(CHECKPOINTS / f"tiny-{name.replace('_', '-')}", dtype=torch.bfloat16).eval()
    memory = importlib.import_module(f"xpu_ports.models.{name}.memory")
    ids = torch.randint(3, 100, (1, 256))
    with Alive() as alive:
        model(ids, use_cache=False)
    estimate = memory.activation_bytes(model.config, 1, 256, torch.bfloat16)
    assert 1 <= alive.most / estimate <= 6
