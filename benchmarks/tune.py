"""Tune kernels for the layers of Zamba2-1.2B, as `xpu-ports tune` does; results in the folder OUT.

    python benchmarks/tune.py [--seconds N] [NAME...]

Leaves the table, tuned.json, and what is printed, tune.summary.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path

import torch

from xpu_ports.cli.tune_kernels import model_calls, tune_kernels
from xpu_ports.common.device import architecture
from xpu_ports.models.zamba2.layouts import layout_config

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    items = model_calls("zamba2", layout_config("1.2b"), torch.bfloat16, [1, 8], architecture(device))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tune_kernels(items, options.names, device, torch.bfloat16, options.seconds, OUT / "tuned.json")
    (OUT / "tune.summary").write_text(printed.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
