"""Running the command line in this process, and checkpoints with something wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from xpu_ports.cli.main import main

TINY_ZAMBA2 = Path(__file__).parents[2] / "checkpoints" / "tiny-zamba2"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys) -> Callable[..., Outcome]:
    """`cli("generate", ...)` gives the exit code, stdout and stderr."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def mistake(cli) -> Callable[..., str]:
    """Runs what a user got wrong; asserts exit code 2, an empty stdout and one line on stderr, and gives that line."""

    def run(*arguments: object) -> str:
        outcome = cli(*arguments)
        assert outcome.code == 2, outcome
        assert outcome.out == ""
        assert outcome.err.count("\n") == 1, outcome.err
        assert outcome.err.endswith("\n")
        assert "Traceback" not in outcome.err
        return outcome.err

    return run


@pytest.fixture
def tiny_copy(tmp_path) -> Path:
    """A copy of tiny-zamba2 to damage."""
    return Path(shutil.copytree(TINY_ZAMBA2, tmp_path / "copy"))


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
