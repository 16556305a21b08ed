"""Models quantized in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import xpu_ports.quant
from tests.quant.producers import prompt, tiny_llama, write_with_compressed_tensors
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.linear import MXFP4Linear
from xpu_ports.quant.mxfp4.quantize import quantize_model

KIMI = Path(__file__).parents[3] / "checkpoints" / "tiny-kimi-linear"


@pytest.mark.parametrize("activations", [None, "mxfp4"])
@pytest.mark.parametrize("rule", ["even", "floor", "rceil"])
def test_every_layer_has_the_values_of_the_codec(rule: str, activations: str | None) -> None:
    model, ignore = tiny_llama(), ["lm_head", r"re:.*\.1\.mlp\..*"]
    dense = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert quantize_model(model, activations, rule, ignore) is model
    for name, layer in dense.items():
        new = model.get_submodule(name)
        if name == "lm_head" or ".1.mlp." in name:
            assert new is layer
            continue
        assert isinstance(new, MXFP4Linear)
        assert (new.activations, new.bias) == (activations, layer.bias)
        expected = dequantize(*quantize(layer.weight, rule), torch.float32)
        assert torch.equal(new.dequantize(torch.float32).weight, expected)


def test_the_same_file_as_compressed_tensors_writes(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(1)
    ours = tiny_llama().bfloat16()
    torch.manual_seed(1)
    theirs = tiny_llama().bfloat16()
    quantize_model(ours, "mxfp4", ignore=["lm_head"]).save_pretrained(tmp_path / "ours")
    write_with_compressed_tensors(theirs, tmp_path / "theirs", {"MXFP4": ["Linear"]})
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs")]
    assert files[0] == files[1]


def test_a_tied_head_stays_dense_and_is_in_ignore(tmp_path: Path) -> None:
    model = quantize_model(tiny_llama(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.quantization_config.values["ignore"] == ["lm_head"]
    model.save_pretrained(tmp_path)
    xpu_ports.quant.register()
    try:
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        xpu_ports.quant.unregister()
    x = prompt(96)
    assert torch.equal(again(x).logits, model(x).logits)


def test_dense_again(tmp_path: Path) -> None:
    model = quantize_model(tiny_llama(), ignore=["lm_head"])
    x = prompt(96)
    logits = model(x).logits
    dense = model.dequantize()
    assert not any(isinstance(m, MXFP4Linear) for m in dense.modules())
    torch.testing.assert_close(dense(x).logits, logits)
    dense.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path)(x).logits, dense(x).logits)


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match=r"gate_proj\.weight has rows of 48 values, not a multiple of 32: name it in"):
        quantize_model(tiny_llama(hidden_size=48, intermediate_size=64), ignore=["re:.*self_attn.*"])
    with pytest.raises(ValueError, match="the model is quantized already"):
        quantize_model(quantize_model(tiny_llama()))
    with pytest.raises(ValueError, match="'int4'"):
        quantize_model(tiny_llama(), "int4")
    with pytest.raises(ValueError, match="'nearest'"):
        quantize_model(tiny_llama(), scale_rule="nearest")
    model = KimiLinearForCausalLM.from_pretrained(KIMI)
    with pytest.raises(ValueError, match=r"ignore names a part of model\.layers\.0\.mlp\.gate_up_proj: model"):
        quantize_model(model, ignore=["model.layers.0.mlp.up_proj"])
    # Nothing is half done.
    assert not any(isinstance(m, MXFP4Linear) for m in model.modules())
