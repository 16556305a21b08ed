"""Arguments that a kernel reads in boxes are launched as tensors and addresses, and reach Triton as descriptors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xpu_ports.common import boxes, tritonlib
from xpu_ports.common.boxes import Box, boxed


class Compilations:
    """Stands where `gluon.jit` leaves a function, and for the compiled kernel."""

    __name__ = "counted"
    function, packed_metadata = "handle", "metadata"
    arg_names = ("y_ptr", "x", "rows", "K", "stride_x", "BLOCK_M")

    def __init__(self) -> None:
        self.launched: list[tuple] = []

    def fn(self, y_ptr, x, rows, K, stride_x, BLOCK_M) -> None:
        raise AssertionError("never run")

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.launched.append((*args, *constants.values()))
            return self

        return launch

    def run(self, x, y, z, stream, function, metadata, *args) -> None:
        assert (function, metadata, args[:3]) == ("handle", "metadata", (None, None, None))
        self.launched.append(args[3:])


@pytest.mark.parametrize("hooked", [False, True], ids=["direct", "profiled"])
def test_tensors_become_descriptors(monkeypatch: pytest.MonkeyPatch, hooked: bool) -> None:
    monkeypatch.setattr(tritonlib, "_stream", lambda index, cuda: "stream")
    monkeypatch.setattr(tritonlib, "_hooked", lambda: hooked)
    # Elsewhere they are stand-ins.
    monkeypatch.setattr(boxes, "TensorDescriptor", lambda *parts: parts)
    monkeypatch.setattr(boxes, "gl", SimpleNamespace(NVMMASharedLayout=lambda *parts: parts))
    compilations = Compilations()
    decorate = boxed(x=Box("rows", "K", "stride_x", lambda constants: (constants["BLOCK_M"], 64)))
    kernel = tritonlib.Kernel(decorate(compilations))
    y, x = torch.empty(8, device="meta"), torch.empty(48, 96, dtype=torch.bfloat16, device="meta")
    kernel[(7,)](y, x, 48, 96, 96, BLOCK_M=16)
    kernel[(7,)](y, x[::2], 32, 96, 192, BLOCK_M=16)
    first, second = compilations.launched
    assert first[0] is y
    assert first[1][0] is x
    assert first[1][1:] == ([48, 96], [96, 1], [16, 64], (128, 16, 2))
    assert (second[1].shape, second[1].strides, second[1].padding) == ((32, 96), (192, 1), "zero")
    assert second[2:] == (32, 96, 192, 16)


def test_a_descriptor_begins_at_the_address() -> None:
    kept = boxes._Kept(Compilations(), [(1, 2, 3, 4)])
    kept.run(1, 1, 1, "stream", "handle", "metadata", None, None, None, 7 << 40, 9 << 40, 5, 64, 72, 16)
    (launched,) = kept.kept.launched
    assert launched[0] == 7 << 40
    assert launched[1].base.data_ptr() == 9 << 40
    assert (launched[1].shape, launched[1].strides) == ((5, 64), (72, 1))


def test_without_gluon_a_kernel_stays_as_it_is() -> None:
    def function() -> None: ...

    assert boxed(x=Box("rows", "K", "stride_x", lambda constants: (16, 64)))(function) is function
