"""mxfp4_grouped_linear: each row through its own experts, one or several, and no others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, Target, normal, refusal
from xpu_ports.common import gluonlib, tritonlib
from xpu_ports.common.device import use_architecture
from xpu_ports.common.dispatch import use_backend
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.kernels import mxfp4_grouped_linear as module
from xpu_ports.quant.mxfp4.kernels.mxfp4_grouped_linear import mxfp4_grouped_linear
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import hopper_row, hopper_row_fp8, row

pytestmark = pytest.mark.op("mxfp4_grouped_linear")
# A of 0: experts has one dimension.
SIZES = [
    dict(M=1, A=8, E=16, N=9, K=64),
    dict(M=1, A=0, E=3, N=33, K=1056),
    dict(M=5, A=2, E=4, N=40, K=96),
    dict(M=40, A=3, E=5, N=17, K=64),
    dict(M=70, A=1, E=2, N=131, K=32),
]


@pytest.fixture
def grouped(run: Runner) -> Runner:
    run.rounds_once = False
    return run


def weights_of(E: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    return quantize(torch.randn(E, N, K) * K**-0.5 * 2.0 ** torch.randint(-3, 4, (E, N, 1)))


def choices(M: int, A: int, E: int) -> Tensor:
    return torch.randint(0, E, (M, A) if A else (M,))


def each(x: Tensor, packed: Tensor, scale: Tensor, experts: Tensor) -> Tensor:
    """The definition, fp64: every row by all experts, of which its own are taken."""
    y = torch.einsum("mk,enk->men", x.double(), dequantize(packed, scale, torch.float64))
    y = torch.stack([y[m, experts[m]] for m in range(len(x))]) if len(x) else y[:, 0]
    return y.view(*experts.shape, packed.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(grouped: Runner, size: dict, dtype: torch.dtype) -> None:
    M, A, E, N, K = size.values()
    x, weights, experts = torch.randn(M, K).to(dtype), weights_of(E, N, K), choices(M, A, E)
    y = grouped(x, *weights, experts)
    assert y.shape == (*experts.shape, N)
    reference = mxfp4_grouped_linear.reference(x.double(), *weights, experts)
    torch.testing.assert_close(reference, each(x, *weights, experts))


@pytest.mark.parametrize("M", [2, 40])
def test_experts_that_nobody_chose_are_not_read(grouped: Runner, M: int) -> None:
    packed, scale = weights_of(4, 9, 64)
    scale[1:3] = 255
    experts = choices(M, 2, 2) * 3
    assert grouped(torch.randn(M, 64).bfloat16(), packed, scale, experts).isfinite().all()


@pytest.mark.parametrize("M", [2, 40])
def test_other_rows_do_not_mind_an_expert_of_another_device(target: Target, M: int) -> None:
    x, weights, experts = torch.randn(M, 64).bfloat16(), weights_of(4, 9, 64), choices(M, 2, 5)
    experts[0] = torch.tensor([4, 1])
    with use_backend(target.backend):
        y = mxfp4_grouped_linear(*(t.to(target.device) for t in (x, *weights, experts))).cpu()
    here = experts < 4
    expected = each(x, *weights, experts * here).to(y.dtype)
    torch.testing.assert_close(y[here], expected[here], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("M", [2, 40])
def test_one_expert_for_all(grouped: Runner, M: int) -> None:
    x, weights = torch.randn(M, 64).bfloat16(), weights_of(3, 9, 64)
    y = grouped(x, *weights, torch.full((M, 2), 2))
    assert torch.equal(y[:, 0], y[:, 1]), "the same expert twice gives the same"


@pytest.mark.parametrize("layout", ["contiguous", "slice", "expanded"])
def test_layouts(grouped: Runner, layout: str) -> None:
    grouped(normal(6, 64, dtype=torch.bfloat16, layout=layout), *weights_of(3, 9, 64), choices(6, 2, 3))


def test_strided_weights_and_choices(grouped: Runner) -> None:
    packed, scale = weights_of(6, 18, 128)
    experts = torch.randint(0, 3, (2, 5)).T
    grouped(torch.randn(5, 64).bfloat16(), packed[::2, 1::2, 32:], scale[::2, 1::2, 2:], experts)


# One row a program, and sorted: at most 8, 16 and more rows of an expert. Arc A has no tiles, so nothing is sorted.
@pytest.mark.parametrize(
    ("architecture", "M"), [("nvidia", 3), ("nvidia", 18), ("nvidia", 30), ("nvidia", 70), ("arc-a", 5)]
)
def test_other_architectures(
    grouped: Runner, target: Target, monkeypatch: pytest.MonkeyPatch, architecture: str, M: int
) -> None:
    """Their choices of kernel, tile and decoding."""
    if target.backend == "triton" and not tritonlib.INTERPRETED:
        pytest.skip("only Triton's interpreter runs every architecture's tiles")
    monkeypatch.setattr(module, "LARGEST_UNSORTED", 8)
    with use_architecture(architecture):
        grouped(torch.randn(M, 96).bfloat16(), *weights_of(5, 33, 96), choices(M, 2, 5))


@pytest.mark.parametrize("value", [1.0, 1e30, math.inf])
@pytest.mark.parametrize(("N", "K"), [(37, 2048), (131, 2304), (64, 2560), (24, 3072), (41, 4096), (9, 7168)])
def test_rows_on_hopper(
    grouped: Runner, target: Target, monkeypatch: pytest.MonkeyPatch, N: int, K: int, value: float
) -> None:
    """Rows of a wider x; scales and an x that the products do not take, of one row alone."""
    why = "another back end" if target.backend != "triton" else gluonlib.refuses(torch.device(target.device))
    if why is not None:
        pytest.skip(f"not here: {why}")
    grouped.op.forget()
    taken = []
    for kernel in hopper_row, hopper_row_fp8:
        launch = kernel.launch
        monkeypatch.setattr(
            kernel, "launch", lambda *args, launch=launch, name=kernel.__name__: taken.append(name) or launch(*args)
        )
    packed, scale = weights_of(5, N, K)
    wide, experts = torch.randn(3, K + 16).bfloat16(), torch.tensor([[0, 3, 1], [4, 4, 3], [2, 1, 2]])
    grouped(wide[:, 16:], packed, scale, experts)
    scale[3, N // 2, 1], scale[0, 0, 5], scale[4, N - 1, K // 32 - 1] = 255, 200, 0
    x = wide[:, :K].clone()
    x[1, 7] = value
    y = grouped(x, packed, scale, experts)
    assert y[2].isfinite().all()
    assert taken == 2 * [(hopper_row_fp8 if K % 1024 else hopper_row).__name__]
    # Nothing says that such rows begin at multiples of 16 bytes.
    grouped(torch.randn(3, K + 4).bfloat16()[:, 4:], packed, scale, experts)


@pytest.mark.parametrize("cut", [None, row.Cut(4, 2, True)], ids=str)
def test_a_row_a_program(grouped: Runner, target: Target, monkeypatch: pytest.MonkeyPatch, cut: row.Cut | None) -> None:
    """NVIDIA's kernel for whole turns of four warps."""
    if target.backend == "triton" and not tritonlib.INTERPRETED:
        pytest.skip("only Triton's interpreter runs every architecture's tiles")
    if cut:
        monkeypatch.setattr(row, "cut", lambda *_: cut)
    packed, scale = weights_of(5, 41, 1024)
    scale[3, 7, 1] = 255
    with use_architecture("nvidia"):
        grouped(torch.randn(2, 1024).bfloat16(), packed, scale, torch.tensor([[0, 3, 1], [4, 4, 3]]))


@pytest.mark.parametrize(("M", "A", "N"), [(0, 2, 5), (0, 0, 5), (3, 2, 0)])
def test_nothing_to_do(grouped: Runner, M: int, A: int, N: int) -> None:
    experts = choices(M, A, 4)
    assert grouped(torch.randn(M, 64), *weights_of(4, N, 64), experts).shape == (*experts.shape, N)


@pytest.mark.parametrize(
    ("x", "experts", "why"),
    [
        (torch.randn(3, 96), torch.zeros(3, dtype=torch.long), r"x \(3, 96\)"),
        (torch.randn(3, 64), torch.zeros(2, dtype=torch.long), r"experts \(2,\) of torch.int64 for 3 rows"),
        (torch.randn(3, 64), torch.zeros(3), "torch.float32"),
        (torch.randn(2, 3, 64), torch.zeros(2, dtype=torch.long), r"x \(2, 3, 64\)"),
    ],
)
def test_does_not_fit(x: Tensor, experts: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mxfp4_grouped_linear(x, *weights_of(4, 5, 64), experts)


def test_refusals() -> None:
    given = torch.randn(3, 64), *weights_of(4, 5, 64), choices(3, 2, 4)
    assert not refusal(mxfp4_grouped_linear, *given)
    assert "experts have dtype torch.int32" in refusal(mxfp4_grouped_linear, *given[:3], given[3].int())
    assert "no columns" in refusal(mxfp4_grouped_linear, torch.randn(3, 0), *given[1:])
    assert "dtype torch.float64" in refusal(mxfp4_grouped_linear, given[0].double(), *given[1:])


def test_compiled() -> None:
    given = torch.randn(3, 64), *weights_of(4, 5, 64), choices(3, 2, 4)
    compiled = torch.compile(mxfp4_grouped_linear, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), mxfp4_grouped_linear(*given))
