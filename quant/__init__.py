"""Models with 4-bit weights that stay 4-bit: `register()` for transformers' `from_pretrained`, or `load()`.

xpu_ports.quant.register()
model = AutoModelForCausalLM.from_pretrained("some/model-MXFP4")
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Make transformers load `mxfp4-pack-quantized` checkpoints with this package, whatever the model.

    compressed-tensors need not be installed for them. Its other formats go to transformers' own quantizer, as before.
    """
    from xpu_ports.quant.loading import register

    register()


def unregister() -> None:
    """Undo `register()`: transformers decompresses such checkpoints again, at their first forward."""
    from xpu_ports.quant.loading import unregister

    unregister()


def load(path: str | os.PathLike, auto_class: str = "AutoModelForCausalLM", **kwargs: Any) -> Any:
    """Load a packed checkpoint, after `register()`.

    Args:
        path: a folder, or a name on the Hub.
        auto_class: the class of transformers whose `from_pretrained` to call.
        kwargs: for it, such as dtype, device_map or revision.

    Raises:
        CheckpointError: it is not packed, in a format that is not known here, or not whole.
        OSError: the Hub does not have it, or cannot be reached.
    """
    from xpu_ports.quant.loading import load

    return load(path, auto_class, **kwargs)
