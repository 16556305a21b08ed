"""The same tensors under the names of another layout, joined or parted as its rules say: `--layout`.

Rules go from the official names, those of the published checkpoint, to transformers' own. What stands in the source
may have either; it is brought to transformers' names, compared with its model there, and taken back where the official
ones are wanted. Bytes are moved, never changed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.common.conversion import Fuse, Rename, Rule, Split, Swap, pattern
from xpu_ports.quant.convert.formats import Source
from xpu_ports.quant.convert.plan import Plan
from xpu_ports.quant.convert.steps import Copy, Output, Pieced, Stored, cut

LAYOUTS = ("hf", "official")


@dataclass(frozen=True)
class Joined:
    """A tensor made of pieces of the source's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    # (tensor, first byte, byte after the last), in order.
    segments: tuple[tuple[Stored, int, int], ...]

    def cut(self, begin: int, end: int) -> Iterator[tuple[Stored, int, int]]:
        """The segments of its bytes from begin to end."""
        return cut(self.segments, begin, end)

    def swapped(self) -> Joined:
        """With the other half of its rows first."""
        size = math.prod(self.shape) * self.dtype.itemsize
        half = self.shape[0] // 2 * (size // max(1, self.shape[0]))
        return Joined(self.dtype, self.shape, (*self.cut(half, size), *self.cut(0, half)))


def plan_layout(source: Source, layout: str, rules: Sequence[Rule], expected: Mapping[str, TensorInfo]) -> Plan:
    """Plan a change of names.

    Args:
        source: not quantized.
        layout: "hf" or "official".
        rules: from the official names to transformers'.
        expected: the tensors of transformers' model.

    Raises:
        CheckpointError: the source is quantized, or what it holds is not what the model has.
    """
    tensors = _renamed_all(source, rules)
    _compare(source, tensors, expected)
    if layout == "official":
        tensors = _backward(rules, tensors)
    steps = [_step(key, joined) for key, joined in tensors.items()]
    return Plan(source, list(steps), dict(source.config), list(source.warnings)).check()


def renamed(source: Source, rules: Sequence[Rule], expected: Mapping[str, TensorInfo] | None = None) -> Source:
    """The same checkpoint under transformers' names, for a conversion of its numbers; nothing is read yet.

    Args:
        source: not quantized.
        rules: from its names.
        expected: the tensors of the model, to compare with.

    Raises:
        CheckpointError: the source is quantized, or what it holds is not what the model has.
    """
    tensors = _renamed_all(source, rules)
    if expected is not None:
        _compare(source, tensors, expected)
    found, pieces = {}, {}
    for key, joined in tensors.items():
        first = joined.segments[0][0].info if joined.segments else TensorInfo((), joined.dtype)
        size = sum(end - begin for _, begin, end in joined.segments)
        found[key] = TensorInfo(joined.shape, joined.dtype, first.file, 0, size)
        pieces[key] = Pieced(key, found[key], joined.segments)
    return replace(source, found=found, pieces=pieces)


def _renamed_all(source: Source, rules: Sequence[Rule]) -> dict[str, Joined]:
    if source.is_quantized:
        raise CheckpointError(source.where, "quantization_config", "none, to change names", f"format {source.format}")
    tensors = {
        key: Joined(stored.info.dtype, stored.info.shape, ((stored, 0, stored.bytes),))
        for key, stored in source.rest().items()
    }
    return _forward(source, rules, tensors)


def _step(name: str, joined: Joined) -> Copy:
    [*keys] = {stored.key: None for stored, _, _ in joined.segments}
    label = "copied as it is" if keys == [name] else f"renamed from {keys[0]}"
    if len(keys) > 1:
        label = f"joined of {len(keys)} tensors"
    elif keys and sum(end - begin for _, begin, end in joined.segments) < joined.segments[0][0].bytes:
        label = f"part of {keys[0]}"
    return Copy(Output(name, joined.dtype, joined.shape), joined.segments, label)


def _compare(source: Source, tensors: Mapping[str, Joined], expected: Mapping[str, TensorInfo]) -> None:
    for key in expected:
        if key not in tensors:
            where = source.where if source.alone else source.folder
            raise CheckpointError(where, key, "it, or what it is made of", "none")
    for key, joined in tensors.items():
        first = joined.segments[0][0] if joined.segments else None
        file = source.folder if first is None else first.info.file
        name = key if first is None else first.key
        if key not in expected:
            raise CheckpointError(file, name, "a tensor of the model", "one without a place")
        if joined.shape != expected[key].shape:
            shape = list(expected[key].shape)
            raise CheckpointError(file, name, f"shape {shape} for {key}", f"{list(joined.shape)}")


# --------------------------------------------------------------------------------------------------------------- rules


def _forward(source: Source, rules: Sequence[Rule], tensors: Mapping[str, Joined]) -> dict[str, Joined]:
    """From the official names; keys that have transformers' already stay."""
    named: dict[str, Joined] = {}
    for key, joined in tensors.items():
        name, joined = _renamed(key, joined, [(r.file, r.model, r) for r in rules if isinstance(r, Rename)])
        if name in named:
            first, other = joined.segments[0][0], named[name].segments[0][0]
            raise CheckpointError(first.info.file, key, f"{name} once", f"{other.key} too")
        named[name] = joined
    fuses = [rule for rule in rules if isinstance(rule, Fuse)]
    splits = [rule.reverse() for rule in rules if isinstance(rule, Split)]
    return _part(_join(named, fuses), splits)


def _backward(rules: Sequence[Rule], tensors: Mapping[str, Joined]) -> dict[str, Joined]:
    """To the official names."""
    fuses = [rule for rule in rules if isinstance(rule, Fuse)]
    splits = [rule.reverse() for rule in rules if isinstance(rule, Split)]
    names = [(r.model, r.file, r) for r in rules if isinstance(r, Rename) and r.saved]
    return dict(_renamed(key, joined, names) for key, joined in _join(_part(tensors, fuses), splits).items())


def _renamed(key: str, joined: Joined, names: Sequence[tuple[str, str, Rename]]) -> tuple[str, Joined]:
    for before, after, rule in names:
        fields = pattern(before).match(key)
        if fields is not None:
            return pattern(after).fill(fields), joined.swapped() if isinstance(rule, Swap) else joined
    return key, joined


def _join(tensors: Mapping[str, Joined], rules: Sequence[Fuse]) -> dict[str, Joined]:
    """Parts to wholes, each whole where its first part stood."""
    made: dict[str, Joined] = {}
    parts: dict[str, tuple[Fuse, dict[tuple[int, int], tuple[str, Joined]]]] = {}
    order: dict[str, None] = {}
    for key, joined in tensors.items():
        place = _place(key, rules)
        if place is None:
            made[key] = joined
            order[key] = None
            continue
        rule, whole, i, e = place
        parts.setdefault(whole, (rule, {}))[1][i, e] = (key, joined)
        order[whole] = None
    for whole, (rule, found) in parts.items():
        made[whole] = _joined(rule, whole, found)
    return {key: made[key] for key in order}


def _place(key: str, rules: Sequence[Fuse]) -> tuple[Fuse, str, int, int] | None:
    """(rule, name of the whole, which of the rule's parts, which of those stacked)."""
    for rule in rules:
        for i, part in enumerate(rule.file):
            fields = pattern(part).match(key)
            if fields is not None and (rule.stack is None or fields[rule.stack].isdecimal()):
                return rule, pattern(rule.model).fill(fields), i, int(fields[rule.stack]) if rule.stack else 0
    return None


def _joined(rule: Fuse, whole: str, found: Mapping[tuple[int, int], tuple[str, Joined]]) -> Joined:
    stacked = 1 + max(e for _, e in found)
    key, first = next(iter(found.values()))
    file = first.segments[0][0].info.file if first.segments else whole
    for i, e in itertools.product(range(len(rule.file)), range(stacked)):
        if (i, e) not in found:
            fields = {**(pattern(rule.model).match(whole) or {}), str(rule.stack): str(e)}
            hint = f"with {key} it makes {whole}"
            raise CheckpointError(file, pattern(rule.file[i]).fill(fields), "it", "none", hint)
    lists = [[found[i, e][1] for e in range(stacked)] for i in range(len(rule.file))]
    for members in lists:
        for member in members:
            if (member.shape, member.dtype) != (members[0].shape, first.dtype):
                expected = f"{first.dtype} {list(members[0].shape)} like the others of {whole}"
                raise CheckpointError(file, key, expected, f"{member.dtype} {list(member.shape)}")
    lead = (stacked,) if rule.stack else ()
    wholes = [
        Joined(first.dtype, (*lead, *members[0].shape), tuple(s for m in members for s in m.segments))
        for members in lists
    ]
    shapes = [w.shape for w in wholes]
    total = sum(shape[rule.dim] for shape in shapes)
    if any(s[: rule.dim] + s[rule.dim + 1 :] != shapes[0][: rule.dim] + shapes[0][rule.dim + 1 :] for s in shapes):
        raise CheckpointError(file, key, f"shapes that make {whole} along dimension {rule.dim}", f"{shapes}")
    shape = (*shapes[0][: rule.dim], total, *shapes[0][rule.dim + 1 :])
    return Joined(first.dtype, shape, tuple(_interleaved(wholes, rule.dim)))


def _interleaved(wholes: Sequence[Joined], dim: int) -> Iterator[tuple[Stored, int, int]]:
    """The segments of tensors joined along a dimension."""
    inner = [math.prod(w.shape[dim:]) * w.dtype.itemsize for w in wholes]
    for outer in range(math.prod(wholes[0].shape[:dim])):
        for whole, size in zip(wholes, inner, strict=True):
            yield from whole.cut(outer * size, (outer + 1) * size)


def _part(tensors: Mapping[str, Joined], rules: Sequence[Fuse]) -> dict[str, Joined]:
    """Wholes to parts."""
    made: dict[str, Joined] = {}
    for key, joined in tensors.items():
        for rule in rules:
            fields = pattern(rule.model).match(key)
            if fields is not None:
                made |= _parts(rule, fields, key, joined)
                break
        else:
            made[key] = joined
    return made


def _parts(rule: Fuse, fields: Mapping[str, str], key: str, whole: Joined) -> dict[str, Joined]:
    shares = rule.shares or (1,) * len(rule.file)
    size = whole.shape[rule.dim] if rule.dim < len(whole.shape) else 0
    if not size or size % sum(shares):
        stored = whole.segments[0][0]
        expected = f"a dimension {rule.dim} that parts as {shares}"
        raise CheckpointError(stored.info.file, key, expected, f"{list(whole.shape)}")
    inner = math.prod(whole.shape[rule.dim + 1 :]) * whole.dtype.itemsize
    made: dict[str, dict[str, Joined]] = defaultdict(dict)
    at = 0
    for part, share in zip(rule.file, shares, strict=True):
        n = size // sum(shares) * share
        cuts = (
            whole.cut((outer * size + at) * inner, (outer * size + at + n) * inner)
            for outer in range(math.prod(whole.shape[: rule.dim]))
        )
        shape = (*whole.shape[: rule.dim], n, *whole.shape[rule.dim + 1 :])
        joined = Joined(whole.dtype, shape, tuple(s for cut in cuts for s in cut))
        at += n
        if not rule.stack:
            made[part][pattern(part).fill(fields)] = joined
            continue
        each = math.prod(shape[1:]) * whole.dtype.itemsize
        for e in range(shape[0]):
            name = pattern(part).fill({**fields, rule.stack: str(e)})
            made[part][name] = Joined(whole.dtype, shape[1:], tuple(joined.cut(e * each, (e + 1) * each)))
    return {name: joined for group in made.values() for name, joined in group.items()}
