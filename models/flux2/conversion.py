"""`xpu-ports convert` for FLUX.2's transformer: what it is in diffusers' folders and in Black Forest Labs' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.models.flux2.loading import PREFIX, RULES, config_of
from xpu_ports.models.flux2.modeling_flux2 import Flux2Transformer2DModel
from xpu_ports.models.flux2.packed import DENSE
from xpu_ports.quant.convert import layouts, model
from xpu_ports.quant.convert.formats import Source, read_file
from xpu_ports.quant.convert.plan import Plan

__all__ = ["DENSE", "PART", "checked", "plan_layout", "port", "read_single_file"]

# Its folder in a pipeline's.
PART = "transformer"
# What the file is called that --layout official makes.
SINGLE_FILE = "flux2.safetensors"


def port(source: Source) -> type[Flux2Transformer2DModel]:
    """The class of a checkpoint of diffusers.

    Raises:
        CheckpointError: it is of another model than FLUX.2's transformer.
    """
    name = source.config.get("_class_name")
    if name != Flux2Transformer2DModel.__name__:
        raise CheckpointError(source.where, "_class_name", repr(Flux2Transformer2DModel.__name__), repr(name))
    return Flux2Transformer2DModel


def read_single_file(file: Path) -> Source:
    """Read the header of one file with either names; its config is what its shapes tell.

    Raises:
        CheckpointError: it is damaged, or not a transformer of FLUX.2 in floats.
    """
    source = read_file(file, {}, PREFIX)
    shapes = layouts.renamed(source, RULES).found
    made = model.build(file.parent, Flux2Transformer2DModel, config_of(shapes, str(file)))
    return read_file(file, json.loads(made.to_json_string()), PREFIX)


def checked(source: Source) -> Source:
    """A source under diffusers' names, all of whose tensors have a place in the model and the other way round.

    Raises:
        CheckpointError: not so.
    """
    if not source.is_quantized:
        return layouts.renamed(source, RULES, _expected(source))
    dense = {key: values.shape for key, values in source.quantized.items()}
    dense |= {key: stored.info.shape for key, stored in source.rest().items()}
    expected = _expected(source)
    for key in sorted(dense.keys() ^ expected.keys()):
        wanted, found = ("it", "none") if key in expected else ("a tensor of the model", "one without a place")
        raise CheckpointError(source.folder, key, wanted, found)
    for key, shape in dense.items():
        if shape != expected[key].shape:
            raise CheckpointError(source.folder, key, f"shape {list(expected[key].shape)}", f"{list(shape)}")
    return source


def plan_layout(source: Source, layout: str) -> Plan:
    """Plan a change of names: to a folder of diffusers ("hf"), or to one file as published ("official").

    Raises:
        CheckpointError: the source is quantized, or what it holds is not what the model has.
    """
    port(source)
    plan = layouts.plan_layout(source, layout, RULES, _expected(source))
    if layout == "official":
        plan.config, plan.weights = None, SINGLE_FILE
    return plan


def _expected(source: Source) -> dict[str, TensorInfo]:
    made: Any = model.build(source.folder, port(source), source.config)
    return {key: TensorInfo(tuple(t.shape), t.dtype) for key, t in made.state_dict().items()}
