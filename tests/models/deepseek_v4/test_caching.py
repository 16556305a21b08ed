"""The cache: going back, beams, other batches, reset, growth, bytes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM
from xpu_ports.models.deepseek_v4.caching import ROLLBACK
from xpu_ports.models.deepseek_v4.configuration_checks import DEEPSEEK_V4_CHECKS

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def model():
    return DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 2000, shape)


def logits(model, ids: Tensor, cache: DeepseekV4Cache, mask: Tensor | None = None) -> Tensor:
    return model(ids, cache=cache, use_cache=True, attention_mask=mask).logits


def assert_goes_on(model, cache: DeepseekV4Cache, ids: Tensor) -> None:
    """What comes next is what it is after the tokens `ids` [B, N], in one piece and token by token."""
    more = tokens(ids.shape[0], 19)
    expected = model(torch.cat([ids, more], 1)).logits[:, ids.shape[1] :]
    got = [logits(model, piece, cache) for piece in more.split([7, *[1] * 12], dim=1)]
    assert (torch.cat(got, 1) - expected).abs().max() <= CLOSE


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("removed", [1, 3, 4, 17, ROLLBACK])
def test_crop(model, removed, dtype):
    """Other tokens were there, through the ends of windows of 4 and 16; not a bit of them stays."""
    ids, wrong = tokens(2, 90), tokens(2, removed)
    cropped, plain = DeepseekV4Cache(model.config, dtype), DeepseekV4Cache(model.config, dtype)
    for cache in (cropped, plain):
        logits(model, ids, cache)
    for piece in wrong.split([max(1, removed // 2), *[1] * (removed - max(1, removed // 2))], dim=1):
        logits(model, piece, cropped)
    cropped.crop(-removed)
    assert cropped.get_seq_length() == 90
    for piece in tokens(2, 25).split([5, *[1] * 20], dim=1):
        assert torch.equal(logits(model, piece, cropped), logits(model, piece, plain))


def test_crop_of_padded_columns(model):
    """Rows lose as many tokens as counted in the columns taken back."""
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :13] = 0
    mask[1, 50:55] = 0
    cache = DeepseekV4Cache(model.config)
    logits(model, ids[:, :48], cache, mask[:, :48])
    logits(model, ids[:, 48:], cache, mask)
    cache.crop(-9)
    assert cache.lengths.tokens.tolist() == [51 - 13, 51 - 1]
    more = tokens(2, 6)
    seen = torch.cat([mask[:, :51], torch.ones(2, 6, dtype=torch.int64)], 1)
    got = logits(model, more, cache, seen)
    for b in range(2):
        row = torch.cat([ids[b, :51][mask[b, :51].bool()], more[b]])[None]
        assert (got[b] - model(row).logits[0, -6:]).abs().max() <= CLOSE


def test_crop_of_all_and_of_too_many(model):
    cache = DeepseekV4Cache(model.config)
    logits(model, tokens(1, 50), cache)
    with pytest.raises(ValueError, match="at most 32 tokens, or all; 33 of 50"):
        cache.crop(-ROLLBACK - 1)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(20)
    cache.crop(0)
    assert cache.get_seq_length() == 50
    cache.crop(-50)
    assert cache.get_seq_length() == 0
    assert_goes_on(model, cache, logits_after(model, cache, 30))


def test_crop_again(model):
    """What the rings wrote over does not come back: steps back add up, until other tokens are where they went to."""
    ids = tokens(1, 90)
    cache = DeepseekV4Cache(model.config)
    logits(model, ids, cache)
    cache.crop(-20)
    with pytest.raises(ValueError, match="20 of 70, 40 before the last that were there"):
        cache.crop(-20)
    cache.crop(-12)
    ids = torch.cat([ids[:, :58], tokens(1, 33)], dim=1)
    logits(model, ids[:, 58:], cache)
    cache.crop(-ROLLBACK)
    assert_goes_on(model, cache, ids[:, :59])


def test_what_compressors_keep_is_wide():
    """Their inputs and averages are fp32 in a model in bf16, as in training; rows of attention are not."""
    model = DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16).eval()
    cache = DeepseekV4Cache(model.config)
    logits(model, tokens(1, 20), cache)
    for name, t in parts(cache).items():
        assert t.dtype == (torch.float32 if "state" in name else torch.bfloat16), name
    state = cache.layers[2].state
    assert (state != state.bfloat16()).any()


def logits_after(model, cache: DeepseekV4Cache, N: int) -> Tensor:
    ids = tokens(1, N)
    logits(model, ids, cache)
    return ids


def test_reset(model):
    cache = DeepseekV4Cache(model.config)
    logits(model, tokens(2, 77), cache)
    cache.reset()
    ids = tokens(2, 33)
    logits(model, ids, cache)
    assert_goes_on(model, cache, ids)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_reorder(model, dtype):
    # In fp64: in another row of a batch a sum may be rounded otherwise, and in fp32 an entry then to the next of fp8.
    model = copy.deepcopy(model).double()
    ids = tokens(3, 70)
    cache = DeepseekV4Cache(model.config, dtype)
    logits(model, ids, cache)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    plain = DeepseekV4Cache(model.config, dtype)
    logits(model, ids[[2, 0, 0]], plain)
    for piece in tokens(3, 24).split([4, *[1] * 20], dim=1):
        assert (logits(model, piece, cache) - logits(model, piece, plain)).abs().max() <= CLOSE


def test_the_batch_grows_and_shrinks(model):
    ids = tokens(2, 51)
    cache = DeepseekV4Cache(model.config)
    logits(model, ids, cache)
    cache.batch_repeat_interleave(3)
    ids = ids.repeat_interleave(3, 0)
    assert_goes_on(model, cache, ids)
    cache.crop(-19)
    cache.batch_select_indices(torch.tensor([1, 4]))
    assert_goes_on(model, cache, ids[[1, 4]])
    with pytest.raises(ValueError, match="the cache has 2 rows, the call 3"):
        logits(model, tokens(3, 1), cache)


def test_stores_grow_and_rings_do_not(model):
    cache = DeepseekV4Cache(model.config)
    ids = tokens(1, 60)
    logits(model, ids, cache)
    rings = {name: t.shape for name, t in parts(cache).items() if "entries" not in name}
    for _ in range(5):
        more = tokens(1, 150)
        ids = torch.cat([ids, more], 1)
        logits(model, more, cache)
    after = parts(cache)
    assert {name: after[name].shape for name in rings} == rings
    assert after["2.entries"].shape[1] >= 810 // 4
    assert_goes_on(model, cache, ids)


def parts(cache: DeepseekV4Cache) -> dict[str, Tensor]:
    return {
        f"{i}.{name}": getattr(layer, name)
        for i, layer in enumerate(cache.layers)
        for name in layer.TENSORS
        if getattr(layer, name) is not None
    }


def test_bytes_of_the_published_model():
    """FP8 rows are 584 bytes a token beside bf16's 1024, the indexer's 132 beside 256."""
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=3)
    x = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    held = {}
    for dtype in ("bf16", "fp8"):
        cache = DeepseekV4Cache(config, dtype)
        for layer in cache.layers:
            layer.lazy_initialization(x)
            if layer.ratio:
                layer.reserve(64)
        held[dtype] = {name: t.numel() * t.element_size() for name, t in parts(cache).items()}
    assert (held["bf16"]["1.entries"], held["bf16"]["1.index_entries"]) == (64 * 1024, 64 * 256)
    assert held["fp8"]["1.entries"] == held["fp8"]["2.entries"] == 37440
    assert held["fp8"]["1.index_entries"] == 64 * 132
    assert held["fp8"]["0.window"] == 3 * 37440


def test_unknown_dtype(model):
    with pytest.raises(ValueError, match="cache_dtype is 'int4'"):
        DeepseekV4Cache(model.config, "int4")
    assert "cache_dtype" in DEEPSEEK_V4_CHECKS.switches
