"""The `xpu-ports` command: its subcommands, one file each, and how errors reach the user.

Exit codes: 0 all well; 1 a check failed, or an error of this program; 2 a mistake that the user can put right.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from xpu_ports.cli import _common
from xpu_ports.cli._common import UserError
from xpu_ports.cli.accuracy import accuracy
from xpu_ports.cli.bench import app as bench
from xpu_ports.cli.convert import convert
from xpu_ports.cli.doctor import doctor
from xpu_ports.cli.explain import explain
from xpu_ports.cli.generate import generate
from xpu_ports.cli.image import image
from xpu_ports.cli.plan import plan
from xpu_ports.cli.tune import tune
from xpu_ports.cli.warmup import warmup

DEBUG = "XPU_PORTS_DEBUG"
PROGRAM = "xpu-ports"

app = typer.Typer(
    name=PROGRAM,
    help="Models ported to Intel GPUs: run them, see what runs them, and find out why a machine does not.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, image, explain, accuracy, plan, warmup, tune, convert, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")

# Typer has a click of its own in newer versions and uses the installed one in older: take the class that it raises.
_CommandLineError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

# Exceptions that say what is wrong with the input, in modules that are looked at only when something imported them.
_ABOUT_THE_INPUT = (
    ("xpu_ports.common.dispatch", "BackendError"),
    ("safetensors", "SafetensorError"),
    ("torch", "OutOfMemoryError"),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {importlib.metadata.version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; without arguments print the help."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character gets "?" rather than an error.
            stream.reconfigure(errors="replace")
    try:
        code = app(arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has left, as in `| head`: what Python still flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG, "0") not in ("", "0") or {"--verbose", "-v"} & set(arguments):
            traceback.print_exc()
        return _report(error)


def _message(error: Exception) -> str:
    """What an error says, of a file without Python's number in front: "x.json: no such file or directory"."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _report(error: Exception) -> int:
    """Say what went wrong in one line on stderr, and on which of several processes; returns the exit code."""
    message = " ".join(_message(error).split())
    if _common.ranks() > 1:
        message = f"rank {_common.rank()} of {_common.ranks()}: {message}"
    if isinstance(error, _CommandLineError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else PROGRAM
        mistake = " ".join(error.format_message().split()).removesuffix(".")
        print(f"{command}: {mistake}. See {command} --help", file=sys.stderr)
        return 2
    known = (getattr(sys.modules[module], name) for module, name in _ABOUT_THE_INPUT if module in sys.modules)
    if isinstance(error, (UserError, ValueError, OSError, *known)):
        print(f"{PROGRAM}: {message}", file=sys.stderr)
        return 2
    print(
        f"{PROGRAM}: unexpected {type(error).__name__}: {message} (--verbose or {DEBUG}=1 shows where)", file=sys.stderr
    )
    return 1
