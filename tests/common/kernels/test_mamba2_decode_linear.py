"""mamba2_decode_linear: numbers beside the step and the layer that it is made of, both states, masks, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.kernels.test_mamba2_decode_step import FLOATS, SIZES, SMALL
from tests.common.kernels.test_mamba2_decode_step import arguments as step_arguments
from tests.common.ops import Runner, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels.mamba2_decode_linear import mamba2_decode_linear
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.skinny_linear.triton import LARGEST_M

pytestmark = pytest.mark.op("mamba2_decode_linear")


def arguments(size: dict, dtype: torch.dtype, outputs: int = 7, **given: Any) -> dict[str, Any]:
    """The op's arguments by name; `given` replaces some."""
    of_step = step_arguments(size, dtype)
    inner = size["H"] * size["P"]
    names = list(of_step)
    made = {name: of_step[name] for name in names[: names.index("mask") + 1]}
    made["out_weight"] = (torch.randn(outputs, inner) * inner**-0.5).to(dtype)
    made["out_bias"] = None
    return made | {"n_groups": of_step["n_groups"], "eps": of_step["eps"]} | given


@pytest.fixture
def step(run: Runner) -> Runner:
    """The reference rounds after each of the ops that it is made of."""
    run.rounds_once = False
    return run


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(step: Runner, size: dict, dtype: torch.dtype) -> None:
    y, _, _ = step(**arguments(size, dtype))
    assert y.shape == (size["B"], 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [1, 64, 1025])
def test_outputs(step: Runner, outputs: int, dtype: torch.dtype) -> None:
    """Fewer than a program takes, a multiple of that, and one past; on both sides of the tiles' limit."""
    step(**arguments(SMALL, dtype, outputs, out_bias=torch.randn(outputs).to(dtype)))


@pytest.mark.parametrize("G", [1, 2])
def test_many_heads(step: Runner, G: int) -> None:
    """A group wider than a program's columns at a time, and not a multiple of them."""
    step(**arguments(dict(B=1, H=46, P=64, N=16, G=G, W=4, S=4), torch.bfloat16))


@pytest.mark.parametrize("B", [1, 2, 5, LARGEST_M])
def test_rows(step: Runner, B: int) -> None:
    step(**arguments(SMALL | dict(B=B), torch.bfloat16))


def test_many_channels_of_the_windows(step: Runner) -> None:
    """More windows of B and C than one program moves, in each row."""
    given = arguments(dict(B=2, H=4, P=4, N=300, G=2, W=4, S=4), torch.bfloat16)
    _, conv_state, _ = step(**given)
    new = given["zxbcdt"][:, 16 : 16 + conv_state.shape[1], None]
    assert torch.equal(conv_state, torch.cat([given["conv_state"][:, :, 1:], new], dim=-1))


@pytest.mark.parametrize("absent", ["conv_bias", "D", "dt_bias"])
def test_optional(step: Runner, absent: str) -> None:
    step(**arguments(SMALL, torch.float32, **{absent: None}))


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask(step: Runner, dtype: torch.dtype, biased: bool) -> None:
    """A row whose token does not count keeps both states bit for bit and gives the layer of 0, whatever it holds."""
    bias = torch.randn(7).bfloat16() if biased else None
    given = arguments(SMALL, torch.bfloat16, mask=torch.tensor([1, 0, 1]).to(dtype), out_bias=bias)
    given["zxbcdt"][1] = float("nan")
    y, conv_state, state = step(**given)
    assert torch.equal(y[1], bias if biased else torch.zeros(7).bfloat16())
    assert torch.equal(conv_state[1], given["conv_state"][1])
    assert torch.equal(state[1], given["state"][1])
    assert not torch.equal(state[0], given["state"][0])


def test_mask_without_eps(step: Runner) -> None:
    """The norm of nothing, 0 / 0, does not show in a row whose token does not count."""
    y, _, _ = step(**arguments(SMALL, torch.float32, mask=torch.tensor([1, 0, 1]), eps=0.0))
    assert (y[1] == 0).all()


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", ["zxbcdt", "conv_state", "state"])
def test_not_a_number_stays_in_its_row(step: Runner, name: str, masked: bool) -> None:
    given = arguments(SMALL, torch.float32, mask=torch.tensor([1, 1, 0]) if masked else None)
    given[name][1] = float("nan")
    y, _, state = step(**given)
    for t in (y, state):
        assert t.flatten(1).isnan().any(-1).tolist() == [False, True, False]


def test_range(step: Runner) -> None:
    """What comes before the norm may be beyond the range of fp16, which the result is not."""
    given = arguments(SMALL, torch.float16)
    given["zxbcdt"][:, :32] = 30.0
    given["D"] = given["D"].sign() * 5000
    y, _, _ = step(**given)
    assert y.isfinite().all()


def test_strides(step: Runner) -> None:
    """Columns of wider projections, a window kept time first, every second sequence of a larger cache."""
    given = arguments(SMALL, torch.bfloat16)
    B, columns = given["zxbcdt"].shape
    given["zxbcdt"] = torch.randn(B, columns + 7).bfloat16()[:, 3:-4]
    given["conv_state"] = given["conv_state"].mT.contiguous().mT
    given["state"] = torch.randn(2 * B, *given["state"].shape[1:])[::2]
    given["mask"] = torch.tensor([1, 0, 0, 0, 1])[::2]
    given["out_weight"] = torch.randn(14, 40).bfloat16()[::2, 5:37]
    step(**given)


@pytest.mark.parametrize(("B", "outputs"), [(0, 7), (2, 0)])
def test_nothing(step: Runner, B: int, outputs: int) -> None:
    """Without outputs the states still move."""
    y, _, _ = step(**arguments(SMALL | dict(B=B), torch.float32, outputs))
    assert y.shape == (B, outputs)


def test_is_the_step_and_the_layer() -> None:
    given = arguments(SMALL, torch.float64, out_bias=torch.randn(7, dtype=torch.float64))
    given = {k: v.double() if isinstance(v, Tensor) else v for k, v in given.items()}
    apart = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    y = mamba2_decode_linear.reference(**given)
    weight, bias = apart.pop("out_weight"), apart.pop("out_bias")
    expected = mamba2_decode_step.reference(**apart) @ weight.T + bias
    accuracy.assert_close(y, expected, expected)
    for name in mamba2_decode_linear.mutates:
        assert torch.equal(given[name], apart[name])


def test_raises_on_another_number_of_columns() -> None:
    given = arguments(SMALL, torch.float32)
    given["zxbcdt"] = given["zxbcdt"][:, :-1]
    with use_backend("reference"), pytest.raises(ValueError, match="131 columns, expected 132"):
        mamba2_decode_linear(**given)


GOOD = arguments(SMALL, torch.float32)
REFUSED: dict[str, tuple[str, Any, str]] = {
    "columns": ("zxbcdt", GOOD["zxbcdt"][:, 1:], "zxbcdt has shape"),
    "state dtype": ("state", GOOD["state"].double(), "state has dtype"),
    "norm weight": ("norm_weight", torch.zeros(31), "norm_weight has shape"),
    "layer shape": ("out_weight", torch.zeros(7, 31), "weight has shape"),
    "layer dtype": ("out_weight", torch.zeros(7, 32).bfloat16(), "weight has dtype"),
    "layer stride": ("out_weight", torch.zeros(32, 7).T, "has stride 7"),
    "layer bias": ("out_bias", torch.zeros(6), "bias has shape"),
    "gradient": ("out_weight", torch.zeros(7, 32, requires_grad=True), "no backward"),
}


@pytest.mark.parametrize(("name", "value", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(name: str, value: Any, why: str) -> None:
    assert why in refusal(mamba2_decode_linear, *(GOOD | {name: value}).values())


def test_many_rows_are_refused() -> None:
    given = arguments(SMALL | dict(B=LARGEST_M + 1), torch.float32)
    assert f"more than {LARGEST_M}" in refusal(mamba2_decode_linear, *given.values())


def test_taken() -> None:
    assert refusal(mamba2_decode_linear, *GOOD.values()) == ""
