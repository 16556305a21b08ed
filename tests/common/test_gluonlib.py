"""gluonlib and launch_order: where kernels for Hopper run, why not elsewhere, and that they import everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from xpu_ports.common import gluonlib, launch_order, tritonlib
from xpu_ports.common.device import use_architecture

CUDA = torch.device("cuda", 0)


def run(program: str, **environment: str) -> str:
    """What a program prints in a process of its own, which imports Triton anew."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REASON = "import torch; from xpu_ports.common import gluonlib; print(gluonlib.refuses(torch.device('cuda', 0)))"


@pytest.mark.skipif(not tritonlib.AVAILABLE, reason="there is no Triton")
def test_the_interpreter_has_no_gluon() -> None:
    assert run(REASON, TRITON_INTERPRET="1") == "Triton's interpreter does not run Gluon"


def test_an_untried_version() -> None:
    program = f"import triton; triton.__version__ = '3.99.0'\n{REASON}"
    if not tritonlib.AVAILABLE:
        pytest.skip("there is no Triton")
    assert run(program, TRITON_INTERPRET="0") == "Gluon of Triton 3.99.0 was not tried: 3.6 to 3.9 were"


def test_without_triton() -> None:
    program = f"import sys; sys.modules['triton'] = None\n{REASON}\n"
    program += "from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_row\nprint(hopper_row.SMALLEST)"
    reason, smallest = run(program).splitlines()
    assert reason.startswith("Triton cannot be imported")
    assert int(smallest) > 0


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's of capability 9.0, where nothing else stands against it."""
    monkeypatch.setattr(gluonlib, "_WHY_NOT", None)
    assert gluonlib.refuses(torch.device("cpu")) == "cpu is not an NVIDIA GPU"
    with use_architecture("max"):
        assert gluonlib.refuses(CUDA) == "cuda:0 is not an NVIDIA GPU"
    capability = (10, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    gluonlib._refuses_capability.cache_clear()
    with use_architecture("nvidia"):
        assert gluonlib.refuses(CUDA) == "compute capability 10.0, not 9.0"
        capability = (9, 0)
        gluonlib._refuses_capability.cache_clear()
        assert gluonlib.refuses(CUDA) is None
    gluonlib._refuses_capability.cache_clear()


@pytest.mark.parametrize(
    ("capability", "knows", "there"), [((9, 0), True, True), ((8, 9), True, False), ((9, 0), False, False)]
)
def test_overlapped_launches(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], knows: bool, there: bool
) -> None:
    """Asked for from capability 9.0 on, by a Triton that has the instructions; never on other devices."""
    monkeypatch.setattr(tritonlib, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    cuda = SimpleNamespace(gdc_wait=None) if knows else SimpleNamespace()
    monkeypatch.setattr(launch_order, "tl", SimpleNamespace(extra=SimpleNamespace(cuda=cuda)))
    launch_order._options.cache_clear()
    assert launch_order.overlap_options(CUDA) == ({"launch_pdl": True} if there else {})
    launch_order._options.cache_clear()
    assert launch_order.overlap_options(torch.device("cpu")) == {}
    assert launch_order.overlap_options(torch.device("xpu", 0)) == {}
