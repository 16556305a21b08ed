"""Norms, rotations of pairs and rows into the cache, beside complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, assert_rounded_once, normal, refusal
from xpu_ports.common.dispatch import Op, use_backend
from xpu_ports.common.kernels.fp8_pages import cache_rows, index_page_bytes, page_bytes
from xpu_ports.common.kernels.mla_rope import (
    inverse_rope_grouped_out,
    norm_rope_insert,
    qnorm_rope_kv_insert,
    rope_tail,
)
from xpu_ports.common.kernels.mla_rope import triton as module

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


def neighbours(values: Tensor) -> Tensor:
    """Positive values of bf16 with those before and behind each."""
    bits = values.bfloat16().view(torch.int16)
    return torch.cat([bits - 1, bits, bits + 1]).view(torch.bfloat16).float()


def hard_to_round(own: int) -> list[Tensor]:
    """Values of bf16, positive, [own] each: what decides how they are quantized."""
    codes = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).float()
    # Each between two codes, of which the even one is right, and those beside it; beside 448 the scale is 1.
    ties = torch.cat([codes, neighbours((codes[1:] + codes[:-1]) / 2)])
    at_scale_1 = torch.nn.functional.pad(ties, (0, -len(ties) % (own - own // 64))).view(-1, own // 64, 63)
    at_scale_1 = torch.nn.functional.pad(at_scale_1, (0, 1), value=448.0).flatten(1)
    # The largest of groups of 64: those at which the scale changes, and those below the least.
    tops = torch.tensor(
        [448.0, 450.0, 446.0, 56.0, 2.0**-14, 2.0**-13, 1e-4, 1e-5, 0.0, 2.0**-30, 3e38, 1.0, 1.75, 7.0]
    )
    groups = tops[:, None] * torch.rand(len(tops), 64)
    groups[:, 7] = tops
    groups = torch.nn.functional.pad(groups.flatten(), (0, -groups.numel() % own)).view(-1, own)
    spread = torch.exp2(40 * torch.rand(2, own) - 20)
    return list(torch.cat([at_scale_1, groups, spread]).bfloat16().float())


def exact_row(own: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """A row [1, 1, K] and a weight [K] whose norm is, rounded to bf16, exactly `own` with signs, and a tail."""
    # The root of the mean square is 1, and eps too little to reach the next value of bf16.
    return torch.randn(1, 1, K).sign(), torch.cat([own, torch.randn(K - len(own)).bfloat16().float()])


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

    def test_heads(self, run: Runner) -> None:
        """More heads than a program takes, and columns beside the turned ones that are left as they are."""
        x, angle = torch.randn(1, 2, 67, 128).bfloat16(), angles(1, 2, 32)
        x[0, 1, 66, 62:64] = torch.tensor([float("inf"), float("nan")])
        y = run(x, angle.cos().float(), angle.sin().float())
        assert torch.equal(y[..., :62], x[..., :62])
        assert y[..., 64:].isfinite().all()

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

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
    def test_views(self, run: Runner, dtype: torch.dtype) -> None:
        """Heads apart, keys out of a wider projection, one row of angles, slots and a store with gaps."""
        B, T, H, K = 2, 3, 3, 12
        q = torch.randn(H, B, T, 2 * K).bfloat16()[..., 2 : 2 + K].permute(1, 2, 0, 3)
        kv = torch.randn(B, T, 3 * K).bfloat16()[..., K : 2 * K]
        angle = angles(1, T, 4).float()
        slots = torch.tensor([[3, 0, 4, 0, -1], [-1, 0, -1, 0, 6]], dtype=dtype)[:, ::2]
        store = torch.randn(B, 2, 7, K + 4)[:, 1, :, :K]
        run(q, kv, torch.rand(K).bfloat16(), angle.cos(), angle.sin(), slots, store, EPS)
        run(q[:, :0], kv[:, :0], torch.rand(K), angle[:, :0], angle[:, :0], slots[:, :0], store, EPS)

    def test_every_way_to_round(self, run: Runner) -> None:
        """Bytes of data, scales and padding are the reference's; so is what is given back."""
        K, rope = 512, 64
        q, quarter = torch.randn(1, 1, 1, K).bfloat16(), torch.zeros(1, 1, rope // 2)
        for own in hard_to_round(K - rope):
            kv, weight = exact_row(own, K)
            # Two pages of a longer row, of which the second has the token; a turn by 90 degrees is exact too.
            pages = torch.randint(0, 256, (1, 3, page_bytes(K, rope, 4) + 2), dtype=torch.uint8)[:, 1:, 1:-1]
            _, row, _ = run(q, kv, weight, quarter, quarter + 1, torch.tensor([[5]]), pages, EPS)
            assert row.isfinite().all()

    def test_pages_of_a_batch(self, run: Runner) -> None:
        """Nothing is written for -1; other tokens' bytes stay; several rows in one launch."""
        B, T, K, rope = 2, 3, 128, 64
        kv, weight = exact_row(torch.exp2(8 * torch.rand(K - rope) - 4).bfloat16().float(), K)
        kv = kv * torch.randn(B, T, K).sign()
        one = torch.ones(1, T, rope // 2)
        slots = torch.tensor([[0, 5, -1], [-1, 2, 7]])
        pages = torch.randint(0, 256, (B, 2, page_bytes(K, rope, 4)), dtype=torch.uint8)
        run(torch.randn(B, T, 5, K), kv, weight, one, one - 1, slots, pages, EPS)

    def test_not_a_number(self, run: Runner) -> None:
        """A row that is none reads back as that, and another one does not."""
        K, rope, one = 128, 64, torch.ones(1, 2, 32)
        kv, weight = exact_row(torch.ones(K - rope), K)
        kv = kv.repeat(1, 2, 1)
        kv[0, 0, 3] = float("nan")
        given = (torch.randn(1, 2, 1, K), kv, weight, one, one - 1, torch.tensor([[0, 1]]))
        pages = torch.zeros(1, 1, page_bytes(K, rope, 2), dtype=torch.uint8)
        placed = [t.to(run.target.device) for t in (*given, pages)]
        with use_backend(run.target.backend):
            _, row = qnorm_rope_kv_insert(*placed, EPS)
            read = cache_rows(placed[-1], placed[-2], K, rope)
        for rows in (row, read):
            assert rows[0, 0].isnan().all()
            assert rows[0, 1].isfinite().all()

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
    def test_every_way_to_round(self, run: Runner, index: bool) -> None:
        """The indexer's rows are one group, with a scale in fp32."""
        K, rope = 128, 64
        quarter, own_columns = torch.zeros(1, 1, rope // 2), K if index else K - rope
        page = index_page_bytes(K, 3) if index else page_bytes(K, rope, 3)
        for own in hard_to_round(own_columns)[:: 1 if index else 4]:
            rows, weight = exact_row(own, K)
            pages = torch.randint(0, 256, (1, 2, page), dtype=torch.uint8)
            run(rows, weight, quarter, quarter + 1, torch.tensor([[4]]), pages, EPS, index)

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


# A token, two, and more; heads of more columns than are read at a time, of which more than that turn.
OUT_SIZES = [
    dict(B=1, T=1, H=2, K=8, G=1, R=3, N=2),
    dict(B=2, T=1, H=6, K=64, G=3, R=7, N=16),
    dict(B=2, T=5, H=6, K=64, G=3, R=7, N=16),
    dict(B=1, T=1, H=2, K=1024, G=2, R=3, N=300),
    dict(B=0, T=1, H=2, K=8, G=1, R=3, N=2),
]


@pytest.mark.op("inverse_rope_grouped_out")
class TestOut:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", OUT_SIZES)
    def test_sizes(self, run: Runner, size: dict, dtype: torch.dtype) -> None:
        B, T, H, K, G, R, N = size.values()
        run.rounds_once = False
        o, angle = torch.randn(B, T, H, K).to(dtype), angles(B, T, N).float()
        weight = (torch.randn(G * R, H * K // G) * K**-0.5).to(dtype)
        assert run(o, angle.cos(), angle.sin(), weight).shape == (B, T, G * R)

    @pytest.mark.parametrize("T", [1, 3])
    def test_views(self, run: Runner, T: int) -> None:
        """Heads in front of tokens, as attention may give them; rows of a wider weight; one row of angles."""
        run.rounds_once = False
        o = torch.randn(2, 6, T, 20).bfloat16()[..., 4:16].transpose(1, 2)
        angle, weight = angles(1, T, 2).float(), torch.randn(21, 2 * 24).bfloat16()[:, :24]
        run(o, angle.cos(), angle.sin(), weight)

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


# ----------------------------------------------------------------------------------------------------------- refusals

Q, KV, ANGLES = torch.zeros(2, 3, 4, 128), torch.zeros(2, 3, 128), torch.zeros(2, 3, 32)
TAIL = dict(x=Q, cos=ANGLES, sin=ANGLES)
ROWS = dict(weight=torch.ones(128), cos=ANGLES, sin=ANGLES, slots=torch.zeros(2, 3, dtype=torch.int64))
PAGES = torch.zeros(2, 1, page_bytes(128, 64), dtype=torch.uint8)
INSERT = dict(q=Q, kv=KV, **ROWS, store=torch.zeros(2, 9, 128), eps=EPS)
ENTRIES = dict(rows=KV, **ROWS, store=PAGES, eps=EPS, index=False)
OUT = dict(o=Q, cos=ANGLES, sin=ANGLES, weight=torch.zeros(6, 256))
HEADS = {
    "fp64": (Q.double(), "dtype torch.float64, not one of"),
    "dimensions": (Q[0], "3 dimensions, not 4"),
    "odd": (Q[..., :127], "127 columns, not an even number"),
    "columns": (torch.zeros(2, 3, 4, 1026), "1026 columns, not an even number up to 1024"),
    "stride": (torch.zeros(2, 3, 128, 4).mT, "has stride 4, not 1"),
}
TURNS = {
    "angles differ": (dict(sin=ANGLES[:1]), "shape, strides or dtype differ"),
    "angles fp64": (dict(cos=ANGLES.double(), sin=ANGLES.double()), "cos has dtype torch.float64"),
    "batch": (dict(cos=ANGLES.repeat(2, 1, 1), sin=ANGLES.repeat(2, 1, 1)), "cos has shape (4, 3, 32)"),
    "tokens": (dict(cos=ANGLES[:, 1:], sin=ANGLES[:, 1:]), "cos has shape (2, 2, 32), expected (2 or 1, 3,"),
    "pairs": (dict(cos=torch.zeros(1, 3, 65), sin=torch.zeros(1, 3, 65)), "at most 64"),
    "angles stride": (dict(cos=torch.zeros(1, 32, 3).mT, sin=torch.zeros(1, 32, 3).mT), "of cos has stride 3"),
}
STORES = {
    "weight": (dict(weight=torch.ones(64)), "weight has shape (64,)"),
    "slots shape": (dict(slots=torch.zeros(2, 1, dtype=torch.int64)), "slots are (2, 1)"),
    "slots dtype": (dict(slots=torch.zeros(2, 3)), "torch.float32, expected (2, 3), int32 or int64"),
    "rows": (dict(store=torch.zeros(1, 9, 128)), "the store has shape (1, 9, 128)"),
    "store fp64": (dict(store=torch.zeros(2, 9, 128).double()), "the store has dtype torch.float64"),
    "store width": (dict(store=torch.zeros(2, 9, 64)), "the store has 64 columns"),
    "store stride": (dict(store=torch.zeros(2, 128, 9).mT), "with stride 9, expected 128 with stride 1"),
    "page stride": (dict(store=torch.zeros(2, 9, 128, dtype=torch.uint8).mT), "of pages has stride 128"),
    "page size": (dict(store=PAGES[..., :99]), "pages of 99 bytes have no room"),
    "no groups": (dict(cos=ANGLES[..., 1:], sin=ANGLES[..., 1:], store=PAGES), "66 columns without positions"),
}
PRODUCT = {
    "weight dtype": (dict(weight=torch.zeros(6, 256).half()), "dtype torch.float16, expected 2 and torch.float32"),
    "weight width": (dict(weight=torch.zeros(6, 192)), "weight has shape (6, 192)"),
    "weight rows": (dict(weight=torch.zeros(7, 256)), "weight has shape (7, 256)"),
    "weight stride": (dict(weight=torch.zeros(256, 6).T), "the last dimension of weight has stride 6"),
    "gradient": (dict(o=Q.clone().requires_grad_()), "no backward"),
}
REFUSED = [
    *(pytest.param(rope_tail, TAIL, dict(x=x), why, id=f"tail {name}") for name, (x, why) in HEADS.items()),
    *(pytest.param(rope_tail, TAIL, *case, id=f"tail {name}") for name, case in TURNS.items()),
    *(pytest.param(qnorm_rope_kv_insert, INSERT, dict(q=x), why, id=f"q {name}") for name, (x, why) in HEADS.items()),
    *(pytest.param(qnorm_rope_kv_insert, INSERT, *case, id=f"insert {name}") for name, case in TURNS.items()),
    *(pytest.param(qnorm_rope_kv_insert, INSERT, *case, id=f"insert {name}") for name, case in STORES.items()),
    *(pytest.param(norm_rope_insert, ENTRIES, *case, id=f"entries {name}") for name, case in (TURNS | STORES).items()),
    *(pytest.param(inverse_rope_grouped_out, OUT, dict(o=x), why, id=f"o {name}") for name, (x, why) in HEADS.items()),
    *(pytest.param(inverse_rope_grouped_out, OUT, *case, id=f"out {name}") for name, case in TURNS.items()),
    *(pytest.param(inverse_rope_grouped_out, OUT, *case, id=f"out {name}") for name, case in PRODUCT.items()),
    pytest.param(qnorm_rope_kv_insert, INSERT, dict(kv=KV[:1]), "kv has shape (1, 3, 128)", id="insert kv shape"),
    pytest.param(qnorm_rope_kv_insert, INSERT, dict(kv=KV.double()), "a row has dtype torch.float64", id="insert kv"),
    pytest.param(
        norm_rope_insert, ENTRIES, dict(rows=KV.clone().requires_grad_()), "no backward", id="entries gradient"
    ),
]


@pytest.mark.parametrize(("op", "good", "changed", "why"), REFUSED)
def test_refusals(op: Op, good: dict[str, Any], changed: dict[str, Any], why: str) -> None:
    assert why in refusal(op, **good | changed)


@pytest.mark.parametrize(
    ("op", "good"),
    [(rope_tail, TAIL), (qnorm_rope_kv_insert, INSERT), (norm_rope_insert, ENTRIES), (inverse_rope_grouped_out, OUT)],
    ids=["tail", "insert", "entries", "out"],
)
def test_taken_and_not_without_triton(op: Op, good: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that the refusals above differ from in one thing each."""
    assert refusal(op, **good) == ""
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(op, **good)
