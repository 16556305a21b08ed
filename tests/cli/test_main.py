"""The command itself: help, version, start-up, and what each kind of error becomes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from tests.cli.conftest import TINY_ZAMBA2
from xpu_ports.cli import _common, _facts
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.common.dispatch import BackendError

HEAVY = ("torch", "transformers", "triton", "numpy")


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_help_names_every_command_and_imports_nothing_heavy():
    code = f"""
import sys
from xpu_ports.cli.main import main
assert main([]) == 0
loaded = [name for name in {HEAVY} if name in sys.modules]
sys.exit(f"imported: {{loaded}}" if loaded else 0)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "explain", "doctor"):
        assert command in done.stdout


def test_module_and_console_script_print_the_version():
    version = f"xpu-ports {importlib.metadata.version('xpu-ports')}\n"
    module = [sys.executable, "-m", "xpu_ports.cli", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, timeout=120, check=True).stdout == version
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="xpu-ports")
    done = python(f"import sys; from {script.module} import {script.attr}; sys.exit({script.attr}(['--version']))")
    assert (done.returncode, done.stdout) == (0, version)


def test_a_module_run_hands_on_its_exit_code():
    command = [sys.executable, "-m", "xpu_ports.cli", "generate", "nowhere", "text"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "xpu-ports: nowhere: no such folder\n")


def test_a_reader_that_has_left_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "xpu_ports.cli", "--version"]
    # Buffered, so that the text meets the closed pipe only when it is flushed at the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False, env=buffered)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'. See xpu-ports --help"),
        (["generate", "folder"], "Missing argument 'PROMPT'. See xpu-ports generate --help"),
        (["generate", "folder", "text", "--nope"], "No such option: --nope"),
        (["generate", "folder", "text", "--dtype", "int8"], "'int8' is not one of 'auto', 'float32', 'bfloat16'"),
        (["generate", "folder", "text", "--max-new-tokens", "0"], "'--max-new-tokens'"),
        (["generate", "folder", "text", "--max-new-tokens", "many"], "'--max-new-tokens'"),
        (["generate", "folder", "text", "--seed", "-1"], "'--seed'"),
        (["generate", "folder", "text", "--temperature", "hot"], "'--temperature'"),
        (["doctor", "extra"], "extra"),
    ],
)
def test_mistakes_on_the_command_line(mistake, arguments, words):
    assert words in mistake(*arguments)


def _raise(error: BaseException):
    def load(*args, **kwargs):
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n  b"), "xpu-ports: a b\n"),
        (
            OSError(2, "No such file or directory", "x.json"),
            "xpu-ports: x.json: no such file or directory\n",
        ),
        (BackendError("rms_norm: not here"), "xpu-ports: rms_norm: not here\n"),
        (SafetensorError("header too large"), "xpu-ports: header too large\n"),
        (
            CheckpointError("m.safetensors", "lm_head.weight", "float32 [2]", "float32 [3]"),
            "xpu-ports: m.safetensors: lm_head.weight: expected float32 [2], found float32 [3]\n",
        ),
        (torch.OutOfMemoryError("XPU out of memory."), "xpu-ports: XPU out of memory.\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_about_the_input_are_one_line(mistake, monkeypatch, error, line):
    monkeypatch.setattr(_common, "load", _raise(error))
    assert mistake("generate", TINY_ZAMBA2, "text") == line


def test_an_unexpected_error_is_one_line_and_tells_how_to_see_more(cli, monkeypatch):
    monkeypatch.delenv("XPU_PORTS_DEBUG", raising=False)
    monkeypatch.setattr(_common, "load", _raise(KeyError("left")))
    assert cli("generate", TINY_ZAMBA2, "text") == (
        1,
        "",
        "xpu-ports: unexpected KeyError: 'left' (--verbose or XPU_PORTS_DEBUG=1 shows where)\n",
    )


@pytest.mark.parametrize("how", ["--verbose", "-v", "environment"])
def test_a_traceback_is_shown_where_it_is_asked_for(cli, monkeypatch, how):
    monkeypatch.setattr(_common, "load", _raise(KeyError("left")))
    monkeypatch.setenv("XPU_PORTS_DEBUG", "1" if how == "environment" else "0")
    outcome = cli("generate", TINY_ZAMBA2, "text", *([] if how == "environment" else [how]))
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last):")
    assert outcome.err.endswith("xpu-ports: unexpected KeyError: 'left' (--verbose or XPU_PORTS_DEBUG=1 shows where)\n")


def test_an_interrupt_ends_with_130(cli, monkeypatch):
    monkeypatch.setattr(_common, "load", _raise(KeyboardInterrupt()))
    outcome = cli("generate", TINY_ZAMBA2, "text")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_a_failed_check_is_exit_code_1(cli, monkeypatch):
    monkeypatch.setattr(_facts, "gather", lambda: _facts.Facts(torch=None, torch_error="ImportError: libsycl.so.8"))
    outcome = cli("doctor")
    assert outcome.code == 1
    assert "fail  torch  torch cannot be used: ImportError: libsycl.so.8" in outcome.out
