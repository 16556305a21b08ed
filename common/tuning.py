"""Tables of tuned launches: what a kernel's tile is on the card at hand, asked before the built-in rule.

A kernel's rule is a function of the architecture and some sizes. `xpu-ports tune` measures the other tiles that the
kernel may have and writes those that are faster into one JSON file an architecture. A table counts for the device,
the architecture and the Triton that it was made with, and a tile in it only if the kernel itself proposes it; the
rule goes on deciding what no table does. XPU_PORTS_TUNING names another file, which then must be right, or is "off".
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from xpu_ports.common import tritonlib
from xpu_ports.common.device import ARCHITECTURES, Architecture, architecture
from xpu_ports.common.dispatch import forget_plans, load_ops, record

ENVIRONMENT = "XPU_PORTS_TUNING"
OFF = "off"
FORMAT = 1

Sizes = tuple[Any, ...]
T = TypeVar("T")
TUNABLES: dict[str, Tunable] = {}


class TableError(ValueError):
    """A table that cannot be used: names the file and what is wrong with it."""


class Tunable(Generic[T]):
    """A kernel's rule for its tile that a table goes before; called as the rule, `tile(architecture, *sizes)`.

    A call costs the host one look into a dict, once the sizes have been seen.
    """

    def __init__(self, name: str, rule: Callable[..., T], candidates: Callable[..., Iterable[T]]) -> None:
        if name in TUNABLES:
            raise RuntimeError(f"the tile of {name!r} is registered twice")
        self.name, self.rule = name, rule
        # Called as the rule: what else may be tried, no tile that might spill or not fit.
        self.candidates = candidates
        self.signature = inspect.signature(rule)
        hints = typing.get_type_hints(rule)
        # Names and types of what the rule looks at besides the architecture, and of a tile's fields.
        self.sizes = {size: hints[size] for size in list(self.signature.parameters)[1:]}
        self.kind: type[T] = hints["return"]
        self.fields = typing.get_type_hints(self.kind)
        # Undoes what was made of earlier answers, when these no longer count.
        self.dependents: list[Callable[[], None]] = []
        self._kept: dict[tuple[str, Sizes], T] = {}
        functools.update_wrapper(self, rule)
        TUNABLES[name] = self

    def __call__(self, arch: Architecture, *sizes: Any) -> T:
        tile = self._kept.get((arch.name, sizes))
        return self._choose(arch, sizes) if tile is None else tile

    def _choose(self, arch: Architecture, sizes: Sizes) -> T:
        tile = _tuned(self, arch.name).get(self.complete(arch, sizes))
        if tile is None:
            tile = self.rule(arch, *sizes)
        self._kept[arch.name, sizes] = tile
        return tile

    def complete(self, arch: Architecture, sizes: Sizes) -> Sizes:
        """The sizes with the defaults of those left out."""
        bound = self.signature.bind(arch, *sizes)
        bound.apply_defaults()
        return bound.args[1:]

    def allowed(self, arch: Architecture, sizes: Sizes) -> list[T]:
        """The tiles that may run: the rule's own first, then the candidates, each once."""
        return list(dict.fromkeys([self.rule(arch, *sizes), *self.candidates(arch, *sizes)]))

    def forget(self) -> None:
        """Ask the table and the rule again at the next call."""
        self._kept.clear()
        forget_plans()
        for undo in self.dependents:
            undo()

    @contextlib.contextmanager
    def trying(self, arch: Architecture, sizes: Sizes, tile: T) -> Iterator[None]:
        """Answer with a tile for these sizes inside a `with` block."""
        self.forget()
        self._kept[arch.name, sizes] = tile
        try:
            yield
        finally:
            self.forget()

    def seen(self) -> list[Sizes]:
        """The sizes that were asked for since `forget`."""
        return [self.complete(ARCHITECTURES[name], sizes) for name, sizes in self._kept]


def tunable(name: str, candidates: Callable[..., Iterable[T]]) -> Callable[[Callable[..., T]], Tunable[T]]:
    """Let a table go before a rule: `@tunable("rms_norm", candidates=_candidates)`.

    Args:
        name: the kernel's in tables.
        candidates: called as the rule, gives the further tiles that a tuner may try and a table may name.

    The rule's parameters are an `Architecture` and sizes (int, bool, str, torch.dtype), its result a NamedTuple or a
    frozen dataclass of numbers.
    """
    return lambda rule: Tunable(name, rule, candidates)


# ------------------------------------------------------------------------------------------------------------ tables


@dataclass(frozen=True)
class Entry:
    """One tuned launch."""

    kernel: str
    # By the names of the rule's parameters; a dtype by its name.
    sizes: Mapping[str, Any]
    tile: Mapping[str, Any]
    # What it was measured on -> microseconds of the built-in tile and of this one.
    measured: Mapping[str, tuple[float, float]]

    @property
    def key(self) -> tuple:
        return self.kernel, *sorted(self.sizes.items())


@dataclass(frozen=True)
class Table:
    """What one file holds, and what it was made with."""

    architecture: str
    # As the driver reports it.
    device: str
    # Major and minor version.
    triton: str
    entries: tuple[Entry, ...]

    def why_not(self, name: str) -> str | None:
        """Why it does not count for launches on an architecture here and now, or None."""
        if self.architecture != name:
            return f"made for the architecture {self.architecture!r}, not {name!r}"
        if self.triton != triton_version():
            return f"made with Triton {self.triton}, this is {triton_version()}"
        here = device_names(name)
        if self.device not in here:
            return f"made on {self.device!r}, here is {' and '.join(map(repr, sorted(here))) or 'no such device'}"
        return None


def triton_version() -> str:
    """What a table records of Triton: kernels may spill in one version and not in the next."""
    return ".".join(map(str, tritonlib.version()))


def device_names(name: str) -> set[str]:
    """Names of the devices here that have an architecture, as the driver reports them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return {"cpu"} if name == "cpu" else set()
    module = torch.get_device_module(accelerator)
    indices = range(module.device_count())
    return {module.get_device_name(i) for i in indices if architecture(torch.device(accelerator.type, i)).name == name}


def default_path(name: str) -> Path:
    """The user's table of an architecture: under XDG_CACHE_HOME or ~/.cache, on Windows under LOCALAPPDATA."""
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    cache = os.environ.get(variable) or Path.home() / ".cache"
    return Path(cache) / "xpu-ports" / "tuning" / f"{name}.json"


def named_path() -> str | None:
    """The file that the environment names, "off", or None."""
    return os.environ.get(ENVIRONMENT) or None


def read(path: Path) -> Table:
    """A table from its file.

    Raises:
        TableError: it cannot be read, or is not what `write` writes.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(f"{path}: not a table of tuned launches: {error}") from error
    version = value.get("format") if isinstance(value, dict) else None
    if version != FORMAT:
        raise TableError(f"{path}: format is {version!r}, expected {FORMAT}")
    names = {"architecture": str, "device": str, "triton": str, "entries": list}
    fields = _checked({k: v for k, v in value.items() if k != "format"}, names, str(path))
    entry = {"kernel": str, "sizes": dict, "tile": dict, "measured": dict}
    entries = []
    for i, found in enumerate(fields.pop("entries")):
        _checked(found, entry, f"{path}: entry {i}")
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in found["measured"].values()):
            raise TableError(f"{path}: entry {i}: measured is {found['measured']!r}, expected two times each")
        entries.append(Entry(**found | {"measured": {k: tuple(v) for k, v in found["measured"].items()}}))
    return Table(**fields, entries=tuple(entries))


def write(path: Path, table: Table) -> None:
    """Write a table so that a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its own name in each process, and the permissions of any new file.
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(table)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _checked(value: Any, expected: Mapping[str, type], where: str) -> dict[str, Any]:
    """The value, an object with these fields of these types and no others.

    Raises:
        TableError: it is not.
    """
    if not isinstance(value, dict) or value.keys() != expected.keys():
        found = sorted(value) if isinstance(value, dict) else value
        raise TableError(f"{where}: has {found}, expected the fields {sorted(expected)}")
    for name, kind in expected.items():
        # A bool is an int to Python, not to a kernel.
        if type(value[name]) is not kind:
            raise TableError(f"{where}: {name} is {value[name]!r}, expected {kind.__name__}")
    return value


def to_entry(kernel: Tunable[T], sizes: Sizes, tile: T, measured: Mapping[str, tuple[float, float]]) -> Entry:
    """A table's entry for a tile."""
    named = dict(zip(kernel.sizes, map(_plain, sizes), strict=True))
    return Entry(kernel.name, named, {field: getattr(tile, field) for field in kernel.fields}, dict(measured))


def _plain(size: Any) -> Any:
    return str(size).removeprefix("torch.") if isinstance(size, torch.dtype) else size


def tiles(table: Table, kernel: Tunable[T], where: str) -> dict[Sizes, T]:
    """What a table says about a kernel, by the sizes that its rule is called with.

    Args:
        where: the table's file, for the error.

    Raises:
        TableError: an entry has other sizes or fields than the kernel, or a tile that the kernel does not propose.
    """
    found, arch = {}, ARCHITECTURES[table.architecture]
    for i, entry in enumerate(table.entries):
        if entry.kernel != kernel.name:
            continue
        at = f"{where}: entry {i}, {kernel.name}"
        plain = {name: str if kind is torch.dtype else kind for name, kind in kernel.sizes.items()}
        named = _checked(entry.sizes, plain, f"{at}, sizes")
        sizes = tuple(_typed(named[name], kind, at) for name, kind in kernel.sizes.items())
        tile = kernel.kind(**_checked(entry.tile, kernel.fields, f"{at}, tile"))
        if tile not in kernel.allowed(arch, sizes):
            raise TableError(f"{at}: {dict(entry.tile)} is not a tile that it may have at {dict(entry.sizes)}")
        found[sizes] = tile
    return found


def _typed(value: Any, kind: type, where: str) -> Any:
    if kind is not torch.dtype:
        return value
    dtype = getattr(torch, value, None)
    if not isinstance(dtype, torch.dtype):
        raise TableError(f"{where}: no dtype is named {value!r}")
    return dtype


# ----------------------------------------------------------------------------------------------- tables of a process

_rules_alone = False


def forget() -> None:
    """Look for tables again at the next launches."""
    _table.cache_clear()
    _tuned.cache_clear()
    for kernel in TUNABLES.values():
        kernel.forget()


@contextlib.contextmanager
def rules_alone() -> Iterator[None]:
    """Go by the built-in rules inside a `with` block, whatever tables there are."""
    global _rules_alone
    before, _rules_alone = _rules_alone, True
    try:
        forget()
        yield
    finally:
        _rules_alone = before
        forget()


def usable(name: str) -> tuple[Path, Table] | None:
    """The table that counts for an architecture and its file; None where there is none.

    Raises:
        TableError: there is one, and it cannot be used here.
    """
    named = named_path()
    path = Path(named).expanduser() if named else default_path(name)
    if named == OFF or (not named and not path.is_file()):
        return None
    table = read(path)
    reason = table.why_not(name)
    if reason is not None:
        raise TableError(f"{path}: {reason}")
    return path, table


def check(name: str) -> str | None:
    """What table counts for an architecture, in words, looked at whole; None where there is none.

    Raises:
        TableError: there is one, and launches would not take it, or not all of it.
    """
    found = usable(name)
    if found is None:
        return None
    path, table = found
    load_ops()
    for i, entry in enumerate(table.entries):
        if entry.kernel not in TUNABLES:
            raise TableError(f"{path}: entry {i}: no kernel is named {entry.kernel!r}")
    for kernel in TUNABLES.values():
        tiles(table, kernel, str(path))
    return f"{len(table.entries)} tiles of {path}"


@functools.cache
def _table(name: str) -> tuple[Path, Table] | None:
    try:
        found = usable(name)
    except TableError as error:
        _ignore(error, name)
        return None
    if found is not None:
        record("tuning", "table", name, f"{len(found[1].entries)} tiles of {found[0]}")
    return found


@functools.cache
def _tuned(kernel: Tunable[T], name: str) -> Mapping[Sizes, T]:
    """What the table of an architecture says about a kernel; nothing where there is none or it is not right."""
    found = None if _rules_alone else _table(name)
    if found is None:
        return {}
    try:
        return tiles(found[1], kernel, str(found[0]))
    except TableError as error:
        _ignore(error, name)
        return {}


def _ignore(error: TableError, name: str) -> None:
    """Go on with the rules and have `explain()` say why; a file that the environment names has to be right."""
    if named_path():
        raise error
    record("tuning", "built-in tiles", name, str(error))
