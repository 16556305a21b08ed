"""gated_rms_norm: both public contracts, groups, strides, residuals, refusals."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import rms_norm as rows_module
from xpu_ports.common.kernels.gated_rms_norm import gated_norm_by_sum, gated_rms_norm, gated_square_sum
from xpu_ports.common.kernels.rms_norm import LARGEST_ROW

pytestmark = pytest.mark.op("gated_rms_norm")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# The two published orders: gate first with silu (Mamba-2), norm first with a sigmoid (KDA).
CONTRACTS = pytest.mark.parametrize(
    "contract",
    [dict(norm_before_gate=False, activation="silu"), dict(norm_before_gate=True, activation="sigmoid")],
    ids=["mamba2", "kda"],
)
SIZES = [
    dict(M=1, N=1, G=1),
    dict(M=17, N=127, G=1),
    dict(M=3, N=128, G=1),
    dict(M=2, N=5120, G=1),
    dict(M=1, N=16381, G=1),
    dict(M=1, N=16384, G=1),
    dict(M=3, N=2, G=2),
    dict(M=17, N=62, G=2),
    dict(M=2, N=7168, G=2),
    dict(M=1, N=32768, G=2),
    dict(M=3, N=8, G=8),
    dict(M=17, N=8 * 37, G=8),
    dict(M=1, N=16384, G=8),
]


def inputs(*shape: int, dtype: torch.dtype, layout: str = "contiguous") -> tuple[Tensor, Tensor, Tensor]:
    """(x, z, weight), the rows of x between 1e-2 and 10, so that eps weighs in some and not in others."""
    x, z = (normal(*shape, dtype=dtype, layout=layout) for _ in range(2))
    if layout != "expanded":
        x *= torch.tensor([1e-2, 1.0, 10.0], dtype=dtype)[torch.arange(shape[-2]) % 3, None]
    return x, z, torch.randn(shape[-1]).to(dtype)


@FLOATS
@CONTRACTS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, contract: dict, dtype: torch.dtype) -> None:
    M, N, G = size.values()
    run(*inputs(M, N, dtype=dtype), group_size=N // G, **contract)


@pytest.mark.full
@FLOATS
@CONTRACTS
@pytest.mark.parametrize(
    "size", [dict(M=m, N=g * n, G=g) for m in (1, 31, 257) for n in (3, 96, 128, 1021, 3584) for g in (1, 2, 8)]
)
def test_more_sizes(run: Runner, size: dict, contract: dict, dtype: torch.dtype) -> None:
    M, N, G = size.values()
    run(*inputs(M, N, dtype=dtype), group_size=N // G, **contract)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate-first", "norm-first"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "ones"])
def test_orders_and_activations(run: Runner, activation: str, norm_before_gate: bool, weighted: bool) -> None:
    x, z, weight = inputs(5, 48, dtype=torch.float32)
    run(x, z, weight if weighted else None, 1e-5, 24, norm_before_gate, activation)


@CONTRACTS
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_layouts(run: Runner, layouts: tuple[str, str], contract: dict) -> None:
    x, z = (normal(2, 5, 48, dtype=torch.bfloat16, layout=layout) for layout in layouts)
    run(x, z, torch.randn(48), group_size=12, **contract)


def test_slices_of_one_projection(run: Runner) -> None:
    """As Mamba-2 hands them over: z and x are columns of in_proj's output."""
    projection = torch.randn(2, 3, 100).bfloat16()
    z, x = projection[..., :40], projection[..., 40:80]
    run(x, z, torch.randn(40).bfloat16(), group_size=20)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prenorm", [False, True], ids=["", "prenorm"])
def test_residual_layouts(run: Runner, layout: str, prenorm: bool) -> None:
    x, z, weight = inputs(2, 5, 48, dtype=torch.bfloat16, layout="slice")
    residual = normal(2, 5, 48, dtype=torch.float32, layout=layout)
    run(x, z, weight, norm_before_gate=True, activation="sigmoid", residual=residual, prenorm=prenorm)


@FLOATS
@CONTRACTS
@pytest.mark.parametrize("in_fp32", [False, True], ids=["", "in_fp32"])
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16], ids=["none", "fp32", "bf16"])
def test_prenorm_returns_the_true_sum(
    run: Runner, contract: dict, dtype: torch.dtype, residual_dtype: torch.dtype | None, in_fp32: bool
) -> None:
    """What is added up, not the normalized output, in the residual's dtype or in fp32."""
    x, z, weight = inputs(4, 30, dtype=dtype)
    residual = None if residual_dtype is None else torch.randn(4, 30).to(residual_dtype)
    y, total = run(x, z, weight, residual=residual, prenorm=True, residual_in_fp32=in_fp32, **contract)
    expected = x.double() if residual is None else x.double() + residual.double()
    dtype_of_sum = torch.float32 if in_fp32 else (residual_dtype or dtype)
    # One addition in fp32, then one rounding.
    assert torch.equal(total, expected.float().to(dtype_of_sum))
    assert (y.dtype, y.shape, total.shape) == (dtype, x.shape, x.shape)


@CONTRACTS
def test_the_sum_is_normalized_before_it_is_rounded(run: Runner, contract: dict) -> None:
    """The norm sees the fp32 sum, also where the sum is returned in bf16."""
    x, z, weight = inputs(4, 30, dtype=torch.float32)
    residual = torch.randn(4, 30).bfloat16()
    y, _ = run(x, z, weight, residual=residual, prenorm=True, **contract)
    alone = run(x, z, weight, residual=residual, **contract)
    assert torch.equal(y, alone)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,)], ids=str)
def test_few_rows(run: Runner, shape: tuple) -> None:
    x, z = torch.randn(shape), torch.randn(shape)
    y, total = run(x, z, torch.randn(64), group_size=8, prenorm=True)
    assert y.shape == total.shape == shape


def test_mixed_dtypes(run: Runner) -> None:
    y = run(torch.randn(3, 24).half(), torch.randn(3, 24), torch.randn(24).bfloat16(), residual=torch.randn(3, 24))
    assert y.dtype == torch.float16


@CONTRACTS
def test_extreme_gates(run: Runner, contract: dict) -> None:
    """silu and sigmoid neither overflow nor turn a closed gate into NaN."""
    z = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 3e38]).expand(2, 8)
    x = torch.randn(2, 8)
    if not contract["norm_before_gate"]:
        z = z.clamp(max=1e4)
    assert run(x, z, None, **contract).isfinite().all()


def test_not_a_number_stays_in_its_group(run: Runner) -> None:
    x = torch.randn(2, 12)
    x[1, 5] = float("nan")
    y = run(x, torch.randn(2, 12), torch.randn(12), group_size=4)
    assert y.isnan().tolist() == [[False] * 12, [False] * 4 + [True] * 4 + [False] * 4]


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def test_formula_of_mamba2() -> None:
    """Zamba2RMSNormGated: gate first with silu, then the norm by groups, eps 1e-5 inside the root."""
    x, z, weight = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 12), (3, 12), (12,)))
    expected = torch.empty_like(x)
    for row, group in itertools.product(range(3), range(2)):
        columns = range(6 * group, 6 * group + 6)
        gated = {c: float(x[row, c]) * float(z[row, c]) * sigmoid(float(z[row, c])) for c in columns}
        rstd = 1 / math.sqrt(sum(v * v for v in gated.values()) / 6 + 1e-5)
        for c in columns:
            expected[row, c] = gated[c] * rstd * weight[c]
    accuracy.assert_close(gated_rms_norm.reference(x, z, weight, 1e-5, 6), expected, expected)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_formula_of_kda(residual: bool) -> None:
    """FusedRMSNormGated with a sigmoid: norm over the row, weight, then the gate; a residual is added first."""
    x, z, weight, r = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 12), (3, 12), (12,), (3, 12)))
    expected, total = torch.empty_like(x), torch.empty_like(x)
    for row in range(3):
        added = [float(x[row, c]) + (float(r[row, c]) if residual else 0.0) for c in range(12)]
        rstd = 1 / math.sqrt(sum(v * v for v in added) / 12 + 1e-6)
        for c in range(12):
            total[row, c] = added[c]
            expected[row, c] = added[c] * rstd * weight[c] * sigmoid(float(z[row, c]))
    got = gated_rms_norm.reference(
        x, z, weight, 1e-6, None, True, "sigmoid", r if residual else None, prenorm=True, residual_in_fp32=True
    )
    accuracy.assert_close(got[0], expected, expected)
    accuracy.assert_close(got[1], total, total)


@CONTRACTS
def test_one_rounding(contract: dict) -> None:
    """Unlike transformers, which rounds before the weight."""
    assert_rounded_once(gated_rms_norm, *inputs(64, 96, dtype=torch.bfloat16), **contract)


@CONTRACTS
@pytest.mark.parametrize("prenorm", [False, True], ids=["", "prenorm"])
def test_gradcheck(contract: dict, prenorm: bool) -> None:
    x, z, residual = (torch.randn(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def function(*tensors: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x, z, weight, residual = tensors
        return gated_rms_norm(x, z, weight, 1e-2, 3, residual=residual, prenorm=prenorm, **contract)

    with use_backend(None):
        assert torch.autograd.gradcheck(function, (x, z, weight, residual))


@pytest.mark.parametrize("group_size", [0, -4, 5, 16])
def test_group_size_that_does_not_divide(run: Runner, group_size: int) -> None:
    x = torch.randn(2, 8, device=run.target.device)
    with use_backend(run.target.backend), pytest.raises(ValueError, match=f"group_size is {group_size}.*8 columns"):
        gated_rms_norm(x, x, None, group_size=group_size)


def test_unknown_activation(run: Runner) -> None:
    x = torch.randn(2, 8, device=run.target.device)
    with use_backend(run.target.backend), pytest.raises(ValueError, match="'swish', expected one of silu, sigmoid"):
        gated_rms_norm(x, x, None, activation="swish")


GOOD = torch.zeros(2, 3, 8)
REFUSED = {
    "long rows": (torch.zeros(1, LARGEST_ROW + 1), torch.zeros(1, LARGEST_ROW + 1), None, "16385 elements"),
    "fp64": (GOOD.double(), GOOD, None, "dtype torch.float64"),
    "fp64 gate": (GOOD, GOOD.double(), None, "dtype torch.float64"),
    "shape": (GOOD, torch.zeros(3, 8), None, "differ"),
    "last stride": (torch.zeros(2, 8, 3).mT, GOOD, None, "last dimension has stride 3"),
    "last stride of the gate": (GOOD, torch.zeros(2, 8, 3).mT, None, "last dimension has stride 3"),
    "weight shape": (GOOD, GOOD, torch.zeros(4), "weight has shape"),
    "weight stride": (GOOD, GOOD, torch.zeros(16)[::2], "weight has shape"),
    "weight dtype": (GOOD, GOOD, torch.zeros(8).double(), "weight has dtype"),
    "four strides": (torch.zeros(3, 3, 3, 3, 8)[::2, ::2, ::2, ::2],) * 2 + (None, "three strides"),
    "gradient": (GOOD.clone().requires_grad_(), GOOD, None, "no backward"),
}


@pytest.mark.parametrize(("x", "z", "weight", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(x: Tensor, z: Tensor, weight: Tensor | None, why: str) -> None:
    assert why in refusal(gated_rms_norm, x, z, weight)


@pytest.mark.parametrize(
    ("residual", "why"),
    [(GOOD.double(), "float64"), (GOOD[:1], "differ"), (torch.zeros(2, 8, 3).mT, "stride 3")],
    ids=["dtype", "shape", "stride"],
)
def test_refusals_of_the_residual(residual: Tensor, why: str) -> None:
    assert why in refusal(gated_rms_norm, GOOD, GOOD, None, residual=residual)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "AVAILABLE", False)
    monkeypatch.setattr(rows_module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(gated_rms_norm, GOOD, GOOD, None)


def test_taken() -> None:
    """The calls that the refusals above differ from in one thing each."""
    long = torch.zeros(1, 2 * LARGEST_ROW)
    assert refusal(gated_rms_norm, GOOD, GOOD, torch.zeros(8)) == ""
    assert refusal(gated_rms_norm, long, long, None, group_size=LARGEST_ROW) == ""
    assert refusal(gated_rms_norm, GOOD, GOOD.half(), None, residual=GOOD.bfloat16()) == ""
    with torch.no_grad():
        assert refusal(gated_rms_norm, GOOD.clone().requires_grad_(), GOOD, None) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    x = torch.randn(2, 8, device=run.target.device, requires_grad=True)
    with use_backend(None):
        gated_rms_norm(x, x, None).sum().backward()
    assert x.grad.isfinite().all()
    if run.target.backend != "reference":
        with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
            gated_rms_norm(x, x, None)


@pytest.mark.op("gated_square_sum")
@FLOATS
@pytest.mark.parametrize("size", [dict(M=1, N=1), dict(M=17, N=127), dict(M=2, N=5120), dict(M=0, N=8)])
def test_square_sums(run: Runner, size: dict, dtype: torch.dtype) -> None:
    x, z, _ = inputs(*size.values(), dtype=dtype)
    y = run(x, z)
    assert y.dtype == torch.float32
    gated = x.double() * z.double() / (1 + torch.exp(-z.double()))
    torch.testing.assert_close(y.double(), (gated * gated).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.op("gated_square_sum")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_square_sums_of_layouts(run: Runner, layout: str) -> None:
    x, z = (normal(3, 5, 24, dtype=torch.bfloat16, layout=layout) for _ in range(2))
    run(x, z)


def test_refusals_of_square_sums() -> None:
    x = torch.zeros(2, 8)
    assert refusal(gated_square_sum, x, x) == ""
    assert "more than" in refusal(gated_square_sum, *[torch.zeros(1, LARGEST_ROW + 1)] * 2)
    assert "float64" in refusal(gated_square_sum, x.double(), x.double())


@pytest.mark.op("gated_norm_by_sum")
@FLOATS
@pytest.mark.parametrize("size", [dict(M=1, N=1), dict(M=17, N=127), dict(M=2, N=5120), dict(M=0, N=8)])
def test_parts_of_a_group(run: Runner, size: dict, dtype: torch.dtype) -> None:
    """Columns of a group by themselves are those of the whole norm."""
    M, N = size.values()
    x, z, weight = inputs(M, 3 * N, dtype=dtype)
    own = slice(N, 2 * N)
    total = gated_square_sum.reference(x, z)
    run(x[:, own], z[:, own], weight[own], total, 3 * N, 1e-5)
    given = [t.double() for t in (x[:, own], z[:, own], weight[own], total)]
    whole = gated_rms_norm.reference(x.double(), z.double(), weight.double(), 1e-5)[:, own]
    torch.testing.assert_close(gated_norm_by_sum.reference(*given, 3 * N, 1e-5), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.op("gated_norm_by_sum")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_group_in_layouts(run: Runner, layout: str) -> None:
    x, z = (normal(3, 5, 24, dtype=torch.bfloat16, layout=layout) for _ in range(2))
    run(x, z, torch.randn(24).bfloat16(), torch.rand(3, 5) * 99, 48, 1e-5)


def test_refusals_of_parts_of_a_group() -> None:
    x = torch.zeros(2, 8)
    given = x, x, torch.zeros(8), torch.zeros(2), 16, 1e-5
    assert refusal(gated_norm_by_sum, *given) == ""
    assert "square_sum has shape (3,), expected (2,)" in refusal(
        gated_norm_by_sum, *given[:3], torch.zeros(3), *given[4:]
    )
    assert "more than" in refusal(gated_norm_by_sum, *[torch.zeros(2, LARGEST_ROW + 1)] * 2, *given[2:])
