"""Names and shapes of Kimi Linear's tensors in files.

Files have the published layout: one tensor for each projection, each convolution of q, k and v, and each expert.
The model joins what runs together. transformers writes the same layout but for the dense layers' MLP, which it calls
block_sparse_moe, and has a third one when asked to keep its own names; both load.
"""

from __future__ import annotations

from transformers import KimiLinearConfig

from xpu_ports.common.conversion import Fuse, Rename, Rule

MOE = "model.layers.{i}.block_sparse_moe."


def weight_rules(config: KimiLinearConfig) -> tuple[Rule, ...]:
    """The rules for a config: which layers have a q_proj of their own, and which an MLP, depends on it."""
    w1, w2, w3 = (f"{MOE}experts.{{e}}.{name}.weight" for name in ("w1", "w2", "w3"))
    rules: list[Rule] = [
        Fuse((w1, w3), f"{MOE}experts.gate_up_proj", dim=1, stack="e"),
        Fuse((w2,), f"{MOE}experts.down_proj", stack="e"),
        _gate_up(f"{MOE}shared_experts."),
        _gate_up("model.layers.{i}.mlp."),
    ]
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            rules += _delta_attention(f"model.layers.{i}.self_attn.")
    for i, kind in enumerate(config.mlp_layer_types):
        mlp, moe = (f"model.layers.{i}.{name}.{{rest...}}" for name in ("mlp", "block_sparse_moe"))
        rules.append(Rename(mlp, moe, saved=False) if kind == "sparse" else Rename(moe, mlp, saved=False))
    return tuple(rules)


def hf_rules(config: KimiLinearConfig) -> tuple[Rule, ...]:
    """The rules from the published names to those that transformers' model has in memory, for a conversion of files."""
    mlp = "model.layers.{i}.mlp."
    w1, w2, w3 = (f"{mlp}experts.{{e}}.{name}.weight" for name in ("w1", "w2", "w3"))
    rules: list[Rule] = [
        Fuse((w1, w3), f"{mlp}experts.gate_up_proj", dim=1, stack="e"),
        Fuse((w2,), f"{mlp}experts.down_proj", stack="e"),
    ]
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            prefix = f"model.layers.{i}.self_attn."
            rules.append(Fuse(tuple(f"{prefix}{name}_conv1d.weight" for name in "qkv"), f"{prefix}conv1d.weight"))
            gate = ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")
            rules += [Rename(f"{prefix}{name}", f"{prefix}forget_gate.{name}") for name in gate]
    for i, kind in enumerate(config.mlp_layer_types):
        moe, dense = (f"model.layers.{i}.{name}.{{rest...}}" for name in ("block_sparse_moe", "mlp"))
        rules.append(Rename(moe, dense, saved=kind == "sparse"))
    return tuple(rules)


def _gate_up(prefix: str) -> Fuse:
    return Fuse((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), f"{prefix}gate_up_proj.weight")


def _delta_attention(prefix: str) -> list[Rule]:
    return [
        Fuse(tuple(f"{prefix}{name}_proj.weight" for name in "qkv"), f"{prefix}qkv_proj.weight"),
        Fuse(tuple(f"{prefix}{name}_conv1d.weight" for name in "qkv"), f"{prefix}conv1d.weight"),
        Fuse(tuple(f"{prefix}{name}_a_proj.weight" for name in "fg"), f"{prefix}fg_a_proj.weight"),
        Rename(f"{prefix}forget_gate.{{rest...}}", f"{prefix}{{rest...}}", saved=False),
    ]
