"""Strict loading on a toy model: everything that transformers would drop, make up or only warn of is an error."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from xpu_ports.common import weights
from xpu_ports.common.configuration import ConfigChecks, integer
from xpu_ports.common.weights import CheckpointError, StrictLoading, expected_tensors, tied_groups


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    width: int = 4
    tie_word_embeddings: bool = True


class ToyPreTrained(StrictLoading):
    config_class = ToyConfig
    base_model_prefix = "model"
    _config_checks = ConfigChecks(fields={"width": integer(1)})
    _keys_to_ignore_on_load_unexpected = {r"\.inv_freq$": "computed from the config"}
    _keep_in_fp32_modules_strict = {"scale"}


class ToyModel(ToyPreTrained):
    """Two layers, the second tied to the first whatever `tie_word_embeddings` says."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(6, config.width)
        self.layers = nn.ModuleList([nn.Linear(config.width, config.width) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(config.width))
        self.register_buffer("table", torch.zeros(6, dtype=torch.long))
        self._tied_weights_keys = {f"layers.1.{name}": f"layers.0.{name}" for name in ("weight", "bias")}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        return dict(self._tied_weights_keys)


class ToyForCausalLM(ToyPreTrained):
    _tied_weights_keys = {"head.weight": "model.embed.weight"}

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        self.head = nn.Linear(config.width, 6, bias=False)
        self.post_init()


KEYS = {
    "model.embed.weight",
    "model.layers.0.weight",
    "model.layers.0.bias",
    "model.layers.2.weight",
    "model.layers.2.bias",
    "model.scale",
    "model.table",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the toy, with random values."""
    model = ToyForCausalLM(ToyConfig())
    for p in model.parameters():
        nn.init.normal_(p)
    model.model.table.copy_(torch.arange(6))
    model.save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite the weights of a checkpoint."""
    tensors = {key: t.clone() for key, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def to_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def error_of(load: Callable[[], Any]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load()
    return caught.value


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


# ----------------------------------------------------------------------------------------------- what a model expects


def test_expected_tensors_are_those_that_are_saved(folder: Path) -> None:
    found = expected_tensors(ToyForCausalLM, ToyConfig())
    saved = load_file(folder / "model.safetensors")
    assert {key: info.shape for key, info in found.items()} == {key: tuple(t.shape) for key, t in saved.items()}
    assert set(found) == KEYS


def test_expected_dtypes_are_those_of_a_load(folder: Path) -> None:
    config = ToyConfig(dtype="bfloat16")
    found = expected_tensors(ToyForCausalLM, config)
    model = ToyForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {k: i.dtype for k, i in found.items()} == {k: t.dtype for k, t in model.state_dict().items() if k in KEYS}
    assert found["model.scale"].dtype == torch.float32
    assert found["model.table"].dtype == torch.long
    assert config.dtype == torch.bfloat16


def test_expected_tensors_take_no_memory() -> None:
    # 6 TB.
    assert expected_tensors(ToyForCausalLM, ToyConfig(width=10**6))["model.layers.0.weight"].shape == (10**6, 10**6)


def test_tied_groups_by_declaration_and_by_identity() -> None:
    model = ToyForCausalLM(ToyConfig())
    declared = [["model.embed.weight", "head.weight"], ["model.layers.0.weight", "model.layers.1.weight"]]
    declared.append(["model.layers.0.bias", "model.layers.1.bias"])
    assert sorted(tied_groups(model)) == sorted(declared)
    with torch.device("meta"):
        shared = ToyForCausalLM(ToyConfig())
    shared.model.layers[2] = shared.model.layers[0]
    assert sorted(map(len, tied_groups(shared))) == [2, 3, 3]


# ------------------------------------------------------------------------------------------------------ sound loading


@pytest.mark.parametrize(
    "options", [{}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}, {"dtype": "auto"}], ids=str
)
def test_a_sound_checkpoint_loads(folder: Path, options: dict[str, Any]) -> None:
    model = ToyForCausalLM.from_pretrained(folder, **options)
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(model.state_dict()[key], t) for key, t in saved.items())
    assert model.head.weight is model.model.embed.weight
    assert model.model.layers[1].weight is model.model.layers[0].weight


def test_shards_bin_variant_and_state_dict_load(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = ToyForCausalLM.from_pretrained(folder)
    other = tmp_path_factory.mktemp("other")
    model.save_pretrained(other / "shards", max_shard_size=100)
    assert len(list((other / "shards").glob("model-*.safetensors"))) > 2
    model.save_pretrained(other / "variant", variant="fp32", max_shard_size=100)
    for loaded in (
        ToyForCausalLM.from_pretrained(other / "shards"),
        ToyForCausalLM.from_pretrained(other / "variant", variant="fp32"),
        ToyForCausalLM.from_pretrained(other, subfolder="shards"),
        ToyForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict()),
    ):
        assert same(loaded, model)
    to_bin(folder)
    assert same(ToyForCausalLM.from_pretrained(folder), model)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")
def test_offloading_to_disk(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    device_map = {
        "model.embed": "cpu",
        "head": "cpu",
        "model.layers": "disk",
        "model.scale": "cpu",
        "model.table": "cpu",
    }
    model = ToyForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path_factory.mktemp("off"))
    weight = load_file(folder / "model.safetensors")["model.layers.2.weight"]
    x = torch.randn(2, 4)
    torch.testing.assert_close(model.model.layers[2](x) - model.model.layers[2](0 * x), x @ weight.T)


def test_a_name_on_the_hub_loads_from_the_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.mktemp("cache")
    snapshot = cache / "models--some--toy" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "v1").write_text("0" * 40)
    options = {"cache_dir": cache, "local_files_only": True, "revision": "v1"}
    assert ToyForCausalLM.from_pretrained("some/toy", **options).dtype == torch.float32
    edit(snapshot, lambda t: t.pop("model.scale"))
    error = error_of(lambda: ToyForCausalLM.from_pretrained("some/toy", **options))
    assert (error.file, error.key) == (str(snapshot / "model.safetensors"), "model.scale")
    with pytest.raises(OSError, match="find them in the cached files"):
        ToyForCausalLM.from_pretrained("some/toy", cache_dir=cache, local_files_only=True, revision="v2")


def test_loading_info_is_given_when_asked_for(folder: Path) -> None:
    model, info = ToyForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, ToyForCausalLM)
    assert not any(info.values())


def test_the_base_model_and_the_head_load_each_others_files(folder: Path, tmp_path: Path) -> None:
    base = ToyModel.from_pretrained(folder)
    base.save_pretrained(tmp_path / "base")
    assert set(load_file(tmp_path / "base" / "model.safetensors")) == {key.removeprefix("model.") for key in KEYS}
    assert same(ToyForCausalLM.from_pretrained(tmp_path / "base"), ToyForCausalLM.from_pretrained(folder))


def test_the_base_model_leaves_the_head_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder, lambda t: t.update({"head.weight": torch.zeros(6, 4)}))
    caplog.set_level(logging.INFO, logger=weights.__name__)
    _, info = ToyModel.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert "['head.weight']" in caplog.text
    edit(folder, lambda t: t.update({"model.more": torch.zeros(1)}))
    assert error_of(lambda: ToyModel.from_pretrained(folder)).key == "model.more"


def test_declared_keys_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder, lambda t: t.update({"model.layers.0.inv_freq": torch.zeros(2)}))
    caplog.set_level(logging.INFO, logger=weights.__name__)
    _, info = ToyForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert "model.layers.0.inv_freq" in caplog.text


def test_other_shapes_where_the_caller_accepts_them(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.scale": torch.zeros(5)}))
    model = ToyForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert model.model.scale.shape == (4,)


# ------------------------------------------------------------------------------------------------------------- faults


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str, str, str, str]] = {
    # What is done to the weights, then: the key named, expected, found, and the hint.
    "missing": (lambda t: t.pop("model.scale"), "model.scale", "a tensor of shape [4]", "none", ""),
    "more-missing": (
        lambda t: [t.pop(k) for k in ("model.scale", "model.table", "model.layers.2.bias")],
        "model.scale", "a tensor of shape [4]", "none", "2 more missing",
    ),
    "missing-of-tied": (
        lambda t: t.pop("model.layers.0.weight"), "model.layers.0.weight", "a tensor of shape [4, 4]", "none", "",
    ),
    "another-name": (
        lambda t: rename(t, "model.scale", "model.scales"), "model.scale", "a tensor of shape [4]", "none",
        "1 without a place; the closest name is model.scales",
    ),
    "extra": (
        lambda t: t.update({"model.scalf": torch.zeros(2).half()}), "model.scalf", "no such tensor in ToyForCausalLM",
        "float16 [2]", "the closest name is model.scale",
    ),
    "more-extra": (
        lambda t: t.update({f"{i}": torch.zeros(1, 2).half() for i in range(3)}), "0",
        "no such tensor in ToyForCausalLM", "float16 [1, 2]", "2 more without a place",
    ),
    "shape": (lambda t: t.update({"model.scale": torch.zeros(4, 1)}), "model.scale", "shape [4]", "[4, 1]", ""),
    "more-shapes": (
        lambda t: t.update({f"model.layers.2.{n}": torch.zeros(3) for n in ("weight", "bias")}),
        "model.layers.2.bias", "shape [4]", "[3]", "1 more of another shape",
    ),
    "integer-for-float": (
        lambda t: t.update({"model.scale": torch.zeros(4, dtype=torch.uint8)}), "model.scale",
        "a dtype like torch.float32", "torch.uint8", "",
    ),
    "float-for-integer": (
        lambda t: t.update({"model.table": torch.zeros(6)}), "model.table", "a dtype like torch.int64",
        "torch.float32", "",
    ),
    "float8-without-scales": (
        lambda t: t.update({"model.scale": torch.zeros(4).to(torch.float8_e4m3fn)}), "model.scale",
        "a dtype like torch.float32", "torch.float8_e4m3fn", "",
    ),
    "twice": (
        lambda t: t.update({"scale": torch.zeros(4)}), "scale", "one tensor for model.scale",
        "two, the other is model.scale", "",
    ),
    "tied-but-different": (
        lambda t: t.update({"head.weight": t["model.embed.weight"] + 1}), "head.weight",
        "the values of model.embed.weight, which it is tied to", "other values", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", ["safetensors", "bin", "state_dict"])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(folder: Path, fault: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, key, expected, found, hint = FAULTS[fault]
    edit(folder, change)
    file, options = str(folder / "model.safetensors"), {"pretrained_model_name_or_path": folder}
    if form == "bin":
        to_bin(folder)
        file = str(folder / "pytorch_model.bin")
    elif form == "state_dict":
        file, options["pretrained_model_name_or_path"] = "state_dict", None
        options |= {"config": ToyConfig(), "state_dict": load_file(folder / "model.safetensors")}
    # No tensor is read before the checks are done.
    monkeypatch.setattr(weights, "_LOAD", lambda *args, **kwargs: pytest.fail("loaded"))
    error = error_of(lambda: ToyForCausalLM.from_pretrained(**options))
    assert (error.file, error.key, error.expected, error.found, error.hint) == (file, key, expected, found, hint)
    assert str(error).startswith(f"{file}: {key}: expected {expected}, found {found}")


def test_which_file_of_several_is_named(folder: Path) -> None:
    ToyForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size=100)
    (folder / "model.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = folder / index["weight_map"]["model.scale"]
    tensors = load_file(shard)
    save_file(tensors | {"model.scale": torch.zeros(5)}, shard)
    assert error_of(lambda: ToyForCausalLM.from_pretrained(folder)).file == str(shard)
    tensors.pop("model.scale")
    index["weight_map"].pop("model.scale")
    save_file(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = error_of(lambda: ToyForCausalLM.from_pretrained(folder))
    assert (error.file, error.key) == (str(folder / "model.safetensors.index.json"), "model.scale")


def test_one_of_a_tied_group_is_enough_and_equal_copies_are_accepted(folder: Path) -> None:
    model = ToyForCausalLM.from_pretrained(folder)
    edit(folder, lambda t: rename(t, "model.embed.weight", "head.weight"))
    edit(folder, lambda t: rename(t, "model.layers.0.weight", "model.layers.1.weight"))
    assert same(ToyForCausalLM.from_pretrained(folder), model)
    edit(folder, lambda t: t.update({"model.layers.0.weight": t["model.layers.1.weight"].clone()}))
    loaded = ToyForCausalLM.from_pretrained(folder)
    assert same(loaded, model)
    assert loaded.model.layers[0].weight is loaded.model.layers[1].weight


def test_an_untied_head_is_read(folder: Path) -> None:
    edit(folder, lambda t: t.update({"head.weight": t["model.embed.weight"] + 1}))
    model = ToyForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
    assert torch.equal(model.head.weight, model.model.embed.weight + 1)
    edit(folder, lambda t: t.pop("head.weight"))
    assert error_of(lambda: ToyForCausalLM.from_pretrained(folder, tie_word_embeddings=False)).key == "head.weight"


def test_a_config_that_cannot_run(folder: Path) -> None:
    config = ToyConfig(width=0)
    error = error_of(lambda: ToyForCausalLM.from_pretrained(folder, config=config))
    assert (error.file, error.key, error.found) == ("ToyConfig", "width", "0")
    with pytest.raises(CheckpointError, match="ToyConfig: width: expected an integer >= 1, found 0"):
        ToyForCausalLM(config)


def test_a_config_read_by_an_auto_class_is_checked_with_its_file(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**text, "stray": 1}))
    config = ToyConfig.from_pretrained(folder)
    ToyForCausalLM.from_pretrained(folder, config=config)
    assert "stray" not in caplog.text
    # As AutoConfig does.
    config = ToyConfig.from_pretrained(folder, name_or_path=str(folder))
    ToyForCausalLM.from_pretrained(folder, config=config)
    assert f"{folder / 'config.json'}: nothing reads stray" in caplog.text


def test_load_state_dict_stays_torchs(folder: Path) -> None:
    model = ToyForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    state.pop("model.scale")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"model\.scale\""):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == ["model.scale"]


# ----------------------------------------------------------------------------- what can be checked only after a load


class NothingConfig(QuantizationConfigMixin):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(quant_method="nothing")


class NothingQuantizer(HfQuantizer):
    """Quantizes nothing; with it only the checks after loading are left."""

    requires_calibration = False
    is_trainable = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        return model

    def is_serializable(self, safe_serialization: Any = None) -> bool:
        return True


@pytest.fixture
def quantization() -> Any:
    register_quantization_config("nothing")(NothingConfig)
    register_quantizer("nothing")(NothingQuantizer)
    yield NothingConfig()
    AUTO_QUANTIZATION_CONFIG_MAPPING.pop("nothing")
    AUTO_QUANTIZER_MAPPING.pop("nothing")


@pytest.mark.parametrize("fault", ["missing", "extra", "tied-but-different"])
def test_fault_of_a_quantized_model(folder: Path, fault: str, quantization: Any) -> None:
    assert ToyForCausalLM.from_pretrained(folder, quantization_config=quantization).dtype == torch.float32
    change, key, expected, *_ = FAULTS[fault]
    edit(folder, change)
    error = error_of(lambda: ToyForCausalLM.from_pretrained(folder, quantization_config=quantization))
    assert (error.file, error.key) == (str(folder), key)
    assert error.expected == (expected if fault != "missing" else "a tensor")


@pytest.mark.parametrize("quantized", [False, True], ids=["before", "after"])
def test_nothing_stays_loaded_after_an_error(
    folder: Path, quantized: bool, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = []
    init = ToyForCausalLM.__init__

    def remember(self: ToyForCausalLM, config: ToyConfig) -> None:
        init(self, config)
        models.append(weakref.ref(self))

    monkeypatch.setattr(ToyForCausalLM, "__init__", remember)
    edit(folder, FAULTS["missing"][0])
    options = {"quantization_config": quantization} if quantized else {}
    error = error_of(lambda: ToyForCausalLM.from_pretrained(folder, **options))
    gc.collect()
    assert len(models) == 1
    assert models[0]() is None
    causes = [error.__cause__, error.__context__]
    assert causes == [None, None]


def test_many_names_cost_little(folder: Path) -> None:
    edit(folder, lambda t: t.update({f"model.more.{i}.weight": torch.zeros(1) for i in range(20_000)}))
    error = error_of(lambda: ToyForCausalLM.from_pretrained(folder))
    assert error.hint.startswith("19999 more without a place")


def test_no_key_is_matched_in_part(folder: Path) -> None:
    for old, new in itertools.product(["model.scale"], ["xmodel.scale", "model.scale.weight", "model_scale"]):
        edit(folder, lambda t, old=old, new=new: rename(t, old, new))
        assert error_of(lambda: ToyForCausalLM.from_pretrained(folder)).key == old
        edit(folder, lambda t, old=old, new=new: rename(t, new, old))
