"""Time the row kernels under other tiles than the shipped ones: what the tables in common/kernels are chosen by.

Prints, for each shape, microseconds in a captured graph for (rows a program, warps), best first, the shipped tile
marked. Leaves tiles.summary in the folder OUT.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.bench.timing import Plan, Stopwatch, cache_size, capture_run, interleave
from xpu_ports.common.dispatch import use_backend

# Row of the registry -> sizes to look at.
LOOKED_AT = {
    "rms_norm": ("T1-N4096", "T256-N4096", "T8192-N4096"),
    "gated_rms_norm": ("T1-N4096-G1", "T256-N4096-G1", "T8192-N4096-G1", "T1-N4096-G2", "T8192-N4096-G2"),
    "gated_rms_norm.sigmoid": ("T1-H32-N128", "T256-H32-N128", "T8192-H32-N128"),
}


def main() -> None:
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    lines = []
    for name, sizes in LOOKED_AT.items():
        for size in sizes:
            lines.append(line(name, size, device))
            print(lines[-1], flush=True)
    out = Path(os.environ.get("OUT") or "benchmarks/results")
    (out / "tiles.summary").write_text("\n".join(lines) + "\n")


def line(name: str, size: str, device: torch.device) -> str:
    case = CASES[name]
    module = sys.modules[case.op.reference.__module__]
    args = case.draw(size, device, torch.bfloat16)
    group = args[4] if name.startswith("gated") and args[4] else args[0].shape[-1]
    shipped = module.tile(group)
    moved = case.work(size, args, [args[0]]).moved
    count = max(2, min(8, -(-4 * cache_size(device) // moved)))
    sets = [args, *(case.draw(size, device, torch.bfloat16, seed) for seed in range(1, count))]
    plan, stopwatch = Plan(samples=15), Stopwatch(device)
    runs: dict[Any, Any] = {}
    for block_m, warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32)):
        block_n = shipped[1]
        # 2 to 64 elements a lane: beyond, registers spill or lanes idle.
        if not 2 <= block_m * block_n // (32 * warps) <= 64 or block_m > max(1, 8192 // block_n):
            continue
        with use_backend("triton", op=case.op.name), torch.no_grad():
            restore = patch(module, (block_m, block_n, warps))
            try:
                calls = [functools.partial(case.op, *s) for s in sets]
                calls[0]()
                runs[block_m, warps] = capture_run(device, calls, stopwatch, plan)
            finally:
                module.tile = restore
    timings = interleave(stopwatch, runs, plan, ahead=True)
    ordered = sorted(timings, key=lambda key: timings[key].median)
    cells = [
        f"{key[0]}x{key[1]}{'*' if key == (shipped[0], shipped[2]) else ''}={1e6 * timings[key].median:.2f}"
        for key in ordered
    ]
    return f"{name} {size}: " + " ".join(cells)


def patch(module: ModuleType, tile: tuple[int, int, int]) -> Any:
    """Replace the module's tile table by one tile; returns what was there."""
    before = module.tile
    module.tile = lambda *_: tile
    return before


if __name__ == "__main__":
    main()
