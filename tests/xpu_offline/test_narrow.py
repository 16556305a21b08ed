"""The combinations that are picked have every value of every parameter, evenly."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from xpu_offline.narrow import every_value


def product(**parameters: int) -> list[dict[str, int]]:
    return [dict(zip(parameters, c, strict=True)) for c in itertools.product(*map(range, parameters.values()))]


@pytest.mark.parametrize("counts", [dict(size=9, dtype=3), dict(a=2, b=2, c=5), dict(a=1), dict(a=4, b=4)])
def test_every_value(counts: dict[str, int]) -> None:
    combinations = product(**counts)
    picked = [combinations[i] for i in every_value(combinations)]
    assert {item for c in picked for item in c.items()} == {item for c in combinations for item in c.items()}
    assert len(picked) == max(counts.values())


def test_evenly() -> None:
    combinations = product(size=9, dtype=3)
    assert Counter(combinations[i]["dtype"] for i in every_value(combinations)) == {0: 3, 1: 3, 2: 3}


def test_what_is_not_a_product() -> None:
    combinations = [dict(a=0, b=0), dict(a=1, b=0), dict(a=1, b=1)]
    assert every_value(combinations) == [0, 2]


def test_without_parameters() -> None:
    assert every_value([{}]) == [0]
