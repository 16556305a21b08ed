"""Rounding inside a kernel, kept by every compiler."""

from __future__ import annotations

from xpu_ports.common.tritonlib import tl, triton


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x in DTYPE, to be used in fp32 again: as rounded, not as it was.

    Intel's compiler (seen with Triton 3.3) takes a conversion to 16 bits and back for nothing and drops both. It does
    not see through a bitcast.
    """
    y = x.to(DTYPE)
    if DTYPE.primitive_bitwidth == 16:
        y = y.to(tl.uint16, bitcast=True).to(DTYPE, bitcast=True)
    return y
