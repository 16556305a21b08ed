"""mHC beside loops over streams: what goes in, what comes out, and which way the matrix points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, Target, assert_rounded_once, normal, refusal
from xpu_ports.common import gluonlib, tritonlib
from xpu_ports.common.device import ARCHITECTURES, Architecture, use_architecture
from xpu_ports.common.dispatch import Op, use_backend
from xpu_ports.common.kernels.mhc import (
    FEW_TOKENS,
    MOST_PARTS,
    hopper,
    mhc_head,
    mhc_post,
    mhc_post_products,
    mhc_pre,
    product_columns,
)
from xpu_ports.common.kernels.mhc import triton as module

EPS = 1e-6
# A token, tokens of one block of matrix units, of one and a bit, and many. Few widths: each is a kernel of its own.
SHAPES = [
    dict(B=1, T=1, S=4, D=72),
    dict(B=2, T=5, S=4, D=72),
    dict(B=1, T=65, S=4, D=72),
    dict(B=1, T=17, S=3, D=150),
    dict(B=2, T=0, S=4, D=72),
]
DTYPES = [torch.float32, torch.bfloat16]
FLOATS = pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])


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
    @FLOATS
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

    @pytest.mark.parametrize("layout", ["slice", "transposed"])
    def test_layouts(self, run: Runner, layout: str) -> None:
        x = normal(2, 3, 288, dtype=torch.bfloat16, layout=layout).unflatten(-1, (4, 72))
        run(x, *weights(4, 72), EPS, EPS, 20)

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

    @pytest.mark.parametrize("T", [1, 17])
    @pytest.mark.parametrize("parts", [1, 3])
    def test_any_split_is_right(self, run: Runner, parts: int, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Programs with several blocks of columns, with unequal numbers of them, and with none."""
        if run.target.backend == "reference":
            pytest.skip("the reference has no parts")
        monkeypatch.setattr(module, "parts_of", lambda *args: parts)
        run(torch.randn(1, T, 4, 600).bfloat16(), *weights(4, 600), EPS, EPS, 20)
        run(torch.randn(1, T, 4, 72).bfloat16(), *weights(4, 72), EPS, EPS, 20)

    @pytest.mark.parametrize("T", [1, 17])
    def test_streams_apart(self, run: Runner, T: int) -> None:
        """Streams in front of the tokens, or one row for all of them; fn as rows of a wider matrix."""
        fn, scale, base = weights(4, 72)
        wide = torch.full((24, 300), float("nan"))
        wide[:, :288] = fn
        x = torch.randn(4, 1, T, 72).bfloat16()
        run(x.permute(1, 2, 0, 3), wide[:, :288], scale, base, EPS, EPS, 20)
        run(x[0][:, :, None].expand(-1, -1, 4, -1), fn, scale, base, EPS, EPS, 20)

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    @pytest.mark.parametrize("odd", [float("nan"), float("inf")])
    @pytest.mark.parametrize("T", [2, 17])
    def test_not_a_number_stays_in_its_token(self, run: Runner, T: int, odd: float) -> None:
        x = torch.randn(1, T, 4, 72).bfloat16()
        x[0, T - 1, 2, 5] = odd
        y, post, comb = run(x, *weights(4, 72), EPS, EPS, 20)
        for t in (y, post, comb):
            assert t[0, T - 1].isnan().all()
            assert t[0, : T - 1].isfinite().all()

    @pytest.mark.parametrize("T", [1, 3])
    def test_where_eps_goes(self, run: Runner, T: int) -> None:
        """Both so large that each place shows."""
        run(torch.randn(1, T, 4, 72), *weights(4, 72), 0.5, 0.1, 3)

    def test_large_and_small_streams(self, run: Runner) -> None:
        """Their size is not the result's: no square overflows, and all of fn's bits count."""
        x, (fn, scale, base) = torch.randn(1, 5, 4, 72), weights(4, 72)
        x *= 10.0 ** torch.arange(-4, 6, 2)[:, None, None]
        run(x.bfloat16(), fn, scale, base, EPS, EPS, 20)
        run(x, fn, scale, base, EPS, EPS, 20)

    @pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
    @pytest.mark.parametrize("programs", [1, 3, 64])
    @pytest.mark.parametrize("D", [1, 64, 4096, 7168])
    def test_parts(self, arch: Architecture, programs: int, D: int) -> None:
        """Every part has a block, none has two more than another, and there are no more than fill the device."""
        blocks = -(-D // 64)
        parts = module.parts_of(arch, programs, 4, D, 64)
        assert 1 <= parts <= min(blocks, module.MOST_SPLITS // 4)
        assert -(-blocks // parts) - blocks // parts <= 1
        assert parts == 1 or programs * parts <= arch.units


@pytest.mark.op("mhc_post")
class TestPost:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes(self, run: Runner, shape: dict, dtype: torch.dtype) -> None:
        B, T, S, D = shape.values()
        y, x = torch.randn(B, T, D).to(dtype), torch.randn(B, T, S, D).to(dtype)
        assert run(y, x, torch.rand(B, T, S), torch.rand(B, T, S, S)).dtype == dtype

    @pytest.mark.parametrize("layout", ["slice", "transposed"])
    def test_layouts(self, run: Runner, layout: str) -> None:
        y = normal(2, 3, 72, dtype=torch.bfloat16, layout=layout)
        x = normal(2, 3, 288, dtype=torch.bfloat16, layout=layout).unflatten(-1, (4, 72))
        run(y, x, torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4))
        run(y, torch.randn(4, 2, 3, 72).bfloat16().permute(1, 2, 0, 3), torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4))

    def test_not_a_number_stays_in_its_columns(self, run: Runner) -> None:
        y, x = torch.randn(1, 3, 72), torch.randn(1, 3, 4, 72)
        y[0, 1, 5] = float("nan")
        x[0, 2, 3, 6] = float("inf")
        z = run(y, x, torch.rand(1, 3, 4), torch.rand(1, 3, 4, 4))
        assert z[0, 1, :, 5].isnan().all()
        assert z[0, 2, :, 6].isinf().all()
        assert int(z.isfinite().sum()) == z.numel() - 8

    def test_by_hand(self) -> None:
        """The sum is over the first index: not the matrix times the streams."""
        y, x, post, comb = torch.randn(3), torch.randn(4, 3), torch.rand(4), torch.rand(4, 4)
        expected = torch.stack([post[k] * y + sum(comb[j, k] * x[j] for j in range(4)) for k in range(4)])
        torch.testing.assert_close(mhc_post(y, x, post, comb), expected)
        assert (mhc_post(y, x, post, comb.T) - expected).abs().max() > 0.1

    def test_rounded_once(self) -> None:
        y, x = torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 64, 4, 32).bfloat16()
        assert_rounded_once(mhc_post, y, x, torch.rand(4, 64, 4), torch.rand(4, 64, 4, 4))


def back(B: int, T: int, S: int, D: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What `mhc_post_products` takes, fn with some rows."""
    y, x = torch.randn(B, T, D).to(dtype), torch.randn(B, T, S, D).to(dtype)
    return y, x, torch.rand(B, T, S), torch.rand(B, T, S, S), torch.randn(rows, S * D) * (S * D) ** -0.5


def exact(streams: Tensor, fn: Tensor) -> Tensor:
    """fn x and |x|^2 in fp64, [..., R + 1]."""
    flat = streams.flatten(-2).double()
    return torch.cat([flat @ fn.double().T, flat.square().sum(-1, keepdim=True)], -1)


@pytest.mark.op("mhc_post_products")
class TestPostProducts:
    @pytest.fixture(autouse=True)
    def streams_are_rounded(self, run: Runner) -> None:
        """Products are of the streams in their dtype."""
        run.rounds_once = False

    @FLOATS
    @pytest.mark.parametrize("shape", [*SHAPES, dict(B=1, T=13, S=2, D=64), dict(B=1, T=3, S=1, D=40)])
    def test_shapes(self, run: Runner, shape: dict, dtype: torch.dtype) -> None:
        B, T, S, D = shape.values()
        streams, products = run(*back(B, T, S, D, (2 + S) * S, dtype))
        assert (streams.dtype, streams.shape) == (dtype, (B, T, S, D))
        assert products.dtype == torch.float32
        assert products.shape == (B, T, -(-D // product_columns(B * T, D)), (2 + S) * S + 1)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("T", "S", "D", "rows"),
        [
            *((1, 4, 200, 24), (2, 4, 130, 4), (3, 4, 200, 24), (17, 3, 70, 15)),
            *((64, 4, 72, 4), (67, 4, 1100, 24), (127, 1, 80, 3)),
        ],
    )  # fmt: skip
    def test_what_others_make_of_them(self, run: Runner, T: int, S: int, D: int, rows: int, dtype: torch.dtype) -> None:
        """Streams are `mhc_post`'s, and products are of them as they are, not of what was rounded."""
        given = back(1, T, S, D, rows, dtype)
        streams, products = run(*given)
        with use_backend(run.target.backend):
            plain = mhc_post(*(t.to(run.target.device) for t in given[:4]))
        # A compiler is free to fuse a multiplication with an addition in one kernel and not in the other.
        unit = 0.0 if run.target.device == "cpu" else torch.finfo(dtype).eps
        torch.testing.assert_close(streams, plain.cpu(), rtol=unit, atol=4 * unit)
        fn = given[4].to(streams.device)
        off = (products.double().sum(-2) - exact(streams, fn)).abs()
        size = streams.flatten(-2).double().norm(dim=-1, keepdim=True)
        assert (off[..., :-1] <= 1e-6 * size * fn.double().norm(dim=-1)).all()
        assert (off[..., -1:] <= 1e-6 * size.square()).all()
        # A part is of its own columns.
        columns = product_columns(T, D)
        last = torch.zeros_like(streams)
        last[..., D // columns * columns - (columns if D % columns == 0 else 0) :] = 1
        expected = exact(streams * last, fn)
        torch.testing.assert_close(products[..., -1, :].double(), expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("T", [2, 17, 66])
    @pytest.mark.parametrize("arch", ["nvidia", "max", "arc-a"])
    def test_other_devices_tiles(self, run: Runner, arch: str, T: int, dtype: torch.dtype) -> None:
        if run.target.backend == "reference" or not tritonlib.INTERPRETED:
            pytest.skip("only Triton's interpreter runs every architecture's tiles")
        with use_architecture(arch):
            run(*back(1, T, 4, 72, 24, dtype))

    @pytest.mark.parametrize("T", [3, 70])
    @pytest.mark.parametrize("layout", ["slice", "transposed"])
    def test_layouts(self, run: Runner, layout: str, T: int) -> None:
        y = normal(2, T, 72, dtype=torch.bfloat16, layout=layout)
        x = normal(2, T, 288, dtype=torch.bfloat16, layout=layout).unflatten(-1, (4, 72))
        wide = torch.full((24, 300), float("nan"))
        wide[:, :288] = weights(4, 72)[0]
        run(y, x, torch.rand(2, T, 4), torch.rand(2, T, 4, 4), wide[:, :288])
        streams = torch.randn(4, 2, T, 72).bfloat16().permute(1, 2, 0, 3)
        run(y, streams, torch.rand(2, T, 4), torch.rand(2, T, 4, 4), wide[:, :288])
        run(y, x[:, :, :1].expand(-1, -1, 4, -1), torch.rand(2, T, 4), torch.rand(2, T, 4, 4), wide[:, :288])

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    @pytest.mark.parametrize("T", [2, 17, 66])
    def test_not_a_number_stays_in_its_token(self, run: Runner, T: int) -> None:
        y, x, post, comb, fn = back(1, T, 4, 72, 24, torch.bfloat16)
        x[0, T - 1, 2, 5] = float("nan")
        streams, products = run(y, x, post, comb, fn)
        assert streams[0, T - 1, :, 5].isnan().all()
        assert products[0, T - 1, 0].isnan().all()
        assert products[0, : T - 1].isfinite().all()
        assert int(streams.isfinite().sum()) == streams.numel() - 4

    @pytest.mark.parametrize("T", [2, 17, 66])
    def test_large_and_small_streams(self, run: Runner, T: int) -> None:
        for dtype in DTYPES:
            y, x, post, comb, fn = back(1, T, 4, 72, 24, dtype)
            factors = 10.0 ** (torch.arange(T) % 5 * 2 - 4)
            run((y * factors[:, None]).to(dtype), (x * factors[:, None, None]).to(dtype), post, comb, fn)


@pytest.mark.op("mhc_post_products")
class TestPostProductsOnHopper:
    """Many tokens: whole tiles of 64 and others, one and two tiles at a time, one part and several."""

    @pytest.fixture(autouse=True)
    def launches(self, run: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
        """What the kernel was launched on, which has to be something."""
        if run.target != Target("triton", "cuda"):
            pytest.skip("a kernel for NVIDIA's Hopper")
        reason = gluonlib.refuses(torch.device("cuda", torch.cuda.current_device()))
        if reason is not None:
            pytest.skip(reason)
        run.rounds_once = False
        launch, seen = hopper.launch, []

        def counted(y: Tensor, *rest: Tensor) -> None:
            seen.append(y)
            launch(y, *rest)

        monkeypatch.setattr(hopper, "launch", counted)
        yield seen
        assert seen

    @pytest.mark.parametrize(("T", "D", "rows"), [(1024, 512, 24), (1025, 512, 24), (1025, 1024, 4), (1500, 4096, 24)])
    def test_tokens(self, run: Runner, T: int, D: int, rows: int) -> None:
        given = back(1, T, 4, D, rows, torch.bfloat16)
        streams, products = run(*given)
        with use_backend("triton"):
            plain = mhc_post(*(t.to("cuda") for t in given[:4])).cpu()
        # A unit of bf16, where multiplications are fused with other additions, and of fp32 where terms cancel.
        torch.testing.assert_close(streams, plain, rtol=2**-7, atol=2**-20)
        assert (streams != plain).sum() <= plain.numel() // 10000
        fn = given[4]
        off = (products.double().sum(-2) - exact(streams, fn)).abs()
        size = streams.flatten(-2).double().norm(dim=-1, keepdim=True)
        assert (off[..., :-1] <= 5e-7 * size * fn.double().norm(dim=-1)).all()
        assert (off[..., -1:] <= 5e-7 * size.square()).all()
        # A part is of its own columns.
        for part in range(D // 512):
            columns = slice(512 * part, 512 * part + 512)
            own = fn.unflatten(-1, (4, D))[..., columns].flatten(-2)
            off = (products[..., part, :].double() - exact(streams[..., columns], own)).abs()
            size = streams[..., columns].flatten(-2).double().norm(dim=-1, keepdim=True)
            assert (off[..., :-1] <= 5e-7 * size * own.double().norm(dim=-1)).all()
            assert (off[..., -1:] <= 5e-7 * size.square()).all()

    def test_layouts(self, run: Runner) -> None:
        """Batches in tensors that are wider, and a weight beside what is no number."""
        y = torch.randn(2, 520, 1024).bfloat16()[..., 256:768]
        x = torch.randn(2, 520, 2560).bfloat16()[..., 256:2304].unflatten(-1, (4, 512))
        wide = torch.full((24, 2100), float("nan"))
        wide[:, :2048] = weights(4, 512)[0]
        run(y, x, torch.rand(2, 520, 4), torch.rand(2, 520, 4, 4), wide[:, :2048])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_shares_of_other_dtypes(self, run: Runner, dtype: torch.dtype) -> None:
        y, x, post, comb, fn = back(1, 1024, 4, 512, 24, torch.bfloat16)
        run(y, x, post.to(dtype), comb.to(dtype), fn)

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    def test_not_a_number_stays_in_its_token(self, run: Runner) -> None:
        y, x, post, comb, fn = back(1, 1025, 4, 1024, 24, torch.bfloat16)
        x[0, 1024, 2, 5] = x[0, 7, 0, 1000] = float("nan")
        streams, products = run(y, x, post, comb, fn)
        assert streams[0, 1024, :, 5].isnan().all()
        assert products[0, 1024, 0].isnan().all()
        assert products[0, 7, 1].isnan().all()
        assert int(products.isfinite().all(-1).sum()) == 2 * 1025 - 2
        assert int(streams.isfinite().sum()) == streams.numel() - 8

    def test_calls_made_again(self, launches: list[Tensor]) -> None:
        """Launches that are kept, with other tensors, and in a graph."""
        first, second = ([t.to("cuda") for t in back(1, 1100, 4, 512, 24, torch.bfloat16)] for _ in range(2))
        expected = mhc_post_products(*first), mhc_post_products(*second)
        for i in range(24):
            for ours, theirs in zip(mhc_post_products(*(first, second)[i % 2]), expected[i % 2], strict=True):
                assert torch.equal(ours, theirs)
        assert len(launches) < 24
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mhc_post_products(*first)
        for t, other in zip(first, second, strict=True):
            t.copy_(other)
        graph.replay()
        for ours, theirs in zip(captured, expected[1], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("dtype", DTYPES)
class TestGivenProducts:
    """As of streams that are read for them."""

    @pytest.mark.op("mhc_pre")
    def test_pre(self, run: Runner, T: int, dtype: torch.dtype) -> None:
        _, scale, base = weights(4, 600)
        *given, fn = back(1, T, 4, 600, 24, dtype)
        streams, products = mhc_post_products(*given, fn)
        got = run(streams, fn, scale, base, EPS, EPS, 20, products)
        for ours, expected in zip(got, mhc_pre(streams, fn, scale, base, EPS, EPS, 20), strict=True):
            rtol = 1e-5 if ours.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=rtol)
        # They are what counts, not fn.
        got = run(streams, torch.full_like(fn, float("nan")), scale, base, EPS, EPS, 20, products)
        assert all(t.isfinite().all() for t in got)

    @pytest.mark.op("mhc_head")
    def test_head(self, run: Runner, T: int, dtype: torch.dtype) -> None:
        scale, base = torch.tensor([1.3]), torch.randn(4)
        *given, fn = back(1, T, 4, 600, 4, dtype)
        streams, products = mhc_post_products(*given, fn)
        y = run(streams, torch.full_like(fn, float("nan")), scale, base, EPS, EPS, products)
        rtol = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(y.cpu(), mhc_head(streams, fn, scale, base, EPS, EPS), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("tokens", [1, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("D", [1, 64, 100, 4096, 7168, 50000])
def test_parts_of_products(tokens: int, D: int) -> None:
    columns = product_columns(tokens, D)
    assert columns & (columns - 1) == 0
    assert -(-D // columns) <= MOST_PARTS
    assert columns <= product_columns(FEW_TOKENS + 1, D)


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

    def test_layout(self, run: Runner) -> None:
        x = torch.randn(4, 2, 3, 80).bfloat16()[..., :72].permute(1, 2, 0, 3)
        run(x, torch.randn(4, 4 * 72) * 0.1, torch.tensor([0.3]), torch.randn(4), EPS, EPS)


# ----------------------------------------------------------------------------------------------------------- refusals

X = torch.zeros(2, 3, 4, 8)
PRE = dict(x=X, fn=torch.zeros(24, 32), scale=torch.zeros(3), base=torch.zeros(24))
PRE |= dict(norm_eps=EPS, eps=EPS, iterations=20)
HEAD = dict(x=X, fn=torch.zeros(4, 32), scale=torch.zeros(1), base=torch.zeros(4), norm_eps=EPS, eps=EPS)
POST = dict(y=torch.zeros(2, 3, 8), x=X, post=torch.zeros(2, 3, 4), comb=torch.zeros(2, 3, 4, 4))
PRODUCTS = POST | dict(fn=torch.zeros(24, 32))
STREAMS = {
    "fp64": (dict(x=X.double()), "dtype torch.float64 is not one of"),
    "streams": (dict(x=torch.zeros(2, 3, 5, 8)), "5 streams, not 1 to 4"),
    "columns": (dict(x=torch.zeros(2, 3, 4, 0)), "there are no columns"),
    "stride": (dict(x=torch.zeros(2, 3, 8, 4).mT), "the last dimension has stride 4"),
    "tokens": (dict(x=torch.zeros(5, 3, 5, 3, 5, 3, 5, 4, 8)[::2, :, ::2, :, ::2, :, ::2]), "more than three strides"),
}
PRODUCT = {
    "fn shape": (dict(fn=torch.zeros(23, 32)), "fn has shape (23, 32)"),
    "fn dtype": (dict(fn=torch.zeros(24, 32).bfloat16()), "torch.bfloat16, not float32"),
    "fn stride": (dict(fn=torch.zeros(32, 24).T), "the last dimension of fn has stride 24"),
    "scale": (dict(scale=torch.zeros(2)), "scale has shape (2,)"),
    "base": (dict(base=torch.zeros(48)[::2]), "the last dimension of base has stride 2"),
    "gradient": (dict(fn=torch.zeros(24, 32, requires_grad=True)), "no backward"),
}
BACK = {
    "y shape": (dict(y=torch.zeros(2, 3, 9)), "y has shape (2, 3, 9), expected (2, 3, 8)"),
    "y dtype": (dict(y=torch.zeros(2, 3, 8).double()), "y has dtype torch.float64"),
    "y stride": (dict(y=torch.zeros(2, 8, 3).mT), "the last dimension of y has stride 3"),
    "post shape": (dict(post=torch.zeros(2, 3, 1)), "post has shape (2, 3, 1)"),
    "post stride": (dict(post=torch.zeros(2, 4, 3).mT), "post is not contiguous"),
    "comb shape": (dict(comb=torch.zeros(2, 3, 16)), "comb has shape (2, 3, 16)"),
    "comb stride": (dict(comb=torch.zeros(2, 3, 4, 4).mT), "comb is not contiguous"),
    "gradient": (dict(y=torch.zeros(2, 3, 8, requires_grad=True)), "no backward"),
}
GIVEN = {
    "products shape": (dict(products=torch.zeros(2, 3, 2, 24)), "products has shape (2, 3, 2, 24)"),
    "products dtype": (dict(products=torch.zeros(2, 3, 2, 25).half()), "products has dtype torch.float16"),
    "products parts": (dict(products=torch.zeros(2, 3, 65, 25)), "expected 1 to 64 parts"),
    "no parts": (dict(products=torch.zeros(2, 3, 0, 25)), "expected 1 to 64 parts"),
    "products dimensions": (dict(products=torch.zeros(25)), "expected 1 to 64 parts"),
    "products stride": (dict(products=torch.zeros(2, 3, 4, 25)[:, :, ::2]), "products is not contiguous"),
}  # fmt: skip
REFUSED = [
    *(pytest.param(mhc_pre, PRE, *case, id=f"pre {name}") for name, case in (STREAMS | PRODUCT).items()),
    *(pytest.param(mhc_post, POST, *case, id=f"post {name}") for name, case in (STREAMS | BACK).items()),
    *(pytest.param(mhc_head, HEAD, *case, id=f"head {name}") for name, case in STREAMS.items()),
    *(pytest.param(mhc_pre, PRE, *case, id=f"pre {name}") for name, case in GIVEN.items()),
    *(pytest.param(mhc_post_products, PRODUCTS, *case, id=f"post {name}") for name, case in (STREAMS | BACK).items()),
    pytest.param(mhc_post_products, PRODUCTS, dict(fn=torch.zeros(24, 31)), "fn has shape (24, 31)", id="products fn"),
    pytest.param(mhc_post_products, PRODUCTS, dict(fn=torch.zeros(32)), "fn has 1 dimensions", id="products fn row"),
    pytest.param(mhc_post_products, PRODUCTS, dict(fn=PRE["fn"].half()), "float16, not float32", id="products dtype"),
    pytest.param(mhc_head, HEAD, dict(products=torch.zeros(2, 3, 2, 25)), "expected (2, 3, 2, 5)", id="head products"),
    pytest.param(mhc_head, HEAD, dict(fn=PRE["fn"]), "fn has shape (24, 32), expected (4, 32)", id="head fn"),
    pytest.param(mhc_head, HEAD, dict(scale=PRE["scale"]), "scale has shape (3,), expected (1,)", id="head scale"),
]


@pytest.mark.parametrize(("op", "good", "changed", "why"), REFUSED)
def test_refusals(op: Op, good: dict[str, Any], changed: dict[str, Any], why: str) -> None:
    assert refusal(op, **good) == ""
    assert why in refusal(op, **good | changed)


@pytest.mark.parametrize(
    ("op", "good"),
    [(mhc_pre, PRE), (mhc_post, POST), (mhc_post_products, PRODUCTS), (mhc_head, HEAD)],
    ids=lambda v: "",
)
def test_refusal_without_triton(op: Op, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(op, **good)
