"""Options and fixtures that all tests share.

A test of an op takes the fixture `run` and names the op with `pytest.mark.op(...)`; it then runs once for each back
end that the op has and this process can reach, with these ids:

    reference             the reference on the CPU
    interpreter           Triton's interpreter on CPU tensors
    xpu-offline           Intel's Triton compiler, its code run on the CPU; only with --backend xpu-offline
    xpu, cuda             Triton on the accelerator that is here; ...-reference: the reference there
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from typing import Any

import pytest
import torch

# Triton decides when a kernel is decorated whether it is interpreted, its own when it is imported: before all below.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.accelerator.is_available() else "1")
# Kernels are tested at their built-in tiles, whatever was tuned on this machine.
os.environ["XPU_PORTS_TUNING"] = "off"

from tests.common.ops import Runner, Target, patch_language_once, round_to_nearest_bfloat16, targets
from xpu_ports.common.dispatch import OPS

_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests that take long")
    parser.addoption(
        "--backend",
        action="append",
        default=[],
        metavar="ID",
        help="run tests of ops on this back end only: reference, interpreter, xpu-offline, xpu, cuda; repeatable",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "op(name): the op that the fixture `run` calls")
    wanted = config.getoption("--backend")
    if {"interpreter", "xpu-offline"} <= set(wanted):
        raise pytest.UsageError("--backend: interpreter and xpu-offline need a process each")
    if "interpreter" in wanted:
        os.environ["TRITON_INTERPRET"] = "1"
    if "xpu-offline" in wanted:
        os.environ["TRITON_INTERPRET"] = "0"
    if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
        round_to_nearest_bfloat16()
        patch_language_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="takes long: run with --full"))


def pytest_make_parametrize_id(config: pytest.Config, val: Any, argname: str) -> str | None:
    """A dict of sizes reads B2-T63-H3, a dtype bf16."""
    if isinstance(val, dict):
        # Not the numbers in a tensor: processes that share the tests must agree on the ids.
        return "-".join(k if isinstance(v, torch.Tensor) else f"{k}{v}" for k, v in val.items())
    return _DTYPES.get(val) if isinstance(val, torch.dtype) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("op")
    if marker is None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} takes `run`: name its op with pytest.mark.op(...)")
    wanted = metafunc.config.getoption("--backend")
    emulator = "interpreter" if os.environ["TRITON_INTERPRET"] == "1" else None
    if "xpu-offline" in wanted:
        emulator = "xpu-offline"
    accelerator = torch.accelerator.current_accelerator()
    found = targets(OPS[marker.args[0]], emulator, accelerator.type if accelerator and emulator is None else None)
    found = {name: target for name, target in found.items() if not wanted or name in wanted}
    metafunc.parametrize("target", found.values(), ids=found)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The seed is a hash of the test's id: stable for a test, different between tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def run(request: pytest.FixtureRequest, target: Target, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(OPS[request.node.get_closest_marker("op").args[0]], target, monkeypatch)
