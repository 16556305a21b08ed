"""`xpu-ports bench`: how fast the ops and the models are, beside their peers."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from xpu_ports.cli._common import DeviceOption, JsonOption, resolve_device

app = typer.Typer(help="Measure how fast ops and models are, beside their peers.", no_args_is_help=True)


class Dtype(enum.StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@app.command("ops")
def ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Ops, such as gated_rms_norm; all when left out.", show_default=False),
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option("--dtype")] = Dtype.BFLOAT16,
    sizes: Annotated[
        str | None,
        typer.Option(
            "--sizes",
            metavar="ID[,ID]...",
            help="Such as T1-N4096,T256-N4096; an op's own sizes when left out (on a CPU its two smallest).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write ops.jsonl and ops.png here.", show_default=False)
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also time torch.compile.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Check each op against its fp64 oracle and time it beside PyTorch, torch.compile and the peers installed here.

    Times are called from Python and, where the device has graphs, inside a captured one. The roof is what a copy and
    a matrix product reach on this device. With --json one object a line: environment, ceilings, then the results.
    """
    import torch

    from xpu_ports.common.bench.ops import bench_ops

    where = resolve_device(device)
    wanted = [size.strip() for size in sizes.split(",")] if sizes is not None else None
    bench_ops(names or [], where, getattr(torch, dtype), wanted, out, as_json, compiled=compiled)
