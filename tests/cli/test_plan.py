"""`xpu-ports plan`: sums that are those of files and models, verdicts, names on the Hub, and the pointer to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from xpu_ports.cli import plan as plan_module
from xpu_ports.cli.main import main
from xpu_ports.common.cards import CARDS, GIB, Card
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.models.zamba2.accuracy import dense_layers
from xpu_ports.models.zamba2.layouts import layout_config
from xpu_ports.quant.mxfp4.quantize import quantize_model

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
ZAMBA2 = CHECKPOINTS / "tiny-zamba2"


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return code, json.loads(printed.out)


def test_weights_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16 and packed, to the byte."""
    code, result = planned(capsys, ZAMBA2, "--device", "b580")
    model = Zamba2ForCausalLM.from_pretrained(ZAMBA2)
    dense, packed = (need["weights"] for need in result["needs"])
    assert code == 0
    assert dense == sum(p.numel() * p.element_size() for p in model.parameters())
    assert result["files"] == sum(t.nbytes for t in load_file(ZAMBA2 / "model.safetensors").values())
    quantize_model(model, ignore=dense_layers(model))
    assert packed == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_7b_does_not_fit_a_b580_but_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a config alone."""
    layout_config("7b").save_pretrained(tmp_path)
    code, result = planned(capsys, tmp_path, "--device", "b580", "--context", "16384")
    dense, packed = result["cards"]
    assert code == 0
    assert result["files"] is None
    assert (dense["fits"], packed["fits"]) == (False, True)
    assert 13 * GIB < result["needs"][0]["weights"] < 14 * GIB
    assert 16384 < packed["longest_context"] < 32768
    # One token more does not fit.
    longest = packed["longest_context"]
    assert planned(capsys, tmp_path, "--device", "b580", "--context", str(longest))[1]["cards"][1]["fits"]
    code, result = planned(capsys, tmp_path, "--device", "b580", "--context", str(longest + 1))
    assert not result["cards"][1]["fits"]
    assert code == 1
    assert main(["plan", str(tmp_path), "--context", str(longest + 1)]) == 0
    printed = capsys.readouterr().out
    assert "too little" in printed
    assert len(printed.splitlines()) >= 2 * len(CARDS)


def test_a_tensor_larger_than_an_allocation() -> None:
    card = Card("one", 16, "made up", largest_gib=4, note="a limit")
    need = plan_module.Need("bf16", 6 * GIB, 0, 0, 5 * GIB)
    row = plan_module.fit(card, need, {"cache_of": None})
    assert not row["fits"]
    assert row["note"] == "a tensor of 5.0 GiB; a limit"


@pytest.mark.parametrize("room", [-1, 0, 99, 100, 12345])
def test_longest(room: int) -> None:
    assert plan_module.longest(lambda tokens: 100 * tokens, room) == max(room, 0) // 100


def test_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from xpu_ports.models.flux2 import Flux2Transformer2DModel
    from xpu_ports.models.flux2.packed import quantize_transformer

    code, result = planned(capsys, CHECKPOINTS / "tiny-flux2", "--device", "b60")
    assert code == 0
    assert result["parts"].keys() == {"text_encoder", "transformer", "vae"}
    transformer = load_file(CHECKPOINTS / "tiny-flux2" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert result["parts"]["transformer"] == sum(t.nbytes for t in transformer.values())
    whole, offloaded, packed, _ = result["needs"]
    assert whole["weights"] == sum(result["parts"].values())
    assert offloaded["weights"] == max(result["parts"].values())
    model = Flux2Transformer2DModel.from_pretrained(CHECKPOINTS / "tiny-flux2", subfolder="transformer")
    quantize_transformer(model.to(torch.bfloat16))
    bytes_ = sum(p.numel() * p.element_size() for p in model.parameters())
    assert whole["weights"] - packed["weights"] == result["parts"]["transformer"] - bytes_


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config and headers; nothing else is fetched."""
    import transformers.utils

    from xpu_ports.common import configuration

    config = Path(shutil.copy(ZAMBA2 / "config.json", tmp_path))
    fetched: list[str] = []

    def cached_file(name: str, file: str, **kwargs: Any) -> str | None:
        fetched.append(file)
        return str(config) if file == "config.json" else None

    tensor = SimpleNamespace(data_offsets=(10, 110))
    headers = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"a": tensor})})
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name: headers)
    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    monkeypatch.setattr(configuration, "cached_file", cached_file)
    monkeypatch.setattr(Zamba2ForCausalLM.config_class, "from_pretrained", lambda name: layout_config("1.2b"))
    code, result = planned(capsys, "zyphra/some-zamba2", "--device", "b580")
    assert code == 0
    assert result["files"] == 100
    assert set(fetched) == {"model_index.json", "config.json"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([str(ZAMBA2), "--device", "b999"], "no card is named 'b999'; there are: a770"),
        ([str(ZAMBA2 / "nothing"), "--device", "b580"], "no such folder"),
    ],
    ids=["card", "folder"],
)
def test_mistakes(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_here_needs_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        assert main(["plan", str(ZAMBA2), "--device", "here"]) == 0
        return
    assert main(["plan", str(ZAMBA2), "--device", "here"]) == 2
    assert "no XPU and no CUDA device here" in capsys.readouterr().err


def test_running_out_of_memory_points_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from xpu_ports.common.weights import StrictLoading

    def full(cls: type, *args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("XPU out of memory.")

    monkeypatch.setattr(StrictLoading, "from_pretrained", classmethod(full))
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. `xpu-ports plan .*tiny-zamba2 --device here`"):
        Zamba2ForCausalLM.from_pretrained(ZAMBA2)
    assert main(["generate", str(ZAMBA2), "And", "--device", "cpu"]) == 2
    assert "xpu-ports plan" in capsys.readouterr().err


def test_every_card_has_a_source() -> None:
    assert all(card.source and 0 < card.share <= 1 for card in CARDS.values())
    assert CARDS["b580"].usable < 11_605 << 20
