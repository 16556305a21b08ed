"""A rank that ends takes the job with it, soon, and with a message that says which and why."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.launch import torchrun

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-zamba2"
SCRIPT = Path(__file__).parent / "failing.py"
# From the failure to the end of all.
SECONDS = 60


def since(mark: Path) -> float:
    return time.time() - mark.stat().st_mtime


def test_killed_under_torchrun(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    done = torchrun(2, SCRIPT, "killed", mark, CHECKPOINT)
    assert since(mark) < SECONDS
    assert done.returncode != 0
    cause = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause


def test_error_of_one_rank_while_loading(tmp_path: Path) -> None:
    """The others wait for it in a collective."""
    shutil.copytree(CHECKPOINT, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    mark = tmp_path / "mark"
    done = torchrun(2, SCRIPT, "loading", mark, CHECKPOINT, tmp_path / "damaged")
    assert since(mark) < SECONDS
    assert done.returncode != 0
    assert "model.safetensors: expected 3912720 bytes, found 3912620; the file is truncated" in done.stderr
    assert "rank      : 1" in done.stderr[done.stderr.index("Root Cause") :]


def test_killed_without_a_launcher(tmp_path: Path) -> None:
    """As other launchers start them: nobody ends the other rank, which notices by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    mark = tmp_path / "mark"
    command = [sys.executable, str(SCRIPT), "killed", str(mark), str(CHECKPOINT)]
    ranks = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        _, said = ranks[0].communicate(timeout=240)
        assert ranks[1].wait(timeout=SECONDS) == -signal.SIGKILL
    finally:
        for process in ranks:
            process.kill()
    assert since(mark) < SECONDS
    assert ranks[0].returncode != 0
    assert "rank 0 of 2: another rank has ended" in said
