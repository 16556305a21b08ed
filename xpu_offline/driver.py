"""A Triton driver without a device: what a launch wrapper launches is compiled for an Intel GPU and run on this CPU.

Triton itself binds, specializes and compiles as it does on a card; only the loading of the code and the launch are
ours. The device is an architecture of `xpu_ports.common.device`, the one that the wrapper configures for.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import pathlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import llvm
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.language import semantic
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from xpu_offline import cpu
from xpu_offline.devicelib import Extracts
from xpu_offline.lint import MOST_WARPS
from xpu_offline.native import Native, compile_native
from xpu_offline.record import Record
from xpu_offline.targets import CPU, TARGETS
from xpu_ports.common.device import ARCHITECTURES, architecture

# Warps of the code for this CPU of kernels with products: the more, the less each lane does, and the less straight code
# there is to build. A product of tiles on a GPU's few warps takes minutes. Others keep their own: where there are more
# lanes than elements, several hold the same one, and a kernel that works in place would be seen to fail that does not.
CPU_WARPS = MOST_WARPS
# Packed metadata, launch metadata, enter hook, exit hook.
_BEFORE_ARGUMENTS = 4
_compile_only: contextvars.ContextVar[bool] = contextvars.ContextVar("compile_only", default=False)


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Inside, launches are compiled for the GPU and not run: for sizes that a CPU would take too long for."""
    token = _compile_only.set(True)
    try:
        yield
    finally:
        _compile_only.reset(token)


def prepare_environment(cache: pathlib.Path) -> None:
    """Set what Triton and the OpenCL loader read from the environment; before either is first used."""
    os.environ["TRITON_INTERPRET"] = "0"
    # Triton's helper library is C++, and linked by what CC names.
    os.environ["CC"] = "g++"
    os.environ["TRITON_CACHE_DIR"] = str(cache / "triton")
    # Without line numbers in it, code stays the same when a kernel moves in its file.
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    # Without it, code that is not optimized aborts on reductions over a sub-group.
    os.environ["CL_CONFIG_CPU_O0_VECTORIZATION"] = "True"
    # The wheel's own registration names a path that does not exist.
    vendors = cache / "opencl"
    vendors.mkdir(parents=True, exist_ok=True)
    (vendors / "intel-cpu.icd").write_text(str(pathlib.Path(sys.prefix, "lib", "libintelocl.so")))
    os.environ["OCL_ICD_VENDORS"] = str(vendors)


def kernel_name(kernel: JITFunction) -> str:
    """The name of a kernel in reports: its module without the package, and the function."""
    return f"{kernel.__module__.removeprefix('xpu_ports.')}.{kernel.__name__.removeprefix('_')}"


@dataclass
class Code:
    """A kernel as compiled for a GPU: Triton's handle of a loaded function."""

    name: str
    spirv: bytes
    flags: str


class OfflineDriver(DriverBase):
    """What Triton asks of a device."""

    def __init__(self, record: Record, cache: pathlib.Path) -> None:
        super().__init__()
        self.record = record
        self.cache = cache
        self._natives: dict[tuple[bytes, str, str], Future[Native]] = {}
        self.utils = self
        self.launcher_cls = self._launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> str:
        return architecture(torch.device("cpu")).name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        return TARGETS[self.get_current_device()].triton

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is no device to time on")

    def get_device_properties(self, device: str) -> dict[str, int]:
        return {"max_shared_mem": ARCHITECTURES[device].shared_memory}

    def load_binary(self, name: str, spirv: bytes, shared: int, flags: str, device: str) -> tuple[Any, Code, int, int]:
        """(module, function, registers, spills), of which only the function means something here."""
        return self, Code(name, spirv, flags), 0, 0

    def native(self, code: Code, device: str) -> Future[Native]:
        """The native code for a device; two architectures with the same code and device have one compilation."""
        key = (code.spirv, code.flags, device)
        if key not in self._natives:
            self._natives[key] = self.record.pool.submit(
                compile_native, code.spirv, device, code.flags, self.cache / "native"
            )
        return self._natives[key]

    def _launcher(self, source: ASTSource, metadata: Any) -> Launcher:
        return Launcher(self, source, metadata)


class Launcher:
    """Launches one specialization of a kernel, compiled for one architecture."""

    def __init__(self, driver: OfflineDriver, source: ASTSource, metadata: Any) -> None:
        self.driver = driver
        self.source = source
        self.metadata = metadata
        self.architecture = driver.get_current_device()
        self.kernel = kernel_name(source.fn)
        self._program: cpu.Program | None = None
        self._atomic = False
        self._checked: set[Any] = set()
        seen = driver.record.of(self.kernel, self.architecture)
        seen.shared = max(seen.shared, metadata.shared)
        limit = ARCHITECTURES[self.architecture].shared_memory
        if metadata.shared > limit:
            seen.failures.append(f"{metadata.shared} bytes of shared memory, the device has {limit}")
        if metadata.num_warps > MOST_WARPS:
            seen.failures.append(f"{metadata.num_warps} warps, more than {MOST_WARPS}")

    def __call__(self, x: int, y: int, z: int, stream: int, code: Code, *rest: Any) -> None:
        # Triton's metadata and hooks come before the kernel's own arguments.
        values = rest[_BEFORE_ARGUMENTS:]
        seen = self.driver.record.launched(self.kernel, self.architecture)
        target = TARGETS[self.architecture]
        key = (code.spirv, code.flags)
        if key not in seen.natives:
            seen.natives[key] = (self.driver.native(code, target.native), self._words(code))
        if _compile_only.get():
            seen.at_model_sizes.add(key)
            return
        if 0 in (x, y, z):
            return
        if self._program is None:
            self._program = self._build()
        types = [self.source.signature[name] for name in self.source.fn.arg_names]
        passed = [(t, v) for t, v in zip(types, values, strict=True) if t != "constexpr"]
        with torch.no_grad():
            cpu.launch(
                self._program,
                [t for t, _ in passed],
                [v for _, v in passed],
                (x, y, z),
                check_writers=self._first_of_its_kind((x, y, z)),
            )

    def _words(self, code: Code) -> str:
        """The constants and options of this specialization."""
        names, signature = self.source.fn.arg_names, self.source.signature
        constants = {names[path[0]]: value for path, value in self.source.constants.items()}
        pointers = dict.fromkeys(t for t in signature.values() if t.startswith("*"))
        shown = [f"{k}={v}" for k, v in constants.items() if k.isupper()]
        return " ".join([*pointers, *shown, f"num_warps={self.metadata.num_warps}", code.flags]).strip()

    def _compile(self, warps: int) -> Any:
        """For this CPU."""
        with _exact_bf16_products():
            return triton.compile(
                self.source, target=CPU, options={"num_warps": warps, "num_stages": self.metadata.num_stages}
            )

    def _first_of_its_kind(self, grid: tuple[int, int, int]) -> bool:
        """Whether the programs' writes are to be told apart: once for each grid, and not where writes are atomic."""
        if self._atomic or grid in self._checked:
            return False
        self._checked.add(grid)
        return True

    def _has_products(self) -> bool:
        """Whether there is a tl.dot in it, as compiled for the GPU: on few warps the CPU's code takes minutes."""
        kept = get_cache_manager(self.metadata.hash).get_file(f"{self.source.name[:150]}.ttir")
        return "tt.dot" in pathlib.Path(kept).read_text()

    def _build(self) -> cpu.Program:
        compiled = self._compile(CPU_WARPS if self._has_products() else self.metadata.num_warps)
        self._atomic = "tt.atomic" in compiled.asm["ttir"]
        return cpu.Program(
            compiled.asm["spv"],
            compiled.metadata.name,
            compiled.metadata.threads_per_warp * compiled.metadata.num_warps,
            compiled.metadata.shared,
            self.driver.cache / "cpu",
        )


@contextlib.contextmanager
def _exact_bf16_products() -> Iterator[None]:
    """Inside, tl.dot takes bf16 operands as the fp32 numbers that they are.

    For a device without matrix units Triton 3.3 itself takes them to fp32 by way of fp16: what is below 3e-5 is lost
    and what is above 65504 is cut. Matrix units read bf16 as it is.
    """
    dot = semantic.dot

    def widened(a: Any, b: Any, *rest: Any) -> Any:
        builder = rest[-1]
        if a.dtype.is_bf16() and b.dtype.is_bf16():
            a, b = (semantic.cast(t, tl.float32, builder) for t in (a, b))
        return dot(a, b, *rest)

    semantic.dot = widened
    try:
        yield
    finally:
        semantic.dot = dot


def install(record: Record, cache: pathlib.Path) -> OfflineDriver:
    """Make Triton launch through an `OfflineDriver`, and record what fails to compile."""
    driver = OfflineDriver(record, cache)
    triton.runtime.driver.set_active(driver)
    llvm.link_extern_libs = Extracts(cache / "devicelib")
    # Triton keeps compiled code by the kernel's line in its file, too. There are no line numbers in this code.
    JITFunction.starting_line_number = property(lambda self: 1, lambda self, line: None)
    run = JITFunction.run

    def recorded(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        record.leave_breadcrumb(f"{kernel_name(self)} for {driver.get_current_device()}")
        try:
            return run(self, *args, **kwargs)
        except AssertionError:
            raise
        except Exception as error:
            seen = record.of(kernel_name(self), driver.get_current_device())
            # Triton's message is the kernel's source up to the place; what is wrong is in the last line or the cause.
            last = str(error.__cause__ or error).strip().splitlines()[-1:]
            seen.failures.append(f"{type(error).__name__}: {''.join(last)[:200]}")
            raise

    JITFunction.run = recorded
    return driver
