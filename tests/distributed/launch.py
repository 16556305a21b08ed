"""torchrun in a process of its own, with Gloo on this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, *arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a script, or `-m module`, on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    return subprocess.run(
        [*command, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
