"""What `xpu-ports doctor` knows about a machine: gathered here, judged in _checks.py.

Source of where Triton looks for headers: intel-xpu-backend-for-triton, third_party/intel/backend/driver.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "xpu-ports"
# Distributions that install the import package `triton`, each over the others' files.
TRITON_DISTRIBUTIONS = ("triton", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton", "pytorch-triton-rocm")
OTHER_DISTRIBUTIONS = ("intel-extension-for-pytorch", "ipex-llm", "intel-sycl-rt")
# Environment variables that change what torch, Triton or this package do.
VARIABLES = (
    "XPU_PORTS_BACKEND",
    "XPU_PORTS_ARCHITECTURE",
    "XPU_PORTS_TUNING",
    "TRITON_INTERPRET",
    "TRITON_XPU_GEN_NATIVE_CODE",
    "ONEAPI_DEVICE_SELECTOR",
    "ZE_AFFINITY_MASK",
    "CUDA_VISIBLE_DEVICES",
    "UR_L0_USE_RELAXED_ALLOCATION_LIMITS",
)
INTEL, NVIDIA = "0x8086", "0x10de"
# Seconds. torch alone takes a few; a first kernel on an XPU also builds Triton's launcher with the C++ compiler.
DEVICES_TIMEOUT = 120.0
KERNEL_TIMEOUT = 180.0


@dataclass(frozen=True)
class Device:
    """One accelerator that torch sees."""

    type: str
    index: int
    name: str
    # A name in xpu_ports.common.device.ARCHITECTURES.
    architecture: str
    # Bytes; free is None where the driver does not tell.
    total_memory: int
    free_memory: int | None
    # bf16 in hardware; where it is not, torch emulates it.
    bf16: bool
    fp64: bool
    driver: str | None = None


@dataclass(frozen=True)
class Torch:
    """The installed torch; xpu, cuda and hip are the versions that it was built for, or None."""

    version: str
    xpu: str | None = None
    cuda: str | None = None
    hip: str | None = None
    devices: tuple[Device, ...] = ()
    # What tables of tuned launches count here, in words, and what is wrong with those that do not.
    tuned: tuple[str, ...] = ()
    tuning_errors: tuple[str, ...] = ()

    @property
    def build(self) -> str:
        return next((kind for kind in ("xpu", "cuda", "hip") if getattr(self, kind)), "cpu")


@dataclass(frozen=True)
class Kernel:
    """How the test kernel went. `triton` is the module's version, None where it cannot be imported."""

    triton: str | None
    interpreted: bool = False
    # One line, and all that the process wrote to stderr.
    error: str | None = None
    log: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Facts:
    """A machine and an environment. The defaults are those of a machine without a GPU."""

    # None where torch cannot be imported or asked for its devices; then torch_error says why.
    torch: Torch | None
    torch_error: str | None = None
    # None where there is nothing to run: no Triton on a CPU, or no torch.
    kernel: Kernel | None = None
    # Normalized name -> version.
    distributions: Mapping[str, str] = field(default_factory=dict)
    # What this package's own metadata asks for, such as "transformers>=5.24".
    requirements: tuple[str, ...] = ()
    # "vendor:device" of each GPU on the PCI bus, such as "0x8086:0xe20b".
    gpus: tuple[str, ...] = ()
    # Render node -> whether this user may open it.
    render_nodes: Mapping[str, bool] = field(default_factory=dict)
    # Paths, None where not found.
    level_zero_headers: str | None = None
    sycl_headers: str | None = None
    python_headers: str | None = None
    compiler: str | None = None
    ocloc: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    # Why XPU_PORTS_BACKEND cannot be followed, or None.
    backend_error: str | None = None
    python: str = ""
    system: str = ""
    # Bytes of the machine's memory, 0 where unknown.
    memory: int = 0
    free_memory: int = 0

    def gpus_of(self, vendor: str) -> tuple[str, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.startswith(vendor))


def gather() -> Facts:
    """Look at this machine. torch and Triton are asked in processes of their own: a bad driver can kill them."""
    torch, torch_error = ask_torch()
    requirements = own_requirements()
    names = {*TRITON_DISTRIBUTIONS, *OTHER_DISTRIBUTIONS, *(requirement_name(r) for r in requirements)}
    distributions = installed(names)
    memory, free_memory = machine_memory()
    return Facts(
        torch=torch,
        torch_error=torch_error,
        kernel=None if torch is None else run_kernel(torch, distributions),
        distributions=distributions,
        requirements=requirements,
        gpus=pci_gpus(Path("/sys")),
        render_nodes={str(p): os.access(p, os.R_OK | os.W_OK) for p in sorted(Path("/dev/dri").glob("renderD*"))},
        level_zero_headers=level_zero_headers(os.environ),
        sycl_headers=sycl_headers(os.environ),
        python_headers=first_file(Path(sysconfig.get_path("include")) / "Python.h"),
        compiler=next(filter(None, map(shutil.which, compilers(os.environ))), None),
        ocloc=shutil.which("ocloc"),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        backend_error=ask(["choices"], DEVICES_TIMEOUT).error if torch and "XPU_PORTS_BACKEND" in os.environ else None,
        python=platform.python_version(),
        system=platform.platform(),
        memory=memory,
        free_memory=free_memory,
    )


# ------------------------------------------------------------------------------------------------------------ probes


@dataclass(frozen=True)
class Answer:
    """Of a probe: its JSON object or, in one line, why there is none; and what it wrote to stderr."""

    value: dict[str, Any] | None
    error: str | None = None
    log: str = ""


def ask(question: Sequence[str], timeout: float, **environment: str) -> Answer:
    """Run `_probe.py` with a question; `environment` is set for it."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "XPU_PORTS_ARCHITECTURE")}
    command = [sys.executable, "-m", "xpu_ports.cli._probe", *question]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env={**inherited, **environment}, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer after {timeout:.0f} s")
    if done.returncode < 0:
        return Answer(None, f"the process was killed by {signal.Signals(-done.returncode).name}", done.stderr)
    if done.returncode:
        error = last_line(done.stderr) or f"the process ended with exit code {done.returncode}"
        return Answer(None, error, done.stderr)
    return Answer(json.loads(done.stdout), None, done.stderr)


def last_line(text: str) -> str:
    """The last line that is not blank: of a traceback, what was raised."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def compiler_error(text: str) -> str | None:
    """The line in which a C++ compiler names the cause; the traceback after it only says that the compiler failed."""
    return next((line.strip() for line in text.splitlines() if "fatal error:" in line), None)


def ask_torch() -> tuple[Torch | None, str | None]:
    answer = ask(["devices"], DEVICES_TIMEOUT)
    if answer.value is None:
        return None, answer.error
    devices = tuple(Device(**device) for device in answer.value.pop("devices"))
    tuned, errors = (tuple(answer.value.pop(name)) for name in ("tuned", "tuning_errors"))
    return Torch(**answer.value, devices=devices, tuned=tuned, tuning_errors=errors), None


def run_kernel(torch: Torch, distributions: Mapping[str, str]) -> Kernel | None:
    """Compile and run the test kernel on the first accelerator; interpret it where there is none but a Triton."""
    start = time.perf_counter()
    if torch.devices:
        answer = ask(["kernel", f"{torch.devices[0].type}:{torch.devices[0].index}"], KERNEL_TIMEOUT)
    elif any(name in distributions for name in TRITON_DISTRIBUTIONS):
        answer = ask(["kernel", "cpu"], KERNEL_TIMEOUT, TRITON_INTERPRET="1")
    else:
        return None
    return kernel_result(answer, time.perf_counter() - start)


def kernel_result(answer: Answer, seconds: float) -> Kernel:
    """What an answer to the question `kernel` says; without one Triton's version is not known."""
    value = answer.value or {"triton": None, "interpreted": False, "error": answer.error}
    if value["error"] is not None:
        value["error"] = " ".join((compiler_error(answer.log) or value["error"]).split())
    return Kernel(**value, log=answer.log, seconds=seconds)


# ---------------------------------------------------------------------------------------------------------- packages


def own_requirements() -> tuple[str, ...]:
    """What this package asks for, without its extras."""
    return tuple(r for r in importlib.metadata.requires(PACKAGE) or () if "extra ==" not in r)


def requirement_name(requirement: str) -> str:
    """The normalized name in a requirement such as "huggingface_hub>=1.0"."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return normalized(match.group())


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(names: set[str]) -> dict[str, str]:
    """Versions of those of the distributions that are installed."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = normalized(distribution.metadata["Name"] or "")
        if name in names:
            found.setdefault(name, distribution.version)
    return found


# ----------------------------------------------------------------------------------------------------------- machine


def pci_gpus(sys_root: Path) -> tuple[str, ...]:
    """The GPUs under /sys, by the DRM driver or, where none is loaded, by the PCI bus; each once."""
    found: dict[Path, str] = {}
    for device in [*sys_root.glob("class/drm/card*/device"), *sys_root.glob("bus/pci/devices/*")]:
        vendor, kind = read_word(device / "vendor"), read_word(device / "class")
        # PCI class 0x03: display controllers, and processors such as the Data Center GPU Max.
        if vendor and (kind is None or kind.startswith("0x03")):
            found[device.resolve()] = f"{vendor}:{read_word(device / 'device') or '?'}"
    return tuple(found.values())


def read_word(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def level_zero_headers(environment: Mapping[str, str]) -> str | None:
    """The directory with level_zero/ze_api.h, in the order that Triton and the compiler look."""
    root = environment.get("LEVEL_ZERO_V1_SDK_PATH") or environment.get("ZE_PATH") or "/usr/local"
    candidates = [f"{root}/include", *environment.get("CPATH", "").split(os.pathsep), "/usr/include"]
    return first_directory(candidates, "level_zero/ze_api.h")


def sycl_headers(environment: Mapping[str, str]) -> str | None:
    """The directory with sycl/sycl.hpp: of icpx, of ONEAPI_ROOT, or of the intel-sycl-rt wheel."""
    candidates = []
    icpx = shutil.which("icpx", path=environment.get("PATH"))
    if icpx:
        candidates.append(f"{Path(icpx).parent.parent}/include")
    if environment.get("ONEAPI_ROOT"):
        candidates.append(f"{environment['ONEAPI_ROOT']}/compiler/latest/include")
    candidates.append(f"{sys.prefix}/include")
    return first_directory(candidates, "sycl/sycl.hpp")


def first_directory(candidates: list[str], file: str) -> str | None:
    return next((c for c in candidates if c and (Path(c) / file).is_file()), None)


def first_file(path: Path) -> str | None:
    return str(path) if path.is_file() else None


def compilers(environment: Mapping[str, str]) -> list[str]:
    """Commands that Triton builds its launcher with, the chosen one first."""
    chosen = [environment[name] for name in ("CC", "CXX") if environment.get(name)]
    return [*chosen, "icpx", "g++", "clang++", "gcc", "clang"]


def machine_memory() -> tuple[int, int]:
    """Bytes of the machine's memory, all and free; zeros where the system does not tell."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0
