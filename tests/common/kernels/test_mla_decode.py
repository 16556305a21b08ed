"""mla_decode: numbers beside the oracle, masks, how the keys are split, what it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import Runner, refusal
from xpu_ports.common import accuracy
from xpu_ports.common.device import ARCHITECTURES, Architecture
from xpu_ports.common.kernels import mla_decode as module
from xpu_ports.common.kernels.mla_decode import MOST_SPLITS, mla_decode

pytestmark = pytest.mark.op("mla_decode")

SIZES = [
    dict(B=1, H=1, S=1, R=16, K=0),
    dict(B=2, H=4, S=70, R=20, K=4),
    dict(B=3, H=17, S=33, R=64, K=16),
    dict(B=1, H=32, S=129, R=48, K=7),
]
SMALL = dict(B=2, H=3, S=70, R=20, K=4)


def arguments(size: dict, dtype: torch.dtype = torch.bfloat16, **given: Any) -> dict[str, Any]:
    """The op's arguments by name; `given` replaces some."""
    B, H, S, R, K = size.values()
    made = dict(q=torch.randn(B, H, R + K).to(dtype), rows=torch.randn(B, S, R + K).to(dtype), mask=None, latent=R)
    return made | dict(scale=(R + K) ** -0.5) | given


def cut(B: int, S: int, *empty: range) -> Tensor:
    """A mask of all but some slots, one range a row; the last serves the rows behind it too."""
    counts = torch.ones(B, S, dtype=torch.bool)
    for b in range(B):
        counts[b, list(empty[min(b, len(empty) - 1)])] = False
    return counts


@pytest.fixture
def attend(run: Runner) -> Runner:
    """The kernel rounds the weights to the inputs' dtype before it sums the values with them."""
    run.rounds_once = run.target.backend == "reference"
    return run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
@pytest.mark.parametrize("size", SIZES)
def test_sizes(attend: Runner, size: dict, kind: str, dtype: torch.dtype) -> None:
    counts = cut(size["B"], size["S"], range(size["S"] // 3), range(size["S"] // 2, size["S"] - 1))
    additive = torch.randn(counts.shape).masked_fill(~counts, float("-inf"))
    mask = dict(none=None, bool=counts, additive=additive)[kind]
    y = attend(**arguments(size, dtype, mask=mask))
    assert y.dtype == dtype


def test_as_attention_on_expanded_keys() -> None:
    """What `scaled_dot_product_attention` gives where every head has the rows for keys and their start for values."""
    given = arguments(SMALL, torch.float64)
    q, rows = given["q"], given["rows"]
    k, v = (t[:, None].expand(-1, 3, -1, -1) for t in (rows, rows[..., :20]))
    theirs = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=given["scale"])[:, :, 0]
    accuracy.assert_close(mla_decode(**given), theirs, theirs)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_slots_that_do_not_count_may_hold_anything(attend: Runner, odd: float) -> None:
    given = arguments(SMALL, mask=cut(2, 70, range(3), range(40, 70)))
    clean = attend(**given)
    given["rows"].masked_fill_(~given["mask"][..., None], odd)
    assert torch.equal(attend(**given), clean)


def test_a_row_without_keys_gives_zero(attend: Runner) -> None:
    y = attend(**arguments(SMALL, mask=cut(2, 70, range(70), range(9))))
    assert (y[0] == 0).all()
    assert (y[1] != 0).any(-1).all()
    assert (attend(**arguments(SMALL | dict(S=0))) == 0).all()
    assert attend(**arguments(SMALL | dict(B=0))).shape == (0, 3, 20)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_not_a_number_that_counts_shows_in_its_sequence_alone(attend: Runner) -> None:
    given = arguments(SMALL)
    given["rows"][0, 5, 21] = float("nan")
    y = attend(**given)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    given = arguments(SMALL)
    given["q"][1, 2, 0] = float("nan")
    y = attend(**given)
    assert y[1, 2].isnan().all()
    assert y[0].isfinite().all()
    assert y[1, :2].isfinite().all()


def test_a_cache_with_room(attend: Runner) -> None:
    """Rows are the filled part of a wider cache whose rest is NaN; queries and mask are views too."""
    B, H, S, R, K = SMALL.values()
    cache = torch.full((3, 1, 96, R + K + 8), float("nan")).bfloat16()
    given = arguments(SMALL)
    rows = cache[1:, 0, 5 : 5 + S, 8:]
    q = torch.randn(B, 2 * H, R + K).bfloat16()[:, ::2]
    mask = cut(2, 96, range(11))[:, 5 : 5 + S]
    given |= dict(q=q, rows=rows.copy_(given["rows"]), mask=mask)
    attend(**given)
    attend(**given | dict(mask=mask[1:].expand(2, -1)))
    attend(**given | dict(mask=mask[1:]))


def test_one_key_takes_all(attend: Runner) -> None:
    """Wherever it stands; no exponential overflows."""
    for at in (0, 33, 69):
        given = arguments(SMALL)
        given["q"] = given["q"][:, :1].repeat(1, 3, 1)
        given["rows"][:, at] = 100 * given["q"][:, 0]
        expected = given["rows"][:, None, at, :20].expand(-1, 3, -1)
        assert torch.equal(attend(**given | dict(scale=10.0)), expected)


@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("chunk", [16, 32])
def test_any_split_is_right(attend: Runner, splits: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts without a key that counts, rows of which none has one, and queries in pieces."""
    if attend.target.backend == "reference":
        pytest.skip("the reference has no parts")
    monkeypatch.setattr(module, "tile", lambda *args: module.Tile(16, 32, chunk, 4))
    monkeypatch.setattr(module, "split", lambda *args: splits)
    given = arguments(SMALL | dict(S=150))
    attend(**given)
    attend(**given | dict(mask=cut(2, 150, range(40, 150), range(150))))


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("programs", [1, 8, 100, 1024])
@pytest.mark.parametrize("S", [1, 31, 65, 2048, 100_000])
def test_split(arch: Architecture, programs: int, S: int) -> None:
    """Every part has a block, none has two more than another, and there are no more than fill the device."""
    blocks = -(-S // 64)
    parts = module.split(arch, programs, S, 64)
    assert 1 <= parts <= min(blocks, MOST_SPLITS)
    assert -(-blocks // parts) - blocks // parts <= 1
    assert parts == 1 or programs * (parts - 1) < 2 * arch.units


GOOD = arguments(SMALL, mask=torch.ones(2, 70, dtype=torch.bool))
REFUSED = {
    "fp32": (dict(q=GOOD["q"].float()), "dtype torch.float32 is not one of"),
    "dtypes": (dict(rows=GOOD["rows"].half()), "of q and rows differ"),
    "dimensions": (dict(rows=GOOD["rows"][:, None]), "do not go together"),
    "batch": (dict(rows=GOOD["rows"][:1]), "do not go together"),
    "width": (dict(rows=GOOD["rows"][..., 1:]), "do not go together"),
    "no latent": (dict(latent=0), "0 and 24 columns, not 1 to 512 and 0 to 128"),
    "latent": (dict(latent=25), "25 and -1 columns"),
    "wide rest": (dict(q=torch.zeros(2, 3, 149).bfloat16(), rows=torch.zeros(2, 70, 149).bfloat16()), "20 and 129"),
    "q stride": (dict(q=torch.zeros(2, 24, 3).bfloat16().mT), "the last dimension of q has stride 3"),
    "rows stride": (dict(rows=torch.zeros(2, 24, 70).bfloat16().mT), "the last dimension of rows has stride 70"),
    "mask keys": (dict(mask=torch.zeros(2, 71)), "mask has shape (2, 71), expected (2 or 1, 70)"),
    "mask fp64": (dict(mask=torch.zeros(2, 70).double()), "mask has dtype torch.float64"),
    "gradient": (dict(q=GOOD["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert refusal(mla_decode, **GOOD) == ""
    assert why in refusal(mla_decode, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(mla_decode, **GOOD)


def test_taken() -> None:
    """The published model's sizes are."""
    assert refusal(mla_decode, **arguments(dict(B=1, H=32, S=9, R=512, K=64))) == ""
