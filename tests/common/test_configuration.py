"""Tables of what a config may hold: each kind of row, and what is said when it is broken."""

# No `from __future__ import annotations`: the strict dataclasses check types, not their names.
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.common.configuration import (
    ConfigChecks,
    Fault,
    Legacy,
    check_config,
    integer,
    list_of,
    load_config,
    number,
    one_of,
)


@strict
class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    attribute_map = {"num_heads": "heads"}

    width: int = 8
    heads: int = 2
    kinds: list[str] | None = None
    scale: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.head_dim = self.width // self.heads
        super().__post_init__(**kwargs)

    def validate_scale(self) -> None:
        if self.scale == 13.0:
            raise ValueError("`scale` must not be 13")


CHECKS = ConfigChecks(
    fields={"width": integer(1), "heads": integer(1), "scale": number(0, without_low=True)},
    across=(lambda c: Fault("heads", "a divisor of width", f"{c.heads}") if c.width % c.heads else None,),
    derived=("head_dim",),
    legacy={
        "n_head": Legacy("the old name", same_as="heads"),
        "gated": Legacy("always gated", only=True),
        "seed": Legacy("of the training code"),
    },
    switches={"fast": one_of(True, False)},
    notes=(lambda c: "wide" if c.width > 100 else None,),
)


def write(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **values}))
    return folder / "config.json"


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (one_of(True, False), [True, False], [1, 0, "true", None]),
        (one_of("gelu"), ["gelu"], ["relu", None, 1]),
        (one_of(1, 2), [1, 2], [True, 3, 1.0]),
        (integer(2), [2, 3], [1, 2.0, "2", True, None]),
        (integer(1, or_none=True), [1, None], [0, "1"]),
        (number(0), [0, 0.5, 3], [-1, "0", None, True, float("nan"), float("inf")]),
        (number(0, below=1, without_low=True), [0.5], [0, 1, 1.5]),
        (list_of("a", "b"), [["a", "b", "a"], []], [["c"], "a", None, [["a"]]]),
        (list_of("a", or_none=True), [None, ["a"]], [["b"]]),
    ],
)
def test_what_a_row_allows(allowed: Any, good: list[Any], bad: list[Any]) -> None:
    assert [v for v in good if not allowed.test(v)] == []
    assert [v for v in bad if allowed.test(v)] == []


def test_a_sound_file_loads_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, width=12, heads=3, head_dim=4, n_head=3, gated=True, seed=7, fast=True, torch_dtype="bfloat16",
          rope_theta=1e4, architectures=["Toy"], transformers_version="4.40", temperature=0.5)  # fmt: skip
    config = load_config(ToyConfig, tmp_path, CHECKS)
    assert (config.width, config.heads, config.head_dim, config.fast) == (12, 3, 4, True)
    assert caplog.records == []


FAULTS: dict[str, tuple[dict[str, Any], str | None, str, str]] = {
    # What config.json says, then: the key named, and what is said to be expected, and found.
    "another-model": ({"model_type": "llama"}, "model_type", "'toy'", "'llama'"),
    "no-model": ({"model_type": None}, "model_type", "'toy'", "None"),
    "value-that-the-class-divides-by": ({"heads": 0}, "heads", "an integer >= 1", "0"),
    "value": ({"width": 0}, "width", "an integer >= 1", "0"),
    "value-by-its-other-name": ({"num_heads": 0}, "heads", "an integer >= 1", "0"),
    "switch": ({"fast": "yes"}, "fast", "True or False", "'yes'"),
    "relation": ({"heads": 3}, "heads", "a divisor of width", "3"),
    "computed": ({"head_dim": 5}, "head_dim", "4, which follows from the other fields", "5"),
    "type": ({"kinds": "a"}, "kinds", "list[str] | None", "'a'"),
    "validator": (
        {"scale": 13.0},
        "scale",
        "what transformers' validate_scale accepts",
        "13.0; `scale` must not be 13",
    ),
    "dtype": ({"dtype": "bf16"}, "dtype", "the name of a torch dtype", "'bf16'"),
    "dtype-that-is-none": ({"torch_dtype": "nn"}, "torch_dtype", "the name of a torch dtype", "'nn'"),
    "old-name": ({"n_head": 4}, "n_head", "2, the value of heads (the old name)", "4"),
    "old-switch": ({"gated": False}, "gated", "True (always gated)", "False"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_file_must_not_say(tmp_path: Path, fault: str) -> None:
    values, key, expected, found = FAULTS[fault]
    file = write(tmp_path, **values)
    with pytest.raises(CheckpointError) as caught:
        load_config(ToyConfig, tmp_path, CHECKS)
    error = caught.value
    assert (error.file, error.key, error.expected, error.found) == (str(file), key, expected, found)
    assert str(error) == f"{file}: {key}: expected {expected}, found {found}"


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        (None, "the model's configuration", "no such file"),
        ("{,", "JSON", "none: Expecting property name"),
        ("[1]", "a JSON object", "[1]"),
        (b"\xff\xfe{}", "JSON", "none: 'utf-8' codec"),
    ],
    ids=["missing", "no-json", "list", "no-utf8"],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | bytes | None, expected: str, found: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as caught:
        load_config(ToyConfig, tmp_path)
    error = caught.value
    assert (error.file, error.key, error.expected) == (str(tmp_path / "config.json"), None, expected)
    assert found in error.found


def test_a_class_that_breaks_on_the_values(tmp_path: Path) -> None:
    file = write(tmp_path, heads=0)
    with pytest.raises(CheckpointError) as caught:
        load_config(ToyConfig, tmp_path)
    assert (caught.value.file, caught.value.expected) == (str(file), "values that ToyConfig takes")
    assert "ZeroDivisionError" in caught.value.found


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_config(ToyConfig, tmp_path / "gone")
    assert (caught.value.file, caught.value.found) == (str(tmp_path / "gone"), "no such folder")


def test_subfolder_and_file_as_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    file = write(tmp_path / "inner", width=6)
    assert load_config(ToyConfig, tmp_path, subfolder="inner").width == 6
    assert load_config(ToyConfig, file).width == 6


def test_unknown_keys_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, unsloth_version="1", lora=2)
    load_config(ToyConfig, tmp_path, CHECKS)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.WARNING, f"{file}: nothing reads lora, unsloth_version")
    ]


def test_notes_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, width=102)
    load_config(ToyConfig, tmp_path, CHECKS)
    assert [r.getMessage() for r in caplog.records] == [f"{file}: wide"]


def test_overrides_come_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, scale=-1.0)
    assert load_config(ToyConfig, tmp_path, CHECKS, overrides={"scale": 2.0}).scale == 2.0
    write(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load_config(ToyConfig, tmp_path, CHECKS, overrides={"heads": 0})
    assert (caught.value.file, caught.value.key, caught.value.found) == (str(file), "heads", "0")


def test_a_config_changed_by_hand() -> None:
    config = ToyConfig()
    check_config(config, CHECKS, "here")
    config.heads = 4
    with pytest.raises(
        CheckpointError, match="here: head_dim: expected 2, which follows from the other fields, found 4"
    ):
        check_config(config, CHECKS, "here")
