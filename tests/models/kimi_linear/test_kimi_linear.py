"""Kimi Linear against transformers' own classes, and against itself: cache, padding, pieces, states, routing."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, KimiLinearConfig, StaticCache
from transformers import KimiLinearForCausalLM as TransformersKimi

import xpu_ports.models
from xpu_ports.common.dispatch import explain, reset_explain
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.kimi_linear.layouts import layout_config

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"
HELDOUT = Path(__file__).parents[2] / "data" / "heldout.txt"
# Largest difference of logits in fp32 (the largest logit of tiny-kimi-linear is 20).
TO_TRANSFORMERS = 1e-4
DECODE_TO_FULL = 5e-5
PADDING = 5e-5

# The 48B made narrow: its 27 layers and its uneven pattern, and widths that no two of which are the same.
NARROW = {
    "vocab_size": 96, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "linear_head_dim": 8, "linear_num_heads": 3, "num_local_experts": 6,
    "num_experts_per_tok": 3, "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def load(folder: Path, dtype: torch.dtype = torch.float32, cls: type = KimiLinearForCausalLM, **overrides):
    return cls.from_pretrained(folder, dtype=dtype, **overrides).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """300 held-out tokens, [1, 300]."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return tokenizer(HELDOUT.read_text()[:4000], return_tensors="pt").input_ids[:, :300]


@pytest.fixture(scope="module")
def tiny():
    return load(CHECKPOINT)


@pytest.fixture(scope="module")
def theirs():
    return load(CHECKPOINT, cls=TransformersKimi)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    """A saved random model of the released layout, made by transformers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("narrow")
    model = TransformersKimi(layout_config(**NARROW))
    for name, buffer in model.named_buffers():
        # Enough to change choices.
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
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


def states(cache, name: str = "recurrent_states") -> list[Tensor]:
    """What the delta attention layers keep."""
    return [getattr(layer, name)[0] for layer in cache.layers if hasattr(layer, name)]


class TestAgainstTransformers:
    def test_logits(self, ids, tiny, theirs):
        ours = tiny(ids).logits
        assert largest(ours, theirs(ids).logits) <= TO_TRANSFORMERS
        assert ours.abs().max() > 10

    def test_hidden_states_layer_by_layer(self, ids, tiny, theirs):
        ours, expected = (m(ids[:, :70], output_hidden_states=True).hidden_states for m in (tiny, theirs))
        assert len(ours) == len(expected) == 9
        for a, b in zip(ours, expected, strict=True):
            assert largest(a, b) <= 1e-5 * b.abs().max()

    def test_states(self, ids, tiny, theirs):
        """Keys first, then values, and the window as wide as the convolution, for a length that fills no chunk."""
        ours, expected = (m(ids[:, :77], use_cache=True).cache for m in (tiny, theirs))
        assert [s.shape for s in states(ours)] == [(1, 4, 32, 32)] * 6
        for name in ("recurrent_states", "conv_states"):
            for a, b in zip(states(ours, name), states(expected, name), strict=True):
                assert a.dtype == torch.float32
                assert largest(a, b) <= 1e-5 * b.abs().max()

    def test_attentions_and_router_logits(self, ids):
        ours, theirs = (load(CHECKPOINT, cls=cls) for cls in (KimiLinearForCausalLM, TransformersKimi))
        options = {"output_attentions": True, "output_router_logits": True}
        for model in (ours, theirs):
            model.set_attn_implementation("eager")
        ours, theirs = (m(ids[:, :33], **options) for m in (ours, theirs))
        for name, shape in (("attentions", (1, 4, 33, 33)), ("router_logits", (33, 8))):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert [t.shape for t in a] == [shape] * len(b)
            for x, y in zip(a, b, strict=True):
                assert largest(x, y) <= 1e-5 * max(1, y.abs().max())

    def test_greedy(self, ids, tiny, theirs):
        """200 tokens: transformers' own, and the same that full forwards would choose one by one."""
        options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None}
        ours = tiny.generate(ids[:, :20], **options)
        assert ours.shape == (1, 220)
        assert torch.equal(ours, theirs.generate(ids[:, :20], **options))
        assert torch.equal(tiny(ours[:, :-1]).logits.argmax(-1)[:, 19:], ours[:, 20:])

    def test_beams(self, ids, tiny, theirs):
        options = {"max_new_tokens": 20, "num_beams": 2, "do_sample": False}
        assert torch.equal(tiny.generate(ids[:, :20], **options), theirs.generate(ids[:, :20], **options))

    def test_bfloat16_is_no_further_from_float32(self, ids, tiny, theirs):
        """Of most tokens: the mean is that of the few whose experts are others in bf16.

        Twice, as for ops: which sums a CPU's bf16 products round differs from CPU to CPU, for both models.
        """

        def divergence(model, cls) -> float:
            exact = model(ids).logits.double().log_softmax(-1)
            rounded = load(CHECKPOINT, torch.bfloat16, cls=cls)(ids).logits.double().log_softmax(-1)
            return (exact.exp() * (exact - rounded)).sum(-1).median().item()

        assert 0 < divergence(tiny, KimiLinearForCausalLM) <= 2 * divergence(theirs, TransformersKimi)

    @pytest.mark.parametrize("eps", [0.3, 1e-8])
    def test_the_latents_norm_keeps_its_own_epsilon(self, ids, eps):
        ours, theirs = (
            load(CHECKPOINT, cls=c, rms_norm_eps=eps)(ids[:, :40]).logits
            for c in (KimiLinearForCausalLM, TransformersKimi)
        )
        assert largest(ours, theirs) <= TO_TRANSFORMERS

    def test_gradients(self, ids):
        ours, theirs = (load(CHECKPOINT, cls=cls) for cls in (KimiLinearForCausalLM, TransformersKimi))
        with torch.enable_grad():
            losses = [model(ids[:, :40], labels=ids[:, :40]).loss for model in (ours, theirs)]
            for loss in losses:
                loss.backward()
        assert abs(losses[0] - losses[1]) <= 1e-5
        expected = dict(theirs.named_parameters())
        compared = 0
        for name, parameter in ours.named_parameters():
            if name in expected:
                scale = expected[name].grad.abs().max()
                assert largest(parameter.grad, expected[name].grad) <= 1e-3 * scale + 1e-6, name
                compared += 1
        assert compared > 50
        q, k, v = (theirs.model.layers[0].self_attn.get_submodule(f"{x}_proj").weight.grad for x in "qkv")
        joined = torch.cat([q, k, v])
        assert largest(ours.model.layers[0].self_attn.qkv_proj.weight.grad, joined) <= 1e-3 * joined.abs().max()


class TestLayout:
    def test_real_size(self):
        with torch.device("meta"):
            model = KimiLinearForCausalLM(layout_config())
        assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 49.12

    def test_pattern(self):
        """20 layers of one kind, 7 of the other, the last of these early; not transformers' default, 4, 8, ..."""
        config = layout_config()
        assert [i + 1 for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [
            4, 8, 12, 16, 20, 24, 27,
        ]  # fmt: skip
        assert config.layer_types.count("linear_attention") == 20
        assert config.layer_types != KimiLinearConfig().layer_types
        assert config.mlp_layer_types == ["dense"] + ["sparse"] * 26

    def test_against_transformers_and_itself(self, narrow):
        ids = torch.randint(3, 96, (2, 40))
        model = load(narrow)
        full = model(ids).logits
        expected = load(narrow, cls=TransformersKimi)(ids).logits
        assert largest(full, expected) <= TO_TRANSFORMERS * expected.abs().max()
        tolerance = DECODE_TO_FULL * full.abs().max()
        assert largest(in_pieces(model, ids, 17, 1), full) <= tolerance
        assert largest(in_pieces(model, ids, 3, 22, 15), full) <= tolerance
        padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), ids], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :5] = 0
        assert largest(model(padded, attention_mask=mask).logits[:, 5:], full) <= PADDING * full.abs().max()


class TestCache:
    def test_decode_equals_full(self, ids, tiny):
        assert largest(in_pieces(tiny, ids, 100, 1), tiny(ids).logits) <= DECODE_TO_FULL

    @pytest.mark.parametrize("length", [1, 15, 16, 63, 64, 65])
    def test_pieces_equal_full(self, ids, tiny, length):
        ids = ids[:, : max(40, 2 * length + 3)]
        assert largest(in_pieces(tiny, ids, length), tiny(ids).logits) <= DECODE_TO_FULL

    @pytest.mark.parametrize("length", [15, 16, 63, 64, 65])
    def test_decode_after_a_chunks_tail(self, ids, tiny, length):
        ids = ids[:, : length + 4]
        assert largest(in_pieces(tiny, ids, length, 1), tiny(ids).logits) <= DECODE_TO_FULL

    def test_a_prompt_shorter_than_the_window(self, ids, tiny):
        assert largest(in_pieces(tiny, ids[:, :12], 2, 1, 1, 3), tiny(ids[:, :12]).logits) <= DECODE_TO_FULL

    def test_without_one(self, ids, tiny):
        options = {"max_new_tokens": 12, "do_sample": False}
        prompt = ids[:, :20]
        assert torch.equal(tiny.generate(prompt, **options), tiny.generate(prompt, use_cache=False, **options))

    def test_full_attention_keeps_one_row_a_token(self, ids, tiny):
        """64 columns of the latent and 16 shared ones; not 4 heads of keys and values."""
        cache = tiny(ids[:, :30], use_cache=True).cache
        kept = [(layer.keys.shape, layer.values.numel()) for layer in cache.layers if hasattr(layer, "keys")]
        assert kept == [((1, 1, 30, 80), 0)] * 2

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_one_token_is_attended_on_the_latents(self, ids, attention):
        model = load(CHECKPOINT)
        model.set_attn_implementation(attention)
        cache = model(ids[:, :30], use_cache=True).cache
        reset_explain()
        logits = model(ids[:, 30:31], cache=cache).logits
        absorbed = sum(line.calls for line in explain(show=False) if line.op == "mla_decode")
        assert absorbed == (2 if attention == "sdpa" else 0)
        assert largest(logits, load(CHECKPOINT)(ids[:, :31]).logits[:, 30:]) <= DECODE_TO_FULL

    def test_a_hook_on_the_expansion_is_called(self, ids):
        """One who watches or changes kv_b_proj sees it called: absorbed, its weight would be read instead."""
        model = load(CHECKPOINT)
        cache = model(ids[:, :30], use_cache=True).cache
        called = []
        model.model.layers[3].self_attn.kv_b_proj.register_forward_hook(lambda *args: called.append(1))
        logits = model(ids[:, 30:31], cache=cache).logits
        assert called == [1]
        assert largest(logits, load(CHECKPOINT)(ids[:, :31]).logits[:, 30:]) <= DECODE_TO_FULL

    def test_reset(self, ids, tiny):
        first = tiny(ids[:, :40], use_cache=True)
        tiny(ids[:, 40:44], cache=first.cache)
        first.cache.reset()
        assert largest(tiny(ids[:, :40], cache=first.cache).logits, first.logits) == 0

    def test_reset_drops_what_is_not_a_number(self, ids, tiny):
        first = tiny(ids[:, :40], use_cache=True)
        for state in (*states(first.cache), *states(first.cache, "conv_states")):
            state.fill_(float("nan"))
        first.cache.reset()
        assert largest(tiny(ids[:, :40], cache=first.cache).logits, first.logits) == 0

    def test_static(self, ids, tiny):
        cache = StaticCache(config=tiny.config, max_cache_len=64)
        logits = [tiny(ids[:, :30], cache=cache).logits]
        logits += [tiny(ids[:, t : t + 1], cache=cache).logits for t in range(30, 40)]
        assert largest(torch.cat(logits, 1), tiny(ids[:, :40]).logits) <= DECODE_TO_FULL

    def test_a_copy_serves_two_continuations(self, ids, tiny):
        """A prefix kept for reuse: the states are its own, whatever the first continuation did."""
        cache = tiny(ids[:, :64], use_cache=True).cache
        kept = deepcopy(cache)
        for rest in (ids[:, 64:70], ids[:, 200:206]):
            full = tiny(torch.cat([ids[:, :64], rest], 1)).logits[:, 64:]
            prefix = deepcopy(kept)
            logits = [tiny(rest[:, t : t + 1], cache=prefix).logits for t in range(6)]
            assert largest(torch.cat(logits, 1), full) <= DECODE_TO_FULL

    def test_reorder(self, ids, tiny):
        two = torch.cat([ids[:, :30], ids[:, 100:130]])
        cache = tiny(two, use_cache=True).cache
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = tiny(torch.cat([ids[:, 130:131], ids[:, 30:31]]), cache=cache).logits[:, 0]
        straight = tiny(torch.cat([two, torch.cat([ids[:, 30:31], ids[:, 130:131]])], 1)).logits[:, -1]
        assert largest(swapped, straight.flip(0)) <= DECODE_TO_FULL


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

    @pytest.mark.parametrize("length", [1, 5])
    def test_padding_writes_no_state(self, ids, tiny, length):
        """Bit for bit in a row that waits while another goes on, whatever stands in the padding."""
        two = torch.cat([ids[:, :30], ids[:, 100:130]])
        cache = tiny(two, use_cache=True).cache
        kept = {name: [s.clone() for s in states(cache, name)] for name in ("recurrent_states", "conv_states")}
        mask = torch.ones(2, 30 + length, dtype=torch.long)
        mask[0, 30:] = 0
        tiny(ids[:, 30 : 30 + length].repeat(2, 1), attention_mask=mask, cache=cache)
        for name, before in kept.items():
            for now, then in zip(states(cache, name), before, strict=True):
                assert torch.equal(now[0], then[0])
                assert not torch.equal(now[1], then[1])

    def test_generate(self, ids, tiny):
        rows, mask = self.rows(ids, left=True)
        options = {"max_new_tokens": 20, "do_sample": False}
        together = tiny.generate(rows, attention_mask=mask, **options)[:, 40:]
        assert torch.equal(together[:1], tiny.generate(ids[:, :40], **options)[:, 40:])
        assert torch.equal(together[1:], tiny.generate(ids[:, 100:129], **options)[:, 29:])


class TestNumbers:
    def test_order_is_the_only_position(self, ids, tiny):
        ids = ids[:, :30]
        positions = torch.randint(0, 10_000, (1, 30))
        assert torch.equal(tiny(ids, position_ids=positions).logits, tiny(ids).logits)
        assert not [name for name, _ in tiny.named_modules() if "rotary" in name]

    def test_the_shared_keys_are_as_projected(self, ids, tiny):
        cache = tiny(ids[:, :30], use_cache=True, output_hidden_states=True)
        layer = tiny.model.layers[3]
        x = layer.input_layernorm(cache.hidden_states[3])
        projected = layer.self_attn.kv_a_proj_with_mqa(x)[:, :, 64:]
        assert largest(cache.cache.layers[3].keys[:, 0, :, 64:], projected) <= 1e-5 * projected.abs().max()

    def test_the_scale_counts_both_parts_of_a_key(self):
        with torch.device("meta"):
            attention = KimiLinearForCausalLM(layout_config(num_local_experts=8)).model.layers[3].self_attn
        assert attention.scaling == 192**-0.5

    @pytest.mark.parametrize("rate", [3.0, 40.0])
    def test_strong_decay(self, ids, rate):
        """Log-decays of some tens a token: exp of one of the other sign is beyond fp32, and -5 is no bound."""
        ours, theirs = (load(CHECKPOINT, cls=cls) for cls in (KimiLinearForCausalLM, TransformersKimi))
        for model in (ours, theirs):
            for name, parameter in model.named_parameters():
                if name.endswith("A_log"):
                    # Some heads decay as they were trained to.
                    parameter[:, :, ::2] = torch.tensor(rate).log()
                if name.endswith("dt_bias"):
                    parameter[::3] = 2.0
        ids = ids[:, :130]
        logits = ours(ids).logits
        assert logits.isfinite().all()
        assert largest(logits, theirs(ids).logits) <= TO_TRANSFORMERS
        assert largest(in_pieces(ours, ids[:, :80], 70, 1), logits[:, :80]) <= DECODE_TO_FULL

    def test_later_tokens_change_nothing(self, ids, tiny):
        """Also inside a chunk, on either side of the middle."""
        logits = tiny(ids[:, :64]).logits
        for t in (10, 31, 32, 50):
            other = torch.cat([ids[:, :t], ids[:, 200 : 264 - t]], 1)
            assert largest(tiny(other).logits[:, :t], logits[:, :t]) <= DECODE_TO_FULL

    def test_the_same_key_over_and_over(self, ids, tiny):
        """The system of equations of a chunk is as far from the identity as it gets."""
        same = ids[:, 5:6].expand(1, 130)
        logits = tiny(same).logits
        assert logits.isfinite().all()
        assert largest(in_pieces(tiny, same, 1), logits) <= DECODE_TO_FULL

    @pytest.mark.parametrize("length", [1, 7])
    def test_rows_keep_to_themselves(self, ids, tiny, length):
        """What is not a number in one row's states stays in that row."""
        two = torch.cat([ids[:, :30], ids[:, 100:130]])
        cache = tiny(two, use_cache=True).cache
        for state in states(cache):
            state[0] = float("nan")
        tokens = torch.cat([ids[:, 30 : 30 + length], ids[:, 130 : 130 + length]])
        logits = tiny(tokens, cache=cache).logits
        assert logits[0].isnan().all()
        assert largest(logits[1:], tiny(ids[:, 100 : 130 + length]).logits[:, 30:]) <= DECODE_TO_FULL
        assert all(state[1].isfinite().all() for state in states(cache))

    def test_the_correction_bias_chooses_experts(self, ids):
        """A bias that forces two experts changes the logits, and a bias equal for all changes nothing."""
        model = load(CHECKPOINT)
        logits = model(ids[:, :30]).logits
        routers = [m for name, m in model.named_modules() if name.endswith("block_sparse_moe.gate")]
        assert len(routers) == 7
        for router in routers:
            router.e_score_correction_bias += 0.25
        assert largest(model(ids[:, :30]).logits, logits) <= 1e-5
        for router in routers:
            router.e_score_correction_bias[:2] += 10
        assert largest(model(ids[:, :30]).logits, logits) > 0.1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_what_stays_in_float32(self, dtype):
        model = load(CHECKPOINT, dtype)
        kept = {".".join(name.split(".")[-2:]) for name, t in model.state_dict().items() if t.dtype == torch.float32}
        assert kept == {
            "self_attn.A_log", "self_attn.dt_bias", "conv1d.weight", "gate.weight", "gate.e_score_correction_bias",
        }  # fmt: skip
        assert model.dtype == dtype

    def test_states_are_float32_in_a_bfloat16_model(self, ids):
        model = load(CHECKPOINT, torch.bfloat16)
        cache = model(ids[:, :30], use_cache=True).cache
        model(ids[:, 30:31], cache=cache)
        assert {s.dtype for s in states(cache)} == {torch.float32}


class TestUse:
    def test_auto_classes_return_the_port(self):
        xpu_ports.models.register("kimi_linear")
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
        assert type(model) is KimiLinearForCausalLM
        assert model.dtype == torch.bfloat16

    def test_device_map(self, ids, tiny):
        model = load(CHECKPOINT, device_map="auto")
        assert largest(model(ids.to(model.device)).logits.cpu(), tiny(ids).logits) <= TO_TRANSFORMERS

    def test_offload_to_disk(self, ids, tiny, tmp_path):
        device_map = dict.fromkeys(["model.embed_tokens", "model.norm", "lm_head"], "cpu")
        device_map |= {f"model.layers.{i}": "cpu" if i in (1, 2) else "disk" for i in range(8)}
        model = load(CHECKPOINT, device_map=device_map, offload_folder=tmp_path)
        assert largest(in_pieces(model, ids[:, :20], 12, 1), tiny(ids[:, :20]).logits) <= DECODE_TO_FULL

    def test_compiled_decode_step_is_one_graph(self, ids, tiny):
        cache = StaticCache(config=tiny.config, max_cache_len=64)
        tiny(ids[:, :30], cache=cache)
        step = torch.compile(tiny, fullgraph=True, backend="aot_eager")
        logits = step(ids[:, 30:31], cache=cache, position_ids=torch.tensor([[30]])).logits
        assert largest(logits, tiny(ids[:, :31]).logits[:, -1:]) <= DECODE_TO_FULL

    def test_embeddings_instead_of_ids(self, ids, tiny):
        ids = ids[:, :10]
        assert torch.equal(tiny(inputs_embeds=tiny.model.embed_tokens(ids)).logits, tiny(ids).logits)
        with pytest.raises(ValueError, match="give one of input_ids and inputs_embeds"):
            tiny(ids, inputs_embeds=tiny.model.embed_tokens(ids))

    def test_last_logits_alone(self, ids, tiny):
        assert largest(tiny(ids[:, :30], logits_to_keep=1).logits, tiny(ids[:, :30]).logits[:, -1:]) <= 1e-5

    def test_checkpointed_gradients(self, ids):
        model = load(CHECKPOINT).train()
        grads = []
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable()
            model.zero_grad()
            with torch.enable_grad():
                model(ids[:, :20], labels=ids[:, :20], use_cache=False).loss.backward()
            grads.append(model.model.layers[1].self_attn.qkv_proj.weight.grad.clone())
        assert grads[0].abs().max() > 0
        assert largest(*grads) <= 1e-5 * grads[0].abs().max()


def test_the_checkpoint_is_what_was_trained(tiny):
    """Held-out perplexity, as its training.json says (windows of 256 tokens)."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    ids = tokenizer(HELDOUT.read_text(), return_tensors="pt").input_ids[0, : 256 * 24].view(24, 256)
    assert tiny(ids, labels=ids).loss.exp().item() == pytest.approx(18.4, rel=0.05)
