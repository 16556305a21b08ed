"""Kimi Linear's decode steps captured: latents and states live in a graph's buffers, and say what eager steps say.

On a CPU the captured function runs again in place of a device graph; what a graph is bound to and when it is released
is tested with Zamba2, in `tests/common/test_graph.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from xpu_ports.common import dispatch, graph
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"
DEVICE = torch.device(torch.accelerator.current_accelerator() or "cpu")
OPTIONS = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def _graphs_here(monkeypatch):
    if graph.graph_class(DEVICE) is None:

        def capture(device, step):
            for _ in range(3):
                output = step()
            return lambda: output.copy_(step()), output

        monkeypatch.setattr(graph, "capture", capture)
        monkeypatch.setattr(graph, "graph_class", lambda device: object)
    dispatch.reset_explain()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return KimiLinearForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval().to(DEVICE)


def both(model, ids: torch.Tensor, **options) -> torch.Tensor:
    """What captured steps generate, after a check that eager ones give the same and that the steps were captured."""
    with graph.use_graphs(False):
        expected = model.generate(ids, **OPTIONS | options)
    assert not captured_steps()
    found = model.generate(ids, **OPTIONS | options)
    assert captured_steps()
    assert torch.equal(found, expected)
    return found


def captured_steps() -> int:
    return sum(d.calls for d in dispatch.explain(show=False) if (d.op, d.backend) == (graph.SUBJECT, "graph"))


@pytest.mark.parametrize("shape", [(1, 20), (3, 7)])
def test_generate(model, shape):
    both(model, torch.randint(3, 2000, shape, device=DEVICE))


def test_padding(model):
    """The padded row says what it says alone."""
    ids = torch.randint(3, 2000, (2, 20), device=DEVICE)
    ids[0, :9] = 0
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    together = both(model, ids, attention_mask=mask)
    assert torch.equal(together[0, 20:], model.generate(ids[:1, 9:], **OPTIONS)[0, 11:])


def test_beams(model):
    """States and latents are put in the beams' order, in the buffers."""
    both(model, torch.randint(3, 2000, (1, 20), device=DEVICE), num_beams=3, max_new_tokens=10)


def test_a_prompt_in_pieces_then_captured_steps(model):
    ids = torch.randint(3, 2000, (1, 40), device=DEVICE)
    cache = model(ids[:, :17], use_cache=True).cache
    model(ids[:, 17:36], cache=cache)
    logits = [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(36, 40)]
    assert captured_steps() == 4
    full = model(ids).logits[:, 36:]
    assert (torch.cat(logits, 1) - full).abs().max() <= 5e-5
    # The cache takes more tokens at once: out of the graph and on.
    more = torch.randint(3, 2000, (1, 3), device=DEVICE)
    longer = model(torch.cat([ids, more], 1)).logits[:, 40:]
    assert (model(more, cache=cache).logits - longer).abs().max() <= 5e-5
