"""Ops and back ends: the one place that decides which code runs for a call, and remembers why.

An op is its pure-torch reference. Further implementations (Triton, oneDNN, ...) are registered for device types and
are picked per call, by the device of the first tensor argument: forced choice, then the first implementation that
does not refuse, then the reference. `explain()` tells what was picked and why.

    @op
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @rms_norm.implement("triton", "xpu", "cuda", refuses=_refuses)
    def rms_norm_triton(x, weight, eps): ...

Every op is a `torch.library` op too (`torch.ops.xpu_ports.<name>`): under `torch.compile` that overload is traced,
so a graph stays whole and the choice is made when it runs.

What an accelerator's kernel was launched with for a call is kept (`replay`), and done again for the next that is alike.
"""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import functools
import importlib
import inspect
import os
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from xpu_ports.common import replay

ENVIRONMENT = "XPU_PORTS_BACKEND"
# Packages whose modules define ops; imported by name, so that imports keep pointing one way.
OP_PACKAGES = ("xpu_ports.common.kernels", "xpu_ports.quant.mxfp4.kernels")

_LIB = Library("xpu_ports", "DEF")
# What is never a tensor and holds none: told by the type itself, which is cheaper than isinstance.
_HOLD_NO_TENSORS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
_NO_SUBCLASSES = _HOLD_NO_TENSORS.union(replay.PLAIN_TENSORS)
OPS: dict[str, Op] = {}
# Back ends that can run on CPU tensors here although they are written for accelerators (Triton's interpreter).
# They are taken on a CPU only when forced: a fresh machine runs the reference.
EMULATED_ON_CPU: set[str] = set()
# The back end whose launches are seen, so that calls on it can be kept.
_LAUNCHES_SEEN = "triton"
# Alike calls before one is watched, which takes as long as some calls do: where keys grow with every token, only those
# of a step's layers are alike. And how many keys an op remembers.
ALIKE = 8
MOST_PLANS = 1024


class BackendError(RuntimeError):
    """The back end that was asked for cannot run this call."""


# ---------------------------------------------------------------------------------------------------- forced choices

_EVERY_OP = "*"
# None: nothing set in this context yet, so the environment decides.
_FORCED = contextvars.ContextVar[Mapping[str, str | None] | None]("xpu_ports_backend", default=None)
_from_environment: Mapping[str, str] | None = None


def forced_choices() -> Mapping[str, str | None]:
    """The back ends forced here and now, by op; "*" for every op without a choice of its own."""
    forced = _FORCED.get()
    if forced is not None:
        return forced
    return _from_environment if _from_environment is not None else _environment_choices()


def _environment_choices() -> Mapping[str, str]:
    global _from_environment
    if _from_environment is None:
        _from_environment = parse_choices(os.environ.get(ENVIRONMENT, ""))
    return _from_environment


def parse_choices(text: str, where: str = ENVIRONMENT) -> Mapping[str, str]:
    """Read choices such as "triton" or "gated_rms_norm=reference,triton": op -> back end, "*" for every other op.

    Args:
        text: back ends, each for one op or, without a name, for all that have no choice of their own.
        where: what the text was given as, for the error.

    Raises:
        ValueError: the op or the back end does not exist.
    """
    choices = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, backend = item.rpartition("=")
        name = name.strip() or _EVERY_OP
        _check_choice(backend.strip(), None if name == _EVERY_OP else name, f"{where}={text!r}")
        choices[name] = backend.strip()
    return choices


def _check_choice(backend: str, name: str | None, where: str) -> None:
    if name is not None and name not in OPS:
        load_ops()
        if name not in OPS:
            near = difflib.get_close_matches(name, OPS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{where}: no op is named {name!r}{hint} Known ops: {', '.join(sorted(OPS))}")
    known = known_backends()
    if backend not in known:
        load_ops()
        known = known_backends()
    if backend not in known:
        raise ValueError(f"{where}: no back end is named {backend!r}. Known back ends: {', '.join(sorted(known))}")


def known_backends() -> set[str]:
    """Names that `use_backend` takes: "reference" and every registered back end."""
    return {"reference"} | {i.backend for op in OPS.values() for i in op.implementations}


def load_ops() -> None:
    """Import every module that defines ops, so that `OPS` is complete."""
    for package_name in OP_PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.walk_packages(package.__path__, package_name + "."):
            importlib.import_module(module.name)


def forget_plans() -> None:
    """Let the next calls of all ops go through dispatch and wrapper: what these go by has changed."""
    for op in OPS.values():
        op.forget()


@contextlib.contextmanager
def use_backend(backend: str | None, op: str | None = None) -> Iterator[None]:
    """Force a back end inside a `with` block: one that cannot run a call raises `BackendError` with the reasons.

    Args:
        backend: "reference", "triton", ...; None lets the dispatch choose again, also against the environment.
        op: the name of one op; every op without a choice of its own when left out. Nested blocks add up, and a
            choice for one op goes before a choice for all.

    Raises:
        ValueError: the op or the back end does not exist.
    """
    if backend is not None:
        _check_choice(backend, op, "use_backend")
    # A None for one op stays, to go before a choice for all.
    choices = {} if backend is None and op is None else {**forced_choices(), op or _EVERY_OP: backend}
    token = _FORCED.set(choices)
    try:
        yield
    finally:
        _FORCED.reset(token)


@contextlib.contextmanager
def use_choices(text: str, where: str = ENVIRONMENT) -> Iterator[None]:
    """Force what a text says inside a `with` block, instead of what the environment or an outer block says.

    Args:
        text, where: as `parse_choices` takes them.

    Raises:
        ValueError: the op or the back end does not exist.
    """
    token = _FORCED.set(parse_choices(text, where))
    try:
        yield
    finally:
        _FORCED.reset(token)


# ------------------------------------------------------------------------------------------------------------ ledger


@dataclass(frozen=True)
class Decision:
    """One line of the ledger: `calls` calls of `op` ran on `backend`, because of `reason`."""

    op: str
    backend: str
    device: str
    reason: str
    calls: int


_ledger: dict[tuple[str, str, str, str], int] = {}


class Explanation(list[Decision]):
    """The ledger's lines, printable: most called first."""

    def __str__(self) -> str:
        if not self:
            return "no op has been called yet"
        rows = [("op", "back end", "device", "calls", "why")]
        rows += [(d.op, d.backend, d.device, str(d.calls), d.reason) for d in self]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def record(subject: str, choice: str, device: torch.device | str, reason: str, calls: int = 1) -> None:
    """Add a line to the ledger for a choice that is not an op's, such as a decode step that was not captured."""
    _count((subject, choice, device if isinstance(device, str) else device.type, reason), calls)


def _count(line: tuple[str, str, str, str], calls: int = 1) -> None:
    _ledger[line] = _ledger.get(line, 0) + calls
    watching = replay.watching()
    if isinstance(watching, replay.Recording):
        watching.lines.append(line)


def explain(show: bool = True) -> Explanation:
    """Which back end ran each op, why, and how often, since the start or the last `reset_explain()`.

    Args:
        show: print the table as well.

    Returns:
        The lines as `Decision`s, most called first. Calls replayed from a captured graph are not counted again.
    """
    lines = (Decision(*key, calls) for key, calls in list(_ledger.items()))
    explanation = Explanation(sorted(lines, key=lambda d: (-d.calls, d.op, d.backend)))
    if show:
        print(explanation)
    return explanation


def reset_explain() -> None:
    """Empty the ledger that `explain()` shows."""
    _ledger.clear()


# --------------------------------------------------------------------------------------------------------------- ops


def _never(*args: Any, **kwargs: Any) -> None:
    return None


@dataclass(frozen=True)
class Implementation:
    backend: str
    devices: tuple[str, ...]
    run: Callable[..., Any]
    # Why this call is not supported, or None. Called with the op's own arguments.
    refuses: Callable[..., str | None]


class Op:
    """A reference and its implementations. Call it like the function that it was made from."""

    def __init__(
        self, reference: Callable[..., Any], mutates: Iterable[str] = (), fake: Callable[..., Any] | None = None
    ) -> None:
        self.name = reference.__name__
        if self.name in OPS:
            raise RuntimeError(f"op {self.name!r} is registered twice: its module was imported under two names")
        self.reference = reference
        self.mutates = tuple(mutates)
        self.implementations: list[Implementation] = []
        self.differentiable = False
        self._by_device: dict[str, list[Implementation]] = {}
        # By all that a call is alike in: what it did, None where that cannot be done again, else how often it was.
        self._plans: dict[tuple, Any] = {}
        self._reference = Implementation("reference", (), reference, _never)
        functools.update_wrapper(self, reference)
        self.signature = inspect.signature(reference, eval_str=True)
        # The reference runs on CPU and CUDA tensors alike, so its own parameter defaults are the op's.
        returns = self.signature.return_annotation
        # `Tensor | tuple[Tensor, ...]`: a schema has a fixed number of outputs, so such an op returns a list there.
        self._packs = returns not in (Tensor, None) and typing.get_origin(returns) not in (tuple, list)
        prototype = self._packed(reference)
        _LIB.define(self.name + infer_schema(prototype, mutates_args=self.mutates))
        _LIB.impl(self.name, self._packed(self._run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"xpu_ports::{self.name}", self._packed(fake or reference), lib=_LIB)
        self.overload = getattr(torch.ops.xpu_ports, self.name).default
        OPS[self.name] = self

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(['reference', *(i.backend for i in self.implementations)])}>"

    def implement(
        self, backend: str, *devices: str, refuses: Callable[..., str | None]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a back end for device types; the order of registration is the order of preference.

        Args:
            backend: its name in `use_backend` and `explain()`.
            devices: device types, such as "xpu" and "cuda".
            refuses: called with the op's arguments; returns why it cannot run them, or None. Cheap, never raises.

        Raises:
            TypeError: the parameters differ from the reference's in name, order or default.
        """

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            ours = [(p.name, p.default) for p in self.signature.parameters.values()]
            theirs = [(p.name, p.default) for p in inspect.signature(run).parameters.values()]
            if ours != theirs:
                raise TypeError(f"{self.name}/{backend}: parameters {theirs} differ from the reference's {ours}")
            implementation = Implementation(backend, devices, run, refuses)
            self.implementations.append(implementation)
            self.forget()
            for device in devices:
                self._by_device.setdefault(device, []).append(implementation)
            return run

        return register

    def differentiate(self, setup_context: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register `backward(ctx, *grads)`; without one, a call that needs a gradient runs the reference."""

        def register(backward: Callable[..., Any]) -> Callable[..., Any]:
            torch.library.register_autograd(f"xpu_ports::{self.name}", backward, setup_context=setup_context, lib=_LIB)
            self.differentiable = True
            return backward

        return register

    def backends(self, device: str) -> list[str]:
        """Names of the back ends that exist for a device type, the reference last."""
        return [*(i.backend for i in self._candidates(device, forced="")), "reference"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._traced(*args, **kwargs)
        x = args[0] if args and type(args[0]) in replay.PLAIN_TENSORS else self._first_tensor(args, kwargs)
        if type(x) not in replay.PLAIN_TENSORS:
            # FakeTensor, DTensor, ...: their own dispatch must see the op.
            return self._traced(*args, **kwargs)
        if torch.is_grad_enabled() and _needs_grad(args, kwargs):
            device = x.device.type
            implementation, reason = self._decide(device, args, kwargs, True)
            if implementation is not self._reference:
                # Has the backward, and comes to `_run`, which counts the call.
                return self._unpack(self.overload(*args, **kwargs))
            _count((self.name, implementation.backend, device, reason))
            return implementation.run(*args, **kwargs)
        return self._perform(x, args, kwargs, called=True)

    def choose(self, *args: Any, **kwargs: Any) -> tuple[str, str]:
        """The back end that this call would run on and the reason, without running or counting it.

        Raises:
            BackendError: a back end is forced and cannot run the call.
        """
        x = self._first_tensor(args, kwargs)
        needs_grad = torch.is_grad_enabled() and _needs_grad(args, kwargs)
        implementation, reason = self._decide(x.device.type, args, kwargs, needs_grad)
        return implementation.backend, reason

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self.differentiable and _needs_grad(args, kwargs):
            # No backward to trace: the compiler differentiates and fuses the reference instead.
            forced = _forced_now(self.name)
            if forced not in (None, "reference"):
                raise BackendError(
                    f"{self.name}: back end {forced!r} was asked for, and has no backward, which a compiled call needs"
                )
            return self.reference(*args, **kwargs)
        return self._unpack(self.overload(*args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._perform(self._first_tensor(args, kwargs), args, kwargs, called=False)

    def _perform(self, x: Tensor, args: tuple, kwargs: dict, called: bool) -> Any:
        """A call without gradients, whose first tensor is x: made again where one alike was kept.

        Args:
            called: from outside, not by torch, which has unwrapped the tensors by then.
        """
        # `x.device.type` makes two objects, of which the common devices need none.
        device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
        if device not in replay.DEVICES or replay.watching() is not None:
            return self._directly(device, args, kwargs, called)
        index = x.get_device()
        key: list[Any] = [device, index]
        forced = forced_choices()
        if forced:
            key.append(frozenset(forced.items()))
        pool: list[Any] = []
        given = args
        if kwargs:
            key.append(tuple(kwargs))
            given = (*args, *kwargs.values())
        try:
            known = replay.describe(given, index, key, pool, device in replay.BY_ADDRESS)
        except RuntimeError:
            # Memory that cannot be asked for.
            known = False
        if not known:
            return self._directly(device, args, kwargs, called)
        alike = tuple(key)
        plan = self._plans.get(alike, 0)
        if plan.__class__ is not replay.Plan:
            return self._watched(alike, plan, device, args, kwargs)
        if plan.driver.hooked():
            # A profiler listens to launches, which then have to be made in full.
            return self._directly(device, args, kwargs)
        for line in plan.lines:
            _ledger[line] = _ledger.get(line, 0) + 1
        return plan.run(x, index, pool)

    def _directly(self, device: str, args: tuple, kwargs: dict, called: bool = False) -> Any:
        implementation, reason = self._decide(device, args, kwargs, False)
        given = (*args, *kwargs.values()) if kwargs else args
        if called and implementation is not self._reference and _holds_subclass(given):
            # Behind the first tensor, such as a sum that ranks have not waited for: a kernel would find no memory.
            return self._unpack(self.overload(*args, **kwargs))
        _count((self.name, implementation.backend, device, reason))
        watching = replay.watching()
        if implementation.backend != _LAUNCHES_SEEN and isinstance(watching, replay.Recording):
            watching.spoiled = True
        return implementation.run(*args, **kwargs)

    def _watched(self, key: tuple, state: Any, device: str, args: tuple, kwargs: dict) -> Any:
        """A call of which there is no plan: after enough alike ones there will be, if that can be."""
        if state is None:
            return self._directly(device, args, kwargs)
        if len(self._plans) >= MOST_PLANS:
            self.forget()
        # Of another thread's `forget` this call's plan must not come out again.
        plans = self._plans
        if state < ALIKE:
            plans[key] = state + 1
            return self._directly(device, args, kwargs)
        tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
        if len({id(t) for t in tensors}) < len(tensors):
            # Which argument a launch took could not be seen; another call may do.
            return self._directly(device, args, kwargs)
        with replay.Recording(tensors) as recording:
            outputs = self._directly(device, args, kwargs)
        plans[key] = recording.plan(outputs, device in replay.BY_ADDRESS)
        return outputs

    def forget(self) -> None:
        """Go through dispatch and wrapper again at the next calls: what they go by has changed."""
        self._plans = {}

    def _decide(self, device: str, args: tuple, kwargs: dict, needs_grad: bool) -> tuple[Implementation, str]:
        choices = forced_choices()
        forced = choices.get(self.name, choices.get(_EVERY_OP)) if choices else None
        if forced == "reference":
            return self._reference, "forced"
        refusals: list[str] = []
        # Most calls force nothing: those look no further than the device's own list.
        for candidate in self._by_device.get(device, ()) if forced is None else self._candidates(device, forced):
            if forced is not None and candidate.backend != forced:
                continue
            refusal = candidate.refuses(*args, **kwargs)
            if refusal is None and needs_grad and not self.differentiable:
                refusal = "no backward, and a gradient is needed"
            if refusal is None:
                if forced is not None:
                    return candidate, "forced"
                return candidate, "; ".join(refusals) if refusals else "first that does not refuse"
            refusals.append(f"{candidate.backend}: {refusal}")
        if forced is not None:
            raise BackendError(
                f"{self.name}: back end {forced!r} was asked for and cannot run this call on {device}: "
                + ("; ".join(refusals) or self._where(forced))
            )
        return self._reference, "; ".join(refusals) or f"no other back end for {device}"

    def _candidates(self, device: str, forced: str | None) -> list[Implementation]:
        if device == "cpu" and EMULATED_ON_CPU and forced is not None:
            emulated = [i for i in self.implementations if i.backend in EMULATED_ON_CPU and "cpu" not in i.devices]
            return [*self._by_device.get(device, ()), *emulated]
        return self._by_device.get(device, [])

    def _where(self, backend: str) -> str:
        devices = sorted({d for i in self.implementations if i.backend == backend for d in i.devices})
        return f"it runs on {' and '.join(devices)}" if devices else "this op has no such back end"

    def _first_tensor(self, args: tuple, kwargs: dict) -> Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return value
        raise TypeError(f"{self.name} needs a tensor among its arguments")

    def _packed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the outputs of the torch.library schema."""
        if not self._packs:
            return function

        def packed(*args: Any, **kwargs: Any) -> list[Tensor]:
            outputs = function(*args, **kwargs)
            return [outputs] if isinstance(outputs, Tensor) else list(outputs)

        packed.__signature__ = self.signature.replace(return_annotation=list[Tensor])  # type: ignore[attr-defined]
        packed.__annotations__ = {
            **{name: p.annotation for name, p in self.signature.parameters.items()},
            "return": list[Tensor],
        }
        return packed

    def _unpack(self, outputs: Any) -> Any:
        if not self._packs:
            return outputs
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _forced_now(name: str) -> str | None:
    """The back end forced on an op where it is asked: a compiler cannot trace into context variables."""
    choices = forced_choices()
    return choices[name] if name in choices else choices.get(_EVERY_OP)


# What torch.compiler.assume_constant_result does, which would import the compiler here.
_forced_now._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _holds_subclass(values: Sequence) -> bool:
    for value in values:
        if type(value) in _NO_SUBCLASSES:
            continue
        if isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and _holds_subclass(value)):
            return True
    return False


def _needs_grad(args: Sequence, kwargs: dict) -> bool:
    # A plain loop: a generator costs a microsecond more.
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in _HOLD_NO_TENSORS:
            continue
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and _needs_grad(value, {}):
            return True
    return False


def op(
    reference: Callable[..., Any] | None = None,
    *,
    mutates: Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
) -> Any:
    """Make an op of its reference: `@op`, or `@op(mutates=("state",))` for one that writes into an argument.

    The reference is pure torch on any device and dtype, annotated (a schema is made of it), positional, without
    `**kwargs`; what it mutates it does not return, and no output shares memory with an argument. It also runs on
    tensors without data, to tell the outputs' shapes; one that reads values or loops over time needs `fake`, a
    function of the same arguments that returns empty tensors.
    """
    if reference is None:
        return functools.partial(Op, mutates=mutates, fake=fake)
    return Op(reference)
