"""Views of a checkpoint's tensors that read one rank's part, for transformers' loader.

The loader takes anything that has a tensor's shape and dtype and gives its numbers for `[...]`. What a view reads is
counted. Tensors of which a rank needs nothing, such as other ranks' experts, are left out of what it is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xpu_ports.common.conversion import Fuse
from xpu_ports.common.parallel import Part, blocks


class PartView:
    """A part of a tensor that is not read yet.

    Args:
        source: a tensor, or what safetensors gives for one: it has a shape, a dtype and slices.
        part: of which shape and what of it.
        read: gets the bytes of each reading.
    """

    def __init__(self, source: Any, part: Part, read: list[int]) -> None:
        self.source, self.part, self.read = source, part, read

    def __getattr__(self, name: str) -> Any:
        # get_dtype of a slice, dtype of a tensor.
        return getattr(self.source, name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.own

    def get_shape(self) -> list[int]:
        return list(self.part.own)

    def __getitem__(self, item: Any) -> Tensor:
        assert item is Ellipsis
        if not self.part.pieces:
            return self._counted(self.source[...])
        pieces = [(own, self._counted(self.source[at])) for at, own in blocks(self.part)]
        if len(pieces) == 1:
            return pieces[0][1]
        made = torch.empty(self.part.own, dtype=pieces[0][1].dtype)
        for own, piece in pieces:
            made[own] = piece
        return made

    def _counted(self, t: Tensor) -> Tensor:
        # The loader's threads read side by side.
        self.read.append(t.numel() * t.element_size())
        return torch.zeros_like(t) if self.part.zero else t


def part_of_source(whole: Part, rule: Fuse | None, source: int, index: int) -> Part | None:
    """What a rank needs of one of the tensors that a parameter is made of; None for nothing.

    Args:
        whole: the rank's part of the parameter.
        rule: how it is made; None where the tensor is the parameter.
        source: which of the rule's patterns the tensor is of.
        index: which of those that are stacked.
    """
    if rule is None:
        return whole
    shares = rule.shares or (1,) * len(rule.file)
    unit = whole.shape[rule.dim] // sum(shares)
    begin = unit * sum(shares[:source])
    end = begin + unit * shares[source]
    shape = [*whole.shape]
    shape[rule.dim] = end - begin
    pieces = {dim: _overlap(p, begin, end) if dim == rule.dim else p for dim, p in whole.pieces.items()}
    if rule.stack:
        own = pieces.pop(0, ((0, whole.shape[0]),))
        if not any(a <= index < b for a, b in own):
            return None
        shape, pieces = shape[1:], {dim - 1: p for dim, p in pieces.items()}
    return Part(tuple(shape), pieces, whole.zero)


def _overlap(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    cut = [(max(a, begin) - begin, min(b, end) - begin) for a, b in pieces]
    return tuple((a, b) for a, b in cut if a < b)


@contextlib.contextmanager
def opened(
    sources: Mapping[str, Any] | None, files: Sequence[str] | None, parts: Mapping[str, Part | None], read: list[int]
) -> Iterator[dict[str, PartView]]:
    """Views of a checkpoint's tensors, good inside the block.

    Args:
        sources: the tensors, where they are not in files.
        files: safetensors files.
        parts: key -> the part that is needed, or None for nothing; a tensor without one is read as a whole.
        read: see `PartView`.
    """
    with contextlib.ExitStack() as stack:
        found = dict(sources or {})
        for file in () if sources is not None else files or ():
            handle = stack.enter_context(safe_open(file, framework="pt"))
            found |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118
        views = {}
        for key, source in found.items():
            shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
            part = parts.get(key, Part(shape, {}))
            if part is not None:
                views[key] = PartView(source, part, read)
        yield views
