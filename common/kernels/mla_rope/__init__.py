"""What stands around sparse latent attention: norms, rotation of a head's last columns in pairs, rows into the cache.

    [x_2i, x_2i+1] -> [x_2i cos - x_2i+1 sin, x_2i+1 cos + x_2i sin],   of the last 2 N columns

Since a row is key and value at once, the values that are summed up are rotated, each by its own position; turning the
sum back by the query's leaves the difference of positions, as in the scores.

Source: Su et al., "RoFormer" (arXiv:2104.09864), section 3.4.2, in its own order of columns; DeepSeek-AI,
"DeepSeek-V4", section 2.3; its inference code (model.py, apply_rotary_emb and class Attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.common.kernels.fp8_pages import write_rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., K] with its last 2 N columns rotated by cos, sin [..., N], in the widest dtype of the three."""
    x1, x2 = x[..., -2 * cos.shape[-1] :].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., : -2 * cos.shape[-1]].to(turned.dtype), turned], dim=-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@op
def rope_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last columns of every head.

    Args:
        x: [B, T, H, K], floating point, any strides.
        cos, sin: [B or 1, T, N], of the angles of pairs, 2 N <= K; fp32 in models.

    Returns:
        [B, T, H, K] in x's dtype, rounded once.
    """
    wide = _wide(x)
    return rotate(wide, cos.to(wide.dtype)[:, :, None], sin.to(wide.dtype)[:, :, None]).to(x.dtype)


def _fake_insert(
    q: Tensor, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if store.dtype == torch.uint8 else store.dtype
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(kv.shape, dtype=dtype, device=q.device)


@op(mutates=("store",), fake=_fake_insert)
def qnorm_rope_kv_insert(
    q: Tensor, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate queries and keys, and put the keys into the cache.

    Args:
        q: [B, T, H, K], floating point, any strides; each head is normalized, without a weight.
        kv: [B, T, K] in q's dtype, normalized with a weight.
        weight: [K], of kv.
        cos, sin: [B or 1, T, N], as for `rope_tail`; 2 N columns stay bf16 in pages.
        slots: [B, T], integers: where kv goes in its row's store; one below 0 is not written.
        store: [B, S, K], floating point, or pages [B, P, bytes], uint8 (see `fp8_pages`); written.
        eps: added to both mean squares.

    Returns:
        q: [B, T, H, K] in its dtype, rounded once.
        kv: [B, T, K] as the store holds it: in its dtype, bf16 of pages.
    """
    wide, wide_kv = _wide(q), _wide(kv)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    rotated = rotate(_normed(wide, eps), cos[:, :, None], sin[:, :, None]).to(q.dtype)
    row = rotate(_normed(wide_kv, eps) * weight.to(wide_kv.dtype), cos, sin)
    return rotated, write_rows(store, row, slots, 2 * cos.shape[-1])


def _fake_norm_insert(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float, index: bool
) -> Tensor:
    dtype = torch.bfloat16 if store.dtype == torch.uint8 else store.dtype
    return torch.empty(rows.shape, dtype=dtype, device=rows.device)


@op(mutates=("store",), fake=_fake_norm_insert)
def norm_rope_insert(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, store: Tensor, eps: float, index: bool
) -> Tensor:
    """Normalize and rotate compressed entries, and put them into the cache.

    Args:
        rows: [B, T, K], floating point; fp32 as `compress_csa` and `compress_hca` give them.
        weight: [K], of the norm.
        cos, sin: [B or 1, T, N], as for `rope_tail`, at an entry's first token.
        slots: [B, T], integers: where each goes in its row's store; one below 0 is not written.
        store: [B, S, K], floating point, or pages [B, P, bytes], uint8; written.
        eps: added to the mean square.
        index: whether pages have the indexer's layout.

    Returns:
        [B, T, K] as the store holds it: in its dtype, bf16 of pages.
    """
    wide = _wide(rows)
    row = rotate(_normed(wide, eps) * weight.to(wide.dtype), cos.to(wide.dtype), sin.to(wide.dtype))
    return write_rows(store, row, slots, None if index else 2 * cos.shape[-1])


@op
def inverse_rope_grouped_out(o: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    """Turn attention's output back by the queries' positions, and project it by groups of heads.

    Args:
        o: [B, T, H, K], floating point, any strides.
        cos, sin: [B or 1, T, N], those that the queries were rotated by.
        weight: [G R, H K / G] in o's dtype: R rows for each of the G groups, which divide the heads.

    Returns:
        [B, T, G R] in o's dtype, of products in it with sums in fp32.
    """
    (B, T, H, K), width = o.shape, weight.shape[1]
    groups = H * K // width
    wide = _wide(o)
    turned = rotate(wide, cos.to(wide.dtype)[:, :, None], -sin.to(wide.dtype)[:, :, None]).to(o.dtype)
    x = turned.reshape(B * T, groups, width).transpose(0, 1)  # [G, B T, H K / G]
    y = x @ weight.unflatten(0, (groups, -1)).mT  # [G, B T, R]
    return y.transpose(0, 1).reshape(B, T, weight.shape[0])


# Registers the kernels.
from xpu_ports.common.kernels.mla_rope import out as _out  # noqa: E402, F401
from xpu_ports.common.kernels.mla_rope import triton as _triton  # noqa: E402, F401
