"""The compressors beside loops over tokens, and any cut of a sequence beside none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common.kernels import compress as module
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


class Shared:
    """What both ops do on every back end; `name` and the sizes are those of one op."""

    name: str
    r: int
    C = 8

    def inputs(self, B: int, T: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        x, bias = inputs(self.name, B, T, self.r, self.C, dtype)
        return x, bias.float()

    def ring(self, B: int, more: int) -> Tensor:
        """A ring that nothing was written to."""
        return ring(self.name, B, self.r, self.C, more).float().fill_(float("nan"))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [dict(B=1, T=1), dict(B=2, T=11), dict(B=2, T=50), dict(B=2, T=0)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        """With all the tokens that go before in the ring, which the many of T go over more than once."""
        B, T = size.values()
        x, bias = self.inputs(B, T, dtype)
        state = torch.randn_like(self.ring(B, 3))
        pool, _ = run(x, bias, state, torch.tensor([self.r - 1, 3 * self.r])[:B], torch.full((B,), T))
        assert pool.shape == (B, closed_windows(T, self.r), self.C)
        assert pool.dtype == torch.float32

    @pytest.mark.parametrize("more", [0, 9])
    def test_every_cut_on_every_back_end(self, run: Runner, more: int) -> None:
        """Bit by bit, whether reading and writing are one launch or two; what was never written does not matter."""
        T = 3 * self.r + 1
        x, bias = self.inputs(2, T)

        def feed(lengths: list[int]) -> Tensor:
            state, entries, first = self.ring(2, more), [], 0
            for length in lengths:
                start, count = torch.full((2,), first), torch.full((2,), length)
                pool, state = run(x[:, first : first + length], bias, state, start, count)
                entries.append(pool[:, : (first + length) // self.r - first // self.r])
                first += length
            return torch.cat(entries, dim=1)

        whole = feed([T])
        assert whole.isfinite().all()
        for cut in {1, self.r - 1, self.r, self.r + 1, T - 1}:
            assert torch.equal(feed([cut, T - cut]), whole), cut
        assert torch.equal(feed([T - 3, 1, 1, 1]), whole)

    def test_rows_apart(self, run: Runner) -> None:
        """Each has its own start and count; what stands behind a row's own tokens is not read."""
        x, bias = self.inputs(3, 2 * self.r + 1)
        state = torch.randn_like(self.ring(3, 9))
        start, count = torch.tensor([0, self.r + 1, 2 * self.r + 3]), torch.tensor([self.r + 2, 2 * self.r + 1, 0])
        clean, _ = run(x, bias, state, start, count)
        x[0, self.r + 2 :], x[2] = float("nan"), float("nan")
        pool, after = run(x, bias, state, start.int(), count.int())
        assert torch.equal(pool, clean)
        assert torch.equal(after[2], state[2])
        assert (pool[2] == 0).all()
        assert (pool[0, 1:] == 0).all()

    def test_positions_beyond_32_bits_of_a_ring(self, run: Runner) -> None:
        x, bias = self.inputs(1, 3)
        state = torch.randn_like(self.ring(1, 9))
        run(x, bias, state, torch.tensor([2**31 + self.r - 2]), torch.tensor([3]))

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    def test_not_a_number_shows_in_its_column(self, run: Runner) -> None:
        x, bias = self.inputs(1, 2 * self.r)
        x[0, 1, -1] = float("nan")
        pool, _ = run(x, bias, self.ring(1, 9), torch.tensor([0]), torch.tensor([2 * self.r]))
        assert pool[0].isnan().nonzero().tolist() == [[0, self.C - 1]]

    def test_large_scores(self, run: Runner) -> None:
        """No exponential overflows."""
        x, bias = self.inputs(1, 2 * self.r)
        x *= 300
        run(x, bias, self.ring(1, 9), torch.tensor([0]), torch.tensor([2 * self.r]))

    def test_strides(self, run: Runner) -> None:
        """Tokens are part of a wider projection, the ring is part of a larger one, starts are every other one."""
        columns, T = 2 * halves(self.name) * self.C, self.r + 1
        x = torch.randn(2, 2 * T, columns + 3)[:, 1 : 1 + T, 2 : 2 + columns]
        _, bias = self.inputs(1, 1)
        state = torch.randn(4, halves(self.name) * self.r + 9, columns + 5)[::2, :, :columns]
        run(x, bias, state, torch.tensor([3, 0, 9, 0])[::2], torch.tensor([T, 0, T - 1, 0])[::2])


@pytest.mark.op("compress_csa")
class TestCSA(Shared):
    name, r = "compress_csa", 4

    def test_columns_that_are_no_power_of_two(self, run: Runner) -> None:
        x, bias = inputs("compress_csa", 2, 11, 5, 5)
        state = torch.randn(2, 13, 20)
        run(x.float(), bias.float(), state, torch.tensor([7, 3]), torch.tensor([11, 9]))

    def test_the_sizes_of_models(self, run: Runner) -> None:
        x, bias = inputs("compress_csa", 1, 9, 4, 512)
        run(x.float(), bias.float(), torch.randn(1, 40, 2048), torch.tensor([7]), torch.tensor([9]))

    def test_the_first_window_has_none_before_it(self) -> None:
        x, bias = inputs("compress_csa", 1, 4, 4, 2)
        u, z = (t[0, :, 2:] for t in x.chunk(2, dim=-1))
        expected = ((z + bias[:, 2:]).softmax(0) * u).sum(0)
        torch.testing.assert_close(feed(compress_csa, x, bias, ring("compress_csa", 1, 4, 2), [4])[0, 0], expected)


@pytest.mark.op("compress_hca")
class TestHCA(Shared):
    name, r = "compress_hca", 16

    def test_the_sizes_of_models(self, run: Runner) -> None:
        x, bias = inputs("compress_hca", 1, 3, 128, 512)
        run(x.float(), bias.float(), torch.randn(1, 160, 1024), torch.tensor([254]), torch.tensor([3]))


@pytest.mark.parametrize(("name", "more", "T", "launches"), [
    ("compress_csa", 9, 10, 1), ("compress_csa", 9, 11, 2), ("compress_csa", 0, 1, 1), ("compress_csa", 0, 2, 2),
    ("compress_hca", 9, 10, 1), ("compress_hca", 9, 11, 2), ("compress_hca", 0, 1, 1), ("compress_hca", 0, 2, 2),
])  # fmt: skip
def test_launches(name: str, more: int, T: int, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One where no token that is written lies a ring behind one that may be read; a single token always."""
    x, bias = inputs(name, 1, T, 4, 2)
    kernels = Launches()
    monkeypatch.setattr(module, "_compress_kernel", kernels)
    module._compress(x, bias, ring(name, 1, 4, 2, more), torch.tensor([0]), torch.tensor([T]), halves(name))
    assert len(kernels.grids) == launches
    assert sum(grid[0] for grid in kernels.grids) == closed_windows(T, 4) + min(T, halves(name) * 4 + more)
    # As far back as a token may be read, for any start; as far on as one may be written.
    written = {t % (halves(name) * 4 + more) for t in range(100, 100 + T)}
    read = {t % (halves(name) * 4 + more) for t in range(100 - halves(name) * 4 + 1, 100)}
    assert (launches == 1) == (not written & read)


class Launches:
    """Stands in for a kernel, and notes the grids."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **constants: None


def good(name: str) -> dict[str, Tensor]:
    x, bias = inputs(name, 2, 3, 4, 8)
    state, rows = ring(name, 2, 4, 8).float(), torch.tensor([1, 2])
    return dict(x=x.float(), bias=bias.float(), state=state, start=rows, count=rows)


REFUSED = {
    "dimensions": (dict(x=torch.zeros(3, 32)), "do not go together"),
    "batch": (dict(state=torch.zeros(1, 11, 32)), "do not go together"),
    "columns": (dict(x=torch.zeros(2, 3, 31)), "columns, not 2 n, n and 2 n"),
    "state columns": (dict(state=torch.zeros(2, 11, 30)), "columns, not 2 n, n and 2 n"),
    "fp64": (dict(x=good("compress_csa")["x"].double()), "x has dtype torch.float64"),
    "fp64 state": (dict(state=good("compress_csa")["state"].double()), "state has dtype torch.float64"),
    "stride": (dict(x=torch.zeros(2, 32, 3).mT), "the last dimension of x has stride 3"),
    "long": (dict(bias=torch.zeros(129, 16), state=torch.zeros(2, 300, 32)), "258 tokens to average, not 1 to 256"),
    "ring": (dict(state=torch.zeros(2, 7, 32)), "a ring of 7 tokens does not hold 8"),
    "start": (dict(start=torch.tensor([1])), "start has shape (1,)"),
    "count": (dict(count=torch.tensor([1.0, 2.0])), "dtype torch.float32, not (2,), int32 or int64"),
    "gradient": (dict(x=good("compress_csa")["x"].requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert refusal(compress_csa, **good("compress_csa")) == refusal(compress_hca, **good("compress_hca")) == ""
    assert why in refusal(compress_csa, **good("compress_csa") | changed)


def test_columns_that_are_no_halves() -> None:
    given = dict(x=torch.zeros(2, 3, 6), bias=torch.zeros(4, 3), state=torch.zeros(2, 9, 6))
    assert "columns, not 2 n" in refusal(compress_csa, **good("compress_csa") | given)
    assert refusal(compress_hca, **good("compress_hca") | given) == ""


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    for name, op in OPS.items():
        assert "no module" in refusal(op, **good(name))
