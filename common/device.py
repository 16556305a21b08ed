"""Facts about devices that kernels are configured by, asked when needed and kept per device.

Configurations go by architecture, not by vendor: a tile that is right on a Data Center GPU Max spills on Arc.

Source of the facts: Intel's device properties as torch and Triton report them for Max 1550, B580 and A770, Intel's
product pages, NVIDIA's Hopper datasheet.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from xpu_ports.common import replay, tritonlib

ENVIRONMENT = "XPU_PORTS_ARCHITECTURE"


@dataclass(frozen=True)
class Architecture:
    """What a launch wrapper may ask about the device that it launches on."""

    name: str
    # Lanes of a warp (sub-group) in a kernel without a dot, and in one whose dot runs on the matrix units.
    lanes: int
    dot_lanes: int
    # Bytes of shared (local) memory that one program may use.
    shared_memory: int
    # Whether there are matrix units that tl.dot maps to (DPAS, tensor cores).
    matrix_units: bool
    fp64: bool
    # Compute units to fill: streaming multiprocessors, Xe cores; of a typical member, for persistent grids.
    units: int
    # Registers of a thread can be doubled by a launch option (Intel's GRF modes).
    has_grf_modes: bool


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("max", 32, 16, 128 * 1024, True, True, 64, True),
        Architecture("xe2", 32, 16, 128 * 1024, True, True, 20, True),
        Architecture("arc-a", 32, 32, 64 * 1024, False, False, 32, True),
        Architecture("nvidia", 32, 32, 227 * 1024, True, True, 132, False),
        Architecture("cpu", 32, 32, 64 * 1024, True, True, 2, False),
    )
}

# Parts of device names as the drivers report them, first match wins.
_XPU_NAMES = (
    ("max", ("data center gpu max", "ponte vecchio")),
    # Meteor Lake's reports plain "Arc(TM) Graphics": the same cores as Arc A, without matrix units.
    ("arc-a", ("arc(tm) a", "arc a", "arc(tm) pro a", "arc(tm) graphics", "dg2", "flex", "meteor", "arrow")),
    ("xe2", ("arc(tm) b", "arc b", "arc(tm) pro b", "battlemage", "lunar", "140v", "130v", "xe2", "panther")),
)

_OVERRIDE: contextvars.ContextVar[Architecture | None] = contextvars.ContextVar("architecture", default=None)


@contextlib.contextmanager
def use_architecture(name: str) -> Iterator[None]:
    """Configure launches for another architecture inside a `with` block: to compile for a device that is not here."""
    token = _OVERRIDE.set(_named(name))
    try:
        with replay.off():
            yield
    finally:
        _OVERRIDE.reset(token)


def architecture(device: torch.device) -> Architecture:
    """The architecture of a device; `use_architecture` and XPU_PORTS_ARCHITECTURE go first.

    Raises:
        ValueError: the environment names an architecture that does not exist.
    """
    override = _OVERRIDE.get()
    return override if override is not None else _detect(device.type, device.index or 0)


@functools.cache
def _detect(device_type: str, index: int) -> Architecture:
    named = os.environ.get(ENVIRONMENT)
    if named:
        return _named(named)
    if device_type == "cuda":
        return ARCHITECTURES["nvidia"]
    if device_type != "xpu":
        return ARCHITECTURES["cpu"]
    try:
        name = torch.xpu.get_device_name(index)
    except (AssertionError, RuntimeError):
        # No XPU here: a tensor without data asks what would be chosen for one.
        name = ""
    return from_xpu_name(name)


def from_xpu_name(name: str) -> Architecture:
    """The architecture of an Intel GPU by the name its driver reports; Xe2 for one not known here.

    Xe2 is the guess for new devices: every later Intel GPU has matrix units and at least its shared memory.
    """
    lowered = name.lower()
    for architecture_name, parts in _XPU_NAMES:
        if any(part in lowered for part in parts):
            return ARCHITECTURES[architecture_name]
    return ARCHITECTURES["xe2"]


def _named(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        raise ValueError(f"no architecture is named {name!r}; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def grf_options(registers: int, architecture: Architecture, version: tuple[int, int] | None = None) -> dict[str, str]:
    """The launch option that asks for 128 or 256 registers a thread, in the words of the installed Triton.

    Args:
        registers: 128 or 256.
        architecture: the one launched on; others than Intel's get no option.
        version: Triton's (major, minor); the installed one when left out.
    """
    if not architecture.has_grf_modes:
        return {}
    if (version or tritonlib.version()) >= (3, 6):
        return {"grf_mode": str(registers)}
    return {"grf_mode": {128: "small", 256: "large"}[registers]}
