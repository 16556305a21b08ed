"""Guesses of the MTP layer: greedy output is the model's, samples have its distribution, caches go back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV4Config

from tests.models.deepseek_v4.test_mtp import NARROW
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.deepseek_v4.speculation import Speculation, check_speculation
from xpu_ports.models.deepseek_v4.train_mtp import evaluate

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.txt"
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 60}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**NARROW | {"index_topk": 5}, mtp=True)).eval()
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            t.data = torch.stack([torch.randperm(6)[:3] for _ in range(96)])
        elif name.endswith(("sinks", "position_bias", "base")):
            t.data.normal_()
    return model


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def forwards(model) -> Iterator[list[int]]:
    """The tokens of each forward of the model."""
    seen: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield seen
    hook.remove()


def guessing(monkeypatch, ids: Tensor, right: int) -> None:
    """Make all guesses from those tokens: `right` of them, then wrong ones."""
    propose = Speculation.propose

    def instead(self, so_far: Tensor, new: Tensor, streams: Tensor):
        # The layer runs all the same: its cache goes forth and back.
        guesses, scores = propose(self, so_far, new, streams)
        truth = ids[:, so_far.shape[1] :][:, : self.drafts]
        guesses = torch.nn.functional.pad(truth, (0, self.drafts - truth.shape[1]), value=3).clone()
        guesses[:, right:] = (guesses[:, right:] + 1) % 96
        return guesses, scores

    monkeypatch.setattr(Speculation, "propose", instead)


@pytest.mark.parametrize("length", [1, 2, 23])
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_greedy(model, drafts, length):
    prompt = torch.randint(3, 96, (1, length))
    plain = model.generate(prompt, **GREEDY)
    assert torch.equal(model.generate(prompt, draft="mtp", num_draft_tokens=drafts, **GREEDY), plain)
    assert 0 <= model.draft_acceptance <= 1


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_how_many_are_right(model, monkeypatch, forwards, right):
    """Through the ends of windows and of the choice of entries, with any number of guesses taken back."""
    prompt = torch.randint(3, 96, (1, 30))
    plain = model.generate(prompt, **GREEDY)
    guessing(monkeypatch, plain, right)
    forwards.clear()
    assert torch.equal(model.generate(prompt, draft="mtp", num_draft_tokens=4, **GREEDY), plain)
    # A token by the prompt, right + 1 by each round.
    assert forwards == [30, *[5] * -(-59 // (right + 1))]


def test_the_end_of_a_text(model):
    prompt = torch.randint(3, 96, (1, 12))
    plain = model.generate(prompt, **GREEDY)
    options = GREEDY | {"eos_token_id": int(plain[0, 40]), "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    assert expected.shape[1] <= 41
    assert torch.equal(model.generate(prompt, draft="mtp", num_draft_tokens=4, **options), expected)


def test_processors_see_the_guesses(model):
    """A penalty on repetitions, of which guesses may be ones."""
    prompt, options = torch.randint(3, 96, (1, 12)), GREEDY | {"repetition_penalty": 1.7, "no_repeat_ngram_size": 3}
    plain = model.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, draft="mtp", num_draft_tokens=3, **options), plain)
    assert not torch.equal(plain, model.generate(prompt, **GREEDY))


class Streamer:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, tokens: Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streaming(model):
    prompt, streamer = torch.randint(3, 96, (1, 12)), Streamer()
    tokens = model.generate(prompt, draft="mtp", num_draft_tokens=3, streamer=streamer, **GREEDY)
    assert streamer.tokens == tokens[0].tolist()
    assert streamer.ended


def test_samples_have_the_models_distribution():
    """Two guesses from a distribution far from the model's: the first two tokens are the model's, and independent."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    q = torch.tensor([[0.1, 0.1, 0.3, 0.5], [0.4, 0.4, 0.1, 0.1]])
    run = Speculation.__new__(Speculation)
    run.sample, run.process = True, lambda ids, scores: scores
    counts, N = torch.zeros(4, 4), 6000
    for _ in range(N):
        guesses = torch.multinomial(q, 1).T
        kept = run.check(torch.zeros(1, 0, dtype=torch.int64), guesses, list(q[:, None]), p.log()[None])[0].tolist()
        # What follows the first token is the next round's, if there was no second.
        second = kept[1] if len(kept) > 1 else int(torch.multinomial(p[1], 1))
        counts[kept[0], second] += 1
    expected = p[0][:, None] * p[1]
    assert (counts / N - expected).abs().max() < 4 * (0.25 / N) ** 0.5
    assert counts[3].sum() == 0


def test_sampling(model):
    options = GREEDY | {"do_sample": True, "top_k": 5, "temperature": 0.7, "max_new_tokens": 30}
    prompt = torch.randint(3, 96, (1, 12))
    tokens = model.generate(prompt, draft="mtp", num_draft_tokens=2, **options)
    assert tokens.shape == (1, 42)
    # Every token is one of the five that the model may say there.
    top = model(tokens).logits[0, 11:-1].topk(5).indices
    assert (top == tokens[0, 12:, None]).any(-1).all()


@pytest.fixture(scope="module")
def trained():
    """tiny-deepseek-v4 with the layer that it has."""
    return DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, mtp=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return tokenizer(HELDOUT.read_text()[:16000], return_tensors="pt").input_ids[0]


def test_guesses_of_the_trained_layer(trained, text):
    """On held-out text most are the model's likeliest token; the one before that is not."""
    windows = text[: 12 * 256].view(12, 256)
    assert evaluate(trained, windows, 12)[1] > 0.6
    likeliest = trained(windows).logits.argmax(-1)
    assert (likeliest[:, 1:] == likeliest[:, :-1]).float().mean() < 0.1


def test_drafts_of_the_trained_layer(trained, text):
    acceptance = []
    for start in (100, 900, 1700):
        prompt = text[start : start + 40][None]
        plain = trained.generate(prompt, **GREEDY)
        assert torch.equal(trained.generate(prompt, draft="mtp", **GREEDY), plain)
        acceptance.append(trained.draft_acceptance)
    assert sum(acceptance) > 0.5 * len(acceptance)


REFUSED = {
    "another kind": (dict(draft="ngram"), "only 'mtp' is known"),
    "no guesses": (dict(draft="mtp", num_draft_tokens=0), "not 1 to 32"),
    "too many": (dict(draft="mtp", num_draft_tokens=33), "not 1 to 32"),
    "beams": (dict(draft="mtp", num_beams=2), "greedy decoding and sampling"),
    "scores": (dict(draft="mtp", return_dict_in_generate=True), "tokens alone"),
    "no cache": (dict(draft="mtp", use_cache=False), "the cache that generate makes"),
}


@pytest.mark.parametrize(("options", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(model, options, why):
    with pytest.raises(ValueError, match=why):
        model.generate(torch.randint(3, 96, (1, 12)), max_new_tokens=3, **options)


def test_refuses_several_sequences_and_padding(model):
    for batch, mask in ((2, torch.ones(2, 5)), (1, torch.tensor([[0, 1, 1, 1, 1]]))):
        with pytest.raises(ValueError, match="one sequence without padding"):
            model.generate(torch.randint(3, 96, (batch, 5)), attention_mask=mask, draft="mtp", max_new_tokens=3)


def test_refuses_a_model_without_the_layer():
    with pytest.raises(ValueError, match="loaded with mtp=True"):
        check_speculation("mtp", 1, SimpleNamespace())


def test_refuses_a_model_on_several_devices():
    with pytest.raises(ValueError, match="on one device: device_map has layers on 0, 1"):
        check_speculation("mtp", 1, SimpleNamespace(mtp=[], hf_device_map={"model.layers.0": 0, "mtp": 1}))
