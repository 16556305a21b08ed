"""mamba-ssm: the Triton kernels of Mamba's authors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.selective_state_update import selective_state_update as mamba_state_update
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from torch import Tensor

from xpu_ports.common.bench.peers._mamba import per_column


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert activation == "silu", "mamba-ssm's kernel knows no other activation"
    return functools.partial(rmsnorm_fn, x, weight, None, z, eps, group_size, norm_before_gate)


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    chunk_size: int,
    dt_min: float,
    cu_seqlens: None,
) -> Callable[[], Any]:
    A, limit = -torch.exp(A_log), (dt_min, float("inf"))
    return functools.partial(
        mamba_chunk_scan_combined,
        *(x, dt, A, B, C, chunk_size),
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_state,
        dt_softplus=True,
        dt_limit=limit,
        return_final_states=True,
    )


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    mask: None,
) -> Callable[[], Any]:
    dt, A, D, dt_bias = per_column(state, dt, A_log, D, dt_bias)
    return functools.partial(mamba_state_update, state, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True)
