"""MXFP4 inside a kernel: codes and scales to fp32, in registers."""

from __future__ import annotations

from xpu_ports.common.tritonlib import tl, triton


@triton.jit
def code_pair(words, J: tl.constexpr):
    """Nibbles J and J + 4 of 32-bit words of eight codes, each where bf16 has sign, last exponent bits and mantissa.

    Read as two bf16 they are the numbers times 2^-126, the 0.5 a denormal one.
    """
    # Masks 0x01C001C0 and 0x80008000.
    if J == 0:
        return ((words << 6) & 0x01C001C0) | ((words << 12) & -0x7FFF8000)
    if J == 1:
        return ((words << 2) & 0x01C001C0) | ((words << 8) & -0x7FFF8000)
    if J == 2:
        return ((words >> 2) & 0x01C001C0) | ((words << 4) & -0x7FFF8000)
    return ((words >> 6) & 0x01C001C0) | (words & -0x7FFF8000)


@triton.jit
def multiplied_pair(words, J: tl.constexpr):
    """What `code_pair` gives, both shifts by one multiplication: where that runs beside the logic of other lanes."""
    # 2^12 + 2^6 or 2^8 + 2^2; of the nibble's eight bits so made the mask keeps four.
    if J >= 2:
        words = words >> 8
    if J % 2 == 0:
        return ((words & 0x000F000F) * 4160) & -0x7E3F7E40
    return ((words & 0x00F000F0) * 260) & -0x7E3F7E40


@triton.jit
def number(bits, DENORMALS: tl.constexpr):
    """A code where fp32 has sign, last exponent bits and mantissa (int32) to its number, fp32.

    DENORMALS: times 2^-126, for devices that surely compute with denormal numbers; it costs nothing.
    """
    if DENORMALS:
        return bits.to(tl.float32, bitcast=True)
    # The exponent's bias is 126 more; but of the codes 0 and 1 the mantissa bit, 0x00400000, counts a half alone.
    small = ((bits & 0x00400000) * 0xFC) | (bits & -0x80000000)
    return tl.where((bits & 0x01800000) == 0, small, bits + 0x3F000000).to(tl.float32, bitcast=True)


@triton.jit
def power(scale):
    """2^(scale - 127), fp32, of scale bytes; NaN of 255."""
    s = scale.to(tl.int32)
    bits = tl.where(s == 0, 0x00400000, tl.where(s == 255, 0x7FC00000, s << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def low_number(codes, DENORMALS: tl.constexpr):
    """The number of the low half of a byte, int32, in fp32."""
    x = number(((codes & 7) << 22) | ((codes & 8) << 28), DENORMALS)
    return x * 2.0**126 if DENORMALS else x


@triton.jit
def high_number(codes, DENORMALS: tl.constexpr):
    """The number of the high half of a byte, int32, in fp32."""
    x = number(((codes & 0x70) << 18) | ((codes & 0x80) << 24), DENORMALS)
    return x * 2.0**126 if DENORMALS else x
