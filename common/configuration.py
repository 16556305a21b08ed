"""Checks of a model's configuration before anything is built from it.

A model states, as a table, which values it can run, which of its fields must agree, and what the keys of older files
meant. Whatever the table forbids is one `CheckpointError`; keys that nobody knows are one warning, since tools for
fine-tuning add their own.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from xpu_ports.common.checkpoint import CONFIG, CheckpointError

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=PreTrainedConfig)

_KEYS_OF_ANY_CONFIG = """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention architectures
    attn_implementation auto_map cross_attention_hidden_size custom_pipelines decoder_start_token_id dtype
    finetuning_task gradient_checkpointing is_decoder model_type name_or_path output_attentions partial_rotary_factor
    prefix pruned_heads quantization_config rope_parameters rope_scaling rope_theta sep_token_id task_specific_params
    tf_legacy_loss tie_encoder_decoder tie_word_embeddings tokenizer_class torch_dtype torchscript
    transformers_version transformers_weights use_bfloat16 use_cache
"""
# Keys that config.json may have whatever the model: transformers reads them, or older versions of it wrote them.
KEYS_OF_ANY_CONFIG = frozenset(_KEYS_OF_ANY_CONFIG.split())


@dataclass(frozen=True)
class Allowed:
    """What a field may hold."""

    test: Callable[[Any], bool]
    # The same in words, to follow "expected".
    text: str


def one_of(*values: Any) -> Allowed:
    """One of the values, and of its type: 1 is not True."""
    return Allowed(
        lambda value: any(value == v and type(value) is type(v) for v in values), " or ".join(repr(v) for v in values)
    )


def integer(low: int, or_none: bool = False) -> Allowed:
    """A whole number from `low` on."""
    text = f"an integer >= {low}" + (" or null" if or_none else "")
    return Allowed(lambda v: (or_none and v is None) or (type(v) is int and v >= low), text)


def number(low: float, below: float = float("inf"), without_low: bool = False) -> Allowed:
    """A finite number in [low, below), or in (low, below)."""
    text = f"a number {'>' if without_low else '>='} {low:g}" + (f" and < {below:g}" if below != float("inf") else "")
    return Allowed(lambda v: type(v) in (int, float) and (v > low if without_low else v >= low) and v < below, text)


def list_of(*values: Any, or_none: bool = False) -> Allowed:
    """A list with nothing else in it than the values."""
    text = f"a list of {' or '.join(repr(v) for v in values)}" + (" or null" if or_none else "")
    return Allowed(lambda v: (or_none and v is None) or (isinstance(v, list) and all(x in values for x in v)), text)


@dataclass(frozen=True)
class Fault:
    """What is wrong with a field, in the words of `CheckpointError`."""

    key: str
    expected: str
    found: str


@dataclass(frozen=True)
class Legacy:
    """A key of older files that the config class does not know."""

    meaning: str
    # The field that took its place: both must say the same.
    same_as: str | None = None
    # The only value that the model can run, where there is one.
    only: Any = ...


@dataclass(frozen=True)
class ConfigChecks:
    """What a model can run."""

    fields: Mapping[str, Allowed] = field(default_factory=dict)
    # Relations between fields; each gives what is wrong, or None.
    across: tuple[Callable[[Any], Fault | None], ...] = ()
    # What the config class computes from other fields; a file may state it too, and must then state the same.
    derived: tuple[str, ...] = ()
    legacy: Mapping[str, Legacy] = field(default_factory=dict)
    # Keys of our own that the config class does not know, with what they may hold.
    switches: Mapping[str, Allowed] = field(default_factory=dict)
    # What a user should know about a config that runs; each gives a text, or None.
    notes: tuple[Callable[[Any], str | None], ...] = ()


def check_config(config: PreTrainedConfig, checks: ConfigChecks, where: str | os.PathLike) -> None:
    """Check a config against a model's table.

    Args:
        config: the config.
        checks: the table.
        where: the file it comes from, or what else to call it.

    Raises:
        CheckpointError: a field holds what the model cannot run, or fields contradict each other.
    """
    values = {name: getattr(config, name) for name in checks.fields}
    values |= {name: getattr(config, name) for name in checks.switches if hasattr(config, name)}
    _check_values(values, checks, where)
    for relation in checks.across:
        fault = relation(config)
        if fault is not None:
            raise CheckpointError(where, fault.key, fault.expected, fault.found)
    if not checks.derived:
        return
    computed = _build(type(config), {k: v for k, v in config.to_dict().items() if k not in checks.derived}, {}, where)
    for name in checks.derived:
        if getattr(config, name) != getattr(computed, name):
            expected = f"{_short(getattr(computed, name))}, which follows from the other fields"
            raise CheckpointError(where, name, expected, _short(getattr(config, name)))


def warn_of(config: PreTrainedConfig, checks: ConfigChecks, where: str | os.PathLike) -> None:
    """Log what the table has to say about a config that runs."""
    for note in checks.notes:
        text = note(config)
        if text is not None:
            logger.warning("%s: %s", where, text)


def _check_values(values: Mapping[str, Any], checks: ConfigChecks, where: str | os.PathLike) -> None:
    for name, allowed in {**checks.fields, **checks.switches}.items():
        if name in values and not allowed.test(values[name]):
            raise CheckpointError(where, name, allowed.text, _short(values[name]))


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def load_config(
    config_class: type[Config],
    path: str | os.PathLike,
    checks: ConfigChecks | None = None,
    overrides: Mapping[str, Any] | None = None,
    **download: Any,
) -> Config:
    """Read a checkpoint's config.json with all checks.

    Args:
        config_class: the class that the file must be of.
        path: a folder, a config.json, or a name on the Hub.
        checks: the model's table.
        overrides: fields to set instead of the file's.
        download: subfolder, revision, cache_dir, token, local_files_only, ... as for `from_pretrained`.

    Raises:
        CheckpointError: the file is missing, is no JSON, is of another model, or fails a check.
        OSError: the Hub does not have it, or cannot be reached.
    """
    where = find_config(path, **download)
    raw = read_config(where)
    found = raw.get("model_type")
    if found != config_class.model_type:
        raise CheckpointError(where, "model_type", repr(config_class.model_type), repr(found))
    checks = checks or ConfigChecks()
    overrides = overrides or {}
    # Before the class sees them, which may break on them without a word on which one it was.
    _check_values({**raw, **overrides}, checks, where)
    config = _build(config_class, raw, overrides, where)
    check_config(config, checks, where)
    check_file(config, raw, checks, where)
    warn_of(config, checks, where)
    return config


def find_config(path: str | os.PathLike, subfolder: str = "", **download: Any) -> str:
    """The local path of a checkpoint's config.json, fetched from the Hub when `path` is a name there.

    Raises:
        CheckpointError: a local folder has none, or there is no such folder.
        OSError: the Hub does not have it, or cannot be reached.
    """
    if os.path.isdir(path):
        file = os.path.join(path, subfolder, CONFIG)
        if not os.path.isfile(file):
            raise CheckpointError(file, None, "the model's configuration", "no such file")
        return file
    if os.path.isfile(os.path.join(subfolder, path)):
        return os.path.join(subfolder, path)
    if os.path.isabs(path) or os.fspath(path).startswith(("./", "../", "~")):
        raise CheckpointError(path, None, "the folder of a checkpoint, or a name on the Hub", "no such folder")
    fetched = cached_file(path, CONFIG, subfolder=subfolder, **download)
    assert fetched is not None
    return fetched


def read_config(file: str | os.PathLike) -> dict[str, Any]:
    """What a config.json says.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            raw = json.load(stream)
    except ValueError as error:
        raise CheckpointError(file, None, "JSON", f"none: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(file, None, "a JSON object", _short(raw))
    # Once more by transformers, which has its own notation for infinity and NaN.
    return PreTrainedConfig.get_config_dict(os.fspath(file))[0]


def _build(
    config_class: type[Config], raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str | os.PathLike
) -> Config:
    """The config object; the errors of its class become ours, naming field, expected and found."""
    for name in ("dtype", "torch_dtype"):
        value = raw.get(name)
        if value is not None and not isinstance(getattr(torch, str(value), None), torch.dtype):
            raise CheckpointError(where, name, "the name of a torch dtype", _short(value))
    values = {**raw, **overrides}
    try:
        return config_class.from_dict(dict(raw), **overrides)
    except StrictDataclassFieldValidationError as error:
        field_name = re.search(r"field '(\w+)'", str(error))
        key = field_name[1] if field_name else ""
        types = {f.name: f.type if isinstance(f.type, str) else _name_of_type(f.type) for f in fields(config_class)}
        fault = Fault(key, types.get(key, "another type"), _short(values.get(key)))
    except StrictDataclassClassValidationError as error:
        validator = re.search(r"validator '(\w+)'", str(error))
        reason = str(error).splitlines()[-1].split(": ", 1)[-1]
        names = [n for n in re.findall(r"`(\w+)`", reason) if n in values]
        key = names[0] if names else ""
        accepts = f"what transformers' {validator[1] if validator else 'validation'} accepts"
        fault = Fault(key, accepts, f"{_short(values[key])}; {reason}" if key else reason)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        fault = Fault("", f"values that {config_class.__name__} takes", f"{type(error).__name__}: {error}")
    raise CheckpointError(where, fault.key or None, fault.expected, fault.found)


def _name_of_type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def check_file(
    config: PreTrainedConfig, raw: Mapping[str, Any], checks: ConfigChecks, where: str | os.PathLike
) -> None:
    """Check what a config object does not show: keys of older files, and keys that nobody knows.

    Args:
        config: made from the file.
        raw: what the file says.
        checks: the model's table.
        where: the file.

    Raises:
        CheckpointError: an old key contradicts the field in its place, or asks for what the model cannot run.
    """
    for name, legacy in checks.legacy.items():
        if name not in raw:
            continue
        if legacy.only is not ... and raw[name] != legacy.only:
            raise CheckpointError(where, name, f"{legacy.only!r} ({legacy.meaning})", _short(raw[name]))
        if legacy.same_as is not None and raw[name] is not None:
            value = getattr(config, legacy.same_as)
            if raw[name] != value:
                expected = f"{value!r}, the value of {legacy.same_as} ({legacy.meaning})"
                raise CheckpointError(where, name, expected, _short(raw[name]))
    unknown = sorted(raw.keys() - known_keys(type(config)) - checks.legacy.keys() - checks.switches.keys())
    if unknown:
        logger.warning("%s: nothing reads %s", where, ", ".join(unknown))


def known_keys(config_class: type[PreTrainedConfig]) -> set[str]:
    """The keys of config.json that a config class or transformers itself reads or writes."""
    return (
        {f.name for f in fields(config_class)}
        | vars(config_class()).keys()
        | config_class.attribute_map.keys()
        | vars(GenerationConfig()).keys()
        | KEYS_OF_ANY_CONFIG
    )
