"""Native code for Intel GPUs by the driver's offline compiler, and what that code needs."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

_SPILL = re.compile(r"spilled around (\d+)")
_FACTS = {"grf": r"grf_count:\s+(\d+)", "simd": r"simd_size:\s+(\d+)", "spill_size": r"spill_size:\s+(\d+)"}
# Parts of the names of the built-in functions that stand for these instructions in SPIR-V.
_DPAS = (b"matrix_mad", b"SubgroupMatrixMultiplyAccumulate")
_BLOCK_READ = (b"2d_block_read", b"Subgroup2DBlockLoad")


@dataclass(frozen=True)
class Native:
    """What the offline compiler made of one kernel."""

    # Registers a thread, lanes a thread.
    grf: int
    simd: int
    # The number in the compiler's spill warning; 0 without one.
    spills: int
    # Symbols that it left unresolved although it returned success: such code cannot be loaded.
    undefined: tuple[str, ...]
    # Whether matrix instructions and 2D block reads are asked for.
    dpas: bool
    block_read: bool
    # The compiler's message where it failed.
    failure: str | None = None


@functools.cache
def version() -> str:
    """The version of ocloc and its code generator."""
    listing = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Version} ", "intel-opencl-icd", "libigc1"],
        capture_output=True,
        text=True,
        check=False,
    )
    return listing.stdout.strip()


def compile_native(spirv: bytes, device: str, flags: str, cache: pathlib.Path) -> Native:
    """Compile a module of one kernel for `device` ("pvc", "acm-g10"), or take it from `cache`."""
    key = hashlib.sha256(spirv + f"{device} {flags} {version()} 1".encode()).hexdigest()
    stored = cache / f"{key}.json"
    if stored.exists():
        facts = json.loads(stored.read_text())
        return Native(**{**facts, "undefined": tuple(facts["undefined"])})
    native = _compile(spirv, device, flags)
    cache.mkdir(parents=True, exist_ok=True)
    partial = stored.with_suffix(f".{id(native)}")
    partial.write_text(json.dumps(asdict(native)))
    partial.replace(stored)
    return native


def _compile(spirv: bytes, device: str, flags: str) -> Native:
    dpas = any(name in spirv for name in _DPAS)
    block_read = any(name in spirv for name in _BLOCK_READ)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "kernel.spv")
        source.write_bytes(spirv)
        command = ["ocloc", "compile", "-file", str(source), "-spirv_input", "-device", device, "-output", "kernel"]
        command += ["-out_dir", folder, "-internal_options", " -cl-intel-allow-zebin"]
        if flags:
            command += ["-options", flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = done.stdout + done.stderr
        binaries = sorted(pathlib.Path(folder).glob("*.bin"))
        if done.returncode or not binaries:
            return Native(0, 0, 0, (), dpas, block_read, f"ocloc returned {done.returncode}: {log.strip()[-500:]}")
        read = _readelf("-Ws", "-p", ".ze_info", str(binaries[-1]))
    found = {name: int(m.group(1)) if (m := re.search(pattern, read)) else 0 for name, pattern in _FACTS.items()}
    warned = _SPILL.search(log)
    return Native(
        grf=found["grf"],
        simd=found["simd"],
        spills=int(warned.group(1)) if warned else found["spill_size"],
        undefined=_undefined(read),
        dpas=dpas,
        block_read=block_read,
    )


def _undefined(listing: str) -> tuple[str, ...]:
    rows = (line.split() for line in listing.splitlines() if " UND " in line)
    return tuple(sorted({row[-1] for row in rows if row[-1] != "UND"}))


def _readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", *arguments], capture_output=True, text=True, check=True).stdout
