"""qk_norm_rope: numbers, both layouts of pairs, both streams' weights, positions, strides, rounding, refusals."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import qk_norm_rope as module
from xpu_ports.common.kernels.qk_norm_rope import HEAD_DIMS, qk_norm_rope

pytestmark = pytest.mark.op("qk_norm_rope")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
INTERLEAVED = pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
# H heads of the queries, G of the keys; R of the D columns are rotated.
SIZES = [
    dict(B=1, T=1, H=1, G=1, D=64, R=64),
    dict(B=2, T=3, H=2, G=2, D=64, R=32),
    dict(B=1, T=2, H=5, G=1, D=128, R=128),
    dict(B=2, T=1, H=3, G=9, D=128, R=96),
    dict(B=1, T=2, H=2, G=3, D=256, R=2),
]


def table(rows: int, R: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, R]: cosines beside sines of arbitrary angles."""
    turned = torch.rand(rows, R // 2) * 2 * math.pi
    return torch.cat([turned.cos(), turned.sin()], dim=-1).to(dtype)


def weights(count: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    return [(1.0 + 0.5 * torch.randn(D)).to(dtype) for _ in range(count)]


def arguments(
    size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous", streams: int = 1
) -> dict[str, Any]:
    """One call's, by name."""
    B, T, H, G, D, R = size.values()
    q, k = (normal(B, T, heads, D, dtype=dtype, layout=layout, scale=3.0) for heads in (H, G))
    return dict(
        q=q, k=k, q_weights=weights(streams, D, dtype), k_weights=weights(streams, D, dtype), cos_sin=table(T, R)
    )


@FLOATS
@INTERLEAVED
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, interleaved: bool, dtype: torch.dtype) -> None:
    given = arguments(size, dtype)
    q, k = run(**given, interleaved=interleaved)
    assert (q.shape, k.shape, q.dtype, k.dtype) == (given["q"].shape, given["k"].shape, dtype, dtype)


@pytest.mark.full
@INTERLEAVED
@pytest.mark.parametrize(
    "size",
    [
        dict(B=1, T=5, H=h, G=g, D=d, R=r)
        for (h, g), d, r in itertools.product([(24, 24), (48, 48), (8, 3)], HEAD_DIMS, [32, 64, 96, 128, 256])
        if r <= d
    ],
)
def test_more_sizes(run: Runner, size: dict, interleaved: bool) -> None:
    run(**arguments(size, torch.bfloat16), interleaved=interleaved)


@INTERLEAVED
@pytest.mark.parametrize("split", [0, 1, 3, 5])
def test_two_streams(run: Runner, split: int, interleaved: bool) -> None:
    """The first tokens have weights of their own: none of them, some, or all."""
    given = arguments(dict(B=2, T=5, H=2, G=3, D=64, R=64), torch.bfloat16, streams=2)
    run(**given, split=split, interleaved=interleaved)


@pytest.mark.parametrize("split", [2, 3])
def test_two_streams_are_two_calls(run: Runner, split: int) -> None:
    """Bit for bit what each stream gives alone."""
    given = arguments(dict(B=2, T=5, H=2, G=3, D=64, R=64), torch.bfloat16, streams=2)
    joint = run(**given, split=split)
    for i, tokens in enumerate((slice(0, split), slice(split, 5))):
        alone = {name: given[name][:, tokens].clone() for name in "qk"}
        alone |= {name: given[name][i : i + 1] for name in ("q_weights", "k_weights")}
        parts = Runner(qk_norm_rope, run.target, run._monkeypatch)(**alone, cos_sin=given["cos_sin"][tokens].clone())
        for part, whole in zip(parts, joint, strict=True):
            assert torch.equal(part, whole[:, tokens])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_positions(run: Runner, own: bool, dtype: torch.dtype) -> None:
    """Rows of the table in any order, the batch's or each sequence's own."""
    given = arguments(dict(B=2, T=3, H=2, G=1, D=64, R=64)) | dict(cos_sin=table(11, 64))
    positions = torch.tensor([[10, 0, 3], [3, 7, 7]], dtype=dtype)
    run(**given, positions=positions if own else positions[0])
    run(**given, positions=positions.repeat_interleave(2, dim=1)[:, ::2])


def test_positions_of_a_row_in_order_change_nothing(run: Runner) -> None:
    given = arguments(dict(B=2, T=3, H=2, G=1, D=64, R=64))
    for with_, without in zip(run(**given, positions=torch.arange(3)), run(**given), strict=True):
        assert torch.equal(with_, without)


@INTERLEAVED
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
def test_layouts(run: Runner, layout: str, interleaved: bool) -> None:
    """What lies between the rows is not written."""
    run(**arguments(dict(B=2, T=3, H=3, G=2, D=64, R=32), torch.bfloat16, layout), interleaved=interleaved)


def test_slices_of_one_projection(run: Runner) -> None:
    """As a single block hands them over: a token stride of 9 times the width, q, k, v and the MLP side by side."""
    d = 2 * 64
    projection = torch.randn(2, 3, 9 * d).bfloat16()
    q, k = (part.unflatten(-1, (2, 64)) for part in projection.split([d, d, 7 * d], dim=-1)[:2])
    run(**arguments(dict(B=2, T=3, H=2, G=2, D=64, R=64), torch.bfloat16) | dict(q=q, k=k))


def test_head_strides_differ(run: Runner) -> None:
    """Heads padded, and in front of the tokens."""
    q = torch.randn(2, 3, 2, 96)[..., :64]
    k = torch.randn(2, 2, 3, 64).transpose(1, 2)
    run(**arguments(dict(B=2, T=3, H=2, G=2, D=64, R=64)) | dict(q=q, k=k))


@FLOATS
def test_dtype_of_the_table(run: Runner, dtype: torch.dtype) -> None:
    run(**arguments(SIZES[1], torch.bfloat16) | dict(cos_sin=table(4, 64, dtype)[:, :32]))


def test_weights_of_another_dtype(run: Runner) -> None:
    given = arguments(SIZES[1], torch.bfloat16)
    run(**given | {name: [w.float() for w in given[name]] for name in ("q_weights", "k_weights")})


@pytest.mark.parametrize("size", [dict(B=0, T=3, H=2, G=1, D=64, R=64), dict(B=2, T=0, H=2, G=1, D=64, R=64)])
def test_no_tokens(run: Runner, size: dict) -> None:
    assert run(**arguments(size))[0].numel() == 0


@INTERLEAVED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_as_separate_layers_do(run: Runner, dtype: torch.dtype, interleaved: bool) -> None:
    """With `round_norm`, what a norm that stores its result and a rotation in fp32 give, bit for bit."""
    run.rounds_once = False
    given = arguments(dict(B=2, T=7, H=4, G=3, D=128, R=128), dtype)
    results = run(**given, interleaved=interleaved, round_norm=True)
    for x, (w,), y in zip((given["q"], given["k"]), (given["q_weights"], given["k_weights"]), results, strict=True):
        normed = torch.nn.functional.rms_norm(x, (128,), w, 1e-6).float()
        expected = rotated(normed, *given["cos_sin"].chunk(2, dim=-1), interleaved).to(dtype)
        # Where sums go in another order the norm may round to the neighbour, next to a tie, and both of a pair with it.
        differs = (y != expected).double().mean().item()
        assert differs == 0 if run.target.backend == "reference" else differs < 4 * accuracy.TOLERANCE[dtype]
    for kept, once in zip(results, run(**given, interleaved=interleaved, round_norm=False), strict=True):
        assert not torch.equal(kept, once)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x * cos + (x turned by 90 degrees) * sin, with angles [T, R / 2] repeated for both members of a pair."""
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1)[:, None] for t in (cos, sin))
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        cos, sin = (torch.cat([t, t], dim=-1)[:, None] for t in (cos, sin))
        turned = torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], dim=-1)
    return x * cos + turned * sin


@INTERLEAVED
def test_formula(interleaved: bool) -> None:
    """Unit root mean square, times the weight, pairs turned as complex numbers, the rest left."""
    given = arguments(dict(B=2, T=3, H=2, G=1, D=64, R=48))
    q, k, (w,), (v,), cos_sin = accuracy.to_double(list(given.values()))
    turn = torch.complex(*cos_sin.chunk(2, dim=-1))[:, None]
    expected = []
    for x, weight in ((q, w), (k, v)):
        y = weight * x * (64 / (x.square().sum(-1, keepdim=True) + 64 * 1e-6)).sqrt()
        first, second = (y[..., :48:2], y[..., 1:48:2]) if interleaved else (y[..., :24], y[..., 24:48])
        pairs = torch.complex(first, second) * turn
        parts = torch.stack([pairs.real, pairs.imag], dim=-1 if interleaved else -2).flatten(-2)
        expected.append(torch.cat([parts, y[..., 48:]], dim=-1))
    qk_norm_rope.reference(q, k, [w], [v], cos_sin, interleaved=interleaved)
    for x, y in zip((q, k), expected, strict=True):
        accuracy.assert_close(x, y, y)


def test_zeros_stay(run: Runner) -> None:
    given = arguments(SIZES[1])
    q, _ = run(**given | dict(q=torch.zeros_like(given["q"])))
    assert (q == 0).all()


def test_not_a_number_stays_in_its_head(run: Runner) -> None:
    given = arguments(dict(B=1, T=2, H=3, G=2, D=64, R=64))
    given["k"][0, 1, 0, 5] = float("nan")
    q, k = run(**given)
    assert q.isfinite().all()
    assert k.isnan().any(-1).nonzero().tolist() == [[0, 1, 0]]


def test_gradients_through_the_reference() -> None:
    """The op writes into copies, which autograd follows."""
    given = arguments(dict(B=1, T=2, H=1, G=1, D=4, R=4))
    q, k, (w,), (v,), cos_sin = (accuracy.to_double(a) for a in given.values())

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (t.clone() for t in leaves[:2])
        qk_norm_rope(q, k, [leaves[2]], [leaves[3]], cos_sin)
        return q, k

    leaves = [t.requires_grad_() for t in (q, k, w, v)]
    assert torch.autograd.gradcheck(call, leaves)


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=3, H=4, G=2, D=64, R=32), streams=2) | dict(positions=torch.arange(3))
NARROW = arguments(dict(B=2, T=3, H=4, G=2, D=32, R=32))
REFUSED = {
    "fp64": (dict(q=GOOD["q"].double(), k=GOOD["k"].double()), "q is torch.float64"),
    "dtypes differ": (dict(k=GOOD["k"].half()), "k is torch.float16"),
    "tokens differ": (dict(k=torch.zeros(2, 2, 2, 64)), "batch, tokens or head width differ"),
    "widths differ": (dict(k=torch.zeros(2, 3, 2, 128)), "batch, tokens or head width differ"),
    "dimensions": (dict(q=torch.zeros(3, 4, 64)), "3 and 4 dimensions"),
    "width": ({name: NARROW[name] for name in "qk"}, "heads are 32 wide"),
    "q stride": (dict(q=torch.zeros(2, 3, 64, 4).mT), "strides 4 and 1"),
    "k stride": (dict(k=torch.zeros(2, 3, 64, 2).mT), "strides 1 and 2"),
    "weights of one": (dict(k_weights=GOOD["k_weights"][:1]), "2 and 1 weights"),
    "three weights": ({f"{n}_weights": [torch.ones(64)] * 3 for n in "qk"}, "3 and 3 weights"),
    "weight shape": (dict(q_weights=[torch.ones(64), torch.ones(32)]), "shape (32,)"),
    "weight stride": (dict(q_weights=[torch.ones(64), torch.ones(128)[::2]]), "expected (64,), contiguous"),
    "weight fp64": (dict(q_weights=[torch.ones(64).double()] * 2), "dtype torch.float64"),
    "weights differ": (dict(k_weights=[torch.ones(64).half()] * 2), "weights are torch.float32 and torch.float16"),
    "table fp64": (dict(cos_sin=GOOD["cos_sin"].double()), "cos_sin is (3, 32), torch.float64"),
    "table stride": (dict(cos_sin=torch.zeros(32, 3).T), "strides (1, 3)"),
    "table width": (dict(cos_sin=torch.zeros(3, 31)), "31 wide"),
    "table wider than heads": (dict(cos_sin=torch.zeros(3, 128)), "128 wide"),
    "table rows": (dict(cos_sin=torch.zeros(2, 32), positions=None), "2 rows for 3 tokens"),
    "positions shape": (dict(positions=torch.arange(4)), "positions are (4,)"),
    "positions dtype": (dict(positions=torch.zeros(3)), "torch.float32, expected"),
    "gradient": (dict(k=GOOD["k"].clone().requires_grad_()), "no backward"),
    "gradient of a weight": (dict(q_weights=[torch.ones(64, requires_grad=True)] * 2), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(qk_norm_rope, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(qk_norm_rope, **GOOD)


def test_taken() -> None:
    """The call that the refusals above differ from in one thing each."""
    assert refusal(qk_norm_rope, **GOOD) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in GOOD.items()}
    given |= {n: [w.to(run.target.device).requires_grad_() for w in given[n]] for n in ("q_weights", "k_weights")}
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        qk_norm_rope(**given)
