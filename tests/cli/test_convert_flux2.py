"""`xpu-ports convert` of FLUX.2: pipelines, transformers by themselves, single files; names both ways."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("diffusers", reason="diffusers is not installed")

from xpu_ports.models.flux2 import Flux2Transformer2DModel, load_pipeline
from xpu_ports.models.flux2.packed import quantize_transformer
from xpu_ports.quant.convert import writer
from xpu_ports.quant.mxfp4.linear import MXFP4Linear

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny-flux2"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's transformer as Black Forest Labs would publish it."""
    path = tmp_path_factory.mktemp("single") / "klein.safetensors"
    model = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer", dtype=torch.bfloat16)
    model.save_single_file(path)
    return path


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def parts(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))


# ---------------------------------------------------------------------------------------------------------------- mxfp4


def test_pipeline_in_parts(cli, mistake, tmp_path: Path) -> None:
    """Its other parts are copied when the transformer's are merged; a single file is not parted."""
    options = ("--to", "mxfp4", "--shard-size", 0.0004)
    assert cli("convert", TINY, tmp_path / "one", *options).code == 0
    for part in ("2/2", "1/2"):
        assert cli("convert", TINY, tmp_path / "p", *options, "--part", part).code == 0
        assert not (tmp_path / "p" / "vae").exists()
    assert "2 parts merged" in cli("convert", TINY, tmp_path / "p", *options, "--merge").out
    one, made = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "one", tmp_path / "p")
    )
    assert made == one
    line = mistake("convert", TINY, tmp_path / "single", "--layout", "official", "--part", "1/2")
    assert line.endswith("expected a file for each of 2 parts, found 1 in all\n")


def test_pipeline_to_mxfp4_and_back(cli, tmp_path: Path) -> None:
    """The transformer as packing in memory makes it, the other parts as they were, and it draws."""
    outcome = cli("convert", TINY, tmp_path / "p", "--to", "mxfp4", "--verify")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    assert outcome.out.splitlines()[-1].endswith("exactly as in the source, 0 wrong")
    assert parts(tmp_path / "p") == parts(TINY)
    for name in ("model_index.json", "vae/config.json", f"vae/{WEIGHTS}", "text_encoder/model.safetensors"):
        assert (tmp_path / "p" / name).read_bytes() == (TINY / name).read_bytes()
    pipe = load_pipeline(str(tmp_path / "p"))
    made = Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer", dtype=torch.bfloat16)
    assert_same(dict(pipe.transformer.state_dict()), dict(quantize_transformer(made).state_dict()))
    drawn = cli(
        "image", tmp_path / "p", "a red three", "--out", tmp_path / "x.png", "--steps", 1, "--height", 32, "--width",
        32, "--device", "cpu",
    )  # fmt: skip
    assert drawn.code == 0, drawn.err
    assert cli("convert", tmp_path / "p", tmp_path / "b", "--to", "bf16").code == 0
    assert parts(tmp_path / "b") == parts(TINY)
    dense = Flux2Transformer2DModel.from_pretrained(tmp_path / "b", subfolder="transformer", dtype=torch.bfloat16)
    assert "quantization_config" not in json.loads((tmp_path / "b" / "transformer" / "config.json").read_text())
    assert_same(dict(dense.state_dict()), dict(pipe.transformer.dequantize().state_dict()))


def test_single_file_to_mxfp4(cli, single_file: Path, tmp_path: Path) -> None:
    """The same bytes as from the folder; what is joined in the file is parted, and its halves change places."""
    assert cli("convert", single_file, tmp_path / "a", "--to", "mxfp4", "--activations", "mxfp4").code == 0
    source = TINY / "transformer"
    assert cli("convert", source, tmp_path / "b", "--to", "mxfp4", "--activations", "mxfp4").code == 0
    assert_same(load_file(tmp_path / "a" / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS))
    assert parts(tmp_path / "a") == ("config.json", WEIGHTS)
    model = Flux2Transformer2DModel.from_pretrained(tmp_path / "a")
    assert {m.activations for m in model.modules() if isinstance(m, MXFP4Linear)} == {"mxfp4"}


def test_what_is_ignored(cli, tmp_path: Path) -> None:
    """A list of one's own goes before that of the port: here all but the blocks stays dense."""
    pattern = "re:(?!.*transformer_blocks).*"
    outcome = cli("convert", TINY / "transformer", tmp_path / "t", "--to", "mxfp4", "--ignore", pattern)
    assert outcome.code == 0, outcome.err
    model = Flux2Transformer2DModel.from_pretrained(tmp_path / "t")
    names = {name for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}
    assert names
    assert all("transformer_blocks" in name for name in names)


def test_in_several_files(cli, tmp_path: Path) -> None:
    outcome = cli("convert", TINY, tmp_path / "p", "--to", "mxfp4", "--shard-size", 0.0005, "--jobs", 2)
    assert outcome.code == 0, outcome.err
    files = sorted((tmp_path / "p" / "transformer").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "p" / "transformer" / f"{WEIGHTS}.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in files}
    whole = Flux2Transformer2DModel.from_pretrained(tmp_path / "p", subfolder="transformer")
    made = quantize_transformer(Flux2Transformer2DModel.from_pretrained(TINY, subfolder="transformer"))
    assert_same(dict(whole.state_dict()), dict(made.state_dict()))
    # And read again from several.
    assert cli("convert", tmp_path / "p", tmp_path / "b", "--to", "bf16").code == 0


def test_stopped_and_resumed(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half pipeline: until the end nothing says that it is one; what is copied is not copied again."""
    copied: list[str] = []
    copy = writer._copy

    def stopping(path: Path, file: Any) -> None:
        copied.append(path.name)
        if path.parent.name == "vae":
            raise OSError(errno.ENOSPC, "full")
        copy(path, file)

    target = tmp_path / "p"
    monkeypatch.setattr(writer, "_copy", stopping)
    assert "expected room on the disk" in cli("convert", TINY, target, "--to", "mxfp4").err
    assert not (target / "model_index.json").exists()
    assert "model.safetensors" in copied
    monkeypatch.setattr(writer, "_copy", lambda path, file: (copied.append(path.name), copy(path, file)))
    copied.clear()
    outcome = cli("convert", TINY, target, "--to", "mxfp4", "--resume")
    assert outcome.code == 0, outcome.err
    assert "model.safetensors" not in copied
    assert WEIGHTS in copied
    assert parts(target) == parts(TINY)
    load_pipeline(str(target))
    # Complete: nothing is left to do.
    assert cli("convert", TINY, target, "--to", "mxfp4", "--resume").code == 0


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."], ids=["plain", "comfy"])
def test_names_both_ways(cli, single_file: Path, tmp_path: Path, prefix: str) -> None:
    source = tmp_path / "x.safetensors"
    save_file({prefix + name: t for name, t in load_file(single_file).items()}, source)
    assert cli("convert", source, tmp_path / "t", "--layout", "hf", "--verify").code == 0
    assert_same(load_file(tmp_path / "t" / WEIGHTS), load_file(TINY / "transformer" / WEIGHTS))
    config, expected = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "t", TINY / "transformer"))
    expected.pop("_name_or_path", None)
    assert {k: config[k] for k in expected if not k.startswith("_")} == {
        k: v for k, v in expected.items() if not k.startswith("_")
    }
    assert cli("convert", tmp_path / "t", tmp_path / "o", "--layout", "official", "--verify").code == 0
    assert parts(tmp_path / "o") == ("flux2.safetensors",)
    assert_same(load_file(tmp_path / "o" / "flux2.safetensors"), load_file(single_file))


def test_official_names_of_a_pipeline(cli, single_file: Path, tmp_path: Path) -> None:
    """In one file, whatever the largest size."""
    options = ("--layout", "official", "--shard-size", 0.0005)
    assert cli("convert", TINY, tmp_path / "o", *options).code == 0
    assert parts(tmp_path / "o") == ("flux2.safetensors",)
    assert_same(load_file(tmp_path / "o" / "flux2.safetensors"), load_file(single_file))
    again = cli("convert", TINY, tmp_path / "o", *options, "--resume")
    assert again.code == 0, again.err
    assert "1 of them there already" in again.out


def test_dry_run(cli, single_file: Path, tmp_path: Path) -> None:
    outcome = cli("convert", single_file, tmp_path / "t", "--layout", "hf", "--dry-run")
    assert outcome.code == 0, outcome.err
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if line}
    assert "part of double_blocks.0.img_attn.qkv.weight" in lines["transformer_blocks.0.attn.to_k.weight"]
    assert "renamed from txt_in.weight" in lines["context_embedder.weight"]
    assert not (tmp_path / "t").exists()


def test_a_target_beside_the_file(cli, single_file: Path) -> None:
    outcome = cli("convert", single_file, single_file.parent / "inside", "--to", "bf16")
    assert outcome.code == 0, outcome.err
    Flux2Transformer2DModel.from_pretrained(single_file.parent / "inside")


# ------------------------------------------------------------------------------------------------------------- mistakes

BROKEN = {
    "missing": ("double_blocks.1.txt_mlp.2.weight", None, "transformer_blocks.1.ff_context.linear_out.weight"),
    "without a place": ("double_blocks.0.img_attn.extra", torch.ones(1), "double_blocks.0.img_attn.extra"),
    "shape": ("single_blocks.1.linear2.weight", torch.zeros(2, 2), "single_blocks.1.linear2.weight"),
    "quantized": ("double_blocks.0.img_attn.qkv.weight_scale", torch.ones(1), "qkv.weight_scale"),
    "no transformer": ("img_in.weight", None, "x_embedder.weight"),
}


@pytest.mark.parametrize("option", [("--to", "mxfp4"), ("--layout", "hf")], ids=lambda o: o[1])
@pytest.mark.parametrize(("name", "tensor", "key"), BROKEN.values(), ids=BROKEN)
def test_files_convert_whole_or_not_at_all(
    mistake, single_file: Path, tmp_path: Path, name: str, tensor: Tensor | None, key: str, option: tuple[str, str]
) -> None:
    tensors = load_file(single_file)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, tmp_path / "x.safetensors")
    assert key in mistake("convert", tmp_path / "x.safetensors", tmp_path / "t", *option)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("extra", [False, True], ids=["missing", "without a place"])
def test_folders_convert_whole_or_not_at_all(cli, mistake, tmp_path: Path, packed: bool, extra: bool) -> None:
    source = tmp_path / "s"
    if packed:
        assert cli("convert", TINY / "transformer", source, "--to", "mxfp4").code == 0
    else:
        shutil.copytree(TINY / "transformer", source)
    tensors = load_file(source / WEIGHTS)
    key = "transformer_blocks.0.attn.norm_q.weight"
    if extra:
        key = "transformer_blocks.0.attn.to_q.bias"
        tensors[key] = torch.zeros(128)
    else:
        del tensors[key]
    save_file(tensors, source / WEIGHTS)
    assert key in mistake("convert", source, tmp_path / "t", "--to", "bf16")


def test_what_has_no_names_of_theirs(cli, mistake, tmp_path: Path) -> None:
    """Packed weights, and other classes of diffusers."""
    assert cli("convert", TINY / "transformer", tmp_path / "q", "--to", "mxfp4").code == 0
    assert "expected none, to change names" in mistake(
        "convert", tmp_path / "q", tmp_path / "t", "--layout", "official"
    )
    line = mistake("convert", TINY / "vae", tmp_path / "t", "--to", "bf16")
    assert "_class_name: expected 'Flux2Transformer2DModel', found 'AutoencoderKLFlux2'" in line
    file = tmp_path / "other.safetensors"
    save_file({"a.weight": torch.zeros(2, 2)}, file)
    assert "x_embedder.weight: expected a tensor of FLUX.2's transformer" in mistake(
        "convert", file, tmp_path / "t", "--to", "bf16"
    )
