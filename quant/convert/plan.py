"""Decides what becomes of every tensor, before one is read: `--to mxfp4` and `--to bf16`."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.quant.convert import model as models
from xpu_ports.quant.convert.formats import Source
from xpu_ports.quant.convert.model import Kind
from xpu_ports.quant.convert.steps import (
    MXFP4,
    Carry,
    Convert,
    ConvertTransposed,
    Copy,
    Dense,
    Quantize,
    Rows,
    Step,
    Stored,
    Values,
)
from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.linear import ACTIVATIONS, EXPERTS
from xpu_ports.quant.mxfp4.packing import choose, units
from xpu_ports.quant.mxfp4.quantize import quantization_config
from xpu_ports.quant.mxfp4.scheme import LINEAR, Scheme, read_scheme

# The projections of gpt-oss: in its stacks the rows of gate and up take turns.
_EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass
class Plan:
    """A conversion, decided."""

    source: Source
    steps: list[Step]
    # config.json of the target; None for a file that has none, and nothing beside it.
    config: dict[str, Any] | None
    warnings: list[str] = field(default_factory=list)
    # What a file of the target's weights is called, if not as in the source.
    weights: str = ""

    def check(self) -> Plan:
        """Every tensor of the source goes somewhere, and no name of the target is made twice.

        Raises:
            CheckpointError: not so.
        """
        used = {stored.key for step in self.steps for stored in step.stored}
        for key, info in self.source.found.items():
            if key not in used:
                raise CheckpointError(info.file, key, "a place in the target", "none")
        made: set[str] = set()
        for step in self.steps:
            for output in step.outputs:
                if output.name in made:
                    where = step.stored[0]
                    raise CheckpointError(where.info.file, where.key, f"one source of {output.name}", "two")
                made.add(output.name)
        return self


@dataclass(frozen=True)
class ToMXFP4:
    """What was asked for."""

    # None for W4A16, "mxfp4" for W4A4; "source" for what the source says, W4A16 where it says nothing.
    activations: str | None = "source"
    scale_rule: str = "even"
    # Exact names of layers, or `re:` and an expression.
    ignore: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------------------- mxfp4


def plan_mxfp4(source: Source, asked: ToMXFP4, port: type[nn.Module] | None = None) -> Plan:
    """Linear layers become MXFP4, and what is MXFP4 already is carried over bit by bit.

    In a source that is quantized the layers that are not stay as they are: its producer has left them out.

    Args:
        source: a checkpoint.
        asked: how to quantize.
        port: the model's class, whose layers these are; transformers' own when left out.

    Raises:
        CheckpointError: the model is not known, a width does not fit, a pattern names nothing, or the source cannot
            be loaded as what it would become.
    """
    dense = _dense(source)
    model, layers = _layers(source, dense, port)
    activations = _activations(source, asked.activations)
    scheme = read_scheme(quantization_config(activations, asked.ignore), "--ignore")
    steps: list[Step] = []
    for key in _keys(source):
        steps += _steps_of(source, key, layers, scheme, asked)
    # Which its file may lack: it is the embedding's.
    tied = set() if model is None else models.tied(model)
    _check_ignore(asked.ignore, tied | {layer.unit for layer in layers.values()}, steps)
    if not any(isinstance(step, (Quantize, Carry)) for step in steps):
        raise CheckpointError(source.where, None, "a linear layer to quantize", "none that is not ignored")
    unpacked = _left_dense(steps)
    if model is not None:
        unpacked = (unpacked - models.embeddings(model, dense)) | tied
    ignore = [*asked.ignore, *sorted(name for name in unpacked if not scheme.ignores(name))]
    config = {**_without_quantization(source), "quantization_config": quantization_config(activations, ignore)}
    plan = Plan(source, steps, config, list(source.warnings)).check()
    if model is not None:
        _check_loads(plan, model, layers)
    plan.warnings += _stacks_left(steps)
    return plan


def _dense(source: Source) -> dict[str, TensorInfo]:
    """Names and shapes as if nothing were quantized; gpt-oss's stacks are left out."""
    rest = {key: stored.info for key, stored in source.rest().items()}
    return rest | {
        key: TensorInfo(values.shape, torch.bfloat16, values.stored[0].info.file)
        for key, values in source.quantized.items()
    }


def _keys(source: Source) -> Iterator[str]:
    """The names of what to convert, in the order of the source's files."""
    name_of = {v.stored[0].key: name for name, v in (source.quantized | source.stacks).items()}
    rest = source.rest()
    for key in source.found:
        if key in name_of:
            yield name_of[key]
        elif key in rest:
            yield key


def _layers(
    source: Source, dense: Mapping[str, TensorInfo], port: type[nn.Module] | None
) -> tuple[nn.Module | None, dict[str, models.Layer]]:
    """The model and its linear layers. A source that is quantized says itself which layers are."""
    try:
        model = models.build(source.folder, port, source.config)
    except CheckpointError as error:
        if not source.is_quantized:
            raise
        source.warnings.append(f"{error}: what the source holds quantized is converted without a look at its model")
        return None, {}
    stacks = [key for key, info in dense.items() if key.rpartition(".")[2] in EXPERTS and len(info.shape) == 3]
    if stacks and any(len(unit.keys) > 1 for unit in units(model)):
        # Experts that the model can hold packed, under its names in memory.
        info = dense[stacks[0]]
        expected = "a matrix an expert, as the published layout has (--layout official makes it)"
        raise CheckpointError(info.file, stacks[0], expected, f"a stack {list(info.shape)}")
    return model, models.layers(model, dense)


def _activations(source: Source, asked: str | None) -> str | None:
    found = source.activations if asked == "source" else asked
    if found not in ACTIVATIONS:
        expects = "inputs rounded to MXFP4 or not at all, or --activations to say which"
        raise CheckpointError(source.where, "quantization_config", expects, f"inputs as {found}")
    return found


def _check_ignore(patterns: Sequence[str], modules: set[str], steps: Sequence[Step]) -> None:
    """Each must name something, in the model or in files: what is mistyped would be quantized."""
    outputs = (step.outputs[0].name for step in steps)
    names = modules | {name.removesuffix("_packed").removesuffix(".weight") for name in outputs}
    for pattern in patterns:
        one = read_scheme(quantization_config(None, [pattern]), "--ignore")
        if pattern not in LINEAR and not any(one.ignores(name) for name in names):
            close = difflib.get_close_matches(pattern, list(itertools.islice(names, 5000)), n=1)
            hint = f"the closest is {close[0]}" if close else ""
            raise CheckpointError("--ignore", pattern, "the name of a layer, or re: and an expression", "none", hint)


def _steps_of(
    source: Source, key: str, layers: Mapping[str, models.Layer], scheme: Scheme, asked: ToMXFP4
) -> list[Step]:
    """What becomes of one tensor."""
    if key in source.stacks:
        return list(_experts(source, key, scheme))
    if key.removesuffix("_bias") in source.stacks:
        # With its stack.
        return []
    name = key.removesuffix(".weight")
    layer = layers.get(name)
    values = source.quantized.get(key)
    if values is not None:
        if not _packs(values, layer) or not _wanted(scheme, name, layer):
            return [Convert(key, values, torch.bfloat16)]
        if isinstance(values, MXFP4):
            return [Carry(name, values)]
    stored = source.stored(key)
    if values is None:
        linear = layer is not None and layer.kind in (Kind.LINEAR, Kind.JOINED)
        if source.is_quantized or not linear or not _wanted(scheme, name, layer):
            return [Copy.whole(stored)]
    values = values or Dense(stored)
    if values.width % BLOCK:
        hint = f"--ignore {name} leaves it as it is"
        raise CheckpointError(stored.info.file, key, f"rows of a multiple of {BLOCK} values", f"{values.width}", hint)
    return [Quantize(name, values, asked.scale_rule)]


def _packs(values: Values, layer: models.Layer | None) -> bool:
    """Whether a weight that the source has quantized may be MXFP4; one that is so already may where nothing forbids."""
    if layer is None:
        return True
    return layer.kind in (Kind.LINEAR, Kind.JOINED) or (isinstance(values, MXFP4) and layer.kind != Kind.TIED)


def _wanted(scheme: Scheme, name: str, layer: models.Layer | None) -> bool:
    """Whether no pattern ignores a layer, under its name in files or in the model."""
    if layer is None:
        return scheme.group_of(name, LINEAR) is not None
    return all(scheme.group_of(n, layer.classes) is not None for n in (name, layer.unit))


def _experts(source: Source, key: str, scheme: Scheme) -> Iterator[Step]:
    """A stack of gpt-oss as one layer an expert, gate and up apart, with their biases."""
    stack = source.stacks[key]
    prefix, _, last = key.rpartition(".")
    parts = _EXPERT_PARTS.get(last)
    codes, scales = stack.stored
    if parts is None or stack.shape[1] % len(parts):
        raise CheckpointError(codes.info.file, codes.key, f"one of {', '.join(_EXPERT_PARTS)}", last)
    E, N, K = stack.shape
    bias = source.found.get(f"{key}_bias")
    if bias is not None and bias.shape != (E, N):
        raise CheckpointError(bias.file, f"{key}_bias", f"shape {[E, N]}", f"{list(bias.shape)}")
    count, step = N // len(parts), len(parts)
    for expert, (i, part) in itertools.product(range(E), enumerate(parts)):
        layer, rows = f"{prefix}.{expert}.{part}", Rows(count, expert * N + i, step)
        values = MXFP4(codes, scales, (count, K), rows, stack.shift)
        packed = _wanted(scheme, layer, None)
        yield Carry(layer, values) if packed else Convert(f"{layer}.weight", values, torch.bfloat16)
        if bias is not None:
            numbers = Dense(Stored(f"{key}_bias", bias), (count, 1), rows)
            yield Convert(f"{layer}.bias", numbers, bias.dtype, (count,))


def _left_dense(steps: Sequence[Step]) -> set[str]:
    """Layers that are not packed, by the shapes and names of their weights."""
    outputs = [output for step in steps for output in step.outputs]
    return {o.name.removesuffix(".weight") for o in outputs if o.name.endswith(".weight") and len(o.shape) == 2}


def _stacks_left(steps: Sequence[Step]) -> list[str]:
    """A warning of stacked matrices: as experts' weights they may be most of the model."""
    stacks = [
        step.outputs[0].name
        for step in steps
        if isinstance(step, Copy) and len(step.outputs[0].shape) == 3 and min(step.outputs[0].shape[1:]) >= BLOCK
    ]
    more = f" and {len(stacks) - 1} more" if len(stacks) > 1 else ""
    return [f"{stacks[0]}{more}: a stack of matrices stays as it is, only matrices become MXFP4"] if stacks else []


def _check_loads(plan: Plan, model: nn.Module, layers: Mapping[str, models.Layer]) -> None:
    """What the loader would say of the target, before it is written."""
    planned: dict[str, TensorInfo] = {}
    elsewhere: list[str] = []
    for step in plan.steps:
        name = step.outputs[0].name.removesuffix(".weight_packed")
        layer = layers.get(name)
        if isinstance(step, (Quantize, Carry)) and (layer is None or layer.kind != Kind.LINEAR):
            elsewhere.append(name)
            continue
        file = step.stored[0].info.file
        planned |= {o.name: TensorInfo(o.shape, o.dtype, file) for o in step.outputs}
    if elsewhere:
        plan.warnings.append(
            f"{elsewhere[0]} and {len(elsewhere) - 1} more packed layers have no place in {type(model).__name__}, "
            "which loads them dense only: the target is for engines that read packed experts, as vLLM does"
        )
    assert plan.config is not None
    choose(model, read_scheme(plan.config["quantization_config"], plan.source.where), planned)


def _without_quantization(source: Source) -> dict[str, Any]:
    """config.json without what it said of quantization."""
    return {k: v for k, v in source.config.items() if k not in ("quantization_config", "expert_dtype")}


# ---------------------------------------------------------------------------------------------------------------- bf16


def plan_bf16(source: Source, port: type[nn.Module] | None = None) -> Plan:
    """Quantized weights and floats become bf16.

    fp32 tensors stay where the model's class keeps them so, and in a checkpoint of 16 bits, which has them on purpose.

    Args:
        source: a checkpoint.
        port: the model's class; transformers' own when left out.

    Raises:
        CheckpointError: a tensor has no place in the target.
    """
    try:
        kept = models.kept_in_fp32(models.build(source.folder, port, source.config))
    except CheckpointError as error:
        source.warnings.append(f"{error}: fp32 tensors are told from the rest by the checkpoint's dtype alone")
        kept = re.compile(r"(?!)")
    named = source.config.get("dtype") or source.config.get("torch_dtype")
    cast = {torch.float16, torch.float64} | (set() if named in ("bfloat16", "float16") else {torch.float32})
    steps: list[Step] = []
    for key in _keys(source):
        if key in source.stacks:
            steps.append(ConvertTransposed(key, source.stacks[key], torch.bfloat16))
        elif key in source.quantized:
            steps.append(Convert(key, source.quantized[key], torch.bfloat16))
        else:
            stored = source.stored(key)
            wanted = stored.info.dtype in cast and not kept.search(key)
            steps.append(Convert(key, Dense(stored), torch.bfloat16) if wanted else Copy.whole(stored))
    return Plan(source, steps, _in_bf16(_without_quantization(source)), list(source.warnings)).check()


def _in_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and those of its parts, that name bfloat16."""
    changed = {name: _in_bf16(value) if isinstance(value, dict) else value for name, value in config.items()}
    names = [name for name in ("dtype", "torch_dtype") if name in changed]
    if "model_type" in changed:
        names = names or ["dtype"]
    return changed | dict.fromkeys(names, "bfloat16")
