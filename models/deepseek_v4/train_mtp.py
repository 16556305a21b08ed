"""Train the layer that guesses the token after the next, beside a model that stays as it is.

    python -m xpu_ports.models.deepseek_v4.train_mtp CHECKPOINT --text FILE --steps N --out FOLDER

The layer learns the model's own distribution of the token after the next, KL(model || layer), since that is what its
guesses are checked against. It starts as a copy of the model's last layer that takes the next token's embedding as one
more part of its streams, and is trained as it is used first: on the model's streams (arXiv:2412.19437, section 2.2,
with a depth of 1).

FOLDER gets the checkpoint's files, with `mtp.*` under their published names beside the others, which are not touched.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer

from xpu_ports.common.checkpoint import CONFIG, SAFETENSORS, SAFETENSORS_INDEX, checkpoint_files
from xpu_ports.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM, DeepseekV4MTPLayer

SHARD = "mtp.safetensors"
WARM_UP = 20


def add_layer(model: DeepseekV4ForCausalLM) -> DeepseekV4MTPLayer:
    """Give a model a layer to train, made of its last one; all else needs no gradient from here on."""
    model.requires_grad_(False)
    model.config.num_nextn_predict_layers, model.config.mtp = 1, True
    layer = DeepseekV4MTPLayer(model.config)
    own, last = layer.state_dict(), model.model.layers[-1].state_dict()
    shared = {key: t for key, t in last.items() if key in own and t.shape == own[key].shape}
    # A layer that chooses experts by token has no bias.
    shared |= {f"hc_head.{key}": t for key, t in model.model.hc_head.state_dict().items()}
    layer.load_state_dict({**own, **shared, "norm.weight": model.model.norm.weight})
    with torch.no_grad():
        # The streams as the head saw them, and nothing of the embedding yet.
        nn.init.eye_(layer.h_proj.weight)
        nn.init.normal_(layer.e_proj.weight, std=layer.e_proj.in_features**-0.5)
    layer.to(model.device)
    model.mtp = nn.ModuleList([layer])
    return layer


@torch.no_grad()
def lesson(model: DeepseekV4ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(streams [B, T - 1, S, D] to guess by, the model's log-probabilities of what is to guess [B, T - 1, V])."""
    outputs = model(ids, use_cache=False, output_hidden_states=True)
    return outputs.hidden_states[-1][:, :-1], outputs.logits[:, 1:].float().log_softmax(-1)


def loss_of(model: DeepseekV4ForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(KL a token, the share of guesses that are the model's likeliest token) on ids [B, T]."""
    streams, truth = lesson(model, ids)
    guess = model.guess(ids[:, 1:], streams)[0].float().log_softmax(-1)
    kl = F.kl_div(guess, truth, reduction="none", log_target=True).sum(-1).mean()
    return kl, (guess.argmax(-1) == truth.argmax(-1)).float().mean()


@torch.no_grad()
def evaluate(model: DeepseekV4ForCausalLM, ids: Tensor, batch: int) -> tuple[float, float]:
    """`loss_of` windows ids [N, T], a batch at a time."""
    model.eval()
    parts = [torch.stack(loss_of(model, part)) for part in ids.split(batch)]
    weights = torch.tensor([float(part.shape[0]) for part in ids.split(batch)], device=ids.device)
    kl, right = (torch.stack(parts) * weights[:, None]).sum(0) / weights.sum()
    return kl.item(), right.item()


def batches(tokens: Tensor, batch: int, window: int, seed: int) -> Iterator[Tensor]:
    """Windows from anywhere in the text tokens [N], [batch, window], without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, tokens.shape[0] - window + 1, (batch, 1), generator=generator)
        yield tokens[starts + torch.arange(window)]


def train(
    model: DeepseekV4ForCausalLM,
    tokens: Tensor,
    steps: int,
    batch: int,
    window: int,
    rate: float,
    seconds: float = math.inf,
    seed: int = 0,
) -> int:
    """Train the model's layer on text; gives the updates made.

    Args:
        model: with the layer of `add_layer`.
        tokens: [N], int64.
        steps: updates at most, each of `batch` windows of `window` tokens.
        rate: the highest learning rate; it rises over the first steps and falls to nothing along a cosine.
        seconds: after which it ends; the rate falls by whichever of the two is used up first.
        seed: of the choice of windows.
    """
    parameters = [p for p in model.mtp.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.perf_counter()
    for n, ids in enumerate(batches(tokens, batch, window, seed)):
        elapsed = time.perf_counter() - start
        done = max(n / steps, elapsed / seconds)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min((n + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * done))
        kl, right = loss_of(model, ids.to(model.device))
        kl.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if n % 20 == 0:
            print(f"step {n}: KL {kl.item():.3f}, right {right.item():.1%}, {elapsed:.0f} s", flush=True)
    return n


def save(checkpoint: Path, model: DeepseekV4ForCausalLM, out: Path, facts: dict[str, Any]) -> None:
    """Write the checkpoint's files with the layer's tensors beside its own, and training_mtp.json.

    Args:
        checkpoint: what the model was loaded from.
        model: with the trained layer.
        out: the folder, made where it is not there.
        facts: for training_mtp.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    # The layer in the dtypes that the loader gives each of its tensors.
    plain = DeepseekV4ForCausalLM.from_pretrained(checkpoint)
    add_layer(plain).load_state_dict(model.mtp[0].state_dict())
    plain.mtp.to(plain.dtype)
    for name, t in [*plain.mtp.named_parameters(), *plain.mtp.named_buffers()]:
        if any(part in plain._keep_in_fp32_modules_strict for part in name.split(".")):
            t.data = t.data.float()
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder, max_shard_size="1TB")
        layer = {k: t for k, t in load_file(Path(folder, SAFETENSORS)).items() if k.startswith("mtp.")}
    files = checkpoint_files(checkpoint)
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in (SAFETENSORS, SAFETENSORS_INDEX, CONFIG):
            shutil.copyfile(path, out / path.name)
    if files.index is None:
        save_file(load_file(files.main) | layer, out / SAFETENSORS, metadata={"format": "pt"})
    else:
        save_file(layer, out / SHARD, metadata={"format": "pt"})
        index = json.loads(files.index.read_text())
        index["weight_map"] |= dict.fromkeys(layer, SHARD)
        (out / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((checkpoint / CONFIG).read_text()) | {"num_nextn_predict_layers": 1}
    (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "training_mtp.json").write_text(json.dumps(facts, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="what to train on")
    parser.add_argument("--heldout", type=Path, help="text to report on, before and after")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="windows of a step")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long at the latest")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).to(options.device).eval()
    add_layer(model)
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)

    def tokens(path: Path) -> Tensor:
        return tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]

    heldout = None
    if options.heldout is not None:
        heldout = tokens(options.heldout)
        heldout = heldout[: heldout.shape[0] // options.window * options.window].view(-1, options.window)
        heldout = heldout.to(options.device)
        print("before: KL {:.3f}, right {:.1%}".format(*evaluate(model, heldout, options.batch)), flush=True)
    start = time.perf_counter()
    sizes = {name: getattr(options, name) for name in ("batch", "window", "rate")}
    facts: dict[str, Any] = {
        "steps": train(model, tokens(options.text), options.steps, **sizes, seconds=options.seconds)
    }
    facts |= sizes
    facts |= {"seconds": round(time.perf_counter() - start), "device": options.device, "torch": torch.__version__}
    if heldout is not None:
        facts["heldout_kl"], facts["heldout_right"] = evaluate(model, heldout, options.batch)
        print("after: KL {heldout_kl:.3f}, right {heldout_right:.1%}".format(**facts), flush=True)
    save(options.checkpoint, model, options.out, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
