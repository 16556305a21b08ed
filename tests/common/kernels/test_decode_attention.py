"""decode_attention: numbers, groups, masks, caches with room, splits, what is loaded, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.common.ops import LAYOUTS, Runner, normal, refusal
from xpu_ports.common import accuracy, tritonlib
from xpu_ports.common.device import ARCHITECTURES, Architecture
from xpu_ports.common.dispatch import BackendError, use_backend
from xpu_ports.common.kernels import decode_attention as module
from xpu_ports.common.kernels.decode_attention import LARGEST_HEAD, MOST_SPLITS, NEVER, decode_attention

pytestmark = pytest.mark.op("decode_attention")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# G key heads; the keys of a block are 32 for heads of 128 without matrix units.
SIZES = [
    dict(B=1, H=1, G=1, S=1, K=1, V=1),
    dict(B=2, H=3, G=3, S=33, K=128, V=128),
    dict(B=1, H=2, G=2, S=37, K=160, V=160),
    dict(B=1, H=1, G=1, S=13, K=224, V=224),
    dict(B=1, H=1, G=1, S=17, K=256, V=256),
    dict(B=2, H=2, G=1, S=31, K=64, V=40),
    dict(B=1, H=6, G=2, S=19, K=24, V=96),
    dict(B=1, H=5, G=1, S=67, K=16, V=16),
    dict(B=1, H=8, G=1, S=61, K=64, V=64),
    dict(B=2, H=32, G=2, S=33, K=80, V=48),
    dict(B=1, H=17, G=1, S=5, K=64, V=128),
]


def arguments(size: dict, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> dict[str, Any]:
    """One call's, by name, without a mask."""
    B, H, G, S, K, V = size.values()
    return dict(
        q=normal(B, H, K, dtype=dtype, layout=layout),
        k=normal(B, G, S, K, dtype=dtype, layout=layout),
        v=normal(B, G, S, V, dtype=dtype, layout=layout),
        mask=None,
        scale=K**-0.5,
    )


def additive(counts: Tensor, dtype: torch.dtype, off: float = float("-inf")) -> Tensor:
    """A mask that also moves the scores of the keys that count."""
    return torch.where(counts, torch.randn(counts.shape), off).to(dtype)


def cut(rows: int, keys: int, *ranges: range) -> Tensor:
    """[rows, keys], True but for the keys of each row's range."""
    counts = torch.ones(rows, keys, dtype=torch.bool)
    for row, off in enumerate(ranges):
        counts[row, list(off)] = False
    return counts


# A block is at most 128 keys; programs take blocks in turn.
MASKS = {
    "left padding": cut(3, 150, range(5), range(0), range(149)),
    "unused capacity": cut(3, 150, range(70, 150), range(70, 150), range(70, 150)),
    "blocks in the middle": cut(3, 150, range(1, 149), range(32, 96), range(64, 128)),
    "one row for all": cut(1, 150, range(10, 100)),
    "nothing in two rows": cut(3, 150, range(150), range(60), range(150)),
    "every other": (torch.arange(450) % 2 == 0).view(3, 150),
}


@FLOATS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    run(**arguments(size, dtype))


@pytest.mark.full
@FLOATS
@pytest.mark.parametrize(
    "size",
    [dict(B=2, H=8, G=g, S=s, K=k, V=k) for g in (1, 4, 8) for s in (1, 129, 1021) for k in (64, 128, 160, 224, 256)],
)
def test_more_sizes(run: Runner, size: dict, dtype: torch.dtype) -> None:
    given = arguments(size, dtype)
    run(**given)
    run(**given | dict(mask=additive(cut(2, size["S"], range(size["S"] // 3), range(size["S"] // 2)), dtype)))


@pytest.mark.parametrize("H", [3, 24], ids=["heads", "group8"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("counts", MASKS.values(), ids=MASKS)
def test_masks(run: Runner, counts: Tensor, kind: str, H: int) -> None:
    """Keys that do not count have no effect, and rows without any give 0."""
    given = arguments(dict(B=3, H=H, G=3, S=150, K=16, V=16), torch.bfloat16)
    y = run(**given | dict(mask=counts if kind == "bool" else additive(counts, torch.bfloat16)))
    empty = ~counts.any(dim=1).expand(3)
    assert (y[empty] == 0).all()
    assert (y[~empty] != 0).any(dim=-1).all()


@pytest.mark.parametrize("H", [2, 16], ids=["heads", "group8"])
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_slots_that_do_not_count_may_hold_anything(run: Runner, odd: float, kind: str, H: int) -> None:
    given = arguments(dict(B=2, H=H, G=2, S=70, K=16, V=16), torch.bfloat16)
    counts = cut(2, 70, range(3), range(40, 70))
    mask = counts if kind == "bool" else additive(counts, torch.float32)
    clean = run(**given | dict(mask=mask))
    for name in "kv":
        given[name].masked_fill_(~counts[:, None, :, None], odd)
    assert torch.equal(run(**given | dict(mask=mask)), clean)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("H", [2, 16], ids=["heads", "group8"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_not_a_number_that_counts_shows(run: Runner, where: str, H: int) -> None:
    """And stays in its head."""
    given = arguments(dict(B=1, H=H, G=2, S=40, K=16, V=16), torch.bfloat16)
    given[where][:, 0] = float("nan")
    y = run(**given)
    heads = 1 if where == "q" else H // 2
    assert y[:, :heads].isnan().all()
    assert y[:, heads:].isfinite().all()


@FLOATS
def test_the_lowest_number_is_never(run: Runner, dtype: torch.dtype) -> None:
    """A mask of -inf and one of the dtype's lowest number are one, in rows where no key counts as well."""
    given = arguments(dict(B=2, H=2, G=2, S=40, K=16, V=16), dtype)
    counts = cut(2, 40, range(9), range(40))
    lowest = torch.zeros(2, 40, dtype=dtype).masked_fill(~counts, torch.finfo(dtype).min)
    y = run(**given | dict(mask=lowest))
    assert torch.equal(y, run(**given | dict(mask=lowest.masked_fill(~counts, float("-inf")))))
    assert torch.equal(y, run(**given | dict(mask=counts)))
    assert (y[1] == 0).all()


def test_a_low_number_is_added(run: Runner) -> None:
    """Just above the limit keys count, also where all are as low; at the limit they do not."""
    # No scores of their own: their last bits would be lost beside a number as large.
    given = arguments(dict(B=1, H=1, G=1, S=3, K=16, V=16)) | dict(q=torch.zeros(1, 1, 16))
    assert (run(**given | dict(mask=torch.full((1, 3), NEVER + 1.0))) != 0).all()
    assert (run(**given | dict(mask=torch.full((1, 3), NEVER))) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.bool])
def test_dtype_of_the_mask(run: Runner, dtype: torch.dtype) -> None:
    counts = cut(2, 40, range(9), range(20, 30))
    mask = counts if dtype == torch.bool else additive(counts, dtype)
    y = run(**arguments(dict(B=2, H=2, G=2, S=40, K=16, V=16), torch.bfloat16) | dict(mask=mask))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("H", [4, 32], ids=["group2", "group16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run: Runner, layout: str, H: int) -> None:
    run(**arguments(dict(B=2, H=H, G=2, S=19, K=24, V=16), torch.bfloat16, layout))


@pytest.mark.parametrize("H", [4, 32], ids=["group2", "group16"])
@pytest.mark.parametrize("order", ["heads first", "tokens first"])
def test_a_cache_with_room(run: Runner, order: str, H: int) -> None:
    """Keys and values are the filled part of a static cache, queries and mask views too; the rest is NaN."""
    given = arguments(dict(B=2, H=H, G=2, S=37, K=24, V=16), torch.bfloat16)
    for name in "kv":
        _, G, S, K = given[name].shape
        cache = torch.full((3, G, 64, K) if order == "heads first" else (3, 64, G, K), float("nan")).bfloat16()
        view = (cache if order == "heads first" else cache.transpose(1, 2))[1:, :, 5 : 5 + S]
        given[name] = view.copy_(given[name])
    projection = torch.randn(2, 1, 3 * H * 24).bfloat16()
    q = projection[:, 0, H * 24 : 2 * H * 24].unflatten(-1, (H, 24))
    mask = additive(cut(2, 64, range(11)), torch.bfloat16)[:, 5:42]
    run(**given | dict(q=q, mask=mask))
    run(**given | dict(q=q, mask=mask[1:].expand(2, -1)))
    run(**given | dict(q=q, mask=mask[1:]))


def test_strided_mask(run: Runner) -> None:
    mask = additive(cut(40, 2, *[range(2)] * 9), torch.float32).T
    run(**arguments(dict(B=2, H=2, G=2, S=40, K=16, V=16)) | dict(mask=mask))


@pytest.mark.parametrize("size", [dict(B=0, H=2, G=1, S=7, K=8, V=8), dict(B=2, H=4, G=2, S=0, K=8, V=8)])
def test_no_rows_or_no_keys(run: Runner, size: dict) -> None:
    given = arguments(size)
    for mask in (None, torch.zeros(1, size["S"])):
        y = run(**given | dict(mask=mask))
        assert y.shape == (size["B"], size["H"], 8)
        assert (y == 0).all()


@pytest.mark.parametrize("H", [2, 16], ids=["heads", "group8"])
def test_large_scores(run: Runner, H: int) -> None:
    """Where one key takes all, wherever it stands; no exponential overflows."""
    for at in (0, 33, 69):
        given = arguments(dict(B=1, H=H, G=2, S=70, K=16, V=16), torch.bfloat16)
        given["q"] = given["q"][:, :2].repeat_interleave(H // 2, dim=1)
        given["k"][:, :, at] = 1e4 * given["q"][:, :: H // 2]
        assert torch.equal(run(**given), given["v"][:, :, at].repeat_interleave(H // 2, dim=1))


def test_scale(run: Runner) -> None:
    """0 gives the mean of the values; the sign counts."""
    given = arguments(SIZES[1])
    mean = given["v"].double().mean(dim=2)
    accuracy.assert_close(run(**given | dict(scale=0.0)), mean.float(), mean)
    run(**given | dict(scale=-0.3))


def by_number(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One number at a time, fp64."""
    (B, H, K), (_, G, S, V) = q.shape, v.shape
    y = torch.zeros(B, H, V, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            scores = [
                scale * sum(float(q[b, h, i] * k[b, g, s, i]) for i in range(K)) + float(mask[b, s]) for s in range(S)
            ]
            weights = [math.exp(score) for score in scores]
            for j in range(V):
                y[b, h, j] = sum(w * float(v[b, g, s, j]) for s, w in enumerate(weights)) / sum(weights)
    return y


def test_formula() -> None:
    q, k, v = (torch.randn(*s, dtype=torch.float64) for s in ((2, 6, 5), (2, 2, 7, 5), (2, 2, 7, 3)))
    mask = additive(cut(2, 7, range(2), range(4, 6)), torch.float64)
    expected = by_number(q, k, v, mask, 0.4)
    accuracy.assert_close(decode_attention.reference(q, k, v, mask, 0.4), expected, expected)


@FLOATS
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_as_pytorch(run: Runner, kind: str, dtype: torch.dtype) -> None:
    """What `scaled_dot_product_attention` gives, within the budget: it rounds once too."""
    given = arguments(dict(B=2, H=6, G=2, S=45, K=32, V=24), dtype)
    counts = cut(2, 45, range(9), range(40, 45))
    mask = dict(none=None, bool=counts, additive=additive(counts, dtype))[kind]
    y = run(**given | dict(mask=mask))
    exact = accuracy.to_double(list(given.values())[:3])
    wide = mask.double() if kind == "additive" else mask
    theirs = torch.nn.functional.scaled_dot_product_attention(
        exact[0][:, :, None],
        *exact[1:],
        None if wide is None else wide[:, None, None],
        scale=given["scale"],
        enable_gqa=True,
    )[:, :, 0]
    accuracy.assert_close(y, theirs.to(dtype), theirs)


def test_gradients_of_the_reference() -> None:
    """Of keys that do not count they are 0, whatever the slots hold."""
    q, k, v = (torch.randn(*s, dtype=torch.float64) for s in ((2, 4, 3), (2, 2, 5, 3), (2, 2, 5, 2)))
    counts = cut(2, 5, range(2), range(5))
    for t in (k, v):
        t.masked_fill_(~counts[:, None, :, None], float("nan"))
    for t in (q, k, v):
        t.requires_grad_()
    grads = torch.autograd.grad(decode_attention(q, k, v, counts, 0.5).square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1].masked_select(~counts[:, None, :, None]) == 0).all()
    assert torch.autograd.gradcheck(lambda q: decode_attention(q, k, v, counts, 0.5), (q,))


# --------------------------------------------------------------------------------------------------- how it is split


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("programs", [1, 8, 32, 100, 1024])
@pytest.mark.parametrize("S", [1, 31, 33, 256, 2048, 100_000])
def test_split(arch: Architecture, programs: int, S: int) -> None:
    """Every part has a block, none has two more than another, and there are no more than fill the device."""
    blocks = -(-S // 32)
    parts = module.split(arch, programs, S, 32)
    assert 1 <= parts <= min(blocks, MOST_SPLITS)
    assert -(-blocks // parts) - blocks // parts <= 1
    assert parts == 1 or programs * (parts - 1) < 4 * arch.units


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@FLOATS
def test_tile(arch: Architecture, dtype: torch.dtype) -> None:
    """Blocks are powers of two, and leave a lane no more sums than its registers hold."""
    most = {"arc-a": 4, "max": 8, "xe2": 8, "nvidia": 32, "cpu": 32}[arch.name]
    for M in (1, 2, 3, 7, 8, 16, 71):
        for K, V in ((1, 1), (64, 64), (128, 64), (160, 160), (256, 256), (32, 256)):
            dot, queries, keys, warps = module.tile(arch, dtype, M, K, V)
            assert all(n & (n - 1) == 0 and n > 0 for n in (queries, keys, warps))
            assert dot == (not arch.has_grf_modes and dtype != torch.float32)
            assert queries == 16 if dot else queries * keys * max(K, V) <= most * warps * arch.lanes


@pytest.mark.parametrize("splits", [1, 3, 5])
@pytest.mark.parametrize("H", [3, 24], ids=["heads", "group8"])
def test_any_split_is_right(run: Runner, splits: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also parts without a key that counts, and rows of which none has one."""
    if run.target.backend == "reference":
        pytest.skip("the reference has no parts")
    chosen = module.tile

    def tile(*args: Any) -> tuple[bool, int, int, int]:
        dot, queries, _, warps = chosen(*args)
        return dot, queries, 32, warps

    monkeypatch.setattr(module, "tile", tile)
    monkeypatch.setattr(module, "split", lambda *args: splits)
    given = arguments(dict(B=2, H=H, G=3, S=150, K=16, V=16), torch.bfloat16)
    run(**given)
    run(**given | dict(mask=additive(cut(2, 150, range(40, 150), range(150)), torch.bfloat16)))


@pytest.mark.skipif(not tritonlib.INTERPRETED, reason="loads are counted in Triton's interpreter")
@pytest.mark.parametrize("H", [2, 16], ids=["heads", "group8"])
def test_keys_that_do_not_count_are_not_loaded(H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    loaded = []
    load = InterpreterBuilder.create_masked_load

    def counted(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        loaded.append(int(mask.data.sum()))
        return load(self, ptrs, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    given = arguments(dict(B=1, H=H, G=2, S=300, K=16, V=16), torch.bfloat16)
    # Of a bool mask, in a single part: the queries, the mask and what the keys and values of both heads take.
    monkeypatch.setattr(module, "split", lambda *args: 1)
    with use_backend("triton"):
        decode_attention(**given | dict(mask=cut(1, 300, range(70, 300))))
    assert sum(loaded) == H * 16 + 2 * 300 + 2 * 70 * (16 + 16)


# ----------------------------------------------------------------------------------------------------------- refusals

GOOD = arguments(dict(B=2, H=4, G=2, S=5, K=6, V=3)) | dict(mask=torch.zeros(2, 5))
WIDE = LARGEST_HEAD + 1
REFUSED = {
    "fp64": (dict(q=GOOD["q"].double()), "dtype torch.float64 is not one of"),
    **{f"{name} dtype": ({name: GOOD[name].half()}, "of q, k and v differ") for name in "kv"},
    "dimensions": (dict(q=torch.zeros(2, 4, 1, 6)), "4, 4 and 4 dimensions"),
    **{f"{name} stride": ({name: GOOD[name].mT.contiguous().mT}, f"dimension of {name} has stride") for name in "qkv"},
    "batch": (dict(q=torch.zeros(3, 4, 6)), "do not go together"),
    "width": (dict(q=torch.zeros(2, 4, 5)), "do not go together"),
    "keys": (dict(v=torch.zeros(2, 2, 6, 3)), "do not go together"),
    "heads": (dict(q=torch.zeros(2, 5, 6)), "do not go together"),
    "no heads": (dict(k=torch.zeros(2, 0, 5, 6), v=torch.zeros(2, 0, 5, 3)), "do not go together"),
    "wide keys": (dict(q=torch.zeros(2, 4, WIDE), k=torch.zeros(2, 2, 5, WIDE)), "heads of 257 and 3, more than 256"),
    "wide values": (dict(v=torch.zeros(2, 2, 5, WIDE)), "heads of 6 and 257, more than 256"),
    "mask per head": (dict(mask=torch.zeros(2, 1, 5)), "mask has shape (2, 1, 5), expected (2 or 1, 5)"),
    "mask keys": (dict(mask=torch.zeros(2, 6)), "mask has shape (2, 6)"),
    "mask rows": (dict(mask=torch.zeros(4, 5)), "mask has shape (4, 5)"),
    "mask fp64": (dict(mask=torch.zeros(2, 5).double()), "mask has dtype torch.float64"),
    "mask int": (dict(mask=torch.zeros(2, 5).long()), "mask has dtype torch.int64"),
    "gradient": (dict(q=GOOD["q"].clone().requires_grad_()), "no backward"),
}


@pytest.mark.parametrize(("changed", "why"), REFUSED.values(), ids=REFUSED)
def test_refusals(changed: dict, why: str) -> None:
    assert why in refusal(decode_attention, **GOOD | changed)


def test_refusal_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AVAILABLE", False)
    monkeypatch.setattr(module, "WHY_NOT", "Triton cannot be imported: no module")
    assert "no module" in refusal(decode_attention, **GOOD)


@pytest.mark.parametrize("K", [128, 160, 224])
def test_taken(K: int) -> None:
    """Zamba2's heads are, and the call that the refusals above differ from in one thing each."""
    assert refusal(decode_attention, **GOOD) == ""
    assert refusal(decode_attention, **GOOD | dict(mask=torch.ones(1, 5, dtype=torch.bool))) == ""
    assert refusal(decode_attention, **arguments(dict(B=1, H=32, G=32, S=9, K=K, V=K), torch.bfloat16)) == ""


def test_forced_without_a_backward(run: Runner) -> None:
    if run.target.backend == "reference":
        pytest.skip("the reference is differentiable")
    given = {k: v.to(run.target.device) if isinstance(v, Tensor) else v for k, v in GOOD.items()}
    given["k"].requires_grad_()
    with use_backend(run.target.backend), pytest.raises(BackendError, match="no backward"):
        decode_attention(**given)
