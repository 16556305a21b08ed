"""Text, figures and errors of `xpu-ports generate`."""

from __future__ import annotations

import io
import itertools
import json
import math

import pytest
import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import xpu_ports.models
from tests.cli.conftest import TINY_ZAMBA2, edit_config
from xpu_ports.cli import _common
from xpu_ports.cli import generate as module
from xpu_ports.cli.generate import Streamer, sampling_arguments, speed

PROMPT = "And God said unto Moses,"
FAST = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", 8)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_ZAMBA2)


@pytest.fixture(scope="module")
def model():
    xpu_ports.models.register()
    return AutoModelForCausalLM.from_pretrained(TINY_ZAMBA2, dtype=torch.float32)


def continuation(model, tokenizer, **arguments) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, **arguments)
    return tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_text_is_that_of_generate(cli, model, tokenizer):
    outcome = cli("generate", TINY_ZAMBA2, PROMPT, *FAST)
    assert outcome.code == 0
    assert outcome.out == continuation(model, tokenizer, do_sample=False) + "\n"
    assert outcome.err.startswith("prefill: ")
    assert outcome.err.endswith("(float32 on cpu)\n")
    assert outcome.err.count("\n") == 1


def test_sampling_is_that_of_generate_with_the_seed(cli, model, tokenizer):
    outcome = cli("generate", TINY_ZAMBA2, PROMPT, *FAST, "--temperature", 3, "--top-p", 0.99, "--seed", 7)
    torch.manual_seed(7)
    wanted = continuation(model, tokenizer, do_sample=True, temperature=3.0, top_p=0.99, top_k=0)
    assert outcome.out == wanted + "\n"
    assert wanted != continuation(model, tokenizer, do_sample=False)


def test_json_is_all_of_stdout(cli, model, tokenizer, monkeypatch):
    loading = _common.load

    def chatty(*args, **kwargs):
        print("a library greets")
        return loading(*args, **kwargs)

    monkeypatch.setattr(_common, "load", chatty)
    # Before the command, whose ledger must not hold these calls.
    text = continuation(model, tokenizer, do_sample=False)
    outcome = cli("generate", TINY_ZAMBA2, PROMPT, *FAST, "--json")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert outcome.err == "a library greets\n"
    assert result["text"] == text
    assert result["prompt_tokens"] == len(tokenizer(PROMPT).input_ids)
    assert result["new_tokens"] == 8
    assert (result["device"], result["dtype"], result["model_type"]) == ("cpu", "float32", "zamba2")
    assert result["model_class"].startswith("xpu_ports.models.zamba2.")
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    assert result["versions"]["torch"] == torch.__version__
    assert result["decode_tokens_per_second"] == pytest.approx(7 / result["decode_seconds"])
    assert result["prefill_tokens_per_second"] == pytest.approx(result["prompt_tokens"] / result["prefill_seconds"])
    scans = [row for row in result["explain"] if row["op"] == "ssd_chunk_scan"]
    mamba_layers = model.config.num_hidden_layers
    assert [(row["backend"], row["calls"]) for row in scans] == [("reference", mamba_layers)]


def test_prompt_from_stdin_loses_its_last_newline(cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT + "\n"))
    from_stdin = cli("generate", TINY_ZAMBA2, "-", *FAST)
    assert from_stdin.out == cli("generate", TINY_ZAMBA2, PROMPT, *FAST).out


def test_explain_follows_on_stderr(cli):
    outcome = cli("generate", TINY_ZAMBA2, PROMPT, *FAST, "--backend", "ssd_chunk_scan=reference", "--explain")
    lines = outcome.err.splitlines()
    assert lines[0].startswith("prefill: ")
    assert lines[1].split() == ["op", "back", "end", "device", "calls", "why"]
    assert any(line.split() == ["ssd_chunk_scan", "reference", "cpu", "8", "forced"] for line in lines), lines


def test_libraries_warn_only_where_asked_for():
    before = (logging.get_verbosity(), hub_logging.get_verbosity())
    try:
        logging.set_verbosity_warning()
        hub_logging.set_verbosity_warning()
        _common.quiet_libraries(verbose=True)
        assert (logging.get_verbosity(), hub_logging.get_verbosity()) == (logging.WARNING, logging.WARNING)
        _common.quiet_libraries(verbose=False)
        assert (logging.get_verbosity(), hub_logging.get_verbosity()) == (logging.ERROR, logging.ERROR)
    finally:
        logging.set_verbosity(before[0])
        hub_logging.set_verbosity(before[1])


# ----------------------------------------------------------------------------------------------------------- streamer


@pytest.mark.parametrize(
    "text", ["na\u00efve \u2014 \u4e2d\u6587 \U0001f642 caf\u00e9 end", " In the\n beginning", "\u4e2d"]
)
def test_streamer_writes_what_decode_gives_in_whole_characters(tokenizer, text):
    ids = tokenizer(text).input_ids
    pieces: list[str] = []
    streamer = Streamer(tokenizer, pieces.append)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for id in ids:
        streamer.put(torch.tensor([id]))
    assert not any("\ufffd" in piece for piece in pieces)
    streamer.end()
    assert "".join(pieces) == tokenizer.decode(ids) + "\n"
    assert len(pieces) > 1


def test_streamer_keeps_spaces_that_decode_takes_off_at_the_start():
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join([" In", " the", " beginning"][id] for id in ids).removeprefix(" ")

    pieces: list[str] = []
    streamer = Streamer(Words(), pieces.append)
    streamer.put(torch.tensor([[1]]))
    for id in range(3):
        streamer.put(torch.tensor([id]))
    streamer.end()
    assert pieces == ["In", " the", " beginning", "\n"]


def test_streamer_writes_an_unfinished_character_at_the_end(tokenizer):
    ids = tokenizer("\u4e2d").input_ids[:-1]
    pieces: list[str] = []
    streamer = Streamer(tokenizer, pieces.append)
    streamer.put(torch.tensor([[1]]))
    for id in ids:
        streamer.put(torch.tensor([id]))
    streamer.end()
    assert "".join(pieces) == tokenizer.decode(ids) + "\n"


def test_streamer_tells_prefill_and_decode_apart(tokenizer, monkeypatch):
    clock = itertools.chain([10.0, 12.0, 12.5, 13.0], itertools.repeat(math.nan))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    streamer = Streamer(tokenizer, lambda text: None)
    streamer.put(torch.zeros(1, 8, dtype=torch.long))
    for _ in range(3):
        streamer.put(torch.tensor([70]))
    figures = streamer.figures(prompt_tokens=8)
    assert figures == {
        "prompt_tokens": 8,
        "new_tokens": 3,
        "prefill_seconds": 2.0,
        "prefill_tokens_per_second": 4.0,
        "decode_seconds": 1.0,
        "decode_tokens_per_second": 2.0,
    }
    line = speed({**figures, "dtype": "bfloat16", "device": "xpu:0"})
    assert line == (
        "prefill: 8 tokens in 2.000 s, 4.0 tokens/s; decode: 2 tokens in 1.000 s, 2.0 tokens/s (bfloat16 on xpu:0)"
    )


def test_one_token_has_no_decode_rate(cli):
    outcome = cli("generate", TINY_ZAMBA2, PROMPT, "--device", "cpu", "--max-new-tokens", 1)
    assert "decode" not in outcome.err
    assert (
        json.loads(cli("generate", TINY_ZAMBA2, PROMPT, "--max-new-tokens", 1, "--json").out)[
            "decode_tokens_per_second"
        ]
        is None
    )


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("temperature", "top_p", "words"),
    [
        (-0.5, 1.0, "--temperature is -0.5"),
        (math.nan, 1.0, "--temperature is nan"),
        (math.inf, 1.0, "--temperature is inf"),
        (1.0, 0.0, "--top-p is 0.0"),
        (1.0, 1.5, "--top-p is 1.5"),
        (1.0, math.nan, "--top-p is nan"),
        (0.0, 0.9, "--top-p 0.9 has no effect"),
    ],
)
def test_bad_numbers(mistake, temperature, top_p, words):
    assert words in mistake("generate", TINY_ZAMBA2, PROMPT, "--temperature", temperature, "--top-p", top_p)


def test_greedy_asks_for_no_sampling():
    assert sampling_arguments(0.0, 1.0) == {"do_sample": False}


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_empty_prompt(mistake, prompt):
    assert mistake("generate", TINY_ZAMBA2, prompt) == "xpu-ports: PROMPT is empty\n"


def test_empty_stdin(mistake, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert mistake("generate", TINY_ZAMBA2, "-") == "xpu-ports: PROMPT is empty: nothing came from stdin\n"


@pytest.mark.parametrize("spec", ["tritn", "rms_nrm=triton", "gated_rms_norm=tritn,reference"])
def test_unknown_back_end_or_op(mistake, spec):
    assert mistake("generate", TINY_ZAMBA2, PROMPT, "--backend", spec).startswith(f"xpu-ports: --backend={spec!r}: no ")


def test_a_back_end_that_cannot_run_says_why(mistake, monkeypatch):
    monkeypatch.setattr("xpu_ports.common.dispatch.EMULATED_ON_CPU", set())
    line = mistake("generate", TINY_ZAMBA2, PROMPT, "--device", "cpu", "--backend", "ssd_chunk_scan=triton")
    assert line.startswith("xpu-ports: ssd_chunk_scan: back end 'triton' was asked for and cannot run this call on cpu")


def test_missing_folder(mistake):
    assert mistake("generate", "nowhere", PROMPT) == "xpu-ports: nowhere: no such folder\n"
    # The owner is a folder here, so it is a slip and nobody asks the Hub.
    assert mistake("generate", f"{TINY_ZAMBA2}x", PROMPT) == f"xpu-ports: {TINY_ZAMBA2}x: no such folder\n"


def test_a_slip_in_a_relative_path_is_not_looked_up_on_the_hub(mistake, monkeypatch):
    monkeypatch.chdir(TINY_ZAMBA2.parents[1])
    assert mistake("generate", "checkpoints/tiny", PROMPT) == "xpu-ports: checkpoints/tiny: no such folder\n"


def test_a_name_that_the_hub_does_not_give(mistake, monkeypatch):
    def offline(name, *args, **kwargs):
        assert name == "owner/name"
        raise OSError("no connection")

    monkeypatch.setattr("xpu_ports.common.configuration.cached_file", offline)
    line = mistake("generate", "owner/name", PROMPT)
    assert line == "xpu-ports: owner/name: no such folder, and the Hub does not give it: no connection\n"


def test_a_model_on_the_hub_that_there_is_no_port_for(mistake, monkeypatch, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    monkeypatch.setattr("xpu_ports.common.configuration.cached_file", lambda *args, **kwargs: str(config))
    assert f"{config}: model_type is 'llama'" in mistake("generate", "owner/name", PROMPT)


def test_not_a_checkpoint(mistake, tmp_path):
    assert f"{tmp_path}: not a checkpoint: there is no config.json" in mistake("generate", tmp_path, PROMPT)
    config = TINY_ZAMBA2 / "config.json"
    assert f"{config}: a file, expected the folder" in mistake("generate", config, PROMPT)
    (tmp_path / "model_index.json").write_text("{}")
    assert "a diffusers pipeline, not a language model" in mistake("generate", tmp_path, PROMPT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{,", "config.json: not JSON: "),
        ("\udcff", "config.json: not JSON: "),
        ("[]", "config.json: model_type is missing"),
        ("{}", "config.json: model_type is missing"),
        ('{"model_type": "llama"}', "config.json: model_type is 'llama', expected one that there is a port for: "),
    ],
)
def test_wrong_config(mistake, tiny_copy, text, words):
    (tiny_copy / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert words in mistake("generate", tiny_copy, PROMPT)


def test_a_config_value_of_the_wrong_type(mistake, tiny_copy):
    edit_config(tiny_copy, hidden_size="wide")
    assert "hidden_size" in mistake("generate", tiny_copy, PROMPT)


def test_truncated_weights(mistake, tiny_copy):
    weights = tiny_copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(weights) in mistake("generate", tiny_copy, PROMPT)


def test_missing_weights(mistake, tiny_copy):
    (tiny_copy / "model.safetensors").unlink()
    assert str(tiny_copy) in mistake("generate", tiny_copy, PROMPT)


def test_weights_of_another_shape(mistake, tiny_copy):
    edit_config(tiny_copy, intermediate_size=336)
    line = mistake("generate", tiny_copy, PROMPT)
    assert "320" in line
    assert "336" in line


def test_a_damaged_tokenizer(mistake, tiny_copy):
    (tiny_copy / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": {"type": "Nope"}}')
    assert f"{tiny_copy}: the tokenizer cannot be loaded: " in mistake("generate", tiny_copy, PROMPT)


@pytest.mark.parametrize("name", ["tpu", "xpu:", "cuda:x", "auto:1", "cpu:0:1"])
def test_unknown_device(mistake, name):
    assert f"--device is {name!r}, expected auto, cpu, xpu or cuda" in mistake(
        "generate", TINY_ZAMBA2, PROMPT, "--device", name
    )


class _Absent:
    @staticmethod
    def is_available() -> bool:
        return False


class _Two:
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 2


def test_xpu_with_a_torch_that_is_not_for_it(mistake, monkeypatch):
    monkeypatch.setattr(torch, "xpu", _Absent)
    monkeypatch.setattr(torch.version, "xpu", None)
    line = mistake("generate", TINY_ZAMBA2, PROMPT, "--device", "xpu")
    assert line.startswith(f"xpu-ports: --device xpu: torch {torch.__version__}, built for ")
    assert line.endswith("for Intel GPUs: pip install torch --index-url https://download.pytorch.org/whl/xpu\n")


def test_xpu_with_the_right_torch_and_no_gpu(mistake, monkeypatch):
    monkeypatch.setattr(torch, "xpu", _Absent)
    monkeypatch.setattr(torch.version, "xpu", "20260101")
    line = mistake("generate", TINY_ZAMBA2, PROMPT, "--device", "xpu")
    assert "built for XPU 20260101, finds no XPU device; `xpu-ports doctor` looks for the cause" in line


def test_an_index_beyond_the_last_device(mistake, monkeypatch):
    monkeypatch.setattr(torch, "xpu", _Two)
    line = mistake("generate", TINY_ZAMBA2, PROMPT, "--device", "xpu:2")
    assert line == "xpu-ports: --device xpu:2: the last xpu device is xpu:1\n"


@pytest.mark.parametrize(
    ("xpu", "cuda", "wanted"), [(_Two, _Two, "xpu"), (_Absent, _Two, "cuda"), (_Absent, _Absent, "cpu")]
)
def test_auto_takes_an_xpu_then_cuda_then_the_cpu(monkeypatch, xpu, cuda, wanted):
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "cuda", cuda)
    assert _common.resolve_device("auto") == torch.device(wanted)


def test_weights_elsewhere_than_asked_are_an_error(mistake, monkeypatch):
    class Elsewhere:
        from_pretrained = staticmethod(lambda *args, **kwargs: torch.nn.Linear(2, 2))

    monkeypatch.setattr(_common, "resolve_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(_common, "port", lambda model_type: Elsewhere)
    line = mistake("generate", TINY_ZAMBA2, PROMPT)
    assert line == f"xpu-ports: {TINY_ZAMBA2}: asked for meta, but weights are on cpu\n"
