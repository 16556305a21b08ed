"""`xpu-ports bench`: how fast the ops and the models are, beside their peers."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from xpu_ports.cli._common import DeviceOption, JsonOption, numbers, resolve_device
from xpu_ports.cli.bench_compare import compare, roofline
from xpu_ports.cli.bench_predict import predict

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
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Write ops.jsonl, ops.png and roofline.png here.", show_default=False
        ),
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


@app.command("model")
def model(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A model type, such as zamba2.")],
    layout: Annotated[
        str | None, typer.Option("--layout", help="A released size, such as 1.2b, with random weights.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="CKPT", help="Real weights instead.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: Annotated[Dtype, typer.Option("--dtype")] = Dtype.BFLOAT16,
    batch: Annotated[str, typer.Option("--batch", metavar="N[,N]...", help="Batch sizes.")] = "1",
    prompt: Annotated[str, typer.Option("--prompt", metavar="N[,N]...", help="Prompt lengths.")] = "128",
    new: Annotated[int, typer.Option("--new", min=8, help="Tokens to decode.")] = 128,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Also measure transformers' class.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also measure the decode step through torch.compile.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the results here as JSONL.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill and decode through `generate`: captured, eager, and transformers' own class beside them.

    Launches and kernel milliseconds are those of one eager decode step. With --json one object a line.
    """
    import torch

    from xpu_ports.cli.bench_model import bench_model

    where = resolve_device(device)
    bench_model(
        name,
        layout,
        checkpoint,
        where,
        getattr(torch, dtype),
        numbers(batch, "--batch"),
        numbers(prompt, "--prompt"),
        new,
        peer,
        out,
        as_json,
        compiled,
    )


app.command("compare")(compare)
app.command("roofline")(roofline)
app.command("predict")(predict)
