"""mHC beside loops over streams: what goes in, what comes out, and which way the matrix points."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal
from xpu_ports.common.kernels.mhc import mhc_head, mhc_post, mhc_pre

EPS = 1e-6
SHAPES = [dict(B=1, T=1, S=4, D=8), dict(B=2, T=5, S=4, D=37), dict(B=1, T=3, S=2, D=64), dict(B=2, T=0, S=4, D=8)]
DTYPES = [torch.float32, torch.bfloat16]


def weights(S: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """fn, scale and base of a size that leaves no sigmoid at its middle."""
    rows = (2 + S) * S
    return torch.randn(rows, S * D) * (S * D) ** -0.5, torch.tensor([1.5, -0.7, 2.0]), torch.randn(rows)


def by_hand(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int) -> tuple[list, list, list]:
    """pre, post and comb of one token's streams [S, D], with Python's numbers."""
    S, flat = x.shape[0], x.flatten().tolist()
    rms = math.sqrt(sum(v * v for v in flat) / len(flat) + EPS)
    m = [sum(w * v for w, v in zip(row, flat, strict=True)) / rms for row in fn.tolist()]
    a, b = scale.tolist(), base.tolist()

    def sigmoid(v: float) -> float:
        return 1 / (1 + math.exp(-v))

    pre = [sigmoid(m[i] * a[0] + b[i]) + EPS for i in range(S)]
    post = [2 * sigmoid(m[S + i] * a[1] + b[S + i]) for i in range(S)]
    comb = []
    for i in range(S):
        row = [math.exp(m[2 * S + i * S + j] * a[2] + b[2 * S + i * S + j]) for j in range(S)]
        comb.append([v / sum(row) + EPS for v in row])
    for n in range(2 * iterations - 1):
        if n % 2 == 0:
            sums = [sum(comb[i][j] for i in range(S)) + EPS for j in range(S)]
            comb = [[comb[i][j] / sums[j] for j in range(S)] for i in range(S)]
        else:
            comb = [[v / (sum(row) + EPS) for v in row] for row in comb]
    return pre, post, comb


@pytest.mark.op("mhc_pre")
class TestPre:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, run: Runner, shape: dict, dtype: torch.dtype) -> None:
        B, T, S, D = shape.values()
        y, post, comb = run(torch.randn(B, T, S, D).to(dtype), *weights(S, D), EPS, EPS, 20)
        assert y.dtype == dtype
        assert post.dtype == comb.dtype == torch.float32
        assert (y.shape, post.shape, comb.shape) == ((B, T, D), (B, T, S), (B, T, S, S))

    @pytest.mark.parametrize("iterations", [1, 2, 20])
    def test_by_hand(self, iterations: int) -> None:
        S, D = 4, 6
        x = torch.randn(S, D, dtype=torch.float64)
        given = [t.double() for t in weights(S, D)]
        pre, post, comb = (torch.tensor(t).double() for t in by_hand(x, *given, iterations))
        got = mhc_pre(x, *given, EPS, EPS, iterations)
        for ours, expected in zip(got, (pre @ x, post, comb), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)

    def test_twenty_iterations_make_it_doubly_stochastic(self) -> None:
        x, (fn, scale, base) = torch.randn(50, 4, 16), weights(4, 16)
        _, _, comb = mhc_pre(x, fn, scale / 2, base / 2, EPS, EPS, 20)
        assert (comb.sum(-2) - 1).abs().max() < 1e-4
        assert (comb.sum(-1) - 1).abs().max() < 1e-3
        _, _, once = mhc_pre(x, fn, scale / 2, base / 2, EPS, EPS, 1)
        assert (once.sum(-1) - 1).abs().max() > 0.1

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, run: Runner, layout: str) -> None:
        x = normal(2, 3, 32, dtype=torch.bfloat16, layout=layout).unflatten(-1, (4, 8))
        run(x, *weights(4, 8), EPS, EPS, 20)

    def test_rounded_once(self) -> None:
        assert_rounded_once(mhc_pre, torch.randn(4, 64, 4, 32).bfloat16(), *weights(4, 32), EPS, EPS, 20)

    def test_the_norm_is_over_all_streams(self) -> None:
        """A factor on all of them changes nothing but the result's size; on one it changes the shares."""
        x, given = torch.randn(4, 8), weights(4, 8)
        y, post, comb = mhc_pre(x, *given, EPS, EPS, 20)
        y8, post8, comb8 = mhc_pre(8 * x, *given, EPS, EPS, 20)
        for a, b in ((8 * y, y8), (post, post8), (comb, comb8)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        x[1] *= 8
        assert (mhc_pre(x, *given, EPS, EPS, 20)[1] - post).abs().max() > 1e-2


@pytest.mark.op("mhc_post")
class TestPost:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, run: Runner, shape: dict, dtype: torch.dtype) -> None:
        B, T, S, D = shape.values()
        y, x = torch.randn(B, T, D).to(dtype), torch.randn(B, T, S, D).to(dtype)
        assert run(y, x, torch.rand(B, T, S), torch.rand(B, T, S, S)).dtype == dtype

    def test_by_hand(self) -> None:
        """The sum is over the first index: not the matrix times the streams."""
        y, x, post, comb = torch.randn(3), torch.randn(4, 3), torch.rand(4), torch.rand(4, 4)
        expected = torch.stack([post[k] * y + sum(comb[j, k] * x[j] for j in range(4)) for k in range(4)])
        torch.testing.assert_close(mhc_post(y, x, post, comb), expected)
        assert (mhc_post(y, x, post, comb.T) - expected).abs().max() > 0.1

    def test_rounded_once(self) -> None:
        y, x = torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 64, 4, 32).bfloat16()
        assert_rounded_once(mhc_post, y, x, torch.rand(4, 64, 4), torch.rand(4, 64, 4, 4))


@pytest.mark.op("mhc_head")
class TestHead:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, run: Runner, shape: dict, dtype: torch.dtype) -> None:
        B, T, S, D = shape.values()
        fn = torch.randn(S, S * D) * (S * D) ** -0.5
        y = run(torch.randn(B, T, S, D).to(dtype), fn, torch.tensor([1.3]), torch.randn(S), EPS, EPS)
        assert y.shape == (B, T, D)

    def test_is_pre_with_one_scale(self) -> None:
        x, (fn, scale, base) = torch.randn(7, 4, 8), weights(4, 8)
        y, _, _ = mhc_pre(x, fn, scale, base, EPS, EPS, 1)
        torch.testing.assert_close(mhc_head(x, fn[:4], scale[:1], base[:4], EPS, EPS), y)
