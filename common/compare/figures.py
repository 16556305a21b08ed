"""How far logits are from those that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Tokens compared at a time, in fp64 on the CPU.
ROWS = 64
# Bins of the histogram of differences: powers of ten, and what lies below.
DECADES = range(-9, 4)
TOP = 5


@dataclass
class LogitFigures:
    """Differences of logits, added up window by window."""

    tokens: int = 0
    largest: float = 0.0
    # The largest logit of the reference: what differences are shares of.
    scale: float = 0.0
    _sum: float = 0.0
    _elements: int = 0
    _same_1: int = 0
    _same_5: int = 0
    _nll_expected: float = 0.0
    _nll: float = 0.0
    _predicted: int = 0
    _histogram: Tensor = field(default_factory=lambda: torch.zeros(len(DECADES) + 1, dtype=torch.int64))
    _kl: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, got: Tensor, ids: Tensor) -> None:
        """Compare a window.

        Args:
            expected, got: [T, V], the reference's logits and the port's.
            ids: [T], the tokens.
        """
        kl = []
        for first in range(0, expected.shape[0], ROWS):
            rows = slice(first, first + ROWS)
            following = ids[first + 1 : first + 1 + ROWS].cpu()
            kl.append(self._rows(expected[rows].cpu().double(), got[rows].cpu().double(), following))
        self._kl.append(torch.cat(kl))

    def _rows(self, expected: Tensor, got: Tensor, following: Tensor) -> Tensor:
        difference = (got - expected).abs()
        # A NaN goes through all of these, and is within no bound.
        self.largest = _larger(self.largest, difference.max().item())
        self.scale = _larger(self.scale, expected.abs().max().item())
        self._sum += difference.sum().item()
        self._elements += difference.numel()
        decades = difference.log10().floor().clamp(DECADES[0] - 1, DECADES[-1]).nan_to_num(DECADES[-1])
        self._histogram += torch.bincount((decades - DECADES[0] + 1).long().flatten(), minlength=len(DECADES) + 1)
        top, other = expected.topk(min(TOP, expected.shape[-1])).indices, got.topk(min(TOP, got.shape[-1])).indices
        self._same_1 += int((top[:, 0] == other[:, 0]).sum())
        self._same_5 += int((top[:, :, None] == other[:, None]).sum())
        log_p, log_q = expected.log_softmax(-1), got.log_softmax(-1)
        N = following.shape[0]
        self._nll_expected -= log_p[:N].gather(1, following[:, None]).sum().item()
        self._nll -= log_q[:N].gather(1, following[:, None]).sum().item()
        self._predicted += N
        self.tokens += expected.shape[0]
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    @property
    def mean(self) -> float:
        return self._sum / max(self._elements, 1)

    @property
    def perplexity(self) -> float:
        return _exp(self._nll / max(self._predicted, 1))

    @property
    def perplexity_expected(self) -> float:
        return _exp(self._nll_expected / max(self._predicted, 1))

    @property
    def top_1(self) -> float:
        return self._same_1 / max(self.tokens, 1)

    @property
    def top_5(self) -> float:
        return self._same_5 / max(self.tokens * TOP, 1)

    @property
    def kl(self) -> Tensor:
        """[tokens], in nats."""
        return torch.cat(self._kl) if self._kl else torch.zeros(0, dtype=torch.float64)

    def kl_by_position(self) -> list[float]:
        """Mean over windows; windows of another length than the first do not count."""
        if not self._kl:
            return []
        return torch.stack([kl for kl in self._kl if kl.shape == self._kl[0].shape]).mean(0).tolist()

    def histogram(self) -> dict[str, int]:
        """How many differences lie in each decade: "<1e-9", "1e-9", ..."""
        names = [f"<1e{DECADES[0]}", *(f"1e{d}" for d in DECADES)]
        return dict(zip(names, self._histogram.tolist(), strict=True))


def _larger(a: float, b: float) -> float:
    return b if math.isnan(b) else max(a, b)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


class Nll:
    """Perplexity alone."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, logits: Tensor, ids: Tensor) -> None:
        """logits [T, V] at the tokens ids [T]."""
        for first in range(0, logits.shape[0] - 1, ROWS):
            following = ids[first + 1 : first + 1 + ROWS].cpu()
            log_p = logits[first : first + following.shape[0]].cpu().double().log_softmax(-1)
            self._sum -= log_p.gather(1, following[:, None]).sum().item()
            self._count += following.shape[0]

    @property
    def perplexity(self) -> float:
        return _exp(self._sum / max(self._count, 1))
