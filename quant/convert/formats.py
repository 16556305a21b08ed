"""What a source checkpoint holds: its format told by config.json, its tensors sorted into weights and the rest.

    plain               bf16, fp16, fp32 or fp64, nothing quantized
    compressed-tensors  mxfp4-pack-quantized: X.weight_packed, X.weight_scale
    gpt-oss             quant_method mxfp4: X_blocks [E, N, K/32, 16], X_scales [E, N, K/32]
    quark, modelopt     X.weight uint8 [N, K/2], X.weight_scale uint8 [N, K/32]
    fp8                 X.weight E4M3 with X.scale or X.weight_scale_inv for each tile, and, as in DeepSeek-V4, experts
                        X.weight int8 [N, K/2] with X.scale E8M0 [N, K/32]; told apart by dtype

Codes are E2M1, the even element in a byte's low bits, scales E8M0, in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from xpu_ports.common.checkpoint import (
    CONFIG,
    SAFETENSORS,
    CheckpointError,
    CheckpointFiles,
    TensorInfo,
    checkpoint_files,
    describe,
    read_header,
    read_headers,
)
from xpu_ports.common.configuration import read_config
from xpu_ports.quant.convert.steps import FP8, MXFP4, Stored, Values
from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.scheme import METHOD, is_mxfp4, read_scheme

_KEY = "quantization_config"
MODELOPT_CONFIG = "hf_quant_config.json"
# compressed-tensors up to these subtracted 2 from the exponents that it stored (compressed-tensors#538).
_SHIFTED_VERSIONS = re.compile(r"0\.(\d|1[0-3])(\.|$)")
# What diffusers calls the file of a model's weights, and the key of config.json that it alone writes.
DIFFUSERS = "diffusion_pytorch_model.safetensors"
_OF_DIFFUSERS = "_diffusers_version"
# Floats of a checkpoint that is not quantized.
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Dtypes that mean nothing without scales.
_QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
              torch.float8_e8m0fnu, torch.uint8, torch.int8)  # fmt: skip
_PARTS = re.compile(
    r"(weight_(packed|scale|scale_inv|scale_2|shape|g_idx)|(weight|input|output)_(global_scale|zero_point)"
    r"|(input|output|[kqv])_scale|qweight|qzeros)"
)


@dataclass
class Source:
    """A checkpoint to convert."""

    folder: Path
    # What config.json says, unchanged.
    config: dict[str, Any]
    # One of those above.
    format: str
    found: Mapping[str, TensorInfo]
    # What a layer's input is rounded to where it runs: None, "mxfp4", or something that is not computed here.
    activations: str | None = None
    # The key of the dense weight -> what it is stored as.
    quantized: dict[str, Values] = field(default_factory=dict)
    # Of gpt-oss: the key of the dense stack [E, K, N] -> what it is stored as, [E, N, K].
    stacks: dict[str, MXFP4] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    # What a file of weights is called in a folder of its kind, where there is one.
    weights: str = SAFETENSORS
    # The folder's own name where it is a part of a pipeline, which goes along; "" where it is not.
    part: str = ""
    # A file by itself: what lies beside it does not belong to it.
    alone: bool = False
    # Tensors that do not stand in a file as they are named and shaped here.
    pieces: Mapping[str, Stored] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder of the whole checkpoint."""
        return self.folder.parent if self.part else self.folder

    def stored(self, key: str) -> Stored:
        return self.pieces.get(key) or Stored(key, self.found[key])

    @property
    def is_quantized(self) -> bool:
        return bool(self.quantized or self.stacks)

    @property
    def where(self) -> Path:
        """The file to name when something is wrong with the whole."""
        return Path(next(iter(self.found.values())).file) if self.alone and self.found else self.folder / CONFIG

    def rest(self) -> dict[str, Stored]:
        """The tensors that no quantized weight is made of."""
        used = {s.key for values in (*self.quantized.values(), *self.stacks.values()) for s in values.stored}
        return {key: self.stored(key) for key in self.found if key not in used}


def read_source(folder: Path, fix_scales: bool = False, part: str = "") -> Source:
    """Read the headers of a checkpoint.

    Args:
        folder: where config.json lies, or of the pipeline.
        fix_scales: multiply the scales by 4 in files of compressed-tensors versions that stored them 4 times too small.
        part: the folder in that of the pipeline.

    Raises:
        CheckpointError: it is damaged, of a format that is not read here, or holds tensors that its format has not.
    """
    folder = folder / part
    where = folder / CONFIG
    if not where.is_file():
        raise CheckpointError(where, None, "the model's configuration", "no such file")
    read_config(where)
    config = json.loads(where.read_text(encoding="utf-8"))
    weights = DIFFUSERS if _OF_DIFFUSERS in config else SAFETENSORS
    found = read_headers(_files(folder, weights))
    for name, nested in config.items():
        if isinstance(nested, dict) and _KEY in nested:
            raise CheckpointError(where, f"{name}.{_KEY}", f"{_KEY} at the top", "one of a part of the model")
    quantization: dict[str, Any] = config.get(_KEY) or _of_modelopt(folder)
    if not isinstance(quantization, dict):
        raise CheckpointError(where, _KEY, "an object", repr(quantization))
    method = str(quantization.get("quant_method")) if quantization else None
    if method is not None and method not in _READERS:
        raise CheckpointError(where, f"{_KEY}.quant_method", f"one of {', '.join(_READERS)}", repr(method))
    form = "plain" if method is None else _FORMATS.get(method, method)
    source = Source(folder, config, form, found, weights=weights, part=part)
    if method is not None:
        _READERS[method](source, quantization)
    _fix(source, quantization, fix_scales)
    _check_rest(source)
    return source


def read_file(file: Path, config: dict[str, Any], prefix: str = "") -> Source:
    """Read the header of a file that has no configuration beside it.

    Args:
        file: safetensors, nothing quantized.
        config: what its config.json would be.
        prefix: what all its names begin with, or not; left out.

    Raises:
        CheckpointError: it is damaged, or holds tensors that mean nothing by themselves.
    """
    found = {key.removeprefix(prefix): info for key, info in read_header(file).items()}
    weights = DIFFUSERS if _OF_DIFFUSERS in config else SAFETENSORS
    source = Source(file.parent, config, "plain", found, weights=weights, alone=True)
    _check_rest(source)
    return source


def _files(folder: Path, weights: str) -> CheckpointFiles:
    if weights == SAFETENSORS:
        return checkpoint_files(folder, use_safetensors=True)
    names = weights, index_name(weights)
    return checkpoint_files(folder, name=next((name for name in names if (folder / name).is_file()), weights))


def index_name(weights: str) -> str:
    """What the index of several files is called."""
    return f"{weights}.index.json"


def _of_modelopt(folder: Path) -> dict[str, Any]:
    """What ModelOpt's own file says, where config.json says nothing."""
    where = folder / MODELOPT_CONFIG
    if not where.is_file():
        return {}
    found = read_config(where).get("quantization")
    if not isinstance(found, dict):
        raise CheckpointError(where, "quantization", "an object", repr(found))
    return {"quant_method": "modelopt", **found}


def _fix(source: Source, quantization: Mapping[str, Any], fix_scales: bool) -> None:
    """Scales that are 4 times too small, told by the version that wrote them: the bytes alone do not show it."""
    version = str(quantization.get("version", ""))
    affected = source.format == METHOD and _SHIFTED_VERSIONS.match(version)
    if fix_scales and not affected:
        expects = f"a version of {METHOD} before 0.14, whose scales --fix-scales is for"
        raise CheckpointError(source.where, f"{_KEY}.version", expects, repr(version) if version else "none")
    if affected and not fix_scales:
        source.warnings.append(
            f"{source.where}: written by {METHOD} {version}, whose scales are 4 times too small; --fix-scales puts "
            "that right"
        )
    if affected and fix_scales:
        for values in source.quantized.values():
            assert isinstance(values, MXFP4)
            values.shift = 2


def _check_rest(source: Source) -> None:
    """What is left must mean something by itself."""
    for key, stored in source.rest().items():
        info = stored.info
        part = _PARTS.fullmatch(key.rpartition(".")[2])
        if part is None and info.dtype not in _QUANTIZED:
            continue
        expects = f"a tensor of a checkpoint in the format {source.format}"
        if source.format == "plain":
            expects, hint = "one of no format", f"config.json has no {_KEY}"
        else:
            hint = "" if part is None else f"nothing reads {part[0]}"
        raise CheckpointError(info.file, key, expects, describe(info), hint)


# ------------------------------------------------------------------------------------------------------------- formats


def _compressed_tensors(source: Source, config: Mapping[str, Any]) -> None:
    if not is_mxfp4(config):
        raise CheckpointError(source.where, f"{_KEY}.format", "'mxfp4-pack-quantized'", repr(config.get("format")))
    scheme = read_scheme(config, source.where)
    groups = {group.activations for group in scheme.targets.values() if group.packed}
    source.activations = groups.pop() if len(groups) == 1 else "several kinds"
    for key, info in source.found.items():
        layer = key.removesuffix(".weight_packed")
        if layer != key:
            codes, scales = Stored(key, info), _beside(source, key, f"{layer}.weight_scale")
            source.quantized[f"{layer}.weight"] = _packed(codes, scales)


def _gpt_oss(source: Source, config: Mapping[str, Any]) -> None:
    for key, info in source.found.items():
        name = key.removesuffix("_blocks")
        if name == key:
            continue
        scales = _beside(source, key, f"{name}_scales")
        if info.dtype != torch.uint8 or len(info.shape) != 4 or info.shape[3] != BLOCK // 2:
            raise CheckpointError(info.file, key, f"uint8 [E, N, K/{BLOCK}, {BLOCK // 2}]", describe(info))
        E, N, blocks = info.shape[:3]
        _check(scales, (torch.uint8,), (E, N, blocks))
        source.stacks[name] = MXFP4(Stored(key, info), scales, (E, N, blocks * BLOCK))


def _quark(source: Source, config: Mapping[str, Any]) -> None:
    specs: list[tuple[str, Any]] = [("global_quant_config", config.get("global_quant_config"))]
    for part in ("layer_quant_config", "layer_type_quant_config"):
        specs += [(f"{part}.{name}", spec) for name, spec in (config.get(part) or {}).items()]
    expected = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}
    inputs = set()
    for name, spec in specs:
        weight = spec.get("weight") if isinstance(spec, dict) else None
        for field_name, value in expected.items():
            found = weight.get(field_name) if isinstance(weight, dict) else weight
            if found != value:
                raise CheckpointError(source.where, f"{_KEY}.{name}.weight.{field_name}", repr(value), repr(found))
        given = spec.get("input_tensors")
        inputs.add(None if given is None else "mxfp4" if given.get("dtype") == "fp4" else str(given.get("dtype")))
    if config.get("algo_config"):
        raise CheckpointError(source.where, f"{_KEY}.algo_config", "nothing", repr(config["algo_config"]))
    source.activations = inputs.pop() if len(inputs) == 1 else "several kinds"
    _weight_and_scale(source)


def _modelopt(source: Source, config: Mapping[str, Any]) -> None:
    algorithm = str(config.get("quant_algo"))
    if "MXFP4" not in algorithm.upper():
        raise CheckpointError(source.where, f"{_KEY}.quant_algo", "one with MXFP4 in its name", repr(algorithm))
    if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        raise CheckpointError(source.where, f"{_KEY}.kv_cache_quant_algo", "nothing", "a cache that is quantized")
    input_bits = re.search(r"A(\d+)", algorithm.upper())
    source.activations = "mxfp4" if input_bits is None or input_bits[1] == "4" else f"{input_bits[1]} bits"
    if input_bits is not None and input_bits[1] == "16":
        source.activations = None
    _weight_and_scale(source)


def _weight_and_scale(source: Source) -> None:
    for key, info in source.found.items():
        layer = key.removesuffix(".weight")
        if layer != key and info.dtype == torch.uint8:
            scales = _beside(source, key, f"{layer}.weight_scale")
            source.quantized[key] = _packed(Stored(key, info), scales)


def _fp8(source: Source, config: Mapping[str, Any]) -> None:
    tile = config.get("weight_block_size")
    if not (isinstance(tile, list) and len(tile) == 2 and all(isinstance(n, int) and n > 0 for n in tile)):
        raise CheckpointError(source.where, f"{_KEY}.weight_block_size", "two sizes", repr(tile))
    # What its layers round their input to, 8 bits, goes with the weights of 8 bits.
    for key, info in source.found.items():
        layer = key.removesuffix(".weight")
        if layer == key or info.dtype not in (torch.float8_e4m3fn, torch.int8, torch.uint8):
            continue
        names = [n for n in (f"{layer}.scale", f"{layer}.weight_scale_inv") if n in source.found]
        scales = _beside(source, key, names[0] if names else f"{layer}.scale")
        if info.dtype == torch.float8_e4m3fn:
            _check_matrix(Stored(key, info))
            grid = tuple(-(-size // part) for size, part in zip(info.shape, tile, strict=True))
            _check(scales, (torch.float8_e8m0fnu, torch.float32, torch.bfloat16), grid)
            source.quantized[key] = FP8(Stored(key, info), scales, (tile[0], tile[1]))
        else:
            source.quantized[key] = _packed(Stored(key, info), scales)


_READERS: dict[str, Callable[[Source, Mapping[str, Any]], None]] = {
    METHOD: _compressed_tensors,
    "mxfp4": _gpt_oss,
    "quark": _quark,
    "modelopt": _modelopt,
    "fp8": _fp8,
}
_FORMATS = {"mxfp4": "gpt-oss"}


def _packed(codes: Stored, scales: Stored) -> MXFP4:
    """[N, K/2] codes with [N, K/32] scales."""
    info = codes.info
    if info.dtype not in (torch.uint8, torch.int8):
        raise CheckpointError(info.file, codes.key, "uint8 or int8", describe(info))
    _check_matrix(codes)
    N, K = info.shape[0], 2 * info.shape[1]
    if K % BLOCK:
        raise CheckpointError(info.file, codes.key, f"rows of a multiple of {BLOCK} values", f"{K}")
    _check(scales, (torch.uint8, torch.float8_e8m0fnu), (N, K // BLOCK))
    return MXFP4(codes, scales, (N, K))


def _check_matrix(stored: Stored) -> None:
    if len(stored.info.shape) != 2:
        raise CheckpointError(stored.info.file, stored.key, "two dimensions", describe(stored.info))


def _check(scales: Stored, dtypes: Sequence[torch.dtype], shape: tuple[int, ...]) -> None:
    info = scales.info
    if info.dtype not in dtypes or info.shape != shape:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(info.file, scales.key, f"{names} {list(shape)}", describe(info))


def _beside(source: Source, key: str, other: str) -> Stored:
    """The tensor `other` that `key` needs."""
    if other not in source.found:
        raise CheckpointError(source.found[key].file, key, f"{other} beside it", "none")
    return Stored(other, source.found[other])
