"""Linear layers of a few rows: alone, behind a norm, behind a gated norm, with adapters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.device import ARCHITECTURES, use_architecture
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import rms_norm as rows_module
from xpu_ports.common.kernels.skinny_linear import adapted_linears, gated_norm_linear, linear, norm_glu, norm_linear
from xpu_ports.common.kernels.skinny_linear import triton as kernel
from xpu_ports.common.kernels.skinny_linear.triton import LARGEST_M

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Widths of one, of primes, around the lanes of a warp, one past a block, and more than one block of columns.
SIZES = pytest.mark.parametrize(
    "size",
    [
        dict(M=1, N=1, K=1),
        dict(M=1, N=5, K=2048),
        dict(M=2, N=13, K=257),
        dict(M=3, N=4, K=7),
        dict(M=5, N=3, K=1280),
        dict(M=8, N=7, K=513),
    ],
)


def weight_of(N: int, K: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(N, K) * K**-0.5).to(dtype)


@pytest.fixture
def several_roundings(run: Runner) -> Runner:
    """`run` for the ops whose references round between the steps that they are made of."""
    run.rounds_once = False
    return run


# ------------------------------------------------------------------------------------------------------------- linear


@FLOATS
@SIZES
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.op("linear")
def test_linear_sizes(several_roundings: Runner, size: dict, biased: bool, dtype: torch.dtype) -> None:
    M, N, K = size.values()
    bias = torch.randn(N).to(dtype) if biased else None
    several_roundings(torch.randn(M, K).to(dtype), weight_of(N, K, dtype), bias)


@pytest.mark.full
@pytest.mark.parametrize("M", range(1, LARGEST_M + 1))
@pytest.mark.parametrize("K", [2048, 2560, 3584, 4096, 5120, 7168, 8192, 14336])
@pytest.mark.op("linear")
def test_linear_more_sizes(several_roundings: Runner, M: int, K: int) -> None:
    several_roundings(torch.randn(M, K).bfloat16(), weight_of(10, K, torch.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.op("linear")
def test_linear_layouts(several_roundings: Runner, layout: str) -> None:
    x = normal(2, 4, 48, dtype=torch.bfloat16, layout=layout)
    y = several_roundings(x, weight_of(6, 48, torch.bfloat16))
    assert y.shape == (2, 4, 6)


@pytest.mark.op("linear")
def test_linear_rows_of_a_wider_weight(several_roundings: Runner) -> None:
    several_roundings(torch.randn(2, 30), torch.randn(9, 70)[::2, 3:33])


@pytest.mark.parametrize(("shape", "N"), [((0, 16), 3), ((2, 0, 16), 3), ((16,), 3), ((2, 16), 0)], ids=str)
@pytest.mark.op("linear")
def test_linear_few_rows(several_roundings: Runner, shape: tuple, N: int) -> None:
    y = several_roundings(torch.randn(shape), torch.randn(N, 16))
    assert y.shape == (*shape[:-1], N)


@pytest.mark.op("linear")
def test_linear_not_a_number_stays_in_its_row(several_roundings: Runner) -> None:
    x = torch.randn(3, 20)
    x[1, 7] = float("nan")
    y = several_roundings(x, torch.randn(5, 20))
    assert y.isnan().any(1).tolist() == [False, True, False]


# -------------------------------------------------------------------------------------------------------- norm_linear


@FLOATS
@SIZES
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.op("norm_linear")
def test_norm_linear_sizes(several_roundings: Runner, size: dict, added: bool, dtype: torch.dtype) -> None:
    M, N, K = size.values()
    # Rows between 1e-2 and 10, so that eps weighs in some and not in others.
    x = (torch.randn(M, K) * torch.tensor([1e-2, 1.0, 10.0])[torch.arange(M) % 3, None]).to(dtype)
    residual = torch.randn(M, K).to(dtype) if added else None
    several_roundings(x, residual, torch.randn(K).to(dtype), weight_of(N, K, dtype), torch.randn(N).to(dtype), 1e-3)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.op("norm_linear")
def test_norm_linear_layouts(several_roundings: Runner, layouts: tuple[str, str]) -> None:
    x, residual = (normal(2, 3, 48, dtype=torch.bfloat16, layout=layout) for layout in layouts)
    # The norm's weight in a dtype of its own.
    y, total = several_roundings(x, residual, torch.randn(48), weight_of(6, 48, torch.bfloat16))
    assert (y.shape, total.shape) == ((2, 3, 6), (2, 3, 48))


@FLOATS
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.op("norm_linear")
def test_norm_linear_returns_the_true_sum(
    several_roundings: Runner, dtype: torch.dtype, residual_dtype: torch.dtype
) -> None:
    x, residual = torch.randn(3, 300).to(dtype), torch.randn(3, 300).to(residual_dtype)
    _, total = several_roundings(x, residual, None, weight_of(5, 300, dtype))
    # One addition in fp32, then one rounding.
    assert torch.equal(total, (x.float() + residual.float()).to(residual_dtype))


@pytest.mark.op("norm_linear")
def test_norm_linear_normalizes_the_sum_as_it_is_stored(run: Runner) -> None:
    """Where x is lost in the rounding of the sum, it does not reach the output either."""
    run.rounds_once = False
    x, residual, weight = torch.full((1, 32), 1e-3), torch.randn(1, 32).sign().bfloat16() * 4, torch.randn(4, 32)
    y, total = run(x, residual, None, weight, None, 0.0)
    assert torch.equal(total, residual)
    expected = residual.double().sign() @ weight.double().T
    accuracy.assert_close(y, expected.float(), expected)


@pytest.mark.parametrize("shape", [(0, 24), (24,)], ids=str)
@pytest.mark.op("norm_linear")
def test_norm_linear_few_rows(several_roundings: Runner, shape: tuple) -> None:
    y, total = several_roundings(torch.randn(shape), torch.randn(shape), torch.randn(24), torch.randn(3, 24))
    assert (y.shape, total.shape) == ((*shape[:-1], 3), shape)


@pytest.mark.op("norm_linear")
def test_norm_linear_without_outputs_still_adds(several_roundings: Runner) -> None:
    several_roundings(torch.randn(2, 24), torch.randn(2, 24), None, torch.randn(0, 24))


# -------------------------------------------------------------------------------------------------- gated_norm_linear


@FLOATS
@pytest.mark.parametrize(
    "size",
    [
        dict(M=1, N=1, K=1, G=1),
        dict(M=2, N=5, K=4096, G=1),
        dict(M=1, N=6, K=7168, G=2),
        dict(M=3, N=7, K=62, G=2),
        dict(M=8, N=9, K=8 * 37, G=8),
    ],
)
@pytest.mark.op("gated_norm_linear")
def test_gated_norm_linear_sizes(several_roundings: Runner, size: dict, dtype: torch.dtype) -> None:
    M, N, K, G = size.values()
    y, z, norm_weight = torch.randn(M, K).to(dtype), torch.randn(M, K).to(dtype), torch.randn(K).to(dtype)
    several_roundings(y, z, norm_weight, weight_of(N, K, dtype), torch.randn(N).to(dtype), K // G, 1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("z_dtype", [torch.float32, torch.bfloat16], ids=["fp32-gate", "bf16-gate"])
@pytest.mark.op("gated_norm_linear")
def test_gated_norm_linear_layouts(several_roundings: Runner, layout: str, z_dtype: torch.dtype) -> None:
    y = normal(2, 3, 48, dtype=torch.bfloat16, layout="slice")
    z = normal(2, 3, 48, dtype=z_dtype, layout=layout)
    several_roundings(y, z, None, weight_of(6, 48, torch.bfloat16), group_size=12)


@pytest.mark.op("gated_norm_linear")
def test_gated_norm_linear_extreme_gates(several_roundings: Runner) -> None:
    """A closed gate gives zero, an open one no overflow."""
    z = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, -3e38]).expand(2, 8)
    assert several_roundings(torch.randn(2, 8), z, None, torch.randn(3, 8)).isfinite().all()


@pytest.mark.parametrize("group_size", [0, -4, 5, 16])
@pytest.mark.op("gated_norm_linear")
def test_gated_norm_linear_group_size_that_does_not_divide(run: Runner, group_size: int) -> None:
    y, weight = (torch.randn(*shape, device=run.target.device) for shape in ((2, 8), (3, 8)))
    with use_backend(run.target.backend), pytest.raises(ValueError, match=f"group_size is {group_size}.*8 columns"):
        gated_norm_linear(y, y, None, weight, None, group_size)


# ---------------------------------------------------------------------------------------------------- adapted_linears


@FLOATS
@pytest.mark.parametrize(
    ("M", "widths", "rank"),
    [(1, (6,), 0), (3, (5, 13), 0), (8, (9, 1, 17), 0), (1, (9, 1, 17), 12), (3, (6,), 12), (8, (5, 13), 1)],
    ids=str,
)
@pytest.mark.op("adapted_linears")
def test_adapted_linears(several_roundings: Runner, M: int, widths: tuple, rank: int, dtype: torch.dtype) -> None:
    K = 300
    weights = [weight_of(N, K, dtype) for N in widths]
    a = [weight_of(rank, K, dtype) for _ in widths if rank]
    b = [weight_of(N, rank, dtype) for N in widths if rank]
    several_roundings(torch.randn(M, K).to(dtype), weights, a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.op("adapted_linears")
def test_adapted_linears_layouts(several_roundings: Runner, layout: str) -> None:
    """Each weight has strides of its own: rows of one fused weight, every other row of another."""
    x = normal(2, 3, 24, dtype=torch.float32, layout=layout)
    fused = torch.randn(30, 29)
    weights = [fused[:7, :24], fused[7:20:2, 5:], torch.randn(9, 24)]
    a = [torch.randn(8, 4, 24)[2], torch.randn(8, 24)[::2], torch.randn(4, 31)[:, 3:27]]
    b = [torch.randn(len(w), 11)[:, :4] for w in weights]
    y = several_roundings(x, weights, a, b)
    assert [t.shape for t in y] == [(2, 3, 7), (2, 3, 7), (2, 3, 9)]


@pytest.mark.op("adapted_linears")
def test_adapted_linears_without_rows(several_roundings: Runner) -> None:
    y = several_roundings(torch.randn(0, 8), [torch.randn(3, 8)] * 2, [torch.randn(2, 8)] * 2, [torch.randn(3, 2)] * 2)
    assert [t.shape for t in y] == [(0, 3), (0, 3)]


@pytest.mark.op("adapted_linears")
def test_adapted_linears_is_a_list_of_one(run: Runner) -> None:
    x, weight = (torch.randn(*shape, device=run.target.device) for shape in ((2, 8), (3, 8)))
    with use_backend(run.target.backend):
        (y,) = adapted_linears(x, [weight], [], [])
    accuracy.assert_close(y.cpu(), F.linear(x, weight).cpu(), F.linear(x.double(), weight.double()).cpu())


@pytest.mark.parametrize(("weights", "a", "b"), [(0, 0, 0), (2, 1, 1), (2, 2, 1), (1, 0, 1)])
@pytest.mark.op("adapted_linears")
def test_adapted_linears_of_other_lengths(run: Runner, weights: int, a: int, b: int) -> None:
    x, w, down, up = (torch.randn(*shape, device=run.target.device) for shape in ((2, 8), (3, 8), (2, 8), (3, 2)))
    with use_backend(run.target.backend), pytest.raises(ValueError, match=f"{weights} weights with {a} and {b}"):
        adapted_linears(x, [w] * weights, [down] * a, [up] * b)


# ---------------------------------------------------------------------------------------------------------- reference


def test_formulas() -> None:
    """Each reference written out in plain numbers."""
    x, z, norm_weight = [0.5, -2.0, 1.0, 3.0], [1.0, -1.0, 0.0, 2.0], [1.0, 2.0, -1.0, 0.5]
    weight, bias = [[1.0, 0.0, 2.0, -1.0], [0.5, 1.0, 1.0, 1.0]], [0.25, -0.5]
    down, up = [[1.0, 1.0, -1.0, 0.0]], [[2.0], [-3.0]]

    def dot(u: list[float], v: list[float]) -> float:
        return sum(a * b for a, b in zip(u, v, strict=True))

    def norm(s: list[float], eps: float) -> list[float]:
        rms = math.sqrt(dot(s, s) / len(s) + eps)
        return [v / rms * w for v, w in zip(s, norm_weight, strict=True)]

    def check(out: Tensor, expected: list[float]) -> None:
        wanted = torch.tensor(expected, dtype=torch.float64)
        accuracy.assert_close(out, wanted, wanted)

    X, Z, NW, W, B, A, U = (torch.tensor(v, dtype=torch.float64) for v in (x, z, norm_weight, weight, bias, down, up))
    check(linear.reference(X, W, B), [dot(x, w) + b for w, b in zip(weight, bias, strict=True)])
    total = [a + b for a, b in zip(x, z, strict=True)]
    y, s = norm_linear.reference(X, Z, NW, W, B, 1e-2)
    check(s, total)
    check(y, [dot(norm(total, 1e-2), w) + b for w, b in zip(weight, bias, strict=True)])
    check(norm_linear.reference(X, None, NW, W, None, 1e-2), [dot(norm(x, 1e-2), w) for w in weight])
    gated = [v * g / (1 + math.exp(-g)) for v, g in zip(x, z, strict=True)]
    halves = [norm(gated[:2] + gated[:2], 1e-2)[:2], norm(gated[2:] + gated[2:], 1e-2)[2:]]
    halves[0] = [v * w for v, w in zip(halves[0], [1.0, 1.0], strict=True)]
    check(gated_norm_linear.reference(X, Z, NW, W, None, 2, 1e-2), [dot(halves[0] + halves[1], w) for w in weight])
    low = dot(x, down[0])
    check(
        adapted_linears.reference(X, [W], [A], [U])[0],
        [dot(x, w) + low * u[0] for w, u in zip(weight, up, strict=True)],
    )


def test_formula_of_a_gated_layer() -> None:
    x, norm_weight = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    weight, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 3), (2, 3), (4, 2)))
    n = x / (x.square().mean() + 1e-2).sqrt() * norm_weight
    g1, g2, u1, u2 = ((weight + b @ a) @ n).tolist()
    expected = torch.tensor([g / (1 + math.exp(-g)) * u for g, u in ((g1, u1), (g2, u2))], dtype=torch.float64)
    accuracy.assert_close(norm_glu.reference(x, norm_weight, weight, a, b, "silu", 1e-2), expected, expected)


def test_same_as_modules() -> None:
    """The references round where modules called one after the other do."""
    x, residual, z = (torch.randn(3, 16).bfloat16() for _ in range(3))
    layer, norm = nn.Linear(16, 5, dtype=torch.bfloat16), nn.RMSNorm(16, 1e-6)
    down, up = nn.Linear(16, 2, False, dtype=torch.bfloat16), nn.Linear(2, 5, False, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(linear.reference(x, layer.weight, layer.bias), layer(x))
        y, total = norm_linear.reference(x, residual, norm.weight, layer.weight, layer.bias)
        assert torch.equal(total, x + residual)
        assert torch.equal(y, layer(norm(total.float()).bfloat16()))
        gated = norm(x.float() * F.silu(z.float())).bfloat16()
        assert torch.equal(
            gated_norm_linear.reference(x, z, norm.weight, layer.weight, layer.bias, None, 1e-6), layer(gated)
        )
        (y,) = adapted_linears.reference(x, [layer.weight], [down.weight], [up.weight])
        assert torch.equal(y, F.linear(x, layer.weight) + up(down(x)))


def test_any_number_of_rows_runs_the_reference() -> None:
    x, weight = torch.randn(3 * LARGEST_M, 8), torch.randn(2, 8)
    assert f"{3 * LARGEST_M} rows" in refusal(linear, x, weight)
    assert linear(x, weight).shape == (3 * LARGEST_M, 2)


# ----------------------------------------------------------------------------------------------------------- norm_glu


@FLOATS
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("rank", [0, 1, 5])
@pytest.mark.parametrize(
    "size",
    [dict(M=1, F=1, K=1), dict(M=1, F=5, K=2048), dict(M=2, F=13, K=257), dict(M=5, F=3, K=70), dict(M=8, F=7, K=513)],
)
@pytest.mark.op("norm_glu")
def test_norm_glu(several_roundings: Runner, size: dict, rank: int, activation: str, dtype: torch.dtype) -> None:
    M, F, K = size.values()
    x = (torch.randn(M, K) * torch.tensor([1e-2, 1.0, 10.0])[torch.arange(M) % 3, None]).to(dtype)
    a, b = (weight_of(rank, K, dtype), weight_of(2 * F, rank, dtype)) if rank else (None, None)
    y = several_roundings(x, torch.randn(K).to(dtype), weight_of(2 * F, K, dtype), a, b, activation, 1e-3)
    assert y.shape == (M, F)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.op("norm_glu")
def test_norm_glu_layouts(several_roundings: Runner, layout: str) -> None:
    x = normal(2, 3, 48, dtype=torch.bfloat16, layout=layout)
    weight = weight_of(40, 100, torch.bfloat16)[::2, 3:51]
    # The norm's weight in a dtype of its own.
    y = several_roundings(x, torch.randn(48), weight, None, None, "silu")
    assert y.shape == (2, 3, 10)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (16,)], ids=str)
@pytest.mark.op("norm_glu")
def test_norm_glu_few_rows(several_roundings: Runner, shape: tuple) -> None:
    y = several_roundings(torch.randn(shape), None, torch.randn(6, 16), torch.randn(2, 16), torch.randn(6, 2), "gelu")
    assert y.shape == (*shape[:-1], 3)


@pytest.mark.op("norm_glu")
def test_norm_glu_takes_gates_from_the_first_half(several_roundings: Runner) -> None:
    """Where all of these are closed nothing comes through, and infinite ones beside them stay where they are."""
    x, weight = torch.ones(1, 8), torch.zeros(12, 8)
    weight[:6], weight[6:] = -1000.0, torch.arange(6.0)[:, None]
    weight[2] = 1000.0
    y = several_roundings(x, None, weight, None, None, "silu", 0.0)
    assert (y[0, [0, 1, 3, 4, 5]] == 0.0).all()
    assert y[0, 2] > 0.0


@pytest.mark.parametrize(
    ("rows", "a", "b", "activation", "why"),
    [
        (5, None, None, "gelu", "has no halves"),
        (4, None, None, "relu", "activation is 'relu'"),
        (4, torch.zeros(2, 8), None, "gelu", "half of the adapter"),
        (4, None, torch.zeros(4, 2), "gelu", "half of the adapter"),
    ],
)
@pytest.mark.op("norm_glu")
def test_norm_glu_raises(run: Runner, rows: int, a: Tensor, b: Tensor, activation: str, why: str) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(rows, 8)
    given = (None if t is None else t.to(run.target.device) for t in (x, None, weight, a, b))
    with use_backend(run.target.backend), pytest.raises(ValueError, match=why):
        norm_glu(*given, activation)


# ----------------------------------------------------------------------------------------------------------- refusals

X, W = torch.zeros(2, 3, 8), torch.zeros(5, 8)
REFUSED = {
    "rows": (torch.zeros(LARGEST_M + 1, 8), W, None, f"{LARGEST_M + 1} rows, more than {LARGEST_M}"),
    "no dimensions": (torch.zeros(()), W, None, "no columns"),
    "no columns": (torch.zeros(2, 0), torch.zeros(5, 0), None, "no columns"),
    "fp64": (X.double(), W.double(), None, "dtype torch.float64"),
    "last stride": (torch.zeros(2, 8, 3).mT, W, None, "last dimension has stride 3"),
    "weight shape": (X, torch.zeros(5, 9), None, "a weight has shape (5, 9), expected (5, 8)"),
    "weight dimensions": (X, torch.zeros(8), None, "a weight has shape (8,)"),
    "weight dtype": (X, W.half(), None, "a weight has dtype torch.float16, the input torch.float32"),
    "weight stride": (X, torch.zeros(8, 5).T, None, "last dimension of a weight has stride 5"),
    "bias shape": (X, W, torch.zeros(4), "bias has shape (4,)"),
    "bias dtype": (X, W, torch.zeros(5).half(), "dtype torch.float16"),
    "bias stride": (X, W, torch.zeros(10)[::2], "bias has shape (5,)"),
    "gradient of the input": (X.clone().requires_grad_(), W, None, "no backward"),
    "gradient of the weight": (X, W.clone().requires_grad_(), None, "no backward"),
}


@pytest.mark.parametrize(("x", "weight", "bias", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(x: Tensor, weight: Tensor, bias: Tensor | None, why: str) -> None:
    assert why in refusal(linear, x, weight, bias)


OTHERS = {
    "shape": (torch.zeros(2, 4, 8), None, "differ"),
    "dtype": (X.double(), None, "float64"),
    "stride": (torch.zeros(2, 8, 3).mT, None, "stride 3"),
    "norm weight shape": (X, torch.zeros(7), "weight has shape (7,)"),
    "norm weight stride": (X, torch.zeros(16)[::2], "weight has shape (8,)"),
    "norm weight dtype": (X, torch.zeros(8).double(), "weight has dtype torch.float64"),
}


GATE_UP, DOWN, UP = torch.zeros(6, 8), torch.zeros(2, 8), torch.zeros(6, 2)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (dict(x=torch.zeros(LARGEST_M + 1, 8)), "more than"),
        (dict(norm_weight=torch.zeros(7)), "weight has shape (7,)"),
        (dict(weight=torch.zeros(6, 9)), "a weight has shape (6, 9)"),
        (dict(a=torch.zeros(2, 9)), "a weight has shape (2, 9)"),
        (dict(a=torch.zeros(3, 8)), "a weight has shape (6, 2), expected (6, 3)"),
        (dict(b=torch.zeros(5, 2)), "a weight has shape (5, 2)"),
        (dict(b=UP.half()), "a weight has dtype torch.float16"),
        (dict(a=DOWN.clone().requires_grad_()), "no backward"),
    ],
)
def test_refusals_of_gated_layers(changed: dict, why: str) -> None:
    good = dict(x=X, norm_weight=None, weight=GATE_UP, a=DOWN, b=UP, activation="gelu")
    assert refusal(norm_glu, **good) == ""
    assert refusal(norm_glu, **good | dict(a=None, b=None)) == ""
    assert why in refusal(norm_glu, **good | changed)


@pytest.mark.parametrize("op", [norm_linear, gated_norm_linear], ids=["norm", "gated"])
@pytest.mark.parametrize(("other", "norm_weight", "why"), OTHERS.values(), ids=OTHERS)
def test_refusals_of_norms(op: object, other: Tensor, norm_weight: Tensor | None, why: str) -> None:
    assert why in refusal(op, X, other, norm_weight, W)


@pytest.mark.parametrize("op", [norm_linear, gated_norm_linear], ids=["norm", "gated"])
def test_refusals_of_weights_behind_norms(op: object) -> None:
    many = torch.zeros(LARGEST_M + 1, 8)
    assert "a weight has shape" in refusal(op, X, X, None, torch.zeros(5, 9))
    assert "rows, more than" in refusal(op, many, many, None, W)


A, B = torch.zeros(2, 8), torch.zeros(5, 2)
LISTS = {
    "rows": (torch.zeros(LARGEST_M + 1, 8), [W], [], [], "rows, more than"),
    "layers": (X, [W] * 4, [], [], "4 layers, more than 3"),
    "weight": (X, [W, torch.zeros(5, 9)], [], [], "a weight has shape (5, 9)"),
    "ranks": (X, [W, W], [A, torch.zeros(3, 8)], [B, torch.zeros(5, 3)], "a weight has shape (5, 3), expected (5, 2)"),
    "first half": (X, [W], [torch.zeros(2, 9)], [B], "a weight has shape (2, 9)"),
    "dtype of the first half": (X, [W], [A.half()], [B], "a weight has dtype torch.float16"),
    "second half": (X, [W], [A], [torch.zeros(2, 5)], "a weight has shape (2, 5), expected (5, 2)"),
    "dtype of the second half": (X, [W], [A], [B.half()], "dtype torch.float16"),
    "stride of the second half": (X, [W], [A], [torch.zeros(2, 5).T], "stride 5"),
    "gradient of a weight": (X, [W, W.clone().requires_grad_()], [], [], "no backward"),
    "gradient of an adapter": (X, [W], [A], [B.clone().requires_grad_()], "no backward"),
}


@pytest.mark.parametrize(("x", "weights", "a", "b", "why"), LISTS.values(), ids=LISTS)
def test_refusals_of_adapted_linears(x: Tensor, weights: list, a: list, b: list, why: str) -> None:
    assert why in refusal(adapted_linears, x, weights, a, b)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel, rows_module):
        monkeypatch.setattr(module, "AVAILABLE", False)
        monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(linear, X, W)


def test_refusal_of_a_large_weight() -> None:
    """On NVIDIA beside more than a few rows, in 16 bits."""
    large, x = torch.empty(1 << 13, 1 << 10).bfloat16(), torch.empty(8, 1 << 10).bfloat16()
    with use_architecture("nvidia"):
        assert "5 rows and a weight of 16 MB, more than 4 rows" in refusal(linear, x[:5], large)
        for taken in ((x[:4], large), (x, large[1:]), (x.float(), large.float())):
            assert refusal(linear, *taken) == ""
    with use_architecture("max"):
        assert refusal(linear, x, large) == ""


def test_taken() -> None:
    """The calls that the refusals above differ from in one thing each."""
    assert refusal(linear, X, W) == ""
    assert refusal(linear, torch.zeros(LARGEST_M, 8), W, torch.zeros(5)) == ""
    assert refusal(norm_linear, X, X.bfloat16(), torch.zeros(8).half(), W) == ""
    assert refusal(norm_linear, X, None, None, W) == ""
    assert refusal(gated_norm_linear, X, X.bfloat16(), None, W, None, 4) == ""
    assert refusal(adapted_linears, X, [W] * 3, [A] * 3, [B] * 3) == ""
    with torch.no_grad():
        assert refusal(adapted_linears, X, [W.clone().requires_grad_()], [], []) == ""


@pytest.mark.op("adapted_linears")
def test_forced_without_a_backward(run: Runner) -> None:
    x, down, up = (torch.randn(*shape, device=run.target.device) for shape in ((2, 8), (2, 8), (5, 2)))
    weight = torch.randn(5, 8, device=run.target.device, requires_grad=True)
    with use_backend(None):
        adapted_linears(x, [weight], [down], [up])[0].sum().backward()
    assert weight.grad.isfinite().all()
    if run.target.backend != "reference":
        with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
            adapted_linears(x, [weight], [down], [up])


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("itemsize", [2, 4], ids="{}bytes".format)
def test_lanes_stand_along_the_columns(name: str, itemsize: int) -> None:
    """All lanes of a tile hold equal runs of columns, of 16 bytes at the most, and the tile is not twice too wide."""
    arch = ARCHITECTURES[name]
    for M, N, K in itertools.product((1, 2, 4, 8), (128, 2048, 32000), (1, 3, 64, 257, 2048, 14336)):
        cut = kernel.tile(arch, M, N, K, itemsize)
        vector = cut.vector(itemsize, arch.lanes)
        assert 1 <= vector <= 16 // itemsize
        assert cut.block_k % (cut.warps * arch.lanes * vector) == 0 or cut.warps == 1
        assert cut.block_k < 2 * max(K, 16 // itemsize)
