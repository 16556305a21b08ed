"""What mHC's kernels in Triton share: tiles of streams, and products with fn in pieces.

Matrix units have no fp32, so a number of fp32 is three of bf16 that add up to it: exact, and of nine products of two
such the six largest are as near as fp32's own.
"""

from __future__ import annotations

from xpu_ports.common.tritonlib import tl, triton

# ------------------------------------------------------------------------------------------------------------- pieces


@triton.jit
def _upper(x):
    """fp32 cut off to the 8 bits of bf16; not rounded, which a compiler might take for nothing."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def in_pieces(x):
    """Three numbers in bf16 that add up to x (fp32), exactly."""
    first = _upper(x)
    second = _upper(x - first)
    third = (x - first) - second
    return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16)


@triton.jit
def load_pieces(fn_ptrs, mask, SIZE: tl.constexpr):
    """The three pieces of a tile of fn, which is SIZE numbers of bf16 for each piece, or fp32."""
    w = tl.load(fn_ptrs, mask=mask, other=0.0)
    if w.dtype == tl.float32:
        w, w1, w2 = in_pieces(w)
    else:
        w1 = tl.load(fn_ptrs + SIZE, mask=mask, other=0.0)
        w2 = tl.load(fn_ptrs + 2 * SIZE, mask=mask, other=0.0)
    return w, w1, w2


# Two functions, for Triton 3.3 takes no None for a sum that is passed on.
@triton.jit
def _dot(x, w, TURN: tl.constexpr):
    """x w, with TURN w x."""
    return tl.dot(w, x) if TURN else tl.dot(x, w)


@triton.jit
def _add_dot(x, w, block, TURN: tl.constexpr):
    """block + x w, with TURN w x."""
    return tl.dot(w, x, block) if TURN else tl.dot(x, w, block)


@triton.jit
def product(x, w0, w1, w2, TURN: tl.constexpr):
    """x w, with TURN w x^T, of w in pieces, and of x in pieces unless it is bf16.

    The small ones first. Matrix units cut sums off rather than round them: add a block's up outside.
    """
    if TURN:
        x = tl.trans(x)
    if x.dtype == tl.bfloat16:
        x0 = x
        block = _dot(x0, w2, TURN)
        block = _add_dot(x0, w1, block, TURN)
    else:
        x0, x1, x2 = in_pieces(x.to(tl.float32))
        block = _dot(x2, w0, TURN)
        block = _add_dot(x1, w1, block, TURN)
        block = _add_dot(x0, w2, block, TURN)
        block = _add_dot(x1, w0, block, TURN)
        block = _add_dot(x0, w1, block, TURN)
    return _add_dot(x0, w0, block, TURN)


# ------------------------------------------------------------------------------------------------------------ streams


@triton.jit
def load_streams(x_ptrs, mask, stride_s, S: tl.constexpr):
    """Some columns of four streams, in fp32; those beyond S are the last one's."""
    x0 = tl.load(x_ptrs, mask=mask, other=0.0)
    x1, x2, x3 = x0, x0, x0
    if S > 1:
        x_ptrs += stride_s
        x1 = tl.load(x_ptrs, mask=mask, other=0.0)
    if S > 2:
        x_ptrs += stride_s
        x2 = tl.load(x_ptrs, mask=mask, other=0.0)
    if S > 3:
        x_ptrs += stride_s
        x3 = tl.load(x_ptrs, mask=mask, other=0.0)
    return x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)


@triton.jit
def mixed(y, x0, x1, x2, x3, post_ptrs, comb_ptrs, mask, S: tl.constexpr):
    """post_k y + sum_j C_jk x_j, of pointers at k, which may be one or each token's."""
    out = tl.load(post_ptrs, mask=mask, other=0.0).to(tl.float32) * y
    out += tl.load(comb_ptrs, mask=mask, other=0.0).to(tl.float32) * x0
    if S > 1:
        out += tl.load(comb_ptrs + S, mask=mask, other=0.0).to(tl.float32) * x1
    if S > 2:
        out += tl.load(comb_ptrs + 2 * S, mask=mask, other=0.0).to(tl.float32) * x2
    if S > 3:
        out += tl.load(comb_ptrs + 3 * S, mask=mask, other=0.0).to(tl.float32) * x3
    return out
