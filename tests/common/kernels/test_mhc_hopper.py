"""`mhc_post_products` on NVIDIA's Hopper: which calls the kernel takes, and, on any machine, what it compiles to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.common.hopper_code import SHARED_MEMORY, hopper_code
from xpu_ports.common import gluonlib
from xpu_ports.common.device import use_architecture
from xpu_ports.common.kernels.mhc import hopper, products, products_save_time

PROGRAM = """
    from xpu_ports.common.kernels.mhc import hopper

    kernel = hopper._mhc_post_kernel = Compiled(hopper._mhc_post_kernel)
    hopper._split_kernel = Nothing()
    for tokens, D, R in (1024, 4096, 24), (4096, 4096, 24):
        y, x, out = (torch.empty(tokens, *s, D, dtype=torch.bfloat16, device="meta") for s in ((), (4,), (4,)))
        shapes = (4,), (4, 4), (D // 512, R + 1)
        post, comb, part = (torch.empty(tokens, *s, device="meta") for s in shapes)
        with use_architecture("nvidia"):
            hopper.launch(y, x, post, comb, torch.empty(R, 4 * D, device="meta"), out, part)
        kernel.report(tokens=tokens)
"""


def test_what_is_compiled() -> None:
    one, two = hopper_code(PROGRAM)
    assert (one["tokens"], two["tokens"]) == (1024, 4096)
    for line, tiles in (one, 1), (two, 2):
        assert line["shared"] <= SHARED_MEMORY
        assert not {"STL", "LDL"} & line.keys(), f"registers are spilled: {line}"
        # Four streams' 64 columns, 16 at a time; a step waits for the one before, and the last for itself.
        assert line["HGMMA"] == 16 * tiles
        assert line["WARPGROUP.DEPBAR"] == tiles + 1, f"products one by one: {line}"
        assert (line["UTMALDG"], line["UTMASTG"]) == (4 + 5 * tiles, 4 * tiles)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluonlib, "refuses", lambda device: None)


def given(tokens: int, D: int = 512, R: int = 24) -> dict[str, Tensor]:
    y, x = (torch.empty(tokens, *s, D, dtype=torch.bfloat16) for s in ((), (4,)))
    return dict(y=y, x=x, fn=torch.empty(R, 4 * D))


def refusal(**changed: Tensor) -> str | None:
    return hopper.refuses(**{**given(1024), **changed}, columns=512)


@pytest.mark.usefixtures("on_hopper")
def test_what_is_taken() -> None:
    assert refusal() is None
    x = torch.empty(2, 512, 4, 512, dtype=torch.bfloat16)
    assert refusal(x=x, y=x[:, :, 0].contiguous()) is None
    # Tokens of a wider tensor, one stride apart.
    assert refusal(y=torch.empty(1024, 4096, dtype=torch.bfloat16)[:, 8:520]) is None
    assert refusal(fn=torch.empty(32, 2048)) is None


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


REFUSED = {
    "tokens": (dict(x=_bf16(1023, 4, 512), y=_bf16(1023, 512)), "1023 tokens"),
    "dtype": (dict(x=torch.empty(1024, 4, 512)), "not bfloat16"),
    "output's dtype": (dict(y=torch.empty(1024, 512)), "not bfloat16"),
    "streams": (dict(x=_bf16(1024, 3, 512)), "3 streams"),
    "columns": (dict(x=_bf16(1024, 4, 768), y=_bf16(1024, 768)), "768 columns"),
    "rows": (dict(fn=torch.empty(33, 2048)), "33 rows"),
    "streams apart": (dict(x=_bf16(4, 1024, 512).transpose(0, 1)), "not side by side"),
    "tokens apart": (dict(y=_bf16(4, 512, 512)[::2].view(2, 512, 512), x=_bf16(2, 512, 4, 512)), "not side by side"),
    "stride": (dict(y=_bf16(1024, 516)[:, :512]), "multiples of 16 bytes"),
    "address": (dict(y=_bf16(1024, 1024)[:, 1:513]), "multiples of 16 bytes"),
    "one for all": (dict(y=_bf16(512).expand(1024, 512)), "multiples of 16 bytes"),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(changed: dict[str, Tensor], why: str) -> None:
    assert why in (refusal(**changed) or "")


def test_elsewhere_it_is_refused() -> None:
    assert refusal()


def test_tiles() -> None:
    """Two at a time, but where that takes longer."""
    units = 132
    assert [hopper.tiles_each(N, 8, units) for N in (1024, 1500, 2048, 2560, 4096, 16384)] == [1, 2, 2, 1, 2, 2]
    assert hopper.fills(1024, 8, units)
    assert not hopper.fills(1024, 4, units)


@pytest.mark.usefixtures("on_hopper")
def test_where_products_save_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def saves(tokens: int, D: int) -> bool:
        return products_save_time(**given(tokens, D))

    with use_architecture("nvidia"):
        assert [saves(n, 4096) for n in (8, 9, 1023, 1024)] == [True, False, False, True]
        # A unit of eight has a tile.
        assert not saves(1024, 512)
        graded = {name: t.requires_grad_() for name, t in given(1024, 4096).items()}
        assert not products_save_time(**graded)
        with torch.no_grad():
            assert products_save_time(**graded)
    monkeypatch.setattr(gluonlib, "refuses", lambda device: "not here")
    assert saves(products.SEVERAL_TOKENS, 512)
    assert not saves(1024, 4096)
