"""DeepSeek-V4's decode steps captured: they say what eager ones say, and hang on nothing that the host knows.

On a CPU the captured function runs again in place of a device graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config

from tests.models.deepseek_v4.test_mtp import NARROW
from xpu_ports.common import dispatch, graph
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM
from xpu_ports.models.deepseek_v4.layouts import layout_config

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
DEVICE = torch.device(torch.accelerator.current_accelerator() or "cpu")
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def _graphs_here(monkeypatch):
    if graph.graph_class(DEVICE) is None:

        def capture(device, step, warm=False):
            for _ in range(1 if warm else 3):
                output = step()
            return lambda: output.copy_(step()), output

        monkeypatch.setattr(graph, "capture", capture)
        monkeypatch.setattr("xpu_ports.models.deepseek_v4.capture.capture", capture)
        monkeypatch.setattr(graph, "graph_class", lambda device: object)
    dispatch.reset_explain()
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model():
    return DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval().to(DEVICE)


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 2000, shape, device=DEVICE)


def captured(subject: str = graph.SUBJECT) -> int:
    return sum(d.calls for d in dispatch.explain(show=False) if (d.op, d.backend) == (subject, "graph"))


def both(model, ids: Tensor, **options) -> Tensor:
    """What captured steps generate, after a check that eager ones give the same and that the steps were captured."""
    with graph.use_graphs(False):
        expected = model.generate(ids, **OPTIONS | options)
    before = captured()
    found = model.generate(ids, **OPTIONS | options)
    assert captured() > before
    assert torch.equal(found, expected)
    return found


@pytest.mark.parametrize("shape", [(1, 20), (3, 7), (1, 90)])
def test_generate(model, shape):
    both(model, tokens(*shape))


def test_a_cache_that_outgrows_its_graph(model, monkeypatch):
    """Through stores that double, more entries than are chosen, and back to a short text in the graph of another."""
    monkeypatch.setattr(graph, "SMALLEST", 16)
    monkeypatch.setattr(graph, "ROOM", 4)
    model._decode_graphs.clear()
    both(model, tokens(1, 10), max_new_tokens=130)
    assert [key[1] for key in model._decode_graphs] == [32, 64, 128, 256]
    both(model, tokens(1, 40), max_new_tokens=10)
    model._decode_graphs.clear()


def test_padding(model):
    """The padded row says what it says alone."""
    ids = tokens(2, 40)
    ids[0, :9] = 0
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    together = both(model, ids, attention_mask=mask)
    assert torch.equal(together[0, 40:], model.generate(ids[:1, 9:], **OPTIONS)[0, 31:])


def test_tokens_that_do_not_count(model):
    """A mask that leaves out the newest token of a row, then none: rows have other lengths from there on."""
    ids, next_ids = tokens(2, 30), tokens(2, 8)
    mask = torch.ones(2, 38, dtype=torch.int64, device=DEVICE)
    mask[0, 33] = mask[1, 34] = mask[1, 35] = 0

    def logits(enabled: bool) -> tuple[Tensor, DeepseekV4Cache]:
        cache, out = DeepseekV4Cache(model.config), []
        with graph.use_graphs(enabled):
            model(ids, cache=cache, use_cache=True)
            for t in range(8):
                step_mask = mask[:, : 31 + t] if t < 7 else None
                out.append(model(input_ids=next_ids[:, t : t + 1], attention_mask=step_mask, cache=cache).logits)
        return torch.cat(out, 1), cache

    (found, cache), (expected, plain) = logits(True), logits(False)
    assert captured() == 8
    assert (found - expected).abs().max() <= CLOSE
    for c in (cache, plain):
        assert c.lengths.tokens.tolist() == [37, 36]
        c.crop(-5)
        assert c.lengths.tokens.tolist() == [33, 33]


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_beams(model, dtype):
    """Rows of the cache are put in the beams' order, in the buffers; a cache of another dtype has graphs of its own."""
    model.config.cache_dtype = dtype
    try:
        both(model, tokens(2, 40), num_beams=3, max_new_tokens=10)
    finally:
        del model.config.cache_dtype


def test_two_conversations_interleaved(model):
    ids = tokens(1, 20), tokens(1, 33)
    expected = [model.generate(x, **OPTIONS | {"max_new_tokens": 10})[:, x.shape[1] :] for x in ids]
    outputs = [model(input_ids=x, use_cache=True) for x in ids]
    said = [[o.logits[:, -1:].argmax(-1)] for o in outputs]
    for _ in range(9):
        for mine, o in zip(said, outputs, strict=True):
            mine.append(model(input_ids=mine[-1], cache=o.cache).logits.argmax(-1))
    for mine, text in zip(said, expected, strict=True):
        assert torch.equal(torch.cat(mine, 1), text)


def test_what_becomes_of_a_bound_cache(model):
    """Steps back in place, more tokens at once, another batch: out of the graph where it must be, and on."""
    ids = tokens(2, 60)
    cache = model(ids[:, :36], use_cache=True).cache
    for t in range(36, 41):
        model(input_ids=ids[:, t : t + 1], cache=cache)
    assert captured() == 5
    held = cache.layers[2].entries.data_ptr()
    cache.crop(-3)
    assert cache.get_seq_length() == 38
    logits = [model(input_ids=ids[:, t : t + 1], cache=cache).logits for t in range(38, 44)]
    assert (captured(), cache.layers[2].entries.data_ptr()) == (11, held)
    logits.append(model(ids[:, 44:50], cache=cache).logits)
    assert cache.holder is None
    logits.append(model(input_ids=ids[:, 50:51], cache=cache).logits)
    full = model(ids).logits
    assert (torch.cat(logits, 1) - full[:, 38:51]).abs().max() <= CLOSE
    cache.batch_repeat_interleave(2)
    assert cache.holder is None
    again = model(input_ids=ids.repeat_interleave(2, 0)[:, 51:52], cache=cache).logits
    assert (again - full.repeat_interleave(2, 0)[:, 51:52]).abs().max() <= CLOSE
    cache.reset()
    assert cache.get_seq_length() == 0
    assert (model(ids.repeat_interleave(2, 0), cache=cache).logits - full.repeat_interleave(2, 0)).abs().max() <= CLOSE


def test_another_number_of_rows(model):
    cache = model(tokens(2, 20), use_cache=True).cache
    with pytest.raises(ValueError, match="the cache has 2 rows, the call 3"):
        model(input_ids=tokens(3, 1), cache=cache)


# ---------------------------------------------------------------------------- what a graph can hold, and how much it is


class Calls(TorchDispatchMode):
    """What a step asks of the device: our ops, each as one call, and torch's around them."""

    # No launches: views, and what is made without being filled.
    FREE = ("empty", "detach", "alias", "_unsafe_view", "lift_fresh")
    # They wait for the device, or their outputs' sizes hang on values.
    NEVER = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[tuple] = []
        self.torch: list[tuple] = []
        self.inside = False

    def clear(self) -> None:
        self.ours.clear()
        self.torch.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not self.inside and not func.is_view and not name.startswith(self.FREE):
            assert not name.startswith(self.NEVER), name
            self.torch.append((name, *map(shown, args)))
        return func(*args, **kwargs or {})


def shown(value: Any) -> Any:
    """What a graph bakes in of an argument: shapes, strides and numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(shown, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture
def calls(monkeypatch) -> Iterator[Calls]:
    mode, call = Calls(), dispatch.Op.__call__

    def counted(self, *args, **kwargs):
        outer, mode.inside = mode.inside, True
        if not outer:
            mode.ours.append((self.name, *map(shown, args)))
        try:
            return call(self, *args, **kwargs)
        finally:
            mode.inside = outer

    monkeypatch.setattr(dispatch.Op, "__call__", counted)
    return mode


def flash(batch: int, past: int, **overrides) -> tuple[Any, DeepseekV4Cache]:
    """The published model's first layers, made narrow, and a cache with a past."""
    torch.manual_seed(1)
    config = layout_config("flash-6-layers", **NARROW_FLASH | overrides)
    model = DeepseekV4ForCausalLM(config).eval().to(DEVICE)
    cache = model(tokens(batch, past) % 90, use_cache=True).cache
    return model, cache


NARROW_FLASH = {
    "vocab_size": 96, "hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 8, "head_dim": 32,
    "q_lora_rank": 32, "qk_rope_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
# Of ours that are several launches, by what is made for a few tokens: products and sums over parts of what they add up.
LAUNCHES = {"sparse_mla_decode": 2, "moe_experts": 3, "inverse_rope_grouped_out": 2, "indexer_scores": 2,
            "stable_topk": 2, "mhc_pre": 2, "adapted_linears": 2, "mhc_head": 2}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
def test_launches_of_an_eager_step(batch, calls):
    model, cache = flash(batch, 70)
    with graph.use_graphs(False):
        ids = tokens(batch, 1) % 90
        model(input_ids=ids, cache=cache)
        calls.clear()
        with calls:
            model(input_ids=ids, cache=cache)
    # Products of streams are made by who wrote them, but for the first layer's.
    given = [name for name, *args in calls.ours if name in ("mhc_pre", "mhc_head") and args[-1] is not None]
    assert given == ["mhc_pre"] * 11 + ["mhc_head"]
    ours = sum(LAUNCHES.get(name, 1) for name, *_ in calls.ours) - len(given)
    print(f"{len(calls.ours)} ops of ours, about {ours} launches; {len(calls.torch)} of torch's around them:")
    print([name for name, *_ in calls.torch])
    assert len(calls.torch) <= 17
    assert ours + len(calls.torch) <= 188


def test_nothing_hangs_on_what_the_host_knows(model, calls):
    """Captured steps of texts of other lengths are the same calls, of the same sizes, on the same memory."""
    seen, addresses = [], []
    for past in (21, 60, 120):
        cache = model(tokens(2, past), use_cache=True).cache
        model(input_ids=tokens(2, 1), cache=cache)
        step = next(reversed(model._decode_graphs.values()))
        calls.clear()
        with calls:
            step.replay()
        seen.append([*calls.ours, *calls.torch])
        addresses.append([getattr(layer, name).data_ptr() for layer in cache.layers for name in layer.memory()])
        addresses[-1].append(cache.lengths.tokens.data_ptr())
    for other in seen[1:]:
        assert len(other) == len(seen[0]) > 100
        assert not [pair for pair in zip(other, seen[0], strict=True) if pair[0] != pair[1]]
    assert addresses[0] == addresses[1] == addresses[2]


# ------------------------------------------------------------------------------------------------------------- drafts


@pytest.fixture(scope="module")
def drafting():
    torch.manual_seed(3)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**NARROW | {"index_topk": 5}, mtp=True)).eval().to(DEVICE)
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            t.data = torch.stack([torch.randperm(6)[:3] for _ in range(96)]).to(DEVICE)
        elif name.endswith(("sinks", "position_bias", "base")):
            t.data.normal_()
    return model


def drafts(model, prompt: Tensor, **options) -> Tensor:
    """What captured rounds give, after a check that eager ones and plain steps give the same."""
    options = OPTIONS | {"max_new_tokens": 60} | options
    plain = {k: v for k, v in options.items() if k not in ("draft", "num_draft_tokens", "streamer")}
    with graph.use_graphs(False):
        expected = model.generate(prompt, **plain)
        assert torch.equal(model.generate(prompt, **options | {"streamer": None}), expected)
        acceptance = model.draft_acceptance
    assert not captured("draft rounds")
    found = model.generate(prompt, **options)
    assert captured("draft rounds") == 1
    assert torch.equal(found, expected)
    assert model.draft_acceptance == acceptance
    return found


@pytest.mark.parametrize("length", [1, 23])
@pytest.mark.parametrize("number", [1, 3])
def test_rounds(drafting, number, length):
    drafts(drafting, tokens(1, length) % 93 + 3, draft="mtp", num_draft_tokens=number)


def test_rounds_of_a_trained_layer():
    """Some of its guesses are right: rounds go on from any of them, with the same guesses as eager ones."""
    model = DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32, mtp=True).eval().to(DEVICE)
    drafts(model, tokens(1, 40), draft="mtp", num_draft_tokens=3, max_new_tokens=80)
    assert 0.2 < model.draft_acceptance < 0.8


def test_rounds_of_right_guesses(drafting):
    """The head of both is a constant: all guesses are right, and a round gives all of them."""
    weight = drafting.lm_head.weight.data.clone()
    try:
        drafting.lm_head.weight.data.zero_()
        drafts(drafting, tokens(1, 9) % 93 + 3, draft="mtp", num_draft_tokens=4)
        assert drafting.draft_acceptance == 1
    finally:
        drafting.lm_head.weight.data.copy_(weight)


def test_rounds_to_the_end_of_a_text(drafting):
    prompt = tokens(1, 12) % 93 + 3
    with graph.use_graphs(False):
        plain = drafting.generate(prompt, **OPTIONS | {"max_new_tokens": 40})

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    for at in (12, 25, 39):
        streamer, end = Streamer(), {"eos_token_id": int(plain[0, at]), "pad_token_id": 0}
        dispatch.reset_explain()
        text = drafts(drafting, prompt, draft="mtp", num_draft_tokens=3, streamer=streamer, **end)
        assert streamer.tokens == text[0].tolist()
        assert streamer.ended == 1


def test_sampled_rounds_are_eager(drafting):
    drafting.generate(tokens(1, 9) % 93 + 3, draft="mtp", **OPTIONS | {"do_sample": True})
    assert not captured("draft rounds")


def test_nothing_of_a_round_hangs_on_what_the_host_knows(drafting, calls):
    seen = []
    for length in (9, 40):
        drafting.generate(tokens(1, length) % 93 + 3, draft="mtp", num_draft_tokens=2, **OPTIONS)
        (step,) = (g for key, g in drafting._decode_graphs.items() if key[:2] == ("drafts", 2))
        calls.clear()
        with calls:
            step.replay()
        seen.append([*calls.ours, *calls.torch])
    print(f"a round: {len(calls.ours)} ops of ours, {len(calls.torch)} of torch's around them")
    print([name for name, *_ in calls.torch])
    # Not many more around the model's than around a step's, and as few around each guess.
    assert len(calls.torch) <= 75
    assert len(seen[0]) == len(seen[1])
    assert not [pair for pair in zip(*seen, strict=True) if pair[0] != pair[1]]
