"""How DeepSeek-V4's layers are divided among ranks: attention by heads and output groups, experts whole.

Rows and entries of the cache, which all heads share, what makes and chooses them, routers and the mixing of residual
streams are whole on each rank.
"""

from __future__ import annotations

from typing import Any

from xpu_ports.common.parallel import Cut, Divided, Plan, columns, rows, share, share_columns, share_grouped, vocabulary


def parallel_plan(config: Any, rank: int, ranks: int) -> Plan:
    """The plan of one of several ranks."""
    attention, experts = _attention(config, rank, ranks), _experts(config, rank, ranks)
    plan: dict[str, Divided | str] = {**vocabulary(config, rank, ranks)}
    for layers in ("layers.*.", "mtp.*."):
        plan |= {f"{layers}self_attn": attention, f"{layers}mlp": experts}
    return plan


def _attention(config: Any, rank: int, ranks: int) -> Divided | str:
    """Heads, with the groups that project what they give; where a group is divided, by its heads' columns."""
    H, G, K = config.num_attention_heads, config.o_groups, config.head_dim
    own = share_grouped(H, G, rank, ranks)
    if own is None:
        return f"num_attention_heads = {H} in o_groups = {G} do not divide among {ranks} ranks"
    low_rank = own.groups.of(config.o_lora_rank)
    return Divided(
        cuts={
            "q_b_proj": rows(own.heads.of(K)),
            "sinks": rows(own.heads),
            "o_a_proj": Cut({0: (low_rank,), 1: (own.inside.of(K),)}),
            "o_b_proj": columns(low_rank),
        },
        sizes={"H": own.heads.own},
    )


def _experts(config: Any, rank: int, ranks: int) -> Divided | str:
    """Whole experts, and columns of the shared one: their sums are one sum."""
    E = config.n_routed_experts
    if ranks > E:
        return f"n_routed_experts = {E}, fewer than {ranks} ranks"
    experts = share(E, rank, ranks)
    S = share_columns(config.moe_intermediate_size, config, rank, ranks)
    return Divided(
        cuts={
            "experts.gate_up_proj": rows(experts),
            "experts.down_proj": rows(experts),
            "shared_experts.gate_up_proj": rows(S, S),
            "shared_experts.down_proj": columns(S),
        },
        experts=experts,
    )
