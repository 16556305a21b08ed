"""benchmarks/scaling.py on a tiny checkpoint: one process beside two, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from xpu_ports.common.bench.files import read_results

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


def test_one_and_two(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    command = [sys.executable, SCRIPT, "--tiny", "--models", "kimi_linear", "--seconds", "240"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    file = tmp_path / "scaling.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert not [line for line in lines if line["kind"] == "failed"]
    assert {line["cards"] for line in lines if line["kind"] == "rate"} == {1, 2}
    accuracy = {(line["got"], line["expected"]): line for line in lines if line["kind"] == "accuracy"}
    # With experts given there is nothing but rounding, by steps too.
    for got in ("given on 1", "given on 2", "steps_given on 1", "steps_given on 2"):
        assert accuracy[got, "oracle_given on 2"]["within"], got
    held = {line["cards"]: line["weights"] for line in lines if line["kind"] == "memory"}
    assert max(held[2]) < 0.6 * held[1][0]
    assert "given on 2 - oracle_given on 2" in done.stdout
    # Others read it as results without measurements of theirs.
    assert not read_results(file).measurements
