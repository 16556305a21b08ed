"""Captured decode steps, on a CPU with a stand-in for a device graph that runs the captured function again.

What a graph is bound to, when it is released, and that results do not change is all decided on the host; the devices'
own graphs are exercised by the same tests where there is one.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, StaticCache

from xpu_ports.common import dispatch, graph
from xpu_ports.models.zamba2 import Zamba2ForCausalLM

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-zamba2"
DEVICE = torch.device(torch.accelerator.current_accelerator() or "cpu")
OPTIONS = {"do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def _graphs_here(monkeypatch):
    if graph.graph_class(DEVICE) is None:

        def capture(device, step, warm=False):
            for _ in range(1 if warm else 3):
                output = step()
            return lambda: output.copy_(step()), output

        monkeypatch.setattr(graph, "capture", capture)
        monkeypatch.setattr(graph, "graph_class", lambda device: object)
    dispatch.reset_explain()
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return Zamba2ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval().to(DEVICE)


def prompt(*shape: int) -> torch.Tensor:
    return torch.randint(3, 2048, shape, device=DEVICE)


def eager(model, ids, **options):
    with graph.use_graphs(False):
        return model.generate(ids, **OPTIONS | options)


def steps() -> dict[str, int]:
    """Decode steps by how they ran."""
    counts: dict[str, int] = {}
    for line in dispatch.explain(show=False):
        if line.op == graph.SUBJECT:
            counts[line.backend] = counts.get(line.backend, 0) + line.calls
    return counts


def test_generate_is_captured_and_says_the_same(model):
    ids = prompt(1, 20)
    expected = eager(model, ids, max_new_tokens=40)
    assert steps() == {}
    assert torch.equal(model.generate(ids, max_new_tokens=40, **OPTIONS), expected)
    assert steps() == {"graph": 39}
    assert len(model._decode_graphs) == 1


def test_prompts_and_batch_sizes_in_turn(model):
    for shape in ((1, 20), (3, 7), (1, 33), (3, 9), (1, 5)):
        ids = prompt(*shape)
        assert torch.equal(model.generate(ids, max_new_tokens=12, **OPTIONS), eager(model, ids, max_new_tokens=12))
    assert [key[0] for key in model._decode_graphs] == [3, 1]


def test_a_cache_that_outgrows_its_graph(model, monkeypatch):
    monkeypatch.setattr(graph, "SMALLEST", 16)
    monkeypatch.setattr(graph, "ROOM", 4)
    ids = prompt(2, 10)
    assert torch.equal(model.generate(ids, max_new_tokens=60, **OPTIONS), eager(model, ids, max_new_tokens=60))
    assert [key[1] for key in model._decode_graphs] == [16, 32, 64, 128]


def test_two_conversations_interleaved(model):
    a, b = prompt(1, 20), prompt(1, 30)
    expected = [eager(model, ids, max_new_tokens=10)[:, ids.shape[1] :] for ids in (a, b)]
    caches, tokens = [], [[], []]
    for i, ids in enumerate((a, b)):
        outputs = model(input_ids=ids, use_cache=True)
        caches.append(outputs.cache)
        tokens[i].append(outputs.logits[:, -1:].argmax(-1))
    for _ in range(9):
        for i, cache in enumerate(caches):
            tokens[i].append(model(input_ids=tokens[i][-1], cache=cache).logits.argmax(-1))
    assert steps() == {"graph": 18}
    for i in range(2):
        assert torch.equal(torch.cat(tokens[i], 1), expected[i])


def test_two_models(model):
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.02)
    ids = prompt(1, 12)
    expected = [eager(m, ids, max_new_tokens=20) for m in (model, other)]
    for m, text in zip((model, other), expected, strict=True):
        assert torch.equal(m.generate(ids, max_new_tokens=20, **OPTIONS), text)
    assert torch.equal(model.generate(ids, max_new_tokens=20, **OPTIONS), expected[0])


def test_beams(model):
    ids = prompt(2, 12)
    options = {"num_beams": 3, "max_new_tokens": 20}
    assert torch.equal(model.generate(ids, **OPTIONS, **options), eager(model, ids, **options))
    assert steps() == {"graph": 19}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, side):
    ids = prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[1, slice(0, 7) if side == "left" else slice(13, None)] = 0
    next_ids = prompt(2, 5)

    def logits(enabled: bool) -> torch.Tensor:
        with graph.use_graphs(enabled):
            cache = model(input_ids=ids, attention_mask=mask, use_cache=True).cache
            seen, out = mask, []
            for t in range(5):
                seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
                out.append(model(input_ids=next_ids[:, t : t + 1], attention_mask=seen, cache=cache).logits)
            return torch.cat(out, 1)

    assert (logits(True) - logits(False)).abs().max() <= 2e-5
    assert steps() == {"graph": 5}


def test_more_tokens_after_a_captured_step(model):
    ids = prompt(1, 40)
    full = model(input_ids=ids).logits
    outputs = model(input_ids=ids[:, :20], use_cache=True)
    logits = [outputs.logits]
    for piece in (slice(20, 21), slice(21, 22), slice(22, 30), slice(30, 31), slice(31, 40)):
        logits.append(model(input_ids=ids[:, piece], cache=outputs.cache).logits)
    assert (torch.cat(logits, 1) - full).abs().max() <= 1e-4
    assert steps() == {"graph": 3}


def test_the_cache_tells_the_truth_while_bound(model):
    ids = prompt(1, 20)
    cache = model(input_ids=ids[:, :18], use_cache=True).cache
    model(input_ids=ids[:, 18:19], cache=cache)
    model(input_ids=ids[:, 19:], cache=cache)
    plain = model(input_ids=ids, use_cache=True).cache
    assert cache.get_seq_length() == 20
    for bound, expected in zip(cache.layers, plain.layers, strict=True):
        assert torch.allclose(bound.recurrent_states[0], expected.recurrent_states[0], atol=1e-4)
        if hasattr(expected, "keys"):
            assert torch.allclose(bound.keys, expected.keys, atol=1e-4)
            assert torch.allclose(bound.values, expected.values, atol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    again = model(input_ids=ids, cache=cache).logits
    assert (again - model(input_ids=ids).logits).abs().max() == 0


def test_weights_that_moved(model):
    ids = prompt(1, 12)
    model.generate(ids, max_new_tokens=6, **OPTIONS)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.05
    assert torch.equal(model.generate(ids, max_new_tokens=20, **OPTIONS), eager(model, ids, max_new_tokens=20))


def test_graphs_are_not_kept_without_end(model):
    for batch in range(1, graph.KEPT + 3):
        model.generate(prompt(batch, 4), max_new_tokens=3, **OPTIONS)
    assert len(model._decode_graphs) == graph.KEPT


def test_another_back_end_is_another_graph(model):
    ids = prompt(1, 8)
    model.generate(ids, max_new_tokens=3, **OPTIONS)
    with dispatch.use_backend("reference", op="rms_norm"):
        model.generate(ids, max_new_tokens=3, **OPTIONS)
    assert len(model._decode_graphs) == 2


def test_a_captured_step_rotates_into_the_cache(model):
    """One op for positions and cache where a step is captured, and the two of them elsewhere."""
    ids = prompt(2, 12)
    expected = eager(model, ids, max_new_tokens=6)
    ran = {line.op for line in dispatch.explain(show=False)}
    assert "rotary_embedding" in ran
    assert "rotary_insert" not in ran
    assert torch.equal(model.generate(ids, max_new_tokens=6, **OPTIONS), expected)
    assert "rotary_insert" in {line.op for line in dispatch.explain(show=False)}


def test_what_is_said_of_tokens_lasts(model):
    """Masks given at some steps alone, one for a token that does not count, one longer than the cache."""
    ids, next_ids = prompt(2, 12), prompt(2, 5)
    said = torch.ones_like(torch.cat([ids, next_ids], 1))
    said[1, :4] = 0
    said[0, 13] = 0
    positions = said.cumsum(-1) - 1

    def logits(enabled: bool, masks: list) -> list[torch.Tensor]:
        with graph.use_graphs(enabled):
            cache = model(input_ids=ids, attention_mask=said[:, :12], use_cache=True).cache
            given = [dict(input_ids=next_ids[:, [t]], position_ids=positions[:, [12 + t]]) for t in range(5)]
            return [model(cache=cache, attention_mask=mask, **g).logits for g, mask in zip(given, masks, strict=True)]

    expected = logits(False, [said[:, : 13 + t] for t in range(5)])
    ones = torch.ones(2, 3, dtype=said.dtype, device=said.device)
    for last in (None, said, said[:, :15]):
        masks = [said[:, :13], torch.cat([said[:, :14], ones], 1), said[:, :14], last, None]
        for ours, theirs in zip(logits(True, masks), expected, strict=True):
            assert (ours - theirs).abs().max() <= 2e-5
    assert steps() == {"graph": 15}


class TestLoop:
    """The decode loop that does not wait: the same tokens as transformers' loop, in every way of stopping."""

    def test_end_of_sequence(self, model):
        ids = prompt(3, 10)
        free = eager(model, ids, max_new_tokens=30)
        # Tokens that come up early in one row and late or never in another.
        for eos in (free[0, 14].item(), free[1, 25].item(), free[2, 10].item()):
            options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0}
            assert torch.equal(model.generate(ids, **OPTIONS | options), eager(model, ids, **options))

    def test_several_ends(self, model):
        ids = prompt(1, 10)
        free = eager(model, ids, max_new_tokens=20)
        options = {"max_new_tokens": 20, "eos_token_id": [free[0, 18].item(), free[0, 16].item()], "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **OPTIONS | options), eager(model, ids, **options))

    def test_sampling(self, model):
        ids = prompt(2, 10)
        options = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "max_new_tokens": 25}
        texts = []
        for enabled in (True, False):
            torch.manual_seed(5)
            with graph.use_graphs(enabled):
                texts.append(model.generate(ids, **OPTIONS | options))
        assert torch.equal(*texts)

    def test_processors_see_the_text(self, model):
        ids = prompt(1, 10)
        options = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "max_new_tokens": 25, "min_new_tokens": 3}
        assert torch.equal(model.generate(ids, **OPTIONS | options), eager(model, ids, **options))

    def test_streaming(self, model):
        class Streamer:
            def __init__(self):
                self.tokens, self.ended = [], 0

            def put(self, value):
                self.tokens.append(value.flatten().tolist())

            def end(self):
                self.ended += 1

        ids = prompt(1, 10)
        free = eager(model, ids, max_new_tokens=30)
        for eos in (None, free[0, 20].item()):
            streamers = Streamer(), Streamer()
            options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": 0}
            model.generate(ids, streamer=streamers[0], **OPTIONS | options)
            eager(model, ids, streamer=streamers[1], **options)
            assert streamers[0].tokens == streamers[1].tokens
            assert streamers[0].ended == 1

    def test_one_token(self, model):
        ids = prompt(1, 10)
        assert torch.equal(model.generate(ids, max_new_tokens=1, **OPTIONS), eager(model, ids, max_new_tokens=1))

    def test_left_padding(self, model):
        ids = prompt(2, 16)
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        options = {"attention_mask": mask, "max_new_tokens": 12}
        assert torch.equal(model.generate(ids, **OPTIONS, **options), eager(model, ids, **options))

    def test_a_cache_of_the_callers(self, model):
        """It outlives the call, so it must hold exactly the tokens of the text."""
        ids = prompt(1, 10)
        cache = DynamicCache(config=model.config)
        text = model.generate(ids, cache=cache, max_new_tokens=8, **OPTIONS)
        assert cache.get_seq_length() == 17
        longer = torch.cat([text, prompt(1, 3)], 1)
        assert torch.equal(
            model.generate(longer, cache=cache, max_new_tokens=8, **OPTIONS), eager(model, longer, max_new_tokens=8)
        )

    def test_scores_are_given(self, model):
        ids = prompt(1, 10)
        outputs = model.generate(ids, max_new_tokens=5, output_scores=True, return_dict_in_generate=True, **OPTIONS)
        assert len(outputs.scores) == 5
        assert torch.equal(outputs.sequences, eager(model, ids, max_new_tokens=5))


def reason_for(model, ids, **options) -> str:
    dispatch.reset_explain()
    model.generate(ids, max_new_tokens=3, **OPTIONS, **options)
    lines = [line for line in dispatch.explain(show=False) if line.op == graph.SUBJECT]
    assert {line.backend for line in lines} == {"eager"}
    return lines[0].reason


def test_reasons_for_running_eagerly(model, monkeypatch):
    ids = prompt(1, 8)
    assert (
        reason_for(model, ids, cache=StaticCache(config=model.config, max_cache_len=32)) == "the cache is a StaticCache"
    )
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert reason_for(model, ids) == "modules have hooks"
    handle.remove()
    model.hf_device_map = {"a": 0, "b": "cpu"}
    assert reason_for(model, ids) == "the model is spread over devices"
    del model.hf_device_map
    model.generate(ids, max_new_tokens=3, **OPTIONS)
    assert len(model._decode_graphs) == 1


def test_what_a_graph_cannot_give_is_run(model):
    ids = prompt(1, 8)
    cache = model(input_ids=ids, use_cache=True).cache
    assert isinstance(cache, DynamicCache)
    outputs = model(input_ids=ids[:, :1], cache=cache, output_hidden_states=True)
    assert len(outputs.hidden_states) == 9
    with torch.enable_grad():
        assert model(input_ids=ids[:, :1], cache=cache).logits.requires_grad
    assert steps() == {}


# ----------------------------------------------------------------------------------------------- steps without a cache


class Steps(torch.nn.Module):
    """A model whose step is a function of tensors, one of which may be absent, and of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        # Calls of the code itself, those of a capture among them.
        self.runs = 0

    @graph.captured_step
    def step(self, x: torch.Tensor, y: torch.Tensor | None, factor: float) -> torch.Tensor:
        self.runs += 1
        return self.linear(x) * factor + (0 if y is None else y)

    def expected(self, x, y, factor):
        return self.linear(x) * factor + (0 if y is None else y)


@pytest.fixture
def stepping():
    return Steps().to(DEVICE).requires_grad_(False)


def how(model, *arguments) -> str:
    """Runs a step, checks it, and tells how it ran."""
    dispatch.reset_explain()
    assert torch.allclose(model.step(*arguments), model.expected(*arguments), atol=1e-6)
    [line] = [line for line in dispatch.explain(show=False) if line.op == graph.STEP]
    return line.backend if line.backend == "graph" else line.reason


def test_steps_are_captured_once_shapes_repeat(stepping):
    """The first with its shapes runs as written; others before the second do not matter."""
    first = "the first call with these shapes"
    x = [torch.randn(n, 8, device=DEVICE) for n in (3, 5)]
    assert how(stepping, x[0], None, 2.0) == first
    assert how(stepping, x[1], None, 2.0) == first
    assert how(stepping, x[0] + 1, None, 2.0) == "graph"
    assert how(stepping, x[1] + 1, None, 2.0) == "graph"
    for _ in range(3):
        assert how(stepping, torch.randn_like(x[0]), None, 2.0) == "graph"
    # What is not a tensor, what is absent, and dtypes count too.
    assert how(stepping, x[0], None, 3.0) == first
    assert how(stepping, x[0], x[0], 2.0) == first
    assert how(stepping, x[0], x[0] + 1, 2.0) == "graph"
    assert how(stepping, x[0], x[0].double(), 2.0) == first


def test_results_of_steps_stay(stepping):
    """Each is a tensor of its own, and arguments may have any strides."""
    xs = [torch.randn(8, 3, device=DEVICE).t() for _ in range(5)]
    results = [stepping.step(x, None, 1.5) for x in xs]
    for x, y in zip(xs, results, strict=True):
        assert torch.allclose(y, stepping.expected(x, None, 1.5), atol=1e-6)
    assert len({y.data_ptr() for y in results}) == 5


def test_weights_of_steps(stepping):
    """Written in place they count at the next replay; moved, the graph is captured anew."""
    x = torch.randn(3, 8, device=DEVICE)
    for _ in range(2):
        stepping.step(x, None, 1.0)
    stepping.linear.weight.mul_(2.0)
    assert how(stepping, x, None, 1.0) == "graph"
    stepping.linear.weight = torch.nn.Parameter(torch.randn(8, 8, device=DEVICE), requires_grad=False)
    assert how(stepping, x, None, 1.0) == "the first call with these shapes"
    assert how(stepping, x, None, 1.0) == "graph"


def test_few_graphs_of_steps_are_kept(stepping):
    for n in range(1, 6):
        for _ in range(2):
            stepping.step(torch.randn(n, 8, device=DEVICE), None, 1.0)
    assert [key[1][0][0][0] for key in graph._STEPS[stepping].graphs] == [4, 5]


def test_reasons_for_eager_steps(stepping):
    x = torch.randn(3, 8, device=DEVICE)
    handle = stepping.linear.register_forward_hook(lambda *_: None)
    assert how(stepping, x, None, 1.0) == "modules have hooks"
    handle.remove()
    own = stepping.linear.forward
    stepping.linear.forward = lambda x: own(x)
    assert how(stepping, x, None, 1.0) == "modules have hooks"
    del stepping.linear.forward
    stepping.peft_config = {"default": object()}
    assert how(stepping, x, None, 1.0) == "adapters are loaded"
    del stepping.peft_config
    stepping.linear.compile(backend="eager")
    assert how(stepping, x, None, 1.0) == "modules are compiled"


def test_steps_that_are_not_for_graphs(stepping):
    """With gradients, inside `use_graphs(False)`: not even noted."""
    x = torch.randn(3, 8, device=DEVICE)
    for _ in range(3):
        with graph.use_graphs(False):
            stepping.step(x, None, 1.0)
        with torch.enable_grad():
            stepping.linear.requires_grad_(True)
            assert stepping.step(x, None, 1.0).requires_grad
    assert stepping not in graph._STEPS
    assert dispatch.explain(show=False) == []


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is an accelerator")
def test_no_steps_are_captured_on_a_cpu(stepping, monkeypatch):
    monkeypatch.setattr(graph, "graph_class", lambda device: None)
    for _ in range(3):
        stepping.step(torch.randn(3, 8), None, 1.0)
    assert stepping.runs == 3
    assert stepping not in graph._STEPS
    assert dispatch.explain(show=False) == []


def test_models_with_captured_steps_are_copied(stepping):
    x = torch.randn(3, 8, device=DEVICE)
    for _ in range(2):
        stepping.step(x, None, 1.0)
    other = copy.deepcopy(stepping)
    assert how(other, x, None, 1.0) == "the first call with these shapes"
