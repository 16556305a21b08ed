"""Picks from all combinations of a test's parameters a few that have every value of every parameter."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

Combination = Mapping[str, Hashable]


def every_value(combinations: Sequence[Combination]) -> list[int]:
    """Positions of combinations that have, together, every value of every parameter: greedily, early ones first.

    Nine sizes in three dtypes make nine combinations of 27, each dtype in three of them.
    """
    missing = {item for combination in combinations for item in combination.items()}
    uses = dict.fromkeys(missing, 0)
    picked: list[int] = []
    left = list(range(len(combinations)))
    while missing:
        # The most values that are missing still; among those the values used least so far.
        best = min(
            left,
            key=lambda i: (
                -len(missing & set(combinations[i].items())),
                sum(uses[item] for item in combinations[i].items()),
                i,
            ),
        )
        left.remove(best)
        picked.append(best)
        missing -= set(combinations[best].items())
        for item in combinations[best].items():
            uses[item] += 1
    return sorted(picked) or left[:1]
