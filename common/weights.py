"""Strict loading: what is in a checkpoint and what the model expects must be the same, or nothing is loaded.

`StrictLoading` goes before `PreTrainedModel` among a model's base classes. Its `from_pretrained` is transformers' own
with checks around it: the configuration and the files before a model exists, names, shapes and dtypes while the model
is on the meta device, and afterwards that nothing was left out. Tensors are read only where the same one is stored
under several names, to see that they are equal.
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from xpu_ports.common.checkpoint import (
    CONFIG,
    CheckpointError,
    CheckpointFiles,
    TensorInfo,
    checkpoint_files,
    describe,
    of_tensors,
    on_meta,
    read_header,
    read_headers,
    same_values,
)
from xpu_ports.common.configuration import (
    ConfigChecks,
    check_config,
    check_file,
    find_config,
    known_keys,
    load_config,
    read_config,
    warn_of,
)
from xpu_ports.common.conversion import Fuse, Rename, Rule, Split, weight_transforms
from xpu_ports.common.parallel import Part, Planner, divide, whole_tensors
from xpu_ports.common.sharded import opened, part_of_source

__all__ = [
    "CheckpointError",
    "CheckpointFiles",
    "Fuse",
    "Rename",
    "Split",
    "StrictLoading",
    "TensorInfo",
    "check_tensors",
    "checkpoint_files",
    "expected_tensors",
    "read_header",
    "read_headers",
    "tied_groups",
]

logger = logging.getLogger(__name__)

# Looked up at import, so that a transformers without it is noticed at once.
_LOAD = PreTrainedModel._load_pretrained_model
_DOWNLOAD = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
# A long list of candidates is not searched for the closest name.
_MOST_CANDIDATES = 5000


# ----------------------------------------------------------------------------------------------- what a model expects


def expected_tensors(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, TensorInfo]:
    """The tensors of a model, without memory for them: of tied ones the first name only, as files have them.

    Args:
        model_class: the model.
        config: its config; `config.dtype` is the dtype, fp32 where it is None.

    Returns:
        Key -> shape and dtype, buffers included where they are saved.
    """
    config = deepcopy(config)
    with torch.device("meta"), init.no_init_weights():
        model = model_class._from_config(config)
    repeated = {name for group in tied_groups(model) for name in group[1:]}
    wider = {pattern.replace("*", ".*"): dtype for pattern, dtype in model._get_dtype_plan(model.dtype).items()}
    return {
        key: TensorInfo(tuple(t.shape), next((d for pattern, d in wider.items() if re.search(pattern, key)), t.dtype))
        for key, t in model.state_dict().items()
        if key not in repeated
    }


def tied_groups(model: torch.nn.Module) -> list[list[str]]:
    """The keys that are one tensor, first the one that is saved; only groups of two and more."""
    ties = model.all_tied_weights_keys if isinstance(model, PreTrainedModel) else {}
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    tensors = dict(named)
    first: dict[int, str] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        source = ties.get(name, name)
        root = first.setdefault(id(tensors[source]), source)
        groups[root] += [name] if name != root else []
    return [[root, *others] for root, others in groups.items() if others]


# --------------------------------------------------------------------------------------- a checkpoint against a model


@dataclass
class _Assignment:
    """Which tensors of a file make which of the model."""

    # Model key -> file keys that become it, or that a conversion makes it of.
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # Model key -> the conversion that makes it, and maybe others.
    converters: dict[str, WeightConverter] = field(default_factory=dict)
    # File key -> which of the conversion's source patterns it is of.
    patterns: dict[str, str] = field(default_factory=dict)
    # File keys that make nothing.
    unused: list[str] = field(default_factory=list)


def check_tensors(
    model: PreTrainedModel,
    found: Mapping[str, TensorInfo],
    file: str | os.PathLike,
    transforms: Sequence[WeightTransform] = (),
    any_shape: bool = False,
) -> _Assignment:
    """Check that a checkpoint holds what a model expects, all of it and nothing else.

    Args:
        model: the model, on any device; the meta device will do.
        found: the checkpoint's tensors under the names in its files.
        file: what to name when something is missing.
        transforms: how transformers' loader will rename and convert them.
        any_shape: the caller accepts tensors of other shapes, which are then left out.

    Returns:
        Which tensors make which.

    Raises:
        CheckpointError: the first tensor that is missing, unused, stored twice, of the wrong shape or kind of dtype,
            or different from one it is tied to; with the number of others like it and the closest name.
    """
    expected = model.state_dict()
    for name, part in getattr(model, "_parts", {}).items():
        # Files have all of what is one rank's part here.
        expected[name] = torch.empty(part.shape, dtype=expected[name].dtype, device="meta")
    groups = tied_groups(model)
    plan = _assign(model, expected, found, transforms)
    made = _convert(model, expected, plan, found)
    _check_made(expected, made, plan, any_shape)
    unused = _without_ignored(model, plan.unused, found)
    missing = _missing(model, expected, made, groups)
    if missing:
        also = [f"{len(unused)} without a place"] if unused else []
        hint = _hint(missing, "missing", also, missing[0], unused)
        raise CheckpointError(file, missing[0], f"a tensor of shape {list(expected[missing[0]].shape)}", "none", hint)
    if unused:
        hint = _hint(unused, "without a place", [], unused[0], expected)
        info = found[unused[0]]
        raise CheckpointError(
            info.file or file, unused[0], f"no such tensor in {type(model).__name__}", describe(info), hint
        )
    _check_ties(groups, plan, found)
    return plan


def _assign(
    model: PreTrainedModel,
    expected: dict[str, torch.Tensor],
    found: Mapping[str, TensorInfo],
    transforms: Sequence[WeightTransform],
) -> _Assignment:
    """Follow transformers' loader, key by key.

    Raises:
        CheckpointError: two tensors claim one place.
    """
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    plan = _Assignment()
    for key in sorted(found, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        if name not in expected:
            plan.unused.append(key)
            continue
        if plan.sources[name] and (pattern is None or name not in plan.converters):
            other = plan.sources[name][0]
            raise CheckpointError(found[key].file, key, f"one tensor for {name}", f"two, the other is {other}")
        plan.sources[name].append(key)
        if pattern is not None:
            converter = plan.converters.setdefault(name, deepcopy(of_pattern[pattern]))
            empty: Any = on_meta(found[key])
            converter.add_tensor(name, key, pattern, empty)
            plan.patterns[key] = pattern
    return plan


def _convert(
    model: PreTrainedModel, expected: Mapping[str, torch.Tensor], plan: _Assignment, found: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """What the model would get: shapes and dtypes, the conversions done on the meta device.

    Raises:
        CheckpointError: a conversion fails, or makes what the model does not have.
    """
    made = {name: found[keys[0]] for name, keys in plan.sources.items()}
    for name, converter in plan.converters.items():
        keys = plan.sources[name]
        file = found[keys[0]].file
        try:
            results = converter.convert(name, model=model, config=model.config)
        except (ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(file, keys[0], f"parts of {name}", str(error).splitlines()[0]) from None
        for target, result in results.items():
            tensor = result[0] if isinstance(result, list) else result
            made[target] = TensorInfo(tuple(tensor.shape), tensor.dtype, file)
            if target not in expected or plan.sources.setdefault(target, keys) is not keys:
                raise CheckpointError(file, keys[0], f"parts of {type(model).__name__}", f"{target}, made of it")
    return made


def _check_made(
    expected: Mapping[str, torch.Tensor], made: Mapping[str, TensorInfo], plan: _Assignment, any_shape: bool
) -> None:
    """Shapes and kinds of dtype of what is there."""
    shapes = [] if any_shape else [name for name in made if made[name].shape != tuple(expected[name].shape)]
    kinds = [name for name in made if not _same_kind(made[name].dtype, expected[name].dtype)]
    for bad, what in ((shapes, "of another shape"), (kinds, "of another kind")):
        if not bad:
            continue
        name = bad[0]
        info, want, keys = made[name], expected[name], plan.sources[name]
        if bad is kinds:
            expects, finds = f"a dtype like {want.dtype}", f"{info.dtype}"
        else:
            expects, finds = f"shape {list(want.shape)}", f"{list(info.shape)}"
        place = f"for {name}" if len(keys) == 1 else f"for {name}, made of {len(keys)} tensors"
        hint = _hint(bad, what, [] if keys == [name] else [place])
        raise CheckpointError(info.file, keys[0], expects, finds, hint)


def _same_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether the loader may cast one into the other: a float of 8 bits means nothing without its scales."""

    def kind(dtype: torch.dtype) -> str:
        if dtype.is_floating_point:
            return "float" if dtype.itemsize > 1 else str(dtype)
        return "complex" if dtype.is_complex else "boolean" if dtype is torch.bool else "integer"

    return kind(a) == kind(b)


def _missing(
    model: PreTrainedModel,
    expected: Mapping[str, torch.Tensor],
    made: Mapping[str, TensorInfo],
    groups: Iterable[Sequence[str]],
) -> list[str]:
    """Model keys that nothing makes. Of tied ones one is enough, and the one that is saved is named."""
    settled = set(made)
    for group in groups:
        settled.update(group[1:] if settled.isdisjoint(group) else group)
    optional = _any_of(model._keys_to_ignore_on_load_missing)
    return [key for key in expected if key not in settled and not optional.search(key)]


def _without_ignored(model: PreTrainedModel, unused: list[str], found: Mapping[str, TensorInfo]) -> list[str]:
    """Unused keys but for those that the model says it may leave out, and for the head's when it has no head."""
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        # transformers ignores it too: computed from the config, never stored by its later versions.
        patterns.add(r"rotary_emb\.inv_freq$")
    base = f"{model.base_model_prefix}."
    if model.base_model is model and any(key.startswith(base) for key in found):
        patterns.update(f"^{re.escape(key)}$" for key in unused if not key.startswith(base))
    matches = _any_of(patterns).search
    ignored = [key for key in unused if matches(key)]
    if ignored:
        logger.info("left out %d tensors that %s does not have: %s", len(ignored), type(model).__name__, ignored)
        # So that transformers' own report leaves them out as well.
        model._keys_to_ignore_on_load_unexpected = patterns
    return [key for key in unused if not matches(key)]


def _any_of(patterns: Iterable[str] | None) -> re.Pattern[str]:
    """Matches where one of the patterns does; nowhere if there is none."""
    return re.compile("|".join(f"(?:{p})" for p in patterns or ()) or r"(?!)")


def _check_ties(groups: Iterable[Sequence[str]], plan: _Assignment, found: Mapping[str, TensorInfo]) -> None:
    """Tied tensors may be stored more than once, as tools for fine-tuning do, if the copies are equal."""
    for group in groups:
        keys = [plan.sources[name][0] for name in group if name in plan.sources and name not in plan.converters]
        for key in keys[1:]:
            if not same_values(found[keys[0]], found[key]):
                expected = f"the values of {keys[0]}, which it is tied to"
                raise CheckpointError(found[key].file, key, expected, "other values")


def _hint(
    bad: Sequence[str], what: str, also: Sequence[str] = (), key: str = "", candidates: Iterable[str] = ()
) -> str:
    """How many more of the kind, what else is wrong, and the closest name."""
    more = [f"{len(bad) - 1} more {what}"] if len(bad) > 1 else []
    names = list(itertools.islice(candidates, _MOST_CANDIDATES))
    close = difflib.get_close_matches(key, names, n=1) if key else []
    return "; ".join([*more, *also, *(f"the closest name is {name}" for name in close)])


# ------------------------------------------------------------------------------------------------- as a class of models


class StrictLoading(PreTrainedModel):
    """Base class, before `PreTrainedModel`, of models that load all of a checkpoint or nothing.

    A subclass may set:
        _config_checks: which configurations it can run.
        _weight_rules: how names and tensors of another layout become its own; saved in that layout.
        _parallel_plan: how its layers are divided among ranks; without one it runs on one.
        _keys_to_ignore_on_load_unexpected: a dict, pattern -> why such tensors of a file may be left out.
    """

    _config_checks: ConfigChecks | None = None
    _weight_rules: tuple[Rule, ...] = ()
    _parallel_plan: Planner | None = None

    def __init__(self, config: PreTrainedConfig, *inputs: Any, **kwargs: Any) -> None:
        if self._config_checks is not None:
            check_config(config, self._config_checks, type(config).__name__)
        super().__init__(config, *inputs, **kwargs)

    def post_init(self) -> None:
        super().post_init()
        if self._weight_rules:
            self._weight_conversions = weight_transforms(self._weight_rules)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        config: PreTrainedConfig | str | os.PathLike | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """transformers' `from_pretrained`, with the same arguments, that loads everything or raises.

        Returns:
            The model, or (model, loading info) where asked for.

        Raises:
            CheckpointError: the configuration or the weights are not what the model expects. Nothing stays loaded.
            OSError: the Hub does not have it, or cannot be reached.
        """
        path = pretrained_model_name_or_path
        asked = {name: kwargs.pop(name) for name in ("tp_plan", "tp_size") if kwargs.get(name) is not None}
        if asked and kwargs.get("distributed_config") is not None:
            raise ValueError(f"{' and '.join(asked)} are in distributed_config: pass one or the other")
        if asked:
            kwargs["distributed_config"] = DistributedConfig(**asked)
        try:
            _check_before(cls, path, config, kwargs)
            load: Callable[..., Any] = super().from_pretrained
            model, info = load(path, *model_args, config=config, output_loading_info=True, **kwargs)
            _check_after(model, info, "state_dict" if path is None else path)
        except CheckpointError as error:
            # The frames of its traceback hold what was loaded.
            fault = error.with_traceback(None)
        else:
            return (model, info) if output_loading_info else model
        model = None
        raise fault

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Called by transformers with the model on the meta device and the files at hand, before it reads tensors."""
        # With keys of its own it is an adapter that is loaded, into a model that is there already.
        if not args and kwargs.get("expected_keys") is None:
            rules = weight_transforms(model._weight_rules)
            load_config = replace(load_config, weight_mapping=[*rules, *(load_config.weight_mapping or ())])
            parts = getattr(model, "_parts", None)
            if _comparable(model, load_config):
                file, found = _found(state_dict, checkpoint_files, load_config.sharded_metadata)
                any_shape = load_config.ignore_mismatched_sizes and parts is None
                plan = check_tensors(model, found, file, load_config.weight_mapping, any_shape)
                if parts is not None:
                    return _load_parts(model, plan, state_dict, checkpoint_files, load_config)
            elif parts is not None:
                raise ValueError("ranks load their parts of safetensors files, of dense or MXFP4 weights")
        return _LOAD(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Called by transformers with the model on the meta device: makes it this rank's.

        Raises:
            ValueError: another kind of parallelism, or a plan of the caller's own, is asked for.
        """
        if mesh_manager is None or cls._parallel_plan is None:
            return super().maybe_distribute_model(model, distributed_config, mesh_manager)
        asked = {name: getattr(distributed_config, name) for name in ("fsdp_size", "dp_replicate_size", "pp_size")}
        others = [f"{name}={size}" for name, size in asked.items() if (size or 1) > 1]
        if distributed_config.ep_size not in (1, distributed_config.tp_size):
            others.append(f"ep_size={distributed_config.ep_size}")
        if others:
            raise ValueError(f"{cls.__name__} runs with tp_size, experts divided by the same ranks, not {others[0]}")
        if distributed_config.tp_plan not in (None, "auto"):
            raise ValueError(f"{cls.__name__} has a plan of its own for any number of ranks: pass tp_plan='auto'")
        model.config.distributed_config = distributed_config
        model._mesh_manager, model._tp_size = mesh_manager, distributed_config.tp_size
        model._device_mesh = mesh_manager.get_mesh(("pp", "fsdp", "tp"))
        divide(model, cls._parallel_plan, mesh_manager.get_mesh("tp").get_group())
        return model

    def gather_sharded_state_dict_for_save(
        self, model_to_save: Any, state_dict: Any, distributed_config: Any, *, save_on_this_rank: bool = True
    ) -> Any:
        """Called by `save_pretrained`: whole tensors of those that are divided. All ranks call it, one writes."""
        planner = type(model_to_save)._parallel_plan
        if planner is None or getattr(model_to_save, "_parts", None) is None:
            return super().gather_sharded_state_dict_for_save(
                model_to_save, state_dict, distributed_config, save_on_this_rank=save_on_this_rank
            )
        return whole_tensors(model_to_save, planner, state_dict, model_to_save._ranks, save_on_this_rank)


def _load_parts(model: Any, plan: _Assignment, state_dict: Any, files: Any, load_config: Any) -> Any:
    """Load one rank's parts: nothing else is read."""
    parts: dict[str, Part | None] = {}
    for name, keys in plan.sources.items():
        if name not in model._parts:
            continue
        rule = getattr(plan.converters.get(name), "rule", None)
        counts: dict[str, int] = defaultdict(int)
        for key in keys:
            if rule is None:
                parts[key] = model._parts[name]
                continue
            pattern = plan.patterns[key]
            if pattern not in rule.file:
                raise ValueError(f"{key} makes several parameters, which are not divided among ranks yet")
            source = rule.file.index(pattern)
            parts[key] = part_of_source(model._parts[name], rule, source, counts[pattern])
            counts[pattern] += 1
    read: list[int] = []
    with opened(state_dict, files, parts, read) as tensors:
        result = _LOAD(model, tensors, files, load_config)
    model.requires_grad_(False)
    model.bytes_read = sum(read)
    logger.info("read %d bytes of the files", model.bytes_read)
    return result


def _comparable(model: PreTrainedModel, load_config: Any) -> bool:
    """Whether the model's tensors are the checkpoint's: not where a quantizer or a distributed load changes them."""
    return (
        (load_config.hf_quantizer is None or getattr(load_config.hf_quantizer, "keeps_tensors", False))
        and load_config.weights_only
        and not is_deepspeed_zero3_enabled()
        and getattr(model, "_pp_stage", None) is None
    )


def _check_before(
    cls: type[StrictLoading],
    path: str | os.PathLike | None,
    config: PreTrainedConfig | str | os.PathLike | None,
    kwargs: Mapping[str, Any],
) -> None:
    """The configuration, and the files where they are local."""
    if kwargs.get("gguf_file") is not None:
        return
    folder = os.path.join(path, kwargs.get("subfolder") or "") if path is not None and os.path.isdir(path) else None
    if folder is not None and not _has(folder, CONFIG) and _has(folder, "adapter_config.json"):
        # transformers finds the base model, whose tensors are checked when they are loaded.
        return
    checked = _check_config_before(cls, path, config, kwargs)
    if folder is not None and not _has(folder, ".metadata"):
        name = getattr(checked, "transformers_weights", None)
        files = checkpoint_files(folder, kwargs.get("variant"), kwargs.get("use_safetensors"), name)
        if kwargs.get("weights_only", True):
            read_headers(files)


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def _check_config_before(
    cls: type[StrictLoading],
    path: str | os.PathLike | None,
    config: PreTrainedConfig | str | os.PathLike | None,
    kwargs: Mapping[str, Any],
) -> PreTrainedConfig:
    checks = cls._config_checks or ConfigChecks()
    download = {name: kwargs[name] for name in _DOWNLOAD if kwargs.get(name) is not None}
    if not isinstance(config, PreTrainedConfig):
        source = path if config is None else config
        if source is None or cls.config_class is None:
            raise ValueError(f"{cls.__name__}.from_pretrained needs a path or a config")
        names = known_keys(cls.config_class) - {"dtype", "torch_dtype"}
        overrides = {name: value for name, value in kwargs.items() if name in names}
        return load_config(cls.config_class, source, checks, overrides, **download)
    if path is not None and config.name_or_path == os.fspath(path):
        # An Auto class has read it from there.
        where = find_config(path, **download)
        check_config(config, checks, where)
        check_file(config, read_config(where), checks, where)
    else:
        where = type(config).__name__
        check_config(config, checks, where)
    warn_of(config, checks, where)
    return config


def _found(
    state_dict: Mapping[str, torch.Tensor] | None, files: Sequence[str] | None, sharded: Mapping[str, Any] | None
) -> tuple[str, dict[str, TensorInfo]]:
    """(what to name, the tensors) of what transformers is about to load."""
    if state_dict is not None or not files:
        return "state_dict", of_tensors(state_dict or {})
    paths = tuple(Path(file) for file in files)
    if sharded is None:
        checkpoint = CheckpointFiles(paths)
    else:
        index = next(iter(sorted(paths[0].parent.glob("*.index*.json"))), paths[0])
        checkpoint = CheckpointFiles(paths, index, sharded["weight_map"])
    return str(checkpoint.main), read_headers(checkpoint)


def _check_after(model: PreTrainedModel, info: Mapping[str, Any], where: str | os.PathLike) -> None:
    """What only transformers' loader knows: quantized models, and files that tell nothing in advance."""
    for key, found, what in (("missing_keys", "none", "missing"), ("unexpected_keys", "one", "without a place")):
        keys = sorted(info[key])
        if keys:
            expected = "a tensor" if key == "missing_keys" else f"no such tensor in {type(model).__name__}"
            raise CheckpointError(where, keys[0], expected, found, _hint(keys, what))
    if info["error_msgs"]:
        raise CheckpointError(where, None, "weights that load", info["error_msgs"][0])
    untied = sorted(
        model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    )
    if untied:
        source = model.get_expanded_tied_weights_keys(all_submodels=True)[untied[0]]
        raise CheckpointError(where, untied[0], f"the values of {source}, which it is tied to", "other values")
