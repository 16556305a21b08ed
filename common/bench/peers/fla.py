"""flash-linear-attention (fla-core)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fla.modules.causal_conv1d import causal_conv1d as fla_conv
from fla.modules.norm.fused_norm_gate import rms_norm_gated
from fla.ops.kda import chunk_kda as fla_chunk_kda
from fla.ops.kda import fused_recurrent_kda
from fla.ops.kda.gate import fused_kda_gate
from torch import Tensor


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert norm_before_gate, "fla's kernel normalizes first"
    assert group_size in (None, x.shape[-1]), "fla's kernel has no groups"
    return functools.partial(rms_norm_gated, x, z, weight, None, activation, eps=eps)


def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> Callable[[], Any]:
    return functools.partial(fused_kda_gate, f, A_log, dt_bias, lower_bound)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
    l2norm: bool,
    cu_seqlens: Tensor | None,
) -> Callable[[], Any]:
    options = dict(initial_state=initial_state, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
    return functools.partial(fla_chunk_kda, q, k, v, g, beta, scale, cu_seqlens=cu_seqlens, **options)


def recurrent_kda(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    l2norm: bool,
    mask: Tensor | None,
) -> Callable[[], Any]:
    assert mask is None, "fla's kernel takes slots instead of a mask"

    def call() -> Tensor:
        options = dict(scale=scale, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=l2norm)
        o, final = fused_recurrent_kda(q, k, v, g, beta, **options)
        if final.data_ptr() != state.data_ptr():
            state.copy_(final)
        return o

    return call


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str
) -> Callable[[], Any]:
    def call() -> Tensor:
        return fla_conv(x, weight, bias, initial_state=initial_state, activation=activation)[0]

    return call
