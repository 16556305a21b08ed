"""Tensors in files: what one model leaves for the next, without being in memory meanwhile."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor


class Spool:
    """A folder of tensors that the system pages in and out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU whose values are in a file of its own.

        Raises:
            OSError: the disk has no room for it.
        """
        elements = math.prod(shape)
        free = shutil.disk_usage(self.folder).free
        if elements * dtype.itemsize > free:
            raise OSError(
                f"{self.folder}: {elements * dtype.itemsize / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free: "
                "take fewer windows, or point TMPDIR to a larger disk"
            )
        self._count += 1
        path = self.folder / f"{self._count}.bin"
        return torch.from_file(str(path), shared=True, size=max(elements, 1), dtype=dtype)[:elements].view(*shape)

    def keep(self, t: Tensor) -> Tensor:
        """A copy of a tensor, in a file."""
        kept = self.new(t.shape, t.dtype)
        kept.copy_(t.detach())
        return kept


@contextlib.contextmanager
def spool() -> Iterator[Spool]:
    """A `Spool` that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="xpu-ports-", ignore_cleanup_errors=True) as folder:
        yield Spool(Path(folder))
