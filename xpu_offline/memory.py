"""Guarded copies of a launch's tensors, so that what a kernel reads and writes out of place shows.

Each storage is copied into the middle of a reserved range of addresses. Close to it lie guard bytes that read as NaN
and must not change; farther out, addresses that are 2^31 elements off are still mapped, so an address that wrapped
around gives wrong numbers instead of a crash. What the kernel changes must lie inside the tensors that it was given.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

# 2^31 elements of 4 bytes on both sides.
_FAR = 8 << 30
_LARGEST = 16 << 30
_NEAR = 64 << 10
_GUARD = 0xFF
# Bytes of a small positive number in every floating dtype.
_MARK = 0x3C
# A storage above this many bytes is not copied whole: of it only the elements of the tensors exist.
WHOLE = 32 << 20
_MAP_NORESERVE = 0x4000
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MemoryFaultError(AssertionError):
    """A kernel wrote where it must not, or two programs wrote one element."""


class _Range:
    """A reserved range of addresses that a storage is copied into."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.map = mmap.mmap(-1, 2 * _FAR + _LARGEST, flags=flags)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.bytes)

    def clear(self, start: int, end: int) -> None:
        """Give pages back, so that they read as zeros again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, first, end - first)


_ranges: list[_Range] = []


def _without_repeats(view: Tensor) -> Tensor:
    """The view without the dimensions that repeat elements (stride 0), so that it can be written."""
    for axis in range(view.dim()):
        if view.stride(axis) == 0 and view.shape[axis] > 1:
            view = view.narrow(axis, 0, 1)
    return view


class Copy:
    """The guarded copy of one storage, and the tensors of the launch that are views of it."""

    def __init__(self, index: int, tensors: list[Tensor]) -> None:
        while len(_ranges) <= index:
            _ranges.append(_Range())
        self.range = _ranges[index]
        self.tensors = tensors
        self.size = tensors[0].untyped_storage().nbytes()
        if self.size > _LARGEST:
            raise ValueError(f"a tensor of {self.size} bytes is too large for the offline check")
        # The same place within a cache line, so that alignment is what it was.
        self.start = _FAR + tensors[0].untyped_storage().data_ptr() % 64
        self.whole = self.size <= WHOLE
        self.itemsize = min(t.element_size() for t in tensors)
        self.reset()
        self.original = self.data().copy() if self.whole else None

    def data(self) -> np.ndarray:
        """The bytes of the copy."""
        return self.range.bytes[self.start : self.start + self.size]

    def reset(self) -> None:
        """Copy the storage in, and lay the guards."""
        b, start, end = self.range.bytes, self.start, self.start + self.size
        b[start - _NEAR : start] = _GUARD
        b[end : end + _NEAR] = _GUARD
        if self.whole:
            stored = torch.empty(0, dtype=torch.uint8).set_(self.tensors[0].untyped_storage())
            b[start:end] = stored.numpy()
            return
        for t in self.tensors:
            _without_repeats(self.view(t)).copy_(_without_repeats(t))

    def view(self, t: Tensor) -> Tensor:
        """The tensor's place in the copy."""
        first = self.start // t.element_size() + t.storage_offset()
        return self.range.tensor.view(t.dtype).as_strided(t.shape, t.stride(), first)

    def address(self, t: Tensor) -> np.ndarray:
        """A one-byte array that lies where the tensor's first element is."""
        at = self.start + t.storage_offset() * t.element_size()
        return self.range.bytes[at : at + 1]

    def changed(self) -> np.ndarray:
        """Which elements (of the smallest element size among the tensors) differ from what was copied in."""
        return self.differs(self.original)

    def differs(self, other: np.ndarray) -> np.ndarray:
        """Which elements differ from `other`, bytes of the whole storage."""
        whole = self.size // self.itemsize * self.itemsize
        return (self.data()[:whole] != other[:whole]).reshape(-1, self.itemsize).any(1)

    def marked(self, where: np.ndarray) -> np.ndarray:
        """Copy the storage in anew, with a fixed value in the elements given; return the bytes that are there now."""
        self.reset()
        whole = self.size // self.itemsize * self.itemsize
        self.data()[:whole].reshape(-1, self.itemsize)[where] = _MARK
        return self.data().copy()

    def check(self) -> None:
        """Raise `MemoryFaultError` where something changed outside the tensors."""
        b, end = self.range.bytes, self.start + self.size
        for place, guard in (("before", b[self.start - _NEAR : self.start]), ("after", b[end : end + _NEAR])):
            hit = np.flatnonzero(guard != _GUARD)
            if len(hit):
                raise MemoryFaultError(f"wrote {len(hit)} bytes {place} the storage of a tensor ({self.describe()})")
        if not self.whole:
            return
        stray = self.changed() & ~self._inside()
        if stray.any():
            raise MemoryFaultError(
                f"wrote {int(stray.sum())} elements that are in the storage but not in the tensor ({self.describe()})"
            )

    def _inside(self) -> np.ndarray:
        inside = torch.zeros(self.size, dtype=torch.uint8)
        for t in self.tensors:
            whole = self.size // t.element_size() * t.element_size()
            flat = inside[:whole].view(_INTEGER[t.element_size()])
            _without_repeats(flat.as_strided(t.shape, t.stride(), t.storage_offset())).fill_(-1)
        whole = self.size // self.itemsize * self.itemsize
        return inside.numpy()[:whole].reshape(-1, self.itemsize).all(1)

    def describe(self) -> str:
        """The tensors in words."""
        return "; ".join(f"{tuple(t.shape)} {t.dtype} strides {t.stride()}" for t in self.tensors)

    def write_back(self) -> None:
        """Copy what the kernel wrote into the tensors."""
        if self.whole:
            if self.changed().any() or self.size % self.itemsize:
                torch.empty(0, dtype=torch.uint8).set_(self.tensors[0].untyped_storage()).numpy()[:] = self.data()
            return
        for t in self.tensors:
            _without_repeats(t).copy_(_without_repeats(self.view(t)))

    def release(self) -> None:
        """Give the pages back; a large storage is sparse, so its whole range is."""
        if not self.whole:
            self.range.clear(self.start - _NEAR, self.start + self.size + _NEAR)


def copies(tensors: list[Tensor]) -> tuple[list[Copy], list[Copy]]:
    """Guarded copies of the tensors' storages: one each, and for each tensor the one that it lies in."""
    by_storage: dict[int, list[Tensor]] = {}
    for t in tensors:
        by_storage.setdefault(t.untyped_storage().data_ptr(), []).append(t)
    made = {key: Copy(i, group) for i, (key, group) in enumerate(by_storage.items())}
    return list(made.values()), [made[t.untyped_storage().data_ptr()] for t in tensors]
