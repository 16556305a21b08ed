"""This package's ops inside stock transformers models: `patch(model)`, undone by `unpatch(model)`.

A model keeps its classes, weights and code; the layers whose contract is an op's (`xpu_ports.common.stock` knows them
by their source) compute with that op. Norms get a forward of their own. Mixers keep theirs, with ops in place of
functions that it calls, such as the convolution and the scan. Everything else is left alone and reported with the
reason.

A patched module is an instance of a subclass of its class: `isinstance`, hooks, parameter names, `save_pretrained`,
`copy.deepcopy` and `pickle` work as before, other models of the same classes are not touched, and a module goes back
by getting its class back.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from xpu_ports.common.dispatch import record
from xpu_ports.common.stock import DIFFERENT, FUNCTION_NAMES, FUNCTIONS, Contract, method_contract
from xpu_ports.common.stock.source import fingerprint, fingerprints
from xpu_ports.common.stock.stand_ins import STOCK

# What a patched class remembers its stock class as.
_STOCK_CLASS = "_xpu_ports_stock_class"


@dataclass(frozen=True)
class Change:
    """One function of one module, and what became of it."""

    # The module's name in the model.
    path: str
    layer: str
    # "forward", or the function that the layer calls.
    function: str
    # The op that stands in, or None where the function was left alone.
    op: str | None
    # How the op's result differs from the stock function's, or why it was left alone.
    why: str


class Patch:
    """What `patch` did to a model. A context manager: leaving the `with` block undoes it."""

    def __init__(self, model: nn.Module, changes: Iterable[Change], modules: dict[str, nn.Module], before: int) -> None:
        self.model = model
        self.changes = tuple(changes)
        # The modules that were given another class, by name.
        self.modules = modules
        # How many modules an earlier `patch` had done.
        self.before = before

    @property
    def patched(self) -> tuple[Change, ...]:
        """Functions that ops stand in for since this patch."""
        return tuple(c for c in self.changes if c.op is not None)

    @property
    def left(self) -> tuple[Change, ...]:
        """Functions of the same kinds that were left alone, with reasons."""
        return tuple(c for c in self.changes if c.op is None)

    def undo(self) -> None:
        """Give the modules of this patch their classes back; those that have them already stay as they are.

        Raises:
            RuntimeError: modules were changed by others since, such as by accelerate's hooks; nothing is undone.
        """
        _restore(self.modules)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = []
        if self.before:
            lines.append(f"{self.before} modules of {type(self.model).__name__} were patched before")
        elif not self.patched:
            lines.append(nothing_to_patch(self.model))
        rows = [
            (f"{layer}.{function}" if function == "forward" else f"{layer}: {function}", op or STOCK, str(n), why)
            for (layer, function, op, why), n in summary(self.changes).items()
        ]
        if rows:
            rows.insert(0, ("layer", "runs on", "modules", "why or how it differs"))
            widths = [max(len(row[i]) for row in rows) for i in range(3)]
            cells = ([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]] for row in rows)
            lines += ["  ".join(row).rstrip() for row in cells]
        return "\n".join(lines)


def patch(model: nn.Module) -> Patch:
    """Let this package's ops stand in for the layers of a stock model that compute the same.

    Args:
        model: a model of transformers, or any module with layers of its; on any device, in any dtype.

    Returns:
        What was patched and what was left alone, which `explain()` lists too. Printable; `undo()` takes it back. A
        model that was patched before keeps that patch, and the new one undoes nothing of it.

    A model without a layer to patch gives a warning that says so.
    """
    changes: list[Change] = []
    modules: dict[str, nn.Module] = {}
    before = 0
    for path, module in model.named_modules():
        if stock_class(type(module)) is not None:
            before += 1
            continue
        plan = plan_of(type(module))
        changes += [Change(path, type(module).__name__, name, None, why) for name, why in plan.left]
        why = _why_not_instance(module) if plan.contracts else None
        for name, contract in plan.contracts.items():
            op, text = (contract.op, contract.note) if why is None else (None, why)
            changes.append(Change(path, type(module).__name__, name, op, text))
        if plan.contracts and why is None:
            modules[path] = module
    for module in modules.values():
        kind = type(module)
        module.__class__ = patched_class(kind, tuple(plan_of(kind).contracts))  # type: ignore[arg-type]
    done = Patch(model, changes, modules, before)
    _record(done)
    if not modules and not before:
        warnings.warn(nothing_to_patch(model), stacklevel=2)
    return done


def unpatch(model: nn.Module) -> int:
    """Give all patched modules of a model their classes back, whichever `patch` they are of.

    Returns:
        How many there were.

    Raises:
        RuntimeError: modules were changed by others since; nothing is undone.
    """
    modules = {path: m for path, m in model.named_modules() if stock_class(type(m)) is not None}
    _restore(modules)
    return len(modules)


def nothing_to_patch(model: nn.Module) -> str:
    """The sentence for a model none of whose layers is known."""
    count = sum(1 for _ in model.modules())
    return (
        f"nothing to patch in {type(model).__name__}: none of its {count} modules is known to compute what an op of "
        "this package does"
    )


def summary(changes: Iterable[Change]) -> Counter[tuple[str, str, str | None, str]]:
    """(layer, function, op, why) -> in how many modules, in the model's order."""
    return Counter((c.layer, c.function, c.op, c.why) for c in changes)


def _record(done: Patch) -> None:
    """Tell `explain()`: one line for each kind of layer and function, its calls the number of modules."""
    device = str(next((p.device for p in done.model.parameters()), "-"))
    for (layer, function, op, why), n in summary(done.changes).items():
        record(f"patch {layer}.{function}", op or STOCK, device, why, n)
    if not done.changes and not done.before:
        record("patch", STOCK, device, nothing_to_patch(done.model))


def _restore(modules: dict[str, nn.Module]) -> None:
    ours = {path: m for path, m in modules.items() if stock_class(type(m)) is not None}
    changed = [path for path, m in modules.items() if "forward" in vars(m) or _hides_a_patch(type(m))]
    if changed:
        raise RuntimeError(
            f"{len(changed)} modules were changed after they were patched, the first {changed[0]!r}: take back what "
            "was done to them since (hooks of accelerate, kernelize, wrappers), then the patch"
        )
    for module in ours.values():
        module.__class__ = stock_class(type(module))  # type: ignore[assignment]


def _hides_a_patch(cls: type) -> bool:
    """Whether a class was made over a patched one, as fully_shard and parametrizations do."""
    return stock_class(cls) is None and any(stock_class(base) is not None for base in cls.__mro__)


# ---------------------------------------------------------------------------------------------------- plans of classes


@dataclass(frozen=True)
class Plan:
    """What can be done for the modules of a class."""

    # "forward" or a function that forward calls -> its contract.
    contracts: dict[str, Contract]
    # (function, reason) of those that look alike and are left alone.
    left: tuple[tuple[str, str], ...] = ()


def stock_class(cls: type) -> type | None:
    """The class that a patched class was made of; None for every other class."""
    return vars(cls).get(_STOCK_CLASS)


def plan_of(cls: type[nn.Module]) -> Plan:
    """The plan for a class of modules, made anew each time: others may have replaced its functions since."""
    is_norm = any("RMSNorm" in c.__name__ for c in cls.__mro__)
    if cls.__module__.startswith("xpu_ports."):
        return Plan({}, (("forward", "it runs on this package's ops already"),) if is_norm else ())
    if cls.__module__.startswith("torch."):
        return Plan({}, (("forward", "torch's own, which is one call already"),) if is_norm else ())
    contract = method_contract(cls)
    if contract is not None:
        return Plan({"forward": contract})
    if is_norm:
        return Plan({}, (("forward", f"its source is not one that was compared with {_norm_op(cls)}"),))
    return _plan_of_callees(cls)


def _norm_op(cls: type) -> str:
    return "gated_rms_norm" if any("RMSNormGated" in c.__name__ for c in cls.__mro__) else "rms_norm"


def _plan_of_callees(cls: type[nn.Module]) -> Plan:
    forward = inspect.unwrap(cls.forward)
    contracts, left = {}, []
    for name in callees_of(forward):
        known = fingerprints(forward.__module__).get(name)
        contract = FUNCTIONS.get(known or "")
        if not _is_as_written(forward, name):
            left.append((name, "it was replaced by another function"))
        elif contract is not None and contract.callers and fingerprint(forward) not in contract.callers:
            left.append((name, f"{cls.__name__} is not known to write over the state that it gives"))
        elif contract is not None:
            contracts[name] = contract
        else:
            left.append((name, DIFFERENT.get(known or "", "its source is not one that was compared with an op")))
    return Plan(contracts, tuple(left))


def callees_of(forward: Callable[..., Any]) -> Iterator[str]:
    """Global names of the known functions that a forward calls."""
    if isinstance(forward, types.FunctionType):
        yield from (n for n in forward.__code__.co_names if n in FUNCTION_NAMES and n in forward.__globals__)


def _is_as_written(forward: types.FunctionType, name: str) -> bool:
    """Whether a global still is what its file makes it: the decorated function, or the kernels library's layer."""
    value = forward.__globals__[name]
    if isinstance(value, nn.Module):
        return hasattr(value, "kernel_layer_name") and "forward" not in vars(value)
    if not callable(value):
        return False
    inner = inspect.unwrap(value)
    return isinstance(inner, types.FunctionType) and (inner.__module__, inner.__qualname__) == (
        forward.__module__,
        name,
    )


def _why_not_instance(module: nn.Module) -> str | None:
    """Why a module of a known class is left alone, or None."""
    if "forward" in vars(module):
        return "its forward was replaced in the instance, by hooks of accelerate, by kernelize or by hand"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    return None


# ----------------------------------------------------------------------------------------------------- patched classes


@functools.cache
def patched_class(cls: type[nn.Module], functions: tuple[str, ...]) -> type[nn.Module]:
    """The subclass whose forward runs on ops, for the functions of its plan."""
    plan = plan_of(cls).contracts
    contracts = {name: plan[name] for name in functions}
    if "forward" in contracts:
        forward = _method(cls.forward, contracts["forward"])
    else:
        forward = _with_callees(
            cls.forward, {n: _function(inspect.unwrap(cls.forward), n, c) for n, c in contracts.items()}
        )
    body = {
        "__module__": __name__,
        "__doc__": f"{cls.__name__}, computing with this package's ops.",
        "__reduce_ex__": _reduce,
        "forward": forward,
        _STOCK_CLASS: cls,
    }
    return type(cls)(f"Patched{cls.__name__}", (cls,), body)  # type: ignore[misc]


def _method(stock: Callable[..., Any], contract: Contract) -> Callable[..., Any]:
    stand_in = contract.stand_in

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return stand_in(stock, self, *args, **kwargs)

    return forward


def _function(forward: types.FunctionType, name: str, contract: Contract) -> Callable[..., Any]:
    stock, stand_in = forward.__globals__[name], contract.stand_in

    def function(*args: Any, **kwargs: Any) -> Any:
        return stand_in(stock, *args, **kwargs)

    return function


def _with_callees(function: Any, callees: dict[str, Callable[..., Any]]) -> Any:
    """The same code behind the same decorators, with other functions for some of the global names that it calls.

    The rest of its globals are those of now. They carry no `__name__`: the compiler would look names up in the module
    of that name, where the stock functions are.
    """
    inner = getattr(function, "__wrapped__", None)
    cells, names = function.__closure__, function.__globals__
    if inner is None:
        names = {**{k: v for k, v in names.items() if k != "__name__"}, **callees}
    else:
        changed = _with_callees(inner, callees)
        cells = tuple(types.CellType(changed) if _holds(cell, inner) else cell for cell in cells or ())
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    if inner is not None:
        copy.__wrapped__ = changed  # type: ignore[attr-defined]
    copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return copy


def _holds(cell: types.CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:
        # A variable that has no value yet.
        return False


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickled by the stock class, as a patched one is made at run time."""
    return _remade, (stock_class(type(self)),), self.__getstate__()


def _remade(cls: type[nn.Module]) -> nn.Module:
    """A module without state, patched where the class still can be: another version of it comes back as it is."""
    if functions := tuple(plan_of(cls).contracts):
        cls = patched_class(cls, functions)  # type: ignore[arg-type]
    return cls.__new__(cls)
