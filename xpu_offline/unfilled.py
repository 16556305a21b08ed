"""Arguments of calls at the sizes of models whose memory is never touched, so that they take none and no time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xpu_ports.common.bench.case import SMALL, Case, Draw, parse_size

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mul, _ATEN.mm, _ATEN.bmm, _ATEN.addmm, _ATEN.baddbmm}


class Unfilled(Draw):
    """Tensors as memory comes."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self(*shape, dtype=dtype)


class Uncomputed(TorchDispatchMode):
    """Inside, products of large tensors, such as rows of the registry and launch wrappers make, are not computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and any(isinstance(a, Tensor) and a.is_floating_point() and a.numel() > SMALL for a in args):
            if func.overloadpacket is _ATEN.mul_:
                return args[0]
            if func.overloadpacket in _PRODUCTS:
                made = func(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
                return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)
        return func(*args, **(kwargs or {}))


def arguments(case: Case, size: str, dtype: torch.dtype) -> list[Any]:
    """The case's arguments at a size, on the CPU."""
    with Uncomputed():
        return list(case.inputs(parse_size(size), Unfilled(torch.device("cpu"), dtype, torch.Generator())))
