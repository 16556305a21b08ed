"""Running a model to be measured."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common import dispatch


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def release() -> None:
    """Give back what a model held."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


@contextlib.contextmanager
def running(backend: str | None) -> Iterator[None]:
    """No gradients, and a forced back end if there is one."""
    forced = contextlib.nullcontext() if backend is None else dispatch.use_choices(backend, where="--backend")
    with torch.no_grad(), forced:
        yield


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """[T, V] of the tokens [T]."""
    return model(ids[None].to(model.device), use_cache=False).logits[0]
