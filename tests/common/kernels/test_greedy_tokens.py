"""greedy_tokens: torch's argmax with its rules for ties and NaN, rows that end and have ended, strides, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common.kernels import greedy_tokens as module
from xpu_ports.common.kernels.greedy_tokens import BLOCK, MOST_LOGITS, greedy_tokens

pytestmark = pytest.mark.op("greedy_tokens")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
NAN, INF = float("nan"), float("inf")


def arguments(logits: Tensor, unfinished: Tensor | None = None, eos: list[int] | None = None) -> dict[str, Any]:
    """One call's, by name."""
    B = logits.shape[0]
    return dict(
        logits=logits,
        tokens=torch.full((B,), -5),
        unfinished=torch.ones(B, dtype=torch.bool) if unfinished is None else unfinished,
        eos=None if eos is None else torch.tensor(eos, dtype=torch.long),
        pad=None if eos is None else torch.tensor(3),
    )


@FLOATS
@pytest.mark.parametrize(
    ("B", "V"), [(1, 1), (3, 7), (2, 1024), (2, 1025), (1, 32000), (2, 3 * BLOCK), (1, 129 * BLOCK + 1), (0, 5)]
)
def test_sizes(run: Runner, B: int, V: int, dtype: torch.dtype) -> None:
    """In 16 bits most rows have ties."""
    logits = torch.randn(B, V).to(dtype)
    tokens, unfinished = run(**arguments(logits))
    assert torch.equal(tokens, logits.argmax(-1))
    assert unfinished.all()


@FLOATS
def test_each_place(run: Runner, dtype: torch.dtype) -> None:
    """The largest may stand anywhere: at the ends of what a program has, too."""
    V = 2 * BLOCK + 9
    places = torch.tensor([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, V - 1])
    logits = torch.randn(len(places), V).clamp(max=3.0).scatter(1, places[:, None], 4.0)
    tokens, _ = run(**arguments(logits.to(dtype)))
    assert torch.equal(tokens, places)


@FLOATS
@pytest.mark.parametrize(
    ("some", "expected"),
    [
        ({5: 2.0, 9: 2.0}, 5),
        ({5: 2.0, 1500: 2.0}, 5),
        ({9: 2.0, 1500: NAN, 1999: NAN}, 1500),
        ({9: INF, 1500: NAN}, 1500),
        ({9: -NAN, 1500: INF}, 9),
        ({9: INF, 1500: INF}, 9),
    ],
    ids=str,
)
def test_ties_and_nan(run: Runner, some: dict[int, float], expected: int, dtype: torch.dtype) -> None:
    logits = torch.full((1, 2000), -1.0, dtype=dtype)
    for place, value in some.items():
        logits[0, place] = value
    assert run(**arguments(logits))[0].item() == logits.argmax(-1).item() == expected


@FLOATS
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([-0.0, 0.0, -1.0], 0),
        ([-1.0, 0.0, -0.0], 1),
        ([-INF, -INF], 0),
        ([-INF, -3.0, -2.0, -2.5], 2),
        ([-INF, -65504.0], 1),
        ([-INF] * 1100 + [-2.0], 1100),
        ([-INF] * 1100, 0),
        ([1e-8, -1e-8, 6e-8], 2),
        ([-6e-8, -0.0], 1),
    ],
    ids=lambda value: str(value)[:30],
)
def test_order(run: Runner, row: list[float], expected: int, dtype: torch.dtype) -> None:
    """Both zeros are equal, what is masked is lower than all, and the smallest numbers are not zeros."""
    logits = torch.tensor([row], dtype=torch.float32).to(dtype)
    assert run(**arguments(logits))[0].item() == logits.argmax(-1).item() == expected


@pytest.mark.parametrize("eos", [[4], [9, 4], [7, 8, 9], [5]], ids=str)
def test_rows_that_end(run: Runner, eos: list[int]) -> None:
    """Rows that have ended get the pad, and stay ended where the pad is no token that ends a row."""
    logits = torch.zeros(4, 12).scatter(1, torch.tensor([[4], [4], [6], [9]]), 1.0)
    given = arguments(logits, torch.tensor([True, False, True, True]), eos)
    tokens, unfinished = run(**given)
    assert tokens.tolist() == [4, 3, 6, 9]
    assert unfinished.tolist() == [4 not in eos, False, True, 9 not in eos]


def test_pad_that_ends(run: Runner) -> None:
    given = arguments(torch.randn(2, 5), torch.tensor([False, False]), [3])
    tokens, unfinished = run(**given | dict(pad=torch.tensor([3])))
    assert tokens.tolist() == [3, 3]
    assert not unfinished.any()


def test_no_token_ends(run: Runner) -> None:
    """An empty list is no end either."""
    _, unfinished = run(**arguments(torch.randn(2, 5), torch.tensor([True, False]), []))
    assert unfinished.tolist() == [True, False]
    # Without a list the rows that have ended are not asked about.
    logits = torch.randn(2, 5)
    tokens, unfinished = run(**arguments(logits, torch.tensor([True, False])))
    assert torch.equal(tokens, logits.argmax(-1))
    assert unfinished.tolist() == [True, False]


def test_strides(run: Runner) -> None:
    """A column of all tokens, the last of several positions' logits, the same for all rows."""
    ids, logits = torch.zeros(3, 9, dtype=torch.long), torch.randn(3, 4, 70).bfloat16()
    given = arguments(logits[:, -1], eos=[1])
    run(**given | dict(tokens=ids[:, 5], unfinished=torch.ones(3, 2, dtype=torch.bool)[:, 1]))
    run(**given | dict(logits=torch.randn(1, 70).expand(3, 70)))


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(torch.randn(2, 6), eos=[1, 2])
REFUSED = {
    "fp64": (dict(logits=GOOD["logits"].double()), "dtype torch.float64"),
    "positions": (dict(logits=torch.zeros(2, 1, 6)), "logits are (2, 1, 6)"),
    "no logits": (dict(logits=torch.zeros(2, 0)), "logits are (2, 0)"),
    "last stride": (dict(logits=torch.zeros(6, 2).T), "the last dimension of the logits has stride 2"),
    "too many": (dict(logits=torch.zeros(2, 1).expand(2, MOST_LOGITS + 1)), "not [B, 1 to"),
    "tokens of other rows": (dict(tokens=torch.zeros(3, dtype=torch.long)), "tokens are (3,)"),
    "tokens of 32 bits": (dict(tokens=torch.zeros(2, dtype=torch.int32)), "of torch.int32"),
    "unfinished of other rows": (dict(unfinished=torch.ones(3, dtype=torch.bool)), "unfinished is (3,)"),
    "unfinished in bytes": (dict(unfinished=torch.ones(2, dtype=torch.uint8)), "of torch.uint8"),
    "eos of 32 bits": (dict(eos=torch.zeros(2, dtype=torch.int32)), "eos is (2,) of torch.int32"),
    "eos as a number": (dict(eos=torch.tensor(1)), "eos is ()"),
    "eos with gaps": (dict(eos=torch.arange(6)[::2]), "contiguous"),
    "no pad": (dict(pad=None), "pad is not one number"),
    "two pads": (dict(pad=torch.tensor([0, 1])), "pad is not one number"),
    "pad of 32 bits": (dict(pad=torch.tensor(0, dtype=torch.int32)), "pad is not one number"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(greedy_tokens, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(greedy_tokens, **GOOD)


def test_an_end_without_a_pad() -> None:
    with pytest.raises(ValueError, match="there is no pad"):
        greedy_tokens(**GOOD | dict(pad=None))


def test_taken() -> None:
    assert refusal(greedy_tokens, **GOOD) == ""
    assert refusal(greedy_tokens, **GOOD | dict(eos=None, pad=None)) == ""
