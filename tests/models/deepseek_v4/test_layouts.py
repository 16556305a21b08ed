"""The released shapes: parameters counted, layers of each kind."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.deepseek_v4.layouts import layout_config
from xpu_ports.models.deepseek_v4.memory import weight_reads

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def build(name: str, **overrides):
    with torch.device("meta"):
        return DeepseekV4ForCausalLM(layout_config(name, **overrides))


@pytest.mark.parametrize(
    ("name", "kinds", "billions"),
    [
        ("flash", {SLIDING: 2, SPARSE: 21, HEAVY: 20}, 290.94),
        ("pro", {HEAVY: 31, SPARSE: 30}, 1598.84),
    ],
)
def test_the_published_models(name, kinds, billions):
    """With the MTP layer as many parameters as the published index counts."""
    model = build(name, mtp=True)
    assert Counter(model.config.layer_types) == kinds
    assert model.config.mlp_layer_types[:4] == ["hash_moe"] * 3 + ["moe"]
    assert model.config.rope_parameters["compress"]["rope_theta"] == 160000
    assert model.config.rope_parameters["main"]["rope_type"] == "default"
    count = sum(p.numel() for p in model.parameters())
    count += sum(b.numel() for name, b in model.named_buffers() if "correction_bias" in name or "tid2eid" in name)
    assert abs(count / 1e9 - billions) < 0.01


def test_the_part_that_fits_a_gpu():
    model = build("flash-6-layers").bfloat16()
    assert model.config.layer_types == [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY]
    # 6 of 64 experts of 25 M, and what all tokens read.
    read = sum(weight_reads(model.config, name, 1) * p.nbytes for name, p in model.named_parameters())
    assert 3e9 < read < 5e9


def test_tables_of_a_new_model():
    """Tokens go to experts that differ, and to each about as often: what is timed of random weights reads them all."""
    sizes = {"hidden_size": 32, "vocab_size": 101, "moe_intermediate_size": 8, "q_lora_rank": 8, "o_lora_rank": 8}
    model = DeepseekV4ForCausalLM(layout_config("flash-6-layers", **sizes, n_routed_experts=8, num_experts_per_tok=3))
    for layer in model.model.layers[:3]:
        table = layer.mlp.gate.tid2eid
        assert all(len(set(row)) == 3 for row in table.tolist())
        counts = table.flatten().bincount(minlength=8)
        assert counts.max() - counts.min() <= 1


def test_unknown():
    with pytest.raises(ValueError, match="flash, flash-6-layers, pro"):
        layout_config("lite")
