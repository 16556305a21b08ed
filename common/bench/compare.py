"""Two result files side by side: what became slower or faster by more than both spreads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xpu_ports.common.bench.files import Measurement, Results

# Runs of the same code on the same card differ by a few percent in what their spreads do not show: clocks, other
# guests of the host, where memory happens to lie.
THRESHOLD = 0.05
SLOWER, FASTER, SPREAD = "slower", "faster", "within the spread"
LOST, WRONG = "no time in B", "wrong in B"
ONLY_A, ONLY_B = "only in A", "only in B"
# Of ours, each makes B a step back.
REGRESSIONS = (SLOWER, LOST, WRONG)


@dataclass(frozen=True)
class Row:
    """A number of both files, or of one."""

    a: Measurement | None
    b: Measurement | None
    # How many times as fast B is (for bytes: as small); None where there are not two numbers.
    gain: float | None
    verdict: str

    @property
    def either(self) -> Measurement:
        found = self.b if self.a is None else self.a
        assert found is not None
        return found

    @property
    def ours(self) -> bool:
        return self.either.ours

    @property
    def regression(self) -> bool:
        return self.ours and self.verdict in REGRESSIONS

    @property
    def changed(self) -> bool:
        return self.verdict in (*REGRESSIONS, FASTER, ONLY_A, ONLY_B)


def compare(a: Results, b: Results, threshold: float = THRESHOLD) -> list[Row]:
    """The numbers of A in its order, then those that only B has."""
    theirs = {m.key: m for m in b.measurements}
    rows = [_row(m, theirs.pop(m.key, None), threshold) for m in a.measurements]
    rows += [_row(None, m, threshold) for m in theirs.values()]
    # What neither could time is nothing to compare.
    return [row for row in rows if any(m is not None and m.median is not None for m in (row.a, row.b))]


def _row(a: Measurement | None, b: Measurement | None, threshold: float) -> Row:
    if a is None or b is None:
        return Row(a, b, None, ONLY_B if a is None else ONLY_A)
    gain = None
    if a.median is not None and b.median is not None:
        gain = b.median / a.median if a.larger_is_better else a.median / b.median
    return Row(a, b, gain, _verdict(a, b, gain, threshold))


def _verdict(a: Measurement, b: Measurement, gain: float | None, threshold: float) -> str:
    if a.right and not b.right and b.median is not None:
        return WRONG
    if gain is None:
        return LOST if b.median is None else ONLY_B
    if overlap(a, b):
        return SPREAD
    if abs(gain - 1.0) <= threshold:
        return f"within {100 * threshold:g}%"
    return FASTER if gain > 1.0 else SLOWER


def overlap(a: Measurement, b: Measurement) -> bool:
    """Whether the two spreads meet; a number without one is a point."""
    (a_low, a_high), (b_low, b_high) = _ends(a), _ends(b)
    return a_low <= b_high and b_low <= a_high


def _ends(m: Measurement) -> tuple[float, float]:
    assert m.median is not None
    return (m.median if m.low is None else m.low), (m.median if m.high is None else m.high)


def differences(a: Results, b: Results) -> list[str]:
    """What else than the code differs, in words: driver, platform, versions."""
    found = []
    for name in ("driver", "platform"):
        if a.environment.get(name) != b.environment.get(name):
            found.append(f"{name} {a.environment.get(name)} -> {b.environment.get(name)}")
    versions: list[Mapping[str, Any]] = [a.environment["versions"], b.environment["versions"]]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        before, after = (v.get(name) for v in versions)
        if before != after:
            found.append(f"{name} {before or 'not installed'} -> {after or 'not installed'}")
    return found


def describe(results: Results) -> str:
    """A file in one line: where, when and with what it was measured."""
    environment = results.environment
    versions = environment["versions"]
    parts = [
        results.device,
        f"driver {environment['driver']}" if environment.get("driver") else None,
        f"revision {environment['revision']}" if environment.get("revision") else None,
        str(environment["time"])[:16] if environment.get("time") else None,
        *(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions),
    ]
    return f"{results.path}: {', '.join(filter(None, parts))}"


def to_json(rows: list[Row], a: Results, b: Results, threshold: float) -> dict[str, Any]:
    """All of it as one JSON object; between different devices nothing is a regression."""
    same = a.device == b.device
    return {
        "a": {"path": str(a.path), **a.environment},
        "b": {"path": str(b.path), **b.environment},
        "same_device": same,
        "threshold": threshold,
        "regressions": sum(row.regression and same for row in rows),
        "rows": [
            {
                **dict(row.either.key),
                "unit": row.either.unit,
                "a": _numbers(row.a),
                "b": _numbers(row.b),
                "gain": row.gain,
                "verdict": row.verdict,
                "ours": row.ours,
                "regression": row.regression and same,
            }
            for row in rows
        ],
    }


def _numbers(m: Measurement | None) -> dict[str, Any] | None:
    if m is None:
        return None
    fields = dataclasses.asdict(m)
    return {name: fields[name] for name in ("median", "low", "high", "note", "right", "where")}


def show(m: Measurement | None) -> str:
    """A number with its spread: "2.02 us (2.01-2.03)"."""
    if m is None:
        return ""
    if m.median is None:
        return m.note
    factor, unit = _scale(m.median, m.unit)
    texts = [f"{factor * v:,.4g}" if factor * v < 1000 else f"{factor * v:,.0f}" for v in (m.median, *_ends(m))]
    spread = f" ({texts[1]}-{texts[2]})" if m.low is not None else ""
    return f"{texts[0]} {unit}{spread}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    if unit == "s":
        return next(((f, u) for f, u in ((1e6, "us"), (1e3, "ms")) if value * f < 1000), (1.0, "s"))
    if unit == "bytes":
        return 2.0**-20, "MiB"
    return 1.0, "tok/s" if unit == "tokens/s" else unit
