"""Layers on several devices, as `device_map` spreads them: each one's tensors, shared weights and cache are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

from xpu_ports.common.placement import place_shared_weights
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.zamba2 import Zamba2ForCausalLM, modeling_zamba2

MODELS = ("zamba2", "kimi_linear", "deepseek_v4")
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


@pytest.mark.parametrize("how", ["turns", pytest.param("halves", marks=pytest.mark.full)])
def test_two_cards(how: str) -> None:
    """A tensor that is on the other card is an error there."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices that are written in Python")
    command = [sys.executable, Path(__file__).parent / "two_cards.py", how, *MODELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(MODELS)
    for caches in map(json.loads, lines):
        assert {card for card, _ in caches} == {"card:0", "card:1"}
        assert all(devices == [card] for card, devices in caches)


def test_shared_blocks_are_placed_when_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    monkeypatch.setattr(modeling_zamba2, "place_shared_weights", placed.append)
    model, info = Zamba2ForCausalLM.from_pretrained(CHECKPOINTS / "tiny-zamba2", output_loading_info=True)
    assert placed == [model]
    assert not info["missing_keys"]


def test_a_copy_for_each_device() -> None:
    """Three of four layers share a weight; what is offloaded, or on its own device, is left alone."""
    model: Any = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    for name in "bcd":
        model[name].weight = model["a"].weight
    place_shared_weights(model)
    model.hf_device_map = {"a": "cpu", "b": "meta", "c": "meta", "d": "disk"}
    place_shared_weights(model)
    a, b, c, d = (model[name].weight for name in "abcd")
    assert b is c
    assert b.is_meta
    assert a is d
    assert not a.is_meta


def test_deepseek_v4_offloaded_to_disk(tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS / "tiny-deepseek-v4"
    whole = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    here = [name for name, _ in whole.named_children() if name != "model"]
    here += [f"model.{name}" for name, _ in whole.model.named_children() if name != "layers"]
    layers = range(len(whole.model.layers))
    device_map = dict.fromkeys(here, "cpu") | {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in layers}
    model = DeepseekV4ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, device_map=device_map, offload_folder=tmp_path
    )
    assert any(p.is_meta for p in model.parameters())
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, whole.generate(ids, max_new_tokens=6, do_sample=False))
