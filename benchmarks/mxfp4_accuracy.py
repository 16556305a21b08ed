"""What MXFP4 costs the tiny trained models: perplexity on held-out text, and how far the distributions move.

    python benchmarks/mxfp4_accuracy.py [OUT]

A line of the results is a model quantized one way: the perplexity, the mean over tokens of KL(bf16 || quantized) in
nats, and how often the likeliest token is the same. The scale rule is the weights'; inputs are rounded by "even".
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from xpu_ports.common.bench.environment import environment
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.quant.mxfp4.format import SCALE_RULES
from xpu_ports.quant.mxfp4.quantize import quantize_model

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "results" / "cpu" / "mxfp4-accuracy.jsonl"
TEXT = ROOT / "tests" / "data" / "heldout.txt"
# Model class, and the layers that stay dense: the head, as usual, and Zamba2's adapters, whose rank is 16.
MODELS: dict[str, tuple[Any, list[str]]] = {
    "tiny-zamba2": (Zamba2ForCausalLM, ["re:.*adapter_list.*"]),
    "tiny-kimi-linear": (KimiLinearForCausalLM, ["lm_head"]),
}
SCHEMES = {"W4A16": None, "W4A4": "mxfp4"}
WINDOW = 256
WINDOWS = 48


def windows(name: str) -> Tensor:
    """[WINDOWS, WINDOW] tokens of the text."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / name)
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    count = min(WINDOWS, len(tokens) // WINDOW)
    return tokens[: count * WINDOW].view(count, WINDOW)


@torch.no_grad()
def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """Of every next token but the last, [windows, WINDOW - 1, vocabulary], fp32."""
    logits = torch.cat([model(part).logits[:, :-1] for part in tokens.split(8)])
    return F.log_softmax(logits.float(), dim=-1)


def compare(log_p: Tensor, log_q: Tensor, tokens: Tensor) -> dict[str, float]:
    """The figures of a distribution q beside those of p, which it stands for."""
    nll = -log_q.gather(-1, tokens[:, 1:, None]).mean().item()
    return {
        "perplexity": math.exp(nll),
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
        "same_top_1": (log_p.argmax(-1) == log_q.argmax(-1)).float().mean().item(),
    }


def main() -> int:
    out = Path(sys.argv[1]) if sys.argv[1:] else OUT
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(torch.device("cpu"))}]
    for name, (model_class, ignore) in MODELS.items():
        tokens = windows(name)
        dense = log_probabilities(model_class.from_pretrained(ROOT / "checkpoints" / name), tokens)
        facts = {"kind": "accuracy", "model": name, "windows": tokens.shape[0], "window": WINDOW}
        lines.append({**facts, "scheme": "bf16", "scale_rule": None, **compare(dense, dense, tokens)})
        for scheme, activations in SCHEMES.items():
            for rule in SCALE_RULES:
                model = model_class.from_pretrained(ROOT / "checkpoints" / name)
                quantize_model(model, activations, rule, ignore)
                figures = compare(dense, log_probabilities(model, tokens), tokens)
                lines.append({**facts, "scheme": scheme, "scale_rule": rule, **figures})
                print(json.dumps(lines[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
