"""What `xpu-ports doctor` makes of a machine.

A check is a function of `Facts` alone and returns findings; `CHECKS` is their order. Each known bad combination was
reported by users: of torch builds and GPUs, of Triton distributions over one another, of missing headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from xpu_ports.cli import _facts
from xpu_ports.cli._common import INSTALL_XPU, XPU_INDEX, describe_build
from xpu_ports.cli._facts import INTEL, NVIDIA, TRITON_DISTRIBUTIONS, Device, Facts

GIB = 2**30
# The first Triton whose language the kernels are written in.
OLDEST_TRITON = (3, 3)
XPU_TRITONS = ("triton-xpu", "pytorch-triton-xpu")


@dataclass(frozen=True)
class Finding:
    check: str
    status: Literal["ok", "warn", "fail"]
    found: str
    # What to do about it; empty where nothing is to be done.
    do: str = ""


def examine(facts: Facts) -> list[Finding]:
    """Every check's findings, in order."""
    return [finding for check in CHECKS for finding in check(facts)]


# ------------------------------------------------------------------------------------------------- torch and the GPU


def check_torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        yield Finding(
            "torch",
            "fail",
            f"torch cannot be used: {facts.torch_error}",
            f"install it again; for Intel GPUs: {INSTALL_XPU}",
        )
        return
    build = describe_build(facts.torch.xpu, facts.torch.cuda, facts.torch.hip)
    yield Finding(
        "torch", "ok", f"torch {facts.torch.version}, built for {build}; Python {facts.python}, {facts.system}"
    )


def check_build(facts: Facts) -> Iterator[Finding]:
    """The wheel of torch against the GPUs on the bus."""
    if facts.torch is None:
        return
    build, intel, nvidia = facts.torch.build, facts.gpus_of(INTEL), facts.gpus_of(NVIDIA)
    if build in ("cuda", "hip") and intel and not facts.torch.devices:
        yield Finding(
            "build",
            "fail",
            f"torch {facts.torch.version} is for {build.upper()} and finds no GPU; there is an Intel GPU "
            f"({', '.join(intel)}), which this build cannot use",
            f"pip uninstall -y torch triton && {INSTALL_XPU}",
        )
    elif build == "cpu" and intel:
        yield Finding(
            "build",
            "warn",
            f"torch {facts.torch.version} is for the CPU only; there is an Intel GPU ({', '.join(intel)})",
            f"to use it: pip uninstall -y torch triton && {INSTALL_XPU}",
        )
    elif build in ("cpu", "xpu") and nvidia and not facts.torch.devices:
        yield Finding(
            "build",
            "warn",
            f"torch {facts.torch.version} cannot use the NVIDIA GPU ({', '.join(nvidia)}) of this machine",
            "to use it: install torch from the index of your CUDA version",
        )
    elif facts.gpus:
        yield Finding("build", "ok", f"GPUs on the bus: {', '.join(facts.gpus)}")


def check_devices(facts: Facts) -> Iterator[Finding]:
    """The devices that torch sees and, where an XPU build sees none, why."""
    if facts.torch is None:
        return
    for device in facts.torch.devices:
        yield Finding("device", "ok", describe_device(device))
    if facts.torch.devices:
        return
    if facts.torch.build == "xpu":
        yield why_no_xpu(facts)
        return
    memory = f"{facts.memory / GIB:.1f} GiB, {facts.free_memory / GIB:.1f} free" if facts.memory else "memory unknown"
    yield Finding("device", "ok", f"no accelerator, so models run on the CPU: {memory}, bf16 yes, fp64 yes")


def describe_device(device: Device) -> str:
    free = "" if device.free_memory is None else f", {device.free_memory / GIB:.1f} free"
    driver = f", driver {device.driver}" if device.driver else ""
    return (
        f"{device.type}:{device.index} {device.name} ({device.architecture}), {device.total_memory / GIB:.1f} GiB{free}"
        f", bf16 {'yes' if device.bf16 else 'emulated'}, fp64 {'yes' if device.fp64 else 'no (not needed)'}{driver}"
    )


def why_no_xpu(facts: Facts) -> Finding:
    """An XPU build without a device: hidden, forbidden, without a driver, or not there."""
    hiding = [f"{name}={facts.environment[name]}" for name in _HIDING if name in facts.environment]
    if hiding:
        return Finding(
            "device", "fail", f"torch finds no XPU with {' and '.join(hiding)} set", "unset it and try again"
        )
    closed = [node for node, may_open in facts.render_nodes.items() if not may_open]
    if closed:
        return Finding(
            "device",
            "fail",
            f"torch finds no XPU; this user may not open {', '.join(closed)}",
            "sudo usermod -aG render $USER, then log in again; in a container pass the device and its group",
        )
    if facts.gpus_of(INTEL):
        return Finding(
            "device",
            "fail",
            f"torch finds no XPU although there is an Intel GPU ({', '.join(facts.gpus_of(INTEL))})",
            "install Intel's compute runtime: apt install libze1 libze-intel-gpu1 (or intel-level-zero-gpu); in a "
            "container pass /dev/dri",
        )
    return Finding(
        "device",
        "warn",
        "torch is for XPU, and there is no Intel GPU to be seen: models run on the CPU",
        "on Windows or WSL install Intel's graphics driver",
    )


_HIDING = ("ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK")


def check_allocation_limit(facts: Facts) -> Iterator[Finding]:
    """Arc A: the driver gives no allocation of more than 4 GB unless asked to."""
    devices = [] if facts.torch is None else [d for d in facts.torch.devices if d.architecture == "arc-a"]
    if not devices or facts.environment.get(_RELAXED) == "1":
        return
    yield Finding(
        "allocation",
        "warn",
        f"{devices[0].name}: no single tensor of more than 4 GB, whatever is free",
        f"export {_RELAXED}=1, or keep each tensor below 4 GB (stacked experts, large caches)",
    )


_RELAXED = "UR_L0_USE_RELAXED_ALLOCATION_LIMITS"


# ---------------------------------------------------------------------------------------------------------- packages


def check_requirements(facts: Facts) -> Iterator[Finding]:
    """What this package's metadata asks for."""
    from packaging.requirements import Requirement

    unmet = 0
    for requirement in map(Requirement, facts.requirements):
        name = _facts.normalized(requirement.name)
        version = facts.distributions.get(name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet += 1
            what = "is not installed" if version is None else f"{version} is installed"
            yield Finding("packages", "fail", f"{name}: {what}, needs {requirement}", f"pip install '{requirement}'")
    if facts.requirements and not unmet:
        yield Finding("packages", "ok", f"{len(facts.requirements)} of {len(facts.requirements)} requirements are met")


def check_ipex(facts: Facts) -> Iterator[Finding]:
    for name in ("intel-extension-for-pytorch", "ipex-llm"):
        if name in facts.distributions:
            yield Finding(
                "ipex",
                "fail",
                f"{name} {facts.distributions[name]} is installed: archived, and not compatible with torch's own XPU "
                "support and Triton",
                f"pip uninstall -y {name}",
            )


def check_triton_distribution(facts: Facts) -> Iterator[Finding]:
    """Which distribution the import package `triton` comes from: exactly the one that belongs to this torch."""
    if facts.torch is None:
        return
    build = facts.torch.build
    present = {name: facts.distributions[name] for name in TRITON_DISTRIBUTIONS if name in facts.distributions}
    named = ", ".join(f"{name} {version}" for name, version in present.items())
    if len(present) > 1:
        keep = next((n for n in present if (n in XPU_TRITONS) == (build == "xpu")), next(iter(present)))
        index = f" --index-url {XPU_INDEX}" if build == "xpu" else ""
        yield Finding(
            "triton",
            "fail",
            f"{named} are installed over one another: both write the folder triton/",
            f"pip uninstall -y {' '.join(n for n in present if n != keep)} && "
            f"pip install --force-reinstall --no-deps {keep}=={present[keep]}{index}",
        )
    elif build == "xpu" and not set(present) & set(XPU_TRITONS):
        found = f"{named} is not for Intel GPUs" if present else "no Triton is installed"
        uninstall = f"pip uninstall -y {' '.join(present)} && " if present else ""
        yield Finding(
            "triton",
            "fail",
            f"{found}; torch for XPU brings its own",
            f"{uninstall}pip install --force-reinstall torch --index-url {XPU_INDEX}",
        )
    elif build != "xpu" and set(present) & set(XPU_TRITONS):
        yield Finding(
            "triton",
            "fail",
            f"{named} is for torch for XPU; this is {facts.torch.version}",
            f"{INSTALL_XPU}, or pip uninstall -y {' '.join(present)}",
        )
    elif present:
        yield Finding("triton", "ok", f"from {named}")
    elif build == "cpu":
        yield Finding("triton", "ok", "not installed, and not needed on the CPU")
    else:
        yield Finding("triton", "fail", f"not installed; torch for {build.upper()} needs it", "pip install triton")


def check_triton_version(facts: Facts) -> Iterator[Finding]:
    """The module's own version: a distribution's number says little where two were installed over one another."""
    if facts.torch is None or facts.kernel is None or facts.kernel.triton is None:
        return
    module = facts.kernel.triton
    recorded = {facts.distributions[name] for name in TRITON_DISTRIBUTIONS if name in facts.distributions}
    if _major_minor(module) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        yield Finding(
            "triton", "fail", f"Triton {module} is older than {oldest}", "install a newer torch: it brings Triton"
        )
    elif recorded and _major_minor(module) not in map(_major_minor, recorded):
        yield Finding(
            "triton",
            "fail",
            f"the module is {module}, its distribution {', '.join(sorted(recorded))}: another one overwrote it",
            "pip install --force-reinstall --no-deps the one that belongs to this torch",
        )
    else:
        yield Finding("triton", "ok", f"the module is {module}")


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


# ------------------------------------------------------------------------------------------------- compiling kernels


def check_kernel(facts: Facts) -> Iterator[Finding]:
    """The test kernel: compiled on an accelerator, interpreted on a CPU."""
    if facts.torch is None:
        return
    kernel = facts.kernel
    if kernel is None:
        if not facts.torch.devices:
            yield Finding("kernel", "ok", "none to compile: on the CPU every op runs its reference")
    elif kernel.error is None:
        how = "interpreted on the CPU" if kernel.interpreted else f"compiled and ran on {facts.torch.devices[0].type}"
        yield Finding("kernel", "ok", f"a Triton kernel was {how} in {kernel.seconds:.1f} s")
    else:
        yield Finding("kernel", "fail", f"a Triton kernel did not run: {kernel.error}", cure(kernel.error))


def cure(error: str) -> str:
    """What to do about a kernel's error, by the words of the compilers and of Triton."""
    return next((do for words, do in _CURES if any(word in error for word in words)), _LAST_RESORT)


_CURES = (
    (
        ("ze_api.h", "level_zero", "lze_loader"),
        "apt install libze-dev; on Windows set LEVEL_ZERO_V1_SDK_PATH to the SDK",
    ),
    (("sycl headers not found", "sycl.hpp"), "pip install intel-sycl-rt, in the version that torch asks for"),
    (("Python.h",), "apt install python3-dev, in the version of this Python"),
    (("Failed to find C compiler", "No such file or directory: 'g", "stdc++"), "apt install g++"),
    (("killed by", "no answer"), "update the GPU driver; until then XPU_PORTS_BACKEND=reference runs without kernels"),
)
_LAST_RESORT = "see the error with --verbose; until it is cured XPU_PORTS_BACKEND=reference runs without kernels"


def check_headers(facts: Facts) -> Iterator[Finding]:
    """What Triton builds its launcher with; no matter where a kernel has compiled without."""
    if facts.torch is None or not facts.torch.devices:
        return
    needed = {
        "a C++ compiler": (facts.compiler, "apt install g++"),
        "Python.h": (facts.python_headers, "apt install python3-dev"),
    }
    if facts.torch.build == "xpu":
        needed["level_zero/ze_api.h"] = (facts.level_zero_headers, "apt install libze-dev")
        needed["sycl/sycl.hpp"] = (facts.sycl_headers, "pip install intel-sycl-rt, in the version that torch asks for")
    missing = {name: do for name, (path, do) in needed.items() if path is None}
    if not missing:
        yield Finding("headers", "ok", ", ".join(f"{name}: {path}" for name, (path, _) in needed.items()))
    elif facts.kernel is not None and facts.kernel.error is None:
        yield Finding("headers", "ok", f"not found, and not missed by the kernel: {', '.join(missing)}")
    else:
        yield Finding("headers", "fail", f"not found: {', '.join(missing)}", "; ".join(missing.values()))


def check_ocloc(facts: Facts) -> Iterator[Finding]:
    """Intel's offline compiler: for native binaries only."""
    if facts.torch is None or facts.torch.build != "xpu":
        return
    if facts.ocloc:
        yield Finding("ocloc", "ok", facts.ocloc)
    elif facts.environment.get("TRITON_XPU_GEN_NATIVE_CODE", "0") not in ("", "0"):
        yield Finding(
            "ocloc",
            "fail",
            "not found, and TRITON_XPU_GEN_NATIVE_CODE asks for it",
            "apt install intel-ocloc (intel-opencl-icd in older releases), or unset the variable",
        )
    else:
        yield Finding("ocloc", "ok", "not found; needed only for native binaries (TRITON_XPU_GEN_NATIVE_CODE=1)")


def check_tuning(facts: Facts) -> Iterator[Finding]:
    """Tables of tuned launches: one that does not count leaves the built-in tiles, one that is asked for must count."""
    if facts.torch is None:
        return
    named = facts.environment.get("XPU_PORTS_TUNING")
    for words in facts.torch.tuned:
        yield Finding("tuning", "ok", words)
    for error in facts.torch.tuning_errors:
        if named:
            yield Finding("tuning", "fail", f"XPU_PORTS_TUNING: {error}", "unset it, or make the table again")
        else:
            yield Finding(
                "tuning", "warn", f"{error}; the built-in tiles are used", "xpu-ports tune, or delete the file"
            )


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Variables that change what runs."""
    environment = facts.environment
    has_device = facts.torch is not None and bool(facts.torch.devices)
    if facts.backend_error is not None:
        yield Finding("environment", "fail", facts.backend_error, "unset XPU_PORTS_BACKEND, or correct it")
    elif environment.get("XPU_PORTS_BACKEND"):
        yield Finding(
            "environment",
            "warn",
            f"XPU_PORTS_BACKEND={environment['XPU_PORTS_BACKEND']} forces back ends for everything",
            "unset it to let each op choose",
        )
    if environment.get("TRITON_INTERPRET") == "1" and has_device:
        yield Finding(
            "environment", "warn", "TRITON_INTERPRET=1: kernels run in Python, thousands of times slower", "unset it"
        )
    if environment.get("XPU_PORTS_ARCHITECTURE"):
        yield Finding(
            "environment",
            "warn",
            f"XPU_PORTS_ARCHITECTURE={environment['XPU_PORTS_ARCHITECTURE']}: kernels are configured for that one",
            "unset it to go by the device",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_torch,
    check_build,
    check_devices,
    check_allocation_limit,
    check_requirements,
    check_ipex,
    check_triton_distribution,
    check_triton_version,
    check_kernel,
    check_headers,
    check_ocloc,
    check_tuning,
    check_environment,
)
