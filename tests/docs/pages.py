"""The documentation as a reader sees it: its blocks of code, and the commands that it names."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import re
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xpu_ports.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
# What a line of a shell begins with.
PROGRAMS = ("xpu-ports", "make", "python", "python3", "torchrun", "pytest", "bash", "pip", "apt", "hf")
SHELLS = ("sh", "bash", "console")


def pages() -> list[str]:
    """Files of text for users, relative to the repository."""
    patterns = ("README.md", "docs/*.md", "models/*/README.md", "checkpoints/README.md")
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Its lines as commands, those that go on joined; empty where one is none: then it is output."""
        if self.language not in ("", *SHELLS):
            return []
        lines = [plain(line) for line in re.sub(r"\n[ \t]+", " ", self.text).splitlines() if line.strip()]
        return lines if all(is_command(line) for line in lines) else []


def blocks(page: str, text: str) -> list[Block]:
    return [Block(page, match[1], match[2]) for match in _FENCE.finditer(text)]


def plain(command: str) -> str:
    """A command on one line, without its comment and without the virtual environment that it stands in."""
    return " ".join(re.sub(r"(^|\s)#\s.*", "", command).split()).removeprefix(".venv/bin/")


def is_command(text: str) -> bool:
    return text.split(" ")[0] in PROGRAMS and " " in text


def named_commands(text: str) -> Iterator[str]:
    """Commands named between backticks, in running text and in tables."""
    for span in _SPAN.findall(_FENCE.sub("", text)):
        if is_command(command := plain(span)):
            yield command


# ------------------------------------------------------------------------------------------------------------ mistakes


def problems(command: str) -> list[str]:
    """What of a command does not exist: a subcommand, option or value of one, a target of make, a file, a module."""
    program, *words = shlex.split(command)
    if program == "xpu-ports":
        return _problems_of_ours(words)
    if program == "torchrun":
        return _problems_of_ours(words[words.index("xpu_ports.cli") + 1 :]) if "xpu_ports.cli" in words else []
    found = [f"no file {word}" for word in words if _is_file(word) and not (ROOT / word).exists()]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        found += [f"no target {word}" for word in words if "=" not in word and word not in targets]
    if program.startswith("python") and words[0] == "-m":
        found += [f"no module {words[1]}"] if importlib.util.find_spec(words[1]) is None else []
    return found


def _is_file(word: str) -> bool:
    """Whether it names one of the repository: not with a <placeholder> in it."""
    return (word.endswith((".py", ".sh")) or word.startswith("tests/")) and "<" not in word


def _bare(word: str) -> str:
    """A word of a line of usage without its brackets: [--option, value], [NAME...]."""
    return re.sub(r"^\[|(\.\.\.)?\](\.\.\.)?$", "", word)


def _problems_of_ours(words: list[str]) -> list[str]:
    command: Any = typer.main.get_command(app)
    words = [_bare(word) for word in words]
    while hasattr(command, "commands"):
        if not words:
            # Named for all that are under it.
            return []
        name = words.pop(0)
        if name not in command.commands:
            return [f"no command {name!r}; there are: {', '.join(command.commands)}"]
        command = command.commands[name]
    options = {name: p for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    found, arguments = [], 0
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("-"):
            arguments += 1
        elif name not in options:
            found.append(f"no option {name}")
        elif not options[name].is_flag:
            value = value if equals or not words else words.pop(0)
            choices = _choices(command, options[name].name)
            found += [f"{name} does not take {v}" for v in value.split("|") if choices and v not in choices]
    most = [p.nargs for p in command.params if p.param_type_name == "argument"]
    if arguments > len(most) and -1 not in most:
        found.append(f"{arguments} arguments, of at most {len(most)}")
    return found


def _choices(command: Any, parameter: str) -> set[str]:
    """The words that an option takes, where its type is an enumeration."""
    hint = typing.get_type_hints(inspect.unwrap(command.callback))[parameter]
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    return {str(member.value) for kind in kinds for member in kind}


def options_of(command: str) -> set[str]:
    """The options that a command names."""
    return {_bare(word).partition("=")[0] for word in shlex.split(command) if _bare(word).startswith("--")}
