"""`xpu-ports tune`: measure the tiles that kernels may have on this card, and keep those that are faster."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from xpu_ports.cli import _common
from xpu_ports.cli.bench import Dtype


def tune(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OP]...", help="Ops or kernels, such as skinny_linear; all when left out.", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CKPT", help="For the sizes of this checkpoint.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="For those of a model type, such as zamba2.", show_default=False),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="Its released size, such as 1.2b.", show_default=False)
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N[,N]...", help="Batch sizes of the model.")] = "1",
    device: _common.DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option("--dtype")] = Dtype.BFLOAT16,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="N", min=0, help="Start no measurement after this.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write here, not where launches look.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be measured.")] = False,
    as_json: _common.JsonOption = False,
) -> None:
    """Measure the tiles that kernels may have, check their numbers, and write those that beat the built-in ones.

    Without a model the sizes are those of the benchmarks. A tile is written where it is faster beyond the spread of
    the times; launches then take it from the table, on this card and with this Triton. XPU_PORTS_TUNING=off turns
    tables off, another value names a file.
    """
    import torch

    from xpu_ports.common.bench.tune import registry_items
    from xpu_ports.common.device import architecture
    from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT

    batches = _common.numbers(batch, "--batch")
    where, kind = _common.resolve_device(device), getattr(torch, dtype)
    if not AVAILABLE:
        raise _common.UserError(f"there is nothing to tune: {WHY_NOT}")
    if where.type == "cpu" and not dry_run:
        raise _common.UserError("there is no GPU here to measure on; --dry-run lists what would be measured")
    arch = architecture(where)
    chosen = _config(checkpoint, model, layout)

    from xpu_ports.cli.tune_kernels import list_tiles, model_calls, tune_kernels

    items = registry_items() if chosen is None else model_calls(*chosen, kind, batches, arch)
    if dry_run:
        list_tiles(items, names or [], kind, arch, as_json)
    else:
        tune_kernels(items, names or [], where, kind, seconds, out, as_json)


def _config(checkpoint: str | None, model: str | None, layout: str | None) -> tuple[str, Any] | None:
    """(model type, config) of what the options name; None where they name nothing."""
    if model is None and layout is not None:
        raise _common.UserError("--layout is a size of a model: say which with --model")
    if model is not None and checkpoint is not None:
        raise _common.UserError("--checkpoint and --model are two ways to name the sizes: give one")
    if checkpoint is not None:
        from xpu_ports.common.configuration import find_config, read_config

        _common.check_checkpoint(checkpoint)
        path = find_config(str(Path(checkpoint).expanduser()))
        name = _common.check_model_type(read_config(path).get("model_type"), path)
        return name, _common.port(name).config_class.from_pretrained(Path(path).parent)  # type: ignore[union-attr]
    if model is None:
        return None
    _common.check_model_type(model, "--model")
    layouts = importlib.import_module(f"xpu_ports.models.{model}.layouts")
    return model, layouts.layout_config(layout or next(iter(layouts.LAYOUTS)))
