"""The packed modules against dense ones with the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from xpu_ports.common.accuracy import assert_close
from xpu_ports.common.kernels.moe_experts import moe_experts
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(x: Tensor) -> Tensor:
    """What a W4A4 layer sees of its input."""
    return dequantize(*quantize(x), x.dtype)


def seen(activations: str | None) -> Callable[[Tensor], Tensor]:
    return rounded if activations else lambda x: x


@pytest.mark.parametrize("activations", [None, "mxfp4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, bias: bool, activations: str | None) -> None:
    dense = nn.Linear(96, 37, bias, dtype=dtype)
    layer = MXFP4Linear.from_linear(dense, activations)
    weight = dequantize(*quantize(dense.weight), torch.float64)
    for shape in ((96,), (1, 96), (2, 5, 96), (0, 96)):
        x = torch.randn(shape, dtype=dtype)
        h = seen(activations)(x)
        exact = nn.functional.linear(h.double(), weight, dense.bias.double() if bias else None)
        expected = nn.functional.linear(h, weight.to(dtype), dense.bias)
        assert_close(layer(x), expected, exact)


def test_a_linear_layer_is_its_bytes() -> None:
    dense = nn.Linear(64, 6)
    layer = MXFP4Linear.from_linear(dense)
    assert {k: (t.dtype, tuple(t.shape)) for k, t in layer.state_dict().items()} == {
        "weight_packed": (torch.uint8, (6, 32)),
        "weight_scale": (torch.uint8, (6, 2)),
        "bias": (torch.float32, (6,)),
    }
    assert not layer.weight_packed.requires_grad
    before = {k: t.clone() for k, t in layer.state_dict().items()}
    # Neither a cast nor a run changes the bytes or adds anything.
    layer.to(torch.bfloat16)(torch.randn(3, 64, dtype=torch.bfloat16))
    assert layer.bias.dtype == torch.bfloat16
    assert layer.state_dict().keys() == before.keys()
    assert all(torch.equal(before[k], layer.state_dict()[k]) for k in ("weight_packed", "weight_scale"))
    copied = MXFP4Linear(64, 6)
    copied.load_state_dict(before)
    assert torch.equal(copied(torch.eye(64)), copy.deepcopy(copied)(torch.eye(64)))


def test_scale_rule_and_dense_again() -> None:
    dense = nn.Linear(64, 5)
    for rule in ("even", "floor", "rceil"):
        packed, scale = quantize(dense.weight, rule)
        again = MXFP4Linear.from_linear(dense, scale_rule=rule).dequantize(torch.bfloat16)
        assert torch.equal(again.weight, dequantize(packed, scale, torch.bfloat16))
        assert again.bias is dense.bias


def test_a_gradient_reaches_the_input_and_the_bias() -> None:
    layer = MXFP4Linear.from_linear(nn.Linear(64, 5))
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize(torch.float32).weight.sum(0).expand(3, -1))
    torch.testing.assert_close(layer.bias.grad, torch.full((5,), 3.0))


@pytest.mark.parametrize("activations", [None, "mxfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, activations: str | None) -> None:
    E, D, F, A, N = 5, 64, 32, 2, 7
    gate_up, down = torch.randn(E, 2 * F, D, dtype=dtype) / 8, torch.randn(E, D, F, dtype=dtype) / 8
    experts = MXFP4Experts.from_weights(gate_up, down, activations)
    x = torch.randn(N, D, dtype=dtype)
    indices, weights = torch.randint(E, (N, A)), torch.rand(N, A)

    def dense(wide: torch.dtype) -> Tensor:
        values = [dequantize(*quantize(w), wide) for w in (gate_up, down)]
        if activations is None:
            return moe_experts.reference(x.to(wide), *values, indices, weights)
        y = torch.zeros(N, D, dtype=torch.promote_types(wide, torch.float32))
        for n in range(N):
            for a in range(A):
                e = indices[n, a]
                # In the dtype of the layer: rounding the oracle's own activations could give other codes.
                g, u = nn.functional.linear(rounded(x[n]), values[0][e].to(dtype)).float().chunk(2)
                h = rounded((nn.functional.silu(g) * u).to(dtype))
                y[n] += (values[1][e] @ h.to(wide)) * weights[n, a]
        return y.to(wide)

    assert_close(experts(x, indices, weights), dense(dtype), dense(torch.float64))
    assert experts(x[:0], indices[:0], weights[:0]).shape == (0, D)


def test_widths_and_schemes_that_are_none() -> None:
    with pytest.raises(ValueError, match="48 input features, expected a multiple of 32"):
        MXFP4Linear(48, 4)
    with pytest.raises(ValueError, match="'fp8', expected None or 'mxfp4'"):
        MXFP4Linear(32, 4, activations="fp8")
    with pytest.raises(ValueError, match="16 input features"):
        MXFP4Experts(2, 32, 16)
    with pytest.raises(ValueError, match="'fp8', expected None or 'mxfp4'"):
        MXFP4Experts(2, 32, 32, activations="fp8")


def test_what_they_print() -> None:
    assert repr(MXFP4Linear(32, 4)) == "MXFP4Linear(in_features=32, out_features=4, bias=True, W4A16)"
    assert repr(MXFP4Experts(2, 32, 64, "mxfp4")) == "MXFP4Experts(experts=2, hidden_size=32, width=64, W4A4)"
