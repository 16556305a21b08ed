"""Whole models with random weights at released sizes, beside transformers' classes; results in the folder OUT.

A model's peers must not be on PYTHONPATH half-installed: transformers takes what it finds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from xpu_ports.cli.bench_model import bench_model

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
# (layout, batch sizes, prompt lengths, tokens to decode, beside transformers, beside torch.compile)
RUNS = (
    ("1.2b", [1, 32], [128], 128, True, True),
    ("1.2b", [16], [2048], 16, True, False),
    ("2.7b", [1], [128], 64, False, False),
    ("7b", [1], [128], 64, False, False),
)


def main() -> int:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    for layout, batches, prompts, new, peer, compiled in RUNS:
        bench_model("zamba2", layout, None, device, torch.bfloat16, batches, prompts, new, peer, OUT, False, compiled)
        torch.accelerator.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
