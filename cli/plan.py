"""`xpu-ports plan`: whether a checkpoint fits a card, before any of it is loaded."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common
from xpu_ports.cli._pipeline import INDEX, Size, is_pipeline, part_sizes, read_part

if TYPE_CHECKING:
    from xpu_ports.common.cards import Card

HERE = "here"
# What is worked on at once unless said otherwise.
PREFILL = 4096
VARIANTS = ("bf16", "mxfp4")
FLUX2 = "flux2"
# Tokens of text that FLUX.2 reads at most.
TEXT = 512


@dataclass(frozen=True)
class Need:
    """Bytes of a model in one form."""

    variant: str
    weights: int
    cache: int
    activations: int
    # The largest single tensor.
    largest: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations


def plan(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT", help="Folder of a checkpoint, its name on the Hub, or with --layout a model type."
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="CARD[,CARD]...", help="b580, b60, max1550, ..., or here; all cards when left out."
        ),
    ] = None,
    several: Annotated[
        str | None,
        typer.Option(
            "--cards", metavar="N[,N]...", help="What each of N cards has of it, sends and reads.", show_default=False
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="A released size, such as 7b: no file is read.", show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a sequence that are kept.")] = 8192,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences at once.")] = 1,
    prefill: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"Tokens that are read at once; {PREFILL} at most.")
    ] = None,
    side: Annotated[int, typer.Option(min=64, metavar="PIXELS", help="FLUX.2: of a square picture.")] = 1024,
    as_json: _common.JsonOption = False,
    verbose: _common.VerboseOption = False,
) -> None:
    """Tell what memory a checkpoint needs, in bf16 and in MXFP4, and which card has it.

    Reads the config and the headers of the weight files, of a name on the Hub these alone. Weights and caches are
    exact, activations an estimate. Exit code 1 when nothing of it fits the cards that are named.

    With --cards also what layers that are divided among several send each other, and roofs of tokens a second.
    """
    _common.quiet_libraries(verbose)
    wanted = cards(device)
    counts = None if several is None else _common.numbers(several, "--cards")
    prefill = prefill or min(context, PREFILL)
    if counts is not None or layout is not None:
        rows = plan_cards(checkpoint, layout, wanted, counts or [1], (context, batch, prefill, side), as_json)
        if device is not None and not any(row["fits"] for row in rows):
            raise typer.Exit(1)
        return
    if is_pipeline(checkpoint):
        result = plan_pipeline(checkpoint, side)
    else:
        _common.check_checkpoint(checkpoint)
        result = plan_model(str(Path(checkpoint).expanduser()), context, batch, prefill)
    result["cards"] = [fit(card, need, result) for card in wanted for need in result["needs"]]
    fits = any(row["fits"] for row in result["cards"])
    if as_json:
        _common.print_json(_plain(result))
    else:
        show(result)
    if device is not None and not fits:
        raise typer.Exit(1)


def cards(device: str | None) -> list[Card]:
    """The cards to plan for.

    Raises:
        UserError: there is no such card, or none here.
    """
    from xpu_ports.common.cards import CARDS, GIB, Card, card

    if device is None:
        return list(CARDS.values())
    if device != HERE:
        try:
            return [card(name.strip()) for name in device.split(",")]
        except ValueError as error:
            raise _common.UserError(f"--device: {error}") from error
    found = _common.resolve_device("auto")
    if found.type == "cpu":
        raise _common.UserError("--device here: there is no XPU and no CUDA device here")
    import torch

    total = getattr(torch, found.type).get_device_properties(found).total_memory
    return [Card(_common.device_name(found), total / GIB, "its driver", share=1.0)]


# ---------------------------------------------------------------------------------------------------- language models


def plan_model(checkpoint: str, context: int, batch: int, prefill: int) -> dict[str, Any]:
    """What a language model needs.

    Args:
        checkpoint: a folder, or a name on the Hub.
        context, batch: tokens of a sequence, and sequences.
        prefill: tokens that are read at once.
    """
    import torch

    model_type = _common.model_type_of(checkpoint)
    memory: Any = importlib.import_module(f"xpu_ports.models.{model_type}.memory")
    config_class: Any = _common.port(model_type).config_class
    config = config_class.from_pretrained(checkpoint)
    dtype = torch.bfloat16
    sizes = weight_bytes(model_type, config)

    def cache(tokens: int) -> int:
        return int(memory.cache_bytes(config, batch, tokens, dtype))

    # Behind the layers the last token's logits, once more in fp32 to choose from.
    logits = batch * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    activations = memory.activation_bytes(config, batch, prefill, dtype) + logits
    needs = [Need(name, weights, cache(context), activations, largest) for name, (weights, largest) in sizes.items()]
    return {
        "checkpoint": checkpoint,
        "model_type": model_type,
        "context": context,
        "batch": batch,
        "prefill": prefill,
        "files": file_bytes(checkpoint),
        "needs": needs,
        "cache_of": cache,
    }


def weight_bytes(model_type: str, config: Any) -> dict[str, tuple[int, int]]:
    """(bytes of all weights, of the largest) in each form, from the config."""
    _, forms, _ = weight_sizes(model_type, config)
    return {
        name: (round(sum(size for _, size in sizes.values())), round(max(size for _, size in sizes.values())))
        for name, sizes in forms.items()
    }


def weight_sizes(model_type: str, config: Any) -> tuple[Any, dict[str, dict[str, tuple[int, float]]], set[str]]:
    """The port without data, (elements, bytes) of each of its weights in each form, and which weights are packed."""
    import copy

    import torch
    from transformers import initialization as init

    from xpu_ports.common.weights import expected_tensors
    from xpu_ports.quant.mxfp4.format import BLOCK
    from xpu_ports.quant.mxfp4.quantize import packed_keys

    config = copy.copy(config)
    config.dtype = torch.bfloat16
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    port = _common.port(model_type)
    dense_layers = importlib.import_module(f"xpu_ports.models.{model_type}.accuracy").dense_layers
    with torch.device("meta"), init.no_init_weights():
        model = port._from_config(config)
    model.tie_weights()
    packed = packed_keys(model, dense_layers(model))
    forms: dict[str, dict[str, tuple[int, float]]] = {name: {} for name in VARIANTS}
    for key, info in expected_tensors(port, config).items():
        elements = math.prod(info.shape)
        forms["bf16"][key] = elements, elements * info.dtype.itemsize
        forms["mxfp4"][key] = (elements, elements / 2 + elements / BLOCK) if key in packed else forms["bf16"][key]
    return model, forms, packed


def file_bytes(checkpoint: str) -> int | None:
    """Bytes of the tensors in the files, by their headers alone; None where none can be read."""
    from xpu_ports.common.checkpoint import CheckpointError, checkpoint_files, read_headers

    if Path(checkpoint).is_dir():
        try:
            tensors = read_headers(checkpoint_files(checkpoint))
        except CheckpointError:
            # A config alone is enough for a plan.
            return None
        return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors.values())
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError

    # The bases are OSError and the error of the HTTP library, whose name differs between versions.
    unreachable: Any = (NotASafetensorsRepoError, *HfHubHTTPError.__bases__)
    try:
        found = huggingface_hub.get_safetensors_metadata(checkpoint)
    except unreachable:
        # The config, which is at hand, is enough.
        return None
    return sum(t.data_offsets[1] - t.data_offsets[0] for f in found.files_metadata.values() for t in f.tensors.values())


# ------------------------------------------------------------------------------------------------------------ pictures


def plan_pipeline(checkpoint: str, side: int) -> dict[str, Any]:
    """What FLUX.2 needs, with all parts on the device and with the one that runs."""
    import torch

    from xpu_ports.models.flux2.memory import activation_bytes

    index = read_part(checkpoint, INDEX)
    parts = {name: sizes for name in index if (sizes := part_sizes(checkpoint, name)) is not None}
    transformer, vae = (read_part(checkpoint, f"{name}/config.json") for name in ("transformer", "vae"))
    activations = activation_bytes(transformer, vae, side, TEXT, torch.bfloat16)
    totals = {name: sum(size for _, size in sizes.values()) for name, sizes in parts.items()}
    forms = {"bf16": totals}
    if "quantization_config" not in transformer:
        forms["mxfp4"] = {**totals, "transformer": packed_transformer(parts["transformer"])}
    largest = max(size for sizes in parts.values() for _, size in sizes.values())
    # All parts on the device, or the one that runs.
    needs = [
        Need(name + how, count(sizes.values()), 0, activations, largest)
        for name, sizes in forms.items()
        for how, count in (("", sum), (", --offload", max))
    ]
    return {
        "checkpoint": checkpoint,
        "model_type": FLUX2,
        "side": side,
        "files": sum(totals.values()),
        "parts": totals,
        "needs": needs,
        "cache_of": None,
    }


def packed_transformer(sizes: dict[str, Size]) -> int:
    """Bytes of FLUX.2's transformer in MXFP4, of its tensors in bf16."""
    from xpu_ports.quant.mxfp4.format import BLOCK

    total = 0
    for key, (shape, size) in sizes.items():
        elements = math.prod(shape)
        total += elements // 2 + elements // BLOCK if is_packed(key, shape) else size
    return total


def is_packed(key: str, shape: Sequence[int]) -> bool:
    """Whether a weight of FLUX.2's transformer is packed in MXFP4."""
    import re

    from xpu_ports.models.flux2.packed import DENSE

    layer = key.removesuffix(".weight")
    return len(shape) == 2 and not any(re.match(d[3:], layer) if d.startswith("re:") else layer == d for d in DENSE)


# ------------------------------------------------------------------------------------------------------- several cards


def plan_cards(
    checkpoint: str,
    layout: str | None,
    wanted: Sequence[Card],
    counts: Sequence[int],
    sizes: tuple[int, int, int, int],
    as_json: bool,
) -> list[dict[str, Any]]:
    """What each of several cards needs, printed; gives whether so many have room.

    Args:
        checkpoint: a folder, a name on the Hub, or a model type.
        layout: a released size of the model type; None for a checkpoint.
        wanted: cards.
        counts: how many of them.
        sizes: tokens of a sequence, sequences, tokens that are read at once, pixels of a picture's side.
        as_json: one JSON object instead of tables.
    """
    from xpu_ports.cli import _cards

    context, batch, prefill, side = sizes
    if checkpoint == FLUX2 or (layout is None and is_pipeline(checkpoint)):
        config = read_part(checkpoint, "transformer/config.json") if layout is None else _layout(FLUX2, layout)
        shares, reasons = _cards.shares_of_flux2(config, counts, side, TEXT)
        what, unit = f"flux2's transformer, a picture of {side} x {side} pixels, {TEXT} tokens of text", "step"
    else:
        if layout is None:
            _common.check_checkpoint(checkpoint)
            checkpoint = str(Path(checkpoint).expanduser())
            model_type = _common.model_type_of(checkpoint)
            config_class: Any = _common.port(model_type).config_class
            config = config_class.from_pretrained(checkpoint)
        else:
            model_type, config = checkpoint, _layout(checkpoint, layout)
        shares, reasons = _cards.shares_of_model(model_type, config, counts, context, batch, prefill)
        what, unit = f"{model_type}, {batch} x {context} tokens kept, {prefill} read at once", "tok"
    rows = [_cards.verdict(card, share) for card in wanted for share in shares]
    if as_json:
        needs = [{**share.__dict__, "total": share.total} for share in shares]
        _common.print_json({"what": what, "needs": needs, "whole": reasons, "cards": rows})
        return rows
    print(what if layout is None else f"{layout} of {what}")
    print()
    _cards.show(shares, wanted, reasons, unit)
    return rows


def _layout(model_type: str, name: str) -> Any:
    """The config of a released size.

    Raises:
        UserError: there is no such model or size.
    """
    known = [*_common.supported_model_types(), FLUX2]
    if model_type not in known:
        raise _common.UserError(f"{model_type!r} with --layout, expected a model type: {', '.join(known)}")
    layouts: Any = importlib.import_module(f"xpu_ports.models.{model_type}.layouts")
    if name not in layouts.LAYOUTS:
        raise _common.UserError(f"--layout is {name!r}, expected one of {', '.join(layouts.LAYOUTS)}")
    return layouts.LAYOUTS[name] if model_type == FLUX2 else layouts.layout_config(name)


# ------------------------------------------------------------------------------------------------------------- verdict


def fit(card: Card, need: Need, result: dict[str, Any]) -> dict[str, Any]:
    """Whether a card has room, and what is left or missing."""
    from xpu_ports.common.cards import GIB

    left = card.usable - need.total
    too_large = card.largest_gib is not None and need.largest > card.largest_gib * GIB
    return {
        "card": card.name,
        "usable": card.usable,
        "variant": need.variant,
        "fits": left >= 0 and not too_large,
        "left": left,
        "longest_context": longest(result["cache_of"], card.usable - need.weights - need.activations),
        "note": f"a tensor of {need.largest / GIB:.1f} GiB; {card.note}" if too_large else card.note,
    }


def longest(cache_of: Callable[[int], int] | None, room: int) -> int | None:
    """The most tokens whose cache fits; 0 if none does, None where there is no cache."""
    if cache_of is None:
        return None
    low, high = 0, 1
    while high < 1 << 30 and cache_of(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cache_of(middle) <= room else (low, middle)
    return low


def show(result: dict[str, Any]) -> None:
    """Two tables: what is needed, and which card has it."""
    about = f"{result['checkpoint']} ({result['model_type']})"
    if result["files"] is not None:
        about += f", {gib(result['files'])} in its files"
    print(about)
    if "parts" in result:
        print("parts: " + ", ".join(f"{name} {gib(size)}" for name, size in result["parts"].items()))
    else:
        print(f"{result['batch']} x {result['context']} tokens kept, {result['prefill']} read at once")
    print()
    _common.print_table(
        ["", "weights", "cache", "activations, about", "total"],
        [[n.variant, gib(n.weights), gib(n.cache), gib(n.activations), gib(n.total)] for n in result["needs"]],
    )
    print()
    rows = []
    for row in result["cards"]:
        said = f"fits, {gib(row['left'])} left" if row["fits"] else "too large"
        if row["left"] < 0:
            said = f"{gib(-row['left'])} too little"
        longest_context = row["longest_context"]
        context = "" if longest_context is None else f"{longest_context:,}" if longest_context < 1 << 29 else "any"
        rows.append([row["card"], gib(row["usable"]), row["variant"], said, context, row["note"]])
    _common.print_table(["card", "usable", "form", "", "longest context", "note"], rows)


def gib(size: float) -> str:
    """Bytes in words."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 1024:.1f} KiB"


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    needs = [{**need.__dict__, "total": need.total} for need in result["needs"]]
    return {**{k: v for k, v in result.items() if k != "cache_of"}, "needs": needs}
