"""This package's ops as layers of the `kernels` library, the mechanism of transformers' `use_kernels`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from xpu_ports.common.dispatch import OPS
from xpu_ports.common.stock import FUNCTIONS, METHODS, Contract, method_contract
from xpu_ports.common.stock.source import fingerprint, fingerprints
from xpu_ports.models.patching import callees_of


@dataclass(frozen=True)
class LocalLayer:
    """A layer of this package as the kernels library's mappings take repositories: it has a name and is loaded.

    The library's own `LocalLayerRepository` wants a folder built like a repository of the Hub; this one is the code
    that is imported.
    """

    layer_name: str
    # Of the function that it stands in for.
    known: str

    def load(self) -> type[nn.Module]:
        """The layer's class: without state, its forward taking the stock arguments."""
        contract = METHODS.get(self.known) or FUNCTIONS[self.known]
        stand_in, is_method = contract.stand_in, self.known in METHODS

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            stock = type(self).forward
            if is_method:
                return stand_in(stock, self, *args, **kwargs)
            return stand_in(functools.partial(stock, self), *args, **kwargs)

        # The library compares signatures, parameter by parameter.
        names = list(inspect.signature(stand_in).parameters.values())[1:]
        names = [p for p in names if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        if not is_method:
            names.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        body = {"forward": forward, "can_torch_compile": True, "has_backward": True}
        return type(self.layer_name, (nn.Module,), body)

    def __str__(self) -> str:
        return f"xpu_ports (layer `{self.layer_name}`)"


def kernel_mapping(model: nn.Module, devices: Iterable[str] | None = None) -> dict[str, dict[str, LocalLayer]]:
    """A mapping for the `kernels` library, by which `kernelize` puts the same ops into the same model.

        with kernels.use_kernel_mapping(kernel_mapping(model), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE)

    It reaches what transformers registers with that library, which is less than `patch` does (gated norms of Mamba-2
    models are not), cannot be undone, and changes the functions that layers call for all models of the process, as
    every kernel of that library does. A call that an op does not cover goes to the stock function here too.

    Args:
        model: a model of transformers, not patched.
        devices: device types to offer the layers for; those that the ops have kernels for when left out.

    Returns:
        The library's name of a layer -> device type -> layer. A name that the model uses for layers of different
        contracts is left out, since the library knows the name alone, as is a function whose stand-in relies on its
        caller.

    Raises:
        ValueError: none of the model's layers is registered. transformers registers them while it is imported, where
            the library is installed in a version that it takes.
    """
    known: dict[str, set[str | None]] = {}
    for cls in {type(m) for m in model.modules()}:
        for name, found in _registered(cls):
            known.setdefault(name, set()).add(found)
    if not known:
        raise ValueError(
            f"transformers registered no layer of {type(model).__name__} with the kernels library: install a version "
            "of `kernels` that transformers takes (`transformers.utils.import_utils.KERNELS_MIN_VERSION`), before "
            "transformers is imported"
        )
    mapping = {}
    for name, of in sorted(known.items()):
        contract = METHODS.get(next(iter(of)) or "") or FUNCTIONS.get(next(iter(of)) or "")
        if len(of) == 1 and contract is not None and not contract.callers:
            offered = devices if devices is not None else _devices(contract)
            mapping[name] = {device: LocalLayer(name, next(iter(of))) for device in offered}  # type: ignore[arg-type]
    return mapping


def _registered(cls: type[nn.Module]) -> Iterator[tuple[str, str | None]]:
    """(the kernels library's name, fingerprint) of what transformers registered of a class."""
    if hasattr(cls, "kernel_layer_name"):
        yield str(cls.kernel_layer_name), fingerprint(cls.forward) if method_contract(cls) else None
    forward = inspect.unwrap(cls.forward)
    for name in callees_of(forward):
        value = forward.__globals__[name]
        if isinstance(value, nn.Module) and hasattr(value, "kernel_layer_name"):
            yield str(value.kernel_layer_name), fingerprints(forward.__module__).get(name)


def _devices(contract: Contract) -> list[str]:
    return sorted({device for i in OPS[contract.op].implementations for device in i.devices})
