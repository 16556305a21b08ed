"""How Zamba2's layers are divided among ranks: Mamba-2 by heads and groups, the shared blocks by heads and columns."""

from __future__ import annotations

from typing import Any

from xpu_ports.common.parallel import Divided, Plan, columns, rows, share, share_columns, share_grouped, vocabulary


def parallel_plan(config: Any, rank: int, ranks: int) -> Plan:
    """The plan of one of several ranks."""
    mamba, block = _mamba(config, rank, ranks), "layers.*.shared_transformer."
    return {
        **vocabulary(config, rank, ranks),
        "layers.*.mamba": mamba,
        "layers.*.mamba_decoder.mamba": mamba,
        f"{block}self_attn": _attention(config, rank, ranks),
        f"{block}feed_forward": _mlp(config, rank, ranks),
    }


def _mamba(config: Any, rank: int, ranks: int) -> Divided | str:
    """z, x and dt by heads, B and C by groups; ranks with heads of one group each have its B and C."""
    H, G, P, N = config.n_mamba_heads, config.mamba_ngroups, config.mamba_headdim, config.mamba_d_state
    own = share_grouped(H, G, rank, ranks)
    if own is None:
        return f"n_mamba_heads = {H} in mamba_ngroups = {G} groups do not divide among {ranks} ranks"
    inner, grouped = own.heads.of(P), own.groups.of(N)
    return Divided(
        cuts={
            "in_proj": rows(inner, inner, grouped, grouped, own.heads),
            "conv1d": rows(inner, grouped, grouped),
            "dt_bias": rows(own.heads),
            "A_log": rows(own.heads),
            "D": rows(own.heads),
            "norm": rows(inner),
            "out_proj": columns(inner),
        },
        sizes={
            "H": own.heads.own,
            "G": own.groups.own,
            "d_inner": inner.own,
            "d_conv": inner.own + 2 * grouped.own,
            "norm.n_groups": own.groups.own,
            "norm.group_size": inner.own // own.groups.own,
        },
        span=own.ranks_of_group,
    )


def _attention(config: Any, rank: int, ranks: int) -> Divided | str:
    """Heads, those that share a key together."""
    keys, each = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    if keys < ranks:
        return f"num_key_value_heads = {keys}, fewer than {ranks} ranks"
    kv = share(keys, rank, ranks).of(config.attention_head_dim)
    q = kv.of(each)
    cuts = {"q_proj": rows(q), "k_proj": rows(kv), "v_proj": rows(kv), "o_proj": columns(q)}
    if config.use_shared_attention_adapter:
        # The second half of each adapter: the first, of adapter_rank columns, is whole.
        cuts |= {f"linear_{name}_adapter_list.*.1": cuts[f"{name}_proj"] for name in "qkv"}
    return Divided(cuts)


def _mlp(config: Any, rank: int, ranks: int) -> Divided | str:
    F = share_columns(config.intermediate_size, config, rank, ranks)
    gate_up = rows(F, F)
    return Divided({"gate_up_proj": gate_up, "gate_up_proj_adapter_list.*.1": gate_up, "down_proj": columns(F)})
