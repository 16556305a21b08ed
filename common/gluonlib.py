"""The one import of Gluon, Triton's language in which layouts, barriers and copies are said rather than chosen.

What is written in it runs on NVIDIA's Hopper alone and stands beside a kernel in Triton that runs everywhere: for the
few ops where a device that is measured on is held back by what Triton cannot say. Gluon is experimental, so it is used
with the versions that were tried; elsewhere the names are inert stand-ins, and `refuses` says why.
"""

from __future__ import annotations

import functools

import torch

from xpu_ports.common import tritonlib
from xpu_ports.common.device import architecture

# Triton's (major, minor), first and last, that the kernels compile with.
VERSIONS = ((3, 6), (3, 9))

_WHY_NOT: str | None = None
if not tritonlib.AVAILABLE:
    _WHY_NOT = tritonlib.WHY_NOT
elif tritonlib.INTERPRETED:
    _WHY_NOT = "Triton's interpreter does not run Gluon"
elif not VERSIONS[0] <= tritonlib.version() <= VERSIONS[1]:
    _WHY_NOT = f"Gluon of Triton {tritonlib.triton.__version__} was not tried: 3.6 to 3.9 were"
else:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError as error:
        _WHY_NOT = f"Gluon cannot be imported: {error}"
if _WHY_NOT is not None:
    gluon = gl = hopper = TensorDescriptor = tritonlib.Inert()  # type: ignore[assignment]

# Named in this way by Triton 3.9, and in that way by 3.6.
copy_async = getattr(hopper.async_copy, "async_load", None) or hopper.async_copy.async_copy_global_to_shared
copy_box = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
store_box = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(getattr(gl, "shared_memory_descriptor", None), "reinterpret"))


@gluon.jit
def seen_as(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """A buffer in shared memory as one of another dtype, shape and layout."""
    return buffer.reinterpret(dtype, shape, layout) if _REINTERPRETS else buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """So many barriers in shared memory, for `init_barriers`."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], hopper.mbarrier.MBarrierLayout())


@gluon.jit
def init_barriers(buffers, COUNT: gl.constexpr):
    """Make barriers of a tuple of buffers, COUNT each, those of one arrival; `hopper.fence_async_shared` comes next."""
    # In this order: warps wait for each other between two of one buffer.
    for i in gl.static_range(COUNT):
        for j in gl.static_range(len(buffers)):
            hopper.mbarrier.init(buffers[j].index(i), count=1)


def refuses(device: torch.device) -> str | None:
    """Why kernels for Hopper do not run on a device, or None."""
    if _WHY_NOT is not None:
        return _WHY_NOT
    if device.type != "cuda" or architecture(device).name != "nvidia":
        return f"{device} is not an NVIDIA GPU"
    return _refuses_capability(device.index or 0)


@functools.cache
def _refuses_capability(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    return None if capability == (9, 0) else f"compute capability {capability[0]}.{capability[1]}, not 9.0"
