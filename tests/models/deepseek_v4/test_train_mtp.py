"""Training the layer that guesses: it learns, the model does not change, and files hold both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4Config

from tests.models.deepseek_v4.test_mtp import NARROW
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM, train_mtp

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.txt"
WITHOUT = {key: value for key, value in NARROW.items() if key != "num_nextn_predict_layers"}


def make() -> DeepseekV4ForCausalLM:
    torch.manual_seed(2)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**WITHOUT, num_nextn_predict_layers=0)).eval()
    model.model.layers[0].mlp.gate.tid2eid.data = torch.stack([torch.randperm(6)[:3] for _ in range(96)])
    return model


@pytest.fixture(scope="module")
def text() -> Tensor:
    return torch.randint(3, 96, (3000,), generator=torch.Generator().manual_seed(0))


def test_it_learns_and_the_model_does_not_change(text):
    model = make()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    layer = train_mtp.add_layer(model)
    # A copy of the last layer, which is of its kind; the norm and the head's mix are the model's.
    last = model.model.layers[-1].state_dict()
    own = layer.state_dict()
    assert all(torch.equal(own[key], t) for key, t in last.items())
    assert torch.equal(layer.norm.weight, model.model.norm.weight)
    assert torch.equal(layer.hc_head.hc_fn, model.model.hc_head.hc_fn)
    windows = text[:480].view(20, 24)
    kl, _ = train_mtp.evaluate(model, windows, 7)
    parts = [train_mtp.evaluate(model, part, 20)[0] * len(part) / 20 for part in windows.split(7)]
    assert kl == pytest.approx(sum(parts), rel=1e-5)
    assert train_mtp.train(model, text, steps=50, batch=8, window=24, rate=5e-3) == 50
    assert train_mtp.evaluate(model, windows, 20)[0] < 0.75 * kl
    for key, t in model.state_dict().items():
        assert key.startswith("mtp.") or torch.equal(t, before[key]), key


def test_what_is_to_be_learned(text):
    """The model's own distribution of the token after the next, at the same place."""
    model = make()
    train_mtp.add_layer(model)
    ids = text[:24][None]
    streams, truth = train_mtp.lesson(model, ids)
    logits, _ = model.guess(ids[:, 1:], streams)
    assert logits.shape == truth.shape
    expected = model(ids).logits[:, 1:].log_softmax(-1)
    assert torch.equal(truth, expected)
    assert torch.equal(streams, model(ids, output_hidden_states=True).hidden_states[-1][:, :-1])


@pytest.mark.parametrize("sharded", [False, True])
def test_files(tmp_path, text, sharded):
    """The checkpoint's tensors, bit for bit and under their own names, and the layer's beside them."""
    source, out = tmp_path / "source", tmp_path / "out"
    make().to(torch.bfloat16).save_pretrained(source, max_shard_size="20KB" if sharded else "1GB")
    assert (source / "model.safetensors.index.json").exists() == sharded
    model = DeepseekV4ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    train_mtp.add_layer(model)
    train_mtp.train(model, text, steps=1, batch=1, window=24, rate=1e-3)
    train_mtp.save(source, model, out, {"steps": 1})
    held, kept = read(out), read(source)
    assert all(torch.equal(held.pop(key), t) for key, t in kept.items())
    assert all(key.startswith("mtp.0.") for key in held)
    # As published: mixes and sinks in fp32, projections in the checkpoint's dtype.
    wide = ("hc_attn_fn", "attn.attn_sink", "ffn.gate.bias")
    assert all(held[f"mtp.0.{name}"].dtype == torch.float32 for name in wide)
    assert held["mtp.0.e_proj.weight"].dtype == held["mtp.0.ffn.experts.0.w1.weight"].dtype == torch.bfloat16
    again = DeepseekV4ForCausalLM.from_pretrained(out, dtype=torch.float32, mtp=True)
    for key, t in model.mtp.state_dict().items():
        assert (again.mtp.state_dict()[key] - t).abs().max() <= 2**-8 * t.abs().max(), key
    assert json.loads((out / "training_mtp.json").read_text()) == {"steps": 1}


def read(folder: Path) -> dict[str, Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def test_the_command(tmp_path, capsys):
    """On a checkpoint that has such a layer already: it is trained anew."""
    text = tmp_path / "text.txt"
    text.write_text(HELDOUT.read_text()[:3000])
    out = tmp_path / "out"
    sizes = ["--steps", "2", "--batch", "2", "--window", "32"]
    train_mtp.main([str(CHECKPOINT), "--text", str(text), "--heldout", str(text), "--out", str(out), *sizes])
    assert "after: KL" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    held, shipped = read(out), read(CHECKPOINT)
    assert held.keys() == shipped.keys()
    assert all(torch.equal(held[key], t) for key, t in shipped.items() if not key.startswith("mtp."))
