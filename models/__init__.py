"""Hugging Face-compatible model trees on the shared ops; `register()` makes transformers' Auto classes return them.

`patch(model)` puts the ops into stock models instead.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xpu_ports.models.kernels_library import kernel_mapping
    from xpu_ports.models.patching import Patch, patch, unpatch

__all__ = ["PORTS", "Patch", "kernel_mapping", "patch", "register", "unpatch"]

# Model type -> (its config's name, Auto class -> our class). Looked up by name, so that nothing is imported early.
PORTS = {
    "deepseek_v4": (
        "DeepseekV4Config",
        {"AutoModel": "DeepseekV4Model", "AutoModelForCausalLM": "DeepseekV4ForCausalLM"},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {"AutoModel": "KimiLinearModel", "AutoModelForCausalLM": "KimiLinearForCausalLM"},
    ),
    "zamba2": ("Zamba2Config", {"AutoModel": "Zamba2Model", "AutoModelForCausalLM": "Zamba2ForCausalLM"}),
}


def register(*names: str) -> None:
    """Make `AutoModel`, `AutoModelForCausalLM` and `pipeline` return the ports.

    Args:
        names: model types, such as "zamba2"; all of them when left out.

    Raises:
        ValueError: there is no port of that model type.
    """
    import transformers

    for name in names or PORTS:
        if name not in PORTS:
            raise ValueError(f"no port of model type {name!r}; there are: {', '.join(PORTS)}")
        config_name, classes = PORTS[name]
        module = importlib.import_module(f"xpu_ports.models.{name}")
        for auto_name, class_name in classes.items():
            auto_class = getattr(transformers, auto_name)
            auto_class.register(getattr(module, config_name), getattr(module, class_name), exist_ok=True)


def __getattr__(name: str) -> Any:
    """`Patch`, `patch`, `unpatch` and `kernel_mapping`, whose modules import every op that they need."""
    if name == "kernel_mapping":
        return importlib.import_module("xpu_ports.models.kernels_library").kernel_mapping
    if name in __all__:
        return getattr(importlib.import_module("xpu_ports.models.patching"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
