"""Norms, rotations of pairs and rows into the cache, beside complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal
from xpu_ports.common.kernels.fp8_pages import cache_rows, index_page_bytes, page_bytes
from xpu_ports.common.kernels.mla_rope import (
    inverse_rope_grouped_out,
    norm_rope_insert,
    qnorm_rope_kv_insert,
    rope_tail,
)

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


def angles(B: int, T: int, N: int) -> Tensor:
    return 6 * torch.rand(B, T, N, dtype=torch.float64)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """The last columns as complex numbers, neighbours as real and imaginary part, times e^(i angle)."""
    N = angle.shape[-1]
    tail = torch.view_as_complex(x[..., -2 * N :].double().unflatten(-1, (N, 2)).contiguous())
    tail = torch.view_as_real(tail * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([x[..., : -2 * N].double(), tail], dim=-1)


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.op("rope_tail")
class TestRopeTail:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, run: Runner, layout: str, dtype: torch.dtype) -> None:
        x = normal(2, 3, 30, dtype=dtype, layout=layout).unflatten(-1, (3, 10))
        angle = angles(2, 3, 3)
        y = run(x, angle.cos().float(), angle.sin().float())
        assert torch.equal(y[..., :4], x[..., :4])

    def test_by_hand(self) -> None:
        x, angle = torch.randn(2, 3, 4, 10, dtype=torch.float64), angles(2, 3, 3)
        torch.testing.assert_close(rope_tail(x, angle.cos(), angle.sin()), turned(x, angle[:, :, None]))

    def test_one_row_of_angles(self, run: Runner) -> None:
        run(torch.randn(3, 2, 1, 4), torch.randn(1, 2, 2), torch.randn(1, 2, 2))

    def test_rounded_once(self) -> None:
        assert_rounded_once(rope_tail, torch.randn(4, 64, 2, 32).bfloat16(), *torch.randn(2, 4, 64, 16))


@pytest.mark.op("qnorm_rope_kv_insert")
class TestInsert:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sizes(self, run: Runner, dtype: torch.dtype) -> None:
        B, T, H, K = 2, 5, 3, 12
        q, kv = normal(B, T, H * K, dtype=dtype, layout="slice").unflatten(-1, (H, K)), torch.randn(B, T, K).to(dtype)
        slots = torch.tensor([[3, 4, 5, -1, -1], [0, 1, 2, 3, 4]])
        store, angle = torch.randn(B, 7, K).to(dtype), angles(B, T, 4).float()
        rotated, row, after = run(q, kv, torch.rand(K), angle.cos(), angle.sin(), slots, store, EPS)
        assert rotated.dtype == row.dtype == dtype
        assert torch.equal(after[0, 3:6], row[0, :3])
        assert torch.equal(after[0, [0, 1, 2, 6]], store[0, [0, 1, 2, 6]])

    def test_by_hand(self) -> None:
        q, kv, weight, angle = (torch.randn(s, dtype=torch.float64) for s in ((1, 3, 2, 8), (1, 3, 8), (8,), (1, 3, 2)))
        store = torch.zeros(1, 4, 8, dtype=torch.float64)
        slots = torch.tensor([[2, 0, 3]])
        rotated, row = qnorm_rope_kv_insert(q, kv, weight, angle.cos(), angle.sin(), slots, store, EPS)
        torch.testing.assert_close(rotated, turned(normed(q), angle[:, :, None]))
        torch.testing.assert_close(row, turned(normed(kv, weight), angle))
        assert torch.equal(store[0, [2, 0, 3]], row[0])

    def test_pages(self) -> None:
        """The row that is given back is the one that is read out again: quantized, its last columns in bf16."""
        B, T, K, rope = 2, 3, 128, 64
        q, kv, weight = torch.randn(B, T, 2, K), torch.randn(B, T, K), torch.rand(K)
        angle, slots = angles(B, T, rope // 2).float(), torch.tensor([[0, 5, -1], [1, 2, 3]])
        store = torch.zeros(B, 2, page_bytes(K, rope, 4), dtype=torch.uint8)
        _, row = qnorm_rope_kv_insert(q, kv, weight, angle.cos(), angle.sin(), slots, store, EPS)
        assert row.dtype == torch.bfloat16
        read = cache_rows(store, slots, K, rope)
        assert torch.equal(read[1], row[1])
        assert torch.equal(read[0, :2], row[0, :2])
        exact = turned(normed(kv, weight), angle.double())
        assert (row[..., -rope:] - exact[..., -rope:]).abs().max() <= 2.0**-8 * exact.abs().max()
        assert 0.001 < (row[..., :-rope] - exact[..., :-rope]).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.op("norm_rope_insert")
class TestEntries:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_sizes(self, run: Runner, dtype: torch.dtype) -> None:
        """Rows in fp32, as the compressors give them, into a store of the model's dtype."""
        B, T, K = 2, 3, 12
        slots = torch.tensor([[4, 5, -1], [0, -1, -1]])
        angle = angles(B, T, 2).float()
        store = torch.zeros(B, 7, K, dtype=dtype)
        rest = (torch.rand(K), angle.cos(), angle.sin(), slots, store, EPS, False)
        row, after = run(torch.randn(B, T, K), *rest)
        assert row.dtype == dtype
        assert torch.equal(after[0, 4:6], row[0, :2])
        assert (after[1, 1:] == 0).all()

    @pytest.mark.parametrize("index", [False, True])
    def test_by_hand(self, index: bool) -> None:
        B, T, K, rope = 1, 2, 128, 64
        rows, weight, angle = torch.randn(B, T, K), torch.rand(K), angles(B, T, rope // 2).float()
        slots = torch.tensor([[3, 1]])
        exact = turned(normed(rows, weight), angle.double())
        given = (rows, weight, angle.cos(), angle.sin(), slots)
        plain = norm_rope_insert(*given, torch.zeros(B, 4, K), EPS, index)
        torch.testing.assert_close(plain.double(), exact, rtol=1e-5, atol=1e-5)
        page = index_page_bytes(K, 4) if index else page_bytes(K, rope, 4)
        pages = torch.zeros(B, 1, page, dtype=torch.uint8)
        row = norm_rope_insert(*given, pages, EPS, index)
        assert torch.equal(cache_rows(pages, slots, K, None if index else rope), row)
        # Only attention's keys keep the rotated columns as they are.
        assert ((row[..., -rope:] - exact[..., -rope:]).abs().max() > 2.0**-7 * exact.abs().max()) == index


@pytest.mark.op("inverse_rope_grouped_out")
class TestOut:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [dict(B=1, T=1, H=2, K=8, G=1, R=3), dict(B=2, T=5, H=6, K=12, G=3, R=7)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, H, K, G, R = size.values()
        run.rounds_once = False
        o, angle = torch.randn(B, T, H, K).to(dtype), angles(B, T, 2).float()
        weight = torch.randn(G * R, H * K // G).to(dtype)
        assert run(o, angle.cos(), angle.sin(), weight).shape == (B, T, G * R)

    def test_by_hand(self) -> None:
        B, T, H, K, G, R = 1, 2, 4, 6, 2, 3
        o, weight = torch.randn(B, T, H, K, dtype=torch.float64), torch.randn(G * R, 12, dtype=torch.float64)
        angle = angles(B, T, 2)
        back = turned(o, -angle[:, :, None]).flatten(2)  # [B, T, H K]
        expected = torch.cat([back[..., 12 * g : 12 * g + 12] @ weight[R * g : R * g + R].T for g in range(G)], -1)
        torch.testing.assert_close(inverse_rope_grouped_out(o, angle.cos(), angle.sin(), weight), expected)

    def test_turns_back_what_was_turned(self) -> None:
        o, angle = torch.randn(2, 3, 2, 8, dtype=torch.float64), angles(2, 3, 3)
        turned_by_them = rope_tail(o, angle.cos(), angle.sin())
        y = inverse_rope_grouped_out(turned_by_them, angle.cos(), angle.sin(), torch.eye(16, dtype=torch.float64))
        torch.testing.assert_close(y, o.flatten(2))
