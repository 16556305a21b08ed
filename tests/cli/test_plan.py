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


# ------------------------------------------------------------------------------------------------------- several cards


def shares(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[tuple[str, int], dict[str, Any]]:
    """(form, cards) -> what a card needs."""
    return {(need["form"], need["cards"]): need for need in planned(capsys, *arguments)[1]["needs"]}


def test_one_of_one_card_is_the_plan_of_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    _, one = planned(capsys, ZAMBA2, "--device", "b60")
    found = shares(capsys, ZAMBA2, "--device", "b60", "--cards", 1)
    for need in one["needs"]:
        share = found[need["variant"], 1]
        assert [share[k] for k in ("divided", "whole", "cache")] == [0, need["weights"], need["cache"]]
        assert share["total"] == need["total"]


def test_cards_follow_the_plan_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes are those of a model that is divided; what is sent, by hand."""
    from xpu_ports.common.parallel import parts_of
    from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
    from xpu_ports.models.kimi_linear.parallel import parallel_plan

    kimi = CHECKPOINTS / "tiny-kimi-linear"
    found = shares(capsys, kimi, "--cards", "1,2", "--context", 100, "--batch", 3)
    model = KimiLinearForCausalLM.from_pretrained(kimi)
    parts = parts_of(model, parallel_plan(model.config, 0, 2), 0, 2)
    divided = whole = 0
    for name, p in model.state_dict().items():
        own = torch.Size(parts[name].own).numel() if name in parts else p.numel()
        if name in parts:
            divided += own * p.element_size()
        else:
            whole += own * p.element_size()
    assert (found["bf16", 2]["divided"], found["bf16", 2]["whole"]) == (divided, whole)
    assert divided + whole < found["bf16", 1]["whole"] < 2 * (divided + whole)
    config = model.config
    # A sum after each of two halves of a layer and after the embedding, and the head's columns.
    sums = 2 * config.num_hidden_layers + 1
    sent = sums * 2 * config.hidden_size + config.vocab_size
    assert found["bf16", 2]["collectives"] == sums + 1
    assert found["bf16", 2]["sent"] == 3 * sent * 2 / 2
    # Heads' states are divided, latents are not.
    cache = KimiLinearForCausalLM.from_pretrained(kimi)(torch.zeros(3, 100, dtype=torch.long), use_cache=True)
    assert found["bf16", 1]["cache"] / 2 < found["bf16", 2]["cache"] < found["bf16", 1]["cache"]
    assert cache.past_key_values is not None


def test_layers_that_do_not_divide_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from xpu_ports.models.zamba2 import parallel

    before = shares(capsys, ZAMBA2, "--cards", 2)["bf16", 2]
    real = parallel.parallel_plan
    monkeypatch.setattr(
        parallel, "parallel_plan", lambda *sizes: {**real(*sizes), "layers.*.mamba": "three heads", "lm_head": "odd"}
    )
    after = shares(capsys, ZAMBA2, "--cards", 2)["bf16", 2]
    assert after["whole"] > before["whole"]
    assert after["cache"] > before["cache"]
    assert after["sent"] < before["sent"]
    assert main(["plan", str(ZAMBA2), "--cards", "2"]) == 0
    assert "layers.*.mamba, 2 cards: whole on each card: three heads" in capsys.readouterr().out


def test_packed_blocks_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    kimi = CHECKPOINTS / "tiny-kimi-linear"
    found = shares(capsys, kimi, "--cards", 3)
    assert not found["bf16", 3]["wrong"]
    assert "begins or ends inside a block of 32" in found["mxfp4", 3]["wrong"]
    assert main(["plan", str(kimi), "--cards", "3", "--device", "b60"]) == 0
    assert "not divisible" in capsys.readouterr().out


def test_roofs_of_cards() -> None:
    from xpu_ports.cli._cards import Share, cell, seconds
    from xpu_ports.common.cards import Link, Roofs

    one = Card("one", 1, "made up", roofs=Roofs(1e9, 1e12, 1e11), link=Link("wire", 1e8, "made up"))
    share = Share("bf16", 2, 1e8, 0, 0, 0, 1e8, moved=2e8, flops=1e10, collectives=1, sent=1e7, made=4)
    assert seconds(one, share) == pytest.approx(0.2 + 0.1)
    assert cell(one, share) == "13"
    assert seconds(Card("alone", 1, "", roofs=one.roofs), share) is None
    assert cell(one, Share("bf16", 2, 2e9, 0, 0, 0, 1e8, 1, 1, 1, 1, 1)).startswith("lacks 944.79 MiB")
    assert cell(one, Share("bf16", 2, 1, 0, 0, 0, 1e8, 1, 1, 1, 1, 1, wrong="x")) == "not divisible"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["zamba3", "--layout", "7b"], "'zamba3' with --layout, expected a model type: deepseek_v4"),
        (["zamba2", "--layout", "8b"], "--layout is '8b', expected one of 1.2b, 2.7b, 7b"),
        ([str(ZAMBA2), "--cards", "0"], "--cards is '0', expected positive numbers"),
    ],
    ids=["model", "layout", "cards"],
)
def test_mistakes_about_cards(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert why in capsys.readouterr().err
