"""FP8 pages beside a codec of their own, byte by byte, and `cache_rows`, which reads them."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common.kernels import fp8_pages
from xpu_ports.common.kernels.fp8_pages import (
    cache_rows,
    index_page_bytes,
    page_bytes,
    read_pages,
    store_slots,
    token_bytes,
    write_pages,
    write_rows,
)

pytestmark = pytest.mark.op("cache_rows")

# What the bytes 0 to 126 mean: 4 bits of exponent, bias 7, 3 of mantissa; 127 is NaN.
E4M3 = numpy.array([(m / 8 * 2.0**-6) if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])


def scale_of(group: numpy.ndarray) -> int:
    """log2 of a group's scale: the smallest k with max |x| <= 448 2^k, of exact numbers."""
    largest = max(float(numpy.float32(1e-4)), float(numpy.abs(group).max()))
    k = -200
    while largest > 448 * 2.0**k:
        k += 1
    return k


def byte_of(values: numpy.ndarray, k: int | numpy.ndarray) -> numpy.ndarray:
    """The nearest e4m3 of values / 2^k, of two that are as near the even one, and the sign in bit 7."""
    scaled = numpy.abs(values) / 2.0**k
    above = numpy.searchsorted(E4M3[:127], scaled).clip(0, 126)
    below = (above - 1).clip(0)
    up, down = E4M3[above] - scaled, scaled - E4M3[below]
    code = numpy.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (code + 128 * numpy.signbit(values)).astype(numpy.uint8)


def token_of(row: Tensor, rope: int) -> tuple[bytes, bytes]:
    """The data and the scales of one token."""
    own = row[: len(row) - rope].float().numpy().astype(float).reshape(-1, 64)
    scales = [scale_of(group) for group in own]
    data = b"".join(byte_of(group, k).tobytes() for group, k in zip(own, scales, strict=True))
    padded = -(-len(scales) // 8) * 8
    tail = row[len(row) - rope :].bfloat16().view(torch.uint8).numpy().tobytes()
    return data + tail, bytes(k + 127 for k in scales) + bytes(padded - len(scales))


def rows_of(*shape: int) -> Tensor:
    """bf16 rows whose groups differ in size by many powers of two, some all zero."""
    rows = torch.randn(shape) * torch.exp2(
        torch.randint(-30, 30, (*shape[:-1], shape[-1] // 64)).float()
    ).repeat_interleave(64, -1)
    rows[..., :64] *= torch.randint(2, shape[:-1])[..., None]
    return rows.bfloat16()


class TestValues:
    def test_every_value_of_bfloat16_is_its_groups_largest(self) -> None:
        values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        values = values[values.isfinite()]
        rows = torch.zeros(len(values), 64, dtype=torch.bfloat16)
        rows[:, 5], rows[:, 9] = values, -values
        data, log2 = fp8_pages.encode(rows, 64)
        known = values.double().numpy()
        scales = numpy.array([scale_of(value) for value in known])
        assert (log2[:, 0].numpy() == scales).all()
        assert (data[:, 5].numpy() == byte_of(known, scales)).all()
        assert (data[:, 9].numpy() == byte_of(-known, scales)).all()
        back = fp8_pages.decode(data, log2).double().numpy()
        exact = E4M3[data[:, 5].numpy()] * 2.0**scales
        # The largest values are rounded up to 2^128.
        assert (back[:, 5] == numpy.where(exact < 2.0**128, exact, numpy.inf)).all()

    def test_every_value_below_a_larger_one(self) -> None:
        """A group whose largest is 448: every value of bf16 up to it, subnormal codes included."""
        values = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        values = values[values.abs() <= 448]
        rows = torch.full((len(values), 64), 448.0, dtype=torch.bfloat16)
        rows[:, 3] = values
        data, log2 = fp8_pages.encode(rows, 64)
        assert (log2 == 0).all()
        assert (data[:, 3].numpy() == byte_of(values.double().numpy(), 0)).all()
        assert len(set(data[:, 3].tolist())) == 127

    @pytest.mark.parametrize(
        ("value", "byte", "code"),
        [
            (0.0, 105, 0),
            (1e-9, 105, 2),
            (1e-10, 105, 0),
            (448.0, 127, 126),
            (896.0, 128, 126),
            (450.0, 128, 118),
            (224.0, 126, 126),
        ],
    )
    def test_by_hand(self, value: float, byte: int, code: int) -> None:
        """A group of zeros has the scale 2^-22; 448 2^k is not doubled; what is larger than 448 is."""
        rows = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
        rows[..., 0] = value
        pages = torch.zeros(1, 1, page_bytes(128, 64, 1), dtype=torch.uint8)
        write_pages(rows, torch.zeros(1, 1, dtype=torch.int64), pages, 64)
        assert pages[0, 0, 0] == code
        assert pages[0, 0, 192] == byte

    def test_rounding_has_no_bias(self) -> None:
        rows = torch.rand(64, 512).bfloat16() * 2 - 1
        back = fp8_pages.decode(*fp8_pages.encode(rows, 64)).double()
        error = back - rows.double()
        assert error.mean().abs() < error.abs().mean() / 50


class TestLayout:
    @pytest.mark.parametrize(("tokens", "page"), [(64, 37440), (2, 1728)])
    def test_sizes_of_the_published_model(self, tokens: int, page: int) -> None:
        assert token_bytes(512, 64) == (576, 8)
        assert page_bytes(512, 64, tokens) == page
        assert page % 576 == 0
        assert store_slots(torch.zeros(2, 3, page, dtype=torch.uint8), 512, 64) == 3 * tokens
        assert index_page_bytes(128, 64) == 64 * 132

    @pytest.mark.parametrize(
        ("K", "rope", "tokens"), [(512, 64, 64), (512, 64, 2), (128, 64, 4), (256, 32 * 2, 3), (704, 64, 5)]
    )
    def test_bytes(self, K: int, rope: int, tokens: int) -> None:
        """All data of a page before all scales; what is not written stays."""
        rows = rows_of(2, 3, K)
        slots = torch.tensor([[0, tokens + 1, 2 * tokens - 1], [tokens, -1, 1]])
        pages = torch.full((2, 2, page_bytes(K, rope, tokens)), 0xAB, dtype=torch.uint8)
        expected = pages.numpy().copy()
        write_pages(rows, slots, pages, rope)
        data_bytes, scale_bytes = token_bytes(K, rope)
        for b in range(2):
            for t, slot in enumerate(slots[b].tolist()):
                if slot < 0:
                    continue
                data, scales = token_of(rows[b, t], rope)
                page, at = expected[b, slot // tokens], slot % tokens
                page[at * data_bytes :][:data_bytes] = numpy.frombuffer(data, numpy.uint8)
                start = tokens * data_bytes + at * scale_bytes
                page[start : start + scale_bytes] = numpy.frombuffer(scales, numpy.uint8)
        assert (pages.numpy() == expected).all()

    def test_bytes_of_the_indexer(self) -> None:
        rows = rows_of(1, 3, 128)
        slots, tokens = torch.tensor([[1, 6, -1]]), 4
        pages = torch.full((1, 2, index_page_bytes(128, tokens)), 0xAB, dtype=torch.uint8)
        expected = pages.numpy().copy()
        write_pages(rows, slots, pages, None)
        for t, slot in enumerate(slots[0, :2].tolist()):
            row = rows[0, t].double().numpy()
            k = scale_of(row)
            page, at = expected[0, slot // tokens], slot % tokens
            page[at * 128 :][:128] = byte_of(row, k)
            page[tokens * 128 + 4 * at :][:4] = numpy.frombuffer(numpy.float32(2.0**k).tobytes(), numpy.uint8)
        assert (pages.numpy() == expected).all()

    def test_columns_that_are_no_groups(self) -> None:
        with pytest.raises(ValueError, match="96 columns without positions"):
            page_bytes(128, 32)

    def test_rows_beyond_two_gigabytes(self) -> None:
        """Memory that is never touched costs nothing."""
        page = page_bytes(128, 64, 64)
        memory = torch.empty(2**31 + 4 * page, dtype=torch.uint8)
        pages = memory.as_strided((2, 2, page), (2**31, page, 1))
        rows = rows_of(2, 1, 128)
        back = write_rows(pages, rows, torch.tensor([[3], [70]]), 64)
        assert torch.equal(cache_rows(pages, torch.tensor([[3], [70]]), 128, 64), back)
        data, _ = token_of(rows[1, 0], 64)
        assert memory[2**31 + page + 6 * 192 :][:192].numpy().tobytes() == data


class TestRows:
    @pytest.mark.parametrize("rope", [64, None])
    def test_pages(self, run: Runner, rope: int | None) -> None:
        K = 192
        pages = torch.zeros(2, 3, index_page_bytes(K, 4) if rope is None else page_bytes(K, rope, 4), dtype=torch.uint8)
        written = write_rows(pages, rows_of(2, 12, K), torch.stack([torch.randperm(12) for _ in range(2)]), rope)
        assert written.dtype == torch.bfloat16
        slots = torch.tensor([[3, -1, 11, 0, 3], [7, 7, -1, -1, 2]])
        rows = run(pages, slots, K, rope)
        assert torch.equal(rows, torch.where(slots[..., None] >= 0, read_pages(pages, slots, K, rope), 0))
        assert (rows[0, 1] == 0).all()

    @pytest.mark.parametrize("rope", [64, None])
    def test_every_code(self, run: Runner, rope: int | None) -> None:
        """All bytes, those that are no numbers included, at scales from the least on."""
        K, tokens = 192, 4
        pages = torch.zeros(1, 2, index_page_bytes(K, tokens) if rope is None else page_bytes(K, rope, tokens))
        pages = pages.to(torch.uint8)
        own = K if rope is None else K - rope
        codes = torch.arange(tokens * own, dtype=torch.int32).to(torch.uint8).view(tokens, own)
        data = pages[0, 1, : tokens * (K + (rope or 0))].view(tokens, -1)
        data[:, :own], data[:, own:] = codes, 0x40
        scales = torch.tensor([105, 119, 127, 141], dtype=torch.int32)
        stored = (scales << 23).view(torch.uint8) if rope is None else scales[:, None].repeat(1, 8).to(torch.uint8)
        pages[0, 1, data.numel() :][: stored.numel()] = stored.flatten()
        rows = run(pages, torch.arange(4, 8)[None], K, rope)[0].double().numpy()
        magnitude = (codes & 127).numpy()
        values = numpy.append(E4M3[:127], numpy.nan)[magnitude] * 2.0 ** (scales.numpy()[:, None] - 127)
        numpy.testing.assert_array_equal(rows[:, :own], numpy.where(codes.numpy() > 127, -values, values))
        assert (rows[:, own:] == 3.0).all()

    def test_pages_that_are_not_aligned(self, run: Runner) -> None:
        K, page = 192, index_page_bytes(192, 4)
        pages = torch.zeros(2, 3, page + 13, dtype=torch.uint8)[:, :, 5 : 5 + page]
        write_pages(rows_of(2, 12, K), torch.arange(12).repeat(2, 1), pages, None)
        run(pages, torch.tensor([[3, 11], [0, 9]]), K, None)

    @pytest.mark.parametrize("rope", [64, None])
    def test_what_is_given_back_is_what_is_read(self, rope: int | None) -> None:
        K = 128
        pages = torch.zeros(2, 3, index_page_bytes(K, 4) if rope is None else page_bytes(K, rope, 4), dtype=torch.uint8)
        slots = torch.tensor([[5, 0, 11], [2, 3, 4]])
        rows = rows_of(2, 3, K)
        back = write_rows(pages, rows, slots, rope)
        assert torch.equal(back, cache_rows(pages, slots, K, rope))
        own = K if rope is None else K - rope
        assert torch.equal(back[..., own:], rows[..., own:])
        groups = rows[..., :own].float().unflatten(-1, (-1, 64 if rope is not None else K))
        # Half a step of 3 bits below the group's largest value, or of the smallest code.
        bound = groups.abs().amax(-1, keepdim=True) * 2.0**-4 + 1e-6
        assert ((back[..., :own].float().view_as(groups) - groups).abs() <= bound).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_that_are_not_quantized(self, run: Runner, dtype: torch.dtype) -> None:
        store = torch.randn(2, 9, 12).to(dtype)[:, 1:, ::2]
        slots = torch.tensor([[0, 7, -1], [3, 3, 1]], dtype=torch.int32)
        rows = run(store, slots, 6, 2)
        assert torch.equal(rows[1], store[1, [3, 3, 1]])
        assert (rows[0, 2] == 0).all()
        store = store.clone()
        new = torch.randn(2, 2, 6)
        before = store.clone()
        assert torch.equal(write_rows(store, new, torch.tensor([[4, -1], [0, 5]]), 2), new.to(dtype))
        before[0, 4], before[1, 0], before[1, 5] = new[0, 0], new[1, 0], new[1, 1]
        assert torch.equal(store, before)


STORE, SLOTS = torch.zeros(2, 9, 128).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
PAGES = torch.zeros(2, 3, page_bytes(128, 64, 4), dtype=torch.uint8)
REFUSED = {
    "dimensions": ((STORE[0], SLOTS, 128, 64), "of store and slots do not go together"),
    "batch": ((STORE, SLOTS[:1], 128, 64), "of store and slots do not go together"),
    "fp64": ((STORE.double(), SLOTS, 128, 64), "store has dtype torch.float64"),
    "slots": ((STORE, SLOTS.short(), 128, 64), "slots have dtype torch.int16"),
    "columns": ((STORE, SLOTS, 64, 64), "the store has 128 columns, not 64"),
    "wide": ((torch.zeros(2, 9, 4097), SLOTS, 4097, 64), "4097 columns, not 1 to 4096"),
    "page stride": ((PAGES.mT.contiguous().mT, SLOTS, 128, 64), "the last dimension of pages has stride 3"),
    "groups": ((PAGES, SLOTS, 128, 32), "96 columns without positions"),
    "page": ((PAGES[..., :100], SLOTS, 128, 64), "pages of 100 bytes have no room for a token"),
    "gradient": ((STORE.clone().requires_grad_(), SLOTS, 128, 64), "no backward"),
}


@pytest.mark.parametrize(("given", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(given: tuple, why: str) -> None:
    assert refusal(cache_rows, STORE, SLOTS, 128, 64) == refusal(cache_rows, PAGES, SLOTS, 128, 64) == ""
    assert why in refusal(cache_rows, *given)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_pages, "AVAILABLE", False)
    monkeypatch.setattr(fp8_pages, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(cache_rows, STORE, SLOTS, 128, 64)
