"""Facts about devices: by name, overridden, and as launch options."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from xpu_ports.common import device as module
from xpu_ports.common.device import ARCHITECTURES, architecture, from_xpu_name, grf_options, use_architecture

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    module._detect.cache_clear()
    yield
    module._detect.cache_clear()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Intel(R) Data Center GPU Max 1550", "max"),
        ("Intel(R) Data Center GPU Max 1100", "max"),
        ("Intel(R) Arc(TM) A770 Graphics", "arc-a"),
        ("Intel(R) Arc(TM) A380 Graphics", "arc-a"),
        ("Intel(R) Arc(TM) B580 Graphics", "xe2"),
        ("Intel(R) Arc(TM) B570 Graphics", "xe2"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "xe2"),
        ("Intel(R) Arc(TM) 140V GPU (16GB)", "xe2"),
        ("Intel(R) Arc(TM) Pro A60 Graphics", "arc-a"),
        ("Intel(R) Data Center GPU Flex 170", "arc-a"),
        ("Intel(R) Arc(TM) Graphics", "arc-a"),
        ("Intel(R) Graphics [0xe20b]", "xe2"),
        ("", "xe2"),
    ],
)
def test_names_of_xpus(name: str, expected: str) -> None:
    assert from_xpu_name(name) is ARCHITECTURES[expected]


def test_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["Intel(R) Arc(TM) A770 Graphics", "Intel(R) Arc(TM) B580 Graphics"]
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: names[index])
    assert architecture(torch.device("xpu", 1)).name == "xe2"
    assert architecture(torch.device("xpu", 0)).name == "arc-a"
    assert architecture(torch.device("xpu")).name == "arc-a"
    assert architecture(torch.device("cuda", 0)).name == "nvidia"
    assert architecture(CPU).name == "cpu"


def test_asks_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda index: asked.append(index) or "Arc(TM) B580")
    for _ in range(3):
        architecture(torch.device("xpu", 0))
    assert asked == [0]


def test_use_architecture() -> None:
    with use_architecture("max"):
        assert architecture(CPU) is architecture(torch.device("cuda", 0)) is ARCHITECTURES["max"]
        with use_architecture("arc-a"):
            assert architecture(CPU).name == "arc-a"
        assert architecture(CPU).name == "max"
        seen = []
        thread = threading.Thread(target=lambda: seen.append(architecture(CPU).name))
        thread.start()
        thread.join()
        assert seen == ["cpu"]
    assert architecture(CPU).name == "cpu"


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.ENVIRONMENT, "xe2")
    assert architecture(CPU).name == "xe2"
    with use_architecture("max"):
        assert architecture(CPU).name == "max"


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no architecture is named 'xe9'; known: max, xe2, arc-a"):
        use_architecture("xe9").__enter__()
    monkeypatch.setenv(module.ENVIRONMENT, "xe9")
    with pytest.raises(ValueError, match="no architecture is named 'xe9'"):
        architecture(CPU)


@pytest.mark.parametrize("name", ["max", "xe2", "arc-a"])
def test_grf_options(name: str) -> None:
    """Triton renamed the modes in 3.6; before, they had sizes for names."""
    for registers, word in ((128, "small"), (256, "large")):
        assert grf_options(registers, ARCHITECTURES[name], (3, 3)) == {"grf_mode": word}
        assert grf_options(registers, ARCHITECTURES[name], (3, 5)) == {"grf_mode": word}
        assert grf_options(registers, ARCHITECTURES[name], (3, 6)) == {"grf_mode": str(registers)}
        assert grf_options(registers, ARCHITECTURES[name], (4, 0)) == {"grf_mode": str(registers)}


@pytest.mark.parametrize("name", ["nvidia", "cpu"])
def test_no_grf_options_elsewhere(name: str) -> None:
    assert grf_options(256, ARCHITECTURES[name], (3, 6)) == {}


def test_limits_that_kernels_are_written_for() -> None:
    for a in ARCHITECTURES.values():
        assert a.name in ARCHITECTURES
        assert a.shared_memory >= 64 * 1024
        assert a.dot_lanes <= a.lanes
        assert a.units > 0
    assert not ARCHITECTURES["arc-a"].fp64
