"""Which modules of a model a checkpoint holds packed, and their replacement, before a weight is read.

A file and its config must agree on every linear layer, and every scale must have a layer that reads it: whatever does
not fit is one error, raised while the model is still on the meta device.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings, rename_source_key

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo, describe
from xpu_ports.common.conversion import Fuse, Rename, Rule, Split, pattern, weight_transforms
from xpu_ports.common.weights import tied_groups
from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.linear import EXPERTS, MXFP4Experts, MXFP4Linear
from xpu_ports.quant.mxfp4.scheme import FORMAT, LINEAR, Group, Scheme

PACKED, SCALE = "weight_packed", "weight_scale"
SUFFIXES = ("_packed", "_scale")
# Tensors that belong to a quantized layer, in any format of compressed-tensors.
_QUANTIZATION = re.compile(
    r"(.*\.)?(weight_(packed|scale|scale_inv|shape|g_idx)|(weight|input|output)_(global_scale|zero_point)"
    r"|(input|output|[qkv])_scale)"
)


# ----------------------------------------------------------------------------------------------------- units of packing


@dataclass(frozen=True)
class Unit:
    """A module that is packed or not, as a whole."""

    name: str
    # The state dict's keys of its weights.
    keys: tuple[str, ...]
    # The names of its class and of that class's bases, as targets give them.
    classes: tuple[str, ...] = LINEAR


def base_prefix(model: nn.Module) -> str:
    """What stands before a base model's names in files with a head; nothing where a library has no such thing."""
    return f"{model.base_model_prefix}." if isinstance(model, PreTrainedModel) else ""


def is_base(model: nn.Module) -> bool:
    """Whether there is no head around."""
    return not isinstance(model, PreTrainedModel) or model.base_model is model


def units(model: nn.Module) -> Iterator[Unit]:
    """The linear layers of a model, and the experts that its rules for files stack."""
    stacks = [pattern(r.model) for r in _rules(model) if isinstance(r, Fuse) and r.stack]
    for name, module in model.named_modules(remove_duplicate=False):
        # Not a class of its own that computes something else.
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            yield Unit(name, (f"{name}.weight",), tuple(c.__name__ for c in type(module).__mro__))
            continue
        keys = tuple(f"{name}.{key}" for key in EXPERTS)
        if stacks and set(module._parameters) == set(EXPERTS):
            prefixes = ("", base_prefix(model))
            if all(any(s.match(prefix + key) for s in stacks for prefix in prefixes) for key in keys):
                yield Unit(name, keys)


def _rules(model: nn.Module) -> tuple[Rule, ...]:
    return tuple(getattr(model, "_weight_rules", ()))


def packed_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules for files, and for each that joins or splits weights the same for packed weights and for scales."""
    more: list[Rule] = []
    for rule in rules:
        for suffix in SUFFIXES:
            if isinstance(rule, Fuse) and all(part.endswith(".weight") for part in rule.file):
                parts = tuple(part + suffix for part in rule.file)
                more.append(_Bytes(parts, rule.model + suffix, rule.dim, rule.shares, rule.stack))
            elif isinstance(rule, Rename) and rule.file.endswith(".weight") and rule.model.endswith(".weight"):
                more.append(replace(rule, file=rule.file + suffix, model=rule.model + suffix))
            elif isinstance(rule, Split) and rule.file.endswith(".weight"):
                more.append(replace(rule, file=rule.file + suffix, model=tuple(m + suffix for m in rule.model)))
    return (*rules, *more)


class _Bytes(Fuse):
    """`Fuse` for bytes, which scales may be stored as or not."""

    def join(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        return super().join([[t.view(torch.uint8) for t in part] for part in parts])


def pack(
    model: Any,
    chosen: Mapping[str, Group],
    build: Callable[[nn.Module, Group], nn.Module] | None = None,
) -> None:
    """Replace modules by packed ones, ties and rules for files included.

    Args:
        model: changed in place.
        chosen: name of a linear layer or of stacked experts -> its group.
        build: makes the packed module; empty ones on the weights' device when left out.
    """
    shared: dict[int, nn.Module] = {}
    for name, group in chosen.items():
        old = model.get_submodule(name)
        if id(old) not in shared:
            shared[id(old)] = (build or _empty)(old, group)
        model.set_submodule(name, shared[id(old)])
    move_ties(model, SUFFIXES)
    if _rules(model):
        model._weight_rules = packed_rules(_rules(model))
        model._weight_conversions = weight_transforms(model._weight_rules)


def _empty(old: Any, group: Group) -> nn.Module:
    if isinstance(old, nn.Linear):
        dtype = None if old.bias is None else old.bias.dtype
        sizes = old.in_features, old.out_features, old.bias is not None
        return MXFP4Linear(*sizes, group.activations, old.weight.device, dtype).train(old.training)
    E, D, F = old.down_proj.shape
    limit = getattr(old, "limit", None)
    return MXFP4Experts(E, D, F, group.activations, old.down_proj.device, limit).train(old.training)


def move_ties(model: PreTrainedModel, suffixes: Sequence[str]) -> None:
    """Tie the parameters that packed layers have instead of those that the dense ones had, or the reverse.

    Args:
        model: its layers are packed, or dense again.
        suffixes: those of the parameters that there are now; ("",) for dense ones.
    """
    submodels = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    for submodel in submodels:
        ties = submodel._tied_weights_keys
        if ties:
            submodel._tied_weights_keys = dict(_moved(submodel, ties, suffixes))
    for submodel in submodels:
        submodel.all_tied_weights_keys = submodel.get_expanded_tied_weights_keys(all_submodels=True)


def _moved(model: nn.Module, ties: Mapping[str, str], suffixes: Sequence[str]) -> Iterator[tuple[str, str]]:
    names = dict(model.named_parameters(remove_duplicate=False))
    for target, source in ties.items():
        if target in names or not re.fullmatch(r"[\w.]+\.weight(_packed|_scale)?", target):
            yield target, source
            continue
        target, source = (re.sub(r"(_packed|_scale)$", "", key) for key in (target, source))
        yield from ((target + suffix, source + suffix) for suffix in suffixes)


# ------------------------------------------------------------------------------------------------ a file and its config


def choose(model: nn.Module, scheme: Scheme, found: Mapping[str, TensorInfo]) -> dict[str, Group]:
    """The modules to pack, after all that can be checked without reading a tensor.

    Args:
        model: transformers' or not, on any device, its layers dense.
        scheme: what the config says.
        found: the checkpoint's tensors.

    Returns:
        Name of a linear layer or of stacked experts -> its group.

    Raises:
        CheckpointError: the config and the file disagree on a layer, or tensors of a packed layer are missing, of the
            wrong shape or dtype, or read by nothing.
    """
    for key in _of_quantization(model, found):
        layer = key.removesuffix(f".{SCALE}")
        if layer != key and f"{layer}.{PACKED}" not in found:
            raise CheckpointError(found[key].file, key, f"{layer}.{PACKED} beside it", "none")
    roots = {name: group[0] for group in tied_groups(model) for name in group}
    members: dict[str, list[str]] = defaultdict(list)
    for layer, key in places(model, found):
        root = roots.get(key, key)
        members[root] += [layer] if layer not in members[root] else []
    packable = {key for unit in units(model) for key in unit.keys}
    chosen: dict[str, Group] = {}
    read: set[str] = set()
    for unit in units(model):
        layers = [layer for key in unit.keys for layer in members[roots.get(key, key)]]
        if not packable.issuperset(roots.get(key, key) for key in unit.keys):
            _check_tied(unit, layers, roots, found)
            continue
        if not layers:
            _check_absent(model, unit, scheme)
            continue
        group = _group_of(unit, layers, scheme, found)
        if group is not None:
            _check_shapes(model, unit, layers, found)
            chosen[unit.name] = group
            read.update(layers)
    _check_all_read(model, read, found)
    return chosen


def _check_tied(unit: Unit, layers: list[str], roots: Mapping[str, str], found: Mapping[str, TensorInfo]) -> None:
    """A weight that is an embedding's too stays as it is, whatever the config says of it."""
    for layer in layers:
        info = found.get(f"{layer}.{PACKED}")
        if info is not None:
            expected = f"{layer}.weight, since {unit.keys[0]} is tied to {roots[unit.keys[0]]}"
            raise CheckpointError(info.file, f"{layer}.{PACKED}", expected, describe(info))


def _check_absent(model: nn.Module, unit: Unit, scheme: Scheme) -> None:
    """What a file lacks of the base model is missing; a head may be new."""
    needed = is_base(model) or unit.name.startswith(base_prefix(model))
    if needed and scheme.group_of(unit.name, unit.classes) is not None:
        expected = "its tensors in the checkpoint, since a group targets it"
        raise CheckpointError(scheme.where, unit.name, expected, "none")


def places(model: nn.Module, found: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """(layer of the file, key in the model of the weight that it makes or makes a part of).

    Follows transformers' loader for the weight that the layer would have if it were dense. A packed layer that one of
    transformers' own converters would join with others has no place.
    """
    rules, theirs = _rules(model), get_model_conversion_mapping(model)  # type: ignore[arg-type]
    transforms = [*weight_transforms(rules), *theirs]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    foreign = {p for t in theirs if isinstance(t, WeightConverter) for p in t.source_patterns}
    expected, prefix = model.state_dict(), base_prefix(model).removesuffix(".") or None
    for key in found:
        layer, _, last = key.rpartition(".")
        if last not in ("weight", PACKED):
            continue
        dense = f"{layer}.weight"
        name, source = rename_source_key(dense, renamings, converters, prefix, expected)
        if name not in expected and dense in expected:
            name, source = rename_source_key(dense, [], [], prefix, expected)
        if name in expected and not (source in foreign and last == PACKED):
            yield from ((layer, target) for target in _targets(rules, apply_renamings(dense, renamings), name))


def _targets(rules: Sequence[Rule], renamed: str, name: str) -> list[str]:
    """All keys of the model that a tensor of the file makes a part of."""
    for rule in rules:
        fields = pattern(rule.file).match(renamed) if isinstance(rule, Split) else None
        if fields is not None:
            return [pattern(target).fill(fields) for target in rule.model]
    return [name]


def _group_of(unit: Unit, layers: list[str], scheme: Scheme, found: Mapping[str, TensorInfo]) -> Group | None:
    """The unit's group, on which all layers of the file that it is made of agree with the config."""
    groups = {layer: _group_of_layer(unit, layer, scheme, found) for layer in layers}
    first = layers[0]
    for layer, group in groups.items():
        if _says(group) != _says(groups[first]):
            expected = f"{_says(groups[first])} as {first}, with which it makes {unit.name}"
            raise CheckpointError(scheme.where, layer, expected, _says(group))
    return groups[first]


def _says(group: Group | None) -> str:
    return "no quantization" if group is None else "W4A16" if group.activations is None else "W4A4"


def _group_of_layer(unit: Unit, layer: str, scheme: Scheme, found: Mapping[str, TensorInfo]) -> Group | None:
    # compressed-tensors matches the model's names, and writes its `ignore` with the file's.
    groups = [scheme.group_of(name, unit.classes) for name in (layer, unit.name)]
    packed, dense = found.get(f"{layer}.{PACKED}"), found.get(f"{layer}.weight")
    if packed is not None and dense is not None:
        hint = f"{layer}.{PACKED} is there too"
        raise CheckpointError(dense.file, f"{layer}.weight", "a weight once, packed or not", describe(dense), hint)
    if packed is None:
        assert dense is not None
        if groups[0] is not None and groups[1] is not None:
            hint = f"group {groups[0].name} of the config targets it, and ignore does not name it"
            raise CheckpointError(dense.file, f"{layer}.weight", f"{layer}.{PACKED}", describe(dense), hint)
        return None
    group = groups[0] or groups[1]
    if group is None:
        why = "ignore names it" if scheme.ignores(layer) or scheme.ignores(unit.name) else "no group targets it"
        hint = f"of the config {why}"
        raise CheckpointError(packed.file, f"{layer}.{PACKED}", f"{layer}.weight", describe(packed), hint)
    return group


def _check_shapes(model: nn.Module, unit: Unit, layers: list[str], found: Mapping[str, TensorInfo]) -> None:
    module = model.get_submodule(unit.name)
    for layer in layers:
        key, info = f"{layer}.{PACKED}", found[f"{layer}.{PACKED}"]
        if info.dtype != torch.uint8 or len(info.shape) != 2:
            raise CheckpointError(info.file, key, "uint8 of two dimensions", describe(info))
        N, K = info.shape[0], 2 * info.shape[1]
        if K % BLOCK:
            raise CheckpointError(info.file, key, f"rows of a multiple of {BLOCK} values", f"{K}")
        if isinstance(module, nn.Linear) and len(layers) == 1:
            expected = (module.out_features, module.in_features // 2)
            if info.shape != expected:
                raise CheckpointError(info.file, key, f"shape {list(expected)}", f"{list(info.shape)}")
        scale = found.get(f"{layer}.{SCALE}")
        if scale is None:
            raise CheckpointError(info.file, key, f"{layer}.{SCALE} beside it", "none")
        if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scale.shape != (N, K // BLOCK):
            expects = f"uint8 or float8_e8m0fnu {[N, K // BLOCK]}"
            raise CheckpointError(scale.file, f"{layer}.{SCALE}", expects, describe(scale))


def _check_all_read(model: nn.Module, read: set[str], found: Mapping[str, TensorInfo]) -> None:
    """Every tensor of quantization must have a layer that reads it."""
    for key in _of_quantization(model, found):
        layer, _, last = key.rpartition(".")
        if layer not in read or last not in (PACKED, SCALE):
            hint = "" if last in (PACKED, SCALE) else f"{last} is no tensor of {FORMAT}"
            expected = f"a linear layer of {type(model).__name__} that reads it"
            raise CheckpointError(found[key].file, key, expected, describe(found[key]), hint)


def _of_quantization(model: Any, found: Mapping[str, TensorInfo]) -> list[str]:
    """The keys of a file that only quantized layers can have, but for those that the model leaves out anyway."""
    expected = model.state_dict()
    ignored = re.compile("|".join(f"(?:{p})" for p in model._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    base = base_prefix(model)
    # A file with a head, loaded into a model without one.
    headless = is_base(model) and any(key.startswith(base) for key in found)
    return [
        key
        for key in found
        if _QUANTIZATION.fullmatch(key)
        and key not in expected
        and base + key not in expected
        and not ignored.search(key)
        and (key.startswith(base) or not headless)
    ]
