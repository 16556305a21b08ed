"""The layer that guesses the token after the next: beside transformers' modules, cached, and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV4Config
from transformers import DeepseekV4ForCausalLM as TransformersV4
from transformers.masking_utils import create_sliding_window_causal_mask

from xpu_ports.common.weights import CheckpointError
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM

CLOSE = 1e-4
NARROW = {
    "vocab_size": 96, "hidden_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
    "head_dim": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "max_position_embeddings": 4096, "sliding_window": 12, "compress_ratios": [4, 0, 0], "num_hash_layers": 1,
    "o_groups": 3, "o_lora_rank": 14, "index_n_heads": 16, "index_head_dim": 18, "index_topk": 1000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32,
                     "beta_slow": 1},
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Published names of the layer.
PARTS = [
    *(f"{name}.weight" for name in ("enorm", "hnorm", "e_proj", "h_proj", "norm", "attn_norm", "ffn_norm")),
    *(f"hc_{a}_{b}" for a in ("attn", "ffn", "head") for b in ("fn", "base", "scale")), "attn.attn_sink",
    *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")),
    "ffn.gate.weight", "ffn.gate.bias", *(f"ffn.shared_experts.w{w}.weight" for w in (1, 2, 3)),
    *(f"ffn.experts.{e}.w{w}.weight" for e in range(6) for w in (1, 2, 3)),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A saved random model with the layer; nothing that could be left out is zero."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**NARROW, mtp=True))
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            t.data = torch.stack([torch.randperm(6)[:3] for _ in range(96)])
        elif name.endswith(("sinks", "position_bias", "base", "e_score_correction_bias")):
            t.data.normal_()
        elif "norm" in name:
            t.data.uniform_(0.5, 1.5)
    saved = tmp_path_factory.mktemp("mtp") / "model"
    model.save_pretrained(saved)
    return saved


@pytest.fixture(scope="module")
def model(folder):
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def streams_of(model, ids: Tensor) -> Tensor:
    return model(ids, output_hidden_states=True).hidden_states[-1]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def by_transformers(folder: Path, next_ids: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and streams by transformers' layer, which has no such one of its own, with the layer's weights."""
    tensors = load_file(folder / "model.safetensors")
    mtp = {key.removeprefix("mtp.0."): t for key, t in tensors.items() if key.startswith("mtp.0.")}
    # A model whose only layer is this one.
    config = DeepseekV4Config(**NARROW | {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0})
    state = {f"layers.0.{key}": t for key, t in mtp.items() if not key.startswith("hc_head")}
    state |= {key: tensors[key] for key in ("embed.weight", "head.weight")} | {"norm.weight": mtp["norm.weight"]}
    state |= {key: t for key, t in mtp.items() if key.startswith("hc_head")}
    state = {key: t for key, t in state.items() if not key.endswith(("enorm.weight", "hnorm.weight", "_proj.weight"))}
    state.pop("layers.0.norm.weight")
    theirs = TransformersV4.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).eval()
    e = norm(theirs.model.embed_tokens(next_ids), mtp["enorm.weight"]) @ mtp["e_proj.weight"].T
    x = norm(streams, mtp["hnorm.weight"]) @ mtp["h_proj.weight"].T + e[:, :, None]
    positions = torch.arange(next_ids.shape[1])[None]
    angles = {kind: theirs.model.rotary_emb(e, positions, layer_type=kind) for kind in ("main", "compress")}
    mask = create_sliding_window_causal_mask(
        config=theirs.config, inputs_embeds=e, attention_mask=None, cache=None, position_ids=positions
    )
    x = theirs.model.layers[0](x, position_embeddings=angles, position_ids=positions, attention_mask=mask)
    return theirs.lm_head(theirs.model.norm(theirs.model.hc_head(x))), x


def test_beside_transformers(folder, model):
    """On the streams behind the last layer, each normalized by itself; positions turn as in a plain window layer."""
    ids = torch.randint(3, 96, (2, 41))
    streams = streams_of(model, ids[:, :-1])
    logits, after = model.guess(ids[:, 1:], streams)
    expected, expected_after = by_transformers(folder, ids[:, 1:], streams)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (after - expected_after).abs().max() <= 1e-5 * expected_after.abs().max()
    # Neither the streams made one nor others in their place give that.
    mean = streams.mean(2, keepdim=True).expand_as(streams)
    for wrong in (mean, streams.flip(2)):
        assert (model.guess(ids[:, 1:], wrong)[0] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("lengths", [[1] * 40, [17, 1, 1, 20, 1], [39, 1]])
def test_pieces(model, lengths):
    ids = torch.randint(3, 96, (2, 41))
    streams = streams_of(model, ids[:, :-1])
    whole, _ = model.guess(ids[:, 1:], streams)
    cache = DeepseekV4Cache.of_mtp(model.config)
    pieces = zip(ids[:, 1:].split(lengths, 1), streams.split(lengths, 1), strict=True)
    got = torch.cat([model.guess(*piece, cache=cache)[0] for piece in pieces], 1)
    assert (got - whole).abs().max() <= CLOSE


def test_a_guess_that_is_taken_back(model):
    """Steps on the layer's own streams, as drafts are, leave nothing behind once cropped."""
    ids = torch.randint(3, 96, (1, 41))
    streams = streams_of(model, ids[:, :-1])
    whole, _ = model.guess(ids[:, 1:], streams)
    cache = DeepseekV4Cache.of_mtp(model.config)
    _, after = model.guess(ids[:, 1:31], streams[:, :30], cache=cache)
    for _ in range(3):
        _, after = model.guess(torch.randint(3, 96, (1, 1)), after[:, -1:], cache=cache)
    cache.crop(-3)
    assert (model.guess(ids[:, 31:], streams[:, 30:], cache=cache)[0] - whole[:, 30:]).abs().max() <= CLOSE


class TestFiles:
    def test_names(self, folder):
        names = {k.removeprefix("mtp.0.") for k in load_file(folder / "model.safetensors") if k.startswith("mtp.")}
        assert names == set(PARTS)

    def test_loads_where_it_is_asked_for(self, folder, model, tmp_path):
        again = DeepseekV4ForCausalLM.from_pretrained(folder, mtp=True, dtype=torch.float32)
        for key, t in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], t), key
        without = DeepseekV4ForCausalLM.from_pretrained(folder, mtp=False, dtype=torch.float32).eval()
        assert not hasattr(without, "mtp")
        x = torch.randint(3, 96, (1, 20))
        assert torch.equal(without(x).logits, model(x).logits)
        without.save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=r"mtp\.0\."):
            DeepseekV4ForCausalLM.from_pretrained(tmp_path, mtp=True)

    def test_transformers_loads_it_without(self, folder, model):
        theirs, info = TransformersV4.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        x = torch.randint(3, 96, (1, 20))
        assert (theirs.eval()(x).logits - model(x).logits).abs().max() <= CLOSE

    def test_no_such_layer(self, folder):
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers = 0"):
            DeepseekV4ForCausalLM.from_pretrained(folder, mtp=True, num_nextn_predict_layers=0)
