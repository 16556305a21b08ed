"""Strided views for kernels: what can be addressed without a copy, and how."""

from __future__ import annotations

from torch import Tensor


def row_strides(*tensors: Tensor, dims: int = 3) -> tuple[list[int], list[list[int]]] | None:
    """Merge the leading dimensions of tensors that share them into at most `dims` strided ones.

    The last dimension is left alone. Dimensions are merged where one stride walks both in every tensor, so a slice
    of a wider projection costs nothing; the result is filled up in front with size 1.

    Args:
        tensors: at least one, of equal leading sizes, each [..., N].
        dims: how many leading dimensions the kernel can address.

    Returns:
        (sizes, strides): `dims` sizes and, for each tensor, `dims` strides in elements; None where it takes more.
    """
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis, size in enumerate(tensors[0].shape[:-1]):
        if size == 1:
            continue
        steps = [t.stride(axis) for t in tensors]
        if sizes and all(s[-1] == step * size for s, step in zip(strides, steps, strict=True)):
            sizes[-1] *= size
            for s, step in zip(strides, steps, strict=True):
                s[-1] = step
        else:
            sizes.append(size)
            for s, step in zip(strides, steps, strict=True):
                s.append(step)
    if len(sizes) > dims:
        return None
    missing = dims - len(sizes)
    return [1] * missing + sizes, [[0] * missing + s for s in strides]
