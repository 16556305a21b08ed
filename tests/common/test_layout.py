"""row_strides against the addresses of every row, on random strided views."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from xpu_ports.common.layout import row_strides


def view(sizes: list[int], width: int, generator: random.Random) -> Tensor:
    """A random view of the given leading sizes: gaps, steps, swapped, repeated and merged dimensions."""
    order = list(range(len(sizes)))
    generator.shuffle(order)
    stride, strides = width + generator.choice([0, 0, 3]), [0] * len(sizes)
    for axis in order:
        if generator.random() < 0.1:
            continue
        strides[axis] = stride
        stride = stride * sizes[axis] + generator.choice([0, 0, 0, 1, 7])
    offset = generator.randrange(3)
    return torch.arange(offset + stride + width).as_strided((*sizes, width), (*strides, 1), offset)


def addresses(sizes: list[int], strides: list[int]) -> list[int]:
    """Where each row starts, in the order of rows."""
    positions = itertools.product(*(range(size) for size in sizes))
    return [sum(i * stride for i, stride in zip(position, strides, strict=True)) for position in positions]


@pytest.mark.parametrize("seed", range(200))
def test_rows_start_where_they_do(seed: int) -> None:
    generator = random.Random(seed)
    sizes = [generator.choice([1, 1, 2, 3, 5]) for _ in range(generator.randrange(5))]
    views = [view(sizes, generator.choice([1, 4]), generator) for _ in range(generator.choice([1, 2, 3]))]
    merged = row_strides(*views)
    if merged is None:
        assert fewest(sizes, views) > 3
        return
    sizes_merged, strides = merged
    assert len(sizes_merged) == 3
    assert [len(s) for s in strides] == [3] * len(views)
    for t, steps in zip(views, strides, strict=True):
        starts = [int(row.storage_offset() - t.storage_offset()) for row in each_row(t)]
        assert addresses(sizes_merged, steps) == starts


def each_row(t: Tensor) -> list[Tensor]:
    return [t[position] for position in itertools.product(*(range(size) for size in t.shape[:-1]))]


def fewest(sizes: list[int], views: list[Tensor]) -> int:
    """The fewest dimensions that walk all rows, tried by every way to cut the dimensions into runs."""
    axes = [a for a, size in enumerate(sizes) if size > 1]
    for runs in range(1, len(axes) + 1):
        for cuts in itertools.combinations(range(1, len(axes)), runs - 1):
            groups = [axes[a:b] for a, b in itertools.pairwise([0, *cuts, len(axes)])]
            if all(one_stride(t, group) for t in views for group in groups):
                return runs
    return len(axes)


def one_stride(t: Tensor, axes: list[int]) -> bool:
    starts = addresses([t.shape[a] for a in axes], [t.stride(a) for a in axes])
    return all(start == i * starts[1] for i, start in enumerate(starts))


def test_contiguous_is_one_dimension() -> None:
    assert row_strides(torch.zeros(2, 3, 4, 5, 6)) == ([1, 1, 120], [[0, 0, 6]])


def test_slice_of_a_projection_is_one_dimension() -> None:
    x = torch.zeros(2, 3, 20)[..., 4:9]
    assert row_strides(x, torch.zeros(2, 3, 5)) == ([1, 1, 6], [[0, 0, 20], [0, 0, 5]])


def test_one_tensor_keeps_the_others_apart() -> None:
    """Dimensions merge only where they do in every tensor."""
    gap = torch.zeros(2, 9, 5)[:, :3]
    assert row_strides(torch.zeros(2, 3, 5), gap) == ([1, 2, 3], [[0, 15, 5], [0, 45, 5]])


def test_a_vector_is_one_row() -> None:
    assert row_strides(torch.zeros(7)) == ([1, 1, 1], [[0, 0, 0]])


def test_no_rows() -> None:
    sizes, _ = row_strides(torch.zeros(0, 7))
    assert sizes == [1, 1, 0]


@pytest.mark.parametrize(("dims", "fits"), [(1, False), (2, False), (3, True), (4, True)])
def test_dims(dims: int, fits: bool) -> None:
    x = torch.zeros(4, 4, 4, 6)[::2, ::2, ::2]
    merged = row_strides(x, dims=dims)
    assert (merged is not None) == fits
    assert not fits or merged == ([1] * (dims - 3) + [2, 2, 2], [[0] * (dims - 3) + [192, 48, 12]])
