"""DeepSeek-V4 with packed MXFP4 experts: the numbers of dense ones, clamped, and published names in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.quant.mxfp4.format import dequantize
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear
from xpu_ports.quant.mxfp4.quantize import quantize_model

CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "tiny-deepseek-v4"
EXPERTS_ALONE = [r"re:(?!.*\.experts).*"]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def load(folder: Path, **overrides):
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, **overrides).eval()


def of_packed_numbers(model, **overrides):
    """The dense model with the numbers of the packed one."""
    dense = load(CHECKPOINT, **overrides)
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Experts):
            target = dense.get_submodule(name)
            for part in ("gate_up_proj", "down_proj"):
                packed, scale = (getattr(module, f"{part}_{suffix}") for suffix in ("packed", "scale"))
                getattr(target, part).copy_(dequantize(packed, scale, torch.float32))
        elif isinstance(module, MXFP4Linear):
            dense.get_submodule(name).weight.copy_(module.dequantize(torch.float32).weight)
    return dense


@pytest.mark.parametrize("ignore", [EXPERTS_ALONE, ["head"]], ids=["experts", "all but the head"])
def test_numbers(ignore, tmp_path):
    x = (torch.arange(3, 93) * 7 % 2048)[None]
    overrides = {"index_topk": 1000, "swiglu_limit": 0.1}
    packed = quantize_model(load(CHECKPOINT, **overrides), ignore=ignore)
    kinds = [type(m) for m in packed.modules()]
    assert kinds.count(MXFP4Experts) == 6
    assert (kinds.count(MXFP4Linear) > 30) == (ignore is not EXPERTS_ALONE)
    logits, dense = packed(x).logits, of_packed_numbers(packed, **overrides)
    assert (logits - dense(x).logits).abs().max() <= 1e-4
    packed.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "layers.3.ffn.experts.5.w2.weight_packed" in names
    assert not any("kv_norm.weight_packed" in n or n.startswith("model.") for n in names)
    assert torch.equal(load(tmp_path)(x).logits, logits)
    # With this limit most activations are clamped, those of the packed experts too.
    for module in packed.modules():
        if isinstance(module, MXFP4Experts):
            module.limit = None
    assert (packed(x).logits - logits).abs().max() > 0.1


def test_what_ops_read_themselves_stays_dense():
    """The compressors' projections, the routers, and the grouped projection of the output."""
    packed = quantize_model(load(CHECKPOINT))
    for layer in packed.model.layers:
        assert layer.self_attn.o_a_proj.weight.dtype == torch.float32
        assert layer.mlp.gate.weight.dtype == torch.float32
        if layer.self_attn.compressor is not None:
            assert layer.self_attn.compressor.kv_gate_proj.weight.dtype == torch.float32
