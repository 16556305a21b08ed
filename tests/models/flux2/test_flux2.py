"""FLUX.2's transformer against diffusers' class: outputs, gradients, kept reference pictures, masks, fused sites."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("diffusers", reason="diffusers is not installed")

from diffusers.models.attention_processor import AttnProcessor2_0
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor

from tests.common.ops import fake
from tests.models.flux2.inputs import CONFIG, TINY, call, pair, positions, relative
from xpu_ports.common import dispatch
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.tritonlib import INTERPRETED
from xpu_ports.models.flux2 import Flux2Transformer2DModel, modeling_flux2
from xpu_ports.models.flux2.layouts import LAYOUTS

# In fp32: sums in another order.
NEAR = 1e-5


@pytest.mark.parametrize(
    "changed",
    [
        {},
        dict(guidance_embeds=False),
        dict(num_single_layers=0),
        dict(num_layers=0),
        dict(out_channels=6, mlp_ratio=2.0, rope_theta=500, eps=1e-3),
        dict(attention_head_dim=128, axes_dims_rope=(32, 32, 32, 32), num_attention_heads=1),
    ],
    ids=["dev", "klein", "double", "single", "other", "heads"],
)
@torch.no_grad()
def test_equals_diffusers(changed: dict) -> None:
    ours, theirs = pair(**changed)
    given = call(theirs)
    assert relative(ours(**given).sample, theirs(**given).sample) <= NEAR
    [sample] = ours(**given, return_dict=False)
    assert torch.equal(sample, ours(**given).sample)


@torch.no_grad()
def test_trained_weights() -> None:
    import diffusers

    ours = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    theirs = diffusers.Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    given = call(theirs, B=3, side=8, text=32)
    assert relative(ours(**given).sample, theirs(**given).sample) <= NEAR


@torch.no_grad()
def test_one_row_of_positions_or_one_for_each() -> None:
    ours, theirs = pair()
    given = call(theirs)
    batched = {name: given[name][None].expand(2, -1, -1) for name in ("img_ids", "txt_ids")}
    assert torch.equal(ours(**given).sample, ours(**given | batched).sample)


@torch.no_grad()
def test_queries_and_keys_are_diffusers_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, of both kinds of blocks, with `round_norm`; without it they are not."""
    ours, theirs = (model.to(torch.bfloat16) for model in pair())
    given = call(theirs, B=2, side=4, text=6)
    x, text = (torch.randn(2, n, theirs.inner_dim).bfloat16() for n in (16, 6))
    table = ours.pos_embed(given["txt_ids"], given["img_ids"])
    cos_sin = tuple(t.repeat_interleave(2, dim=-1) for t in table.chunk(2, dim=-1))
    seen: list[tuple[Tensor, Tensor]] = []
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((query, key))
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    theirs.transformer_blocks[0].attn(x, text, image_rotary_emb=cos_sin)
    theirs.single_transformer_blocks[0].attn(torch.cat([text, x], dim=1), image_rotary_emb=cos_sin)
    for round_norm in (True, False):
        context = modeling_flux2.Context(table, text.shape[1], round_norm)
        ours.transformer_blocks[0].attn(x, text, context, None)
        ours.single_transformer_blocks[0].attn(torch.cat([text, x], dim=1), context, None)
    expected, exact, wide = seen[:2], seen[2:4], seen[4:]
    for theirs_, ours_, other in zip(expected, exact, wide, strict=True):
        for a, b, c in zip(theirs_, ours_, other, strict=True):
            assert a.dtype == b.dtype == torch.bfloat16
            assert torch.equal(a, b)
            assert not torch.equal(a, c)


@torch.no_grad()
def test_bf16_is_as_near_to_fp32_as_diffusers() -> None:
    ours, theirs = pair()
    given = call(theirs)
    exact = theirs(**given).sample
    rounded = {
        k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() and "ids" not in k else v
        for k, v in given.items()
    }
    errors = [relative(m.to(torch.bfloat16)(**rounded).sample.float(), exact) for m in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["text block", "single block"])
def test_sums_end_at_the_largest_number_of_fp16(kind: str) -> None:
    """Where diffusers clips: the text of double blocks, all of single blocks."""
    ours, theirs = (model.half() for model in pair())
    given = call(theirs)
    context = modeling_flux2.Context(ours.pos_embed(given["txt_ids"], given["img_ids"]), 5, True)
    cos_sin = tuple(t.repeat_interleave(2, dim=-1) for t in context.cos_sin.chunk(2, dim=-1))
    x, text = torch.randn(1, 9, 128).half(), (60000.0 * torch.randn(1, 5, 128).sign()).half()
    big = torch.full((1, 1, 128), 60000.0).half()
    small = torch.zeros(1, 1, 128).half()
    if kind == "text block":
        modulations = [torch.cat([small] * 6, dim=-1), torch.cat([*[small] * 5, big], dim=-1)]
        _, out = ours.transformer_blocks[0](x, text, *modulations, context, None)
        expected, _ = theirs.transformer_blocks[0](x, text, *modulations, cos_sin)
    else:
        joint = torch.cat([text, x], dim=1)
        modulation = torch.cat([small, small, big], dim=-1)
        out = ours.single_transformer_blocks[0](modeling_flux2.NormedStream(joint), modulation, context, None).x
        expected = theirs.single_transformer_blocks[0](joint, None, modulation, cos_sin)
    largest = torch.finfo(torch.float16).max
    assert out.isfinite().all()
    assert (out.abs() == largest).any()
    assert torch.equal(out.abs() == largest, expected.abs() == largest)


def test_gradients_equal_diffusers() -> None:
    """Also with checkpoints in between, and through the steps in place."""
    ours, theirs = pair()
    given = call(theirs)
    for model in (theirs, ours):
        model(**given).sample.square().sum().backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    checkpointed = copy.deepcopy(ours)
    checkpointed.zero_grad()
    checkpointed.enable_gradient_checkpointing()
    checkpointed.train()
    checkpointed(**given).sample.square().sum().backward()
    for model in (ours, checkpointed):
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert relative(p.grad, expected[name]) <= 10 * NEAR, name


@torch.no_grad()
def test_compiles_whole() -> None:
    """Without a break in the graph, the steps in place included; also block by block."""
    ours, _ = pair(num_layers=1, num_single_layers=1)
    given = call(ours)
    expected = ours(**given).sample
    assert torch.equal(torch.compile(ours, backend="aot_eager", fullgraph=True)(**given).sample, expected)
    ours.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    assert torch.equal(ours(**given).sample, expected)


# ---------------------------------------------------------------------------------------------------- fused everywhere


def calls(name: str) -> dict[str, int]:
    """Calls of an op so far, by back end."""
    return {d.backend: d.calls for d in dispatch.explain(show=False) if d.op == name}


@pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted here")
@torch.no_grad()
def test_every_site_is_fused() -> None:
    """Each attention layer is one launch, on slices of the projection as well, and gives what the references give."""
    ours, _ = pair(num_layers=2, num_single_layers=3)
    given = call(ours, B=1, side=2, text=3)
    expected = ours(**given).sample
    dispatch.reset_explain()
    with use_backend("triton"):
        got = ours(**given).sample
    assert calls("qk_norm_rope") == {"triton": 5}
    assert calls("concat_swiglu") == {"triton": 3}
    # Double blocks: for each stream a norm, a sum that is normalized, a sum. Single blocks: the first one's norm, sums
    # that are normalized. The last norm is the model's.
    assert calls("ada_layer_norm") == {"triton": 2 * 2 + 1 + 1}
    assert calls("gated_residual_norm") == {"triton": 2 * 2 + 3}
    assert calls("gated_residual") == {"triton": 2 * 2}
    assert calls("gated_activation") == {"triton": 2 * 2}
    assert relative(got, expected) <= NEAR


SIZES = {"klein-4B": (24, 128), "klein-9B": (32, 128), "dev": (48, 128), "tiny": (2, 64)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "width"), SIZES.values(), ids=SIZES)
def test_no_site_falls_back_at_the_released_sizes(
    monkeypatch: pytest.MonkeyPatch, heads: int, width: int, dtype: torch.dtype
) -> None:
    """Every op of a step on an XPU, asked with tensors without data: the kernel takes it, whatever the strides."""
    chosen: list[tuple[str, str, str]] = []

    def asked(op: dispatch.Op) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with FakeTensorMode():
                chosen.append((op.name, *op.choose(*map(fake, args), **{k: fake(v) for k, v in kwargs.items()})))
            return op.reference(*args, **kwargs)

        return run

    ops = ("ada_layer_norm", "concat_swiglu", "gated_activation", "gated_residual", "gated_residual_norm")
    for name in (*ops, "qk_norm_rope"):
        monkeypatch.setattr(modeling_flux2, name, asked(getattr(modeling_flux2, name)))
    config = CONFIG | dict(
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=heads,
        attention_head_dim=width,
        axes_dims_rope=(width // 4,) * 4,
    )
    monkeypatch.setattr(
        modeling_flux2.Flux2PosEmbed,
        "_table",
        lambda self, txt, img: txt.new_empty(len(txt) + len(img), width, dtype=torch.float32),
    )
    with torch.device("meta"), torch.no_grad():
        model = Flux2Transformer2DModel(**config).to(dtype)
        given = {
            k: v.to(dtype) if v.is_floating_point() and "ids" not in k else v
            for k, v in call(model, B=1, side=4, text=8).items()
        }
        assert model(**given).sample.shape == (1, 16, config["in_channels"])
    assert {backend for _, backend, _ in chosen} == {"triton"}, chosen
    assert [name for name, *_ in chosen].count("qk_norm_rope") == 2


class Launches(TorchDispatchMode):
    """Counts what a device would launch: PyTorch's operators but for views, and each of our ops and attention as one.

    cuBLAS may split a sum over two kernels; that is not seen here.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._inside = 0
        monkeypatch.setattr(dispatch.Op, "__call__", self._as_one(dispatch.Op.__call__, lambda op: op.name))
        attend = self._as_one(_flash_attention, lambda q: "attention")
        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)

    def _as_one(self, run: Any, name: Any) -> Any:
        def counted(first: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts[name(first)] += self._inside == 0
            self._inside += 1
            try:
                return run(first, *args, **kwargs)
            finally:
                self._inside -= 1

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        # A view by another name, and memory.
        if not (self._inside or func.is_view or name in ("_unsafe_view", "empty", "new_empty", "detach")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """No values; memory as flash attention lays it out, with a token's heads side by side."""
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@pytest.mark.parametrize(
    ("layout", "sites", "most"), [("klein-4b", 25, 300), ("dev", 56, 600)], ids=["klein-4B", "dev"]
)
def test_launches_of_the_released_sizes(monkeypatch: pytest.MonkeyPatch, layout: str, sites: int, most: int) -> None:
    """Nothing is copied in the blocks: their launches are products, attention and our ops."""
    monkeypatch.setattr(
        modeling_flux2.Flux2PosEmbed, "forward", lambda self, txt, img: torch.empty(len(txt) + len(img), 128)
    )
    # Of one width: the number of launches goes by the blocks alone.
    config = LAYOUTS[layout] | dict(num_attention_heads=2, joint_attention_dim=64)
    with torch.device("meta"), torch.no_grad():
        model = Flux2Transformer2DModel(**config).bfloat16()
        given = {
            k: v.bfloat16() if isinstance(v, Tensor) and "ids" not in k else v
            for k, v in call(model, B=1, side=4, text=8).items()
        }
        with Launches(monkeypatch) as launches:
            model(**given)
    counts = launches.counts
    double, single = len(model.transformer_blocks), len(model.single_transformer_blocks)
    assert counts["qk_norm_rope"] == counts["attention"] == double + single == sites
    assert counts["concat_swiglu"] == single
    assert counts["ada_layer_norm"] == 2 * double + 1 + 1
    assert counts["gated_residual_norm"] == 2 * double + single
    assert counts["gated_residual"] == 2 * double
    assert counts["gated_activation"] == 2 * double
    # Text before picture, and cosines beside sines of each sinusoid of a time.
    assert counts["cat"] == 1 + 1 + model.config.guidance_embeds
    assert not {"clone", "copy_", "contiguous"} & counts.keys()
    assert counts.total() <= most


@torch.no_grad()
def test_joined_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written into one tensor where layers are plain, joined where they are not, the same either way."""
    ours, _ = pair(num_layers=1, num_single_layers=0)
    attn = ours.transformer_blocks[0].attn
    layers, streams = (attn.add_q_proj, attn.to_q), (torch.randn(1, 5, 128), torch.randn(1, 9, 128))
    expected = torch.cat([layer(x) for layer, x in zip(layers, streams, strict=True)], dim=1)
    products: list[int] = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: (products.append(1), product(*a, **k))[1])
    assert torch.equal(modeling_flux2._joined(layers, streams), expected)
    assert products == [1, 1]
    both = tuple(x.expand(2, -1, -1) for x in streams)
    assert torch.allclose(modeling_flux2._joined(layers, both), expected.expand(2, -1, -1), atol=1e-6)
    handle = attn.to_q.register_forward_hook(lambda *_: torch.zeros(1, 9, 128))
    assert torch.equal(modeling_flux2._joined(layers, streams)[:, 5:], torch.zeros(1, 9, 128))
    handle.remove()
    attn.to_q.forward = lambda x: torch.ones(1, 9, 128)
    assert torch.equal(modeling_flux2._joined(layers, streams)[:, 5:], torch.ones(1, 9, 128))
    assert products == [1, 1]


@pytest.mark.parametrize(("layout", "billions"), {"dev": 32.22, "klein-4b": 3.876, "klein-9b": 9.079}.items())
def test_released_sizes(layout: str, billions: float) -> None:
    with torch.device("meta"):
        model = Flux2Transformer2DModel(**LAYOUTS[layout])
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-4)


# --------------------------------------------------------------------------------------------------------------- masks


@torch.no_grad()
@pytest.mark.parametrize("shape", ["keys", "whole", "added"])
def test_masks_are_applied(shape: str) -> None:
    """As diffusers applies them; what is masked has no influence."""
    ours, theirs = pair()
    given = call(theirs)
    keys = torch.ones(2, 14, dtype=torch.bool)
    keys[0, 3:5] = False
    mask = {"keys": keys, "whole": keys[:, None, None], "added": torch.zeros(2, 1, 1, 14)}[shape]
    if shape == "added":
        mask.masked_fill_(~keys[:, None, None], float("-inf"))
    expected = theirs(**given, joint_attention_kwargs={"attention_mask": keys[:, None, None]}).sample
    got = ours(**given, joint_attention_kwargs={"attention_mask": mask}).sample
    assert relative(got, expected) <= NEAR
    assert relative(got, ours(**given).sample) > 100 * NEAR
    changed = given["encoder_hidden_states"].clone()
    changed[0, 3:5] = 7.0
    again = ours(**given | dict(encoder_hidden_states=changed), joint_attention_kwargs={"attention_mask": mask}).sample
    assert relative(again, got) <= NEAR


@torch.no_grad()
def test_a_mask_of_pairs() -> None:
    """[T, T], which no row of the batch has for its own."""
    ours, theirs = pair()
    given = call(theirs)
    kwargs = {"attention_mask": torch.eye(14, dtype=torch.bool) | (torch.rand(14, 14) < 0.5)}
    got, expected = (model(**given, joint_attention_kwargs=kwargs).sample for model in (ours, theirs))
    assert relative(got, expected) <= NEAR


WRONG = {
    "unknown": (dict(joint_attention_kwargs={"ip_hidden_states": 1}), "nothing here takes ip_hidden_states"),
    "mode": (dict(kv_cache_mode="read"), "'read'"),
    "no cache": (dict(kv_cache_mode="cached"), "there is no kv_cache"),
    "cache without a mode": (dict(kv_cache=object()), "does not read"),
    "mask and references": (
        dict(kv_cache_mode="extract", num_ref_tokens=9, joint_attention_kwargs={"attention_mask": torch.ones(2, 14)}),
        "attention_mask together",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize(("changed", "why"), WRONG.values(), ids=WRONG)
def test_what_has_no_effect_is_refused(changed: dict, why: str) -> None:
    ours, _ = pair(num_layers=1, num_single_layers=1)
    with pytest.raises(ValueError, match=why):
        ours(**call(ours), **changed)


def test_processors() -> None:
    ours, _ = pair(num_layers=1, num_single_layers=1)
    ours.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    ours.single_transformer_blocks[0].attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    with pytest.raises(ValueError, match="does not run AttnProcessor2_0"):
        ours.set_attn_processor(AttnProcessor2_0())
    ours.set_attention_backend("native")
    with pytest.raises(ValueError, match="'flash'"):
        ours.set_attention_backend("flash")


@pytest.mark.parametrize("axes", [(16, 16, 16), (17, 15, 16, 16)], ids=str)
def test_positions_must_fill_the_heads(axes: tuple) -> None:
    with pytest.raises(ValueError, match="axes_dims_rope"):
        Flux2Transformer2DModel(**CONFIG | dict(axes_dims_rope=axes))


# ------------------------------------------------------------------------------------------------- reference pictures


@torch.no_grad()
@pytest.mark.parametrize("references", [1, 2])
def test_kept_references_equal_diffusers(references: int) -> None:
    """The step that keeps them, and two that use them."""
    ours, theirs = pair(guidance_embeds=False)
    for module in (*theirs.transformer_blocks, *theirs.single_transformer_blocks):
        double = module in list(theirs.transformer_blocks)
        module.attn.set_processor(Flux2KVAttnProcessor() if double else Flux2KVParallelSelfAttnProcessor())
    first = call(theirs, references=references)
    count = 9 * references
    extract = dict(kv_cache_mode="extract", num_ref_tokens=count, ref_fixed_timestep=0.25)
    got, expected = (model(**first, **extract) for model in (ours, theirs))
    assert got.sample.shape == (2, 9, CONFIG["in_channels"])
    assert relative(got.sample, expected.sample) <= NEAR
    sample, cache = ours(**first, **extract, return_dict=False)
    assert torch.equal(sample, got.sample)
    assert cache.num_ref_tokens == count
    for _ in range(2):
        later = call(theirs)
        outputs = [
            model(**later, kv_cache=out.kv_cache, kv_cache_mode="cached").sample
            for model, out in ((ours, got), (theirs, expected))
        ]
        assert relative(*outputs) <= NEAR
        assert relative(outputs[0], ours(**later).sample) > 100 * NEAR


@torch.no_grad()
def test_extract_without_references() -> None:
    ours, theirs = pair()
    given = call(theirs)
    sample, cache = ours(**given, kv_cache_mode="extract", return_dict=False)
    assert cache is None
    assert torch.equal(sample, ours(**given).sample)


# ----------------------------------------------------------------------------------------------------------- positions


def test_table_equals_diffusers() -> None:
    ours, theirs = pair()
    ids = positions(5, 7, references=2)
    cos, sin = theirs.pos_embed(torch.cat([ids["txt_ids"], ids["img_ids"]]))
    table = ours.pos_embed(ids["txt_ids"], ids["img_ids"])
    assert torch.equal(table, torch.cat([cos[:, ::2], sin[:, ::2]], dim=-1))


def test_table_is_kept_while_the_positions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors are not looked at again, equal ones are compared, and changed ones have another table."""
    ours, _ = pair()
    compared: list[bool] = []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(equal(a, b)) or compared[-1])
    given, other = positions(3, 5), positions(3, 5)
    txt, img = given["txt_ids"], given["img_ids"]
    table = ours.pos_embed(txt, img)
    assert ours.pos_embed(txt, img) is table
    assert compared == []
    assert ours.pos_embed(other["txt_ids"], other["img_ids"]) is table
    assert compared == [True, True]
    assert ours.pos_embed(txt, img) is table
    img += 1
    assert not equal(ours.pos_embed(txt, img), table)
    assert not equal(ours.pos_embed(txt[:4], img), table)
    with torch.inference_mode():
        inside = torch.arange(20.0).view(5, 4)
        assert ours.pos_embed(inside, img).shape == (14, 64)
