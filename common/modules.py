"""Layers that several models use, as modules: parameters under the names of checkpoints, work done by ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from xpu_ports.common.dispatch import record
from xpu_ports.common.kernels.gated_rms_norm import gated_norm_by_sum, gated_rms_norm, gated_square_sum, total_dtype
from xpu_ports.common.kernels.rms_norm import add_rms_norm, rms_norm
from xpu_ports.common.kernels.skinny_linear import adapted_linears, linear, norm_linear


class RMSNorm(nn.Module):
    """RMS normalization of the last dimension, optionally of the sum with a residual."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x, or x + residual.

        Args:
            x: [..., N].
            residual: [..., N] or None.

        Returns:
            [..., N] in x's dtype; with a residual also the sum, in the residual's dtype.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    def then(self, layer: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """A linear layer behind this norm, in one launch where that pays.

        Args:
            layer: gives [..., M]; one that is not a plain `nn.Linear` is called.
            x: [..., N].
            residual: [..., N] or None.

        Returns:
            [..., M]; with a residual also the sum, as in `forward`.
        """
        if is_plain(layer) and is_plain(self):
            weights = layer._parameters
            return norm_linear(
                x, residual, self._parameters["weight"], weights["weight"], weights["bias"], self.variance_epsilon
            )
        record_apart("norm_linear", x, self, layer)
        if residual is None:
            return layer(self(x))
        y, total = self(x, residual)
        return layer(y), total

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


def is_plain(module: nn.Module) -> bool:
    """Whether a module's weights may be used without calling it: an ordinary linear layer or norm, without hooks."""
    if type(module) not in (nn.Linear, RMSNorm):
        return False
    # Asked in every layer of every step: an attribute that a module lacks is looked for by an exception.
    own = module.__dict__
    # Tensor parallelism, transformers' or ours, gives a layer another forward.
    return not (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_hf_hook" in own)


def known_early(module: nn.Module, name: str, device: torch.device) -> Tensor | None:
    """A weight of a module that is called later, where it will be the same then: without hooks, which may bring it.

    Args:
        module: of any class.
        name: the weight's.
        device: where it is wanted; on another it is none.
    """
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_hf_hook" in own:
        return None
    weight = own["_parameters"].get(name)
    # A subclass is one rank's share.
    return weight if type(weight) is nn.Parameter and weight.device == device else None


def weights_read(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a forward that reads the weights of these children without calling them: accelerate's hooks run before it."""

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        with_hooks = force_accelerate_hooks(list(names))(forward)

        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            children = self._modules
            for name in names:
                if "_hf_hook" in children[name].__dict__:
                    return with_hooks(self, *args, **kwargs)
            return forward(self, *args, **kwargs)

        return wrapper

    return decorate


def record_apart(op: str, x: Tensor, *modules: nn.Module) -> None:
    """Tell `explain()` that modules ran one after another instead of through an op that reads their weights.

    Args:
        op: the op's name.
        x: their input.
        modules: of which one at least is not plain.
    """
    if torch.compiler.is_compiling():
        return
    module = next(m for m in modules if not is_plain(m))
    why = "has hooks" if type(module) in (nn.Linear, RMSNorm) else "is not an nn.Linear with a dense weight"
    record(op, "layers apart", x.device.type, f"{type(module).__name__} {why}")


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), where the layer is a plain linear one through the op that is fast for few rows."""
    if not is_plain(layer):
        return layer(x)
    weights = layer._parameters
    return linear(x, weights["weight"], weights["bias"])


def project_adapted(x: Tensor, layers: list[nn.Module], adapters: Sequence[Any]) -> list[Tensor]:
    """Layers that share their input, each with a low-rank addition of its own.

    Args:
        x: [..., K].
        layers: give [..., N_i] each.
        adapters: a `nn.Sequential` of two linear layers for each, or none at all.

    Returns:
        layer(x) + adapter(x) for each.
    """
    halves = [half for adapter in adapters for half in adapter._modules.values()]
    every = (*layers, *halves)
    if all(is_plain(m) and m._parameters["bias"] is None for m in every):
        weights, n = [m._parameters["weight"] for m in every], len(layers)
        return adapted_linears(x, weights[:n], weights[n::2], weights[n + 1 :: 2])
    if not all(is_plain(m) for m in every):
        record_apart("adapted_linears", x, *layers, *halves)
    if not adapters:
        return [layer(x) for layer in layers]
    return [layer(x) + adapter(x) for layer, adapter in zip(layers, adapters, strict=True)]


class Mixer2RMSNormGated(nn.Module):
    """Mamba-2's gated norm, norm(x * silu(gate)) * weight by groups: a drop-in for vLLM's class of this name."""

    def __init__(self, full_hidden_size: int, full_n_groups: int, use_rms_norm: bool = True, eps: float = 1e-6) -> None:
        """Make the layer.

        Args:
            full_hidden_size: columns.
            full_n_groups: groups of columns, each with a mean square of its own; divides the columns.
            use_rms_norm: False for x * silu(gate) alone, without a weight.
            eps: added to the mean square.

        Raises:
            ValueError: the groups do not divide the columns.
        """
        super().__init__()
        if full_n_groups <= 0 or full_hidden_size % full_n_groups:
            raise ValueError(f"full_n_groups is {full_n_groups}, which does not divide {full_hidden_size} columns")
        self.group_size = full_hidden_size // full_n_groups
        self.n_groups = full_n_groups
        self.variance_epsilon = eps
        self.use_rms_norm = use_rms_norm
        # Where one group is divided: the ranks that hold it, and its columns on all of them.
        self.ranks_of_group: dist.ProcessGroup | None = None
        self.columns_of_group = self.group_size
        self.register_parameter("weight", nn.Parameter(torch.ones(full_hidden_size)) if use_rms_norm else None)

    def share_groups(self, ranks: dist.ProcessGroup, columns: int) -> None:
        """Hold a part of one group from here on: all that there is here belongs to it, and ranks hold its columns."""
        self.ranks_of_group, self.columns_of_group = ranks, columns

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Gate and normalize x.

        Args:
            x, gate: [..., full_hidden_size], any row strides.

        Returns:
            [..., full_hidden_size] in x's dtype.
        """
        if not self.use_rms_norm:
            wide = torch.promote_types(x.dtype, torch.float32)
            return (x.to(wide) * nn.functional.silu(gate.to(wide))).to(x.dtype)
        if self.ranks_of_group is None:
            return gated_rms_norm(x, gate, self.weight, self.variance_epsilon, self.group_size)
        total = gated_square_sum(x, gate)
        dist.all_reduce(total, group=self.ranks_of_group)
        return gated_norm_by_sum(x, gate, self.weight, total, self.columns_of_group, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"groups={self.n_groups} of {self.group_size}, eps={self.variance_epsilon}"


class FusedRMSNormGated(nn.Module):
    """KDA's gated norm, norm(x) * weight * act(g): a drop-in for flash-linear-attention's class of this name.

    Two things differ from the original, on purpose: x is never overwritten, and `residual_in_fp32` holds with a
    residual too.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer.

        Args:
            hidden_size: columns.
            elementwise_affine: False for no weight.
            eps: added to the mean square.
            activation: "swish" (or "silu", the same) or "sigmoid".
            device, dtype: the weight's.

        Raises:
            ValueError: the activation is unknown.
        """
        super().__init__()
        if activation not in ("swish", "silu", "sigmoid"):
            raise ValueError(f"activation is {activation!r}, expected 'swish', 'silu' or 'sigmoid'")
        self.hidden_size = hidden_size
        self.elementwise_affine = elementwise_affine
        self.eps = eps
        self.activation = activation
        weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize x, or x + residual, and gate it.

        Args:
            x, g: [..., hidden_size], any row strides.
            residual: [..., hidden_size] or None.
            prenorm: also return x + residual (x where there is none).
            residual_in_fp32: return that in fp32.

        Returns:
            [..., hidden_size] in x's dtype; with `prenorm` a pair.
        """
        activation = "sigmoid" if self.activation == "sigmoid" else "silu"
        if prenorm and residual is None:
            # The sum is x itself: no copy through the kernel.
            y = gated_rms_norm(x, g, self.weight, self.eps, None, True, activation)
            return y, x.to(total_dtype(x, None, residual_in_fp32))
        return gated_rms_norm(x, g, self.weight, self.eps, None, True, activation, residual, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation}"
