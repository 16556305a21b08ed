"""The error of each layer by itself, and the first module inside one that is off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from xpu_ports.common.modules import RMSNorm

# The share of tokens whose error counts: in a mixture of experts a rounding sends a few of them elsewhere.
QUANTILE = 0.95
_TINY = 1e-30


@dataclass(frozen=True)
class Layers:
    """How to reach a model's layers, and the stream that goes through them."""

    of: Callable[[Any], Sequence[nn.Module]]
    # The stream in a layer's arguments, and in what it returns.
    read: Callable[[tuple[Any, ...], dict[str, Any]], Tensor]
    result: Callable[[Any], Tensor]
    # The arguments with another stream in them.
    put: Callable[[tuple[Any, ...], dict[str, Any], Tensor], tuple[tuple[Any, ...], dict[str, Any]]] | None = None


def first_tensor(values: Any) -> Tensor:
    """The first tensor among arguments or results."""
    found = next(tensors_in(values), None)
    assert found is not None, "a layer without a tensor"
    return found


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The floating tensors among arguments or results, tuples and dicts opened."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)


# What transformers' layers take and give.
TRANSFORMERS = Layers(
    of=lambda model: model.model.layers,
    read=lambda args, kwargs: first_tensor(args or kwargs["hidden_states"]),
    result=first_tensor,
    put=lambda args, kwargs, x: ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x}),
)


def _pair_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    h, y = args[:2]
    return h if y is None else h + y


# Our layers that take and give the stream as a pair: what was added up, and what is still to be added.
PAIR = Layers(
    of=lambda model: model.model.layers,
    read=_pair_in,
    result=lambda output: output[0] + output[1],
    put=lambda args, kwargs, x: ((x, None, *args[2:]), kwargs),
)


@contextlib.contextmanager
def watched(
    model: Any,
    layers: Layers,
    keep: Callable[[int, Tensor, Tensor], None],
    give: Callable[[int, Tensor], Tensor] | None = None,
) -> Iterator[None]:
    """Look at the stream around every layer while the block runs the model.

    Args:
        model, layers: whose, and how to reach it.
        keep: called with the layer's number, the stream before it and the one behind.
        give: what to put in the place of the stream before a layer, by the layer's number; None leaves it.
    """
    before: dict[int, Tensor] = {}
    handles = []

    def enter(i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = layers.read(args, kwargs)
            if give is not None:
                assert layers.put is not None
                x = give(i, x)
                args, kwargs = layers.put(args, kwargs, x)
            # A copy: a layer may write into its input.
            before[i] = x.detach().clone()
            return args, kwargs

        return hook

    def leave(i: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            keep(i, before.pop(i), layers.result(output).detach())

        return hook

    for i, layer in enumerate(layers.of(model)):
        handles.append(layer.register_forward_pre_hook(enter(i), with_kwargs=True))
        handles.append(layer.register_forward_hook(leave(i), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class LayerError:
    """A layer beside the reference's. Errors are shares of what the layer adds to the stream, of 95% of tokens."""

    layer: int
    kind: str
    # Fed the reference's input.
    error: float
    # What it may be: the bound, and the rounding of the sum to the dtype.
    allowed: float | None
    # The token that is furthest off.
    largest: float
    # Of the streams, with all that came before: the difference over the reference's, by norms.
    so_far: float | None = None

    @property
    def within(self) -> bool:
        return self.allowed is None or self.error <= self.allowed


@dataclass
class LayerErrors:
    """Errors of layers, added up call by call."""

    bound: float | None
    kinds: dict[int, str] = field(default_factory=dict)
    _errors: dict[int, list[Tensor]] = field(default_factory=dict)
    _streams: dict[int, list[Tensor]] = field(default_factory=dict)
    _so_far: dict[int, tuple[float, float]] = field(default_factory=dict)
    _unit: float = 0.0

    def add(self, i: int, x: Tensor, expected: Tensor, got: Tensor) -> None:
        """A call of layer `i`: the input of both, [B, T, ...], and what each made of it."""
        self._unit = torch.finfo(got.dtype).eps / 2
        x, expected, got = (t.detach().cpu().flatten(0, 1).flatten(1).double() for t in (x, expected, got))
        added = (expected - x).norm(dim=1).clamp_min(_TINY)
        self._errors.setdefault(i, []).append((got - expected).norm(dim=1) / added)
        self._streams.setdefault(i, []).append(expected.norm(dim=1) / added)

    def add_stream(self, i: int, expected: Tensor, got: Tensor) -> None:
        """The streams behind layer `i` where each model went its own way."""
        expected, got = (t.detach().cpu().double() for t in (expected, got))
        off, of = self._so_far.get(i, (0.0, 0.0))
        self._so_far[i] = off + (got - expected).square().sum().item(), of + expected.square().sum().item()

    def finish(self) -> list[LayerError]:
        found = []
        for i, errors in sorted(self._errors.items()):
            error = torch.cat(errors)
            # The sum is rounded by both.
            rounding = 2 * self._unit * torch.cat(self._streams[i]).median().item()
            off, of = self._so_far.get(i, (0.0, 0.0))
            found.append(
                LayerError(
                    layer=i,
                    kind=self.kinds.get(i, ""),
                    error=_quantile(error),
                    allowed=None if self.bound is None else self.bound + rounding,
                    largest=error.max().item(),
                    so_far=(off / max(of, _TINY)) ** 0.5 if i in self._so_far else None,
                )
            )
        return found


def _quantile(errors: Tensor) -> float:
    """NaN where one is."""
    return float("nan") if errors.isnan().any() else errors.quantile(QUANTILE).item()


# ------------------------------------------------------------------------------------------------- inside a layer


@dataclass(frozen=True)
class Event:
    """What went into or came out of a module of a layer."""

    module: str
    side: str  # "input" or "output"
    tensors: list[Tensor]


@contextlib.contextmanager
def traced(layer: nn.Module) -> Iterator[list[Event]]:
    """All that goes through a layer's modules while the block runs, in order. Hooks keep modules from being fused."""
    events: list[Event] = []
    handles = []

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            copies = _copies((args, kwargs))
            # A norm may add a residual first: what it normalizes is the sum.
            events.append(Event(name, "input", [sum(copies[1:], copies[0])] if type(module) is RMSNorm else copies))

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            events.append(Event(name, "output", _copies(output)))

        return hook

    for name, module in layer.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name)))
    try:
        yield events
    finally:
        for handle in handles:
            handle.remove()


def _copies(values: Any) -> list[Tensor]:
    return [t.detach().to("cpu", copy=True) for t in tensors_in(values)]


@dataclass(frozen=True)
class Names:
    """The reference's names for the modules of a layer, where they are others.

    `prefixes` replaces how a name begins, `joined` its last part: by several modules whose outputs stand side by side
    in the port's. Modules in `apart` mean something else in the reference.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    def of(self, name: str) -> list[str]:
        for ours, theirs in self.prefixes.items():
            if name == ours or name.startswith(ours + "."):
                name = theirs + name[len(ours) :]
        head, dot, last = name.rpartition(".")
        return [f"{head}{dot}{part}" for part in self.joined.get(last, (last,))]


@dataclass(frozen=True)
class Culprit:
    """Where inside a layer an error begins."""

    layer: int
    kind: str
    # None: each module by itself is right.
    module: str | None
    side: str | None
    error: float | None
    # The last one before it that is right.
    after: str | None

    def __str__(self) -> str:
        where = f"layer {self.layer}" + (f" ({self.kind})" if self.kind else "")
        if self.module is None:
            return f"{where}: every module in it is right by itself: what is between them, or what is fused, is not"
        after = f", {self.after} before it is right" if self.after else ""
        if self.side == "input":
            return f"{where}: what reaches {self.module} is off by {self.error:.1e}{after}"
        return f"{where}: {self.module} is off by {self.error:.1e}{after}"


def first_culprit(
    layer: LayerError, expected: Sequence[Event], got: Sequence[Event], names: Names, bound: float
) -> Culprit:
    """The first event of the port that is not the reference's.

    Args:
        layer: the layer.
        expected, got: what `traced` found in the reference and in the port, for one input.
        names: of the modules.
        bound: the share of its own size, of 95% of rows, that a tensor may be off.
    """
    there: dict[tuple[str, str], list[list[Tensor]]] = {}
    for event in expected:
        there.setdefault((event.module, event.side), []).append(event.tensors)
    seen: dict[tuple[str, str], int] = {}
    after = None
    for event in got:
        key = event.module, event.side
        call = seen[key] = seen.get(key, -1) + 1
        if event.module in names.apart:
            continue
        match = _counterpart(event, call, there, names)
        if match is None:
            continue
        error = _difference(*match)
        if not error <= bound:
            return Culprit(layer.layer, layer.kind, event.module, event.side, error, after)
        if event.side == "output":
            after = event.module
    return Culprit(layer.layer, layer.kind, None, None, None, after)


def _counterpart(
    event: Event, call: int, there: Mapping[tuple[str, str], list[list[Tensor]]], names: Names
) -> tuple[Tensor, Tensor] | None:
    """(expected, got) of an event as rows, or None where the reference has no such tensor."""
    for modules in ([event.module], names.of(event.module)):
        calls = [there.get((module, event.side), []) for module in modules]
        if any(len(c) <= call for c in calls):
            continue
        parts = [c[call] for c in calls]
        if event.side == "input":
            parts = parts[:1]
        for mine in event.tensors:
            for theirs in parts[0] if len(parts) == 1 else [torch.cat([p[0] for p in parts], dim=-1)]:
                if (
                    theirs.dim()
                    and mine.dim()
                    and theirs.shape[-1] == mine.shape[-1]
                    and theirs.numel() == mine.numel()
                ):
                    return theirs.reshape(-1, theirs.shape[-1]), mine.reshape(-1, mine.shape[-1])
    return None


def _difference(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.double(), got.double()
    return _quantile((got - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(_TINY))
