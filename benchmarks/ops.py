"""Time all ops beside their peers in bf16 and leave ops.jsonl, ops.png and ops.summary in the folder OUT.

The same as `xpu-ports bench ops --out DIR`, for a checkout that is not installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from xpu_ports.common.bench import report
from xpu_ports.common.bench.ops import bench_ops
from xpu_ports.common.bench.timing import measure_ceilings


def main(names: list[str]) -> None:
    out = Path(os.environ.get("OUT") or "benchmarks/results")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    groups = bench_ops(names, torch.device(device.type, 0), torch.bfloat16, out=out)
    lines = [report.ceilings_line(measure_ceilings(torch.device(device.type, 0))), "graph us / call us"]
    (out / "ops.summary").write_text("\n".join(lines + report.summary(groups)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
