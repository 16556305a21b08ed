"""Names and shapes of DeepSeek-V4's tensors in files.

Files have the published layout: no `model.` in front, one tensor for each projection and each expert. transformers
writes names that are nearly those: with `model.`, and a layer's kv_norm called norm. It has a third layout when asked
to keep its own names. All load; the published one is written.
"""

from __future__ import annotations

from transformers import DeepseekV4Config

from xpu_ports.common.conversion import Fuse, Rename, Rule

COMPRESSOR = {"ape": "position_bias", "norm.weight": "kv_norm.weight", "wkv.weight": "kv_proj.weight",
              "wgate.weight": "gate_proj.weight"}  # fmt: skip
# Of a layer: published name -> ours.
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{a}_{b}": f"{a}_hc.{b}" for a in ("attn", "ffn") for b in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    **{f"attn.compressor.{a}": f"self_attn.compressor.{b}" for a, b in COMPRESSOR.items()},
    **{f"attn.indexer.compressor.{a}": f"self_attn.compressor.indexer.{b}" for a, b in COMPRESSOR.items()},
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    **{f"ffn.experts.{{e}}.{w}.weight": f"mlp.experts.{{e}}.{w}.weight" for w in ("w1", "w2", "w3")},
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
}
HEAD = {f"hc_head_{a}": f"hc_head.hc_{a}" for a in ("fn", "base", "scale")}
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    **{name: f"model.{ours}" for name, ours in HEAD.items()},
}


def weight_rules(config: DeepseekV4Config) -> tuple[Rule, ...]:
    """The rules of all layers: names alone, so that they are the same for every config."""
    renames = [Rename(name, ours) for name, ours in TOP.items()]
    renames += [Rename(f"layers.{{i}}.{name}", f"model.layers.{{i}}.{ours}") for name, ours in LAYER.items()]
    renames += [Rename(f"mtp.{{i}}.{name}", f"mtp.{{i}}.{ours}") for name, ours in (LAYER | HEAD).items()]
    theirs = {**LAYER, "attn.norm.weight": LAYER["attn.kv_norm.weight"]}
    renames += [
        Rename(f"model.layers.{{i}}.{name}", f"model.layers.{{i}}.{ours}", saved=False) for name, ours in theirs.items()
    ]
    # A base model alone has its own names without `model.`, and is written in the published ones too.
    prefixed = [(rule.file, rule.model) for rule in renames if rule.saved and rule.model.startswith("model.")]
    renames += [Rename(name, ours.removeprefix("model.")) for name, ours in prefixed]
    rules: list[Rule] = [*renames]
    for layers in ("model.layers.", "layers.", "mtp."):
        mlp, attention = f"{layers}{{i}}.mlp.", f"{layers}{{i}}.self_attn."
        w1, w2, w3 = (f"{mlp}experts.{{e}}.{name}.weight" for name in ("w1", "w2", "w3"))
        shared = tuple(f"{mlp}shared_experts.{name}_proj.weight" for name in ("gate", "up"))
        rules += [
            Fuse((w1, w3), f"{mlp}experts.gate_up_proj", dim=1, stack="e"),
            Fuse((w2,), f"{mlp}experts.down_proj", stack="e"),
            Fuse(shared, f"{mlp}shared_experts.gate_up_proj.weight"),
        ]
        for prefix in (f"{attention}compressor.", f"{attention}compressor.indexer."):
            parts = f"{prefix}kv_proj.weight", f"{prefix}gate_proj.weight"
            rules.append(Fuse(parts, f"{prefix}kv_gate_proj.weight"))
    return tuple(rules)
