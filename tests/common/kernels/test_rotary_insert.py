"""rotary_insert: numbers, which slots are written and which are not, strides, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.kernels.test_rotary_embedding import angles
from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common.kernels import rotary_embedding as rotation
from xpu_ports.common.kernels.rotary_embedding import rotary_embedding
from xpu_ports.common.kernels.rotary_insert import rotary_insert

pytestmark = pytest.mark.op("rotary_insert")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# H heads of the queries, G of the keys, S slots.
SIZES = [
    dict(B=1, T=1, H=1, G=1, K=2, V=1, S=1),
    dict(B=2, T=7, H=3, G=3, K=14, V=14, S=9),
    dict(B=1, T=5, H=8, G=2, K=64, V=128, S=6),
    dict(B=3, T=1, H=2, G=5, K=128, V=3, S=4),
    dict(B=1, T=1, H=33, G=32, K=224, V=224, S=3),
    dict(B=1, T=2, H=3, G=2, K=1024, V=2048, S=2),
]


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict[str, Any]:
    """One call's, by name; all sequences of the batch have the same positions."""
    B, T, H, G, K, V, S = size.values()
    q, k, v = (normal(B, T, *heads, dtype=dtype, layout=layout) for heads in ((H, K), (G, K), (G, V)))
    keys, values = torch.randn(B, G, S, K).to(dtype), torch.randn(B, G, S, V).to(dtype)
    return dict(q=q, k=k, v=v, **angles(1, T, K // 2), slots=torch.randperm(S)[:T], keys=keys, values=values)


@FLOATS
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, own: bool, dtype: torch.dtype) -> None:
    """Positions are the batch's, or each sequence's own."""
    given = arguments(size, dtype) | (angles(size["B"], size["T"], size["K"] // 2) if own else {})
    q, keys, values = run(**given)
    assert q.is_contiguous()
    assert (q.shape, q.dtype) == (given["q"].shape, dtype)
    # What is not written is left, what is not rotated is copied.
    others = torch.ones(size["S"], dtype=torch.bool).index_fill(0, given["slots"], False)
    assert torch.equal(keys[:, :, others], given["keys"][:, :, others])
    assert torch.equal(values[:, :, others], given["values"][:, :, others])
    assert torch.equal(values[:, :, given["slots"]], given["v"].transpose(1, 2))


@FLOATS
def test_what_the_two_steps_give(run: Runner, dtype: torch.dtype) -> None:
    """Bit for bit: a captured step and one that is not differ in nothing but launches."""
    given = arguments(SIZES[1], dtype)
    q, keys, _ = run(**given)
    expected_q, expected_k = rotary_embedding.reference(*(given[name] for name in ("q", "k", "cos", "sin")))
    if run.target.backend == "reference":
        assert torch.equal(q, expected_q)
        assert torch.equal(keys[:, :, given["slots"]], expected_k.transpose(1, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str) -> None:
    run(**arguments(dict(B=2, T=5, H=4, G=3, K=24, V=16, S=7), torch.bfloat16, layout))


def test_layouts_of_the_cache(run: Runner) -> None:
    """Tokens before heads, and a part of a longer cache."""
    given = arguments(dict(B=2, T=2, H=4, G=3, K=8, V=8, S=5), torch.bfloat16)
    keys, values = torch.randn(2, 5, 3, 8).bfloat16().transpose(1, 2), torch.randn(2, 3, 9, 8).bfloat16()[:, :, 2:7]
    run(**given | dict(keys=keys, values=values))


def test_a_slot_of_a_longer_tensor(run: Runner) -> None:
    """One number beside others, as a count of tokens stands beside positions."""
    given = arguments(dict(B=2, T=1, H=4, G=3, K=8, V=8, S=5))
    run(**given | dict(slots=torch.tensor([7, 9, 3])[2:]))
    run(**arguments(dict(B=2, T=2, H=4, G=3, K=8, V=8, S=5)) | dict(slots=torch.tensor([4, 9, 0])[::2]))


@pytest.mark.parametrize("size", [dict(B=0, T=1, H=2, G=1, K=8, V=8, S=3), dict(B=2, T=0, H=2, G=1, K=8, V=8, S=3)])
def test_no_tokens(run: Runner, size: dict) -> None:
    q, keys, _ = run(**arguments(size))
    assert q.shape == (size["B"], size["T"], 2, 8)
    assert keys.shape == (size["B"], 1, 3, 8)


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, T=3, H=4, G=2, K=6, V=8, S=5))


def _turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT


REFUSED = {
    "q fp64": (dict(q=GOOD["q"].double()), "dtype torch.float64"),
    "angles of other tokens": (angles(1, 4, 3), "expected (2, 3, 3) or one row"),
    **{f"{name} stride": ({name: _turned(GOOD[name])}, "stride") for name in ("v", "keys", "values")},
    **{f"{name} dtype": ({name: GOOD[name].half()}, "not all of one dtype") for name in ("v", "keys", "values")},
    "heads of v": (dict(v=torch.zeros(2, 3, 3, 8)), "v is (2, 3, 3, 8)"),
    "wide values": (dict(v=torch.zeros(2, 3, 2, 2049)), "at most 2048"),
    "slots of other tokens": (dict(slots=torch.tensor([0, 1])), "slots are (2,)"),
    "slots of 32 bits": (dict(slots=torch.tensor([0, 1, 2], dtype=torch.int32)), "of torch.int32"),
    "keys of other heads": (dict(keys=torch.zeros(2, 3, 5, 6)), "keys and values are (2, 3, 5, 6)"),
    "keys without heads": (dict(keys=torch.zeros(2, 5, 6)), "keys and values are (2, 5, 6)"),
    "caches of two lengths": (dict(values=torch.zeros(2, 2, 4, 8)), "keys and values are"),
    "gradient": (dict(k=GOOD["k"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(rotary_insert, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "AVAILABLE", False)
    monkeypatch.setattr(rotation, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(rotary_insert, **GOOD)


def test_taken() -> None:
    """Zamba2's step is, and the call that the refusals above differ from in one thing each."""
    assert refusal(rotary_insert, **GOOD) == ""
    size = dict(B=1, T=1, H=32, G=32, K=128, V=128, S=8)
    assert refusal(rotary_insert, **arguments(size, torch.bfloat16)) == ""
