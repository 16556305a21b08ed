"""Stand-ins for functions of stock transformers models: the stock function and its arguments in, its result out.

A call that the op does not cover goes to the stock function, and `explain()` tells why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import record
from xpu_ports.common.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from xpu_ports.common.kernels.gated_rms_norm import ACTIVATIONS, gated_rms_norm
from xpu_ports.common.kernels.kda import chunk_kda, kda_gate, recurrent_kda
from xpu_ports.common.kernels.rms_norm import rms_norm
from xpu_ports.common.kernels.selective_state_update import selective_state_update
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan

# What a call of a stock function goes to `explain()` under when it stays with that function.
STOCK = "stock"


def _stay(op: str, x: Tensor, why: str) -> None:
    """Tell `explain()` that a call stays with the stock function."""
    if not torch.compiler.is_compiling():
        record(op, STOCK, x.device.type, why)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# -------------------------------------------------------------------------------------------------------------- norms


def _why_not_weight(weight: Tensor, x: Tensor, promotes: bool) -> str | None:
    """Why a norm's weight is not for the op; `promotes` where the stock output has the wider dtype of both."""
    if hasattr(weight, "device_mesh"):
        return "the weight is a DTensor"
    if promotes and torch.promote_types(weight.dtype, x.dtype) != x.dtype:
        return f"the output is {weight.dtype} for {x.dtype}, as its weight"
    return None


def stock_rms_norm(stock: Callable, module: Any, hidden_states: Tensor, *, promotes: bool = False) -> Tensor:
    if why := _why_not_weight(module.weight, hidden_states, promotes):
        _stay("rms_norm", hidden_states, why)
        return stock(module, hidden_states)
    return rms_norm(hidden_states, module.weight, module.variance_epsilon)


def stock_rms_norm_zero_centered(stock: Callable, module: Any, x: Tensor) -> Tensor:
    if why := _why_not_weight(module.weight, x, promotes=False):
        _stay("rms_norm", x, why)
        return stock(module, x)
    return rms_norm(x, 1.0 + module.weight.float(), module.eps)


def _gated(
    stock: Callable,
    module: Any,
    x: Tensor,
    gate: Tensor | None,
    *,
    groups: int = 1,
    norm_before_gate: bool,
    activation: str = "silu",
    promotes: bool = False,
) -> Tensor:
    why = _why_not_weight(module.weight, x, promotes)
    if gate is None or gate.shape != x.shape:
        why = "no gate of the input's shape"
    elif activation not in ACTIVATIONS:
        why = f"the activation is {activation!r}"
    elif x.shape[-1] % groups:
        why = f"{groups} groups do not divide {x.shape[-1]} columns"
    if why:
        _stay("gated_rms_norm", x, why)
        return stock(module, x, gate)
    size = x.shape[-1] // groups
    return gated_rms_norm(x, gate, module.weight, module.variance_epsilon, size, norm_before_gate, activation)


def stock_mamba_rms_norm_gated(
    stock: Callable, module: Any, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    groups = hidden_states.shape[-1] // module.group_size
    return _gated(stock, module, hidden_states, gate, groups=groups, norm_before_gate=False, promotes=True)


def stock_falcon_rms_norm_gated(
    stock: Callable, module: Any, hidden_states: Tensor, gate: Tensor | None = None
) -> Tensor:
    first = module.norm_before_gate
    return _gated(stock, module, hidden_states, gate, groups=module.n_groups, norm_before_gate=first)


def stock_rms_norm_gated(stock: Callable, module: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
    activation = module.activation
    return _gated(stock, module, hidden_states, gate, norm_before_gate=True, activation=activation)


# ---------------------------------------------------------------------------------------------------------- sequences

# What transformers' models set for packed sequences; without the packages that it asks for it raises.
_PACKED = ("cu_seqlens", "seq_idx")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "identity"}


def _why_not_sequence(kwargs: dict[str, Any], *tensors: Tensor | None) -> str | None:
    if any(kwargs.get(name) is not None for name in _PACKED):
        return "packed sequences"
    if _needs_grad(*tensors):
        return "no backward, and a gradient is needed"
    return None


def stock_causal_conv1d_fn(
    stock: Callable,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    why = _why_not_sequence(kwargs, hidden_states, weight, bias)
    if activation not in _ACTIVATIONS:
        why = f"the activation is {activation!r}"
    if why:
        _stay("causal_conv1d", hidden_states, why)
        return stock(hidden_states, weight, bias, activation=activation, **kwargs)
    x = hidden_states.transpose(1, 2)  # [B, T, D]
    return causal_conv1d(x, weight, bias, None, _ACTIVATIONS[activation]).transpose(1, 2)


def stock_causal_conv1d_update(
    stock: Callable,
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    why = _why_not_sequence({}, hidden_states, weight, bias)
    if activation not in _ACTIVATIONS:
        why = f"the activation is {activation!r}"
    elif conv_state.dtype != hidden_states.dtype:
        why = f"a window in {conv_state.dtype} for inputs in {hidden_states.dtype}"
    if why:
        _stay("causal_conv1d_update", hidden_states, why)
        return stock(hidden_states, conv_state, weight, bias, activation=activation)
    x = hidden_states.transpose(1, 2)  # [B, T, D]
    return causal_conv1d_update(conv_state, x, weight, bias, None, _ACTIVATIONS[activation]).transpose(1, 2)


def _per_head(t: Tensor | None) -> Tensor | None:
    """What was expanded from one number a head, [H, ...] to [H]; ValueError where it was not."""
    if t is None:
        return None
    for dim in range(1, t.dim()):
        if t.stride(dim) != 0 and t.shape[dim] != 1:
            raise ValueError("one number a channel, not a head")
        t = t.select(dim, 0).unsqueeze(dim)
    return t.flatten()


def stock_mamba2_selective_state_update(
    stock: Callable,
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    why = _why_not_sequence(kwargs, hidden_states, dt, A, B, C, D, dt_bias, z)
    if not dt_softplus:
        why = "no softplus of the step"
    elif dt.stride(2) != 0 and dt.shape[2] != 1:
        why = "a step a channel, not a head"
    try:
        rate, skip, bias = _per_head(A), _per_head(D), _per_head(dt_bias)
    except ValueError as error:
        why = str(error)
    if why:
        _stay("selective_state_update", hidden_states, why)
        return stock(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **kwargs)
    assert rate is not None
    A_log = torch.log(-rate)
    y = selective_state_update(state, hidden_states, dt[..., 0], A_log, B, C, skip, bias, None)
    return y if z is None else (y * F.silu(z)).to(y.dtype)


def stock_mamba2_chunk_scan(
    stock: Callable,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    why = _why_not_sequence(kwargs, hidden_states, dt, A, B, C, D, dt_bias, initial_states)
    if not dt_softplus:
        why = "no softplus of the step"
    elif dt_limit[1] != math.inf:
        why = f"steps of at most {dt_limit[1]}"
    if why:
        _stay("ssd_chunk_scan", hidden_states, why)
        options = (D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states)
        return stock(hidden_states, dt, A, B, C, chunk_size, *options, **kwargs)
    # The stock scan computes in fp32 and gives fp32, whatever the dtype of its inputs.
    x, B, C = hidden_states.float(), B.float(), C.float()
    y, state = ssd_chunk_scan(x, dt, torch.log(-A), B, C, D, dt_bias, initial_states, chunk_size, max(0.0, dt_limit[0]))
    return (y, state) if return_final_states else y


def stock_chunk_kda(
    stock: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    why = _why_not_sequence(kwargs, query, key, value, g, beta, initial_state)
    if why:
        _stay("chunk_kda", query, why)
        options = (chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return stock(query, key, value, g, beta, *options, **kwargs)
    scale = query.shape[-1] ** -0.5
    o, state = chunk_kda(query, key, value, g, beta, initial_state, scale, use_qk_l2norm_in_kernel)
    return o, state if output_final_state else None


def stock_recurrent_kda(
    stock: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    why = _why_not_sequence(kwargs, query, key, value, g, beta, initial_state)
    if initial_state is None or initial_state.dtype != torch.float32:
        why = "no fp32 state to start with"
    if why:
        _stay("recurrent_kda", query, why)
        options = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return stock(query, key, value, g, beta, *options, **kwargs)
    scale = query.shape[-1] ** -0.5
    # In place: the callers, which are known, write the result over what they gave.
    o = recurrent_kda(initial_state, query, key, value, g, beta, scale, use_qk_l2norm_in_kernel)
    return o, initial_state if output_final_state else None


def stock_kda_gate(stock: Callable, module: Any, hidden_states: Tensor) -> Tensor:
    if _needs_grad(hidden_states, module.A_log, module.dt_bias, module.f_b_proj.weight):
        _stay("kda_gate", hidden_states, "no backward, and a gradient is needed")
        return stock(module, hidden_states)
    f = module.f_b_proj(module.f_a_proj(hidden_states)).unflatten(-1, (-1, module.head_dim))
    return kda_gate(f, module.A_log.flatten(), module.dt_bias)
