"""rotary_embedding: numbers, positions shared or a row's own, heads of two kinds, strides, refusals; rotary_angles."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import rotary_embedding as module
from xpu_ports.common.kernels.rotary_embedding import rotary_angles, rotary_embedding

pytestmark = pytest.mark.op("rotary_embedding")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# H heads of the queries, G of the keys.
SIZES = [
    dict(B=1, T=1, H=1, G=1, K=2),
    dict(B=2, T=7, H=3, G=3, K=14),
    dict(B=1, T=5, H=8, G=2, K=64),
    dict(B=3, T=1, H=2, G=5, K=128),
    dict(B=1, T=3, H=17, G=1, K=160),
    dict(B=1, T=2, H=33, G=32, K=224),
    dict(B=1, T=2, H=3, G=2, K=1024),
]


def angles(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """cos and sin, [B or 1, T, K / 2], of arbitrary angles."""
    turned = torch.rand(shape) * 2 * math.pi
    return dict(cos=turned.cos().to(dtype), sin=turned.sin().to(dtype))


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict[str, Any]:
    """One call's, by name; all sequences of the batch have the same positions."""
    B, T, H, G, K = size.values()
    q, k = (normal(B, T, heads, K, dtype=dtype, layout=layout) for heads in (H, G))
    return dict(q=q, k=k, **angles(1, T, K // 2))


@FLOATS
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, own: bool, dtype: torch.dtype) -> None:
    """Positions are the batch's, or each sequence's own."""
    given = arguments(size, dtype) | (angles(size["B"], size["T"], size["K"] // 2) if own else {})
    q, k = run(**given)
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert (q.shape, k.shape, q.dtype, k.dtype) == (given["q"].shape, given["k"].shape, dtype, dtype)


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size",
    [dict(B=2, T=t, H=h, G=g, K=k) for t in (1, 31) for h, g in ((32, 32), (24, 8)) for k in (64, 160, 224, 256)],
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(**arguments(dict(B=2, T=5, H=4, G=3, K=24), torch.bfloat16, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_angles(run: Runner, layout: str) -> None:
    """cos and sin may be two views of one table, their strides their own."""
    given = arguments(dict(B=2, T=5, H=4, G=3, K=24))
    run(**given | dict(cos=normal(2, 5, 12, dtype=torch.float32, layout=layout), sin=angles(2, 5, 12)["sin"]))
    run(**given | dict(cos=angles(2, 5, 12)["cos"], sin=normal(2, 5, 12, dtype=torch.float32, layout=layout)))


def test_one_table_beside_one_for_each(run: Runner) -> None:
    """A table of one row whose stride is not 0 still serves all."""
    given = arguments(dict(B=3, T=2, H=2, G=1, K=8))
    table = torch.randn(2, 2, 8)
    run(**given | dict(cos=table[:1, :, :4], sin=table[1:, :, 4:]))


def test_slices_of_one_projection(run: Runner) -> None:
    projection = torch.randn(2, 3, (4 + 2 + 2) * 16).bfloat16()
    q, k, _ = projection.unflatten(-1, (8, 16)).split([4, 2, 2], dim=2)
    run(**arguments(dict(B=2, T=3, H=4, G=2, K=16)) | dict(q=q, k=k))


@FLOATS
def test_dtype_of_the_angles(run: Runner, dtype: torch.dtype) -> None:
    run(**arguments(SIZES[1], torch.bfloat16) | angles(1, 7, 7, dtype=dtype))


@pytest.mark.parametrize("size", [dict(B=0, T=3, H=2, G=1, K=8), dict(B=2, T=0, H=2, G=1, K=8)])
def test_no_tokens(run: Runner, size: dict) -> None:
    q, k = run(**arguments(size))
    assert (q.shape, k.shape) == ((size["B"], size["T"], 2, 8), (size["B"], size["T"], 1, 8))


def test_quarter_turn(run: Runner) -> None:
    """[x1, x2] -> [-x2, x1]: exact, and each token by its own angle."""
    given = arguments(dict(B=2, T=2, H=3, G=2, K=8))
    turned = torch.tensor([[[0.0], [1.0]]]).expand(1, 2, 4)
    results = run(**given | dict(cos=1.0 - turned, sin=turned.contiguous()))
    for x, y in zip((given["q"], given["k"]), results, strict=True):
        assert torch.equal(y[:, 0], x[:, 0])
        assert torch.equal(y[:, 1], torch.cat((-x[:, 1, :, 4:], x[:, 1, :, :4]), dim=-1))


def test_formula() -> None:
    """Pairs (x[i], x[i + K / 2]) turn as complex numbers do."""
    q, k = torch.randn(2, 3, 2, 6, dtype=torch.float64), torch.randn(2, 3, 1, 6, dtype=torch.float64)
    turned = torch.randn(2, 3, 3, dtype=torch.float64)
    results = rotary_embedding.reference(q, k, turned.cos(), turned.sin())
    for x, y in zip((q, k), results, strict=True):
        pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * turned)[:, :, None]
        expected = torch.cat((pairs.real, pairs.imag), dim=-1)
        accuracy.assert_close(y, expected, expected)


@pytest.mark.parametrize("past", [0, 100])
def test_products_depend_on_the_distance_alone(past: int) -> None:
    """What the embedding is for (RoFormer, section 3.2.1)."""
    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 4, 1, 8) for _ in range(2))
    turned = (torch.arange(4.0, dtype=torch.float64) + past)[None, :, None] * torch.rand(4, dtype=torch.float64)
    q, k = (t[0, :, 0] for t in rotary_embedding.reference(q, k, turned.cos(), turned.sin()))
    products = q @ k.T
    for distance in (-2, -1, 0, 1, 2):
        line = products.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))


def test_gradcheck() -> None:
    q, k = (torch.randn(2, 3, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    cos, sin = (torch.randn(1, 3, 2, dtype=torch.float64) for _ in range(2))
    with use_backend(None):
        assert torch.autograd.gradcheck(lambda q, k: rotary_embedding(q, k, cos, sin), (q, k))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=3, H=4, G=2, K=6))
REFUSED = {
    **{f"{name} fp64": ({name: GOOD[name].double()}, "dtype torch.float64") for name in GOOD},
    **{f"{name} stride": ({name: GOOD[name].mT.contiguous().mT}, "the last dimension has stride") for name in GOOD},
    "dtypes differ": (dict(k=GOOD["k"].half()), "q is torch.float32 and k is torch.float16"),
    "odd": (dict(q=torch.zeros(2, 3, 4, 5), k=torch.zeros(2, 3, 2, 5)), "head widths are 5 and 5"),
    "widths differ": (dict(k=torch.zeros(2, 3, 2, 8)), "head widths are 6 and 8"),
    "wide": (
        dict(q=torch.zeros(2, 3, 1, 1026), k=torch.zeros(2, 3, 1, 1026), **angles(1, 3, 513)),
        "head widths are 1026 and 1026",
    ),
    "angles of whole heads": (angles(1, 3, 6), "expected (2, 3, 3) or one row"),
    "angles of other tokens": (angles(1, 4, 3), "expected (2, 3, 3) or one row"),
    "angles of other rows": (angles(3, 3, 3), "expected (2, 3, 3) or one row"),
    "cos and sin differ": (dict(cos=GOOD["cos"].expand(2, 3, 3)), "cos and sin are (2, 3, 3) and (1, 3, 3)"),
    "tokens differ": (dict(k=torch.zeros(2, 2, 2, 6)), "batch and tokens differ"),
    "batch differs": (dict(k=torch.zeros(1, 3, 2, 6)), "batch and tokens differ"),
    "gradient": (dict(k=GOOD["k"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(rotary_embedding, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(rotary_embedding, **GOOD)


@pytest.mark.parametrize("K", [128, 224])
def test_taken(K: int) -> None:
    """Zamba2's heads are, and the call that the refusals above differ from in one thing each."""
    assert refusal(rotary_embedding, **GOOD) == ""
    assert refusal(rotary_embedding, **GOOD | angles(2, 3, 3)) == ""
    assert refusal(rotary_embedding, **arguments(dict(B=1, T=9, H=32, G=32, K=K), torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) for k, v in GOOD.items()}
    given["q"].requires_grad_()
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        rotary_embedding(**given)


# ------------------------------------------------------------------------------------------------------ rotary_angles


@pytest.mark.op("rotary_angles")
class TestAngles:
    """rotary_angles: numbers, positions of any kind, refusals."""

    GOOD = dict(positions=torch.tensor([[0, 3, 2000], [5, 1, 4]]), frequencies=torch.rand(5), scale=1.0)

    @pytest.mark.parametrize("scale", [1.0, 1.25])
    @pytest.mark.parametrize(
        "size", [dict(B=1, T=1, K=1), dict(B=3, T=7, K=7), dict(B=2, T=5, K=64), dict(B=1, T=1, K=65)]
    )
    def test_sizes(self, run: Runner, size: dict, scale: float) -> None:
        B, T, half = size.values()
        # The angle is rounded before its cosine is taken.
        run.rounds_once = False
        frequencies = 10000.0 ** -torch.linspace(0.0, 1.0, half)
        cos, sin = run(torch.randint(5000, (B, T)), frequencies, scale)
        assert cos.shape == sin.shape == (B, T, half)
        assert cos.dtype == sin.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_positions(self, run: Runner, dtype: torch.dtype) -> None:
        """Shared by the rows, of rows with gaps, and negative ones."""
        frequencies = self.GOOD["frequencies"]
        run.rounds_once = False
        run(torch.arange(4, dtype=dtype)[None].expand(3, 4), frequencies, 1.0)
        run(torch.arange(40, dtype=dtype).sub(9).view(4, 10)[::2, 1:7], frequencies, 1.0)
        run(torch.zeros(2, 0, dtype=dtype), frequencies, 1.0)

    def test_no_angle(self, run: Runner) -> None:
        cos, sin = run(torch.zeros(1, 2, dtype=torch.long), torch.rand(3), 1.0)
        assert (cos == 1.0).all()
        assert (sin == 0.0).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_frequencies_of_16_bits(self, run: Runner, dtype: torch.dtype) -> None:
        run.rounds_once = False
        cos, _ = run(**self.GOOD | dict(frequencies=torch.rand(5).to(dtype)))
        assert cos.dtype == torch.float32

    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            (dict(positions=torch.zeros(1, 2)), "positions are (1, 2) of torch.float32"),
            (dict(positions=torch.zeros(2, dtype=torch.long)), "positions are (2,)"),
            (dict(positions=torch.arange(6).view(3, 2).T), "the last dimension of positions has stride 2"),
            (dict(frequencies=torch.rand(5).double()), "frequencies are of torch.float64"),
            (dict(frequencies=torch.rand(1, 5)), "frequencies have shape (1, 5)"),
            (dict(frequencies=torch.rand(10)[::2]), "contiguous"),
            (dict(frequencies=torch.rand(5).requires_grad_()), "no backward"),
        ],
    )
    def test_refusals(self, changed: dict, why: str) -> None:
        assert refusal(rotary_angles, **self.GOOD) == ""
        assert why in refusal(rotary_angles, **self.GOOD | changed)

    def test_refusal_without_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "AVAILABLE", False)
        monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
        assert "no module" in refusal(rotary_angles, **self.GOOD)
