"""What MXFP4 costs the tiny trained models by scheme and scale rule: perplexity, and how far distributions move.

    python benchmarks/mxfp4_accuracy.py [OUT]

A sweep over what `xpu-ports accuracy CKPT --quant mxfp4` measures for one of them. A line of the results is a model
quantized one way: the perplexity, the mean over tokens of KL(bf16 || quantized) in nats, and how often the likeliest
token is the same. The scale rule is the weights'; inputs are rounded by "even".
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from xpu_ports.common.bench.environment import environment
from xpu_ports.common.compare.figures import LogitFigures
from xpu_ports.common.compare.language import tokens_of
from xpu_ports.common.compare.running import logits_of
from xpu_ports.common.compare.subject import Options, load
from xpu_ports.quant.mxfp4.format import SCALE_RULES
from xpu_ports.quant.mxfp4.quantize import quantize_model

ROOT = Path(__file__).parents[1]
OUT = Path(__file__).parent / "results" / "cpu" / "mxfp4-accuracy.jsonl"
TEXT = ROOT / "tests" / "data" / "heldout.txt"
MODELS = ("zamba2", "kimi_linear")
SCHEMES = {"W4A16": None, "W4A4": "mxfp4"}


@torch.no_grad()
def main() -> int:
    out = Path(sys.argv[1]) if sys.argv[1:] else OUT
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(torch.device("cpu"))}]
    for name in MODELS:
        accuracy = importlib.import_module(f"xpu_ports.models.{name}.accuracy")
        folder = f"tiny-{name.replace('_', '-')}"
        options = Options(str(ROOT / "checkpoints" / folder), torch.device("cpu"), text=TEXT, windows=48)
        windows = tokens_of(options)
        port = accuracy.SUBJECT.port
        model = load(port, options, {})
        dense = [logits_of(model, ids) for ids in windows]
        facts = {"kind": "accuracy", "model": folder, "windows": len(windows), "window": options.window}
        same = figures(model, dense, windows)
        lines.append({**facts, "scheme": "bf16", "scale_rule": None, **same})
        for scheme, activations in SCHEMES.items():
            for rule in SCALE_RULES:
                model = load(port, options, {})
                quantize_model(model, activations, rule, accuracy.dense_layers(model))
                lines.append({**facts, "scheme": scheme, "scale_rule": rule, **figures(model, dense, windows)})
                print(json.dumps(lines[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


def figures(model: Any, dense: list[torch.Tensor], windows: list[torch.Tensor]) -> dict[str, float]:
    """Of a model beside the logits of the dense one."""
    found = LogitFigures()
    for expected, ids in zip(dense, windows, strict=True):
        found.add(expected, logits_of(model, ids), ids)
    return {"perplexity": found.perplexity, "kl": found.kl.mean().item(), "same_top_1": found.top_1}


if __name__ == "__main__":
    sys.exit(main())
