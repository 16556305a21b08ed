"""MXFP4: blocks of 32 four-bit numbers that share a power of two, as bytes.

    w[32 b + i] = value[code[32 b + i]] 2^(scale[b] - 127)

A code is sign, two bits of exponent, one of mantissa (E2M1): +-{0, 0.5, 1, 1.5, 2, 3, 4, 6}. A byte holds two of them,
the even element in its low bits. A scale is the exponent alone (E8M0); 255 makes its block NaN.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.3.3, 5.4.1 and 6.3; the
rules "even" and "rceil" as in AMD Quark and compressed-tensors, and in NVIDIA's recipes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Elements that share a scale.
BLOCK = 32
BIAS = 127
NAN_SCALE = 255
# Of the scales written: 6 x 2^125 is the last largest value of a block that fp32 and bf16 hold.
LARGEST_SCALE = 252
SCALE_RULES = ("even", "floor", "rceil")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# What else bytes are stored as; DeepSeek-V4's codes are int8.
_PACKED = (torch.int8, torch.float4_e2m1fn_x2)
_SCALES = (torch.float8_e8m0fnu,)

# Elements that are converted at a time: what is needed in between stays within a few MB.
_ENCODED_AT_ONCE = 2**18
_DECODED_AT_ONCE = 2**19


def quantize(w: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    """Round to MXFP4: a scale for each block from its largest magnitude, then each element to the nearest code.

    Ties go to the code whose mantissa is even, magnitudes beyond 6 scales to 6 scales; the sign stays with a zero. A
    block of zeros gets scale 0, one with NaN or infinity scale 255 and codes 0. fp64 is not rounded to fp32 first.

    Args:
        w: [..., K], floating point; K is a multiple of 32.
        scale_rule: the scale X of a block whose largest magnitude is m. "even": 2^(floor(log2 m) - 2), with m rounded
            to the mantissa of E2M1 before, as compressed-tensors and Quark write; "floor": without rounding m, as the
            specification says; "rceil": the least X with m <= 6 X, as ModelOpt writes.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], contiguous.

    Raises:
        ValueError: K is not a multiple of 32, or the rule or the dtype is none of these.
    """
    if w.dim() == 0 or w.shape[-1] % BLOCK:
        raise ValueError(f"shape {tuple(w.shape)}: the last dimension is not a multiple of {BLOCK}")
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"no scale rule is named {scale_rule!r}; known: {', '.join(SCALE_RULES)}")
    if w.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype {w.dtype} is not one of float16, bfloat16, float32, float64")
    *leading, K = w.shape
    packed = torch.empty((*leading, K // 2), dtype=torch.uint8, device=w.device)
    scale = torch.empty((*leading, K // BLOCK), dtype=torch.uint8, device=w.device)
    blocks = w.detach().reshape(-1, BLOCK)
    packed_blocks, scales = packed.view(-1, BLOCK // 2), scale.view(-1)
    step = _ENCODED_AT_ONCE // BLOCK
    for start in range(0, blocks.shape[0], step):
        some = slice(start, start + step)
        _encode(blocks[some], scale_rule, packed_blocks[some], scales[some])
    return packed, scale


def _encode(x: Tensor, scale_rule: str, packed: Tensor, scale: Tensor) -> None:
    """Blocks [n, 32] into packed [n, 16] and scale [n]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide.abs()
    largest = y.amax(-1)
    finite = largest.isfinite()
    # largest = mantissa 2^exponent, the mantissa in [0.5, 1): exact, subnormal numbers included.
    mantissa, exponent = torch.frexp(largest)
    if scale_rule == "even":
        exponent = exponent + (mantissa >= 1.75 / 2)
    elif scale_rule == "rceil":
        exponent = exponent + (mantissa > 6.0 / 8)
    byte = (exponent + (BIAS - 3)).clamp_(0, LARGEST_SCALE).masked_fill_((largest == 0) | ~finite, 0)
    # 2^(127 - byte), whose own bits these are; the products are exact or far below a half.
    inverse = ((254 - byte) << 23).view(torch.float32).to(wide.dtype)
    y *= inverse[:, None]
    # The codes of [0, 2], [2, 4] and [4, 6] are 0.5, 1 and 2 apart: each part is rounded on its own grid.
    codes = y.clamp(max=2).mul_(2).round_()
    codes += y.clamp(2, 4).round_()
    codes += y.clamp_(4, 6).mul_(0.5).round_()
    codes -= 4
    code = codes.to(torch.uint8)
    code += wide.signbit().view(torch.uint8) << 3
    # What a NaN converts to is not defined.
    code *= finite[:, None]
    scale.copy_(byte.masked_fill_(~finite, NAN_SCALE))
    # Two codes as one little-endian number, high * 256 + low; a conversion to uint8 keeps the low bits.
    pairs = code.view(torch.int16)
    packed.copy_((pairs >> 4).bitwise_or_(pairs))


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that MXFP4 bytes stand for.

    Args:
        packed: [..., K/2], uint8 (or int8, float4_e2m1fn_x2).
        scale: [..., K/32], uint8 (or float8_e8m0fnu).
        dtype: the result's. bfloat16, float32 and float64 hold every number but those beyond their range, which are
            infinite; float16 rounds what is smaller than 2^-14 and is infinite from 65520.

    Returns:
        [..., K], contiguous.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    K = check(packed, scale)
    w = torch.empty((*packed.shape[:-1], K), dtype=dtype, device=packed.device)
    if w.numel() == 0:
        return w
    rows = w.view(-1, K)
    for some, part in dequantized_rows(packed.reshape(-1, K // 2), scale.reshape(-1, K // BLOCK), dtype):
        rows[some] = part
    return w


def dequantized_rows(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Decode a matrix a few rows at a time: (which rows, the rows [n, K]), in memory that the next ones overwrite.

    Args:
        packed, scale, dtype: as in `dequantize`, in two dimensions.
    """
    packed, scale = as_bytes(packed), as_bytes(scale)
    N, K = packed.shape[0], 2 * packed.shape[1]
    if N == 0 or K == 0:
        return
    pairs, scales = _tables(torch.float32 if dtype == torch.float16 else dtype, packed)
    step = min(N, max(1, _DECODED_AT_ONCE // K))
    index = torch.empty((step, K // 2), dtype=torch.int32, device=packed.device)
    values = torch.empty(step * K // 2, dtype=pairs.dtype, device=packed.device)
    for start in range(0, N, step):
        some = slice(start, min(start + step, N))
        n = some.stop - start
        index[:n] = packed[some]
        found = values[: n * K // 2]
        torch.index_select(pairs, 0, index[:n].view(-1), out=found)
        part = found.view(scales.dtype).view(n, K // BLOCK, BLOCK)
        part *= scales.index_select(0, scale[some].reshape(-1).int()).view(n, -1, 1)
        yield some, part.view(n, K).to(dtype)


def check(packed: Tensor, scale: Tensor) -> int:
    """The number of columns K of packed numbers and their scales.

    Raises:
        ValueError: the shapes or dtypes do not belong together.
    """
    for name, t, others in (("packed", packed, _PACKED), ("scale", scale, _SCALES)):
        if t.dim() == 0 or t.dtype not in (torch.uint8, *others):
            raise ValueError(f"{name} has shape {tuple(t.shape)} and dtype {t.dtype}, expected [..., K], torch.uint8")
    if packed.shape[-1] % (BLOCK // 2) or scale.shape != (*packed.shape[:-1], packed.shape[-1] * 2 // BLOCK):
        raise ValueError(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} are not [..., K/2] and [..., K/{BLOCK}]"
        )
    return 2 * packed.shape[-1]


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of codes or scales: their own dtypes convert numbers, not bytes."""
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


_kept: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}


def _tables(dtype: torch.dtype, like: Tensor) -> tuple[Tensor, Tensor]:
    """(the two numbers of each byte, as one number of twice the size; the scale of each byte), where `like` is."""
    if type(like) not in (Tensor, torch.nn.Parameter):
        # A compiler's or `FakeTensorMode`'s tensors, which do not mix with others.
        return _make_tables(dtype, like.device)
    kept = _kept.get((dtype, like.device))
    if kept is None:
        kept = _kept[dtype, like.device] = _make_tables(dtype, like.device)
    return kept


def _make_tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    values = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    pairs = torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], dtype=dtype)
    scales = torch.tensor([*(math.ldexp(1.0, byte - BIAS) for byte in range(NAN_SCALE)), math.nan], dtype=torch.float64)
    pairs = pairs.view({2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]).flatten()
    return pairs.to(device), scales.to(dtype).to(device)
