"""The kernel for many rows on NVIDIA's Hopper: its numbers there. On any machine what all three compile to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.common.hopper_code import SHARED_MEMORY, hopper_code
from tests.common.ops import Runner, Target
from tests.quant.mxfp4.kernels.test_mxfp4_linear import weight_of
from xpu_ports.common import gluonlib
from xpu_ports.common.dispatch import use_backend
from xpu_ports.quant.mxfp4.format import dequantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper

# One row more than others take, a tile and one row more, two sizes of tiles; N of one and primes, K of a part of a
# step, of a step, of turns and a part of one; fewer and more tiles than there are multiprocessors.
SIZES = [
    dict(M=65, N=1, K=32),
    dict(M=96, N=131, K=64),
    dict(M=128, N=517, K=1056),
    dict(M=129, N=128, K=256),
    dict(M=257, N=2048, K=4096),
    dict(M=600, N=1001, K=544),
    dict(M=2048, N=129, K=96),
]


class OnHopper:
    """The op, which has to take the kernel as often as it is called, or the test is skipped."""

    def __init__(self, run: Runner, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.target = run, target
        self.taken = 0
        why = "another back end" if target.backend != "triton" else gluonlib.refuses(torch.device(target.device))
        if why is not None:
            pytest.skip(f"not here: {why}")
        run.rounds_once = False
        run.sums_on_matrix_units = True
        launch: Callable[..., None] = hopper.launch

        def counted(*args: Any) -> None:
            self.taken += 1
            launch(*args)

        monkeypatch.setattr(hopper, "launch", counted)
        monkeypatch.setattr(hopper, "BUSY", 0)

    def __call__(self, *args: Any, taken: int = 1) -> Any:
        before = self.taken
        y = self.run(*args)
        assert self.taken == before + taken
        return y


@pytest.fixture
def on_hopper(run: Runner, target: Target, monkeypatch: pytest.MonkeyPatch) -> OnHopper:
    return OnHopper(run, target, monkeypatch)


@pytest.mark.op("mxfp4_linear")
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(on_hopper: OnHopper, size: dict, biased: bool) -> None:
    M, N, K = size.values()
    on_hopper(torch.randn(M, K).bfloat16(), *weight_of(N, K), torch.randn(N).bfloat16() if biased else None)


@pytest.mark.op("mxfp4_linear_a4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES[1:-1])
def test_rounded_rows(on_hopper: OnHopper, size: dict, dtype: torch.dtype) -> None:
    """They are bf16 whatever the dtype of x, which is that of outputs and bias."""
    M, N, K = size.values()
    on_hopper(torch.randn(M, K).to(dtype), *weight_of(N, K), torch.randn(N).to(dtype))


@pytest.mark.op("mxfp4_linear")
@pytest.mark.parametrize("M", [100, 200])
def test_every_code_and_scale(on_hopper: OnHopper, M: int) -> None:
    """One element of each row of x counts: a column of the weight, as exact as bf16."""
    K = 512
    # Every scale but 255, some times with different codes.
    codes = torch.arange(4 * 255 * K // 2).view(4 * 255, K // 2)
    packed = ((codes * 37 + codes // 256) % 256).byte()
    scale = torch.arange(255).byte().repeat(4)[:, None].expand(-1, K // 32).contiguous()
    x = torch.zeros(M, K, dtype=torch.bfloat16)
    columns = torch.arange(M) * 5 % K
    x[torch.arange(M), columns] = 1.0
    # From 6 x 2^125 fp32 overflows; below 2^-126 bf16 is denormal, which some matrix units take for zero.
    rows = ((scale[:, 0] >= 2) & (scale[:, 0] < 253)).nonzero()[:, 0]
    y = on_hopper(x, packed[rows].contiguous(), scale[rows].contiguous())
    assert torch.equal(y.T, dequantize(packed[rows], scale[rows], torch.bfloat16)[:, columns])


@pytest.mark.op("mxfp4_linear")
def test_a_scale_of_nan(on_hopper: OnHopper) -> None:
    """It is a NaN to every row of x, also where x is zero, and to one output alone."""
    packed, scale = weight_of(141, 1056)
    scale[4, 1] = scale[140, 32] = 255
    x = torch.randn(96, 1056).bfloat16()
    x[:, 32:64] = 0
    y = on_hopper(x, packed, scale)
    assert y.isnan().nonzero().tolist() == [[m, n] for m in range(96) for n in (4, 140)]


@pytest.mark.op("mxfp4_linear")
def test_views(on_hopper: OnHopper) -> None:
    """Rows of wider ones where they begin at multiples of 16 bytes; others are not the kernel's."""
    wide, weight = torch.randn(2, 80, 136).bfloat16(), weight_of(33, 192)
    narrow = weight[0][:, :32].contiguous(), weight[1][:, :2].contiguous()
    on_hopper(wide[..., 72:], *narrow)
    on_hopper(wide[..., 71:135], *narrow, taken=0)
    on_hopper(wide[:, ::2, :64], *narrow)
    on_hopper(wide[:, :70, :64], *narrow, taken=0)
    on_hopper(wide[0, 0, :64].expand(80, 64), *narrow, taken=0)
    on_hopper(wide[0, :, :64].contiguous(), weight[0][::2, 64:], weight[1][::2, 4:])
    on_hopper(wide[0, :, :64].contiguous(), weight[0][::2, 60:92], weight[1][::2, 4:], taken=0)


@pytest.mark.op("mxfp4_linear")
def test_calls_alike(on_hopper: OnHopper) -> None:
    """Made again without the wrapper, with other numbers at other addresses."""
    op = on_hopper.run.op
    op.forget()
    device = on_hopper.target.device
    packed, scale = (t.to(device) for t in weight_of(2048, 4096))
    rows = [torch.randn(200, 4096, device=device).bfloat16() for _ in range(16)]
    with torch.no_grad(), use_backend("triton"):
        first = [op(x, packed, scale) for x in rows]
        calls = on_hopper.taken
        again = [op(x, packed, scale) for x in rows]
    assert 0 < calls < len(rows)
    assert on_hopper.taken == calls
    for x, y, z in zip(rows, first, again, strict=True):
        assert torch.equal(y, z)
        torch.testing.assert_close(y, op.reference(x, packed, scale), rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------------------------------------- what it compiles to

PROGRAM = """
    from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper

    kernel = hopper._tile_kernel = Compiled(hopper._tile_kernel)
    # As on such a device.
    hopper.overlap_options = lambda device: {"launch_pdl": True}
    for M, N, K, dtype, biased in (
        (96, 4096, 4096, torch.bfloat16, False),
        (200, 12288, 4096, torch.bfloat16, False),
        (96, 12289, 1056, torch.bfloat16, True),
        (200, 12289, 1056, torch.bfloat16, True),
        (1024, 16896, 4096, torch.bfloat16, True),
    ):
        x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
        packed, scale = (torch.empty(N, K // n, dtype=torch.uint8, device="meta") for n in (2, 32))
        y, bias = (torch.empty(*s, N, dtype=dtype, device="meta") for s in ((M,), ()))
        with use_architecture("nvidia"):
            hopper.launch(x, packed, scale, bias if biased else None, y)
        kernel.report(M=M, N=N)
"""


def test_what_is_compiled() -> None:
    """Each tile, whole turns of K and others.

    Not in fp32: there some compilers spill when the largest is written, which is not in the loop, and end each product
    of the other.
    """
    for line in hopper_code(PROGRAM):
        assert line["shared"] <= SHARED_MEMORY
        assert not {"STL", "LDL"} & line.keys(), f"registers are spilled: {line}"
        # Four steps of 64 columns, 16 at a time. Each step waits for the one before it, and the last for itself; where
        # products share registers the compiler waits for each.
        assert (line["HGMMA"], line["WARPGROUP.DEPBAR"]) == (16, 5), f"products one by one: {line}"


FEW_ROWS = """
    from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_few, hopper_row

    row = hopper_row._hopper_row_kernel = Compiled(hopper_row._hopper_row_kernel)
    few = hopper_few._hopper_few_kernel = Compiled(hopper_few._hopper_few_kernel)
    # As on such a device.
    hopper_row.overlap_options = hopper_few.overlap_options = lambda device: {"launch_pdl": True}
    for M, N, K, dtype, biased in (
        (1, 12288, 4096, torch.bfloat16, False),
        (1, 131, 3072, torch.float32, True),
        (2, 12288, 4096, torch.bfloat16, True),
        (8, 8192, 7168, torch.float32, False),
        (8, 8191, 2560, torch.bfloat16, False),
        (16, 12288, 4096, torch.bfloat16, False),
        (9, 12287, 8192, torch.float32, True),
        (16, 4096, 3072, torch.bfloat16, False),
        (12, 131, 2048, torch.bfloat16, True),
    ):
        x = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
        packed, scale = (torch.empty(N, K // n, dtype=torch.uint8, device="meta") for n in (2, 32))
        y, bias = (torch.empty(*s, N, dtype=dtype, device="meta") for s in ((M,), ()))
        bias = bias if biased else None
        with use_architecture("nvidia"):
            if M == 1:
                hopper_row.launch(x, packed, scale, bias, y, None, 1, False, None)
            else:
                hopper_few.launch(x, packed, scale, bias, y)
        (row if M == 1 else few).report(M=M, N=N)
"""


def test_what_few_rows_are_compiled_to() -> None:
    """One row, and of others each cut; whole powers of two of turns and others."""
    for line in hopper_code(FEW_ROWS):
        assert line["shared"] <= SHARED_MEMORY
        assert not {"STL", "LDL"} & line.keys(), f"registers are spilled: {line}"
        assert line["HMMA"] > 0


# Outputs, columns of x, rows with an expert each (0 for a row without), and whether the layer is gated.
ROWS_OF_EXPERTS = """
    from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_row, hopper_row_fp8

    hopper_row._hopper_row_kernel = Compiled(hopper_row._hopper_row_kernel)
    hopper_row_fp8._hopper_row_fp8_kernel = Compiled(hopper_row_fp8._hopper_row_fp8_kernel)
    # As on such a device.
    hopper_row.overlap_options = lambda device: {"launch_pdl": True}
    for N, K, rows, gated in (
        (4096, 4096, 8, False),
        (2048, 7168, 6, True),
        (4096, 2048, 8, False),
        (2048, 2304, 8, False),
        (1024, 2304, 8, True),
        (131, 2560, 0, False),
        (64, 2816, 3, True),
    ):
        lead, outputs = (256,) if rows else (), 2 * N if gated else N
        packed, scale = (torch.empty(*lead, outputs, K // n, dtype=torch.uint8, device="meta") for n in (2, 32))
        x, y = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((1, K), (max(1, rows), N)))
        experts = torch.empty(rows, dtype=torch.int64, device="meta") if rows else None
        bias = None if rows else torch.empty(N, dtype=torch.bfloat16, device="meta")
        kernel = hopper_row_fp8 if K % 1024 else hopper_row
        with use_architecture("nvidia"):
            kernel.launch(x, packed, scale, bias, y, experts, max(1, rows), gated, 10.0 if gated else None)
        compiled = kernel._hopper_row_fp8_kernel if K % 1024 else kernel._hopper_row_kernel
        compiled.report(N=N, K=K)
"""


def test_what_rows_of_experts_are_compiled_to() -> None:
    for line in hopper_code(ROWS_OF_EXPERTS):
        # Programs side by side, as many as there have to be at least.
        assert line["shared"] + 1024 <= (SHARED_MEMORY + 1024) // (2 if line["K"] <= 2560 else 1)
        assert not {"STL", "LDL"} & line.keys(), f"registers are spilled: {line}"
        if line["K"] % 1024:
            # Four products for each half of a turn, which do not wait for each other.
            assert (line["QGMMA"], line["WARPGROUP.DEPBAR"]) == (8, 2), f"products one by one: {line}"
        else:
            assert line["HMMA"] > 0
