"""FLUX.2 on two ranks of Gloo, by diffusers' tensor parallelism, with our ops inside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import torchrun

pytest.importorskip("diffusers")
SCRIPT = Path(__file__).parent / "pictures.py"
# Largest difference in fp32; outputs are up to 8.
TO_ONE = 1e-4


def test_a_step(tmp_path: Path) -> None:
    done = torchrun(2, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(results["found"], results["expected"], rtol=0, atol=TO_ONE)
        # Modulations and embeddings are whole on each.
        assert results["share"] < 0.6
        assert {"ada_layer_norm", "concat_swiglu", "gated_residual", "qk_norm_rope"} <= results["ops"]
