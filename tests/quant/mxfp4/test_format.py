"""The MXFP4 codec: every code, every bf16 number at every scale, other people's bytes, and what has no number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from xpu_ports.quant.mxfp4 import format
from xpu_ports.quant.mxfp4.format import BLOCK, LARGEST_SCALE, SCALE_RULES, dequantize, quantize

ROOT = Path(__file__).resolve().parents[3]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
RULES = pytest.mark.parametrize("rule", SCALE_RULES)
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def all_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def codes_of(packed: Tensor) -> Tensor:
    """[..., K/2] bytes to [..., K] codes, low bits first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def nearest(y: Tensor) -> Tensor:
    """The codes of magnitudes in scales, fp64: by distance, ties to the even code, beyond 6 to 6."""
    distance = (y.abs().clamp(max=6)[..., None] - VALUES).abs()
    closest = distance == distance.amin(-1, keepdim=True)
    # Two codes are equally close at most, and neighbours: one of them is even.
    even = closest & (torch.arange(8) % 2 == 0)
    chosen = torch.where(even.any(-1), even.byte().argmax(-1), closest.byte().argmax(-1))
    return (chosen + 8 * y.signbit()).to(torch.uint8)


# ------------------------------------------------------------------------------------------------------------- decode


@DTYPES
def test_every_code_at_every_scale(dtype: torch.dtype) -> None:
    """All 256 x 16, in both halves of a byte."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16)
    w = dequantize(codes, scale, dtype)
    assert (w.shape, w.dtype) == ((256, 512), dtype)
    code = codes_of(codes).long()
    powers = torch.tensor([math.ldexp(1.0, e - 127) for e in range(255)] + [math.nan], dtype=torch.float64)
    exact = VALUES[code & 7] * (1 - 2 * (code >> 3)) * powers[:, None]
    torch.testing.assert_close(w, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(w.signbit()[:255], (code >> 3).bool()[:255]), "zeros lost their sign"
    if dtype == torch.bfloat16:
        # Everything but what overflows: 2^128 and more.
        finite = exact.abs() < 2.0**128
        assert torch.equal(w.double()[finite], exact[finite])


def test_the_even_element_is_low() -> None:
    """The first bytes that compressed-tensors writes for these numbers."""
    packed, scale = quantize(torch.tensor([6.0, -6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5] + [0.0] * 24))
    assert packed[:4].tolist() == [0xF7, 0x20, 0x42, 0x64]
    assert scale.tolist() == [127]


def test_bytes_of_their_own_dtypes() -> None:
    packed, scale = quantize(torch.randn(4, 64))
    w = dequantize(packed, scale, torch.float32)
    assert torch.equal(dequantize(packed.view(torch.int8), scale.view(torch.float8_e8m0fnu), torch.float32), w)
    assert torch.equal(dequantize(packed.view(torch.float4_e2m1fn_x2), scale, torch.float32), w)


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, scale = quantize(torch.randn(37, 96))
    whole = dequantize(packed, scale, torch.float32)
    monkeypatch.setattr(format, "_DECODED_AT_ONCE", 500)
    parts = [(rows, part.clone()) for rows, part in format.dequantized_rows(packed, scale, torch.float32)]
    assert max(part.numel() for _, part in parts) <= 500
    assert torch.equal(torch.cat([part for _, part in parts]), whole)
    assert [row for rows, _ in parts for row in range(37)[rows]] == list(range(37))


# ------------------------------------------------------------------------------------------------------------- encode


# The largest bf16 magnitude, in scales, that still has this scale.
LEADERS = {"even": 7.0 - 2**-5, "floor": 8.0 - 2**-5, "rceil": 6.0}


@RULES
def test_every_bfloat16_at_every_scale(rule: str) -> None:
    """A block's first element sets its scale; the others are all numbers that leave it alone."""
    every = all_bfloat16()
    every = every[every.isfinite()]
    for byte in range(LARGEST_SCALE + 1):
        X = math.ldexp(1.0, byte - 127)
        leader = min(LEADERS[rule] * X, torch.finfo(torch.bfloat16).max)
        w = every[every.abs().double() <= leader]
        blocks = torch.zeros(-(-w.numel() // 31) * 31, dtype=torch.bfloat16)
        blocks[: w.numel()] = w
        blocks = torch.cat(
            [torch.full((blocks.numel() // 31, 1), leader, dtype=torch.bfloat16), blocks.view(-1, 31)], 1
        )
        packed, scale = quantize(blocks, rule)
        assert (scale == byte).all(), f"scale {byte}: {scale.unique().tolist()}"
        assert torch.equal(codes_of(packed), nearest(blocks.double() / X)), f"scale {byte}"


@RULES
def test_scales(rule: str) -> None:
    """Every finite bf16 number as the largest of a block, beside exact arithmetic."""
    every = all_bfloat16()
    largest = every[every.isfinite() & (every > 0)]
    _, scale = quantize(torch.cat([largest[:, None], torch.zeros(largest.numel(), 31).bfloat16()], 1), rule)
    expected = []
    for m in largest.double().tolist():
        mantissa, exponent = math.frexp(m)
        if rule == "rceil":
            # The least power of two with m <= 6 X, from one that is too small for sure.
            e = exponent - 5
            while m > 6 * math.ldexp(1.0, e):
                e += 1
        else:
            e = exponent - 1 - 2 + (rule == "even" and mantissa >= 0.875)
        expected.append(min(max(e + 127, 0), LARGEST_SCALE))
    assert scale.flatten().tolist() == expected


@DTYPES
@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)),
        *((-0.25, 8), (-0.75, 10), (-1.25, 10), (-1.75, 12), (-2.5, 12), (-3.5, 14), (-5.0, 14)),
        *((0.0, 0), (-0.0, 8), (-1e-3, 8), (6.5, 7), (-6.5, 15)),
    ],
)
def test_ties_zeros_and_saturation(number: float, code: int, dtype: torch.dtype) -> None:
    packed, scale = quantize(torch.tensor([number, 6.0, -4.0] + [0.0] * 29, dtype=dtype))
    assert (int(packed[0] & 15), int(scale)) == (code, 127)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, torch.int32), (torch.float64, torch.int64), (torch.float16, torch.int16)]
)
def test_next_to_a_tie(dtype: torch.dtype, bits: torch.dtype) -> None:
    """One unit in the last place decides; an intermediate rounding would lose it."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    for step in (-1, 1):
        w = torch.zeros(1, BLOCK, dtype=dtype)
        w[0, :7], w[0, 7] = (ties.view(bits) + step).view(dtype), 6.0
        packed, _ = quantize(w)
        assert codes_of(packed)[0, :7].tolist() == [i + (step > 0) for i in range(7)]


@RULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_without_a_number_is_marked(bad: float, dtype: torch.dtype, rule: str) -> None:
    w = torch.randn(3, 96).to(dtype)
    w[1, 40] = bad
    packed, scale = quantize(w, rule)
    assert (scale == 255).nonzero().tolist() == [[1, 1]]
    decoded = dequantize(packed, scale, dtype)
    assert decoded.isnan().nonzero().tolist() == [[1, k] for k in range(32, 64)]
    assert not packed[1, 16:32].any(), "the codes of such a block are not defined"


@DTYPES
def test_zeros(dtype: torch.dtype) -> None:
    packed, scale = quantize(torch.zeros(2, 64, dtype=dtype))
    assert not packed.any()
    assert not scale.any()
    assert torch.equal(dequantize(packed, scale, dtype), torch.zeros(2, 64, dtype=dtype))


def test_the_ends_of_a_dtype() -> None:
    """float16 above 57344, where the rounded largest number is no float16; the smallest and largest of others."""
    packed, scale = quantize(torch.tensor([57344.0, -65504.0] + [0.0] * 30, dtype=torch.float16))
    assert (scale.tolist(), packed[0].item()) == ([127 + 14], 0xE6)
    assert dequantize(packed, scale, torch.float32)[:2].tolist() == [65536.0, -65536.0]
    tiny = torch.tensor([2.0**-24, -(2.0**-23)] + [0.0] * 30, dtype=torch.float16)
    assert torch.equal(dequantize(*quantize(tiny), torch.float16), tiny)
    for dtype in (torch.bfloat16, torch.float32):
        largest = torch.finfo(dtype).max
        packed, scale = quantize(torch.tensor([largest, -largest / 2] + [0.0] * 30, dtype=dtype))
        assert scale.tolist() == [LARGEST_SCALE]
        assert dequantize(packed, scale, dtype)[:2].tolist() == [6 * 2.0**125, -(2.0**127)]
        smallest = torch.tensor([2.0**-133, 2.0**-128, -(2.0**-129)] + [0.0] * 29, dtype=dtype)
        packed, scale = quantize(smallest)
        assert (scale.tolist(), codes_of(packed)[:3].tolist()) == ([0], [0, 1, 8])


@RULES
def test_what_was_rounded_stays(rule: str) -> None:
    """Codes that reach 4 or 6, which all do but those of denormal blocks, come back as they were."""
    w = torch.randn(64, 128)
    once = dequantize(*quantize(w, rule), torch.float32)
    twice = dequantize(*quantize(once, rule), torch.float32)
    if rule == "even":
        # 3.5 and more is rounded to 4 and more: the scale is that of the numbers before.
        assert torch.equal(once, twice)
    assert torch.equal(dequantize(*quantize(once.bfloat16(), rule), torch.float32), twice)


@DTYPES
def test_layouts_and_shapes(dtype: torch.dtype) -> None:
    w = torch.randn(6, 4, 64).to(dtype)
    packed, scale = quantize(w)
    assert (packed.shape, scale.shape) == ((6, 4, 32), (6, 4, 2))
    for view in (w.transpose(0, 1), w[::2], w[:, 1:3, 32:], w[0, 0]):
        got = quantize(view)
        expected = quantize(view.contiguous())
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(got, expected, strict=True))
    for shape in ((0, 64), (3, 0), (2, 0, 32)):
        empty = quantize(torch.zeros(shape, dtype=dtype))
        assert dequantize(*empty, dtype).shape == shape


def test_more_than_is_converted_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(50, 96)
    expected = quantize(w)
    monkeypatch.setattr(format, "_ENCODED_AT_ONCE", 7 * BLOCK)
    assert all(torch.equal(a, b) for a, b in zip(quantize(w), expected, strict=True))


@pytest.mark.parametrize(
    ("w", "rule", "why"),
    [
        (torch.zeros(3, 48), "even", r"shape \(3, 48\): the last dimension is not a multiple of 32"),
        (torch.tensor(1.0), "even", r"shape \(\)"),
        (torch.zeros(32), "ceil", "no scale rule is named 'ceil'; known: even, floor, rceil"),
        (torch.zeros(32, dtype=torch.int32), "even", "dtype torch.int32"),
    ],
)
def test_cannot_be_quantized(w: Tensor, rule: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        quantize(w, rule)


@pytest.mark.parametrize(
    ("packed", "scale", "why"),
    [
        (torch.zeros(3, 24), torch.zeros(3, 1), "packed has shape .* dtype torch.float32"),
        (
            torch.zeros(3, 16).byte(),
            torch.zeros(3, 1).to(torch.float8_e4m3fn),
            "scale has .* dtype torch.float8_e4m3fn",
        ),
        (torch.zeros(3, 24).byte(), torch.zeros(3, 1).byte(), r"packed \(3, 24\) and scale \(3, 1\)"),
        (torch.zeros(3, 32).byte(), torch.zeros(3, 1).byte(), r"packed \(3, 32\) and scale \(3, 1\)"),
        (torch.zeros(3, 16).byte(), torch.zeros(2, 1).byte(), r"packed \(3, 16\) and scale \(2, 1\)"),
    ],
)
def test_cannot_be_dequantized(packed: Tensor, scale: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dequantize(packed, scale, torch.float32)


# -------------------------------------------------------------------------------------------------------- other people


def trained() -> list[Tensor]:
    state = load_file(ROOT / "checkpoints" / "tiny-zamba2" / "model.safetensors")
    return [w for w in state.values() if w.dim() == 2 and w.shape[1] % BLOCK == 0][:12]


def heavy_tailed(dtype: torch.dtype) -> Tensor:
    return (torch.randn(64, 256) * torch.randn(64, 256).abs().add(0.1).pow(-2) * 0.01).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_writes_the_same(dtype: torch.dtype) -> None:
    """Scales and codes of its observer and its compressor, and its own reading of our bytes."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    for w in (torch.randn(64, 256).to(dtype), heavy_tailed(dtype), *(w.to(dtype) for w in trained())):
        blocks = w.unflatten(-1, (-1, BLOCK))
        theirs, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), weights)
        state = MXFP4PackedCompressor.compress({"weight": w, "weight_scale": theirs}, scheme)
        packed, scale = quantize(w)
        assert torch.equal(scale, state["weight_scale"])
        assert torch.equal(packed, state["weight_packed"])
        read = MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, scheme)["weight"]
        assert torch.equal(read.float(), dequantize(packed, scale, torch.float32))


@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_the_other_rules(rule: str) -> None:
    """The specification's, and ceil(log2(amax / 6)) as it is computed in fp32, on the same weights."""
    for w in (torch.randn(64, 256), heavy_tailed(torch.float32), *(w.float() for w in trained())):
        blocks = w.unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(-1)
        exponent = amax.log2().floor() - 2 if rule == "floor" else (amax / 6).log2().ceil()
        exponent = torch.where(amax == 0, torch.tensor(-127.0), exponent)
        packed, scale = quantize(w, rule)
        assert torch.equal(scale, (exponent + 127).to(torch.uint8))
        y = blocks.double() * torch.ldexp(torch.tensor(1.0, dtype=torch.float64), -exponent)[..., None]
        assert torch.equal(codes_of(packed), nearest(y).flatten(-2))
