"""What is said of models on several cards: kernels counted by hand, an oracle in fp32, experts that are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.common import parallel
from xpu_ports.common.bench import scaling
from xpu_ports.common.bench.ranks import random_model
from xpu_ports.common.bench.scaling import Busy, Kernel
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
# Largest difference of logits in fp32: other orders of sums.
SAME = 1e-4


def model(model_class: Any, name: str, dtype: torch.dtype) -> Any:
    config = model_class.config_class.from_pretrained(CHECKPOINTS / name)
    config.dtype = dtype
    return random_model(model_class, config, torch.device("cpu"))


MODELS = {"tiny-kimi-linear": KimiLinearForCausalLM, "tiny-deepseek-v4": DeepseekV4ForCausalLM}
IDS = torch.arange(3, 27)[None]


def test_time_in_collectives() -> None:
    """Three steps of a product and a sum over ranks, of which the first sum waits for the profiler elsewhere."""
    kernels = []
    for i, waits in enumerate((1.0, 0.003, 0.005)):
        kernels += [Kernel("gemm", 10.0 * i, 0.006), Kernel("ncclDevKernel_AllReduce", 10.0 * i + 0.006, waits)]
    found = Busy.of(kernels[::-1], 3)
    assert found is not None
    assert (found.steps, found.kernels, found.collectives) == (2, 2.0, 1.0)
    assert found.busy_ms == pytest.approx(10.0)
    assert found.collective_ms == pytest.approx(4.0)
    assert found.share == pytest.approx(0.4)
    assert found.span_ms == pytest.approx(1e3 * 10.011 / 2)
    assert Busy.of([], 3) is None


def test_without_collectives() -> None:
    x = torch.arange(6.0).view(2, 3)
    kept = parallel.all_reduce
    with scaling.without_collectives():
        assert torch.equal(parallel.all_reduce(x, None), x)
        assert parallel.all_gather(x, [3, 4], None).shape == (2, 7)
    assert parallel.all_reduce is kept


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_oracle(name: str) -> None:
    """It is the model in fp32 on the same weights, which are as they were afterwards."""
    ours = model(MODELS[name], name, torch.bfloat16)
    weights = {key: p.clone() for key, p in ours.named_parameters()}
    with scaling.in_float32(ours):
        found = ours(IDS, use_cache=False).logits
    assert {p.dtype for p in ours.parameters()} == {p.dtype for p in weights.values()}
    assert all(torch.equal(p, weights[key]) for key, p in ours.named_parameters())
    wide = model(MODELS[name], name, torch.float32)
    wide.load_state_dict(ours.state_dict())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wide(IDS, use_cache=False).logits, rtol=0, atol=SAME)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_given_experts(name: str) -> None:
    """Experts are counted where they differ, and given ones are used, by steps too."""
    ours = model(MODELS[name], name, torch.float32)
    with scaling.chosen_experts(ours) as chosen:
        expected = ours(IDS, use_cache=False).logits[0]
    other = [(weights, indices.roll(1, 0) if i == 0 else indices) for i, (weights, indices) in enumerate(chosen)]
    assert scaling.differing_experts(chosen, chosen)["differ"] == 0
    assert 0 < scaling.differing_experts(chosen, other)["differ"] <= IDS.shape[1]
    with scaling.chosen_experts(ours, other):
        assert not torch.allclose(ours(IDS, use_cache=False).logits[0], expected)
    with scaling.chosen_experts(ours, scaling.routing_by_steps(chosen, 9)):
        steps = scaling.logits_by_steps(ours, IDS, 9)
    torch.testing.assert_close(steps, expected, rtol=0, atol=SAME)
    same = scaling.compared(steps, expected)
    assert same["top_1"] == 1.0
    assert same["largest"] <= SAME
    assert set(scaling.compared(steps, expected, tokens=False)) == {"largest", "scale", "relative"}
