"""Result files: JSON lines, one object each, written whole or not at all, and read with the place of what is wrong.

The first line says where and with what the others were measured. `bench ops` gives it the kind "environment", `bench
model` the kind "model"; older files have no kind there, nor in the lines of a language model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xpu_ports.common.bench.timing import Ceilings

# Variants of a model that are other people's.
PEERS = {"transformers", "diffusers", "diffusers compiled"}
# Kinds of lines that say nothing that can be compared.
_OTHERS = {"environment", "model", "ceilings", "explain", "note"}


class ResultsError(ValueError):
    """A result file cannot be read; names the file, the line, what was expected and what was found."""


@dataclass(frozen=True)
class Measurement:
    """One number with its spread, and what it is a number of."""

    # What identifies it: "op" -> "rms_norm", "size" -> "T1-N4096", "variant" -> "triton", ...
    key: tuple[tuple[str, str], ...]
    # "s", "tokens/s" or "bytes".
    unit: str
    # None where the variant gave no number.
    median: float | None
    # The spread; None where only one number was kept.
    low: float | None
    high: float | None
    # Whether the variant is this project's.
    ours: bool
    # Where it stands, "FILE:LINE".
    where: str
    # Why there is no number or why it does not count.
    note: str = ""
    # False for results outside of their error budget.
    right: bool = True

    @property
    def larger_is_better(self) -> bool:
        return self.unit.endswith("/s")

    @property
    def name(self) -> str:
        return " ".join(value for _, value in self.key)


@dataclass
class Results:
    """What a file holds."""

    path: Path
    # Its first line.
    environment: Mapping[str, Any]
    ceilings: Ceilings | None = None
    measurements: list[Measurement] = field(default_factory=list)
    # Lines of ops as they stand, for what is computed from bytes and FLOPs; those of language models.
    ops: list[Mapping[str, Any]] = field(default_factory=list)
    models: list[Mapping[str, Any]] = field(default_factory=list)
    # Kinds of lines that were left out, and how many.
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.environment.get("device"))


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines so that a reader finds the old one or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_results(path: Path) -> Results:
    """Read a file that `xpu-ports bench` or a script in benchmarks/ wrote.

    Raises:
        ResultsError: a line is not what is expected there, or the file holds nothing of it.
        OSError: the file cannot be opened.
    """
    results: Results | None = None
    seen: dict[tuple[tuple[str, str], ...], str] = {}
    for line, record in _records(path):
        where = f"{path}:{line}"
        if results is None:
            results = Results(path, _environment(record, where))
            continue
        found = list(_measurements(record, results, where))
        for measurement in found:
            if measurement.key in seen:
                raise ResultsError(f"{where}: {measurement.name} stands in {seen[measurement.key]} already")
            seen[measurement.key] = where
        results.measurements += found
    if results is None:
        raise ResultsError(f"{path}: no lines, expected the results of xpu-ports bench")
    return results


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path}: not text: {error}") from error
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ResultsError(f"{path}:{line}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ResultsError(f"{path}:{line}: {text[:40]!r}, expected an object")
        yield line, record


def _environment(record: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(record.get("device"), str) or not isinstance(record.get("versions"), dict):
        raise ResultsError(
            f"{where}: the first line has {_keys(record)}, expected that of xpu-ports bench: device, versions, ..."
        )
    return record


def _measurements(record: dict[str, Any], results: Results, where: str) -> Iterator[Measurement]:
    kind = record.get("kind")
    if kind is None and "explain" in record:
        kind = "explain"
    elif kind is None and "decode_tokens_per_s" in record:
        kind = "generate"
    if kind == "prediction":
        raise ResultsError(f"{where}: a prediction, expected measurements")
    if kind == "ceilings":
        results.ceilings = _ceilings(record, where)
    if kind == "op":
        results.ops.append(record)
        yield from _op(record, where)
    elif kind == "generate":
        results.models.append(record)
        yield from _generate(record, results.environment, where)
    elif kind == "step":
        yield _timing(
            (("model", _text(record, "model", where)), *_given(record, "side", "text", "layers", "dtype"),
             ("variant", _text(record, "variant", where)), ("what", "step")),
            record, where, ours=record["variant"] not in PEERS,
        )  # fmt: skip
    elif kind == "drafts":
        key = (*_model(results.environment), *_given(record, "weights", "prompt", "drafts"), ("what", "decode"))
        yield _single(key, "tokens/s", _number(record, "tokens_per_s", where), where)
    elif kind == "prefill":
        key = (*_model(results.environment), *_given(record, "cache_dtype", "tokens"))
        yield _single((*key, ("what", "prefill")), "s", _number(record, "seconds", where), where)
        yield _single((*key, ("what", "memory")), "bytes", _number(record, "peak_bytes", where), where)
    elif kind not in _OTHERS:
        results.left_out[str(kind)] = results.left_out.get(str(kind), 0) + 1


def _op(record: dict[str, Any], where: str) -> Iterator[Measurement]:
    """Called from Python, and in a captured graph."""
    key = [(name, _text(record, field, where)) for name, field in
           (("op", "case"), ("size", "size"), ("dtype", "dtype"), ("variant", "variant"))]  # fmt: skip
    if record.get("missing"):
        return
    ours, note, right = bool(record.get("ours")), str(record.get("note") or ""), record.get("within_budget") is True
    for name, what in (("graph", "graph"), ("eager", "call")):
        timing = record.get(name)
        if timing is None:
            yield Measurement((*key, ("what", what)), "s", None, None, None, ours, where, note or "no time", right)
            continue
        if not isinstance(timing, dict):
            raise ResultsError(f"{where}: {name} is {timing!r}, expected median, low and high")
        yield _timing((*key, ("what", what)), timing, f"{where}: {name}", ours, note, right, at=where)


def _generate(record: dict[str, Any], environment: Mapping[str, Any], where: str) -> Iterator[Measurement]:
    variant = _text(record, "variant", where)
    key = (*_model(environment), *_given(record, "batch", "prompt"), ("variant", variant))
    for what in ("prefill", "decode"):
        # Older files have no spread of the prefill.
        low, high = (
            _number(record, f"{what}_{end}", where) if record.get(f"{what}_{end}") is not None else None
            for end in ("low", "high")
        )
        median = _number(record, f"{what}_tokens_per_s", where)
        yield Measurement((*key, ("what", what)), "tokens/s", median, low, high, variant not in PEERS, where)


def _model(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    # A folder of a checkpoint may lie elsewhere on another machine.
    layout = Path(str(environment.get("layout"))).name
    return (
        ("model", str(environment.get("model"))),
        ("layout", layout),
        ("dtype", str(environment.get("dtype"))),
    )


def _given(record: dict[str, Any], *fields: str) -> tuple[tuple[str, str], ...]:
    """Numbers that identify a line, in words: ("batch", "batch 1"); those that are null are left out."""
    return tuple((name, f"{name.replace('_', ' ')} {record[name]}") for name in fields if record.get(name) is not None)


def _timing(
    key: tuple[tuple[str, str], ...],
    record: dict[str, Any],
    where: str,
    ours: bool,
    note: str = "",
    right: bool = True,
    at: str | None = None,
) -> Measurement:
    median, low, high = (_number(record, name, where) for name in ("median", "low", "high"))
    return Measurement(key, "s", median, low, high, ours, at or where, note, right)


def _single(key: tuple[tuple[str, str], ...], unit: str, value: float, where: str) -> Measurement:
    return Measurement(key, unit, value, None, None, True, where)


def _ceilings(record: dict[str, Any], where: str) -> Ceilings:
    copy, matmul = (_number(record, name, where) for name in ("copy", "matmul"))
    return Ceilings(copy, matmul, int(record.get("copy_bytes") or 0), int(record.get("matmul_side") or 0))


def _number(record: dict[str, Any], name: str, where: str) -> float:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        found = repr(value) if name in record else f"missing among {_keys(record)}"
        raise ResultsError(f"{where}: {name} is {found}, expected a positive number")
    return float(value)


def _text(record: dict[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        found = repr(value) if name in record else f"missing among {_keys(record)}"
        raise ResultsError(f"{where}: {name} is {found}, expected text")
    return value


def _keys(record: dict[str, Any]) -> str:
    return ", ".join(list(record)[:8]) or "no fields"
