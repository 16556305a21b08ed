"""FLUX.2's files: diffusers' folders and single files, whole or not at all; diffusers itself optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers

from tests.models.flux2.inputs import CONFIG, TINY, call, pair
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.models.flux2 import Flux2Transformer2DModel

MODELS = Path(__file__).resolve().parents[3] / "models"
WEIGHTS = "diffusion_pytorch_model.safetensors"
# The released models' four axes are equal, and what a file does not tell is as they have it.
RELEASED: dict[str, Any] = dict(axes_dims_rope=(16, 16, 16, 16))


def published(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's tensors as Black Forest Labs' files have them, made from its modules."""
    t: dict[str, Tensor] = {
        "img_in.weight": model.x_embedder.weight,
        "txt_in.weight": model.context_embedder.weight,
        "final_layer.linear.weight": model.proj_out.weight,
        "final_layer.adaLN_modulation.1.weight": torch.cat(model.norm_out.linear.weight.chunk(2)[::-1]),
    }
    for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"):
        t[f"{name}.lin.weight"] = getattr(model, name).linear.weight
    embed = model.time_guidance_embed
    for name, layer in (("time", embed.timestep_embedder), ("guidance", embed.guidance_embedder)):
        if layer is not None:
            t[f"{name}_in.in_layer.weight"], t[f"{name}_in.out_layer.weight"] = (
                layer.linear_1.weight,
                layer.linear_2.weight,
            )
    for i, block in enumerate(model.transformer_blocks):
        a, p = block.attn, f"double_blocks.{i}"
        streams = (
            ("img", (a.to_q, a.to_k, a.to_v), a.norm_q, a.norm_k, a.to_out[0], block.ff),
            ("txt", (a.add_q_proj, a.add_k_proj, a.add_v_proj), a.norm_added_q, a.norm_added_k, a.to_add_out,
             block.ff_context),
        )  # fmt: skip
        for name, qkv, norm_q, norm_k, out, ff in streams:
            t[f"{p}.{name}_attn.qkv.weight"] = torch.cat([layer.weight for layer in qkv])
            t[f"{p}.{name}_attn.norm.query_norm.scale"] = norm_q.weight
            t[f"{p}.{name}_attn.norm.key_norm.scale"] = norm_k.weight
            t[f"{p}.{name}_attn.proj.weight"] = out.weight
            t[f"{p}.{name}_mlp.0.weight"], t[f"{p}.{name}_mlp.2.weight"] = ff.linear_in.weight, ff.linear_out.weight
    for i, block in enumerate(model.single_transformer_blocks):
        a, p = block.attn, f"single_blocks.{i}"
        t[f"{p}.linear1.weight"], t[f"{p}.linear2.weight"] = a.to_qkv_mlp_proj.weight, a.to_out.weight
        t[f"{p}.norm.query_norm.scale"], t[f"{p}.norm.key_norm.scale"] = a.norm_q.weight, a.norm_k.weight
    return {name: tensor.detach().clone().contiguous() for name, tensor in t.items()}


def assert_same(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."], ids=["plain", "comfy"])
@pytest.mark.parametrize(
    "changed",
    [{}, dict(guidance_embeds=False), dict(out_channels=6, num_layers=1, mlp_ratio=2.0)],
    ids=["dev", "klein", "other"],
)
@torch.no_grad()
def test_single_file(tmp_path: Path, changed: dict, prefix: str) -> None:
    """Bit for bit, its sizes read off its tensors; the converter of diffusers, which knows no prefix, agrees."""
    _, theirs = pair(**RELEASED | changed)
    file = tmp_path / "flux2.safetensors"
    save_file({prefix + name: tensor for name, tensor in published(theirs).items()}, file)
    ours = Flux2Transformer2DModel.from_single_file(str(file))
    assert_same(ours, theirs)
    wanted = {**theirs.config}
    assert {name: ours.config[name] for name in CONFIG} == {name: wanted[name] for name in CONFIG}
    assert not ours.training
    if not prefix:
        theirs.save_pretrained(tmp_path / "config")
        loaded = diffusers.Flux2Transformer2DModel.from_single_file(str(file), config=str(tmp_path / "config"))
        assert_same(ours, loaded)
    given = call(theirs)
    torch.testing.assert_close(ours(**given).sample, theirs(**given).sample, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guidance", [True, False], ids=["dev", "klein"])
def test_saved_single_file(tmp_path: Path, guidance: bool) -> None:
    ours, theirs = pair(**RELEASED | dict(guidance_embeds=guidance))
    ours.save_single_file(tmp_path / "flux2.safetensors")
    saved, expected = load_file(tmp_path / "flux2.safetensors"), published(theirs)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert_same(Flux2Transformer2DModel.from_single_file(str(tmp_path / "flux2.safetensors")), theirs)


def test_single_file_options(tmp_path: Path) -> None:
    """From a config of its own, in another dtype, from tensors, or with diffusers' names."""
    _, theirs = pair()
    theirs.save_pretrained(tmp_path)
    ours = Flux2Transformer2DModel.from_single_file(published(theirs), config=str(tmp_path), torch_dtype=torch.bfloat16)
    assert ours.config.axes_dims_rope == [16, 20, 12, 16]
    assert ours.dtype == torch.bfloat16
    assert_same(ours, theirs.to(torch.bfloat16))
    assert_same(Flux2Transformer2DModel.from_single_file(str(tmp_path / WEIGHTS)).bfloat16(), theirs)
    with pytest.raises(ValueError, match="nothing here takes quantization_config"):
        Flux2Transformer2DModel.from_single_file(str(tmp_path / WEIGHTS), quantization_config=object())


BROKEN = {
    "missing": ("double_blocks.1.txt_mlp.2.weight", None, "transformer_blocks.1.ff_context.linear_out.weight"),
    "without a place": ("double_blocks.0.img_attn.qkv.weight_scale", torch.ones(1), "qkv.weight_scale"),
    "shape": ("single_blocks.1.linear2.weight", torch.zeros(2, 2), "single_transformer_blocks.1.attn.to_out.weight"),
    "no transformer": ("img_in.weight", None, "x_embedder.weight"),
}


@pytest.mark.parametrize(("name", "tensor", "key"), BROKEN.values(), ids=BROKEN)
def test_broken_single_file(name: str, tensor: Tensor | None, key: str) -> None:
    tensors = published(pair(**RELEASED)[1])
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(CheckpointError, match=key):
        Flux2Transformer2DModel.from_single_file(tensors)


def test_save_and_reload(tmp_path: Path) -> None:
    """Either class loads what the other saved."""
    ours, theirs = pair()
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(Flux2Transformer2DModel.from_pretrained(tmp_path / "theirs"), theirs)
    assert_same(diffusers.Flux2Transformer2DModel.from_pretrained(tmp_path / "ours"), theirs)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("ours", "theirs")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("extra", [False, True], ids=["missing", "without a place"])
def test_folders_load_whole_or_not_at_all(tmp_path: Path, extra: bool) -> None:
    pair()[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    key = "transformer_blocks.0.attn.to_q.weight"
    if extra:
        tensors["transformer_blocks.0.attn.to_q.bias"] = torch.zeros(128)
    else:
        del tensors[key]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="to_q.bias" if extra else "to_q.weight"):
        Flux2Transformer2DModel.from_pretrained(tmp_path)


def test_it_is_one_of_diffusers() -> None:
    """Who asks by class takes it, and by name saved pipelines load diffusers' in its place."""
    model = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer")
    assert isinstance(model, diffusers.Flux2Transformer2DModel)
    assert (type(model).__module__, type(model).__name__) == ("diffusers", "Flux2Transformer2DModel")


def test_one_module_imports_diffusers() -> None:
    found = set()
    for path in sorted(MODELS.parent.glob("*/**/*.py")):
        if path.relative_to(MODELS.parent).parts[0] not in ("common", "models", "quant", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {path for name in names if name.split(".")[0] == "diffusers"}
    assert found == {MODELS / "flux2" / "diffusers_api.py"}


def test_without_diffusers() -> None:
    """Everything else works, and FLUX.2 says what to install."""
    code = """
import sys
sys.modules["diffusers"] = None
import xpu_ports.models
from xpu_ports.common.dispatch import OPS, load_ops
load_ops()
assert "qk_norm_rope" in OPS
try:
    import xpu_ports.models.flux2
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'xpu-ports[flux2]'" in done.stdout
