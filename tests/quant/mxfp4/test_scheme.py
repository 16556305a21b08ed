"""What a quantization config may say, and what it may not; targets as compressed-tensors matches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.quant.producers import tiny_llama
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.quant.mxfp4.quantize import quantization_config
from xpu_ports.quant.mxfp4.scheme import is_mxfp4, read_scheme


def group(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]


def weights(config: dict[str, Any]) -> dict[str, Any]:
    return group(config)["weights"]


Change = Callable[[dict[str, Any]], Any]
FAULTS: dict[str, tuple[Change, str, str, str]] = {
    # What is done to a sound config, then: the key named, and what is expected, and found.
    "method": (lambda c: c.update(quant_method="mxfp4"), "quant_method", "'compressed-tensors'", "'mxfp4'"),
    "format": (lambda c: c.update(format="mxfp4-x"), "format", "'mxfp4-pack-quantized'", "'mxfp4-x'"),
    "status": (lambda c: c.update(quantization_status="frozen"), "quantization_status", "'compressed'", "'frozen'"),
    "cache": (lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme", "nothing", "{'num_bits': 8}"),
    "transform": (lambda c: c.update(transform_config={"a": 1}), "transform_config", "{}", "{'a': 1}"),
    "sparsity": (lambda c: c.update(sparsity_config={"a": 1}), "sparsity_config", "{}", "{'a': 1}"),
    "no-groups": (lambda c: c.pop("config_groups"), "config_groups", "groups of layers by name", "None"),
    "no-targets": (lambda c: group(c).pop("targets"), "config_groups.group_0.targets", "a list of names", "None"),
    "targets": (lambda c: group(c).update(targets="Linear"), "config_groups.group_0.targets", "a list", "'Linear'"),
    "regex": (
        lambda c: group(c).update(targets=["re:("]), "config_groups.group_0.targets", "a regular expression", "'re:('",
    ),
    "ignore": (lambda c: c.update(ignore=[1]), "ignore", "a list of names", "[1]"),
    "group": (lambda c: c["config_groups"].update(a=7), "config_groups.a", "a group with targets", "7"),
    "preset": (lambda c: c["config_groups"].update(W4A16=["Linear"]), "config_groups.W4A16", "MXFP4A16", "'W4A16'"),
    "group-format": (
        lambda c: group(c).update(format="pack-quantized"), "config_groups.group_0.format", "'mxfp4-pack-quantized'",
        "'pack-quantized'",
    ),
    "outputs": (
        lambda c: group(c).update(output_activations={}), "config_groups.group_0.output_activations", "nothing", "{}",
    ),
    "bits": (lambda c: weights(c).update(num_bits=8), "config_groups.group_0.weights.num_bits", "4", "8"),
    "type": (lambda c: weights(c).update(type="int"), "config_groups.group_0.weights.type", "'float'", "'int'"),
    "block": (lambda c: weights(c).update(group_size=16), "config_groups.group_0.weights.group_size", "32", "16"),
    "strategy": (
        lambda c: weights(c).update(strategy="tensor_group"), "config_groups.group_0.weights.strategy", "'group'",
        "'tensor_group'",
    ),
    "symmetric": (
        lambda c: weights(c).update(symmetric=False), "config_groups.group_0.weights.symmetric", "True", "False",
    ),
    "dynamic": (lambda c: weights(c).update(dynamic=True), "config_groups.group_0.weights.dynamic", "False", "True"),
    "scales": (
        lambda c: weights(c).update(scale_dtype="torch.float8_e4m3fn"), "config_groups.group_0.weights.scale_dtype",
        "'torch.uint8'", "'torch.float8_e4m3fn'",
    ),
    "static-input": (
        lambda c: group(c).update(input_activations={**weights(c), "dynamic": False}),
        "config_groups.group_0.input_activations.dynamic", "True", "False",
    ),
    "fp8-input": (
        lambda c: group(c).update(input_activations={**weights(c), "num_bits": 8, "dynamic": True}),
        "config_groups.group_0.input_activations.num_bits", "4", "8",
    ),
    "input-alone": (
        lambda c: group(c).update(input_activations=group(c).pop("weights")),
        "config_groups.group_0.input_activations", "nothing", "{'num_bits': 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_config_must_not_say(fault: str) -> None:
    change, key, expected, found = FAULTS[fault]
    config = quantization_config()
    change(config)
    with pytest.raises(CheckpointError) as caught:
        read_scheme(config, "a/config.json")
    error = caught.value
    assert (error.file, error.key) == ("a/config.json", f"quantization_config.{key}")
    assert expected in error.expected
    assert error.found.startswith(found)


def test_activations_and_presets() -> None:
    assert read_scheme(quantization_config(), "").group_of("a").activations is None
    assert read_scheme(quantization_config("mxfp4"), "").group_of("a").activations == "mxfp4"
    config = {**quantization_config(), "config_groups": {"MXFP4": ["a"], "mxfp4a16": ["Linear"]}}
    scheme = read_scheme(config, "")
    assert scheme.group_of("a").activations == "mxfp4"
    assert scheme.group_of("b").activations is None


def test_a_group_without_weights_leaves_its_layers_dense() -> None:
    config = quantization_config()
    config["config_groups"]["plain"] = {"targets": ["a"], "weights": None}
    scheme = read_scheme(config, "")
    assert scheme.group_of("a") is None
    assert scheme.group_of("b").name == "group_0"


def test_defaults_that_writers_leave_out() -> None:
    config = quantization_config()
    for name in ("strategy", "symmetric", "dynamic", "scale_dtype"):
        weights(config).pop(name)
    assert read_scheme(config, "").group_of("a").packed


def test_a_word_on_files_with_scales_that_are_wrong(caplog: pytest.LogCaptureFixture) -> None:
    read_scheme({**quantization_config(), "version": "0.15.0"}, "a/config.json")
    assert caplog.records == []
    read_scheme({**quantization_config(), "version": "0.13.0"}, "a/config.json")
    assert caplog.messages == ["a/config.json: compressed-tensors 0.13 wrote MXFP4 scales that are 4 times too small"]


def test_which_configs_are_for_this_package() -> None:
    config = quantization_config()
    assert is_mxfp4(config)
    # A format that looks like ours is refused by name, not handed on.
    assert is_mxfp4({**config, "format": "mxfp4-pack-quantized-2"})
    assert is_mxfp4({**config, "format": "mixed-precision"})
    assert not is_mxfp4({**config, "format": "pack-quantized"})
    assert not is_mxfp4({**config, "quant_method": "mxfp4"})
    mixed = {**config["config_groups"], "group_1": {**group(config), "format": "float-quantized"}}
    assert not is_mxfp4({**config, "format": "mixed-precision", "config_groups": mixed})


MATCHES: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    # Targets by group, and ignore.
    "class": ({"MXFP4": ["Linear"]}, ["lm_head"]),
    "base-class": ({"MXFP4": ["Module"]}, []),
    "name": ({"MXFP4": ["model.layers.0.mlp.up_proj"]}, []),
    "regex-from-the-start": ({"MXFP4": ["re:layers"], "MXFP4A16": [r"re:model\.layers\.1\..*proj$"]}, []),
    "name-before-regex-before-class": (
        {"MXFP4": ["Linear"], "MXFP4A16": ["re:.*q_proj", "model.layers.1.mlp.up_proj"]}, ["re:.*o_proj"],
    ),
    "regexes-by-alphabet": ({"MXFP4": ["re:.*proj"], "MXFP4A16": ["re:.*mlp.*"]}, []),
    "regexes-by-alphabet-reversed": ({"MXFP4A16": ["re:.*proj"], "MXFP4": ["re:.*mlp.*"]}, []),
    "same-target": ({"MXFP4A16": ["Linear"], "MXFP4": ["Linear"]}, []),
    "ignore-a-class": ({"MXFP4": ["re:.*"]}, ["Linear"]),
    "ignore-by-name-and-regex": ({"MXFP4": ["Linear"]}, ["model.layers.0.mlp.up_proj", "re:.*k_proj", "q_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MATCHES)
def test_targets_match_as_in_compressed_tensors(case: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    groups, ignore = MATCHES[case]
    model = tiny_llama()
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=ignore), show_progress=False)
    scheme = read_scheme({**quantization_config(ignore=ignore), "config_groups": groups}, "")
    packed = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        theirs = getattr(module, "quantization_scheme", None)
        ours = scheme.group_of(name, [c.__name__ for c in type(module).__mro__])
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            packed += 1
            assert (ours.activations is None) == (theirs.input_activations is None), name
    assert (packed == 0) == (case == "ignore-a-class")
