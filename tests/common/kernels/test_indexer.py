"""The indexer's scores beside a loop, and the choice among them: ties, what is not seen, what is not a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.device import ARCHITECTURES, Architecture
from xpu_ports.common.kernels.fp8_pages import cache_rows, index_page_bytes, write_pages
from xpu_ports.common.kernels.indexer import indexer_scores, stable_topk
from xpu_ports.common.kernels.indexer import scores as scores_module
from xpu_ports.common.kernels.indexer import topk as topk_module

INF = float("inf")


def arguments(B: int, T: int, H: int, C: int, S: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The op's arguments by name: rows whose last token sees no more than S entries of 4 tokens, some of them less."""
    q, weights, keys = torch.randn(B, T, H, C), torch.randn(B, T, H), torch.randn(B, S, C)
    start = torch.tensor([4 * S - T, 4 * S // 3])[:B].clamp(min=0)
    return dict(
        q=q.to(dtype), weights=weights.to(dtype), keys=keys.to(dtype), entries=S, start=start, ratio=4
    )  # fmt: skip


def paged(keys: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Pages of keys [B, S, C], and what is read of them."""
    B, S, C = keys.shape
    here = torch.arange(S).expand(B, S)
    pages = torch.zeros(B, -(-S // tokens), index_page_bytes(C, tokens), dtype=torch.uint8)
    write_pages(keys, here, pages, None)
    return pages, cache_rows.reference(pages, here, C, None)


@pytest.mark.op("indexer_scores")
class TestScores:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "size",
        [
            dict(B=1, T=1, H=1, C=4, S=1),
            dict(B=2, T=7, H=5, C=33, S=67),
            dict(B=2, T=35, H=16, C=32, S=150),
            dict(B=2, T=1, H=16, C=32, S=150),
        ],
    )
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        scores = run(**arguments(**size, dtype=dtype))
        assert scores.dtype == torch.float32
        assert scores.shape == (size["B"], size["T"], size["S"])

    def test_by_hand(self) -> None:
        """Negative products count nothing, whatever the sign of their weight; weights may be negative."""
        B, T, H, C, S = 2, 5, 3, 4, 6
        q, w, k = (torch.randn(s, dtype=torch.float64) for s in ((B, T, H, C), (B, T, H), (B, S, C)))
        start = torch.tensor([4, 9])
        scores = indexer_scores(q, w, k, S, start, 3)
        for b in range(B):
            for t in range(T):
                for j in range(S):
                    terms = [w[b, t, h] * max(q[b, t, h] @ k[b, j], torch.tensor(0.0)) for h in range(H)]
                    expected = sum(terms) if 3 * j + 2 <= start[b] + t else torch.tensor(-INF).double()
                    torch.testing.assert_close(scores[b, t, j], expected)

    def test_a_single_token_does_not_see_what_is_not_closed(self, run: Runner) -> None:
        q, w, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1), torch.ones(1, 3, 4)
        for position, seen in ((2, 0), (3, 1), (6, 1), (7, 2), (11, 3)):
            scores = run(q.bfloat16(), w.bfloat16(), k.bfloat16(), 3, torch.tensor([position]), 4)
            assert scores.flatten().tolist() == [4.0] * seen + [-INF] * (3 - seen)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("T", [1, 35])
    def test_pages(self, run: Runner, T: int, dtype: torch.dtype) -> None:
        given = arguments(2, T, 16, 32, 150, dtype)
        # Scales of several sizes.
        pages, keys = paged(given["keys"].float() * torch.exp2(torch.randint(-9, 4, (2, 150, 1)).float()), 64)
        scores = run(**given | dict(keys=pages))
        decoded = given | dict(q=given["q"].float(), keys=keys.float())
        expected, exact = indexer_scores.reference(**decoded), accuracy.oracle(indexer_scores.reference, **decoded)
        accuracy.assert_close(scores, expected, exact)
        run(**given | dict(keys=pages, entries=131))

    def test_keys_that_are_not_seen_may_hold_anything(self, run: Runner) -> None:
        """They are not even read where no token of a tile sees them."""
        given = arguments(2, 35, 16, 32, 150)
        given |= dict(start=torch.tensor([100, 7], dtype=torch.int32))
        clean = run(**given)
        for b, last in enumerate((100 + 35, 7 + 35)):
            given["keys"][b, last // 4 :] = float("nan")
        assert torch.equal(run(**given), clean)

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    def test_not_a_number_shows_where_it_is(self, run: Runner) -> None:
        given = arguments(2, 7, 5, 33, 67)
        given["keys"][0, 3, 2] = float("nan")
        given["q"][1, 2, 4, 32] = float("nan")
        scores = run(**given)
        assert scores[0, 6].isnan().nonzero().flatten().tolist() == [3]
        assert (scores[1].isnan().any(-1) == (torch.arange(7) == 2)).all()

    def test_strides(self, run: Runner) -> None:
        """Queries are part of a wider projection, keys the filled part of a store, weights a slice."""
        given = arguments(2, 35, 16, 32, 150)
        q = torch.randn(2, 40, 16, 48).bfloat16()[:, 2:37, :, 16:]
        keys = torch.full((3, 200, 64), float("nan")).bfloat16()[1:, :150, :32]
        weights = torch.randn(16, 2, 35).permute(1, 2, 0)
        start = torch.tensor([565, 0, 200, 0])[::2]
        run(**given | dict(q=q.copy_(given["q"]), keys=keys.copy_(given["keys"]), weights=weights, start=start))

    @pytest.mark.parametrize(("heads", "chunk"), [(16, 32), (32, 16), (16, 16)])
    def test_products_in_pieces(self, run: Runner, heads: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Any part of the heads and of the columns at a time."""
        monkeypatch.setattr(scores_module, "tile", lambda *args: scores_module.ScoresTile(16, 32, heads, chunk, 4, 1))
        given = arguments(2, 35, 23, 30, 67)
        run(**given)
        run(**given | dict(keys=paged(given["keys"], 8)[0]))

    def test_nothing(self, run: Runner) -> None:
        assert run(**arguments(2, 7, 5, 33, 67) | dict(entries=0)).shape == (2, 7, 0)
        assert run(**arguments(2, 0, 5, 33, 67)).shape == (2, 0, 67)


@pytest.mark.op("stable_topk")
class TestTopK:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("S", "k"), [(1, 1), (37, 5), (300, 300), (4, 9), (0, 3)])
    def test_sizes(self, run: Runner, S: int, k: int, dtype: torch.dtype) -> None:
        indices = run(torch.randn(2, 3, S).to(dtype), k)
        assert indices.dtype == torch.int32
        assert indices.shape == (2, 3, min(k, S))
        assert all(row == sorted(set(row)) for row in indices.flatten(0, 1).tolist())

    def test_the_largest(self) -> None:
        scores = torch.randn(20, 50)
        expected = scores.topk(7).indices.sort().values
        assert torch.equal(stable_topk(scores, 7).long(), expected)

    def test_of_equal_scores_the_lower_place(self, run: Runner) -> None:
        assert run(torch.zeros(2, 3000), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
        assert run(torch.tensor([[0.0, 1.0] * 50]), 60).tolist() == [sorted([*range(1, 100, 2), *range(0, 20, 2)])]
        # The sign of zero is no difference.
        assert run(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 2).tolist() == [[0, 1]]

    @pytest.mark.parametrize("k", [1, 5, 36, 37])
    def test_scores_of_few_values(self, run: Runner, k: int) -> None:
        """Of either sign, with ties at the threshold in most rows, and minus infinity among them."""
        values = torch.tensor([-INF, -2.5, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0000001, 3e38, INF])
        run(values[torch.randint(len(values), (16, 37))], k)

    def test_numbers_of_every_size(self, run: Runner) -> None:
        bits = torch.randint(-(2**31), 2**31 - 1, (16, 37), dtype=torch.int64).to(torch.int32)
        run(bits.view(torch.float32), 5)

    def test_the_length_behind_does_not_matter(self, run: Runner) -> None:
        """A token's choice in a longer row, whose end it does not see, is that in a shorter one."""
        scores = torch.randn(16, 37).relu() * (torch.rand(16, 37) < 0.3)
        chosen = run(scores, 5)
        for more in (1, 16, 1000):
            longer = torch.cat([scores, torch.full((16, more), -INF)], dim=1)
            assert torch.equal(run(longer, 5), chosen)

    def test_fewer_than_k(self, run: Runner) -> None:
        scores = torch.tensor([[1.0, -INF, 3.0, -INF], [-INF, -INF, -INF, -INF], [-1.0, -2.0, -3.0, -INF]])
        assert run(scores, 3).tolist() == [[0, 2, -1], [-1, -1, -1], [0, 1, 2]]

    def test_not_a_number(self, run: Runner) -> None:
        """Taken last, and never at a place that is not there."""
        nan = float("nan")
        assert run(torch.tensor([[nan, 1.0, -INF, -5.0, nan]]), 3).tolist() == [[0, 1, 3]]
        assert run(torch.tensor([[nan, 1.0, -INF, -5.0, -nan]]), 4).tolist() == [[0, 1, 3, 4]]
        assert run(torch.full((1, 4), nan), 2).tolist() == [[0, 1]]

    @pytest.mark.parametrize("S", [64, 65, 150, 3000])
    def test_rows_longer_than_a_program_holds(self, run: Runner, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of parts, ties across them, and parts that nothing is chosen from."""
        monkeypatch.setattr(topk_module, "SEGMENT", 64)
        scores = torch.randn(5, S)
        scores[1] = scores[1].round()
        scores[2] = 1.0
        scores[3, 5:] = -INF
        scores[4, : S - 3] = -INF
        run(scores, 16)

    def test_the_sizes_of_models(self, run: Runner) -> None:
        """512 of a row of its own length, in which a decimal place decides; more than a program holds."""
        run((1000 * torch.randn(1, 1, topk_module.SEGMENT + 5)).round() / 1000, 512)

    def test_strides(self, run: Runner) -> None:
        scores = torch.randn(37, 4, 9)
        run(scores.permute(1, 2, 0), 5)
        run(scores.permute(1, 2, 0)[::2, 1::3, ::2], 5)
        assert run(scores[:, 0, 0], 5).shape == (5,)


SCORES = arguments(2, 3, 4, 8, 9)
PAGES = torch.zeros(2, 3, index_page_bytes(8, 4), dtype=torch.uint8)
REFUSED_SCORES = {
    "fp32": (dict(q=SCORES["q"].float()), "q has dtype torch.float32"),
    "dimensions": (dict(q=SCORES["q"][0]), "not (B, T, H, C) and (B, T, H)"),
    "weights": (dict(weights=SCORES["weights"][..., 1:]), "not (B, T, H, C) and (B, T, H)"),
    "weights fp64": (dict(weights=SCORES["weights"].double()), "weights have dtype torch.float64"),
    "heads": (arguments(2, 3, 129, 8, 9), "129 heads of 8 columns, not 1 to 128"),
    "columns": (arguments(2, 3, 4, 257, 9), "4 heads of 257 columns, not 1 to 128 of 1 to 256"),
    "q stride": (dict(q=torch.zeros(2, 3, 8, 4).bfloat16().mT), "the last dimension of q has stride 4"),
    "start": (dict(start=SCORES["start"][:1]), "start has shape (1,)"),
    "start dtype": (dict(start=SCORES["start"].short()), "dtype torch.int16, not (2,), int32 or int64"),
    "batch": (dict(keys=SCORES["keys"][:1]), "keys have shape (1, 9, 8), not (2, ...)"),
    "keys": (dict(keys=SCORES["keys"][..., 1:]), "not 8 columns in torch.bfloat16"),
    "dtypes": (dict(keys=SCORES["keys"].half()), "not 8 columns in torch.bfloat16"),
    "keys stride": (dict(keys=torch.zeros(2, 8, 9).bfloat16().mT), "the last dimension of keys has stride 9"),
    "page stride": (dict(keys=PAGES.mT.contiguous().mT), "the last dimension of pages has stride 3"),
    "room": (dict(entries=10), "10 entries, and there is room for 9"),
    "room in pages": (dict(keys=PAGES, entries=13), "13 entries, and there is room for 12"),
    "gradient": (dict(q=SCORES["q"].clone().requires_grad_()), "no backward"),
}
REFUSED_TOPK = {
    "fp64": (torch.zeros(2, 9).double(), 3, "scores have dtype torch.float64"),
    "dimensions": (torch.zeros(2, 1, 1, 9), 3, "scores have 4 dimensions, not 1 to 3"),
    "none": (torch.zeros(2, 9), 0, "0 to choose, not 1 to 4096"),
    "many": (torch.zeros(2, 9), 4097, "4097 to choose, not 1 to 4096"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED_SCORES.values(), ids=REFUSED_SCORES)
def test_refusals(changed: dict, why: str) -> None:
    assert refusal(indexer_scores, **SCORES) == refusal(indexer_scores, **SCORES | dict(keys=PAGES)) == ""
    assert why in refusal(indexer_scores, **SCORES | changed)


@pytest.mark.parametrize(("scores", "k", "why"), REFUSED_TOPK.values(), ids=REFUSED_TOPK)
def test_refusals_of_the_choice(scores: Tensor, k: int, why: str) -> None:
    assert refusal(stable_topk, torch.zeros(2, 9), 3) == ""
    assert why in refusal(stable_topk, scores, k)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (scores_module, topk_module):
        monkeypatch.setattr(module, "AVAILABLE", False)
        monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(indexer_scores, **SCORES)
    assert "no module" in refusal(stable_topk, torch.zeros(2, 9), 3)


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES.values() if a.name != "cpu"], ids=lambda arch: arch.name)
def test_tiles(arch: Architecture) -> None:
    """Rule and candidates: what a program holds of keys and of two tokens' queries fits into its shared memory."""
    for tokens in (1, 2):
        for cut in scores_module.tile.allowed(arch, (tokens, 64, 128)):
            held = 2 * (cut.block_s * cut.chunk + cut.stages * cut.heads * cut.chunk) + 4 * cut.block_s * cut.heads
            assert held <= arch.shared_memory
            assert cut.warps <= 32
            assert (cut.block_t == 1) == (tokens == 1)
