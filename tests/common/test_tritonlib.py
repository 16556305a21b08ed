"""Without Triton everything imports and the references run; with it, launches are kept by what they depend on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from xpu_ports.common import tritonlib

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TRITON = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "triton":
                raise ModuleNotFoundError("No module named 'triton'", name=name)

    sys.meta_path.insert(0, Blocked())
"""


def without_triton(code: str) -> str:
    """What a program prints in a process that has no Triton."""
    program = textwrap.dedent(WITHOUT_TRITON) + textwrap.dedent(code)
    environment = {k: v for k, v in os.environ.items() if k != "XPU_PORTS_BACKEND"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ops_without_triton() -> None:
    output = without_triton("""
        import torch
        from torch._subclasses import FakeTensorMode
        from xpu_ports.common import tritonlib
        from xpu_ports.common.dispatch import OPS, BackendError, load_ops, use_backend

        load_ops()
        x, weight = torch.randn(3, 8), torch.randn(8)
        assert "triton" not in sys.modules
        assert not tritonlib.AVAILABLE and not tritonlib.INTERPRETED and tritonlib.version() == (0, 0)
        assert torch.equal(OPS["rms_norm"](x, weight), OPS["rms_norm"].reference(x, weight))
        assert OPS["gated_rms_norm"](x, x, weight).shape == x.shape
        with FakeTensorMode():
            print(*OPS["rms_norm"].choose(torch.empty(3, 8, device="xpu"), None))
            with use_backend("triton"):
                try:
                    OPS["rms_norm"].choose(torch.empty(3, 8, device="xpu"), None)
                except BackendError as error:
                    print(error)
    """)
    choice, error = output.splitlines()
    assert choice == "reference triton: Triton cannot be imported: No module named 'triton'"
    assert error.endswith("triton: Triton cannot be imported: No module named 'triton'")


def test_every_op_refuses_without_triton() -> None:
    """Each with the reason, by the arguments of the dispatch tests' calls."""
    output = without_triton("""
        from torch._subclasses import FakeTensorMode
        from tests.common.ops import fake
        from tests.common.test_dispatch import CALLS, OPS

        for call, arguments in CALLS.items():
            op = OPS[call.split()[0]]
            if "triton" in op.backends("xpu"):
                with FakeTensorMode():
                    print(call, "|", *op.choose(*(fake(a) for a in arguments())))
    """)
    lines = [line.split(" | ") for line in output.splitlines()]
    assert len(lines) > 5
    for call, choice in lines:
        assert not choice.startswith("triton "), call
        assert "triton: Triton cannot be imported" in choice, call


@pytest.mark.parametrize(("text", "expected"), [("3.3.0b1", (3, 3)), ("3.10.0+git1234", (3, 10)), ("4.0.0", (4, 0))])
def test_version(monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[int, int]) -> None:
    monkeypatch.setattr(tritonlib, "AVAILABLE", True)
    monkeypatch.setattr(tritonlib.triton, "__version__", text, raising=False)
    assert tritonlib.version() == expected


def test_on_the_device_of_a_cpu_tensor_nothing_changes() -> None:
    with tritonlib.on_device_of(torch.zeros(1)) as entered:
        assert entered is None


@pytest.mark.parametrize(("current", "switched"), [(0, ["enter 1", "exit"]), (1, [])])
def test_on_the_device_of_another_tensor(monkeypatch: pytest.MonkeyPatch, current: int, switched: list) -> None:
    events = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            events.append(f"enter {self.index}")

        def __exit__(self, *error: object) -> None:
            events.append("exit")

    class Elsewhere:
        def get_device(self) -> int:
            return 1

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.accelerator, "device_index", Device)
    with tritonlib.on_device_of(Elsewhere()):
        pass
    assert events == switched


def test_arithmetic() -> None:
    for a in range(1, 70):
        assert tritonlib.next_power_of_2(a) == min(1 << k for k in range(8) if 1 << k >= a)
        for b in (1, 2, 7, 64):
            assert (tritonlib.cdiv(a, b) - 1) * b < a <= tritonlib.cdiv(a, b) * b
    assert (tritonlib.cdiv(0, 5), tritonlib.next_power_of_2(0)) == (0, 1)


# ------------------------------------------------------------------------------------------- launches kept by the host


class Compilations:
    """Stands where `triton.jit` leaves a function: counts compilations, keeps what is launched."""

    __name__ = "counted"
    function, packed_metadata = "handle", "metadata"

    def __init__(self) -> None:
        self.compiled: list[dict] = []
        self.launched: list[tuple] = []

    def fn(self, x_ptr, n, scale, BLOCK) -> None:
        raise AssertionError("never run")

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compiled.append(constants)
            return self

        return compile_and_launch if len(grid) < 3 else self.launcher(grid)

    def launcher(self, grid):
        return lambda *args: self.launched.append((grid, args))

    def run(self, x, y, z, *args) -> None:
        assert args[:6] == ("stream", "handle", "metadata", None, None, None)
        self.launched.append(((x, y, z), args[6:]))


@pytest.fixture(params=[False, True], ids=["direct", "profiled"])
def compilations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """By both ways to a launch: a profiler's hooks need Triton's own."""
    monkeypatch.setattr(tritonlib, "_stream", lambda index, cuda: "stream")
    monkeypatch.setattr(tritonlib, "_hooked", lambda: request.param)
    return Compilations()


@pytest.fixture
def counted(compilations: Compilations) -> tritonlib.Kernel:
    return tritonlib.Kernel(compilations)


X = torch.empty(8, device="meta")


def test_a_launch_is_kept(counted: tritonlib.Kernel, compilations: Compilations) -> None:
    for n in (48, 64, 32):
        counted[(7,)](X, n, 0.5, BLOCK=16)
    assert compilations.compiled == [dict(BLOCK=16)]
    # The tensor, the number as it is, and the constant behind them.
    assert [(grid, args[1:]) for grid, args in compilations.launched] == [
        ((7, 1, 1), (64, 0.5, 16)),
        ((7, 1, 1), (32, 0.5, 16)),
    ]


def test_a_kept_launch_follows_the_grid(counted: tritonlib.Kernel, compilations: Compilations) -> None:
    for grid in ((7,), (8,), (8,), (7, 2)):
        counted[grid](X, 48, 0.5, BLOCK=16)
    assert len(compilations.compiled) == 1
    assert [grid for grid, _ in compilations.launched] == [(8, 1, 1), (8, 1, 1), (7, 2, 1)]


@pytest.mark.parametrize(
    "other",
    [
        dict(n=1),
        dict(n=47),
        dict(n=1 << 32),
        dict(n=48.0),
        dict(scale=None),
        dict(x=X.double()),
        dict(BLOCK=32),
        dict(num_warps=8),
    ],
    ids=str,
)
def test_what_is_compiled_anew(counted: tritonlib.Kernel, compilations: Compilations, other: dict) -> None:
    """What Triton specializes on: a launch of a kernel that was made for something else would be wrong."""
    given = dict(x=X, n=48, scale=0.5, BLOCK=16)
    for call in (given, given | other, given, given | other):
        call = dict(call)
        counted[(7,)](call.pop("x"), call.pop("n"), call.pop("scale"), **call)
    assert len(compilations.compiled) == 2
    assert len(compilations.launched) == 2


@pytest.mark.skipif(not tritonlib.AVAILABLE, reason="no Triton")
def test_hooks_are_seen() -> None:
    assert not tritonlib._hooked()
    for chain in (tritonlib.triton.knobs.runtime.launch_enter_hook, tritonlib.triton.knobs.runtime.launch_exit_hook):
        chain.add(print)
        try:
            assert tritonlib._hooked()
        finally:
            chain.remove(print)
    assert not tritonlib._hooked()


def test_alignment_is_seen() -> None:
    bound = tritonlib._Bound((torch.Tensor,))
    x = torch.empty(64, dtype=torch.bfloat16)
    seen = {bound.specialize((x[i:],), 0, addresses=True)[0] for i in (0, 8, 1)}
    assert len(seen) == 2
    assert bound.specialize((x,), 0, addresses=True)[1] == [x.data_ptr()]
    assert bound.specialize((x,), 0, addresses=False)[1][0] is x
