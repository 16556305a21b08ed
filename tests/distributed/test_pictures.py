"""FLUX.2 on two ranks of Gloo, by diffusers' tensor parallelism, with our ops inside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import torchrun
from xpu_ports.cli._cards import shares_of_flux2

pytest.importorskip("diffusers")
SCRIPT = Path(__file__).parent / "pictures.py"
CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-flux2" / "transformer"
# Largest difference in fp32; outputs are up to 8.
TO_ONE = 1e-4


def test_a_step(tmp_path: Path) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    one, two = (share for share in shares_of_flux2(config, [1, 2], 64, 7)[0] if share.form == "bf16")
    done = torchrun(2, SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(results["found"], results["expected"], rtol=0, atol=TO_ONE)
        # Modulations and embeddings are whole on each, as `xpu-ports plan` counts.
        assert results["share"] == pytest.approx((two.divided + two.whole) / one.whole)
        assert results["share"] < 0.6
        assert {"ada_layer_norm", "concat_swiglu", "gated_residual", "qk_norm_rope"} <= results["ops"]
