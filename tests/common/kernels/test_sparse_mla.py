"""Sparse latent attention beside a loop over queries: window, entries, sink, pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, Target, normal, refusal
from xpu_ports.common import accuracy, tritonlib
from xpu_ports.common.device import ARCHITECTURES, Architecture
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.kernels.fp8_pages import cache_rows, page_bytes, write_pages
from xpu_ports.common.kernels.sparse_mla import sparse_mla_decode, sparse_mla_prefill
from xpu_ports.common.kernels.sparse_mla import triton as module

SCALE = 0.3
SPAN, RATIO = 5, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# All ways of a program, whichever the architecture at hand has.
CUTS = {
    "whole": module.Tile(16, 32, 4),
    "ahead": module.Tile(16, 32, 4, ahead=True),
    "chunks": module.Tile(16, 16, 4, 64),
}


def attend(q: Tensor, keys: list[Tensor], sinks: Tensor) -> Tensor:
    """One query, [H, K], on a list of rows."""
    out = torch.zeros_like(q)
    for h in range(q.shape[0]):
        weights = [(SCALE * (q[h] @ key)).exp() for key in keys]
        total = sum(weights) + sinks[h].exp()
        out[h] = sum((w * key for w, key in zip(weights, keys, strict=True)), torch.zeros_like(q[h])) / total
    return out


def in_ring(tokens: Tensor, R: int, length: int) -> Tensor:
    """A ring of R slots after `length` of the tokens [N, K], with noise where none was written."""
    ring = torch.full((R, tokens.shape[1]), 9.0, dtype=tokens.dtype)
    for p in range(length):
        ring[p % R] = tokens[p]
    return ring


def paged(rows: Tensor, rope: int, tokens: int = 4) -> Tensor:
    """Pages of rows [B, S, K]."""
    B, S, K = rows.shape
    pages = torch.zeros(B, -(-S // tokens), page_bytes(K, rope, tokens), dtype=torch.uint8)
    write_pages(rows, torch.arange(S).expand(B, S), pages, rope)
    return pages


def drawn(*choices: int, slots: int) -> Tensor:
    """Different slots in no order, int32, the last dimension that many of them."""
    *shape, many = choices
    return torch.rand(*shape, slots).argsort(-1)[..., :many].int()


def imitates_an_xpu(target: Target) -> bool:
    return target == Target("triton", "cpu") and not tritonlib.INTERPRETED


@pytest.fixture(params=CUTS)
def cut(request: pytest.FixtureRequest, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    if imitates_an_xpu(target):
        if request.param != "chunks":
            pytest.skip("no Intel GPU has it")
        # Its own tiles, which other tests have built already, are of chunks.
        return
    tile = CUTS[request.param]
    monkeypatch.setattr(module, "tile", lambda *args: replace(tile, chunk=min(tile.chunk, args[3])))


def needs_a_kernel(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference has no parts and no tiles")


def pages_case(B: int = 3, H: int = 5, K: int = 128, dtype: torch.dtype = torch.bfloat16, **given: Any) -> dict:
    """Arguments of a decode step on FP8 pages, a ring that has wrapped round in all rows but the first."""
    made = dict(
        q=torch.randn(B, H, K).to(dtype),
        window=paged(torch.randn(B, 8, K), 64),
        entries=paged(torch.randn(B, 24, K), 64),
        indices=drawn(B, 9, slots=24),
        lengths=torch.tensor([3, 97, 130, 5000])[:B],
    )
    made["indices"][:, ::4] = -1
    return made | dict(sinks=torch.randn(H), span=SPAN, ratio=RATIO, rope=64, scale=K**-0.5) | given


@pytest.mark.op("sparse_mla_decode")
class TestDecode:
    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_by_hand(self, chosen: str) -> None:
        B, H, K, lengths = 4, 3, 6, [1, 5, 6, 23]
        q, sinks = torch.randn(B, H, K, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
        tokens, entries = (torch.randn(B, n, K, dtype=torch.float64) for n in (23, 6))
        window = torch.stack([in_ring(tokens[b], 8, n) for b, n in enumerate(lengths)])
        indices = torch.tensor([[-1, -1], [-1, 0], [0, -1], [4, 1]])
        y = sparse_mla_decode(
            q, window, None if chosen == "none" else entries, indices if chosen == "some" else None,
            torch.tensor(lengths), sinks, SPAN, RATIO, 2, SCALE,
        )  # fmt: skip
        for b, n in enumerate(lengths):
            keys = list(tokens[b, max(0, n - SPAN) : n])
            if chosen == "all":
                keys += list(entries[b, : n // RATIO])
            elif chosen == "some":
                keys += [entries[b, j] for j in indices[b].tolist() if j >= 0]
            torch.testing.assert_close(y[b], attend(q[b], keys, sinks))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [dict(B=1, H=1, K=8, S=1), dict(B=3, H=17, K=40, S=37)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, H, K, S = size.values()
        q, window, entries = (torch.randn(s).to(dtype) for s in ((B, H, K), (B, 7, K), (B, S, K)))
        lengths = torch.tensor([4, 17, 4 * S])[-B:]
        indices = torch.stack([torch.randperm(S)[: max(1, S // 2)] for _ in range(B)]).int()
        y = run(q, window, entries, indices, lengths, torch.randn(H), SPAN, RATIO, 2, SCALE)
        assert y.dtype == dtype

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("chosen", ["all", "some"])
    def test_pages(self, run: Runner, chosen: str, dtype: torch.dtype) -> None:
        """Read out of FP8 pages as out of the rows that they hold."""
        given = pages_case(dtype=dtype)
        if chosen == "all":
            given["indices"] = None
        y = run(**given)
        for name in ("window", "entries"):
            store = given[name]
            slots = torch.arange(4 * store.shape[1]).expand(3, -1)
            given[name] = cache_rows(store, slots, 128, 64)
        oracle = accuracy.oracle(sparse_mla_decode.reference, **given)
        accuracy.assert_close(y, sparse_mla_decode.reference(**given), oracle)

    def test_the_published_width(self, run: Runner) -> None:
        """512 columns and more heads than one tile, in a batch with which the widest tile is taken."""
        if imitates_an_xpu(run.target):
            pytest.skip("code this wide takes minutes to build for a CPU; for GPUs it is built at the models' sizes")
        run(**pages_case(B=4, H=67, K=512))

    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_lengths(self, run: Runner, chosen: str) -> None:
        """No tokens, one, a window but one, a window, one more, a full ring, and the ring's wrap in the window."""
        lengths = torch.tensor([0, 1, SPAN - 1, SPAN, SPAN + 1, 8, 10], dtype=torch.int32)
        given = pages_case(B=3)
        q = torch.randn(7, 5, 128).bfloat16()
        window, entries = paged(torch.randn(7, 8, 128), 64), paged(torch.randn(7, 4, 128), 64)
        indices = drawn(7, 2, slots=4)
        indices = torch.where(indices < lengths[:, None] // RATIO, indices, -1)
        given |= dict(q=q, window=window, lengths=lengths, entries=None if chosen == "none" else entries)
        y = run(**given | dict(indices=indices if chosen == "some" else None))
        assert (y[0] == 0).all()
        assert (y[1:] != 0).any(-1).all()

    @pytest.mark.parametrize("splits", [1, 3, 20])
    def test_any_cut_and_split(self, run: Runner, cut: None, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also parts without a key, and those whose first blocks are of entries."""
        needs_a_kernel(run)
        monkeypatch.setattr(module, "split", lambda *args: splits)
        given = pages_case(lengths=torch.tensor([0, 97, 130]))
        given["indices"][0] = -1
        run(**given)
        # The ring in bf16 and the entries in pages: two loops.
        ring = torch.randn(3, 40, 128).bfloat16()
        run(**given | dict(window=ring, span=37, indices=None))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["rows", "pages"])
    def test_what_does_not_count_may_hold_anything(self, run: Runner, cut: None, dtype: torch.dtype) -> None:
        """NaN in slots that were never written, and in all that the indices do not name."""
        given = pages_case(lengths=torch.tensor([3, 4, 2]))
        given["indices"][0] = -1
        if dtype == torch.bfloat16:
            given |= dict(window=torch.randn(3, 8, 128).bfloat16(), entries=torch.randn(3, 24, 128).bfloat16())
        clean = run(**given)
        for b in range(3):
            counts = {"window": range(int(given["lengths"][b])), "entries": given["indices"][b].tolist()}
            for name, slots in counts.items():
                store = given[name]
                every = store.shape[1] if dtype == torch.bfloat16 else 4 * store.shape[1]
                for slot in set(range(every)) - set(slots):
                    if dtype == torch.bfloat16:
                        store[b, slot] = float("nan")
                    else:
                        page = store[b, slot // 4]
                        page[slot % 4 * 192 :][:192] = 0xFF
                        page[4 * 192 + slot % 4 * 8 :][:8] = 0xFF
        assert torch.equal(run(**given), clean)

    def test_every_code_and_scale(self, run: Runner, cut: None) -> None:
        """One token that takes all the weight comes back as it is, denormal codes and the largest scales too."""
        codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
        scales = torch.tensor([105, 120, 127, 134, 135, 200, 246], dtype=torch.uint8)
        B = 4 * len(scales)
        window = torch.zeros(B, 1, page_bytes(128, 64, 1), dtype=torch.uint8)
        window[:, 0, :64] = torch.cat([codes, codes[:2]]).view(4, 64).repeat(len(scales), 1)
        window[:, 0, 64:192] = torch.randn(B, 64).bfloat16().view(torch.uint8)
        window[:, 0, 192] = scales.repeat_interleave(4)
        rest = (torch.ones(B, dtype=torch.int64), torch.full((2,), float("-inf")), 1, 1, 64, 1.0)
        y = run(torch.zeros(B, 2, 128).bfloat16(), window, None, None, *rest)
        row = cache_rows(window, torch.zeros(B, 1, dtype=torch.int64), 128, 64)
        assert torch.equal(y, row.expand(-1, 2, -1))

    def test_views(self, run: Runner) -> None:
        """Queries, lengths, indices and sinks with strides; pages between others; one row's store for all rows."""
        given = pages_case()
        room = torch.full((3, 7, page_bytes(128, 64, 4) + 64), 0xFF, dtype=torch.uint8)
        given["q"] = normal(3, 5, 128, dtype=torch.bfloat16, layout="gap")
        given["entries"] = room[:, 1:, 32 : 32 + given["entries"].shape[2]].copy_(given["entries"])
        given["window"] = given["window"][1:2].expand(3, -1, -1)
        for name in ("lengths", "sinks"):
            given[name] = torch.stack([given[name], given[name]], dim=1)[:, 1]
        given["indices"] = given["indices"].T.contiguous().T.long()
        run(**given)

    def test_indices_beyond_the_entries_are_not_read(self, run: Runner) -> None:
        needs_a_kernel(run)
        given = pages_case()
        y = run(**given)
        wrong = torch.where(given["indices"] < 0, 24 + 2**20, given["indices"])
        given |= dict(indices=wrong)
        on_device = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in given.items()}
        with use_backend("triton"):
            assert torch.equal(sparse_mla_decode(**on_device).cpu(), y)

    @pytest.mark.filterwarnings("ignore:All-NaN slice")
    def test_not_a_number_that_counts_shows_in_its_row_alone(self, run: Runner) -> None:
        rows = torch.randn(3, 8, 128)
        rows[1, 5] = float("nan")
        y = run(**pages_case(window=paged(rows, 64)))
        assert y[1].isnan().all()
        assert y[[0, 2]].isfinite().all()

    def test_the_sink_takes_weight_and_gives_nothing(self) -> None:
        q, window = torch.randn(1, 2, 4), torch.randn(1, 5, 4)

        def y(sink: float) -> Tensor:
            lengths = torch.tensor([5])
            return sparse_mla_decode(q, window, None, None, lengths, torch.full((2,), sink), 5, 1, 2, SCALE)

        none = torch.softmax(SCALE * q[0] @ window[0].T, -1) @ window[0]
        torch.testing.assert_close(y(-100.0)[0], none)
        lse = torch.logsumexp(SCALE * q[0] @ window[0].T, -1, keepdim=True)
        torch.testing.assert_close(y(0.7)[0], none * torch.sigmoid(lse - 0.7))
        assert y(200.0).abs().max() < 1e-30

    def test_a_row_without_tokens(self, run: Runner) -> None:
        q, window, lengths = torch.randn(2, 3, 4), torch.randn(2, 8, 4), torch.tensor([0, 3])
        y = run(q, window, torch.randn(2, 2, 4), None, lengths, torch.zeros(3), SPAN, RATIO, 2, SCALE)
        assert (y[0] == 0).all()

    def test_large_scores(self, run: Runner) -> None:
        q, window = 100 * torch.randn(2, 3, 4), 100 * torch.randn(2, 8, 4)
        run(q, window, None, None, torch.tensor([8, 9]), torch.zeros(3), SPAN, 1, 2, SCALE)


@pytest.mark.op("sparse_mla_decode")
class TestDecodeOfManyHeads:
    """Pages of the published width and a multiple of 64 heads, for which Hopper has a kernel of its own."""

    @pytest.fixture(autouse=True)
    def on_a_gpu(self, target: Target) -> None:
        if target.device == "cpu":
            pytest.skip("takes minutes on a CPU, where narrower tests run the same kernel")

    def case(self, chosen: str, H: int, lengths: list[int]) -> dict:
        """A window of two tiles, the last one not full, and entries of up to four."""
        B, n = len(lengths), torch.tensor(lengths)
        given = pages_case(B=1, H=H, K=512)
        given |= dict(
            q=torch.randn(B, H, 512).bfloat16(), window=paged(torch.randn(B, 104, 512), 64), lengths=n, span=99
        )
        given |= dict(entries=paged(torch.randn(B, 200, 512), 64), indices=drawn(B, 150, slots=200))
        given["indices"][:, ::4] = -1
        given["indices"] = torch.where(given["indices"] < n[:, None] // RATIO, given["indices"], -1)
        if chosen != "some":
            given["indices"] = None
        if chosen == "none":
            given["entries"] = None
        return given

    @pytest.mark.parametrize("splits", [None, 1, 3, 20])
    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_any_split(self, run: Runner, chosen: str, splits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        needs_a_kernel(run)
        if splits is not None:
            monkeypatch.setattr(module, "split", lambda *args: splits)
        run(**self.case(chosen, 64, [0, 1, 5, 97, 131, 5001]))

    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_several_programs_of_a_token(self, run: Runner, chosen: str) -> None:
        run(**self.case(chosen, 192, [700, 63, 799, 99]))

    @pytest.mark.parametrize("chosen", ["all", "some"])
    def test_what_does_not_count_may_hold_anything(self, run: Runner, chosen: str) -> None:
        given = self.case(chosen, 64, [0, 30, 64, 397])
        clean = run(**given)
        for b, n in enumerate(given["lengths"].tolist()):
            entries = range(n // RATIO) if chosen == "all" else given["indices"][b].tolist()
            for name, slots in (("window", range(n) if n < 104 else range(104)), ("entries", entries)):
                for slot in set(range(4 * given[name].shape[1])) - set(slots):
                    page = given[name][b, slot // 4]
                    page[slot % 4 * 576 :][:576] = 0xFF
                    page[4 * 576 + slot % 4 * 8 :][:8] = 0xFF
        assert torch.equal(run(**given), clean)

    @pytest.mark.parametrize("exponent", [-100, 90])
    def test_rows_of_any_size(self, run: Runner, exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of sums far beyond fp16, as which they are kept, by queries that make ordinary scores of the rows."""
        needs_a_kernel(run)
        monkeypatch.setattr(module, "split", lambda *args: 3)
        given = self.case("some", 64, [0, 131, 5001])
        for name in ("window", "entries"):
            tokens, scales = given[name].split([4 * 576, given[name].shape[-1] - 4 * 576], dim=-1)
            scales[..., :32].unflatten(-1, (4, 8))[..., :7] += exponent
            tokens.unflatten(-1, (4, 576))[..., 448:].view(torch.bfloat16).mul_(2.0**exponent)
        run(**given | dict(q=given["q"] * 2.0**-exponent))

    def test_every_code_and_scale(self, run: Runner) -> None:
        """One token that takes all the weight comes back as it is; a group of each scale meets all codes."""
        codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
        scales = torch.tensor([105, 120, 127, 134, 135, 200, 246], dtype=torch.uint8)
        window = torch.zeros(4, 1, page_bytes(512, 64, 1), dtype=torch.uint8)
        window[:, 0, :448] = torch.cat([codes, codes[:2]]).view(4, 64).repeat(1, 7)
        window[:, 0, 448:576] = torch.randn(4, 64).bfloat16().view(torch.uint8)
        window[:, 0, 576:583] = scales
        rest = (torch.ones(4, dtype=torch.int64), torch.full((64,), float("-inf")), 1, 1, 64, 1.0)
        y = run(torch.zeros(4, 64, 512).bfloat16(), window, None, None, *rest)
        row = cache_rows(window, torch.zeros(4, 1, dtype=torch.int64), 512, 64)
        assert torch.equal(y, row.expand(-1, 64, -1))

    def test_views(self, run: Runner) -> None:
        """Queries, indices, lengths and sinks with strides, pages between others and one row's for all."""
        given = self.case("some", 64, [700, 63, 799, 97])
        room = torch.full((4, 60, page_bytes(512, 64, 4) + 64), 0xFF, dtype=torch.uint8)
        given["q"] = normal(4, 64, 512, dtype=torch.bfloat16, layout="gap")
        given["entries"] = room[:, 1:51, 36 : 36 + given["entries"].shape[2]].copy_(given["entries"])
        given["window"] = given["window"][1:2].expand(4, -1, -1)
        for name in ("lengths", "sinks"):
            given[name] = torch.stack([given[name], given[name]], dim=1)[:, 1]
        given["indices"] = given["indices"].T.contiguous().T.long()
        run(**given)


@pytest.mark.op("sparse_mla_prefill")
class TestPrefill:
    @pytest.mark.parametrize("P", [0, 2, SPAN - 1, 9])
    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_by_hand(self, chosen: str, P: int) -> None:
        """P tokens before the new ones, of which some rows have fewer."""
        B, T, H, K = 2, 6, 2, 4
        starts = [0, 0] if P == 0 else [1, 11]
        q, sinks = torch.randn(B, T, H, K, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
        rows, entries = (torch.randn(B, n, K, dtype=torch.float64) for n in (P + T, 5))
        indices = torch.stack([torch.randperm(5)[:3] for _ in range(B * T)]).unflatten(0, (B, T))
        indices[0, 3, 1] = -1
        y = sparse_mla_prefill(
            q, rows, None if chosen == "none" else entries, indices if chosen == "some" else None,
            torch.tensor(starts), sinks, SPAN, RATIO, 2, SCALE,
        )  # fmt: skip
        for b in range(B):
            for t in range(T):
                position = starts[b] + t
                first = max(0, position - SPAN + 1)
                keys = [rows[b, P + p - starts[b]] for p in range(first, position + 1) if P + p - starts[b] >= 0]
                seen = range((position + 1) // RATIO)
                if chosen == "all":
                    keys += [entries[b, j] for j in seen]
                elif chosen == "some":
                    keys += [entries[b, j] for j in indices[b, t].tolist() if j in seen]
                torch.testing.assert_close(y[b, t], attend(q[b, t], keys, sinks))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", [dict(B=1, T=1, H=1, K=8), dict(B=2, T=13, H=3, K=40)])
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, H, K = size.values()
        q, rows, entries = (torch.randn(s).to(dtype) for s in ((B, T, H, K), (B, T + 4, K), (B, 7, K)))
        start = torch.tensor([3, 14])[:B]
        indices = drawn(B, T, 3, slots=7)
        indices[:, ::3, 1] = -1
        assert run(q, rows, entries, indices, start, torch.randn(H), SPAN, RATIO, 2, SCALE).dtype == dtype

    def test_is_decode_token_by_token(self) -> None:
        """From pages, with a choice among the entries."""
        B, T, H, K, rope = 2, 9, 3, 128, 64
        tokens, sinks = torch.randn(B, T, K), torch.randn(H)
        window, entries = paged(tokens, rope, 9), paged(torch.randn(B, 3, K), rope)
        rows = cache_rows(window, torch.arange(T).expand(B, T), K, rope).float()
        q = torch.randn(B, T, H, K)
        indices = torch.full((B, T, 2), -1)
        indices[:, 3:, 0], indices[:, 7:, 1] = 0, 1
        args = (sinks, SPAN, RATIO, rope, SCALE)
        whole = sparse_mla_prefill(q, rows, entries, indices, torch.zeros(B, dtype=torch.int64), *args)
        for t in range(T):
            # The ring is larger than the window: later tokens are in it already, and not seen.
            one = sparse_mla_decode(q[:, t], window, entries, indices[:, t], torch.full((B,), t + 1), *args)
            torch.testing.assert_close(one, whole[:, t])

    @pytest.mark.parametrize("chosen", ["none", "all", "some"])
    def test_rows_and_pages(self, run: Runner, cut: None, chosen: str) -> None:
        """NaN in rows at positions below 0, behind the window, and in entries that are not closed."""
        run(**prefill_case(chosen))

    @pytest.mark.parametrize("P", [0, 2, 9])
    def test_the_tokens_before(self, run: Runner, P: int) -> None:
        given = prefill_case("all")
        rows = torch.randn(2, P + 6, 128).bfloat16()
        run(**given | dict(rows=rows, start=torch.tensor([0, 0] if P == 0 else [1, 21])))

    def test_views(self, run: Runner) -> None:
        given = prefill_case("some")
        for name in ("q", "rows"):
            given[name] = torch.cat([given[name], given[name]], dim=-1)[..., 128:]
        given["indices"] = given["indices"].mT.contiguous().mT
        given["start"] = given["start"].int()
        run(**given)


def prefill_case(chosen: str = "some", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Arguments of 6 tokens behind 2 and 21, on rows in bf16 and entries in pages; what does not count is NaN."""
    P, T, starts = SPAN, 6, [2, 21]
    rows, entries = torch.randn(2, P + T, 128).to(dtype), paged(torch.randn(2, 8, 128), 64)
    rows[0, : P - starts[0]] = rows[1, 0] = float("nan")
    closed = (torch.tensor(starts)[:, None] + torch.arange(1, T + 1)) // RATIO
    for b in range(2):
        last = int(closed[b, -1])
        for slot in range(last, 8):
            entries[b, slot // 4, slot % 4 * 192 :][:192] = 0xFF
            entries[b, slot // 4, 768 + slot % 4 * 8 :][:8] = 0xFF
    # Entries that are closed later are named too.
    indices = drawn(2, T, 5, slots=8)
    indices[:, ::2, 3] = -1
    return dict(
        q=torch.randn(2, T, 3, 128).to(dtype),
        rows=rows,
        entries=None if chosen == "none" else entries,
        indices=indices if chosen == "some" else None,
        start=torch.tensor(starts),
        sinks=torch.randn(3),
        span=SPAN,
        ratio=RATIO,
        rope=64,
        scale=128**-0.5,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("programs", [1, 8, 64, 100, 4096])
@pytest.mark.parametrize("blocks", [1, 3, 20, 4000])
def test_split(arch: Architecture, programs: int, blocks: int) -> None:
    """Every part has a block, and together they fill the device once."""
    parts = module.split(arch, programs, blocks)
    assert 1 <= parts <= min(blocks, module.MOST_SPLITS)
    assert parts == 1 or programs * parts <= arch.units


DECODE = pages_case(lengths=torch.tensor([3, 97, 130]))
ODD = torch.zeros(3, 2, 963, dtype=torch.uint8)[..., 1:961]
REFUSED = {
    "fp64": (dict(q=DECODE["q"].double()), "q has dtype torch.float64"),
    "dimensions": (dict(q=DECODE["q"][:, None]), "q has 4 dimensions, not 3"),
    "q stride": (dict(q=DECODE["q"].mT.contiguous().mT), "the last dimension of q has stride 5"),
    "wide": (dict(q=torch.zeros(3, 5, 513).bfloat16()), "heads of 513 columns, not 1 to 512"),
    "no window": (dict(span=0), "a window of 0 tokens"),
    "short ring": (dict(span=9), "the window has 8 slots, fewer than 9"),
    "batch": (dict(window=DECODE["window"][:2]), "the window has shape (2, 2, 960), not (3, ...)"),
    "columns": (dict(entries=torch.zeros(3, 4, 64).bfloat16()), "entries is (3, 4, 64) in torch.bfloat16, not 128"),
    "integers": (dict(entries=torch.zeros(3, 4, 128).int()), "in torch.int32, not 128 columns"),
    "store stride": (dict(window=torch.zeros(3, 128, 8).mT), "the last dimension of the window has stride 8"),
    "byte stride": (dict(window=torch.zeros(3, 960, 2).byte().mT), "the last dimension of pages has stride 2"),
    "rope": (dict(rope=32), "96 columns without positions, not a multiple of 64"),
    "small pages": (dict(window=DECODE["window"][..., :192]), "have no room for a token"),
    "odd pages": (dict(window=ODD), "the window has tokens at addresses that 4 does not divide"),
    "sinks": (dict(sinks=torch.zeros(4)), "sinks are (4,) in torch.float32, not (5,)"),
    "lengths": (dict(lengths=torch.zeros(3)), "the tokens of each row are (3,) in torch.float32, not (3,)"),
    "indices": (dict(indices=torch.zeros(3, 2)), "indices are (3, 2) in torch.float32"),
    "no entries": (dict(entries=None), "indices, and no entries"),
    "gradient": (dict(q=DECODE["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals_of_decode(changed: dict, why: str) -> None:
    assert refusal(sparse_mla_decode, **DECODE) == ""
    assert why in refusal(sparse_mla_decode, **DECODE | changed)


PREFILL = prefill_case()
REFUSED_PREFILL = {
    "dimensions": (dict(q=PREFILL["q"][:, 0]), "q has 3 dimensions, not 4"),
    "dtype": (dict(q=PREFILL["q"].double()), "q has dtype torch.float64"),
    "few rows": (dict(rows=PREFILL["rows"][:, :5]), "not the 6 new tokens and those before them"),
    "pages": (dict(rows=PREFILL["entries"]), "in torch.uint8, not the 6 new tokens"),
    "tokens of indices": (dict(indices=PREFILL["indices"][:, 1:]), "indices are (2, 5, 5) in torch.int32"),
    "gradient": (dict(q=PREFILL["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED_PREFILL.values(), ids=REFUSED_PREFILL)
def test_refusals_of_prefill(changed: dict, why: str) -> None:
    assert refusal(sparse_mla_prefill, **PREFILL) == ""
    assert why in refusal(sparse_mla_prefill, **PREFILL | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(sparse_mla_decode, **DECODE)
    assert "no module" in refusal(sparse_mla_prefill, **PREFILL)
