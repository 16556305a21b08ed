"""FLUX.2 in diffusers' pipelines: pictures, edits, LoRA, kept reference pictures, offloading, saving."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers
from accelerate import cpu_offload
from PIL import Image

from tests.models.flux2.inputs import TINY, call, relative
from xpu_ports.common import dispatch, graph
from xpu_ports.models.flux2 import Flux2Transformer2DModel, load_pipeline

COLOURS = ("red", "green", "blue", "yellow", "white")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPTS = [f"a {colour} {digit}" for colour, digit in itertools.product(COLOURS, DIGITS)]
# How the checkpoint was trained.
TRAINED: dict[str, Any] = dict(height=64, width=64, max_sequence_length=32, output_type="np")
# Of a picture from 0 to 1.
ONE_STEP = 1 / 255


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def ours() -> Any:
    return quiet(load_pipeline(TINY, dtype=torch.float32))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return quiet(diffusers.Flux2KleinPipeline.from_pretrained(TINY, dtype=torch.float32))


def pictures(pipe: Any, prompt: str | list[str], **kwargs: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt=prompt, generator=generator, **TRAINED | dict(num_inference_steps=4) | kwargs).images


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    assert theirs.std() > ONE_STEP, "an empty picture says nothing"
    assert np.abs(ours - theirs).max() <= ONE_STEP


def test_pipeline(ours: Any) -> None:
    assert type(ours) is diffusers.Flux2KleinPipeline
    assert type(ours.transformer) is Flux2Transformer2DModel


@pytest.mark.parametrize("guidance", [1.0, 2.0], ids=["plain", "guided"])
def test_pictures(ours: Any, theirs: Any, guidance: float) -> None:
    """A batch of three, without and with a negative prompt."""
    prompts = [PROMPTS[i] for i in (3, 17, 48)]
    assert_same(*(pictures(pipe, prompts, guidance_scale=guidance) for pipe in (ours, theirs)))


@pytest.mark.full
@pytest.mark.parametrize("colour", COLOURS)
def test_every_prompt(ours: Any, theirs: Any, colour: str) -> None:
    prompts = [f"a {colour} {digit}" for digit in DIGITS]
    assert_same(*(pictures(p, prompts, guidance_scale=2.0, num_inference_steps=20) for p in (ours, theirs)))


def test_edit(ours: Any, theirs: Any) -> None:
    """With a reference picture beside the text."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    with_, without = (pictures(ours, "a red three", guidance_scale=2.0, **k) for k in (dict(image=image), {}))
    assert_same(with_, pictures(theirs, "a red three", guidance_scale=2.0, image=image))
    assert np.abs(with_ - without).max() > ONE_STEP


def test_kept_reference(ours: Any, theirs: Any) -> None:
    """The pipeline that runs reference pictures once."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    parts = {name: getattr(theirs, name) for name in ("scheduler", "vae", "text_encoder", "tokenizer")}
    pipes = [
        quiet(diffusers.Flux2KleinKVPipeline(**parts, transformer=type(pipe.transformer).from_pretrained(
            TINY, subfolder="transformer"
        )))
        for pipe in (ours, theirs)
    ]  # fmt: skip
    assert_same(*(pictures(pipe, "a blue seven", image=image, num_inference_steps=3) for pipe in pipes))


def test_embedded_guidance(theirs: Any) -> None:
    """The dev pipeline, whose guidance is an input of the model, on prompts that are embedded already."""
    config = {**theirs.transformer.config} | dict(guidance_embeds=True, num_layers=1, num_single_layers=1)
    transformer = diffusers.Flux2Transformer2DModel(**{k: v for k, v in config.items() if not k.startswith("_")})
    own = Flux2Transformer2DModel.from_config(transformer.config)
    own.load_state_dict(transformer.state_dict())
    results = []
    for model in (own, transformer):
        pipe = quiet(
            diffusers.Flux2Pipeline(
                scheduler=theirs.scheduler, vae=theirs.vae, text_encoder=None, tokenizer=None, transformer=model.eval()
            )
        )
        embeds = torch.randn(1, 7, 192, generator=torch.Generator().manual_seed(1))
        results.append(
            pictures(pipe, None, prompt_embeds=embeds, guidance_scale=3.0, num_inference_steps=2)  # type: ignore[arg-type]
        )
    assert np.abs(results[0] - results[1]).max() <= ONE_STEP


def test_saved_pipeline(ours: Any, tmp_path: Path) -> None:
    """Diffusers alone loads it, and so does `load_pipeline`."""
    ours.save_pretrained(tmp_path)
    plain, again = (
        quiet(diffusers.DiffusionPipeline.from_pretrained(tmp_path, dtype=torch.float32)),
        quiet(load_pipeline(str(tmp_path), dtype=torch.float32)),
    )
    assert type(plain.transformer) is diffusers.Flux2Transformer2DModel
    assert type(again.transformer) is Flux2Transformer2DModel
    results = [pictures(pipe, "a green five", num_inference_steps=2) for pipe in (ours, again, plain)]
    # Not bit for bit: products of weights in a mapped file, which are not aligned, are summed in another order.
    ours_, again_ = ours.transformer.state_dict(), again.transformer.state_dict()
    assert all(torch.equal(ours_[name], again_[name]) for name in ours_ | again_)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_dtypes() -> None:
    """The files' own for all parts, or of each part its own; and a transformer that is there already."""
    pipe = load_pipeline(TINY)
    assert {getattr(pipe, name).dtype for name in ("transformer", "text_encoder", "vae")} == {torch.bfloat16}
    assert np.isfinite(pictures(quiet(pipe), "a red one", num_inference_steps=1)).all()
    pipe = load_pipeline(TINY, dtype={"vae": torch.float32, "default": torch.float16}, transformer=pipe.transformer)
    assert [getattr(pipe, name).dtype for name in ("transformer", "text_encoder", "vae")] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]


# ---------------------------------------------------------------------------------------------------------------- LoRA


def adapter(rank: int = 4) -> dict[str, torch.Tensor]:
    """Random adapters in diffusers' names, for layers of every kind."""
    model = diffusers.Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    layers = [
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.add_k_proj",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.1.ff.linear_in",
        "single_transformer_blocks.2.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.3.attn.to_out",
    ]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name in layers:
        out, width = model.get_submodule(name).weight.shape
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * width**-0.5
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    return tensors


def test_lora(theirs: Any) -> None:
    """Loaded, scaled in the call and by name, fused, and taken off again."""
    pytest.importorskip("peft", reason="peft is not installed")
    ours, reference = (
        quiet(load_pipeline(TINY, dtype=torch.float32)),
        quiet(diffusers.Flux2KleinPipeline.from_pretrained(TINY, dtype=torch.float32)),
    )
    plain = pictures(ours, "a white two")
    both = (ours, reference)
    for pipe in both:
        pipe.load_lora_weights(adapter(), adapter_name="a")
    whole = [pictures(pipe, "a white two") for pipe in both]
    assert_same(*whole)
    assert np.abs(whole[0] - plain).max() > ONE_STEP
    half = [pictures(pipe, "a white two", attention_kwargs={"scale": 0.5}) for pipe in both]
    assert_same(*half)
    assert np.abs(half[0] - whole[0]).max() > ONE_STEP
    for pipe in both:
        pipe.set_adapters(["a"], [0.5])
    assert_same(pictures(ours, "a white two"), half[1])
    for pipe in both:
        pipe.fuse_lora()
    assert_same(*(pictures(pipe, "a white two") for pipe in both))
    ours.unfuse_lora()
    ours.unload_lora_weights()
    assert_same(pictures(ours, "a white two"), plain)


# ---------------------------------------------------------------------------------------------------------- offloading


@torch.no_grad()
def test_offloaded_layer_by_layer() -> None:
    """Every weight is away between its uses, those that no layer's own forward reads too."""
    model = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    given = call(model, side=4)
    expected = model(**given).sample
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.equal(model(**given).sample, expected)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="offloading whole models needs an accelerator")
def test_offloaded_model_by_model(theirs: Any) -> None:
    pipe = quiet(load_pipeline(TINY, dtype=torch.float32))
    pipe.enable_model_cpu_offload()
    dispatch.reset_explain()
    got = pictures(pipe, "a yellow one")
    fused = [d for d in dispatch.explain(show=False) if d.op == "qk_norm_rope"]
    assert {d.backend for d in fused} == {"triton"}
    assert np.abs(got - pictures(theirs, "a yellow one")).max() <= 4 * ONE_STEP


@torch.no_grad()
def test_layers_are_split_where_blocks_end() -> None:
    """Device maps keep blocks whole."""
    model = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    names = {type(m).__name__ for m in (model.transformer_blocks[0], model.single_transformer_blocks[0])}
    assert names == set(model._no_split_modules) == set(model._repeated_blocks)
    given = call(model, side=2)
    assert relative(model(**given).sample, model(**given).sample) == 0.0


# ------------------------------------------------------------------------------------------------------ captured steps


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU: what stands in for one runs the captured function again."""
    if torch.accelerator.is_available():
        return

    def capture(device: torch.device, step: Any, warm: bool) -> tuple[Any, torch.Tensor]:
        output = step()
        return lambda: output.copy_(step()), output

    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph, "graph_class", lambda device: object)


def steps() -> dict[str, int]:
    return {d.backend: d.calls for d in dispatch.explain(show=False) if d.op == graph.STEP}


@pytest.mark.usefixtures("captured")
def test_captured_pictures(theirs: Any) -> None:
    """Prompts, sizes, guidance, batches and references in turn, all with the same graphs and as diffusers draws."""
    pipe = quiet(load_pipeline(TINY, dtype=torch.float32))
    dispatch.reset_explain()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    small = dict(height=32, width=64)
    for prompt, options in (
        ("a red three", {}), ("a blue seven", {}), ("a red three", small), ("a white two", dict(guidance_scale=2.0)),
        (["a green one", "a red two"], small), ("a green one", dict(image=image)), ("a red three", {}),
    ):  # fmt: skip
        assert_same(*(pictures(p, prompt, **dict(guidance_scale=1.0) | options) for p in (pipe, theirs)))
    # Of each first kind of picture the first step.
    assert steps() == {"eager": 4, "graph": 7 * 4 + 4 - 4}


@pytest.mark.usefixtures("captured")
def test_captured_until_adapters_are_loaded(theirs: Any) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    pipe = quiet(load_pipeline(TINY, dtype=torch.float32))
    plain = pictures(pipe, "a white two", guidance_scale=1.0)
    pipe.load_lora_weights(adapter(), adapter_name="a")
    dispatch.reset_explain()
    with_ = pictures(pipe, "a white two", guidance_scale=1.0)
    assert steps() == {"eager": 4}
    assert np.abs(with_ - plain).max() > ONE_STEP
    pipe.unload_lora_weights()
    assert_same(pictures(pipe, "a white two", guidance_scale=1.0), plain)
    # The graph from before is right again.
    assert steps() == {"eager": 4, "graph": 4}
