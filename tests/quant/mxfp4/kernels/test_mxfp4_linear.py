"""mxfp4_linear and mxfp4_linear_a4: numbers beside a decoded weight, gradients, memory, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, Target, normal, refusal
from xpu_ports.common import gluonlib, tritonlib
from xpu_ports.common.device import use_architecture
from xpu_ports.common.dispatch import Op
from xpu_ports.quant.mxfp4 import format
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import (
    fragments,
    hopper_few,
    hopper_row,
    hopper_row_fp8,
    mxfp4_linear,
    mxfp4_linear_a4,
    row,
    tiles,
    triton,
)

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# One row, few, around a tile, many; N of one, a prime and one past a tile; one block of K, primes of them.
SIZES = pytest.mark.parametrize(
    "size",
    [
        dict(M=1, N=1, K=32),
        dict(M=1, N=37, K=1056),
        dict(M=2, N=5, K=96),
        dict(M=5, N=129, K=160),
        dict(M=16, N=33, K=416),
        dict(M=17, N=40, K=224),
        dict(M=70, N=131, K=96),
    ],
)


def weight_of(N: int, K: int) -> tuple[Tensor, Tensor]:
    """Blocks of different scales, all codes."""
    w = torch.randn(N, K // 32, 32) * K**-0.5 * 2.0 ** torch.randint(-3, 4, (N, K // 32, 1))
    return quantize(w.view(N, K))


@pytest.fixture(params=["", "nvidia"])
def elsewhere(request: pytest.FixtureRequest, target: Target) -> Iterator[None]:
    """The choices of kernel, tile and decoding that an architecture has, which may not be the one here."""
    if not request.param:
        yield
        return
    if target.backend == "triton" and not tritonlib.INTERPRETED:
        pytest.skip("only Triton's interpreter runs every architecture's tiles")
    with use_architecture(request.param):
        yield


@pytest.fixture
def linear(run: Runner) -> Runner:
    """The reference's sums are the library's, which need not be rounded once."""
    run.rounds_once = False
    run.sums_on_matrix_units = True
    return run


@pytest.fixture
def taken(run: Runner, target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where kernels for Hopper run: of each call that the one for few rows takes, the rows."""
    why = "another back end" if target.backend != "triton" else gluonlib.refuses(torch.device(target.device))
    if why is not None:
        pytest.skip(f"not here: {why}")
    # Calls alike are made again without the wrapper.
    run.op.forget()
    rows: list[int] = []
    launch = hopper_few.launch

    def counted(x: Tensor, *args: Any) -> None:
        rows.append(x.numel() // x.shape[-1])
        launch(x, *args)

    monkeypatch.setattr(hopper_few, "launch", counted)
    return rows


class Both:
    """What holds for both ops."""

    op: Op

    @FLOATS
    @SIZES
    @pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
    def test_sizes(self, linear: Runner, size: dict, biased: bool, dtype: torch.dtype) -> None:
        M, N, K = size.values()
        bias = torch.randn(N).to(dtype) if biased else None
        linear(torch.randn(M, K).to(dtype), *weight_of(N, K), bias)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, linear: Runner, layout: str) -> None:
        y = linear(normal(2, 4, 64, dtype=torch.bfloat16, layout=layout), *weight_of(6, 64))
        assert y.shape == (2, 4, 6)

    def test_rows_of_a_wider_weight(self, linear: Runner) -> None:
        packed, scale = weight_of(12, 192)
        linear(torch.randn(3, 96).bfloat16(), packed[::2, 48:], scale[::2, 3:])

    @pytest.mark.parametrize(("shape", "N"), [((0, 64), 3), ((2, 0, 64), 3), ((64,), 3), ((2, 64), 0)], ids=str)
    def test_few_rows(self, linear: Runner, shape: tuple, N: int) -> None:
        assert linear(torch.randn(shape), *weight_of(N, 64)).shape == (*shape[:-1], N)

    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize("M", [1, 3, 20])
    def test_every_code_and_scale(self, linear: Runner, M: int) -> None:
        """One element of each row of x counts: a column of the weight, as exact as bf16."""
        # One row of so many columns has a kernel of its own.
        K = 1024 if M == 1 else 512
        codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(2).repeat(8)[None].expand(254, -1).contiguous()
        packed = codes.view(254, 4096)[:, : K // 2]
        scale = torch.arange(254, dtype=torch.uint8)[:, None].expand(254, K // 32)
        scale = scale.contiguous()
        x = torch.zeros(M, K, dtype=torch.bfloat16)
        columns = [K - 19, 14, 479][:M]
        x[torch.arange(len(columns)), columns] = 1.0
        # From 6 x 2^125 fp32 overflows; below 2^-126 bf16 is denormal, which some matrix units take for zero.
        rows = slice(2, 253)
        y = linear(x, packed[rows].contiguous(), scale[rows].contiguous())
        w = dequantize(packed[rows], scale[rows], torch.bfloat16)
        assert torch.equal(y[: len(columns)].T, w[:, columns])

    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize("M", [1, 3, 20])
    def test_a_scale_of_nan(self, linear: Runner, M: int) -> None:
        """It is a NaN to every row of x, also where x is zero, and to one output alone."""
        packed, scale = weight_of(9, 96)
        scale[4, 1] = 255
        x = torch.randn(M, 96).bfloat16()
        x[:, 32:64] = 0
        y = linear(x, packed, scale)
        assert y.isnan().nonzero().tolist() == [[m, 4] for m in range(M)]

    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize("cut", [None, row.Cut(4, 1, False), row.Cut(4, 2, True), row.Cut(2, 2, False)], ids=str)
    @pytest.mark.parametrize(("N", "K"), [(1, 1024), (37, 3072)])
    def test_one_row(
        self, linear: Runner, monkeypatch: pytest.MonkeyPatch, N: int, K: int, cut: row.Cut | None
    ) -> None:
        """Three turns over four warps, or six over two; the last tile of outputs not whole, or two of them."""
        if cut:
            monkeypatch.setattr(row, "cut", lambda *_: cut)
        packed, scale = weight_of(N, K)
        linear(torch.randn(1, K).bfloat16(), packed, scale, torch.randn(N).bfloat16())

    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize("value", [1e12, math.inf, math.nan])
    def test_one_row_with_numbers_too_large(self, linear: Runner, value: float) -> None:
        """The kernel for one row multiplies x by 2^100 and starts again where that is too much."""
        packed, scale = weight_of(37, 1024)
        scale[4, 1] = 255
        x = torch.randn(1, 1024).bfloat16()
        x[0, 32:64] = 0
        assert linear(x, packed, scale).isnan().nonzero().tolist() == [[0, 4]]
        x[0, 7] = value
        linear(x, packed, scale)

    @pytest.mark.parametrize("value", [1.0, 1e12, math.inf])
    @pytest.mark.parametrize(
        ("N", "K"), [(1, 2048), (37, 3072), (1101, 4096), (131, 5120), (24, 8192), (1, 2304), (131, 2560), (1101, 2816)]
    )
    def test_one_row_on_hopper(self, linear: Runner, target: Target, N: int, K: int, value: float) -> None:
        """All weights are asked for at once; scales and an x that the products do not take."""
        packed, scale = weight_of(N, K)
        x, bias = torch.randn(1, K).bfloat16(), torch.randn(N).bfloat16()
        kernel = hopper_row_fp8 if K % 1024 else hopper_row
        if not kernel.takes(*(t.to(target.device) for t in (x, packed, scale, bias))):
            pytest.skip(f"not here: {gluonlib.refuses(torch.device(target.device))}")
        linear(x, packed, scale, bias)
        # Numbers of very different sizes in one block.
        x[0, 40], x[0, 41] = 3e4, 1e-5
        linear(x, packed, scale)
        x[0, 7] = value
        scale[N // 2, 1], scale[0, 5], scale[N - 1, K // 32 - 1] = 255, 200, 0
        linear(x, packed, scale)

    @pytest.mark.parametrize("value", [1.0, 1e30, math.inf])
    @pytest.mark.parametrize(
        ("M", "N", "K"),
        [(2, 131, 2048), (3, 48, 3072), (8, 1101, 4096), (9, 131, 8192), (16, 1101, 2048), (16, 131, 4096)],
    )
    def test_few_rows_on_hopper(self, linear: Runner, taken: list[int], M: int, N: int, K: int, value: float) -> None:
        """Weights by copies some turns ahead; rows of a wider x; scales and an x that the products do not take."""
        packed, scale = weight_of(N, K)
        x = torch.randn(M, K + 8).bfloat16()[:, 8:]
        linear(x, packed, scale, torch.randn(N).bfloat16())
        x[M - 1, 7] = value
        scale[N // 2, 1], scale[0, 5], scale[N - 1, K // 32 - 1] = 255, 200, 0
        linear(x, packed, scale)
        assert taken == [M, M]

    @pytest.mark.parametrize(("M", "tiles"), [(5, 1), (5, 4), (5, 6), (12, 1), (12, 2), (12, 3)])
    def test_cuts_of_few_rows_on_hopper(
        self, linear: Runner, taken: list[int], monkeypatch: pytest.MonkeyPatch, M: int, tiles: int
    ) -> None:
        """The last program's outputs are some of the one before it."""
        monkeypatch.setattr(hopper_few, "cut", lambda *_: tiles)
        linear(torch.randn(M, 2560).bfloat16(), *weight_of(131, 2560))
        assert taken == [M]

    def test_views_on_hopper(self, linear: Runner, taken: list[int]) -> None:
        """Where one stride walks the rows, which begin at multiples of 16 bytes; others are not the kernel's."""
        wide, weight = torch.randn(2, 3, 2056).bfloat16(), weight_of(48, 2048)
        linear(wide[..., 8:], *weight)
        linear(wide[:, :2, 8:], *weight)
        linear(wide[:, 1, :2048], *weight)
        linear(wide[..., 4:2052], *weight)
        linear(wide[:, :1, :2048].expand(2, 4, 2048)[0], *weight)
        assert taken == ([6, 2, 4] if self.op is mxfp4_linear else [6, 4, 2, 6, 4])

    @FLOATS
    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize(("M", "N", "K"), [(1, 33, 1056), (12, 33, 96), (18, 5, 288), (70, 33, 96)])
    def test_other_architectures(self, linear: Runner, M: int, N: int, K: int, dtype: torch.dtype) -> None:
        linear(torch.randn(M, K).to(dtype), *weight_of(N, K), torch.randn(N).to(dtype))

    @pytest.mark.parametrize("M", [1, 3, 18])
    def test_without_matrix_units(self, linear: Runner, target: Target, M: int) -> None:
        if target.backend == "triton" and not tritonlib.INTERPRETED:
            pytest.skip("only Triton's interpreter runs every architecture's tiles")
        with use_architecture("arc-a"):
            linear(torch.randn(M, 96).bfloat16(), *weight_of(33, 96), torch.randn(33).bfloat16())

    @FLOATS
    @pytest.mark.usefixtures("elsewhere")
    @pytest.mark.parametrize("split", [1, 2, 4])
    def test_parts_of_the_columns(
        self, linear: Runner, monkeypatch: pytest.MonkeyPatch, split: int, dtype: torch.dtype
    ) -> None:
        """Of five blocks; of four parts the last has nothing."""
        monkeypatch.setattr(tiles, "plan", lambda *_: tiles.Tile(16, 32, 64, 4, split=split))
        monkeypatch.setattr(fragments, "tile", lambda *_: fragments.Tile(32, 4, split))
        linear(torch.randn(18, 160).to(dtype), *weight_of(33, 160), torch.randn(33).to(dtype))

    @FLOATS
    def test_decoded_by_dot_scaled(
        self, linear: Runner, target: Target, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        if target.backend == "triton" and not tritonlib.INTERPRETED:
            pytest.skip("linear layers have it on no device, experts' rows do on NVIDIA's")
        monkeypatch.setattr(tiles, "plan", lambda *_: tiles.Tile(16, 64, 64, 4, split=2, scaled=True))
        linear(torch.randn(18, 160).to(dtype), *weight_of(33, 160), torch.randn(33).to(dtype))

    @FLOATS
    def test_decoded_to_memory(self, linear: Runner, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        """For many rows, here for all, ten outputs at a time."""
        monkeypatch.setattr(triton, "LARGEST_TILED", 0)
        monkeypatch.setattr(fragments, "LARGEST_TILED", 0)
        monkeypatch.setattr(triton, "_DECODED_AT_ONCE", 13 * 96)
        monkeypatch.setattr(triton, "_ALIGNED", 5)
        linear(torch.randn(2, 9, 96).to(dtype), *weight_of(33, 96), torch.randn(33).to(dtype))

    def test_not_a_number_stays_in_its_row(self, linear: Runner) -> None:
        x = torch.randn(3, 64)
        x[1, 7] = math.nan
        assert linear(x, *weight_of(5, 64)).isnan().any(1).tolist() == [False, True, False]

    @pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
    def test_gradients(self, biased: bool) -> None:
        """Of x and bias; the weight is never kept in a decoded form. W4A4 passes the rounding straight."""
        x, (packed, scale) = torch.randn(2, 3, 64, requires_grad=True), weight_of(5, 64)
        bias = torch.randn(5, requires_grad=True) if biased else None
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = self.op(x, packed, scale, bias)
        assert {t.dtype for t in kept} == {torch.uint8}
        y.square().sum().backward()
        torch.testing.assert_close(x.grad, 2 * y.detach() @ dequantize(packed, scale, torch.float32))
        if bias is not None:
            torch.testing.assert_close(bias.grad, 2 * y.detach().sum((0, 1)))

    @pytest.mark.parametrize(
        ("x", "packed", "scale", "why"),
        [
            (
                torch.randn(3, 64),
                torch.zeros(5, 48).byte(),
                torch.zeros(5, 3).byte(),
                r"x \(3, 64\) and packed \(5, 48\)",
            ),
            (torch.randn(3, 64), torch.zeros(5, 32).byte(), torch.zeros(5, 4).byte(), r"scale \(5, 4\)"),
            (torch.randn(3, 64), torch.zeros(2, 5, 32).byte(), torch.zeros(2, 5, 2).byte(), r"packed \(2, 5, 32\)"),
            (torch.randn(3, 64), torch.zeros(5, 32), torch.zeros(5, 2).byte(), "packed has .* torch.float32"),
        ],
    )
    def test_does_not_fit(self, x: Tensor, packed: Tensor, scale: Tensor, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            self.op(x, packed, scale)

    def test_compiled(self) -> None:
        x, (packed, scale) = torch.randn(3, 64), weight_of(5, 64)
        compiled = torch.compile(self.op, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, packed, scale), self.op(x, packed, scale))


@pytest.mark.op("mxfp4_linear")
class TestA16(Both):
    op = mxfp4_linear


@pytest.mark.op("mxfp4_linear_a4")
class TestA4(Both):
    op = mxfp4_linear_a4


def test_a16_is_the_decoded_weight() -> None:
    x, (packed, scale) = torch.randn(3, 64, dtype=torch.float64), weight_of(5, 64)
    assert torch.equal(mxfp4_linear(x, packed, scale), F.linear(x, dequantize(packed, scale, torch.float64)))


def test_a4_rounds_x() -> None:
    x, (packed, scale) = torch.randn(3, 64, dtype=torch.float64), weight_of(5, 64)
    y = mxfp4_linear_a4(x, packed, scale)
    rounded = dequantize(*quantize(x), torch.float64)
    assert torch.equal(y, F.linear(rounded, dequantize(packed, scale, torch.float64)))
    error = (y - mxfp4_linear(x, packed, scale)).norm() / y.norm()
    assert 0.01 < error < 0.3, "x was not rounded, or badly"


def test_a4_where_the_rounded_x_is_no_float16() -> None:
    """65504 is rounded to 65536; the product with a small weight is a number."""
    x = torch.zeros(1, 32, dtype=torch.float16)
    x[0, 0] = 65504.0
    packed, scale = quantize(torch.full((1, 32), 2.0**-6))
    assert mxfp4_linear_a4(x, packed, scale).item() == 1024.0


def test_the_weight_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "_DECODED_AT_ONCE", 200)
    x, (packed, scale) = torch.randn(3, 64), weight_of(50, 64)
    largest = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: largest.append(w.numel()) or linear(x, w, b))
    y = mxfp4_linear(x, packed, scale, torch.arange(50.0))
    assert max(largest) <= 200
    torch.testing.assert_close(y, linear(x, dequantize(packed, scale, torch.float32), torch.arange(50.0)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(packed=torch.zeros(5, 32).byte().view(torch.int8)), "dtypes torch.int8 and torch.uint8, expected bytes"),
        (dict(x=torch.randn(3, 0)), "there are no columns"),
        (dict(packed=torch.zeros(32, 5).byte().T), "the last dimension of packed or scale is not contiguous"),
        (dict(packed=torch.zeros(5, 34).byte()[:, :32]), "not multiples of 4"),
        (dict(x=torch.randn(3, 64).double()), "dtype torch.float64"),
        (dict(x=torch.randn(64, 3).T), "the last dimension has stride 3"),
        (dict(bias=torch.randn(5).half()), "bias has shape (5,) and dtype torch.float16"),
    ],
    ids=["bytes", "empty", "layout", "alignment", "dtype", "strides", "bias"],
)
def test_refusals(change: dict, why: str) -> None:
    given = {"x": torch.randn(3, 64), "packed": torch.zeros(5, 32).byte(), "scale": torch.zeros(5, 2).byte()}
    assert not refusal(mxfp4_linear, **given)
    assert why in refusal(mxfp4_linear, **given | change)
