"""Rules for other layouts: both ways, with strict loading around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from xpu_ports.common.conversion import Fuse, KeyPattern, Rename, Split
from xpu_ports.common.weights import CheckpointError, StrictLoading

# More than ten, so that numeric order is not the order of the names.
E, D = 12, 4


class MixedConfig(PreTrainedConfig):
    model_type = "mixed"
    tie_word_embeddings: bool = False


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, bias=False)
        self.gate_up = nn.Parameter(torch.zeros(E, 2 * D, D))
        self.down = nn.Parameter(torch.zeros(E, D, D))
        self.conv = nn.Parameter(torch.zeros(4 * D, 1, 3))
        self.q = nn.Parameter(torch.zeros(2 * D, D))
        self.k = nn.Parameter(torch.zeros(D, D))


class MixedPreTrained(StrictLoading):
    config_class = MixedConfig
    base_model_prefix = "model"
    # The files' layout has no "model." and other names.
    _weight_rules = (
        Rename("embed.weight", "model.embed.weight"),
        Rename("layers.{i}.attn_norm.{rest...}", "model.layers.{i}.norm.{rest...}"),
        Rename("layers.{i}.ln.{rest...}", "model.layers.{i}.norm.{rest...}", saved=False),
        Fuse(
            ("layers.{i}.experts.{e}.w1", "layers.{i}.experts.{e}.w3"), "model.layers.{i}.gate_up", dim=1, stack="e"
        ),
        Fuse(("layers.{i}.experts.{e}.w2",), "model.layers.{i}.down", stack="e"),
        Fuse(("layers.{i}.q_conv", "layers.{i}.k_conv"), "model.layers.{i}.conv", shares=(3, 1)),
        Split("layers.{i}.qk", ("model.layers.{i}.q", "model.layers.{i}.k"), shares=(2, 1)),
    )  # fmt: skip


class MixedModel(MixedPreTrained):
    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(6, D)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.post_init()


class MixedHead(MixedPreTrained):
    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.model = MixedModel(config)
        self.head = nn.Linear(D, 6, bias=False)
        self.post_init()


@pytest.fixture
def model() -> MixedHead:
    model = MixedHead(MixedConfig())
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def files_of(model: MixedHead) -> dict[str, Tensor]:
    """The same weights in the files' layout, written out by hand."""
    files = {"embed.weight": model.model.embed.weight, "head.weight": model.head.weight}
    for i, layer in enumerate(model.model.layers):
        files[f"layers.{i}.attn_norm.weight"] = layer.norm.weight
        files[f"layers.{i}.q_conv"] = layer.conv[: 3 * D]
        files[f"layers.{i}.k_conv"] = layer.conv[3 * D :]
        files[f"layers.{i}.qk"] = torch.cat([layer.q, layer.k])
        for e in range(E):
            files[f"layers.{i}.experts.{e}.w1"] = layer.gate_up[e, :D]
            files[f"layers.{i}.experts.{e}.w3"] = layer.gate_up[e, D:]
            files[f"layers.{i}.experts.{e}.w2"] = layer.down[e]
    return {key: t.detach().clone() for key, t in files.items()}


def write(folder: Path, model: MixedHead, tensors: dict[str, Tensor]) -> Path:
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_files_in_the_rules_layout_load(tmp_path: Path, model: MixedHead) -> None:
    assert same(MixedHead.from_pretrained(write(tmp_path, model, files_of(model))), model)


def test_files_in_the_models_own_layout_load_too(tmp_path: Path, model: MixedHead) -> None:
    assert same(MixedHead.from_pretrained(write(tmp_path, model, dict(model.state_dict()))), model)


def test_names_that_saving_does_not_write_load(tmp_path: Path, model: MixedHead) -> None:
    tensors = {key.replace("attn_norm", "ln"): t for key, t in files_of(model).items()}
    assert same(MixedHead.from_pretrained(write(tmp_path, model, tensors)), model)


def test_both_names_of_a_tensor_at_once(tmp_path: Path, model: MixedHead) -> None:
    tensors = files_of(model)
    tensors["layers.1.ln.weight"] = tensors["layers.1.attn_norm.weight"].clone()
    with pytest.raises(CheckpointError) as error:
        MixedHead.from_pretrained(write(tmp_path, model, tensors))
    assert error.value.expected == "one tensor for model.layers.1.norm.weight"


@pytest.mark.parametrize("source", ["fresh", "rules", "own", "other names"])
def test_saving_writes_the_rules_layout(tmp_path: Path, model: MixedHead, source: str) -> None:
    loaded = model
    if source != "fresh":
        tensors = dict(model.state_dict()) if source == "own" else files_of(model)
        if source == "other names":
            tensors = {key.replace("attn_norm", "ln"): t for key, t in tensors.items()}
        loaded = MixedHead.from_pretrained(write(tmp_path, model, tensors))
    loaded.save_pretrained(tmp_path / "saved")
    saved, expected = load_file(tmp_path / "saved" / "model.safetensors"), files_of(model)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in saved)


def test_the_base_model_loads_files_in_the_rules_layout(tmp_path: Path, model: MixedHead) -> None:
    tensors = files_of(model)
    tensors.pop("head.weight")
    assert same(MixedModel.from_pretrained(write(tmp_path, model, tensors)), model.model)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str, str]] = {
    # What is done to the files, then: the key named, and what is expected, and found.
    "part-missing": (
        lambda t: t.pop("layers.1.k_conv"), "layers.1.q_conv", "parts of model.layers.1.conv",
        "there is no layers.1.k_conv",
    ),
    "all-of-one-kind-missing": (
        lambda t: [t.pop(f"layers.0.experts.{e}.w3") for e in range(E)], "layers.0.experts.0.w1",
        "parts of model.layers.0.gate_up", "there is no layers.0.experts.*.w3",
    ),
    "one-to-stack-missing": (
        lambda t: t.pop("layers.0.experts.1.w2"), "layers.0.experts.0.w2", "shape [12, 4, 4]", "[11, 4, 4]",
    ),
    "shares": (
        lambda t: t.update({"layers.0.q_conv": torch.zeros(8, 1, 3), "layers.0.k_conv": torch.zeros(8, 1, 3)}),
        "layers.0.k_conv", "parts of model.layers.0.conv", "sizes [8, 8] along dimension 0, expected them as (3, 1)",
    ),
    "whole-that-does-not-divide": (
        lambda t: t.update({"layers.0.qk": torch.zeros(4, 4)}), "layers.0.qk", "parts of model.layers.0.q",
        "size 4 along dimension 0 does not divide as (2, 1)",
    ),
    "both-layouts": (
        lambda t: t.update({"model.layers.0.conv": torch.zeros(4 * D, 1, 3)}), "model.layers.0.conv",
        "one tensor for model.layers.0.conv", "two, the other is layers.0.k_conv",
    ),
    "no-rule": (
        lambda t: t.update({"layers.0.attn_norms.weight": torch.zeros(1)}), "layers.0.attn_norms.weight",
        "no such tensor in MixedHead", "float32 [1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(tmp_path: Path, model: MixedHead, fault: str) -> None:
    change, key, expected, found = FAULTS[fault]
    tensors = files_of(model)
    change(tensors)
    with pytest.raises(CheckpointError) as caught:
        MixedHead.from_pretrained(write(tmp_path, model, tensors))
    error = caught.value
    assert (error.file, error.key, error.expected, error.found) == (
        str(tmp_path / "model.safetensors"), key, expected, found,
    )  # fmt: skip


def test_a_rule_that_makes_what_the_model_does_not_have(
    tmp_path: Path, model: MixedHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [rule for rule in MixedHead._weight_rules if not isinstance(rule, Split)]
    rules.append(Split("layers.{i}.qk", ("model.layers.{i}.q", "model.layers.{i}.v"), shares=(2, 1)))
    monkeypatch.setattr(MixedHead, "_weight_rules", tuple(rules))
    with pytest.raises(CheckpointError, match=r"layers\.0\.qk: expected parts of MixedHead, found model\.layers\.0\.v"):
        MixedHead.from_pretrained(write(tmp_path, model, files_of(model)))


def test_patterns_match_whole_keys() -> None:
    pattern = KeyPattern("a.{i}.b.{rest...}")
    assert pattern.match("a.10.b.c.d") == {"i": "10", "rest": "c.d"}
    assert pattern.fill({"i": "10", "rest": "c.d"}) == "a.10.b.c.d"
    for key in ("a.1.2.b.c", "xa.1.b.c", "a.1.b.", "a.1.b", "a.1xb.c", "a..b.c"):
        assert pattern.match(key) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("a.{i}", "b"),
        lambda: Rename("a.{i}", "b.{j}"),
        lambda: Rename("a.{i}.{i}", "b.{i}"),
        lambda: Fuse(("a.{i}", "b"), "c.{i}"),
        lambda: Fuse(("a.{e}",), "c"),
        lambda: Fuse(("a.{e}",), "c.{e}", stack="e"),
        lambda: Fuse(("a", "b"), "c", shares=(1, 2, 3)),
        lambda: Split("a.{i}", ("b.{i}", "c")),
    ],
    ids=["lost", "renamed", "twice", "part-lacks", "whole-lacks", "stack-in-whole", "shares", "split"],
)
def test_rules_that_cannot_be_read_both_ways(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"names in braces|stands in it twice|parts, 3 shares"):
        make()
