"""vLLM's Triton kernels for Mamba layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update as vllm_conv_update
from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated
from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update as vllm_state_update
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

from xpu_ports.common.bench.peers._mamba import per_column


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int | None, norm_before_gate: bool, activation: str
) -> Callable[[], Any]:
    assert activation == "silu", "vLLM's kernel knows no other activation"
    return functools.partial(
        rms_norm_gated, x, weight, None, z=z, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
    )


def causal_conv1d_update(
    state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, mask: None, activation: str
) -> Callable[[], Any]:
    # Its output overwrites its input unless it gets a place of its own.
    token, out = x[:, 0], torch.empty_like(x[:, 0])
    return functools.partial(vllm_conv_update, token, state, weight, bias, activation, out=out, **_slots(state))


def _slots(state: Tensor) -> dict[str, Any]:
    """Where each sequence's state lies in the pool of states: here in order, from the first slot on."""
    slots = torch.arange(state.shape[0], dtype=torch.int32, device=state.device)
    return {"conv_state_indices": slots, "null_block_id": -1}


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
    assert x.shape[0] == 1, "written for one sequence"
    T, device = x.shape[1], x.device
    ends = torch.tensor([*range(0, T, chunk_size), T], dtype=torch.int32, device=device)
    chunks = len(ends) - 1
    out = torch.empty_like(x[0])
    states = functools.partial(
        mamba_chunk_scan_combined_varlen,
        *(x[0], dt[0], -torch.exp(A_log), B[0], C[0], chunk_size),
        cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device=device),
        cu_chunk_seqlens=ends,
        last_chunk_indices=torch.tensor([chunks - 1], dtype=torch.int32, device=device),
        seq_idx=torch.zeros(chunks, dtype=torch.int32, device=device),
        out=out,
        D=D,
        dt_bias=dt_bias,
        initial_states=initial_state,
        dt_softplus=True,
        dt_limit=(dt_min, float("inf")),
        state_dtype=torch.float32,
    )
    return lambda: (out[None], states())


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
    out = torch.empty_like(x)

    def call() -> Tensor:
        vllm_state_update(state, x, dt, A, B, C, D, dt_bias, dt_softplus=True, out=out)
        return out

    return call


def mamba2_decode_step(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    mask: None,
    n_groups: int,
    eps: float,
) -> Callable[[], Any]:
    # Its Mamba-2 mixer's decode path: three launches and the views between them.
    batch, H, P, N = state.shape
    inner, grouped = H * P, n_groups * N
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * grouped, H], dim=-1)
    dt, A, D, dt_bias = per_column(state, dt, A_log, D, dt_bias)
    convolved, y, slots = torch.empty_like(xbc), zxbcdt.new_empty(batch, H, P), _slots(conv_state)

    def call() -> Tensor:
        vllm_conv_update(xbc, conv_state, conv_weight, conv_bias, "silu", out=convolved, **slots)
        x, B, C = convolved.split([inner, grouped, grouped], dim=-1)
        B, C = B.view(batch, n_groups, N), C.view(batch, n_groups, N)
        vllm_state_update(state, x.view(batch, H, P), dt, A, B, C, D, dt_bias, dt_softplus=True, out=y)
        return rms_norm_gated(
            y.view(batch, inner), norm_weight, None, z, eps, group_size=inner // n_groups, norm_before_gate=False
        )

    return call


def mamba2_decode_linear(
    zxbcdt: Tensor,
    conv_state: Tensor,
    state: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    mask: None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    n_groups: int,
    eps: float,
) -> Callable[[], Any]:
    step = mamba2_decode_step(
        zxbcdt, conv_state, state, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, mask, n_groups, eps
    )
    return lambda: F.linear(step(), out_weight, out_bias)
