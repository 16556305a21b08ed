"""Whole models with random weights at released sizes, beside transformers' classes; results in the folder OUT.

    python benchmarks/models.py [MODEL...]

A model's peers must not be on PYTHONPATH half-installed: transformers takes what it finds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from xpu_ports.cli.bench_model import bench_model
from xpu_ports.common.bench.timing import measure_ceilings
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.kimi_linear.layouts import layout_config, step_bytes

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
# (model, layout, batch sizes, prompt lengths, tokens to decode, beside transformers, beside torch.compile)
RUNS = (
    ("zamba2", "1.2b", [1, 32], [128], 128, True, False),
    ("zamba2", "1.2b", [16], [2048], 16, True, False),
    ("zamba2", "2.7b", [1], [128], 64, False, False),
    ("zamba2", "7b", [1], [128], 64, False, False),
    # transformers' weights have other names than ours, so it does not run on the same memory.
    ("kimi_linear", "48b-8-layers", [1, 32], [128], 128, False, False),
    ("kimi_linear", "48b", [1], [128], 64, False, False),
    # Last: the compiler takes minutes.
    ("zamba2", "1.2b", [1], [128], 32, False, True),
)


def main(names: list[str]) -> int:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    for name, layout, batches, prompts, new, peer, compiled in RUNS:
        if names and name not in names:
            continue
        bench_model(name, layout, None, device, torch.bfloat16, batches, prompts, new, peer, OUT, False, compiled)
        torch.accelerator.empty_cache()
        if name == "kimi_linear":
            _print_roof(layout, device)
    return 0


def _print_roof(layout: str, device: torch.device) -> None:
    """What reading each weight that a decode step at batch 1 needs would take, at the speed of a copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = KimiLinearForCausalLM(layout_config(layout))
    finally:
        torch.set_default_dtype(before)
    moved, copy = step_bytes(model, tokens=1), measure_ceilings(device).copy
    print(f"kimi_linear {layout}: {moved / 1e9:.2f} GB a step at batch 1, at most {copy / moved:,.0f} tokens/s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
