"""Tests of the planted ops, as op tests are written: of the numbers, all but those of `planted_good` must fail."""

from __future__ import annotations

import pytest
import torch

from tests.common.ops import Runner
from tests.xpu_offline.planted import ops
from xpu_offline.driver import compile_only
from xpu_ports.common.dispatch import use_backend


@pytest.mark.op("planted_good")
def test_good(run: Runner) -> None:
    run(torch.randn(5, 100))


@pytest.mark.op("planted_constant")
def test_constant(run: Runner) -> None:
    run(torch.randn(5, 100))


@pytest.mark.op("planted_unmasked")
def test_unmasked(run: Runner) -> None:
    run(torch.randn(5, 100))


@pytest.mark.op("planted_twice")
def test_twice(run: Runner) -> None:
    run(torch.randn(5, 100))


@pytest.mark.op("planted_unwritten")
def test_unwritten(run: Runner) -> None:
    run(torch.randn(5, 100))


@pytest.mark.parametrize("name", ["overflow", "good"])
def test_far_rows(xpu_architecture: str, name: str) -> None:
    """Rows 2^30 elements apart: the third starts 2^31 elements after the first. Only the rows' pages exist."""
    x = torch.empty(2**31 + 128, dtype=torch.float16).as_strided((3, 100), (2**30, 1))
    x.copy_(torch.randn(3, 100))
    with use_backend("triton"):
        y = getattr(ops, f"planted_{name}")(x)
    assert torch.equal(y, x * 2.0)


def test_spilling(xpu_architecture: str) -> None:
    with compile_only():
        ops.launch_spilling()


def test_shared(xpu_architecture: str) -> None:
    with compile_only():
        ops.launch_shared()
