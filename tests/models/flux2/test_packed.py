"""FLUX.2's transformer with MXFP4 weights: sizes, values, loading, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers

from tests.models.flux2.inputs import TINY, call, pair, relative
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.models.flux2 import Flux2Transformer2DModel, load_pipeline
from xpu_ports.models.flux2.layouts import LAYOUTS
from xpu_ports.models.flux2.packed import DENSE, MXFP4Quantizer, quantize_transformer
from xpu_ports.quant.mxfp4.linear import MXFP4Linear
from xpu_ports.quant.mxfp4.packing import pack, units
from xpu_ports.quant.mxfp4.quantize import quantization_config
from xpu_ports.quant.mxfp4.scheme import read_scheme

WEIGHTS = "diffusion_pytorch_model.safetensors"
# Sums in another order, in fp32.
NEAR = 1e-5
# Widths that are no multiple of 32, beside those that stay dense anyway: none in this config.
SIZES: dict[str, Any] = dict(num_layers=1, num_single_layers=1)


def packed(**changed: Any) -> Flux2Transformer2DModel:
    return quantize_transformer(pair(**SIZES | changed)[0])


@pytest.mark.parametrize(("layout", "gigabytes"), {"klein-4b": 2.3, "klein-9b": 5.1, "dev": 18.0}.items())
def test_weights_of_the_released_sizes(layout: str, gigabytes: float) -> None:
    """In bf16 what stays dense; every layer of the blocks is packed, and what modulates them."""
    with torch.device("meta"):
        model = Flux2Transformer2DModel(**LAYOUTS[layout]).bfloat16()
    scheme = read_scheme(quantization_config(ignore=DENSE), "this test")
    groups = {unit.name: scheme.group_of(unit.name, unit.classes) for unit in units(model)}
    pack(model, {name: group for name, group in groups.items() if group is not None})
    assert sum(p.nbytes for p in model.parameters()) <= gigabytes * 1e9
    dense = {name.partition(".")[0] for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    assert dense == {"x_embedder", "context_embedder", "time_guidance_embed", "norm_out", "proj_out"}
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    assert not any(type(m) is torch.nn.Linear for block in blocks for m in block.modules())


@torch.no_grad()
def test_computes_with_the_rounded_weights() -> None:
    """As the dense model does that has their values; not as the one before."""
    ours, before = pair(**SIZES)
    given = call(ours)
    quantize_transformer(ours)
    got = ours(**given).sample
    assert relative(got, before(**given).sample) > 100 * NEAR
    dense = ours.dequantize()
    assert not any(isinstance(m, MXFP4Linear) for m in dense.modules())
    assert relative(got, dense(**given).sample) <= NEAR


def test_what_is_quantized_already() -> None:
    with pytest.raises(ValueError, match="quantized already"):
        quantize_transformer(packed())


def test_widths_must_fit() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_transformer(pair(**SIZES)[0], ignore=())


@pytest.mark.parametrize("shards", [1, 3])
@torch.no_grad()
def test_save_and_load(tmp_path: Path, shards: int) -> None:
    """Bytes as they are, dense parts in the dtype that is asked for, in several files too."""
    model = packed()
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size // shards + 1)
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    loaded = Flux2Transformer2DModel.from_pretrained(tmp_path)
    assert isinstance(loaded.hf_quantizer, MXFP4Quantizer)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    given = call(model)
    assert torch.equal(model(**given).sample, loaded(**given).sample)
    half = Flux2Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16, torch.uint8}
    # Saved once more, from what was loaded.
    half.save_pretrained(tmp_path / "again")
    assert_same_bytes(tmp_path / "again" / WEIGHTS, half)


def assert_same_bytes(file: Path, model: torch.nn.Module) -> None:
    saved, state = load_file(file), model.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


def test_dense_models_save_no_config(tmp_path: Path) -> None:
    packed().dequantize().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("quantization_config") is None
    diffusers.Flux2Transformer2DModel.from_pretrained(tmp_path)


def test_scales_with_a_dtype_of_their_own(tmp_path: Path) -> None:
    model = packed()
    model.save_pretrained(tmp_path)
    tensors = {
        name: t.view(torch.float8_e8m0fnu) if name.endswith("weight_scale") else t
        for name, t in load_file(tmp_path / WEIGHTS).items()
    }
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    assert_same_bytes_of(Flux2Transformer2DModel.from_pretrained(tmp_path), model)


def assert_same_bytes_of(a: torch.nn.Module, b: torch.nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


LAYER = "single_transformer_blocks.0.attn.to_out"
BROKEN = {
    "no scale": (f"{LAYER}.weight_scale", None, "weight_scale"),
    "scale of another shape": (f"{LAYER}.weight_scale", torch.zeros(2, 2, dtype=torch.uint8), "weight_scale"),
    "nobody's": ("proj_out.weight_scale", torch.zeros(8, 4, dtype=torch.uint8), "proj_out"),
    "missing": (f"{LAYER}.weight_packed", None, LAYER),
}


@pytest.mark.parametrize(("name", "tensor", "key"), BROKEN.values(), ids=BROKEN)
def test_broken_files(tmp_path: Path, name: str, tensor: torch.Tensor | None, key: str) -> None:
    packed().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(CheckpointError, match=key):
        Flux2Transformer2DModel.from_pretrained(tmp_path)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    packed().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["format"] = "nvfp4-pack-quantized"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="nvfp4-pack-quantized"):
        Flux2Transformer2DModel.from_pretrained(tmp_path)


def test_single_files_have_no_packed_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight_packed has no place"):
        packed().save_single_file(tmp_path / "flux2.safetensors")
    assert not (tmp_path / "flux2.safetensors").exists()


def test_pipeline(tmp_path: Path) -> None:
    """Saved and loaded in one line; the picture is near that of the dense weights, and another one."""
    pipe = load_pipeline(TINY, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    options: dict[str, Any] = dict(
        prompt="a red three", height=64, width=64, max_sequence_length=32, num_inference_steps=4, output_type="pt"
    )
    dense = pipe(**options, generator=torch.Generator().manual_seed(0)).images
    quantize_transformer(pipe.transformer)
    pipe.save_pretrained(tmp_path)
    loaded = load_pipeline(str(tmp_path), dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    pictures = [p(**options, generator=torch.Generator().manual_seed(0)).images for p in (pipe, loaded)]
    assert torch.equal(*pictures)
    difference = (pictures[0] - dense).square().mean().sqrt()
    assert 1e-4 < difference < 0.5 * dense.std()


@torch.no_grad()
def test_compiles_whole() -> None:
    model = packed()
    given = call(model)
    expected = model(**given).sample
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(**given).sample, expected)
