"""Rules between the names in a checkpoint's files and those in the model, for layouts that are not the model's own.

    Rename("layers.{i}.attn_norm.{rest...}", "model.layers.{i}.input_layernorm.{rest...}")
    Fuse(("{a...}.q_conv1d.weight", "{a...}.k_conv1d.weight"), "{a...}.conv1d.weight")
    Fuse(("{a...}.experts.{e}.w1.weight", "{a...}.experts.{e}.w3.weight"), "{a...}.experts.gate_up", dim=1, stack="e")
    Split("{a...}.qkv_proj.weight", ("{a...}.q_proj.weight", "{a...}.k_proj.weight"), shares=(4, 1))

`{name}` stands for one part of a key between dots, `{name...}` for one or more. A pattern matches whole keys, and both
sides have the same names, so a rule can be read both ways: files in the rules' layout and files in the model's own
both load, and saving writes the rules' layout. On loading, at most one Rename applies to a key, then at most one Fuse
or Split to the renamed key; on saving the other way round. transformers' loader does the work (placement, dtype,
quantization): the rules become its weight transforms.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform

_FIELD = re.compile(r"\{(\w+)(\.\.\.)?\}")


class KeyPattern:
    """A key with named gaps; `pattern` makes one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names = tuple(name for name, _ in _FIELD.findall(text))
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"{text}: a name stands in it twice")
        regex, at = "", 0
        for field in _FIELD.finditer(text):
            part = ".+" if field[2] else "[^.]+"
            regex += re.escape(text[at : field.start()]) + f"(?P<{field[1]}>{part})"
            at = field.end()
        self._regex = re.compile(regex + re.escape(text[at:]))

    def match(self, key: str) -> dict[str, str] | None:
        """What stands in the gaps of `key`, or None when it is not of this pattern."""
        found = self._regex.fullmatch(key)
        return None if found is None else found.groupdict()

    def fill(self, fields: Mapping[str, str]) -> str:
        return _FIELD.sub(lambda field: fields[field[1]], self.text)


pattern = functools.lru_cache(maxsize=None)(KeyPattern)


@dataclass(frozen=True)
class Rename:
    """One tensor under another name; with `saved` off a name that some files have and saving does not write."""

    file: str
    model: str
    saved: bool = True

    def __post_init__(self) -> None:
        _check_names((self.file,), self.model)


@dataclass(frozen=True)
class Swap(Rename):
    """A `Rename` of a tensor whose halves along dimension 0 stand in the other order; transformers' loader has none."""


@dataclass(frozen=True)
class Fuse:
    """Several tensors of the file make one of the model, concatenated along `dim` in the order given.

    Args:
        file: patterns of the parts.
        model: pattern of the whole.
        dim: the dimension of the whole to concatenate along.
        shares: the parts' sizes along `dim` relative to each other; equal ones when left out.
        stack: a name that only the parts have: those that differ in it alone are first stacked, in numeric order, along
            a new dimension 0.
    """

    file: tuple[str, ...]
    model: str
    dim: int = 0
    shares: tuple[int, ...] | None = None
    stack: str | None = None

    def __post_init__(self) -> None:
        _check_names(self.file, self.model, self.stack)
        if self.shares is not None and len(self.shares) != len(self.file):
            raise ValueError(f"{self.model}: {len(self.file)} parts, {len(self.shares)} shares")

    def join(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """The whole, of one list of tensors per pattern: one tensor long, or as long as there are to stack."""
        wholes = [torch.stack(list(p)) if self.stack else p[0] for p in parts]
        sizes = [w.shape[self.dim] for w in wholes]
        unit = sum(sizes) // sum(self._shares())
        if sizes != [unit * share for share in self._shares()]:
            raise ValueError(f"sizes {sizes} along dimension {self.dim}, expected them as {self._shares()}")
        return torch.cat(wholes, self.dim) if len(wholes) > 1 else wholes[0]

    def part(self, whole: Tensor) -> list[list[Tensor]]:
        """The inverse of `join`."""
        total, shares = whole.shape[self.dim], self._shares()
        if total % sum(shares):
            raise ValueError(f"size {total} along dimension {self.dim} does not divide as {shares}")
        wholes = whole.split([total // sum(shares) * share for share in shares], self.dim)
        return [[t.contiguous() for t in w.unbind()] if self.stack else [w.contiguous()] for w in wholes]

    def _shares(self) -> tuple[int, ...]:
        return self.shares or (1,) * len(self.file)


@dataclass(frozen=True)
class Split:
    """One tensor of the file makes several of the model: `Fuse` the other way."""

    file: str
    model: tuple[str, ...]
    dim: int = 0
    shares: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.reverse()

    def reverse(self) -> Fuse:
        return Fuse(self.model, self.file, self.dim, self.shares)


Rule = Rename | Fuse | Split


def _check_names(parts: Sequence[str], whole: str, stack: str | None = None) -> None:
    """Both sides must have the same names, so that either key can be made of the other."""
    names = set(pattern(whole).names)
    for part in parts:
        if set(pattern(part).names) != names | ({stack} if stack else set()) or stack in names:
            raise ValueError(f"{part} and {whole} do not have the same names in braces")


def weight_transforms(rules: Sequence[Rule]) -> list[WeightTransform]:
    """The rules as transformers' loader and `save_pretrained` take them; a `Swap` is none of those."""
    assert not any(isinstance(rule, Swap) for rule in rules)
    transforms: list[WeightTransform] = []
    renames = tuple(rule for rule in rules if isinstance(rule, Rename))
    if renames:
        transforms.append(_Renaming(renames))
    for rule in rules:
        if isinstance(rule, Fuse):
            transforms.append(_Joining(rule, rule.file, (rule.model,)))
        elif isinstance(rule, Split):
            transforms.append(_Joining(rule.reverse(), (rule.file,), rule.model))
    return transforms


class _Renaming(WeightRenaming):
    """All `Rename` rules of a model: the one that matches a key renames it."""

    __slots__ = ("backward", "rules")

    def __init__(self, rules: tuple[Rename, ...], backward: bool = False) -> None:
        used = [rule for rule in rules if rule.saved or not backward]
        files, models = [rule.file for rule in used], [rule.model for rule in used]
        super().__init__(*((models, files) if backward else (files, models)))
        self.rules, self.backward = rules, backward

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        for source, target in zip(self.source_patterns, self.target_patterns, strict=True):
            fields = pattern(source).match(source_key)
            if fields is not None:
                return pattern(target).fill(fields), source
        return source_key, None

    def reverse_transform(self) -> WeightTransform:
        return _Renaming(self.rules, not self.backward)

    def was_used(self) -> bool:
        # Saving writes the rules' layout, whichever was loaded.
        return True


class _Joining(WeightConverter):
    """`Fuse`, and `Split` the other way round."""

    __slots__ = ("rule",)

    def __init__(self, rule: Fuse, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
        super().__init__(list(sources), list(targets), [_Join(rule, joins=sources == rule.file)])
        self.rule = rule

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        for source in self.source_patterns:
            fields = pattern(source).match(source_key)
            if fields is not None:
                # Where one tensor makes many, this stands for all of them.
                return pattern(self.target_patterns[0]).fill({str(self.rule.stack): "0"} | fields), source
        return source_key, None

    def reverse_transform(self) -> WeightTransform:
        return _Joining(self.rule, tuple(self.target_patterns), tuple(self.source_patterns))

    def was_used(self) -> bool:
        return True


class _Join(ConversionOps):
    """The arithmetic of `_Joining`; gives its tensors under their whole names."""

    def __init__(self, rule: Fuse, joins: bool) -> None:
        self.rule, self.joins = rule, joins

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        fields, prefix = self._fields(full_layer_name, target_patterns[0], model.base_model_prefix)
        missing = [p for p in source_patterns if p not in input_dict]
        if missing:
            names = ", ".join(pattern(p).fill({str(self.rule.stack): "*"} | fields) for p in missing)
            raise ValueError(f"there is no {names}")
        if self.joins:
            whole = self.rule.join([input_dict.pop(p) for p in source_patterns])
            return {full_layer_name: whole}
        parts = self.rule.part(input_dict.pop(source_patterns[0])[0])
        return {
            pattern(target).fill(fields | {str(self.rule.stack): str(i)}).removeprefix(prefix): tensor
            for target, tensors in zip(target_patterns, parts, strict=True)
            for i, tensor in enumerate(tensors)
        }

    @staticmethod
    def _fields(name: str, text: str, base: str) -> tuple[dict[str, str], str]:
        """What stands in the gaps of `name`, and the prefix that it lacks where the model is the base model itself."""
        for prefix in ("", f"{base}."):
            fields = pattern(text).match(prefix + name)
            if fields is not None:
                return fields, prefix
        raise ValueError(f"{name} is not of the form {text}")

    @property
    def reverse_op(self) -> ConversionOps:
        return _Join(self.rule, not self.joins)
