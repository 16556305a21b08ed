"""One error budget for every test and every accuracy report.

An implementation may be twice as far from the fp64 oracle as the op's own reference is in the same dtype, plus a
small share of the largest value: max|out - ref64| <= 2 max|ref_dtype - ref64| + atol(dtype) max|ref64|. Both
references are the same function, fed fp64 and fed the test's dtype. NaN and infinity must sit at the same places.
Integers, such as indices, have no tolerance. An op whose kernels by its contract round the operands of products to the
dtype, where its reference rounds the result alone, may have that share twice; so may one whose fp32 sums are taken by
matrix units that cut them off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The share of the largest value, by dtype.
TOLERANCE = {
    # The oracle against itself in another order of sums.
    torch.float64: 1e-13,
    # 16 units in the last place: sums of a few thousand terms in another order.
    torch.float32: 2e-6,
    # Half a unit in the last place: the rounding of the result alone.
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


@dataclass(frozen=True)
class Error:
    """How far a result is from the oracle. `allowed` is the budget for `largest`."""

    largest: float
    allowed: float
    # Root mean square of the error over that of the oracle.
    relative: float
    # The flat index of the largest error.
    at: int

    @property
    def within(self) -> bool:
        return self.largest <= self.allowed


def measure(out: Tensor, reference: Tensor, oracle: Tensor, rounds_operands: bool = False) -> Error:
    """The error of `out` beside that of `reference` in the same dtype, both against `oracle` (fp64).

    Args:
        out, reference, oracle: of one shape.
        rounds_operands: the kernels round operands of products to the dtype, by the op's contract.

    Raises:
        AssertionError: shape or dtype differ, or NaN or infinity sit at other places than the oracle's.
    """
    assert out.shape == reference.shape == oracle.shape, f"shape {tuple(out.shape)}, expected {tuple(oracle.shape)}"
    assert out.dtype == reference.dtype, f"dtype {out.dtype}, expected {reference.dtype}"
    out64, reference64, oracle64 = (t.detach().cpu().double() for t in (out, reference, oracle))
    if out64.numel() == 0:
        return Error(0.0, 0.0, 0.0, 0)
    # A value beyond the dtype's range is infinite in the reference too; the oracle's own range does not count.
    oracle64 = torch.where(reference64.isinf(), reference64, oracle64)
    odd = ~oracle64.isfinite()
    misplaced = ~torch.where(odd, (out64 == oracle64) | (out64.isnan() & oracle64.isnan()), out64.isfinite())
    assert not misplaced.any(), (
        f"{int(misplaced.sum())} of {out.numel()} values are NaN or infinite where the oracle is not, or the reverse; "
        f"first at flat index {int(misplaced.flatten().nonzero()[0])}"
    )
    out64, reference64, oracle64 = (t.masked_fill(odd, 0.0) for t in (out64, reference64, oracle64))
    difference = (out64 - oracle64).abs().flatten()
    rms = oracle64.square().mean().sqrt().item()
    tolerance = TOLERANCE[out.dtype] * (1 + rounds_operands) if out.dtype.is_floating_point else 0.0
    return Error(
        largest=difference.max().item(),
        allowed=2 * (reference64 - oracle64).abs().max().item() + tolerance * oracle64.abs().max().item(),
        relative=difference.square().mean().sqrt().item() / rms if rms else 0.0,
        at=int(difference.argmax()),
    )


def assert_close(
    out: Tensor, reference: Tensor, oracle: Tensor, name: str = "output", rounds_operands: bool = False
) -> Error:
    """`measure`, and an AssertionError with the figures when the budget is exceeded."""
    error = measure(out, reference, oracle, rounds_operands)
    assert error.within, (
        f"{name}: error {error.largest:.3e} at flat index {error.at}, allowed {error.allowed:.3e} "
        f"(relative {error.relative:.1e}, {out.dtype})"
    )
    return error


def to_double(value: Any) -> Any:
    """Floating tensors in fp64 on the CPU, everything else as it is, through lists and tuples."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(to_double(v) for v in value)
    return value


def oracle(reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The reference in fp64 on the CPU (not every Intel GPU has fp64), on copies: in-place ops leave `args` alone."""

    def copy(value: Any) -> Any:
        value = to_double(value)
        return value.clone() if isinstance(value, Tensor) else value

    return reference(*map(copy, args), **{k: copy(v) for k, v in kwargs.items()})
