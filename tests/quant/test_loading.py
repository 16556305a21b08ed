"""MXFP4 checkpoints through `from_pretrained`, against dense models with the same values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers import Zamba2ForCausalLM as TransformersZamba2

import xpu_ports.quant
from tests.quant.producers import configure, prompt, tiny_llama, write_with_compressed_tensors
from xpu_ports.common.accuracy import assert_close
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.common.dispatch import explain, reset_explain
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.quant.mxfp4.format import dequantize, quantize
from xpu_ports.quant.mxfp4.linear import MXFP4Experts, MXFP4Linear
from xpu_ports.quant.mxfp4.quantize import quantize_model

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
# Rank 16 is no multiple of 32.
ADAPTERS = "re:.*adapter_list.*"
SCHEMES = {"W4A16": "MXFP4A16", "W4A4": "MXFP4"}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    xpu_ports.quant.register()
    yield
    xpu_ports.quant.unregister()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of every model and scheme, by compressed-tensors."""
    pytest.importorskip("compressed_tensors")
    folder = tmp_path_factory.mktemp("written")
    torch.manual_seed(0)
    for scheme, preset in SCHEMES.items():
        write_with_compressed_tensors(tiny_llama().bfloat16(), folder / f"llama-{scheme}", {preset: ["Linear"]})
        zamba2 = TransformersZamba2.from_pretrained(CHECKPOINTS / "tiny-zamba2")
        write_with_compressed_tensors(zamba2, folder / f"zamba2-{scheme}", {preset: ["Linear"]}, ("lm_head", ADAPTERS))
    return folder


@pytest.fixture
def llama(written: Path, tmp_path: Path) -> Path:
    """A copy of the Llama with packed weights alone."""
    return Path(shutil.copytree(written / "llama-W4A16", tmp_path / "llama"))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {key: t.clone() for key, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Names and bytes; but our Zamba2 holds A_log, and so saves it, in fp32."""
    return a.keys() == b.keys() and all(
        torch.equal(a[k].float(), b[k].float())
        if k.endswith("A_log")
        else a[k].dtype == b[k].dtype and torch.equal(a[k], b[k])
        for k in a
    )


def packed_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MXFP4Linear)}


def dense_twin(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The model with dense layers of the same values, which round their inputs where the packed ones do."""
    schemes = {name: layer.activations for name, layer in packed_layers(model).items()}
    dense = model.dequantize(dtype).to(dtype)
    for name, activations in schemes.items():
        if activations is not None:
            dense.get_submodule(name).register_forward_pre_hook(
                lambda module, args: (dequantize(*quantize(args[0]), args[0].dtype),)
            )
    return dense


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """With our port where there is one."""
    port = Zamba2ForCausalLM if "zamba2" in folder.name else AutoModelForCausalLM
    return port.from_pretrained(folder, **options)


# ------------------------------------------------------------------------------------------------- sound checkpoints


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "zamba2"])
def test_a_checkpoint_stays_packed_and_computes_what_dense_layers_would(
    written: Path, tmp_path: Path, name: str, scheme: str
) -> None:
    folder = written / f"{name}-{scheme}"
    model = load(folder)
    x = prompt(model.config.vocab_size)
    with torch.no_grad():
        logits = [model(x).logits for _ in range(10)][-1]
        expected = dense_twin(load(folder), torch.bfloat16)(x).logits
        exact = dense_twin(load(folder), torch.float64)(x).logits
    assert_close(logits, expected, exact)
    layers = packed_layers(model)
    assert len(layers) == {"llama": 14, "zamba2": 30}[name]
    assert {layer.activations for layer in layers.values()} == {None if scheme == "W4A16" else "mxfp4"}
    held = [t for m in layers.values() for t in [*m.parameters(), *m.buffers()] if t is not m.bias]
    weights = sum(m.in_features * m.out_features for m in layers.values())
    assert sum(t.untyped_storage().nbytes() for t in held) * 8 <= 4.5 * weights
    assert not any(isinstance(v, Tensor) for m in layers.values() for v in vars(m).values())
    # After ten runs saving writes what was loaded.
    model.save_pretrained(tmp_path)
    assert same(tensors_of(folder), tensors_of(tmp_path))
    configs = [json.loads((f / "config.json").read_text())["quantization_config"] for f in (folder, tmp_path)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype(written: Path, dtype: torch.dtype) -> None:
    for scheme in SCHEMES:
        model = load(written / f"llama-{scheme}", dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype, torch.uint8}
        x = prompt(96)
        with torch.no_grad():
            exact = dense_twin(load(written / f"llama-{scheme}", dtype=dtype), torch.float64)(x).logits
            expected = dense_twin(load(written / f"llama-{scheme}", dtype=dtype), dtype)(x).logits
            assert_close(model(x).logits, expected, exact)


def test_generate_on_the_port_and_what_explain_says(written: Path) -> None:
    model = load(written / "zamba2-W4A16")
    reset_explain()
    out = model.generate(prompt(2048, 9), max_new_tokens=5, do_sample=False)
    assert out.shape == (2, 14)
    lines = {line.op: (line.backend, line.reason) for line in explain(show=False)}
    assert lines["mxfp4_linear"][0] == "reference"
    apart = ("layers apart", "MXFP4Linear is not an nn.Linear with a dense weight")
    assert all(lines[op] == apart for op in ("norm_linear", "norm_glu", "adapted_linears", "mamba2_decode_linear"))
    dense = load(written / "zamba2-W4A16").dequantize()
    assert torch.equal(dense.generate(out[:, :9], max_new_tokens=5, do_sample=False), out)


def test_shared_blocks_share_their_bytes(tmp_path: Path) -> None:
    kinds = ["linear_attention", "hybrid", "hybrid", "hybrid", "linear_attention", "hybrid"]
    config = transformers.Zamba2Config(
        vocab_size=64, hidden_size=64, num_hidden_layers=6, layers_block_type=kinds, n_mamba_heads=4, mamba_d_state=16,
        num_attention_heads=2, num_mem_blocks=2, adapter_rank=32, intermediate_size=96, pad_token_id=0,
    )  # fmt: skip
    model = quantize_model(Zamba2ForCausalLM(config).eval(), "mxfp4")
    model.save_pretrained(tmp_path / "zamba2")
    # The blocks of places 1 and 2 are saved, and the tied head is not.
    stored = tensors_of(tmp_path / "zamba2")
    assert "model.layers.2.shared_transformer.self_attn.q_proj.weight_packed" in stored
    assert not any(key.startswith(("model.layers.3.shared", "model.layers.5.shared", "lm_head")) for key in stored)
    again = load(tmp_path / "zamba2")
    for m in (model, again):
        blocks = [m.model.layers[i].shared_transformer.feed_forward.down_proj for i in (1, 2, 3, 5)]
        for key in ("weight_packed", "weight_scale"):
            assert getattr(blocks[0], key) is getattr(blocks[2], key)
            assert getattr(blocks[1], key) is getattr(blocks[3], key)
        assert m.lm_head.weight is m.model.embed_tokens.weight
    x = prompt(64)
    assert torch.equal(model(x).logits, again(x).logits)
    dense = again.dequantize()
    layers = dense.model.layers
    assert layers[1].shared_transformer.feed_forward.down_proj.weight is (
        layers[3].shared_transformer.feed_forward.down_proj.weight
    )
    dense.save_pretrained(tmp_path / "dense")
    loaded = Zamba2ForCausalLM.from_pretrained(tmp_path / "dense")
    assert same(dense.state_dict(), loaded.state_dict())


def test_kimi_linear_with_packed_experts(tmp_path: Path) -> None:
    model = KimiLinearForCausalLM.from_pretrained(CHECKPOINTS / "tiny-kimi-linear")
    quantize_model(model, ignore=["lm_head", "re:.*o_proj", "model.layers.1.block_sparse_moe.shared_experts.down_proj"])
    x = prompt(2048)
    logits = model(x).logits
    model.save_pretrained(tmp_path)
    stored = tensors_of(tmp_path)
    # The published layout: a tensor for each projection and each expert.
    moe = "model.layers.1.block_sparse_moe"
    assert stored[f"{moe}.experts.7.w3.weight_packed"].shape == (64, 64)
    assert stored["model.layers.0.self_attn.k_proj.weight_scale"].shape == (128, 4)
    assert f"{moe}.shared_experts.down_proj.weight" in stored
    for _ in range(2):
        again = KimiLinearForCausalLM.from_pretrained(tmp_path)
        assert sum(isinstance(m, MXFP4Experts) for m in again.modules()) == 7
        assert same(model.state_dict(), again.state_dict())
        assert torch.equal(again(x).logits, logits)
        # Once more with scales of a dtype of their own.
        edit(tmp_path, type_scales)


def type_scales(tensors: dict[str, Tensor]) -> None:
    tensors.update({k: t.view(torch.float8_e8m0fnu) for k, t in tensors.items() if k.endswith("weight_scale")})


def test_scales_of_a_dtype_of_their_own_are_bytes(llama: Path, tmp_path: Path) -> None:
    expected = load(llama).state_dict()
    before = tensors_of(llama)
    edit(llama, type_scales)
    assert tensors_of(llama)["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float8_e8m0fnu
    model = load(llama)
    assert same(model.state_dict(), expected)
    # Files should have bytes: others convert the numbers.
    model.save_pretrained(tmp_path / "saved")
    assert same(tensors_of(tmp_path / "saved"), before)


@pytest.mark.parametrize("typed", [False, True], ids=["bytes", "typed"])
def test_shards_and_devices(llama: Path, tmp_path: Path, typed: bool) -> None:
    model = load(llama)
    x = prompt(96)
    logits = model(x).logits
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert same(tensors_of(tmp_path / "shards"), tensors_of(llama))
    if typed:
        for file in (tmp_path / "shards").glob("*.safetensors"):
            tensors = load_file(file)
            type_scales(tensors)
            save_file(tensors, file, metadata={"format": "pt"})
    split = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
             "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    for device_map in (None, "auto", {"": "cpu"}, split):
        loaded = load(tmp_path / "shards", device_map=device_map, offload_folder=tmp_path / "offload")
        assert isinstance(loaded.model.layers[1].mlp.up_proj, MXFP4Linear)
        for _ in range(2):
            assert torch.equal(loaded(x).logits, logits)


def test_groups_and_overrides_by_module(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    presets = {"MXFP4A16": ["Linear"], "MXFP4": [r"re:.*down_proj", "model.layers.0.self_attn.q_proj"]}
    ignore = ["lm_head", r"re:.*layers\.1\.self_attn.*"]
    write_with_compressed_tensors(tiny_llama().bfloat16(), tmp_path, presets, ignore)
    model = load(tmp_path)
    layers = packed_layers(model)
    assert len(layers) == 10
    quantized_inputs = {name for name, layer in layers.items() if layer.activations}
    assert quantized_inputs == {
        "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
    }  # fmt: skip
    x = prompt(96)
    exact, expected = (dense_twin(load(tmp_path), dtype)(x).logits for dtype in (torch.float64, torch.bfloat16))
    assert_close(model(x).logits, expected, exact)


def test_base_model_and_load(llama: Path) -> None:
    model = AutoModel.from_pretrained(llama)
    assert len(packed_layers(model)) == 14
    causal = xpu_ports.quant.load(llama, dtype="float32")
    assert causal.dtype == torch.float32
    assert torch.equal(causal.model.layers[0].mlp.up_proj.weight_packed, model.layers[0].mlp.up_proj.weight_packed)
    assert isinstance(xpu_ports.quant.load(llama, "AutoModel"), type(model))


def test_a_head_that_is_packed_and_a_base_model_that_does_not_read_it(tmp_path: Path) -> None:
    quantize_model(tiny_llama()).save_pretrained(tmp_path)
    assert isinstance(load(tmp_path).lm_head, MXFP4Linear)
    assert len(packed_layers(AutoModel.from_pretrained(tmp_path))) == 14


@pytest.mark.parametrize("activations", [None, "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_we_write_loads_in_compressed_tensors(tmp_path: Path, dtype: torch.dtype, activations: str | None) -> None:
    pytest.importorskip("compressed_tensors")
    model = quantize_model(tiny_llama().to(dtype), activations, ignore=["lm_head", "re:.*k_proj"])
    model.save_pretrained(tmp_path)
    xpu_ports.quant.unregister()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    x = prompt(96)
    theirs(x)
    for name, layer in packed_layers(model).items():
        dense = theirs.get_submodule(name)
        assert torch.equal(dense.weight, layer.dequantize(torch.bfloat16).weight), name
        assert (dense.quantization_scheme.input_activations is None) == (activations is None)
    assert not hasattr(theirs.model.layers[0].self_attn.k_proj, "quantization_scheme")


def test_other_formats_go_to_transformers(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    write_with_compressed_tensors(tiny_llama().bfloat16(), tmp_path, {"FP8_DYNAMIC": ["Linear"]})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config: expected format 'mxfp4-pack-qua"):
        xpu_ports.quant.load(tmp_path)


def test_compressed_tensors_need_not_be_installed(llama: Path) -> None:
    script = f"""
        import sys
        sys.modules["compressed_tensors"] = None
        import xpu_ports.quant
        model = xpu_ports.quant.load({str(llama)!r})
        model.save_pretrained({str(llama.parent / "saved")!r})
        print(type(model.model.layers[0].mlp.up_proj).__name__)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "MXFP4Linear", run.stderr
    assert same(tensors_of(llama), tensors_of(llama.parent / "saved"))


# ------------------------------------------------------------------------------------------------------------- faults

UP = "model.layers.1.mlp.up_proj"
FILE = "model.safetensors"
Change = Callable[[dict[str, Tensor]], Any]
FAULTS: dict[str, tuple[Change, str, str, str]] = {
    # What is done to the tensors, then: the key named, and what is expected, and found.
    "no-scale": (lambda t: t.pop(f"{UP}.weight_scale"), f"{UP}.weight_packed", f"{UP}.weight_scale beside it", "none"),
    "no-weight": (
        lambda t: t.pop(f"{UP}.weight_packed"), f"{UP}.weight_scale", f"{UP}.weight_packed beside it", "none",
    ),
    "dense": (
        lambda t: [t.update({f"{UP}.weight": torch.zeros(160, 64)}), t.pop(f"{UP}.weight_packed"),
                   t.pop(f"{UP}.weight_scale")], f"{UP}.weight", f"{UP}.weight_packed", "float32 [160, 64]",
    ),
    "both": (
        lambda t: t.update({f"{UP}.weight": torch.zeros(160, 64)}), f"{UP}.weight", "a weight once, packed or not",
        "float32 [160, 64]",
    ),
    "scale-of-a-norm": (
        lambda t: t.update({"model.norm.weight_scale": torch.zeros(2)}), "model.norm.weight_scale",
        "model.norm.weight_packed beside it", "none",
    ),
    "scale-of-what-is-dense": (
        lambda t: t.update({"lm_head.weight_scale": torch.zeros(2)}), "lm_head.weight_scale",
        "lm_head.weight_packed beside it", "none",
    ),
    "packed-but-ignored": (
        lambda t: t.update({"lm_head.weight_packed": t.pop("lm_head.weight").view(torch.uint8)}),
        "lm_head.weight_packed", "lm_head.weight", "uint8 [96, 128]",
    ),
    "global-scale": (
        lambda t: t.update({f"{UP}.weight_global_scale": torch.ones(1)}), f"{UP}.weight_global_scale",
        "a linear layer of LlamaForCausalLM that reads it", "float32 [1]",
    ),
    "input-scale": (
        lambda t: t.update({f"{UP}.input_scale": torch.ones(1)}), f"{UP}.input_scale", "a linear layer of Llama",
        "float32 [1]",
    ),
    "packed-layer-without-a-place": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight_packed": torch.zeros(4, 16, dtype=torch.uint8),
                            "model.layers.2.mlp.up_proj.weight_scale": torch.zeros(4, 1, dtype=torch.uint8)}),
        "model.layers.2.mlp.up_proj.weight_packed", "a linear layer of LlamaForCausalLM that reads it", "uint8 [4, 16]",
    ),
    "columns": (
        lambda t: t.update({f"{UP}.weight_packed": torch.zeros(160, 24, dtype=torch.uint8)}), f"{UP}.weight_packed",
        "rows of a multiple of 32 values", "48",
    ),
    "shape": (
        lambda t: t.update({f"{UP}.weight_packed": torch.zeros(160, 48, dtype=torch.uint8)}), f"{UP}.weight_packed",
        "shape [160, 32]", "[160, 48]",
    ),
    "dtype": (
        lambda t: t.update({f"{UP}.weight_packed": torch.zeros(160, 32)}), f"{UP}.weight_packed", "uint8 of two dim",
        "float32 [160, 32]",
    ),
    "scale-shape": (
        lambda t: t.update({f"{UP}.weight_scale": torch.zeros(160, 1, dtype=torch.uint8)}), f"{UP}.weight_scale",
        "uint8 or float8_e8m0fnu [160, 2]", "uint8 [160, 1]",
    ),
    "scale-dtype": (
        lambda t: t.update({f"{UP}.weight_scale": torch.zeros(160, 2, dtype=torch.float8_e4m3fn)}),
        f"{UP}.weight_scale", "uint8 or float8_e8m0fnu [160, 2]", "float8_e4m3fn [160, 2]",
    ),
}  # fmt: skip


@pytest.fixture
def _nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(transformers.core_model_loading, "spawn_materialize", read)


def error_of(folder: Path, load: Callable[[Path], Any] = load) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return caught.value


@pytest.mark.usefixtures("_nothing_is_read")
@pytest.mark.parametrize("fault", FAULTS)
def test_tensors_that_do_not_fit(llama: Path, fault: str) -> None:
    change, key, expected, found = FAULTS[fault]
    edit(llama, change)
    error = error_of(llama)
    assert (error.file, error.key, error.found) == (str(llama / FILE), key, found)
    assert expected in error.expected
    assert key in str(error)


@pytest.mark.usefixtures("_nothing_is_read")
def test_a_layer_that_is_missing_and_a_file_that_is_cut_off(llama: Path) -> None:
    edit(llama, lambda t: [t.pop(f"{UP}.{name}") for name in ("weight_packed", "weight_scale")])
    error = error_of(llama)
    assert (error.file, error.key, error.found) == (str(llama / "config.json"), UP, "none")
    data = (llama / FILE).read_bytes()
    (llama / FILE).write_bytes(data[:-1])
    assert error_of(llama).hint == "the file is truncated"


@pytest.mark.usefixtures("_nothing_is_read")
def test_configs_that_do_not_fit(llama: Path) -> None:
    configure(llama, lambda c: c["ignore"].append(UP))
    error = error_of(llama)
    assert (error.file, error.key, error.expected) == (str(llama / FILE), f"{UP}.weight_packed", f"{UP}.weight")
    assert error.hint == "of the config ignore names it"
    configure(llama, lambda c: c.update(ignore=["lm_head"]))
    configure(llama, lambda c: c["config_groups"]["group_0"].update(targets=["re:.*q_proj"]))
    assert error_of(llama).hint == "of the config no group targets it"
    configure(llama, lambda c: c.update(format="mxfp4-unpacked"))
    error = error_of(llama)
    assert (error.file, error.key) == (str(llama / "config.json"), "quantization_config.format")
    assert error.found == "'mxfp4-unpacked'"


@pytest.mark.usefixtures("_nothing_is_read")
def test_a_packed_head_that_should_be_the_embedding(tmp_path: Path) -> None:
    quantize_model(tiny_llama()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    error = error_of(tmp_path)
    assert error.key == "lm_head.weight_packed"
    assert error.expected == "lm_head.weight, since lm_head.weight is tied to model.embed_tokens.weight"


@pytest.mark.usefixtures("_nothing_is_read")
def test_faults_of_a_port(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written / "zamba2-W4A16", tmp_path / "zamba2"))
    before = (folder / FILE).read_bytes()
    for key, expected in (
        ("model.layers.0.mamba.D", "a tensor of shape [8]"),
        ("model.layers.0.mamba.in_proj.weight_scale", "model.layers.0.mamba.in_proj.weight_scale beside it"),
    ):
        edit(folder, lambda t, key=key: t.pop(key))
        error = error_of(folder)
        assert error.expected == expected
        (folder / FILE).write_bytes(before)
    edit(folder, lambda t: t.update(extra=torch.zeros(2)))
    assert error_of(folder).key == "extra"


def test_parts_of_a_fused_layer_that_disagree(tmp_path: Path) -> None:
    model = KimiLinearForCausalLM.from_pretrained(CHECKPOINTS / "tiny-kimi-linear")
    quantize_model(model, ignore=["lm_head"]).save_pretrained(tmp_path)
    up = "model.layers.0.mlp.up_proj"

    def unpack(tensors: dict[str, Tensor]) -> None:
        packed, scale = (tensors.pop(f"{up}.{name}") for name in ("weight_packed", "weight_scale"))
        tensors[f"{up}.weight"] = dequantize(packed, scale, torch.bfloat16)

    edit(tmp_path, unpack)
    configure(tmp_path, lambda c: c["ignore"].append(up))
    error = error_of(tmp_path, KimiLinearForCausalLM.from_pretrained)
    gate = "model.layers.0.mlp.gate_proj"
    assert (error.file, error.key, error.found) == (str(tmp_path / "config.json"), gate, "W4A16")
    assert error.expected == f"no quantization as {up}, with which it makes model.layers.0.mlp.gate_up_proj"


def test_the_files_need_to_be_files(llama: Path) -> None:
    model = load(llama)
    with pytest.raises(CheckpointError, match="expected files, to load packed weights from"):
        LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
