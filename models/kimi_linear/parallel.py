"""How Kimi Linear's layers are divided among ranks: attention by heads, MLPs by columns, experts whole."""

from __future__ import annotations

from typing import Any

from xpu_ports.common.parallel import Cut, Divided, Plan, columns, rows, share, share_columns, vocabulary


def parallel_plan(config: Any, rank: int, ranks: int) -> Plan:
    """The plan of one of several ranks. Latents, whose rows heads share, and routers are whole."""
    F = share_columns(config.intermediate_size, config, rank, ranks)
    kinds = {"linear_attention": _delta(config, rank, ranks), "full_attention": _latent(config, rank, ranks)}
    return {
        **vocabulary(config, rank, ranks),
        **{f"layers.{i}.self_attn": kinds[kind] for i, kind in enumerate(config.layer_types)},
        # The layer runs the MLP's two halves itself.
        "layers.*.mlp": Divided({"gate_up_proj": rows(F, F), "down_proj": columns(F)}, at="down_proj"),
        "layers.*.block_sparse_moe": _experts(config, rank, ranks),
    }


def _delta(config: Any, rank: int, ranks: int) -> Divided | str:
    """Heads with their convolutions, decays, gates and states; the low-rank halves of decay and gate are whole."""
    H = config.linear_num_heads
    if ranks > H:
        return f"linear_num_heads = {H}, fewer than {ranks} ranks"
    heads = share(H, rank, ranks)
    wide = heads.of(config.linear_head_dim)
    qkv = rows(wide, wide, wide)
    return Divided(
        cuts={
            "qkv_proj": qkv,
            "conv1d": qkv,
            "f_b_proj": rows(wide),
            "g_b_proj": rows(wide),
            "b_proj": rows(heads),
            "A_log": Cut({2: (heads,)}),
            "dt_bias": rows(wide),
            "o_proj": columns(wide),
        },
        sizes={"H": heads.own},
    )


def _latent(config: Any, rank: int, ranks: int) -> Divided | str:
    """Heads, on the same latents."""
    H = config.num_attention_heads
    if ranks > H:
        return f"num_attention_heads = {H}, fewer than {ranks} ranks"
    heads = share(H, rank, ranks)
    q = heads.of(config.qk_nope_head_dim + config.qk_rope_head_dim)
    kv = heads.of(config.qk_nope_head_dim + config.v_head_dim)
    cuts = {"q_proj": rows(q), "kv_b_proj": rows(kv), "o_proj": columns(heads.of(config.v_head_dim))}
    return Divided(cuts, sizes={"H": heads.own})


def _experts(config: Any, rank: int, ranks: int) -> Divided | str:
    """Whole experts, and columns of the shared one: their sums are one sum."""
    E = config.num_local_experts
    if ranks > E:
        return f"num_experts = {E}, fewer than {ranks} ranks"
    experts = share(E, rank, ranks)
    S = share_columns(config.moe_intermediate_size * config.n_shared_experts, config, rank, ranks)
    return Divided(
        cuts={
            "experts.gate_up_proj": rows(experts),
            "experts.down_proj": rows(experts),
            "shared_experts.gate_up_proj": rows(S, S),
            "shared_experts.down_proj": columns(S),
        },
        experts=experts,
    )
