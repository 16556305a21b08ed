"""Activations in fp32 for kernels: what tl has no name for, written once."""

from __future__ import annotations

from xpu_ports.common.tritonlib import tl, triton


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def limit_both(gate, up, limit):
    """A gate's upper bound, and the bound of both signs of what it gates. Not by tl.clamp, which may drop NaN."""
    gate = tl.where(gate > limit, limit, gate)
    return gate, tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))


@triton.jit
def gelu(x):
    """x * Phi(x) by the error function."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """0.5 x (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2 / pi), as x * sigmoid(2 c (...)): tl has no tanh."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)); accurate for very negative x too, where 1 + exp(x) rounds to 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    # log1p(e) = log(u) * e / (u - 1): the rounding of u cancels (Goldberg 1991, theorem 4).
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    # NaN fails the comparison and stays.
    return tl.where(x <= 20.0, log1p, x)
