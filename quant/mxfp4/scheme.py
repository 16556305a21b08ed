"""What a compressed-tensors `quantization_config` says: which layers are packed, and in what their inputs are.

Read as compressed-tensors 0.20 reads it (`quantization/lifecycle/apply.py`, `utils/match.py`): a target or an entry of
`ignore` is the exact name of a module, `re:` and a regular expression that matches its beginning, or the name of its
class; of several targets that match, exact names go before expressions, those before classes, and then the
alphabetically first. What is in the file and not computed here is an error, never left out.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xpu_ports.common.checkpoint import CheckpointError

logger = logging.getLogger(__name__)

METHOD = "compressed-tensors"
FORMAT = "mxfp4-pack-quantized"
# The format of a file whose groups each name their own.
MIXED = "mixed-precision"
# The presets of compressed-tensors that are MXFP4 -> what they round the input to.
PRESETS = {"MXFP4A16": None, "MXFP4": "mxfp4"}
# The names of the class of linear layers and of its base.
LINEAR = ("Linear", "Module")

_KEY = "quantization_config"
_ARGUMENTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
# Left out by writers that take them for granted.
_OPTIONAL = {"strategy": "group", "symmetric": True}
_SCALES = (None, "torch.uint8", "uint8", "torch.float8_e8m0fnu", "float8_e8m0fnu")


@dataclass(frozen=True)
class Group:
    """One of the config's groups; a packed layer belongs to one."""

    name: str
    # False for a group that says to leave its layers as they are.
    packed: bool
    # "mxfp4" where a layer's input is quantized too (W4A4), None where it is not (W4A16).
    activations: str | None


@dataclass(frozen=True)
class Scheme:
    """The config of a whole checkpoint."""

    # Target -> group, of equal targets the last one's.
    targets: Mapping[str, Group]
    ignore: tuple[str, ...]
    # What to name in errors.
    where: str

    def group_of(self, name: str, classes: Sequence[str] = LINEAR) -> Group | None:
        """The group of a module, or None where no group wants it.

        Args:
            name: its name in the file.
            classes: the names of its class and of that class's bases.
        """
        if any(_matches(name, entry) or entry in classes for entry in self.ignore):
            return None
        targets = sorted(self.targets, key=lambda target: ("re:" in target, target))
        found = [t for t in targets if _matches(name, t)] or [t for t in targets if t in classes]
        return self.targets[found[0]] if found and self.targets[found[0]].packed else None

    def ignores(self, name: str) -> bool:
        """Whether `ignore` names the module, by its name."""
        return any(_matches(name, entry) for entry in self.ignore)


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is for this package: its format, or that of all its groups, is MXFP4."""
    if config.get("quant_method") != METHOD:
        return False
    groups = config.get("config_groups")
    formats = {_format(group) for group in groups.values()} if isinstance(groups, Mapping) else set()
    if config.get("format") == MIXED:
        return formats == {FORMAT}
    # A format of a similar name is refused by name when it is read.
    return str(config.get("format")).startswith("mxfp4")


def _format(group: Any) -> Any:
    return group.get("format") if isinstance(group, Mapping) else None


def read_scheme(config: Mapping[str, Any], where: str | os.PathLike) -> Scheme:
    """Read and check a `quantization_config`.

    Args:
        config: as it stands in config.json.
        where: the file, or what else to call it.

    Raises:
        CheckpointError: it says something that is not computed here.
    """
    where = os.fspath(where)
    _expect(config, "quant_method", (METHOD,), where, _KEY)
    _expect(config, "format", (FORMAT, MIXED), where, _KEY)
    _expect(config, "quantization_status", ("compressed",), where, _KEY)
    _expect(config, "kv_cache_scheme", (None,), where, _KEY)
    for name in ("transform_config", "sparsity_config"):
        _expect(config, name, (None, {}), where, _KEY)
    if str(config.get("version")).startswith("0.13."):
        logger.warning("%s: compressed-tensors 0.13 wrote MXFP4 scales that are 4 times too small", where)
    groups, ignore = config.get("config_groups"), config.get("ignore")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(where, f"{_KEY}.config_groups", "groups of layers by name", repr(groups))
    targets: dict[str, Group] = {}
    for name, group in groups.items():
        for target in _targets(group, where, f"{_KEY}.config_groups.{name}"):
            targets[target] = _group(name, group, config["format"], where)
    entries = _names([] if ignore is None else ignore, where, f"{_KEY}.ignore")
    return Scheme(targets, tuple(entries), where)


def _targets(group: Any, where: str, key: str) -> list[str]:
    if isinstance(group, list):
        return _names(group, where, key)
    if not isinstance(group, Mapping):
        raise CheckpointError(where, key, "a group with targets and weights", repr(group))
    return _names(group.get("targets"), where, f"{key}.targets")


def _names(entries: Any, where: str, key: str) -> list[str]:
    """A list of targets, whose expressions are valid."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not all(isinstance(e, str) for e in entries):
        raise CheckpointError(where, key, "a list of names, `re:` patterns and classes", repr(entries))
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error as error:
                raise CheckpointError(where, key, "a regular expression after `re:`", f"{entry!r}: {error}") from None
    return list(entries)


def _group(name: str, group: Any, file_format: str, where: str) -> Group:
    key = f"{_KEY}.config_groups.{name}"
    if isinstance(group, list):
        # A preset's name with its targets.
        if name.upper() not in PRESETS:
            raise CheckpointError(where, key, f"a preset out of {', '.join(PRESETS)}", repr(name))
        return Group(name, True, PRESETS[name.upper()])
    _expect(group, "format", (FORMAT,) if file_format == MIXED else (FORMAT, None), where, key)
    _expect(group, "output_activations", (None,), where, key)
    if group.get("weights") is None:
        _expect(group, "input_activations", (None,), where, key)
        return Group(name, False, None)
    _check_arguments(group["weights"], False, where, f"{key}.weights")
    if group.get("input_activations") is None:
        return Group(name, True, None)
    _check_arguments(group["input_activations"], True, where, f"{key}.input_activations")
    return Group(name, True, "mxfp4")


def _check_arguments(arguments: Any, dynamic: bool, where: str, key: str) -> None:
    """A QuantizationArgs that means MXFP4: blocks of 32 E2M1 values with an E8M0 scale."""
    if not isinstance(arguments, Mapping):
        raise CheckpointError(where, key, "how to quantize", repr(arguments))
    for name, value in _ARGUMENTS.items():
        _expect({name: _OPTIONAL.get(name), **arguments}, name, (value,), where, key)
    _expect({"dynamic": False, **arguments}, "dynamic", (dynamic,), where, key)
    _expect(arguments, "scale_dtype", _SCALES, where, key)


def _expect(values: Mapping[str, Any], name: str, allowed: Sequence[Any], where: str, key: str) -> None:
    found = values.get(name)
    if not any(found == value and type(found) is type(value) for value in allowed):
        expected = " or ".join(repr(value) for value in allowed if value is not None) or "nothing"
        raise CheckpointError(where, f"{key}.{name}", expected, repr(found))
