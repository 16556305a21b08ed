"""The command: what it takes, and what it does with what was found. `xpu-ports accuracy` and a model's own are this."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from xpu_ports.common.compare.bounds import DTYPES
from xpu_ports.common.compare.html import write_html
from xpu_ports.common.compare.plots import check_matplotlib, plot
from xpu_ports.common.compare.report import Report, table, verdict, write_json
from xpu_ports.common.compare.subject import CACHES, QUANT, REFERENCES, Options
from xpu_ports.common.dispatch import Decision, Explanation

HELP = {
    "reference": "What the port stands beside: transformers' or diffusers' model, or the port on reference ops alone.",
    "dtype": "Of both models; auto takes the checkpoint's.",
    "text": "A text file; a few pages of the package's own when left out.",
    "quant": "Pack the port's weights; beside the dense reference, and beside dense weights of the same values.",
    "cache": "What the port's cache holds.",
    "window": "Tokens that are read at once.",
    "windows": "Windows of the text that are read at most.",
    "steps": "Tokens that are decoded one by one.",
    "yardstick": "Run the reference in float32 too: how far it is itself, in the dtype, tells what to expect.",
    "per_layer": "Print every layer.",
    "out": "A folder for accuracy.json, plots (PNG) and report.html, which holds all of it.",
    "json": "Print one JSON object and nothing else.",
    "prompt": "Pictures: what to draw.",
    "side": "Pictures: pixels of a side; the pipeline's own when left out.",
    "draw_steps": "Pictures: steps.",
    "guidance": "Pictures: guidance scale.",
    "text_tokens": "Pictures: tokens of text.",
    "device": "auto takes an accelerator if there is one.",
    "backend": "Force back ends of the port, as XPU_PORTS_BACKEND does.",
}
Compare = Callable[[Options], Report]


def prepare(out: Path | None) -> None:
    """Find out before the models run whether plots can be made, and where.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be made.
    """
    if out is not None:
        check_matplotlib()
        out.mkdir(parents=True, exist_ok=True)


def finish(report: Report, out: Path | None, per_layer: bool, as_json: bool) -> int:
    """Write and print what was found; the exit code, 1 outside the bounds."""
    if out is not None:
        report.pictures = {**plot(report, out), **report.pictures}
        write_json(report, out / "accuracy.json")
        write_html(report, out / "report.html")
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return 0 if report.within else 1
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False, soft_wrap=True)
    with console.capture() as captured:
        console.print(table(report, per_layer))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    print()
    print("\n".join(verdict(report)))
    if out is not None:
        print(f"written to {out}: report.html, accuracy.json and {len(report.pictures)} pictures")
    print()
    print(Explanation(Decision(**line) for line in report.explain))
    return 0 if report.within else 1


def parser(program: str) -> argparse.ArgumentParser:
    """The options of a model's own command."""
    made = argparse.ArgumentParser(prog=program, description="A checkpoint beside its reference, within stated bounds.")
    made.add_argument("checkpoint", metavar="CKPT", help="Folder of a checkpoint, or its name on the Hub.")
    made.add_argument("--reference", choices=REFERENCES, help=HELP["reference"])
    made.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=HELP["dtype"])
    made.add_argument("--device", default="auto", help=HELP["device"])
    made.add_argument("--backend", help=HELP["backend"])
    made.add_argument("--text", type=Path, help=HELP["text"])
    made.add_argument("--quant", choices=QUANT, help=HELP["quant"])
    made.add_argument("--cache", choices=CACHES, help=HELP["cache"])
    made.add_argument("--yardstick", action="store_true", help=HELP["yardstick"])
    made.add_argument("--per-layer", action="store_true", help=HELP["per_layer"])
    made.add_argument("--out", type=Path, help=HELP["out"])
    made.add_argument("--json", action="store_true", help=HELP["json"])
    made.add_argument("--prompt", default=Options.prompt, help=HELP["prompt"])
    for name in ("window", "windows", "steps", "side", "draw_steps", "text_tokens"):
        default = getattr(Options, name)
        made.add_argument(f"--{name.replace('_', '-')}", type=_positive, default=default, help=HELP[name])
    made.add_argument("--guidance", type=float, default=Options.guidance, help=HELP["guidance"])
    return made


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def main(compare: Compare, program: str, argv: Sequence[str] | None = None) -> int:
    """Run a model's own command.

    Args:
        compare: the model's.
        program: what to call it in help.
        argv: the arguments; those of the process when left out.

    Returns:
        0, 1 outside the bounds, 2 for what the user can put right.
    """
    values = vars(parser(program).parse_args(argv))
    per_layer, as_json, out = values.pop("per_layer"), values.pop("json"), values.pop("out")
    device = values.pop("device")
    chosen = torch.accelerator.current_accelerator() if device == "auto" else torch.device(device)
    dtype = DTYPES.get(values.pop("dtype"))
    try:
        prepare(out)
        report = compare(Options(**values, out=out, dtype=dtype, device=chosen or torch.device("cpu")))
    except (ValueError, OSError, ImportError) as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return finish(report, out, per_layer, as_json)
