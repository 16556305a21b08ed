"""Times that a card has not been measured for: from bytes, FLOPs and published roofs. Predictions, never measurements.

    seconds = max(bytes / memory, FLOP in products / matrix units, other FLOP / vector units) / share

The share of the roof is 1, which no kernel reaches, or what was measured of the same call on another card. FP8 and
MXFP4 weights are fewer bytes; Intel's matrix units before Xe3P have neither, so their products count as those of bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xpu_ports.common.bench.case import Case, Work
from xpu_ports.common.bench.files import PEERS, Results, ResultsError
from xpu_ports.common.bench.roofline import fastest, operations, seconds_of
from xpu_ports.common.cards import Card, Roofs, card_of_driver
from xpu_ports.common.device import ARCHITECTURES

# Below this share of its roof a call waits for launches and latency, which no roof says anything about.
LEAST_SHARE = 0.1
ROOF = "not measured, so that the roof is all there is"
TOO_SMALL = f"below {100 * LEAST_SHARE:.0f}%: bound by latency, which is not predicted"


@dataclass(frozen=True)
class Share:
    """How much of its roof a call reached where it was measured; None where that says nothing here."""

    value: float | None
    source: str


@dataclass(frozen=True)
class Prediction:
    """What a card would take for one call."""

    # An op's row or a model, and its size or form.
    what: str
    size: str
    card: str
    work: Work
    # The roof that is reached first: "memory", "matrix" or "vector"; and the seconds that it leaves.
    bound: str
    floor: float
    share: Share

    @property
    def seconds(self) -> float | None:
        """The prediction; None where a share says that there is none."""
        return None if self.share.value is None else self.floor / self.share.value

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "prediction",
            "what": self.what,
            "size": self.size,
            "card": self.card,
            "bytes": self.work.moved,
            "flops": self.work.flops,
            "elementwise": self.work.elementwise,
            "bound": self.bound,
            "roof_seconds": self.floor,
            "share": self.share.value,
            "share_measured": self.share.value is not None and self.share.source != ROOF,
            "share_source": self.share.source,
            "predicted_seconds": self.seconds,
        }


def predict(what: str, size: str, card: Card, work: Work, share: Share, by_kernel: bool = True) -> Prediction:
    """The time of some work on a card.

    Args:
        by_kernel: done by kernels of this project rather than by a library's products: on Arc A, Triton does not reach
            the matrix units, so that their products are vector arithmetic.
    """
    assert card.roofs is not None, card
    if by_kernel and not ARCHITECTURES[card.architecture].matrix_units:
        work = Work(work.moved, 0, work.flops + work.elementwise)
    bounds = card.roofs.bounds(work.moved, work.flops, work.elementwise)
    bound = max(bounds, key=lambda name: bounds[name])
    return Prediction(what, size, card.name, work, bound, bounds[bound], share)


# ---------------------------------------------------------------------------------------------------------------- ops


def predict_ops(
    cards: Sequence[Card],
    cases: Sequence[Case],
    sizes: Sequence[str] | None,
    dtype: torch.dtype,
    measured: Sequence[Results] = (),
) -> list[Prediction]:
    """Times of ops.

    Args:
        cards: the cards.
        cases, sizes: rows, and their sizes instead of each row's own.
        dtype: of the benchmark; products in float32 are none of the matrix units'.
        measured: result files, whose shares of the published roofs of their device count here.

    Raises:
        ValueError: a size is not one of a row.
        ResultsError: the device of a file has no published roofs here.
    """
    shares = op_shares(measured)
    found = []
    for case in cases:
        for size in sizes if sizes is not None else case.sizes:
            work = case.work_without_data(size, dtype)
            if dtype == torch.float32:
                work = Work(work.moved, 0, work.flops + work.elementwise)
            key = (case.name, size, str(dtype).removeprefix("torch."))
            share = shares.get(key, Share(1.0, ROOF)) if measured else Share(1.0, ROOF)
            found += [predict(case.name, size, card, work, share, case.has_kernel) for card in cards]
    return found


def op_shares(measured: Iterable[Results]) -> dict[tuple[str, str, str], Share]:
    """By (row, size, dtype): the share of the published roof that our fastest back end reached."""
    shares = {}
    for results in measured:
        roofs = published(results)
        for record in fastest(results):
            products, elementwise = operations(record)
            floor = roofs.floor(int(record["moved"]), products, elementwise)
            shares[record["case"], record["size"], record["dtype"]] = _share(floor / seconds_of(record), results)
    return shares


def published(results: Results) -> Roofs:
    """The published roofs of the device of a file.

    Raises:
        ResultsError: there are none.
    """
    card = card_of_driver(results.device)
    if card is None or card.roofs is None:
        raise ResultsError(f"{results.path}: measured on {results.device}, whose published roofs are not known here")
    return card.roofs


def _share(value: float, results: Results) -> Share:
    if value < LEAST_SHARE:
        return Share(None, f"on {results.device} {TOO_SMALL}")
    # Above a published roof: what was counted as moved stayed in the cache.
    return Share(min(value, 1.0), f"measured on {results.device}")


# ------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class StepWork:
    """A decode step of a language model: the work, and what must fit a card."""

    work: Work
    weights: int
    cache: int


def step_work(
    elements: Mapping[str, tuple[int, float]],
    reads: Callable[[str, int], float],
    cache_read: int,
    cache: int,
    batch: int,
) -> StepWork:
    """Bytes and FLOPs of a step in which each of `batch` sequences gets a token.

    Args:
        elements: name -> (elements, bytes) of each weight.
        reads: (name, sequences) -> how often the step reads the weight, as `weight_reads` of a model's memory.py.
        cache_read: bytes of the cache that the step reads and writes.
        cache: bytes that it takes.
        batch: sequences.
    """
    moved = sum(reads(name, batch) * size for name, (_, size) in elements.items())
    # A product and a sum for each weight that a token meets.
    flops = 2 * batch * sum(reads(name, 1) * many for name, (many, _) in elements.items())
    weights = sum(size for _, size in elements.values())
    return StepWork(Work(round(moved) + cache_read, round(flops)), math.ceil(weights), cache)


def step_share(work: Work, key: Mapping[str, str], measured: Iterable[Results]) -> Share:
    """The share of the published roof that the fastest step of ours with this key reached, as `Measurement.key` has it.

    Raises:
        ResultsError: the device of a file that has it has no published roofs here.
    """
    found = [
        (m.median, results)
        for results in measured
        for m in results.measurements
        if m.ours
        and m.median is not None
        and key.items() <= dict(m.key).items()
        and "mxfp4" not in dict(m.key)["variant"]
    ]
    if not found:
        return Share(1.0, ROOF)
    took, results = min(found, key=lambda pair: pair[0])
    return _share(published(results).floor(work.moved, work.flops, work.elementwise) / took, results)


def model_share(
    step_at: Callable[[int], StepWork], model: str, layout: str, dtype: str, batch: int, measured: Iterable[Results]
) -> Share:
    """The share of the published roof that decoding the same model reached at the same batch size, captured if it was.

    Args:
        step_at: the step with so many tokens in the cache.
        model, layout, dtype, batch: what must have been measured.
        measured: result files.

    Raises:
        ResultsError: the device of a file that has it has no published roofs here.
    """
    best: tuple[float, int, Results] | None = None
    for results in measured:
        environment = results.environment
        if (environment.get("model"), environment.get("layout"), environment.get("dtype")) != (model, layout, dtype):
            continue
        for record in results.models:
            if record["batch"] == batch and record["variant"] not in PEERS:
                rate, tokens = float(record["decode_tokens_per_s"]), int(record["prompt"])
                # Half of the new tokens are there on average; older files do not say how many there were.
                tokens += int(record.get("new") or 0) // 2
                if best is None or rate > best[0]:
                    best = rate, tokens, results
    if best is None:
        return Share(1.0, ROOF)
    rate, tokens, results = best
    work = step_at(tokens).work
    return _share(published(results).floor(work.moved, work.flops, work.elementwise) * rate / batch, results)
