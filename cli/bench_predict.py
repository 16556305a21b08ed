"""`xpu-ports bench predict`: times for a card that is not here, from published roofs; never measurements."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from xpu_ports.common.bench.files import Results
    from xpu_ports.common.bench.predict import Prediction
    from xpu_ports.common.cards import Card

DIFFUSION = "flux2"
HEADING = "PREDICTED from bytes, FLOPs and published roofs; nothing here was measured on these cards"
FOOTNOTE = (
    "FP8 and MXFP4 are fewer bytes; products of them count as those of bf16, since Intel's matrix units have none "
    "in 8 or 4 bits of floating point. On Arc A, products in Triton kernels count as fp32 outside of the matrix units."
)


class Dtype(enum.StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def predict(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Ops; all when left out and no model is named.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="CARD[,CARD]...", help="b580, b60, b70, max1550, lunar-lake, a770, ...")
    ] = "b580",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Ops: of their tensors.")] = Dtype.BFLOAT16,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", metavar="ID[,ID]...", help="Ops: such as T1-N4096; an op's own when left out."),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            metavar="RESULTS.jsonl",
            help="Results whose share of their device's roof counts here too; may be given several times.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="A model type such as zamba2, in place of ops.")
    ] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="A released size of --model, such as 1.2b.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CKPT", help="A folder or a name on the Hub: its config.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="N[,N]...", help="Models: sequences at once.")] = "1",
    context: Annotated[int, typer.Option("--context", min=1, metavar="N", help="Models: tokens in the cache.")] = 2048,
    side: Annotated[int, typer.Option("--side", min=64, metavar="PIXELS", help="FLUX.2: of a square picture.")] = 1024,
    text: Annotated[int, typer.Option("--text", min=1, metavar="N", help="FLUX.2: tokens of text.")] = 512,
    as_json: _common.JsonOption = False,
) -> None:
    """Predict times on a card that is not here: max(bytes / bandwidth, FLOP / peak) / share of that roof.

    The share is 1, the roof itself, or with --measured what the same call reached on the card of those results. Models
    give tokens a second when decoding, in bf16 and in MXFP4, and whether they fit; FLUX.2 gives a step.
    """
    from xpu_ports.common.bench.files import read_results

    wanted = cards(device)
    results = [read_results(path) for path in measured or ()]
    if model is None and layout is not None:
        raise _common.UserError("--layout is a size of a model: name it with --model")
    if model is None and checkpoint is None:
        predictions = ops(names or [], wanted, dtype, sizes, results)
        rows = [p.to_json() for p in predictions]
        table = [op_row(row) for row in rows]
        header = ["op", "size", "card", "bound by", "the roof", "share of it", "predicted"]
    elif names:
        raise _common.UserError(f"{' '.join(names)}: ops and a model at once; ask for one, then for the other")
    else:
        batches = _common.numbers(batch, "--batch")
        rows = of_model(model, layout, checkpoint, wanted, batches, context, (side, text), results)
        table = [model_row(row) for row in rows]
        header = ["model", "form", "card", "a step reads", "bound by", "the roof", "share of it", "predicted", "fits"]
    if as_json:
        _common.print_json({"prediction": True, "measured": [str(r.path) for r in results], "rows": rows})
        return
    print(HEADING)
    print()
    _common.print_table(header, table)
    print()
    for source in dict.fromkeys(row["share_source"] for row in rows):
        print(f"share of the roof: {source}")
    for card in wanted:
        assert card.roofs is not None
        roofs = card.roofs
        print(
            f"{card.name}: {roofs.memory / 1e9:,.1f} GB/s, {roofs.matrix / 1e12:,.1f} TFLOP/s in bf16 products, "
            f"{roofs.vector / 1e12:,.1f} in fp32 ({card.roofs_source})"
        )
    print(FOOTNOTE)


def cards(names: str) -> list[Card]:
    """The cards of `--device`.

    Raises:
        UserError: there is no such card.
    """
    from xpu_ports.common.cards import CARDS

    wanted = [name.strip().lower() for name in names.split(",")]
    for name in wanted:
        if name not in CARDS:
            raise _common.UserError(f"--device: no card is named {name!r}; there are: {', '.join(CARDS)}")
    return [CARDS[name] for name in wanted]


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    factor, unit = next(((f, u) for f, u in ((1e6, "us"), (1e3, "ms")) if value * f < 1000), (1.0, "s"))
    return f"{factor * value:.3g} {unit}"


def share(row: dict[str, Any]) -> str:
    """Of the roof, where it was measured."""
    return f"{100 * row['share']:.0f}%" if row["share_measured"] else ""


# ---------------------------------------------------------------------------------------------------------------- ops


def ops(
    names: list[str], wanted: list[Card], dtype: Dtype, sizes: str | None, results: list[Results]
) -> list[Prediction]:
    import torch

    from xpu_ports.common.bench.predict import predict_ops
    from xpu_ports.common.bench.registry import find

    chosen = [size.strip() for size in sizes.split(",")] if sizes is not None else None
    return predict_ops(wanted, find(names), chosen, getattr(torch, dtype), results)


def op_row(row: dict[str, Any]) -> list[str]:
    predicted = seconds(row["predicted_seconds"]) if row["share_measured"] else ""
    return [
        row["what"], row["size"], row["card"], row["bound"], f"at least {seconds(row['roof_seconds'])}", share(row),
        predicted,
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- models


def of_model(
    model: str | None,
    layout: str | None,
    checkpoint: str | None,
    wanted: list[Card],
    batches: list[int],
    context: int,
    picture: tuple[int, int],
    results: list[Results],
) -> list[dict[str, Any]]:
    """A row for each form, batch size and card.

    Raises:
        UserError: there is no such model or checkpoint.
        ValueError: there is no such layout.
    """
    from xpu_ports.cli._pipeline import is_pipeline, read_part

    if model == DIFFUSION or (checkpoint is not None and is_pipeline(checkpoint)):
        layouts: Any = importlib.import_module("xpu_ports.models.flux2.layouts")
        if checkpoint is not None:
            return of_step(Path(checkpoint).name, read_part(checkpoint, "transformer/config.json"), wanted, picture, [])
        name = layout or "klein-4b"
        if name not in layouts.LAYOUTS:
            raise ValueError(f"no FLUX.2 layout is named {name!r}; there are: {', '.join(layouts.LAYOUTS)}")
        return of_step(name, layouts.LAYOUTS[name], wanted, picture, results)
    if checkpoint is not None:
        _common.check_checkpoint(checkpoint)
        found = _common.model_type_of(str(Path(checkpoint).expanduser()))
        if model not in (None, found):
            raise _common.UserError(f"{checkpoint} is a {found}, not a {model}")
        config_class: Any = _common.port(found).config_class
        config = config_class.from_pretrained(str(Path(checkpoint).expanduser()))
        return of_decode(found, Path(checkpoint).name, config, wanted, batches, context, results)
    assert model is not None
    if model not in _common.supported_model_types():
        known = ", ".join([*_common.supported_model_types(), DIFFUSION])
        raise _common.UserError(f"--model is {model!r}, expected one that there is a port for: {known}")
    layouts = importlib.import_module(f"xpu_ports.models.{model}.layouts")
    name = layout or next(iter(layouts.LAYOUTS))
    return of_decode(model, name, layouts.layout_config(name), wanted, batches, context, results)


def of_decode(
    model_type: str,
    name: str,
    config: Any,
    wanted: list[Card],
    batches: list[int],
    context: int,
    results: list[Results],
) -> list[dict[str, Any]]:
    """Decode steps of a language model."""
    import torch

    from xpu_ports.cli.plan import weight_sizes
    from xpu_ports.common.bench import predict as prediction

    memory: Any = importlib.import_module(f"xpu_ports.models.{model_type}.memory")
    _, forms, _ = weight_sizes(model_type, config)
    rows = []
    for form, elements in forms.items():
        for batch in batches:

            def step_at(tokens: int, batch: int = batch, elements: Any = elements) -> prediction.StepWork:
                cache = [f(config, batch, tokens, torch.bfloat16) for f in (memory.cache_reads, memory.cache_bytes)]
                reads = functools.partial(memory.weight_reads, config)
                return prediction.step_work(elements, reads, cache[0], cache[1], batch)

            step = step_at(context)
            # What dense weights reached says nothing about packed ones, which other kernels read.
            used = results if form == "bf16" else []
            reached = prediction.model_share(step_at, model_type, name, "bfloat16", batch, used)
            for card in wanted:
                p = prediction.predict(f"{model_type} {name}", f"batch {batch}", card, step.work, reached, False)
                rows.append(
                    {
                        **p.to_json(),
                        "form": form,
                        "batch": batch,
                        "context": context,
                        "roof_tokens_per_second": batch / p.floor,
                        "predicted_tokens_per_second": None if p.seconds is None else batch / p.seconds,
                        "needed_bytes": step.weights + step.cache,
                        "fits": step.weights + step.cache <= card.usable,
                    }
                )
    return rows


def of_step(
    name: str, config: Mapping[str, Any], wanted: list[Card], picture: tuple[int, int], results: list[Results]
) -> list[dict[str, Any]]:
    """Steps of FLUX.2's transformer."""
    import torch

    from xpu_ports.common.bench import predict as prediction
    from xpu_ports.common.bench.case import Work
    from xpu_ports.models.flux2.memory import TOKEN_PIXELS, step_operations

    side, text = picture
    work = Work(*step_operations(config, side, text, torch.bfloat16))
    key = {"model": f"flux2 {name}", "side": f"side {side // TOKEN_PIXELS}", "text": f"text {text}"}
    reached = prediction.step_share(work, key, results)
    rows = []
    for card in wanted:
        p = prediction.predict(f"flux2 {name}", f"{side} pixels, {text} tokens", card, work, reached, False)
        rows.append({**p.to_json(), "form": "bf16", "needed_bytes": work.moved, "fits": work.moved <= card.usable})
    return rows


def model_row(row: dict[str, Any]) -> list[str]:
    if "roof_tokens_per_second" in row:
        roof = f"at most {row['roof_tokens_per_second']:,.0f} tok/s"
        predicted = f"{row['predicted_tokens_per_second']:,.0f} tok/s" if row["share_measured"] else ""
    else:
        roof = f"at least {seconds(row['roof_seconds'])} a step"
        predicted = f"{seconds(row['predicted_seconds'])} a step" if row["share_measured"] else ""
    return [
        f"{row['what']}, {row['size']}", row["form"], row["card"], f"{row['bytes'] / 1e9:.2f} GB", row["bound"], roof,
        share(row), predicted, "yes" if row["fits"] else f"no, {row['needed_bytes'] / 2**30:.1f} GiB",
    ]  # fmt: skip
