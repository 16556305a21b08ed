"""`xpu-ports accuracy`: a checkpoint on the port beside its reference, with a verdict."""

from __future__ import annotations

import enum
import importlib
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from xpu_ports.cli import _common
from xpu_ports.cli._pipeline import is_pipeline
from xpu_ports.cli.image import check_checkpoint as check_pipeline


class Reference(enum.StrEnum):
    TRANSFORMERS = "transformers"
    DIFFUSERS = "diffusers"
    REFERENCE_PATH = "reference-path"


class Quant(enum.StrEnum):
    MXFP4 = "mxfp4"


class Cache(enum.StrEnum):
    FP8 = "fp8"


def accuracy(
    checkpoint: _common.CheckpointArgument,
    reference: Annotated[
        Reference | None,
        typer.Option("--reference", help="The port beside these; reference-path: itself on reference ops alone."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="What to read; a few pages come with the package.")
    ] = None,
    dtype: _common.DtypeOption = _common.Dtype.AUTO,
    quant: Annotated[
        Quant | None, typer.Option("--quant", help="Pack the port's weights: what it costs, and whether it is right.")
    ] = None,
    cache: Annotated[Cache | None, typer.Option("--cache", help="What the port's cache holds.")] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Print every layer, not the worst alone.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="For report.html, accuracy.json and plots; needs matplotlib."),
    ] = None,
    window: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens that are read at once.")] = 256,
    windows: Annotated[int, typer.Option(min=1, metavar="N", help="Windows that are read at most.")] = 8,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that are decoded one by one.")] = 32,
    yardstick: Annotated[
        bool, typer.Option("--yardstick", help="Run the reference in float32 as well, which tells what to expect.")
    ] = False,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="FLUX.2: what to draw.")] = "a red three",
    side: Annotated[int | None, typer.Option(min=1, metavar="PIXELS", help="FLUX.2: 1024 when left out.")] = None,
    draw_steps: Annotated[int, typer.Option(min=1, metavar="N", help="FLUX.2: steps.")] = 20,
    guidance: Annotated[float, typer.Option(min=0, metavar="G", help="FLUX.2: guidance scale.")] = 2.0,
    text_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="FLUX.2: tokens of text.")] = 32,
    device: _common.DeviceOption = "auto",
    backend: _common.BackendOption = None,
    as_json: _common.JsonOption = False,
    verbose: _common.VerboseOption = False,
) -> None:
    """Compare a checkpoint's port with its reference: logits, layers, decoding; for FLUX.2 blocks, latents, pictures.

    The reference runs first and leaves what is compared in files, so that one model is in memory at a time. Exit code
    1 when the port is outside the bounds that its model states, and then the layer and the module where it begins.
    Under torchrun the port's layers are divided among its processes, each of which has all of the reference.
    """
    model_type = find_model(checkpoint)
    if quant is not None and cache is not None:
        raise _common.UserError("--quant and --cache change two things at once: measure one, then the other")
    if quant is not None and _common.ranks() > 1:
        raise _common.UserError("--quant packs a model that is whole: convert the checkpoint, then compare that")
    _common.quiet_libraries(verbose)
    if not verbose:
        logging.getLogger("diffusers").setLevel(logging.ERROR)
    from xpu_ports.common.compare import command
    from xpu_ports.common.compare.bounds import DTYPES
    from xpu_ports.common.compare.subject import Options

    options = Options(
        checkpoint=str(Path(checkpoint).expanduser()), device=_common.resolve_device(device),
        reference=reference, dtype=DTYPES.get(dtype.value), backend=backend, text=text, quant=quant, cache=cache,
        window=window, windows=windows, steps=steps, yardstick=yardstick, prompt=prompt, side=side,
        draw_steps=draw_steps, guidance=guidance, text_tokens=text_tokens, out=out,
    )  # fmt: skip
    try:
        command.prepare(out)
        compare: Any = importlib.import_module(f"xpu_ports.models.{model_type}.accuracy").compare
    except ImportError as error:
        raise _common.UserError(str(error)) from error
    with _common.first_rank_speaks():
        with _common.stdout_kept_clean(as_json):
            report = compare(options)
        code = command.finish(report, out if _common.rank() == 0 else None, per_layer, as_json)
    if code:
        raise typer.Exit(code)


def find_model(checkpoint: str) -> str:
    """The folder of models/ that runs a checkpoint.

    Raises:
        UserError: there is none, or no such checkpoint.
    """
    if is_pipeline(checkpoint):
        check_pipeline(checkpoint)
        return "flux2"
    _common.check_checkpoint(checkpoint)
    return _common.model_type_of(str(Path(checkpoint).expanduser()))
