"""mamba2_decode_step: numbers beside the three ops it fuses, both states, masks, strides, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels.causal_conv1d import LARGEST_WINDOW, causal_conv1d
from xpu_ports.common.kernels.gated_rms_norm import gated_rms_norm
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.selective_state_update import LARGEST_STATE
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan

pytestmark = pytest.mark.op("mamba2_decode_step")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SIZES = [
    dict(B=1, H=1, P=1, N=1, G=1, W=1, S=1),
    dict(B=2, H=3, P=60, N=16, G=1, W=4, S=4),
    dict(B=3, H=4, P=8, N=64, G=2, W=4, S=3),
    dict(B=1, H=2, P=64, N=128, G=2, W=4, S=4),
    dict(B=2, H=5, P=13, N=37, G=1, W=2, S=5),
    dict(B=1, H=9, P=64, N=17, G=1, W=3, S=2),
]
SMALL = dict(B=3, H=4, P=8, N=16, G=2, W=4, S=4)


def arguments(size: dict, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, **given: Any) -> dict[str, Any]:
    """The op's arguments by name; `given` replaces some."""
    B, H, P, N, G, W, S = size.values()
    inner, conv_dim = H * P, H * P + 2 * G * N
    return {
        "zxbcdt": torch.randn(B, inner + conv_dim + H).to(dtype),
        "conv_state": torch.randn(B, conv_dim, S).to(dtype),
        "state": torch.randn(B, H, P, N).to(state_dtype),
        "conv_weight": torch.randn(conv_dim, W).to(dtype),
        "conv_bias": torch.randn(conv_dim).to(dtype),
        "A_log": torch.empty(H).uniform_(1, 16).log(),
        "D": torch.randn(H),
        "dt_bias": torch.randn(H) - 2,
        "norm_weight": torch.randn(inner).to(dtype),
        "mask": None,
        "n_groups": G,
        "eps": 1e-5,
    } | given


@pytest.fixture
def step(run: Runner) -> Runner:
    """The reference rounds after each of the three ops that it is made of."""
    run.rounds_once = False
    return run


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(step: Runner, size: dict, dtype: torch.dtype) -> None:
    y, _, _ = step(**arguments(size, dtype))
    assert y.shape == (size["B"], size["H"] * size["P"])


def test_many_heads(step: Runner) -> None:
    """A group of the norm wider than one of its programs, and more sums of squares than heads."""
    step(**arguments(dict(B=1, H=22, P=64, N=64, G=2, W=4, S=4), torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_state_in_another_dtype(step: Runner, dtype: torch.dtype) -> None:
    step(**arguments(SMALL, torch.bfloat16, state_dtype=dtype))


@pytest.mark.parametrize("absent", ["conv_bias", "D", "dt_bias"])
def test_optional(step: Runner, absent: str) -> None:
    step(**arguments(SMALL, torch.float32, **{absent: None}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_mask(step: Runner, dtype: torch.dtype) -> None:
    """A row whose token does not count keeps both states bit for bit and gives 0, whatever its inputs are."""
    given = arguments(SMALL, torch.bfloat16, mask=torch.tensor([1, 0, 1]).to(dtype))
    given["zxbcdt"][1] = float("nan")
    y, conv_state, state = step(**given)
    assert (y[1] == 0).all()
    assert torch.equal(conv_state[1], given["conv_state"][1])
    assert torch.equal(state[1], given["state"][1])
    assert not torch.equal(state[0], given["state"][0])


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", ["zxbcdt", "conv_state", "state"])
def test_not_a_number_stays_in_its_row(step: Runner, name: str, masked: bool) -> None:
    given = arguments(SMALL, torch.float32, mask=torch.tensor([1, 1, 0]) if masked else None)
    given[name][1] = float("nan")
    y, conv_state, state = step(**given)
    for t in (y, conv_state, state):
        assert t.flatten(1).isnan().any(-1).tolist() == [False, t is not conv_state or name != "state", False]


def test_oldest_input_beyond_the_taps_is_not_read(step: Runner) -> None:
    given = arguments(SMALL, torch.float32)
    given["conv_state"][:, :, 0] = float("nan")
    y, conv_state, _ = step(**given)
    assert not y.isnan().any()
    assert not conv_state.isnan().any()


def test_moves_every_window(step: Runner) -> None:
    given = arguments(SMALL, torch.bfloat16)
    _, conv_state, _ = step(**given)
    inner = SMALL["H"] * SMALL["P"]
    new = given["zxbcdt"][:, inner : inner + conv_state.shape[1], None]
    assert torch.equal(conv_state, torch.cat([given["conv_state"][:, :, 1:], new], dim=-1))


def test_strides(step: Runner) -> None:
    """Columns of a wider projection, a window kept time first, every second sequence of a larger cache."""
    given = arguments(SMALL, torch.bfloat16)
    B, columns = given["zxbcdt"].shape
    given["zxbcdt"] = torch.randn(B, columns + 7).bfloat16()[:, 3:-4]
    given["conv_state"] = given["conv_state"].mT.contiguous().mT
    given["state"] = torch.randn(2 * B, *given["state"].shape[1:])[::2]
    given["mask"] = torch.tensor([1, 0, 0, 0, 1])[::2]
    step(**given)


def test_no_rows(step: Runner) -> None:
    y, _, _ = step(**arguments(SMALL | dict(B=0), torch.float32))
    assert y.shape == (0, 32)


def test_long_steps(step: Runner) -> None:
    """dt far from zero: softplus is its argument, or next to nothing, and the state is dropped, or stays."""
    given = arguments(SMALL, torch.float32)
    given["zxbcdt"][:, -4:] = torch.tensor([200.0, 30.0, -30.0, -200.0])
    step(**given)


def test_batch_sizes_with_other_tiles_agree(step: Runner) -> None:
    """A sequence gives the same beside many others, when a program holds more of the state, as alone."""
    size = dict(B=40, H=4, P=64, N=64, G=1, W=4, S=4)
    given = arguments(size, torch.float32)
    y, _, state = step(**given)
    alone = {k: v[7:8] if k in ("zxbcdt", "conv_state", "state") else v for k, v in given.items()}
    y_alone, _, state_alone = step(**alone)
    torch.testing.assert_close(y[7:8], y_alone)
    torch.testing.assert_close(state[7:8], state_alone)


def test_steps_are_the_sequence_forms() -> None:
    """Step after step from empty states is the convolution, the scan and the norm over the sequence."""
    B, H, P, N, G, _, _ = SMALL.values()
    T, inner = 6, H * P
    given = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments(SMALL, torch.float64).items()}
    zxbcdt = torch.randn(B, T, given["zxbcdt"].shape[1], dtype=torch.float64)
    given["conv_state"].zero_()
    given["state"].zero_()
    outputs = [mamba2_decode_step.reference(**given | {"zxbcdt": zxbcdt[:, t]}) for t in range(T)]

    z, xbc, dt = zxbcdt.split([inner, inner + 2 * G * N, H], dim=-1)
    xbc = causal_conv1d.reference(xbc, given["conv_weight"], given["conv_bias"], None)
    x, Bs, Cs = xbc.split([inner, G * N, G * N], dim=-1)
    x, Bs, Cs = x.unflatten(-1, (H, P)), Bs.unflatten(-1, (G, N)), Cs.unflatten(-1, (G, N))
    y, state = ssd_chunk_scan.reference(x, dt, given["A_log"], Bs, Cs, given["D"], given["dt_bias"], None)
    y = gated_rms_norm.reference(y.flatten(2), z, given["norm_weight"], 1e-5, inner // G)
    accuracy.assert_close(torch.stack(outputs, dim=1), y, y)
    accuracy.assert_close(given["state"], state, state)


def test_raises_on_another_number_of_columns() -> None:
    given = arguments(SMALL, torch.float32)
    given["zxbcdt"] = given["zxbcdt"][:, :-1]
    with use_backend("reference"), pytest.raises(ValueError, match="131 columns, expected 132"):
        mamba2_decode_step(**given)


GOOD = arguments(SMALL, torch.float32)
SHAPE = GOOD["state"].shape
REFUSED: dict[str, tuple[str, Any, str]] = {
    "fp64": ("zxbcdt", GOOD["zxbcdt"].double(), "dtype torch.float64"),
    "columns": ("zxbcdt", GOOD["zxbcdt"][:, 1:], "zxbcdt has shape"),
    "last stride": ("zxbcdt", torch.zeros(132, 3).T, "has stride 3"),
    "window of another size": ("conv_state", GOOD["conv_state"][:, 1:], "window has shape"),
    "short window": ("conv_state", GOOD["conv_state"][:, :, :2], "3 to"),
    "long window": ("conv_state", torch.zeros(3, 96, LARGEST_WINDOW + 1), "3 to"),
    "window dtype": ("conv_state", GOOD["conv_state"].double(), "state has dtype"),
    "state dtype": ("state", GOOD["state"].double(), "state has dtype"),
    "state stride": ("state", torch.zeros(*SHAPE[:2], SHAPE[3], SHAPE[2]).mT, "last dimension of state"),
    "weight shape": ("conv_weight", torch.zeros(95, 4), "weight has shape"),
    "weight stride": ("conv_weight", torch.zeros(4, 96).T, "contiguous"),
    "bias shape": ("conv_bias", torch.zeros(95), "bias has shape"),
    "heads": ("A_log", torch.zeros(3), "A_log has shape"),
    "skip": ("D", torch.zeros(4, 2)[:, 0], "D has shape"),
    "dt_bias dtype": ("dt_bias", torch.zeros(4, dtype=torch.float64), "dt_bias has shape"),
    "norm weight": ("norm_weight", torch.zeros(31), "norm_weight has shape"),
    "mask": ("mask", torch.ones(3, 1), "mask has shape"),
    "groups": ("n_groups", 3, "expected"),
    "gradient": ("norm_weight", torch.zeros(32, requires_grad=True), "no backward"),
}


@pytest.mark.parametrize(("name", "value", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(name: str, value: Any, why: str) -> None:
    assert why in refusal(mamba2_decode_step, *(GOOD | {name: value}).values())


def test_refuses_a_large_state() -> None:
    size = dict(B=1, H=1, P=1, N=LARGEST_STATE + 1, G=1, W=4, S=4)
    assert "more than 512" in refusal(mamba2_decode_step, *arguments(size, torch.float32).values())


def test_taken() -> None:
    assert refusal(mamba2_decode_step, *GOOD.values()) == ""
