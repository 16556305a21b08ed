"""Quantize a model in memory, as it would be loaded from an MXFP4 checkpoint; saving it writes one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from xpu_ports.common.conversion import Fuse, Rename, Split, pattern
from xpu_ports.common.weights import tied_groups
from xpu_ports.quant.mxfp4.format import BLOCK, SCALE_RULES, dequantize, quantize
from xpu_ports.quant.mxfp4.linear import ACTIVATIONS, EXPERTS, MXFP4Experts, MXFP4Linear
from xpu_ports.quant.mxfp4.packing import Unit, pack, units
from xpu_ports.quant.mxfp4.quantizer import MXFP4Config, MXFP4Quantizer
from xpu_ports.quant.mxfp4.scheme import FORMAT, METHOD, Group, read_scheme


def quantization_config(activations: str | None = None, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """What compressed-tensors writes into config.json for a model whose linear layers are MXFP4.

    Args:
        activations: None for W4A16, "mxfp4" for W4A4.
        ignore: layers that are not quantized: exact names, or `re:` and an expression.
    """
    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip
    group = {
        "format": FORMAT,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if activations is None else {**weights, "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def quantize_model(
    model: PreTrainedModel, activations: str | None = None, scale_rule: str = "even", ignore: Sequence[str] = ()
) -> PreTrainedModel:
    """Pack all linear layers of a model but those in `ignore` and those tied to an embedding, a layer at a time.

    Args:
        model: changed in place; not quantized yet.
        activations: None for W4A16, "mxfp4" for W4A4.
        scale_rule: how a block's scale is chosen, see `format.quantize`.
        ignore: names of layers as they stand in the model's files, or `re:` and an expression.

    Returns:
        The model.

    Raises:
        ValueError: it is quantized already, an argument is unknown, or a layer's width is not a multiple of 32.
    """
    chosen, config = _choose(model, activations, scale_rule, ignore)
    pack(model, chosen, functools.partial(_packed, {}, scale_rule))
    _mark(model, config)
    return model


@torch.no_grad()
def round_weights(model: PreTrainedModel, scale_rule: str = "even", ignore: Sequence[str] = ()) -> PreTrainedModel:
    """Give a dense model the values that `quantize_model` would pack: what its packed layers must compute with.

    Args:
        model: changed in place; not quantized yet.
        scale_rule, ignore: as `quantize_model` takes them.

    Returns:
        The model.

    Raises:
        ValueError: as there.
    """
    chosen, _ = _choose(model, None, scale_rule, ignore)
    # By identity: layers may share their weight.
    weights = {id(w): w for u in units(model) if u.name in chosen for w in map(model.get_parameter, u.keys)}
    for weight in weights.values():
        weight.copy_(dequantize(*quantize(weight, scale_rule), weight.dtype))
    return model


def packed_keys(model: PreTrainedModel, ignore: Sequence[str] = ()) -> set[str]:
    """The keys of the weights that `quantize_model` would pack; the model may be on the meta device.

    Raises:
        ValueError: as there.
    """
    chosen, _ = _choose(model, None, "even", ignore)
    return {key for unit in units(model) if unit.name in chosen for key in unit.keys}


def _choose(
    model: PreTrainedModel, activations: str | None, scale_rule: str, ignore: Sequence[str]
) -> tuple[dict[str, Group], dict[str, Any]]:
    """The units to pack, and the config that says so; raises as `quantize_model`."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        raise ValueError(f"the model is quantized already: {quantizer.quantization_config}")
    if getattr(model, "_parts", None):
        raise ValueError(
            "the model's layers are divided among ranks: convert the checkpoint, which ranks then load packed"
        )
    if activations not in ACTIVATIONS or scale_rule not in SCALE_RULES:
        raise ValueError(f"activations {activations!r} or scale_rule {scale_rule!r} is not one of those known")
    roots = {name: group[0] for group in tied_groups(model) for name in group}
    packable = {key for unit in units(model) for key in unit.keys}
    tied = [u.name for u in units(model) if not packable.issuperset(roots.get(k, k) for k in u.keys)]
    config = quantization_config(activations, [*ignore, *tied])
    scheme = read_scheme(config, type(model).__name__)
    chosen: dict[str, Group] = {}
    for unit in units(model):
        groups = {scheme.group_of(name, unit.classes) for name in layers_in_files(model, unit)}
        if len(groups) > 1:
            raise ValueError(f"ignore names a part of {unit.name}: {', '.join(layers_in_files(model, unit))}")
        group = groups.pop()
        if group is not None:
            _check_width(model, unit)
            chosen[unit.name] = group
    return chosen, config


def _check_width(model: PreTrainedModel, unit: Unit) -> None:
    for key in unit.keys:
        K = model.get_parameter(key).shape[-1]
        if K % BLOCK:
            raise ValueError(f"{key} has rows of {K} values, not a multiple of {BLOCK}: name it in ignore")


def _packed(made: dict[int, MXFP4Linear], scale_rule: str, old: nn.Module, group: Group) -> nn.Module:
    """A module packed; layers that share their weight share its bytes, which `made` remembers."""
    if not isinstance(old, nn.Linear):
        gate_up, down = (getattr(old, name) for name in EXPERTS)
        limit = getattr(old, "limit", None)
        return MXFP4Experts.from_weights(gate_up, down, group.activations, scale_rule, limit).train(old.training)
    first = made.get(id(old.weight))
    if first is None:
        return made.setdefault(id(old.weight), MXFP4Linear.from_linear(old, group.activations, scale_rule))
    new = MXFP4Linear(old.in_features, old.out_features, old.bias is not None, group.activations, "meta")
    new.weight_packed, new.weight_scale, new.bias = first.weight_packed, first.weight_scale, old.bias
    return new.train(old.training)


def _mark(model: Any, config: dict[str, Any]) -> None:
    """What transformers' loader leaves on a model that it loaded quantized."""
    model.config = copy.copy(model.config)
    model.config.quantization_config = MXFP4Config(config)
    model.hf_quantizer = MXFP4Quantizer(model.config.quantization_config)
    model.hf_quantizer.postprocess_model(model)
    model.is_quantized = True
    model.quantization_method = model.config.quantization_config.quant_method


def layers_in_files(model: PreTrainedModel, unit: Unit) -> list[str]:
    """The names that a unit's layers have in files: its own, where no rule of the model's says otherwise."""
    prefix = f"{model.base_model_prefix}." if model.base_model is model else ""
    return [
        name.removesuffix(".weight").removeprefix(prefix)
        for key in unit.keys
        for name in _keys_in_files(getattr(model, "_weight_rules", ()), prefix + key, model.get_parameter(key).shape[0])
    ]


def _keys_in_files(rules: Sequence[Any], key: str, stacked: int) -> Iterator[str]:
    """The keys that saving makes of the model's one; `stacked` is how many a stacked tensor holds."""
    keys = [key]
    for rule in rules:
        if isinstance(rule, Fuse) and (fields := pattern(rule.model).match(key)) is not None:
            fills = [{str(rule.stack): str(i)} for i in range(stacked)] if rule.stack else [{}]
            keys = [pattern(part).fill(fields | more) for part in rule.file for more in fills]
        elif isinstance(rule, Split):
            for target in rule.model:
                if (fields := pattern(target).match(key)) is not None:
                    keys = [pattern(rule.file).fill(fields)]
    for key in keys:
        found = ((pattern(rule.model).match(key), rule) for rule in rules if isinstance(rule, Rename) and rule.saved)
        yield next((pattern(rule.file).fill(fields) for fields, rule in found if fields is not None), key)
