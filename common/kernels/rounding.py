"""Rounding inside a kernel, kept by every compiler."""

from __future__ import annotations

from xpu_ports.common.tritonlib import tl, triton


@triton.jit
def rounded(x, pointer):
    """x (fp32) in the 16- or 32-bit dtype that `pointer` points to, for use in fp32: as rounded, not as it was.

    Intel's compiler (seen with Triton 3.3) takes a conversion to 16 bits and back for nothing and drops both. It does
    not see through a bitcast.
    """
    y = x.to(pointer.dtype.element_ty)
    if y.dtype != x.dtype:
        y = y.to(tl.uint16, bitcast=True).to(pointer.dtype.element_ty, bitcast=True)
    return y
