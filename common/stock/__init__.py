"""What layers of stock transformers models compute, told by their source, and the ops that compute the same.

transformers writes a layer's source into the file of every model that has it: 142 classes share the forward of
Llama's RMSNorm, all Mamba-2 models one scan. So a contract is known by the source of the function that states it, not
by a name: `fingerprint` is of its syntax tree, without docstring, annotations and decorators. A function that differs
by one operation is another contract and is not known here. What is known was read beside the op: gate before or after
the norm, groups, weight or 1 + weight, where eps goes, what is rounded when, dtypes of outputs, what is written.

Where a known function rounds in between (a norm to the input's dtype before its weight) and the op does not, the
result differs by that rounding; the contract's note says it. Everything else is equal.

A stand-in takes the stock function and its arguments. A call that the op does not cover (another dtype, packed
sequences, a gradient through an op without a backward) goes to the stock function, and `explain()` tells why.

Source: huggingface/transformers, src/transformers/models/*/modeling_*.py, version 5.24.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from xpu_ports.common.stock import stand_ins
from xpu_ports.common.stock.source import fingerprint


@dataclass(frozen=True)
class Contract:
    """A stock function and what stands in for it."""

    # The op that does the work.
    op: str
    # Takes the stock function and its arguments.
    stand_in: Callable[..., Any]
    # How the result may differ, beyond the order of sums.
    note: str
    # Methods of the class that the function relies on, and their fingerprints.
    relies_on: tuple[tuple[str, str], ...] = ()
    # Fingerprints of the functions that may call it, where the stand-in needs to know what they do with the result.
    callers: frozenset[str] = frozenset()


def method_contract(cls: type[nn.Module]) -> Contract | None:
    """The contract that a module class's forward states, or None."""
    contract = METHODS.get(fingerprint(cls.forward) or "")
    if contract is None or any(fingerprint(getattr(cls, name, None)) != of for name, of in contract.relies_on):
        return None
    return contract


_ONCE = "rounded once, after the weight; the stock norm rounds before it too"
_SAME = "rounded where the stock function rounds"
_FINER = "steps and states in fp32; the stock function rounds them to the dtype"

# Fingerprint of a module's forward -> its contract; one class of each is named.
METHODS = {
    # BambaRMSNorm, LlamaRMSNorm: weight * norm(x).to(dtype)
    "78ed4555aca3957b": Contract("rms_norm", functools.partial(stand_ins.stock_rms_norm, promotes=True), _ONCE),
    # NemotronHRMSNorm: (weight.to(fp32) * norm(x)).to(dtype)
    "5b82fea17ac116f9": Contract("rms_norm", stand_ins.stock_rms_norm, _SAME),
    # GptOssRMSNorm, OlmoHybridRMSNorm: (weight * norm(x)).to(dtype), norm(x) in fp32
    "9974c071f03d5459": Contract("rms_norm", stand_ins.stock_rms_norm, _SAME),
    # Qwen3NextRMSNorm, GemmaRMSNorm: (norm(x) * (1 + weight)).to(dtype)
    "a8b9757d188ce3aa": Contract(
        "rms_norm", stand_ins.stock_rms_norm_zero_centered, _SAME, (("_norm", "18b7705fc9c3aad6"),)
    ),
    # MambaRMSNormGated, Zamba2RMSNormGated: weight * norm(x * silu(gate)).to(dtype), by groups of group_size
    "aec0fa17fa67c391": Contract("gated_rms_norm", stand_ins.stock_mamba_rms_norm_gated, _ONCE),
    # FalconH1RMSNormGated: in fp32 until the end, gate before or after, n_groups groups
    "2f45cd599fdcfc88": Contract("gated_rms_norm", stand_ins.stock_falcon_rms_norm_gated, _SAME),
    # Qwen3NextRMSNormGated: (weight * norm(x).to(dtype)) * act(gate)
    "78222cbdcbcb8abb": Contract("gated_rms_norm", stand_ins.stock_rms_norm_gated, _ONCE),
    # KimiLinearRMSNormGated: the same in fp32 until the end
    "cf6976411ac054b3": Contract("gated_rms_norm", stand_ins.stock_rms_norm_gated, _SAME),
    # KimiLinearForgetGate: -exp(A_log) softplus(f_b(f_a(x)) + dt_bias) in fp32
    "05fd8adf4ed1778c": Contract("kda_gate", stand_ins.stock_kda_gate, _SAME),
}

# Fingerprint of a function that layers call by a global name -> its contract.
FUNCTIONS = {
    # causal_conv1d_fn
    "210a68d434a40f8e": Contract(
        "causal_conv1d", stand_ins.stock_causal_conv1d_fn, "rounded once, after the activation"
    ),
    # causal_conv1d_update
    "e3c06f067ed95474": Contract(
        "causal_conv1d_update", stand_ins.stock_causal_conv1d_update, "rounded once, after the activation"
    ),
    # mamba2_selective_state_update
    "9b2e69a93260ffcb": Contract("selective_state_update", stand_ins.stock_mamba2_selective_state_update, _FINER),
    # mamba2_chunk_scan
    "a4a9dc48c82097a7": Contract(
        "ssd_chunk_scan", stand_ins.stock_mamba2_chunk_scan, "fp32 in, fp32 out; steps in fp32"
    ),
    # chunk_kimi_delta_attention
    "45278def739a9cde": Contract(
        "chunk_kda", stand_ins.stock_chunk_kda, "kernels round operands of products to the dtype"
    ),
    # recurrent_kimi_delta_attention, called by KimiLinearDeltaAttention.forward
    "7bbb15878f082021": Contract(
        "recurrent_kda",
        stand_ins.stock_recurrent_kda,
        "the state is moved in place",
        callers=frozenset({"0df1731860b0f251"}),
    ),
}

_ONE_DECAY = "one decay a head, where chunk_kda and recurrent_kda take one for each channel of the keys"
_MAMBA_1 = "a decay for each channel and state, where selective_state_update takes one a head"
# Fingerprints of functions that were compared, and what keeps an op from standing in.
DIFFERENT = {
    # torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule
    "93bdbed40a0abf3b": _ONE_DECAY,
    "0d5359440f42594b": _ONE_DECAY,
    # mamba_selective_state_update
    "74681f44ddac28a2": _MAMBA_1,
    # mamba2_split_conv1d_scan_combined
    "ff2a095d71e51581": "training alone, and it returns None without the package mamba_ssm",
}
# Names of all of these, so that a version of one that is not known is seen and reported.
FUNCTION_NAMES = frozenset(
    {
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "chunk_kimi_delta_attention",
        "mamba2_chunk_scan",
        "mamba2_selective_state_update",
        "mamba2_split_conv1d_scan_combined",
        "mamba_selective_state_update",
        "recurrent_kimi_delta_attention",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
    }
)
