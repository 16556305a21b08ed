"""A job of which one rank fails while the others compute.

torchrun --nproc-per-node 2 failing.py killed|loading MARK PATH [PATH of rank 1]

Rank 1 writes MARK right before.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from xpu_ports.models.zamba2 import Zamba2ForCausalLM


def main() -> None:
    how, mark, *paths = sys.argv[1:]
    rank = int(os.environ["RANK"])
    if rank == 1 and how == "loading":
        Path(mark).touch()
    model = Zamba2ForCausalLM.from_pretrained(paths[min(rank, len(paths) - 1)], dtype=torch.float32, tp_plan="auto")
    with torch.no_grad():
        for step in range(10**6):
            model(torch.ones(1, 4, dtype=torch.long))
            if step == 2 and rank == 1:
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
