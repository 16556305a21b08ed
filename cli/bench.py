"""`xpu-ports bench`: how fast the ops and the models are, beside their peers."""

from __future__ import annotations

import enum
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xpu_ports.cli._common import (
    DeviceOption,
    JsonOption,
    UserError,
    first_rank_speaks,
    numbers,
    print_json,
    print_table,
    rank,
    resolve_device,
)
from xpu_ports.cli._pipeline import is_pipeline
from xpu_ports.cli.bench_compare import compare, roofline
from xpu_ports.cli.bench_predict import predict

if TYPE_CHECKING:
    import torch

FLUX2 = "flux2"
# Of a side of its tokens.
PIXELS = 16

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
    side: Annotated[
        int, typer.Option("--side", min=PIXELS, metavar="PIXELS", help="FLUX.2: of a square picture.")
    ] = 1024,
    text: Annotated[int, typer.Option("--text", min=1, metavar="N", help="FLUX.2: tokens of text.")] = 512,
    mxfp4: Annotated[bool, typer.Option("--mxfp4", help="With packed weights; of FLUX.2 also with them.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the results here as JSONL.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill and decode through `generate`: captured, eager, and transformers' own class beside them.

    Of flux2 a step of the transformer, with diffusers' class beside it. Launches and kernel milliseconds are those of
    one eager step. With --mxfp4 all linear layers are packed, of DeepSeek-V4 the experts, as it is published, and no
    class of transformers is measured. With --json one object a line. Under torchrun the layers are divided among its
    processes, and transformers' class is left out.
    """
    import torch

    where = resolve_device(device)
    if name == FLUX2:
        _bench_flux2(
            layout, checkpoint, where, getattr(torch, dtype), (side, text), (peer, compiled, mxfp4), out, as_json
        )
        return
    from xpu_ports.cli.bench_model import bench_model

    with first_rank_speaks():
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
            out if rank() == 0 else None,
            as_json,
            compiled,
            packed=mxfp4,
        )


def _bench_flux2(
    layout: str | None,
    checkpoint: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    beside: tuple[bool, bool, bool],
    out: Path | None,
    as_json: bool,
) -> None:
    side, text = sizes
    peer, compiled, mxfp4 = beside
    if side % PIXELS:
        raise UserError(f"--side is {side}, expected a multiple of {PIXELS} pixels, which a token has")
    if checkpoint is not None and not is_pipeline(str(checkpoint)):
        raise UserError(f"{checkpoint}: no pipeline of diffusers: there is no model_index.json in it")
    try:
        from xpu_ports.cli.bench_pictures import Options, bench_pictures
    except ImportError as error:
        raise UserError(f"flux2 needs diffusers: pip install 'xpu-ports[flux2]' ({error})") from error
    options = Options(side=side // PIXELS, text=text, peer=peer, mxfp4=mxfp4, compiled=compiled)
    bench_pictures(layout, checkpoint, device, dtype, options, out, as_json)


@app.command("list")
def list_all(as_json: JsonOption = False) -> None:
    """List what can be measured: the ops' rows with their sizes and peers, and the models with their layouts."""
    from xpu_ports.common.bench.registry import CASES
    from xpu_ports.models import PORTS

    models = [*PORTS, FLUX2]
    layouts = {name: list(importlib.import_module(f"xpu_ports.models.{name}.layouts").LAYOUTS) for name in models}
    if as_json:
        rows = [
            {"name": case.name, "op": case.op.name, "sizes": list(case.sizes), "peers": list(case.peers)}
            for case in CASES.values()
        ]
        print_json({"ops": rows, "models": [{"name": name, "layouts": found} for name, found in layouts.items()]})
        return
    print_table(
        ["bench ops", "sizes", "peers"],
        [[case.name, f"{case.sizes[0]} ... {case.sizes[-1]}", ", ".join(case.peers)] for case in CASES.values()],
    )
    print()
    print_table(["bench model", "--layout"], [[name, ", ".join(found)] for name, found in layouts.items()])


app.command("compare")(compare)
app.command("roofline")(roofline)
app.command("predict")(predict)
