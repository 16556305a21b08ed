"""What was seen of each kernel on each architecture: filled while the tests run, written as JSON at their end."""

from __future__ import annotations

import io
import json
import pathlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

from xpu_offline.native import Native

_LISTED = 12


@dataclass
class Seen:
    """One kernel on one architecture, over all launches."""

    launches: int = 0
    shared: int = 0
    # By (SPIR-V, flags): the native code, and what was specialized and launched in words.
    natives: dict[tuple[bytes, str], tuple[Future[Native], str]] = field(default_factory=dict)
    # Those of them that are launched at the sizes of models; the others are at the awkward sizes of tests.
    at_model_sizes: set[tuple[bytes, str]] = field(default_factory=set)
    # The error closest to what is allowed, as (error, allowed); bitwise comparisons count as (0, 0).
    error: tuple[float, float] | None = None
    failures: list[str] = field(default_factory=list)


class Record:
    """All observations of a run."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], Seen] = {}
        # Runs ocloc beside the tests.
        self.pool = ThreadPoolExecutor(2)
        # Names what was being compiled, should the compiler take the process down. It stays open: file systems write a
        # file that was cut short to the disk when it is closed, which is slow.
        self._breadcrumb: IO[str] = io.StringIO()
        self._recent: set[tuple[str, str]] = set()
        self._compared = True

    def keep_breadcrumbs_at(self, path: pathlib.Path) -> None:
        """Where `leave_breadcrumb` writes to, for whoever finds the process gone."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._breadcrumb = path.open("w")

    def leave_breadcrumb(self, text: str) -> None:
        """Say what comes next, instead of what was said before."""
        self._breadcrumb.seek(0)
        self._breadcrumb.truncate()
        self._breadcrumb.write(text + "\n")
        self._breadcrumb.flush()

    def of(self, kernel: str, architecture: str) -> Seen:
        return self.seen.setdefault((kernel, architecture), Seen())

    def launched(self, kernel: str, architecture: str) -> Seen:
        """Note a launch; the next comparison is of what it computed."""
        if self._compared:
            self._recent, self._compared = set(), False
        self._recent.add((kernel, architecture))
        seen = self.of(kernel, architecture)
        seen.launches += 1
        return seen

    def compared(self, error: float, allowed: float) -> None:
        """Note a comparison with the oracle."""
        self._compared = True
        for key in self._recent:
            seen = self.seen[key]
            if seen.error is None or _share(error, allowed) > _share(*seen.error):
                seen.error = (error, allowed)

    def new_test(self) -> None:
        """Forget which kernels were launched last."""
        self._recent, self._compared = set(), True

    def rows(self) -> list[dict[str, Any]]:
        """Plain data, one row a kernel and architecture, sorted."""
        return [
            {"kernel": kernel, "architecture": architecture, **_row(seen)}
            for (kernel, architecture), seen in sorted(self.seen.items())
        ]

    def write(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.rows(), indent=1) + "\n")


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed else float(error > 0)


def _worst(spills: dict[str, int]) -> dict[str, int]:
    ordered = sorted((item for item in spills.items() if item[1]), key=lambda item: (-item[1], item[0]))
    return dict(ordered[:_LISTED])


def _row(seen: Seen) -> dict[str, Any]:
    natives = [future.result() for future, _ in seen.natives.values()]
    spills: dict[str, dict[str, int]] = {"model": {}, "tests": {}}
    for key, (future, words) in seen.natives.items():
        spills["model" if key in seen.at_model_sizes else "tests"][words] = future.result().spills
    return {
        "launches": seen.launches,
        "codes": len(natives),
        "shared": seen.shared,
        "dpas": any(n.dpas for n in natives),
        "block_read": any(n.block_read for n in natives),
        "grf": sorted({n.grf for n in natives if n.grf}),
        "simd": sorted({n.simd for n in natives if n.simd}),
        # The most of one launch, None where there is none; and the launches that spill, the worst first.
        "spills": {where: max(found.values(), default=None) for where, found in spills.items()},
        "spilling": {where: _worst(found) for where, found in spills.items()},
        "undefined": sorted({symbol for n in natives for symbol in n.undefined}),
        "error": seen.error,
        "failures": sorted({*seen.failures, *(n.failure for n in natives if n.failure)}),
    }
