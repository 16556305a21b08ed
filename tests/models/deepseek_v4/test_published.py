"""Published files with FP8 and FP4 weights: what they become, and what transformers makes of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers import DeepseekV4ForCausalLM as TransformersV4

import xpu_ports.models
from xpu_ports.common.weights import CheckpointError
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM, published
from xpu_ports.models.deepseek_v4.published import DenseOnDemand, dense_weights

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
       "activation_scheme": "dynamic"}  # fmt: skip
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp8(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, a scale for each tile of 128 x 128, and the numbers."""
    N, K = weight.shape
    rows, columns = torch.arange(N) // 128, torch.arange(K) // 128
    scales = torch.zeros(-(-N // 128), -(-K // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            scales[i, j] = torch.exp2(torch.log2(tile.abs().max() / 448).ceil())
    grid = scales[rows][:, columns]
    codes = (weight / grid).to(torch.float8_e4m3fn)
    return codes, scales.to(dtype), codes.float() * grid


def fp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two codes a byte, the even column's in the low half, a scale for 32 columns, and the numbers."""
    blocks = weight.unflatten(-1, (-1, 32))
    scales = torch.exp2(torch.log2(blocks.abs().amax(-1) / 6).ceil().clamp(min=-20))
    scaled = blocks / scales[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    numbers = torch.where(scaled < 0, -E2M1[codes], E2M1[codes]) * scales[..., None]
    codes = (codes + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.view(torch.int8), scales.to(torch.float8_e8m0fnu), numbers.flatten(-2)


def is_fp8(key: str) -> bool:
    return key.endswith(
        tuple(f"{name}.weight" for name in ("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "e_proj", "h_proj"))
    ) or ("shared_experts" in key)


def make(folder: Path, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> dict[str, Tensor]:
    """tiny-deepseek-v4 in the published dtypes; gives the numbers of every tensor, under published names."""
    tensors, numbers = {}, {}
    for key, t in load_file(CHECKPOINT / "model.safetensors").items():
        name = key.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        layer = name.removesuffix(".weight")
        if ".experts." in name:
            tensors[name], tensors[f"{layer}.scale"], numbers[name] = fp4(t.float())
        elif is_fp8(name):
            tensors[name], tensors[f"{layer}.scale"], numbers[name] = fp8(t.float(), scale_dtype)
        else:
            wide = any(part in name for part in ("hc_", "attn_sink", "ape", "gate.bias"))
            tensors[name] = numbers[name] = t.float() if wide else t
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((CHECKPOINT / "config.json").read_text())
    config |= {"quantization_config": FP8, "expert_dtype": "fp4", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return numbers


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("quantized")
    return folder, make(folder)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def saved(model, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("mtp", [False, True])
def test_every_number(quantized, tmp_path, mtp):
    folder, numbers = quantized
    numbers = {key: t for key, t in numbers.items() if mtp or not key.startswith("mtp.")}
    model, info = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True, mtp=mtp)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    found = saved(model, tmp_path)
    assert found.keys() == numbers.keys()
    for key, t in found.items():
        assert torch.equal(t.float(), numbers[key].float()), key
    # What was saved is dense, says so, and loads anywhere.
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = DeepseekV4ForCausalLM.from_pretrained(tmp_path, mtp=mtp).state_dict()
    assert all(torch.equal(again[key], t) for key, t in model.state_dict().items())


def test_scales_in_fp32(tmp_path):
    """As in Base checkpoints; a power of two here, so that the numbers are the same."""
    numbers = make(tmp_path, torch.float32)
    tensors = dense_weights(tmp_path)
    for key, t in numbers.items():
        assert torch.equal(tensors[key][...].float(), t.float()), key
        assert tensors[key].shape == t.shape


def test_beside_transformers(quantized):
    """The same folder in both: the same numbers, so that logits differ as two runs in bf16 do."""
    folder, _ = quantized
    x = (torch.arange(3, 103) * 7 % 2048)[None]
    options = {"dtype": torch.bfloat16, "index_topk": 1000}
    ours, theirs = (
        cls.from_pretrained(folder, **options).eval()(x).logits.float()
        for cls in (DeepseekV4ForCausalLM, TransformersV4)
    )
    exact = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, index_topk=1000).eval()(x).logits
    error = (ours - exact).abs().median()
    assert error <= 1.1 * (theirs - exact).abs().median()
    assert error < 0.02 * exact.abs().max()


def test_nothing_is_read_before_it_is_asked_for(quantized):
    tensors = dense_weights(quantized[0])
    t = tensors["layers.0.ffn.experts.3.w2.weight"]
    assert isinstance(t, DenseOnDemand)
    assert (t.shape, t.dtype) == ((128, 64), torch.bfloat16)
    with pytest.raises(TypeError, match="not read yet"):
        torch.exp(t)
    assert t[...].shape == (128, 64)


def test_arguments_go_on(quantized, tmp_path):
    folder, _ = quantized
    model = DeepseekV4ForCausalLM.from_pretrained(folder, index_topk=5, cache_dtype="fp8")
    assert model.config.index_topk == 5
    assert model.name_or_path == str(folder)
    assert DeepseekV4Cache(model.config).layers[0].fp8
    assert model.generation_config.eos_token_id == 2
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    GenerationConfig(eos_token_id=7).save_pretrained(tmp_path)
    assert DeepseekV4ForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == 7


def test_auto_classes(quantized):
    xpu_ports.models.register("deepseek_v4")
    model = AutoModelForCausalLM.from_pretrained(quantized[0], dtype=torch.bfloat16)
    assert type(model) is DeepseekV4ForCausalLM
    assert model.model.layers[0].self_attn.q_a_proj.weight.abs().max() > 0


def test_from_the_hub(quantized, monkeypatch):
    folder = quantized[0]
    asked = []
    monkeypatch.setattr(published, "find_config", lambda path, **options: str(folder / "config.json"))
    monkeypatch.setattr(
        published, "snapshot_download", lambda *args, **options: asked.append((args, options)) or folder
    )
    model = DeepseekV4ForCausalLM.from_pretrained("someone/some-model", revision="abc", dtype=torch.bfloat16)
    assert asked == [(("someone/some-model",), {"revision": "abc"})]
    assert model.name_or_path == "someone/some-model"


@pytest.mark.parametrize("lost", ["layers.0.attn.wq_a.scale", "layers.3.ffn.experts.2.w3.scale"])
def test_a_weight_without_its_scale(quantized, tmp_path, lost):
    tensors = load_file(quantized[0] / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(quantized[0] / "config.json")
    with pytest.raises(CheckpointError, match=lost.removesuffix(".scale").replace(".", r"\.")):
        DeepseekV4ForCausalLM.from_pretrained(tmp_path)


def test_a_layer_that_is_not_quantized(quantized, tmp_path):
    """It goes by dtype, not by what config.json says of all layers: a bf16 weight has no scale."""
    tensors = load_file(quantized[0] / "model.safetensors")
    weight = torch.randn(128, 256).bfloat16()
    tensors["layers.1.attn.wo_a.weight"] = weight
    del tensors["layers.1.attn.wo_a.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(quantized[0] / "config.json")
    model = DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(model.model.layers[1].self_attn.o_a_proj.weight, weight)
