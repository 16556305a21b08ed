"""Guarded copies: what a kernel writes out of place shows, what it writes in place comes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xpu_offline.memory import MemoryFaultError, copies


def at(copy, t: Tensor) -> int:
    """Where the tensor's first element lies in the copy's range, in bytes."""
    return copy.start + t.storage_offset() * t.element_size()


def test_values_come_in_and_go_back() -> None:
    base = torch.arange(12.0)
    x = base.view(3, 4)[:, 1:3]
    [copy], [owner] = copies([x])
    assert owner is copy
    assert torch.equal(copy.view(x), x)
    copy.view(x)[1, 1] = 100.0
    copy.check()
    copy.write_back()
    assert base.tolist() == [0, 1, 2, 3, 4, 5, 100, 7, 8, 9, 10, 11]


def test_tensors_of_one_storage_share_a_copy() -> None:
    base = torch.zeros(8)
    a, b, other = base[:4], base[2:6], torch.zeros(3)
    made, owners = copies([a, b, other])
    assert len(made) == 2
    assert owners[0] is owners[1]
    made[0].view(a)[3] = 1.0
    assert made[0].view(b)[1] == 1.0
    assert made[0].itemsize == 4


@pytest.mark.parametrize(("offset", "message"), [(-1, "bytes before"), (40, "bytes after"), (60_000, "bytes after")])
def test_writes_outside_the_storage(offset: int, message: str) -> None:
    x = torch.zeros(10)
    [copy], _ = copies([x])
    copy.range.bytes[at(copy, x) + offset] = 0
    with pytest.raises(MemoryFaultError, match=message):
        copy.check()


def test_writes_between_the_rows_of_a_tensor() -> None:
    x = torch.zeros(4, 8)[:, :5]
    [copy], _ = copies([x])
    copy.range.bytes[at(copy, x) + 5 * 4] = 1
    with pytest.raises(MemoryFaultError, match="1 elements that are in the storage but not in the tensor"):
        copy.check()


def test_around_a_tensor_there_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(10, dtype=dtype)
        [copy], _ = copies([x])
        around = copy.range.tensor.view(dtype)
        first = at(copy, x) // x.element_size()
        assert around[first - 100 : first].isnan().all()
        assert around[first + 10 : first + 110].isnan().all()


def test_addresses_that_wrapped_are_mapped() -> None:
    x = torch.zeros(10)
    [copy], _ = copies([x])
    for far in (-(2**31) * 4, 2**31 * 4):
        assert copy.range.bytes[at(copy, x) + far] == 0


def test_sparse_storage() -> None:
    """4 GB of which two rows exist: they come and go, and nothing else is touched."""
    x = torch.empty(2**31 + 8, dtype=torch.int16).as_strided((3, 4), (2**30, 1))
    x.copy_(torch.arange(12).view(3, 4))
    [copy], _ = copies([x])
    assert not copy.whole
    copy.view(x).add_(1)
    copy.check()
    copy.write_back()
    copy.release()
    assert x.flatten().tolist() == list(range(1, 13))


def test_repeated_elements() -> None:
    x = torch.arange(4.0).expand(3, 4)
    [copy], _ = copies([x])
    assert torch.equal(copy.view(x), x)
    copy.view(x)[0, 2] = 7.0
    copy.check()
    copy.write_back()
    assert x[2].tolist() == [0, 1, 7, 3]


def test_what_changed_and_marks() -> None:
    x = torch.arange(6, dtype=torch.int32)
    [copy], _ = copies([x])
    copy.view(x)[4] = -1
    changed = copy.changed()
    assert changed.tolist() == [False] * 4 + [True, False]
    base = copy.marked(changed)
    assert copy.view(x).tolist() == [0, 1, 2, 3, 0x3C3C3C3C, 5]
    copy.view(x)[2] = 9
    assert copy.differs(base).tolist() == [False, False, True, False, False, False]
