"""DeepSeek-V4 against transformers' own classes, and against itself: cache, padding, pieces, choice, routing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, DeepseekV4Config, DynamicCache
from transformers import DeepseekV4ForCausalLM as TransformersV4

from xpu_ports.common.kernels import indexer as indexer_module
from xpu_ports.common.modules import known_early
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM, modeling_deepseek_v4
from xpu_ports.models.deepseek_v4.rope import Positions, frequencies

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.txt"
# Largest difference of logits in fp32 (the largest logit of tiny-deepseek-v4 is 17).
TO_TRANSFORMERS = 1e-4
DECODE_TO_FULL = 1e-4
PADDING = 1e-4
# More entries than any sequence here has: the indexer chooses all.
ALL = {"index_topk": 1000}

# Narrow, with what the published models have and the tiny checkpoint has not: YaRN, several groups, odd widths.
NARROW: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 1, "head_dim": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "max_position_embeddings": 4096, "sliding_window": 12,
    "compress_ratios": [0, 128, 4, 128, 4, 0], "compress_rate_hca": 9, "num_hash_layers": 2, "hc_mult": 4,
    "o_groups": 3, "o_lora_rank": 14, "index_n_heads": 16, "index_head_dim": 18, "index_topk": 1000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
                     "beta_slow": 1},
    "swiglu_limit": 0.4, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


LENGTHS = [(1,), (3,), (37, 5, 90), (64, 7), (17, 1, 1, 130)]


def load(folder: Path, dtype: torch.dtype = torch.float32, cls: type = DeepseekV4ForCausalLM, **overrides):
    return cls.from_pretrained(folder, dtype=dtype, **overrides).eval()


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Held-out tokens, [1, 2048]."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return tokenizer(HELDOUT.read_text()[:40000], return_tensors="pt").input_ids[:, :2048]


@pytest.fixture(scope="module")
def ids(text: Tensor) -> Tensor:
    return text[:, :300]


@pytest.fixture(scope="module")
def tiny():
    """As shipped: the indexer chooses 16 entries."""
    return load(CHECKPOINT)


@pytest.fixture(scope="module")
def exact():
    return load(CHECKPOINT, torch.float64)


@pytest.fixture(scope="module")
def full(ids, tiny) -> Tensor:
    with torch.no_grad():
        return tiny(ids).logits


@pytest.fixture(scope="module")
def theirs():
    return load(CHECKPOINT, cls=TransformersV4, **ALL)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    """A saved random model made by transformers; what it leaves at zero is filled."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("narrow")
    model = TransformersV4(DeepseekV4Config(**NARROW))
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        kind = name.rsplit(".", 1)[-1]
        if kind == "tid2eid":
            t.data = torch.stack([torch.randperm(6)[:3] for _ in range(96)])
        elif kind in ("sinks", "position_bias", "base", "hc_base", "e_score_correction_bias"):
            t.data.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def in_pieces(model, ids: Tensor, *lengths: int, attention_mask: Tensor | None = None, cache=None) -> Tensor:
    """Logits of all tokens, fed in pieces: the lengths in turn, the last one repeated."""
    logits, start = [], 0
    while start < ids.shape[1]:
        length = lengths[min(len(logits), len(lengths) - 1)]
        piece = slice(start, start + length)
        mask = None if attention_mask is None else attention_mask[:, : piece.stop]
        outputs = model(ids[:, piece], attention_mask=mask, cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
        start += length
    return torch.cat(logits, dim=1)


def left_padded(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n] of tokens behind padding, and the mask."""
    length = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), length, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids[b, length - len(row) :], mask[b, length - len(row) :] = row, 1
    return ids, mask


class TestAgainstTransformers:
    def test_logits(self, ids, theirs):
        ours, expected = load(CHECKPOINT, **ALL)(ids).logits, theirs(ids).logits
        assert largest(ours, expected) <= TO_TRANSFORMERS
        assert ours.abs().max() > 10

    def test_hidden_states_layer_by_layer(self, ids, theirs):
        """The four streams behind every layer."""
        ours = load(CHECKPOINT, **ALL)(ids[:, :90], output_hidden_states=True).hidden_states
        expected: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda *args: expected.append(args[-1])) for layer in theirs.model.layers]
        theirs(ids[:, :90])
        for hook in hooks:
            hook.remove()
        assert len(ours) == 7
        for a, b in zip(ours[1:], expected, strict=True):
            assert largest(a, b) <= 2e-5 * b.abs().max()

    def test_greedy_tokens(self, ids, theirs):
        """200 of them, a cached step each; half of the prompts end inside a window."""
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 200}
        prompt = ids[:, :21]
        ours = load(CHECKPOINT, **ALL).generate(prompt, **options)
        assert torch.equal(ours, theirs.generate(prompt, **options))

    @pytest.mark.parametrize("top_k", [1000, 7])
    def test_a_random_model_with_yarn(self, narrow, top_k):
        """Beyond the context trained on; with a choice too, among scores of 16 heads that have no ties."""
        x = torch.randint(3, 96, (2, 150))
        ours, expected = (load(narrow, cls=cls, index_topk=top_k) for cls in (DeepseekV4ForCausalLM, TransformersV4))
        a, b = ours(x).logits, expected(x).logits
        assert largest(a, b) <= 1e-5 * b.abs().max()

    def test_gradients(self, narrow):
        ours, expected = load(narrow), load(narrow, cls=TransformersV4)
        x = torch.randint(3, 96, (2, 40))
        with torch.enable_grad():
            for model in (ours, expected):
                model(x, labels=x, use_cache=False).loss.backward()
        found, known = dict(ours.named_parameters()), dict(expected.named_parameters())
        compared = 0
        for name, parameter in found.items():
            if "indexer" in name:
                # A choice passes no gradient.
                assert parameter.grad is None
                continue
            if name in known:
                want = known[name].grad
            elif "kv_gate" in name:
                want = torch.cat([known[name.replace("kv_gate", part)].grad for part in ("kv", "gate")])
            else:
                want = torch.cat([known[name.replace("gate_up", part)].grad for part in ("gate", "up")])
            assert largest(parameter.grad, want) <= 1e-4 * want.abs().max() + 1e-7, name
            compared += 1
        assert compared > 90

    def test_bfloat16(self, ids, theirs):
        """No further from fp32 than transformers is."""
        exact = theirs(ids).logits.log_softmax(-1)

        def divergence(cls: type) -> float:
            other = load(CHECKPOINT, torch.bfloat16, cls, **ALL)(ids).logits.float().log_softmax(-1)
            return (exact.exp() * (exact - other)).sum(-1).median().item()

        assert divergence(DeepseekV4ForCausalLM) <= 1.1 * divergence(TransformersV4)


def _swap_rotations(model: Any) -> None:
    parameters = model.model.positions.parameters
    parameters["main"], parameters["compress"] = parameters["compress"], parameters["main"]


class Scaled(Positions):
    """With YaRN's mscale, on cos and sin of layers with entries."""

    def __call__(self, *args: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        main, *compress = super().__call__(*args)
        return [main, *((windows, 1.277 * cos, 1.277 * sin) for windows, cos, sin in compress)]


def _scale(model: Any) -> None:
    model.model.positions.__class__ = Scaled


def _patched(name: str, change: Callable) -> Callable:
    """An op of the modeling file replaced by what `change` makes of it."""

    def apply(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(modeling_deepseek_v4, name, change(getattr(modeling_deepseek_v4, name)))

    return apply


def _on_modules(change: Callable) -> Callable:
    return lambda model, monkeypatch: [change(module) for module in model.modules()]


BROKEN: dict[str, Callable] = {
    "no sinks": _on_modules(lambda m: m.sinks.fill_(-1e4) if hasattr(m, "sinks") else None),
    "no clamp": _on_modules(lambda m: setattr(m, "limit", None) if hasattr(m, "limit") else None),
    "the output not turned back": _patched(
        "inverse_rope_grouped_out", lambda op: lambda o, cos, sin, w: op(o, torch.ones_like(cos), 0 * sin, w)
    ),
    "the output turned on": _patched("inverse_rope_grouped_out", lambda op: lambda o, c, s, w: op(o, c, -s, w)),
    "streams mixed the other way": _patched("mhc_post", lambda op: lambda y, x, post, comb: op(y, x, post, comb.mT)),
    "one iteration of Sinkhorn's": _on_modules(
        lambda m: setattr(m, "iterations", 1) if hasattr(m, "iterations") else None
    ),
    "the tables swapped": lambda model, monkeypatch: _swap_rotations(model),
    "YaRN's mscale": lambda model, monkeypatch: _scale(model),
    "entries at their number": _patched(
        "norm_rope_insert",
        lambda op: lambda pool, w, c, s, *rest: op(pool, w, torch.ones_like(c), torch.zeros_like(s), *rest),
    ),
    "windows that do not overlap": _on_modules(
        lambda m: m.position_bias[:, : m.position_bias.shape[1] // 2].sub_(1e4) if hasattr(m, "indexer") else None
    ),
    "the bias in the weights of experts": _patched(
        "moe_sqrtsoftplus_router", lambda op: lambda logits, bias, k, s: op(logits + bias, 0 * bias, k, s)
    ),
    "scores instead of the table": _patched(
        "moe_hash_router",
        lambda op: lambda x, table, ids, s: modeling_deepseek_v4.moe_sqrtsoftplus_router(x, x.new_zeros(6), 3, s),
    ),
    "a window that is one shorter": _on_modules(
        lambda m: setattr(m, "span", m.span - 1) if hasattr(m, "span") else None
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", ["none", *BROKEN])
def test_what_the_comparison_sees(narrow, monkeypatch, fault):
    """Each mistake that ports of this model have made is far above the tolerance."""
    x = torch.randint(3, 96, (1, 100))
    model, expected = load(narrow), load(narrow, cls=TransformersV4)(x).logits
    if fault != "none":
        BROKEN[fault](model, monkeypatch)
    difference = largest(model(x).logits, expected) / expected.abs().max().item()
    assert difference <= 1e-5 if fault == "none" else difference > 1e-3


def test_without_relu_the_choice_is_another(narrow, monkeypatch):
    x = torch.randint(3, 96, (1, 100))
    model = load(narrow, index_topk=7)
    expected = model(x).logits
    monkeypatch.setattr(Tensor, "relu", lambda t: t)
    assert largest(model(x).logits, expected) > 1e-3


class TestRotation:
    def test_the_published_yarn(self):
        """Theta 160,000, 64 columns, factor 16 from 65,536: the fast pairs as they are, the slow ones a sixteenth."""
        yarn = {
            "rope_type": "yarn", "rope_theta": 160000.0, "factor": 16, "original_max_position_embeddings": 65536,
            "beta_fast": 32, "beta_slow": 1,
        }  # fmt: skip
        plain = 160000.0 ** -(torch.arange(0, 64, 2) / 64)
        found = frequencies(yarn, 64)
        # 32 turns in 65,536 tokens are made between pairs 15 and 16, one between 24 and 25.
        torch.testing.assert_close(found[:16], plain[:16])
        torch.testing.assert_close(found[25:], plain[25:] / 16)
        assert ((found[16:25] < plain[16:25]) & (found[16:25] > plain[16:25] / 16)).all()
        start = torch.tensor([70000])
        (_, *main), (_, *compress) = Positions({"main": yarn, "compress": yarn}, 64, {})(start, start + 1, 1, [])
        torch.testing.assert_close(main[0].square() + main[1].square(), torch.ones(1, 1, 32))
        assert torch.equal(main[0], (70000 * found).cos()[None, None])
        assert torch.equal(compress[1], (70000 * found).sin()[None, None])

    @pytest.mark.parametrize("T", [1, 2, 5, 9, 200])
    def test_windows(self, tiny, T):
        """Rows of their own lengths, of which some of the tokens are their own: against a loop."""
        start, count = torch.tensor([0, 13, 127]), torch.tensor([T, T // 2, 0])
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
        main, compress, *entries = tiny.model.positions(start, start + count, T, list(rates))
        for (windows, cos, sin), r in zip((main, compress, *entries), (1, 1, *rates.values()), strict=True):
            turns = frequencies(tiny.config.rope_parameters["compress" if windows is not main[0] else "main"], 64)
            assert windows.shape == (3, -(-T // r))
            for b in range(3):
                for n in range(windows.shape[1]):
                    w = int(start[b]) // r + n
                    assert windows[b, n] == (w if (w + 1) * r <= start[b] + count[b] else -1)
                    assert torch.equal(cos[b, n], (w * r * turns).cos())
                    assert torch.equal(sin[b, n], (w * r * turns).sin())

    def test_stays_in_fp32(self, tiny):
        model, start = load(CHECKPOINT, torch.bfloat16), torch.tensor([999])
        for m in (model, model.half()):
            for a, b in zip(*(x.model.positions(start, start + 1, 1, []) for x in (m, tiny)), strict=True):
                assert torch.equal(a[1], b[1])


class TestPieces:
    @pytest.mark.parametrize("start", range(96, 112))
    def test_decode_from_every_place_in_a_window(self, ids, tiny, full, start):
        """Modulo 4 and 16, with the shipped choice of 16 entries: of 26 and more."""
        length = start + 21
        assert largest(in_pieces(tiny, ids[:, :length], start, 1), full[:, :length]) <= DECODE_TO_FULL

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_pieces(self, ids, exact, lengths):
        """In fp64, where no two scores are so close that the sums' order decides which entry is chosen."""
        assert largest(in_pieces(exact, ids[:, :150], *lengths), exact(ids[:, :150]).logits) <= 1e-11

    @pytest.mark.parametrize("lengths", LENGTHS)
    def test_pieces_in_fp32(self, ids, lengths):
        """Every entry chosen."""
        model = load(CHECKPOINT, **ALL)
        assert largest(in_pieces(model, ids[:, :150], *lengths), model(ids[:, :150]).logits) <= DECODE_TO_FULL

    def test_tiles(self, ids, tiny, full, monkeypatch):
        monkeypatch.setattr(modeling_deepseek_v4, "TILE", 23)
        assert largest(tiny(ids).logits, full) <= DECODE_TO_FULL
        assert largest(in_pieces(tiny, ids, 100), full) <= DECODE_TO_FULL

    def test_the_choice_is_not_idle(self, ids, tiny, full):
        """With 75 entries 16 are another answer than all."""
        assert largest(load(CHECKPOINT, **ALL)(ids).logits, full) > 0.1

    def test_of_equal_scores_the_lower_index(self, ids, tiny, full, monkeypatch):
        """A quarter of the scores are 0. The other rule tells decode from prefill apart: rows have other lengths."""

        def last_of_equals(scores: Tensor, k: int) -> Tensor:
            chosen = indexer_module.stable_topk(scores.flip(-1), k)
            return torch.where(chosen < 0, -1, scores.shape[-1] - 1 - chosen)

        monkeypatch.setattr(modeling_deepseek_v4, "stable_topk", last_of_equals)
        assert largest(tiny(ids).logits, full) > 0.1

    def test_300_greedy_tokens(self, ids, tiny):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 300}
        tokens = tiny.generate(ids[:, :50], **options)
        again = tiny(tokens).logits[:, 49:-1].argmax(-1)
        assert torch.equal(again, tokens[:, 50:])

    def test_beams(self, ids, tiny):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 20, "num_beams": 3}
        cached = tiny.generate(ids[:, :70], **options)
        assert torch.equal(cached, tiny.generate(ids[:, :70], **options, use_cache=False))


class TestPadding:
    @pytest.mark.parametrize("padding", [1, 2, 3, 7, 16, 33])
    def test_left(self, ids, tiny, full, padding):
        x, mask = left_padded(ids[0, :120], torch.randint(3, 2000, (120 + padding,)))
        assert largest(tiny(x, attention_mask=mask).logits[:1, padding:], full[:, :120]) <= PADDING

    def test_left_in_pieces(self, ids, tiny, full):
        """Pieces that end inside the padding of one row and behind that of the other."""
        x, mask = left_padded(ids[0, :100], ids[0, :120])
        for lengths in ((10, 15, 1), (50, 30, 1)):
            logits = in_pieces(tiny, x, *lengths, attention_mask=mask)
            assert largest(logits[0, 20:], full[0, :100]) <= PADDING
            assert largest(logits[1], full[0, :120]) <= PADDING

    def test_right_and_between(self, ids, tiny, full):
        """What does not count changes nothing, wherever it stands."""
        x, mask = ids[:, :90].clone(), torch.ones(1, 90, dtype=torch.int64)
        for hole in (slice(20, 23), slice(60, 67), slice(85, 90)):
            mask[:, hole] = 0
        kept = mask[0].bool()
        x[:, kept], x[:, ~kept] = ids[:, : int(kept.sum())], 5
        for logits in (tiny(x, attention_mask=mask).logits, in_pieces(tiny, x, 64, 1, attention_mask=mask)):
            assert largest(logits[:, kept], full[:, : int(kept.sum())]) <= PADDING

    def test_generate(self, ids, tiny):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 40}
        x, mask = left_padded(ids[0, :30], ids[0, 100:147])
        together = tiny.generate(x, attention_mask=mask, **options)
        assert torch.equal(together[0, 47:], tiny.generate(ids[:, :30], **options)[0, 30:])
        assert torch.equal(together[1], tiny.generate(ids[:, 100:147], **options)[0])

    def test_hidden_states_are_put_back(self, ids, tiny):
        x, mask = left_padded(ids[0, :30], ids[0, :37])
        alone = tiny(ids[:, :30], output_hidden_states=True).hidden_states
        padded = tiny(x, attention_mask=mask, output_hidden_states=True).hidden_states
        for a, b in zip(alone, padded, strict=True):
            assert largest(a[0], b[0, 7:]) <= 1e-4 * a.abs().max()


class TestReadersOfStreams:
    """Who writes streams makes the products of who reads them, where its weights are known by then."""

    def makers(self, tiny, monkeypatch, ids, few=8) -> tuple[list[bool], Tensor]:
        """Of each reader whether products were given, and the logits."""
        given = []
        for name in ("mhc_pre", "mhc_head"):
            called = getattr(modeling_deepseek_v4, name)

            def counted(*args, called=called):
                given.append(args[-1] is not None)
                return called(*args)

            monkeypatch.setattr(modeling_deepseek_v4, name, counted)
        logits = tiny(ids[:, :few]).logits
        monkeypatch.undo()
        return given, logits

    def test_all_but_the_first(self, ids, tiny, full, monkeypatch):
        given, logits = self.makers(tiny, monkeypatch, ids)
        assert given == [False] + [True] * 2 * len(tiny.model.layers)
        assert largest(logits, full[:, :8]) < 1e-3
        given, _ = self.makers(tiny, monkeypatch, ids, 9)
        assert not any(given)
        monkeypatch.setattr(modeling_deepseek_v4, "products_save_time", lambda y, x, fn: True)
        given, logits = self.makers(tiny, monkeypatch, ids, 9)
        assert given == [False] + [True] * 2 * len(tiny.model.layers)
        assert largest(logits, full[:, :9]) < 1e-3

    @pytest.mark.parametrize("hooked", ["layers.0.ffn_hc", "layers.1.attn_hc", "hc_head"])
    def test_one_with_hooks_makes_its_own(self, ids, tiny, full, monkeypatch, hooked):
        reader = tiny.model.get_submodule(hooked)
        handle = reader.register_forward_pre_hook(lambda *args: None)
        try:
            given, logits = self.makers(tiny, monkeypatch, ids)
        finally:
            handle.remove()
        readers = [m for m in tiny.model.modules() if type(m) is modeling_deepseek_v4.DeepseekV4HyperConnection] + [
            tiny.model.hc_head
        ]
        assert given == [i > 0 and m is not reader for i, m in enumerate(readers)]
        assert largest(logits, full[:, :8]) < 1e-3

    @pytest.mark.parametrize("elsewhere", ["device", "rank", "forward"])
    def test_weights_that_are_not_there_yet(self, tiny, elsewhere):
        reader = copy.deepcopy(tiny.model.layers[0].ffn_hc)
        assert known_early(reader, "fn", torch.device("cpu")) is reader.fn
        assert known_early(reader, "fn", torch.device("meta")) is None
        if elsewhere == "device":
            reader.to("meta")
        elif elsewhere == "rank":
            reader.fn = nn.Parameter(reader.fn.detach().as_subclass(Share))
        else:
            reader.forward = lambda x: x
        assert known_early(reader, "fn", torch.device("cpu")) is None


class Share(Tensor):
    """A tensor that is of another class."""


class TestFP8:
    def test_far_from_the_models_dtype(self, text):
        """2048 tokens, every entry chosen: the quantized rows alone."""
        model, x = load(CHECKPOINT, **ALL), text.view(8, 256)
        exact = model(x).logits.log_softmax(-1)
        model.config.cache_dtype = "fp8"
        other = model(x).logits.log_softmax(-1)
        assert 1e-5 < (exact.exp() * (exact - other)).sum(-1).mean() < 3e-3
        assert (exact.argmax(-1) == other.argmax(-1)).double().mean() >= 0.99

    @pytest.mark.parametrize("lengths", [(37, 5, 90), (64, 7), (101, 1)])
    def test_pieces(self, ids, tiny, lengths):
        """Decode reads what prefill attended to: rows as they were written. A value beside a tie may round apart."""
        caches = [DeepseekV4Cache(tiny.config, "fp8") for _ in range(2)]
        whole = tiny(ids[:, :150], cache=caches[0], use_cache=True).logits
        pieces = in_pieces(tiny, ids[:, :150], *lengths, cache=caches[1])
        apart = (whole - pieces).abs().amax(-1)
        assert apart.median() < 1e-3
        assert apart.max() < 0.1

    def test_generate(self, ids):
        model = load(CHECKPOINT, cache_dtype="fp8")
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 30}
        x, mask = left_padded(ids[0, :30], ids[0, 100:147])
        together = model.generate(x, attention_mask=mask, return_dict_in_generate=True, **options)
        assert all(layer.window.dtype == torch.uint8 for layer in together.cache.layers)
        assert torch.equal(together.sequences[0, 47:], model.generate(ids[:, :30], **options)[0, 30:])


class TestInputs:
    def test_embeddings_beside_ids(self, ids, tiny, full):
        h = tiny.model.embed_tokens(ids)
        assert largest(tiny(ids, inputs_embeds=h).logits, full) <= DECODE_TO_FULL
        # The ids choose experts alone: other embeddings are another answer, and so are other ids.
        assert largest(tiny(ids, inputs_embeds=h.flip(1)).logits, full) > 0.1
        assert largest(tiny(ids.flip(1), inputs_embeds=h).logits, full) > 0.1

    def test_embeddings_alone(self, ids, tiny):
        with pytest.raises(ValueError, match="give input_ids beside inputs_embeds"):
            tiny(inputs_embeds=tiny.model.embed_tokens(ids))

    def test_embeddings_alone_where_no_layer_reads_ids(self, tmp_path, narrow):
        config = DeepseekV4Config(**NARROW | {"num_hash_layers": 0})
        model, x = DeepseekV4ForCausalLM(config).eval(), torch.randint(3, 96, (1, 30))
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(x)).logits, model(x).logits)

    def test_refusals(self, ids, tiny):
        with pytest.raises(ValueError, match="give input_ids"):
            tiny()
        with pytest.raises(ValueError, match="DynamicCache, expected a DeepseekV4Cache"):
            tiny(ids, cache=DynamicCache())
        with pytest.raises(ValueError, match="4 dimensions"):
            tiny(ids, attention_mask=torch.zeros(1, 1, 300, 300))
        with pytest.raises(ValueError, match="one cache of its own"):
            tiny.generate(ids, cache_implementation="static", max_new_tokens=2)

    def test_loss(self, ids, theirs):
        ours = load(CHECKPOINT, **ALL)(ids, labels=ids).loss
        torch.testing.assert_close(ours, theirs(ids, labels=ids).loss)

    def test_router_logits(self, ids, tiny):
        logits = tiny(ids, output_router_logits=True).router_logits
        assert [t.shape for t in logits] == [(300, 8)] * 6

    def test_logits_to_keep(self, ids, tiny, full):
        assert largest(tiny(ids, logits_to_keep=3).logits, full[:, -3:]) <= DECODE_TO_FULL
