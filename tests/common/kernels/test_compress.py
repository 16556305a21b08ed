"""The compressors beside loops over tokens, and any cut of a sequence beside none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner
from xpu_ports.common.kernels.compress import closed_windows, compress_csa, compress_hca

OPS = {"compress_csa": compress_csa, "compress_hca": compress_hca}
each_op = pytest.mark.parametrize("name", OPS)


def halves(name: str) -> int:
    return 2 if name == "compress_csa" else 1


def entry(name: str, x: Tensor, bias: Tensor, w: int) -> Tensor:
    """Entry w of one row's tokens x [N, columns], one column at a time."""
    r, C = bias.shape[0], bias.shape[1] // halves(name)
    u, z = x.chunk(2, dim=-1)
    out = torch.zeros(C, dtype=x.dtype)
    for c in range(C):
        own = [(u[t, c - C], z[t, c - C] + bias[t % r, c - C]) for t in range(w * r, w * r + r)]
        before = (
            [(u[t, c], z[t, c] + bias[t % r, c]) for t in range(w * r - r, w * r)] if w and halves(name) == 2 else []
        )
        terms = before + own
        total = sum(score.exp() for _, score in terms)
        out[c] = sum(value * score.exp() for value, score in terms) / total
    return out


def inputs(name: str, B: int, T: int, r: int, C: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    n = halves(name)
    return torch.randn(B, T, 2 * n * C, dtype=torch.float64).to(dtype), torch.randn(r, n * C, dtype=torch.float64)


def ring(name: str, B: int, r: int, C: int, more: int = 3) -> Tensor:
    """A ring that nothing was written to: what it holds must not matter."""
    return torch.full((B, halves(name) * r + more, 2 * halves(name) * C), 7.0, dtype=torch.float64)


def feed(op: Callable, x: Tensor, bias: Tensor, state: Tensor, lengths: list[int]) -> Tensor:
    """All entries of x, given in pieces."""
    B, r = x.shape[0], bias.shape[0]
    entries, start = [], 0
    for length in lengths:
        first = torch.full((B,), start)
        pool = op(x[:, start : start + length], bias, state, first, torch.full((B,), length))
        entries.append(pool[:, : (start + length) // r - start // r])
        assert (pool[:, entries[-1].shape[1] :] == 0).all()
        start += length
    return torch.cat(entries, dim=1)


@each_op
@pytest.mark.parametrize(("T", "r"), [(9, 4), (8, 4), (3, 4), (21, 5), (7, 1)])
def test_by_hand(name: str, T: int, r: int) -> None:
    x, bias = inputs(name, 2, T, r, 3)
    got = feed(OPS[name], x, bias, ring(name, 2, r, 3), [T])
    assert got.shape == (2, T // r, 3)
    for b in range(2):
        for w in range(T // r):
            torch.testing.assert_close(got[b, w], entry(name, x[b], bias, w))


@each_op
@pytest.mark.parametrize("r", [4, 7])
def test_every_cut(name: str, r: int) -> None:
    """In two pieces at every token of three windows, and token by token: equal to the whole, bit by bit."""
    T = 4 * r + 1
    x, bias = inputs(name, 1, T, r, 2)
    whole = feed(OPS[name], x, bias, ring(name, 1, r, 2), [T])
    for cut in range(1, 3 * r + 1):
        assert torch.equal(feed(OPS[name], x, bias, ring(name, 1, r, 2), [cut, T - cut]), whole), cut
    assert torch.equal(feed(OPS[name], x, bias, ring(name, 1, r, 2, more=0), [1] * T), whole)
    assert torch.equal(feed(OPS[name], x, bias, ring(name, 1, r, 2), [3, 1, 5, 1, 1, T - 11]), whole)


@each_op
def test_rows_that_start_and_end_apart(name: str) -> None:
    """As behind padding: each row is what it would be alone."""
    r, C, op = 4, 2, OPS[name]
    x, bias = inputs(name, 3, 30, r, C)
    state = ring(name, 3, r, C)
    start, count = torch.tensor([0, 5, 11]), torch.tensor([6, 9, 0])
    for b, n in enumerate(start.tolist()):
        alone = state[b : b + 1]
        op(x[b : b + 1, :n], bias, alone, torch.zeros(1, dtype=torch.int64), torch.tensor([n]))
    piece = torch.stack([x[b, n : n + 9] for b, n in enumerate(start.tolist())])
    # What stands behind a row's own tokens is not read.
    piece[0, 6:], piece[2] = float("nan"), float("nan")
    pool = op(piece, bias, state, start, count)
    assert pool.shape[1] == closed_windows(9, r) == 3
    for b, (first, n) in enumerate(zip(start.tolist(), count.tolist(), strict=True)):
        for j in range(3):
            w = first // r + j
            expected = entry(name, x[b], bias, w) if (w + 1) * r <= first + n else torch.zeros(C, dtype=x.dtype)
            torch.testing.assert_close(pool[b, j], expected)


@each_op
def test_going_back(name: str) -> None:
    """Other tokens after a step back give what they would have given at once."""
    r, C, op = 4, 2, OPS[name]
    x, bias = inputs(name, 1, 20, r, C)
    other = torch.randn_like(x)
    for back in range(1, 4):
        state = ring(name, 1, r, C, more=3)
        feed(op, x[:, :13], bias, state, [13])
        kept = 13 - back
        mixed = torch.cat([x[:, :kept], other[:, kept:]], dim=1)
        count = torch.tensor([20 - kept])
        pool = op(mixed[:, kept:], bias, state, torch.tensor([kept]), count)
        for j in range(20 // r - kept // r):
            torch.testing.assert_close(pool[0, j], entry(name, mixed[0], bias, kept // r + j))


@each_op
def test_the_bias_belongs_to_a_place_in_the_window(name: str) -> None:
    """A bias that lets one place alone through: the entry is that token."""
    n, r, C = halves(name), 4, 2
    x, bias = inputs(name, 1, 12, r, C)
    bias = torch.full_like(bias, -1e4)
    bias[2, -C:] = 0
    got = feed(OPS[name], x, bias, ring(name, 1, r, C), [5, 7])
    torch.testing.assert_close(got[0], x[0, 2::4, (n - 1) * C : n * C])


@pytest.mark.op("compress_csa")
class TestCSA:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, T=1, r=4, C=8), dict(B=2, T=11, r=4, C=5), dict(B=2, T=0, r=4, C=8)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, r, C = size.values()
        x, bias = inputs("compress_csa", B, T, r, C, dtype)
        state = torch.randn(B, 11, 4 * C)
        start = torch.tensor([7, 3])[:B]
        pool, _ = run(x, bias.float(), state, start, torch.full((B,), T))
        assert pool.shape == (B, closed_windows(T, r), C)
        assert pool.dtype == torch.float32

    def test_the_first_window_has_none_before_it(self) -> None:
        x, bias = inputs("compress_csa", 1, 4, 4, 2)
        u, z = (t[0, :, 2:] for t in x.chunk(2, dim=-1))
        expected = ((z + bias[:, 2:]).softmax(0) * u).sum(0)
        torch.testing.assert_close(feed(compress_csa, x, bias, ring("compress_csa", 1, 4, 2), [4])[0, 0], expected)


@pytest.mark.op("compress_hca")
class TestHCA:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, T=1, r=16, C=8), dict(B=2, T=50, r=16, C=5), dict(B=2, T=0, r=4, C=8)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, r, C = size.values()
        x, bias = inputs("compress_hca", B, T, r, C, dtype)
        state = torch.randn(B, 19, 2 * C)
        pool, _ = run(x, bias.float(), state, torch.tensor([15, 3])[:B], torch.full((B,), T))
        assert pool.shape == (B, closed_windows(T, r), C)
