"""Manifold-constrained hyper-connections: a residual stream that is several, mixed before and after each layer.

    m = fn x / rms(x),   x = the S streams of a token side by side
    pre = sigmoid(a_0 m_pre + b_pre) + eps,   post = 2 sigmoid(a_1 m_post + b_post)
    C = sinkhorn(softmax(a_2 m_comb + b_comb) + eps),   S by S
    layer's input = sum_i pre_i x_i,   x'_k = post_k y + sum_j C_jk x_j

Sinkhorn's iterations divide by the sums of columns and of rows in turn, the columns' first and last, so that both end
near 1 and no stream grows from layer to layer.

fn x and |x|^2 are made by `mhc_pre`, or before, by `mhc_post_products`, which has the streams at hand: where
`products_save_time` says so.

Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections" (arXiv:2512.24880); DeepSeek-AI, "DeepSeek-V4",
section 2.2; the order of operations and where eps goes are those of its inference code (model.py, class Block).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from xpu_ports.common.dispatch import op

# Columns of each stream that a part of `mhc_post_products` is of, for few tokens and for many, and parts at most.
FEW_TOKENS, FEW_COLUMNS, MANY_COLUMNS, MOST_PARTS = 64, 64, 512, 64


@op
def mhc_pre(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
    products: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a layer's input of the streams, and what `mhc_post` needs to put its output back.

    Args:
        x: [..., S, D], floating point.
        fn: [2 S + S S, S D], fp32: rows for pre, post and comb, the last row by row.
        scale: [3], fp32, of pre, post and comb.
        base: [2 S + S S], fp32.
        norm_eps: added to the mean square of the S D columns.
        eps: added to pre, and to comb before its sums and to these.
        iterations: how often the columns are divided by their sums, at least 1.
        products: `mhc_post_products`'s of x and fn, which then is not read.

    Returns:
        y: [..., D] in x's dtype, rounded once.
        post: [..., S], fp32 (fp64 for fp64), in (0, 2).
        comb: [..., S, S], fp32: from the first index's stream to the second's.
    """
    S = x.shape[-2]
    m = _mixes(x, fn, norm_eps, products)
    pre, post, comb = m.split([S, S, S * S], dim=-1)
    b_pre, b_post, b_comb = base.to(m.dtype).split([S, S, S * S])
    a_pre, a_post, a_comb = scale.to(m.dtype).unbind()
    pre = (pre * a_pre + b_pre).sigmoid() + eps
    post = 2 * (post * a_post + b_post).sigmoid()
    comb = (comb * a_comb + b_comb).unflatten(-1, (S, S)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return _collapse(x, pre), post, comb


@op
def mhc_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Put a layer's output into the streams, which are mixed meanwhile.

    Args:
        y: [..., D], the layer's output.
        x: [..., S, D], the streams before it.
        post: [..., S], how much of y each stream gets.
        comb: [..., S, S], how much of a stream, the first index, goes to another, the second.

    Returns:
        [..., S, D] in x's dtype, computed in fp32 (fp64 for fp64).
    """
    return _put_back(y, x, post, comb)


@op
def mhc_post_products(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """`mhc_post`, and of the new streams what the next `mhc_pre` or `mhc_head` would read them for.

    Args:
        y, x, post, comb: as `mhc_post` takes them.
        fn: [R, S D], fp32, the next one's.

    Returns:
        streams: [..., S, D] in x's dtype.
        products: [..., P, R + 1], fp32 (fp64 for fp64): fn x and |x|^2 of the streams as they were rounded, of
            `product_columns` columns of all streams a part, so that not one program makes all of a token's.
    """
    x = _put_back(y, x, post, comb)
    S, D = x.shape[-2:]
    columns = product_columns(x.shape[:-2].numel(), D)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    fill = 0, -D % columns
    wide = F.pad(wide, fill).unflatten(-1, (-1, columns)).transpose(-3, -2).flatten(-2)  # [..., P, S C]
    fn = F.pad(fn.to(wide.dtype).unflatten(-1, (S, D)), fill).unflatten(-1, (-1, columns))  # [R, S, P, C]
    m = torch.einsum("...pk,pkr->...pr", wide, fn.permute(2, 1, 3, 0).flatten(1, 2))
    return x, torch.cat([m, wide.square().sum(-1, keepdim=True)], -1)


def product_columns(tokens: int, D: int) -> int:
    """Columns that a part of the products is of, a power of two: of few tokens few, so that all units have work."""
    columns = FEW_COLUMNS if tokens <= FEW_TOKENS else MANY_COLUMNS
    while columns * MOST_PARTS < D:
        columns *= 2
    return columns


@op
def mhc_head(
    x: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    eps: float,
    products: Tensor | None = None,
) -> Tensor:
    """Make one of the streams, behind the last layer.

    Args:
        x: [..., S, D], floating point.
        fn: [S, S D], fp32.
        scale: [1], fp32.
        base: [S], fp32.
        norm_eps: added to the mean square of the S D columns.
        eps: added to each stream's share.
        products: `mhc_post_products`'s of x and fn, which then is not read.

    Returns:
        [..., D] in x's dtype, rounded once.
    """
    m = _mixes(x, fn, norm_eps, products)
    return _collapse(x, (m * scale.to(m.dtype) + base.to(m.dtype)).sigmoid() + eps)


def _mixes(x: Tensor, fn: Tensor, norm_eps: float, products: Tensor | None) -> Tensor:
    """fn x / rms(x), the norm behind the product; in fp32 at least."""
    flat = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
    if products is None:
        return F.linear(flat, fn.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    m, squares = products.to(flat.dtype).sum(-2).split([fn.shape[0], 1], -1)
    return m * torch.rsqrt(squares / flat.shape[-1] + norm_eps)


def _put_back(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k y + sum_j C_jk x_j, in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    post, comb = post.to(wide), comb.to(wide)
    return (post[..., None] * y.to(wide)[..., None, :] + comb.mT @ x.to(wide)).to(x.dtype)


def _collapse(x: Tensor, shares: Tensor) -> Tensor:
    """sum_i shares_i x_i, in x's dtype."""
    return (shares[..., None] * x.to(shares.dtype)).sum(-2).to(x.dtype)


# Registers the kernels.
from xpu_ports.common.kernels.mhc import triton as _triton  # noqa: E402, F401
from xpu_ports.common.kernels.mhc.products import products_save_time as products_save_time  # noqa: E402
