"""One step of FLUX.2's transformer with random weights, beside diffusers' class on the same memory.

    python benchmarks/flux2.py [--layout klein-4b|klein-9b|dev] [--side 64] [--text 512] [--mxfp4] [--compile]
        [--attention] [--kernels N] [--out FILE]

`xpu-ports bench model flux2` for a checkout that is not installed, and with what only development needs. A side of 64
tokens is a picture of 1024 x 1024. The file is flux2-LAYOUT.jsonl in the folder OUT, if that is set.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from xpu_ports.cli.bench_pictures import Options, bench_pictures
from xpu_ports.models.flux2.layouts import LAYOUTS


def main() -> int:
    given = arguments()
    options = Options(
        side=given.side, text=given.text, layers=given.layers, mxfp4=given.mxfp4, compiled=given.compile,
        attention=given.attention, kernels=given.kernels,
    )  # fmt: skip
    out = given.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    bench_pictures(given.layout, None, device, torch.bfloat16, options, out)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="klein-4b")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--text", type=int, default=512)
    parser.add_argument("--layers", type=int, help="blocks of each kind, instead of all")
    parser.add_argument("--mxfp4", action="store_true", help="also with packed weights")
    parser.add_argument("--compile", action="store_true", help="also through torch.compile, which takes minutes")
    parser.add_argument("--attention", action="store_true", help="also with each attention that PyTorch has on CUDA")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    parser.add_argument("--out", type=Path, help="a file that ends with .jsonl, or a folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
