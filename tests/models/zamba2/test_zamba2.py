"""Zamba2 against transformers' own classes, and against itself: cache, padding, pieces, beams, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache, TextIteratorStreamer, Zamba2Config, pipeline
from transformers import Zamba2ForCausalLM as TransformersZamba2

import xpu_ports.models
from xpu_ports.common.dispatch import explain, reset_explain, use_choices
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.models.zamba2.layouts import LAYOUTS, layout_config

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-zamba2"
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.txt"
# Largest difference of logits in fp32 (the largest logit of tiny-zamba2 is 16).
TO_TRANSFORMERS = 1e-4
DECODE_TO_FULL = 1e-4
PADDING = 2e-5

# The released shapes made narrow: their depth, their places of shared blocks, their head widths.
NARROW = {
    "1.2b": {"hidden_size": 64, "num_attention_heads": 1, "n_mamba_heads": 2},
    "2.7b": {"hidden_size": 80, "num_attention_heads": 1, "n_mamba_heads": 5},
    "7b": {"hidden_size": 112, "num_attention_heads": 1, "n_mamba_heads": 14},
}


def load(folder: Path, dtype: torch.dtype = torch.float32, clamp: bool = False, cls: type = Zamba2ForCausalLM):
    config = Zamba2Config.from_pretrained(folder)
    config.clamp_prefill_dt = clamp
    return cls.from_pretrained(folder, config=config, dtype=dtype).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def ids(tokenizer) -> Tensor:
    """300 held-out tokens, [1, 300]."""
    return tokenizer(HELDOUT.read_text()[:4000], return_tensors="pt").input_ids[:, :300]


@pytest.fixture(scope="module")
def tiny():
    return load(CHECKPOINT)


@pytest.fixture(scope="module")
def theirs():
    return load(CHECKPOINT, cls=TransformersZamba2)


@pytest.fixture(scope="module", params=list(NARROW))
def narrow(request, tmp_path_factory) -> Path:
    """A saved random model of a released layout, made by transformers."""
    torch.manual_seed(0)
    config = layout_config(
        request.param,
        **NARROW[request.param],
        vocab_size=96,
        intermediate_size=96,
        adapter_rank=4,
        mamba_d_state=16,
        chunk_size=16,
    )
    folder = tmp_path_factory.mktemp(request.param)
    TransformersZamba2(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def largest(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def in_pieces(model, ids: Tensor, *lengths: int, attention_mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, fed in pieces: the lengths in turn, the last one repeated."""
    cache, logits, start = None, [], 0
    while start < ids.shape[1]:
        length = lengths[min(len(logits), len(lengths) - 1)]
        piece = slice(start, start + length)
        mask = None if attention_mask is None else attention_mask[:, : piece.stop]
        outputs = model(ids[:, piece], attention_mask=mask, cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
        start += length
    return torch.cat(logits, dim=1)


class TestAgainstTransformers:
    def test_keys_are_equal(self, tiny, theirs):
        assert tiny.state_dict().keys() == theirs.state_dict().keys()

    def test_logits(self, ids, theirs):
        ours = load(CHECKPOINT, clamp=True)(ids).logits
        assert largest(ours, theirs(ids).logits) <= TO_TRANSFORMERS
        assert ours.abs().max() > 10

    def test_the_switch_changes_the_prefill(self, ids, tiny):
        assert largest(load(CHECKPOINT, clamp=True)(ids).logits, tiny(ids).logits) > TO_TRANSFORMERS

    def test_beams(self, ids, tiny, theirs):
        options = {"max_new_tokens": 60, "num_beams": 2, "do_sample": False}
        # dt is not clamped in transformers' decode, so the switch matters for the prompt alone.
        ours = load(CHECKPOINT, clamp=True).generate(ids[:, :20], **options)
        assert torch.equal(ours, theirs.generate(ids[:, :20], **options))

    def test_bfloat16_is_no_further_from_float32(self, ids, tiny, theirs):
        def divergence(model, cls) -> float:
            exact = model(ids).logits.double().log_softmax(-1)
            rounded = load(CHECKPOINT, torch.bfloat16, cls=cls)(ids).logits.double().log_softmax(-1)
            return (exact.exp() * (exact - rounded)).sum(-1).mean().item()

        assert 0 < divergence(tiny, Zamba2ForCausalLM) <= 1.1 * divergence(theirs, TransformersZamba2)

    def test_hidden_states_and_attentions(self, ids):
        ours = load(CHECKPOINT, clamp=True)
        ours.set_attn_implementation("eager")
        theirs = load(CHECKPOINT, cls=TransformersZamba2)
        ours_out = ours(ids[:, :33], output_hidden_states=True, output_attentions=True)
        theirs_out = theirs(ids[:, :33], output_hidden_states=True)
        assert len(ours_out.hidden_states) == len(theirs_out.hidden_states) == 9
        for a, b in zip(ours_out.hidden_states, theirs_out.hidden_states, strict=True):
            assert largest(a, b) <= TO_TRANSFORMERS
        assert [a.shape for a in ours_out.attentions] == [(1, 4, 33, 33)] * 2

    def test_loss(self, ids, theirs):
        ours = load(CHECKPOINT, clamp=True)
        assert abs(ours(ids, labels=ids).loss - theirs(ids, labels=ids).loss) <= 1e-5

    def test_gradients(self, ids, theirs):
        ours = load(CHECKPOINT, clamp=True)
        with torch.enable_grad():
            for model in (ours, theirs):
                model.zero_grad()
                model(ids[:, :40], labels=ids[:, :40]).loss.backward()
        expected = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            scale = expected[name].grad.abs().max()
            assert largest(parameter.grad, expected[name].grad) <= 1e-3 * scale + 1e-6, name
        theirs.zero_grad()


class TestLayouts:
    @pytest.mark.parametrize(
        ("name", "tensors", "billions"), [("1.2b", 406, 1.215), ("2.7b", 531, 2.662), ("7b", 786, 7.357)]
    )
    def test_real_sizes(self, name, tensors, billions):
        with torch.device("meta"):
            model = Zamba2ForCausalLM(layout_config(name))
        model.tie_weights()
        parameters = list(model.parameters())
        assert len(parameters) == tensors
        assert round(sum(p.numel() for p in parameters) / 1e9, 3) == billions

    def test_unknown(self):
        with pytest.raises(ValueError, match=r"no Zamba2 layout is named '3b'; there are: 1\.2b, 2\.7b, 7b"):
            layout_config("3b")

    def test_head_widths(self):
        assert [layout_config(name).attention_head_dim for name in LAYOUTS] == [128, 160, 224]
        assert [layout_config(name, **NARROW[name]).attention_head_dim for name in LAYOUTS] == [128, 160, 224]

    def test_against_transformers_and_itself(self, narrow):
        ids = torch.randint(3, 96, (2, 50))
        expected = load(narrow, cls=TransformersZamba2)(ids).logits
        assert largest(load(narrow, clamp=True)(ids).logits, expected) <= TO_TRANSFORMERS
        model = load(narrow)
        full = model(ids).logits
        assert largest(in_pieces(model, ids, 17, 1), full) <= DECODE_TO_FULL
        assert largest(in_pieces(model, ids, 3, 32, 15), full) <= DECODE_TO_FULL
        padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :5] = 0
        assert largest(model(padded, attention_mask=mask).logits[:, 5:], full) <= PADDING

    def test_generates_the_same_with_and_without_a_cache(self, narrow):
        model = load(narrow)
        prompt = torch.randint(3, 96, (1, 9))
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


class TestCache:
    def test_decode_equals_full(self, ids, tiny):
        assert largest(in_pieces(tiny, ids, 100, 1), tiny(ids).logits) <= DECODE_TO_FULL

    @pytest.mark.parametrize("length", [1, 3, 32, 33])
    def test_pieces_equal_full(self, ids, tiny, length):
        assert largest(in_pieces(tiny, ids, length), tiny(ids).logits) <= DECODE_TO_FULL

    def test_greedy_with_and_without(self, ids, tiny):
        options = {"max_new_tokens": 200, "do_sample": False}
        with_cache = tiny.generate(ids[:, :20], **options)
        assert with_cache.shape[1] == 220
        assert torch.equal(with_cache, tiny.generate(ids[:, :20], use_cache=False, **options))

    def test_reset(self, ids, tiny):
        first = tiny(ids[:, :40], use_cache=True)
        tiny(ids[:, 40:44], cache=first.cache)
        first.cache.reset()
        assert largest(tiny(ids[:, :40], cache=first.cache).logits, first.logits) == 0

    def test_static(self, ids, tiny):
        cache = StaticCache(config=tiny.config, max_cache_len=64)
        logits = [tiny(ids[:, :30], cache=cache).logits]
        logits += [tiny(ids[:, t : t + 1], cache=cache).logits for t in range(30, 50)]
        assert largest(torch.cat(logits, 1), tiny(ids[:, :50]).logits) <= DECODE_TO_FULL

    def test_reorder(self, ids, tiny):
        two = torch.cat([ids[:, :30], ids[:, 100:130]])
        cache = tiny(two, use_cache=True).cache
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = tiny(torch.cat([ids[:, 130:131], ids[:, 30:31]]), cache=cache).logits[:, 0]
        straight = tiny(torch.cat([two, torch.cat([ids[:, 30:31], ids[:, 130:131]])], 1)).logits[:, -1]
        assert largest(swapped, straight.flip(0)) <= DECODE_TO_FULL

    def test_a_prompt_shorter_than_the_window(self, ids, tiny):
        assert largest(in_pieces(tiny, ids[:, :12], 2, 1, 1, 3), tiny(ids[:, :12]).logits) <= DECODE_TO_FULL


class TestPadding:
    """Two rows, one of them padded; each must say what it says alone."""

    def rows(self, ids: Tensor, left: bool) -> tuple[Tensor, Tensor]:
        a, b, pad = ids[:, :40], ids[:, 100:129], torch.zeros(1, 11, dtype=torch.long)
        rows = torch.cat([a, torch.cat([pad, b] if left else [b, pad], dim=1)])
        mask = torch.ones_like(rows)
        mask[1, slice(0, 11) if left else slice(29, None)] = 0
        return rows, mask

    def test_left(self, ids, tiny):
        rows, mask = self.rows(ids, left=True)
        logits = tiny(rows, attention_mask=mask).logits
        assert largest(logits[:1], tiny(ids[:, :40]).logits) <= PADDING
        assert largest(logits[1:, 11:], tiny(ids[:, 100:129]).logits) <= PADDING

    @pytest.mark.parametrize("length", [1, 3, 11, 12])
    def test_left_in_pieces(self, ids, tiny, length):
        rows, mask = self.rows(ids, left=True)
        logits = in_pieces(tiny, rows, length, attention_mask=mask)
        assert largest(logits[:1], tiny(ids[:, :40]).logits) <= PADDING
        assert largest(logits[1:, 11:], tiny(ids[:, 100:129]).logits) <= PADDING

    def test_right_then_decode(self, ids, tiny):
        rows, mask = self.rows(ids, left=False)
        cache = tiny(rows, attention_mask=mask, use_cache=True).cache
        logits = []
        for t in range(8):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            tokens = torch.cat([ids[:, 40 + t : 41 + t], ids[:, 129 + t : 130 + t]])
            logits.append(tiny(tokens, attention_mask=mask, cache=cache).logits)
        logits = torch.cat(logits, dim=1)
        assert largest(logits[:1], tiny(ids[:, :48]).logits[:, 40:]) <= PADDING
        assert largest(logits[1:], tiny(ids[:, 100:137]).logits[:, 29:]) <= PADDING

    def test_generate(self, ids, tiny):
        rows, mask = self.rows(ids, left=True)
        options = {"max_new_tokens": 30, "do_sample": False}
        together = tiny.generate(rows, attention_mask=mask, **options)[:, 40:]
        assert torch.equal(together[:1], tiny.generate(ids[:, :40], **options)[:, 40:])
        assert torch.equal(together[1:], tiny.generate(ids[:, 100:129], **options)[:, 29:])


class TestUse:
    def test_save_and_reload(self, ids, tiny, tmp_path):
        tiny.save_pretrained(tmp_path)
        assert largest(load(tmp_path)(ids).logits, tiny(ids).logits) == 0
        assert largest(
            load(tmp_path, cls=TransformersZamba2)(ids).logits, load(CHECKPOINT, clamp=True)(ids).logits
        ) <= (TO_TRANSFORMERS)

    @pytest.mark.parametrize("tie", [True, False])
    def test_shared_blocks_stay_tied(self, tie, tmp_path):
        """More places than blocks, and the tie does not depend on that of the embeddings."""
        kinds = ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid", "hybrid"]
        config = layout_config(
            "1.2b", **NARROW["1.2b"] | {"mamba_d_state": 8}, vocab_size=64, num_hidden_layers=7, num_mem_blocks=2,
            layers_block_type=kinds, intermediate_size=48, adapter_rank=4, chunk_size=8, tie_word_embeddings=tie,
        )  # fmt: skip
        model = Zamba2ForCausalLM(config).eval()
        model.save_pretrained(tmp_path)
        ids = torch.randint(0, 64, (1, 12))
        again = Zamba2ForCausalLM.from_pretrained(tmp_path).eval()
        assert largest(again(ids).logits, model(ids).logits) == 0
        q = [again.model.layers[i].shared_transformer.self_attn.q_proj.weight for i in (1, 3, 4, 5, 6)]
        assert q[0] is q[2] is q[4]
        assert q[1] is q[3]
        assert q[0] is not q[1]
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie

    def test_auto_classes_return_the_port(self, ids):
        xpu_ports.models.register()
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        assert type(model) is Zamba2ForCausalLM
        assert model.dtype == torch.bfloat16
        generator = pipeline("text-generation", model=str(CHECKPOINT))
        assert type(generator.model) is Zamba2ForCausalLM
        assert len(generator("And God said", max_new_tokens=5, do_sample=False)[0]["generated_text"]) > 15

    def test_register_refuses_what_is_not_there(self):
        with pytest.raises(ValueError, match=r"no port of model type 'zamba3'; there are: .*zamba2"):
            xpu_ports.models.register("zamba3")

    def test_device_map(self, ids, tiny):
        model = Zamba2ForCausalLM.from_pretrained(CHECKPOINT, device_map="auto", dtype=torch.float32)
        logits = model(ids.to(model.device)).logits.cpu()
        assert largest(logits, tiny(ids).logits) <= TO_TRANSFORMERS

    def test_offload_to_disk(self, ids, tiny, tmp_path):
        here = ("model.embed_tokens", "model.final_layernorm", "model.rotary_emb", "lm_head")
        device_map = dict.fromkeys(here, "cpu") | {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(8)}
        model = Zamba2ForCausalLM.from_pretrained(
            CHECKPOINT, device_map=device_map, offload_folder=tmp_path, dtype=torch.float32
        )
        assert largest(in_pieces(model, ids[:, :20], 12, 1), tiny(ids[:, :20]).logits) <= DECODE_TO_FULL

    def test_streaming(self, ids, tiny, tokenizer):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        tokens = tiny.generate(ids[:, :20], max_new_tokens=10, do_sample=False, streamer=streamer)
        assert "".join(streamer) == tokenizer.decode(tokens[0, 20:])

    def test_sampling_repeats_with_a_seed(self, ids, tiny):
        def sample(seed: int) -> Tensor:
            torch.manual_seed(seed)
            return tiny.generate(ids[:, :20], max_new_tokens=20, do_sample=True, temperature=1.0)

        assert torch.equal(sample(0), sample(0))
        assert not torch.equal(sample(0), sample(1))

    def test_embeddings_in(self, ids, tiny):
        embeds = tiny.get_input_embeddings()(ids)
        assert largest(tiny(inputs_embeds=embeds).logits, tiny(ids).logits) == 0
        with pytest.raises(ValueError, match="give one of input_ids and inputs_embeds"):
            tiny(ids, inputs_embeds=embeds)

    def test_gradient_checkpointing(self, ids):
        model = load(CHECKPOINT).train()
        with torch.enable_grad():
            model(ids[:, :30], labels=ids[:, :30]).loss.backward()
            expected = model.model.embed_tokens.weight.grad.clone()
            model.zero_grad()
            model.gradient_checkpointing_enable()
            model(ids[:, :30], labels=ids[:, :30]).loss.backward()
        assert largest(model.model.embed_tokens.weight.grad, expected) <= 1e-6

    def test_compiled_decode_step_is_one_graph(self, ids, tiny):
        cache = StaticCache(config=tiny.config, max_cache_len=64)
        tiny(ids[:, :30], cache=cache)
        step = torch.compile(tiny, fullgraph=True, backend="aot_eager")
        positions = torch.tensor([[30]])
        logits = step(ids[:, 30:31], cache=cache, position_ids=positions).logits
        assert largest(logits, tiny(ids[:, :31]).logits[:, -1:]) <= DECODE_TO_FULL

    def test_kernels_run_the_model(self, ids, tiny):
        """The very kernels, interpreted, in the place of the references; but not those of a program for four columns
        each, which take minutes.
        """
        apart = {"linear", "norm_linear", "norm_glu", "adapted_linears"}
        expected = tiny(ids[:, :21]).logits
        reset_explain()
        with use_choices(",".join(["triton", *(f"{name}=reference" for name in apart)])):
            assert largest(in_pieces(tiny, ids[:, :21], 20, 1), expected) <= DECODE_TO_FULL
        ran = {(d.op, d.backend): d.calls for d in explain(show=False)}
        assert {backend for name, backend in ran if name not in apart} == {"triton"}
        assert ran["gated_rms_norm", "triton"] == ran["mamba2_decode_linear", "triton"] == 8
        assert ran["rotary_embedding", "triton"] == ran["concat_rms_norm", "triton"] == 4


def test_the_checkpoint_is_what_was_trained(tiny, tokenizer):
    """Held-out perplexity, as its training.json says (windows of 256 tokens)."""
    ids = tokenizer(HELDOUT.read_text(), return_tensors="pt").input_ids[0, : 256 * 24].view(24, 256)
    loss = tiny(ids, labels=ids).loss
    assert loss.exp().item() == pytest.approx(17.1, rel=0.05)
