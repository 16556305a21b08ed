"""mxfp4_experts: tokens through their experts' packed layers, added up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, Target, normal, refusal
from xpu_ports.common import tritonlib
from xpu_ports.common.device import use_architecture
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.kernels import mxfp4_experts as module
from xpu_ports.quant.mxfp4.kernels import mxfp4_grouped_linear as grouped
from xpu_ports.quant.mxfp4.kernels.mxfp4_experts import mxfp4_experts
from xpu_ports.quant.mxfp4.kernels.mxfp4_grouped_linear import mxfp4_grouped_linear
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import row

pytestmark = pytest.mark.op("mxfp4_experts")
# Few of everything: the interpreter takes its time for each of some outputs.
SIZES = [
    dict(M=1, A=3, E=5, D=32, F=32, limit=None),
    dict(M=1, A=1, E=3, D=96, F=32, limit=0.7),
    dict(M=2, A=2, E=4, D=32, F=64, limit=0.7),
]


@pytest.fixture
def experts(run: Runner) -> Runner:
    run.rounds_once = False
    return run


@pytest.fixture(params=[False, True], ids=["one by one", "sorted"])
def sorts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rows are sorted by expert, as those of many tokens are."""
    if request.param:
        monkeypatch.setattr(grouped, "LARGEST_UNSORTED", 2)
        monkeypatch.setattr(module, "LARGEST_UNSORTED", 2)
    return request.param


def layers(E: int, D: int, F: int) -> tuple[Tensor, ...]:
    gate_up = torch.randn(E, 2 * F, D) * D**-0.5 * 2.0 ** torch.randint(-2, 3, (E, 2 * F, 1))
    return *quantize(gate_up), *quantize(torch.randn(E, D, F) * F**-0.5)


def routed(M: int, A: int, E: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, E, (M, A)), torch.rand(M, A)


def each(x: Tensor, packed: tuple[Tensor, ...], indices: Tensor, weights: Tensor, limit: float | None) -> Tensor:
    """The definition, fp64: every token by all experts, of which its own are counted."""
    E = packed[0].shape[0]
    g, u = torch.einsum("md,efd->mef", x.double(), dequantize(*packed[:2], torch.float64)).chunk(2, dim=-1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    y = torch.einsum("mef,edf->med", torch.nn.functional.silu(g) * u, dequantize(*packed[2:], torch.float64))
    counts = torch.zeros(len(x), E + 1, dtype=torch.float64).scatter_add_(1, indices, weights.double())
    return torch.einsum("med,me->md", y, counts[:, :E])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(experts: Runner, size: dict, dtype: torch.dtype) -> None:
    M, A, E, D, F, limit = size.values()
    x, packed, choice = torch.randn(M, D).to(dtype), layers(E, D, F), routed(M, A, E)
    assert experts(x, *packed, *choice, limit).shape == (M, D)
    reference = mxfp4_experts.reference(x.double(), *packed, *choice, limit)
    torch.testing.assert_close(reference, each(x, packed, *choice, limit))


@pytest.mark.parametrize(
    ("D", "cut", "limit"),
    [(1024, None, None), (1024, row.Cut(2, 2, True), 0.5), (2304, None, 0.5), (4096, None, 0.5)],
    ids=str,
)
def test_gate_and_what_it_gates_in_one_launch(
    experts: Runner, target: Target, monkeypatch: pytest.MonkeyPatch, D: int, cut: row.Cut | None, limit: float | None
) -> None:
    """NVIDIA's kernel for few rows; a scale of NaN, an infinite input and outputs that end within a tile."""
    if target.backend == "triton" and not tritonlib.INTERPRETED and target.device != "cuda":
        pytest.skip("NVIDIA's kernel: on such a device or in Triton's interpreter")
    if target.device == "cpu" and D > 2304:
        pytest.skip("long in the interpreter, and another kernel on Hopper alone")
    if cut:
        monkeypatch.setattr(row, "cut", lambda *_: cut)
    launched = []
    gated = row.launch_gated
    monkeypatch.setattr(row, "launch_gated", lambda *args: launched.append(args) or gated(*args))
    x, packed = torch.randn(3, D).bfloat16(), layers(5, D, 32)
    indices = torch.tensor([[0, 3], [4, 4], [1, 2]])
    packed[1][3, 7, 1] = 255  # A gate's row, of the first token.
    x[2, 5] = float("inf")
    with use_architecture("nvidia"):
        y = experts(x, *packed, indices, torch.rand(3, 2), limit)
    assert len(launched) == (target.backend == "triton")
    assert y[0].isnan().all(), "a NaN in what the second layer sees reaches every output"
    assert y[1].isfinite().all()


@pytest.mark.parametrize("round_inputs", [False, True], ids=["W4A16", "W4A4"])
def test_its_layers_one_by_one(target: Target, sorts: bool, round_inputs: bool) -> None:
    """The same kernels of the same back end, so that inputs of the second layer round to the same codes."""
    given = torch.randn(2, 32), *layers(4, 32, 32), *routed(2, 2, 4)
    x, *packed, indices, weights = (t.to(target.device) for t in given)

    def rounded(t: Tensor) -> Tensor:
        return dequantize(*quantize(t), t.dtype) if round_inputs else t

    with use_backend(target.backend):
        y = mxfp4_experts(x, *packed, indices, weights, 1.5, round_inputs)
        h = gated_activation(mxfp4_grouped_linear(rounded(x), *packed[:2], indices), None, "silu", 1.5)
        each = mxfp4_grouped_linear(rounded(h.flatten(0, 1)), *packed[2:], indices.flatten()).view(2, 2, 32)
    torch.testing.assert_close(y, (each * weights[..., None]).sum(1))


def test_an_expert_of_another_device_adds_nothing(experts: Runner, sorts: bool) -> None:
    packed, (indices, weights) = layers(4, 32, 32), routed(3, 2, 5)
    indices[0], indices[1, 1] = 4, 4
    y = experts(torch.randn(3, 32).bfloat16(), *packed, indices, weights)
    assert not y[0].any()
    assert y.isfinite().all()


def test_experts_that_nobody_chose_are_not_read(experts: Runner, sorts: bool) -> None:
    packed = layers(4, 32, 32)
    packed[1][1:3], packed[3][1:3] = 255, 255
    indices, weights = routed(3, 2, 2)
    assert experts(torch.randn(3, 32).bfloat16(), *packed, indices * 3, weights).isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "slice", "expanded"])
def test_layouts(experts: Runner, layout: str) -> None:
    experts(normal(2, 32, dtype=torch.bfloat16, layout=layout), *layers(3, 32, 32), *routed(2, 2, 3))


def test_strided_choices(experts: Runner) -> None:
    indices, weights = torch.randint(0, 3, (2, 3)).T, torch.rand(3, 4)[:, ::2]
    experts(torch.randn(3, 32).bfloat16(), *layers(3, 32, 32), indices, weights)


@pytest.mark.parametrize(("M", "A"), [(0, 2), (3, 0)])
def test_nothing_to_do(experts: Runner, M: int, A: int) -> None:
    y = experts(torch.randn(M, 64), *layers(4, 64, 32), torch.zeros(M, A, dtype=torch.long), torch.rand(M, A))
    assert y.shape == (M, 64)
    assert not y.any()


def test_does_not_fit() -> None:
    x, packed, choice = torch.randn(3, 64), layers(4, 64, 32), routed(3, 2, 4)
    with pytest.raises(ValueError, match=r"x \(3, 32\)"):
        mxfp4_experts(x[:, :32], *packed, *choice)
    with pytest.raises(ValueError, match=r"down_packed \(3, 64, 16\) does not belong"):
        mxfp4_experts(x, *packed[:2], packed[2][:3], packed[3], *choice)
    with pytest.raises(ValueError, match=r"down_scale \(4, 63, 1\)"):
        mxfp4_experts(x, *packed[:3], packed[3][:, :63], *choice)
    with pytest.raises(ValueError, match=r"weights \(3, 1\)"):
        mxfp4_experts(x, *packed, choice[0], choice[1][:, :1])


def test_refusals() -> None:
    given = torch.randn(3, 64), *layers(4, 64, 32), *routed(3, 2, 4)
    assert not refusal(mxfp4_experts, *given)
    assert "torch.int32" in refusal(mxfp4_experts, *given[:5], given[5].int(), given[6])
    assert "weights have dtype torch.float64" in refusal(mxfp4_experts, *given[:6], given[6].double())
    assert "dtype torch.float64" in refusal(mxfp4_experts, given[0].double(), *given[1:])


def test_a_gradient_reaches_the_input() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    packed, choice = layers(4, 64, 32), routed(3, 2, 4)
    mxfp4_experts(x, *packed, *choice).sum().backward()
    wide = x.detach().double().requires_grad_()
    each(wide, packed, *choice, None).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.float())


def test_compiled() -> None:
    given = torch.randn(3, 64), *layers(4, 64, 32), *routed(3, 2, 4)
    compiled = torch.compile(mxfp4_experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), mxfp4_experts(*given))
