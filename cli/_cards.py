"""`xpu-ports plan --cards`: what each of several cards holds, reads and sends, by the plans that the models divide by.

Weights, caches and what is sent are counted; activations are those of one card, which those of several do not exceed.
Rates are roofs: all that a card reads at its memory's bandwidth, then all that it sends at its link's. What a
collective takes to begin is not in them, nor are tokens that are guessed and taken.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xpu_ports.cli import _common

if TYPE_CHECKING:
    import torch

    from xpu_ports.common.cards import Card

# What a rank's part of weights may be in: name -> (elements, bytes) of each.
Sizes = Mapping[str, Mapping[str, tuple[int, float]]]


@dataclass(frozen=True)
class Share:
    """What the card that has most of it has, of so many."""

    form: str
    cards: int
    # Bytes of weights that are divided among the cards, and of those that each has whole.
    divided: float
    whole: float
    cache: float
    activations: float
    # The largest tensor.
    largest: float
    # Of a step: bytes read, FLOP in products, collectives, bytes sent.
    moved: float
    flops: float
    collectives: int
    sent: float
    # What comes of a step: tokens, or a step of a picture.
    made: int
    # Why it cannot be divided so; "" where it can.
    wrong: str = ""

    @property
    def total(self) -> float:
        return self.divided + self.whole + self.cache + self.activations


# -------------------------------------------------------------------------------------------------------------- models


def shares_of_model(
    model_type: str, config: Any, counts: Sequence[int], context: int, batch: int, prefill: int
) -> tuple[list[Share], dict[str, str]]:
    """What each card has of a language model, and layers -> why each card has them whole.

    Args:
        model_type: of the port.
        config: its config.
        counts: of cards.
        context, batch: tokens of a sequence, and sequences.
        prefill: tokens that are read at once.
    """
    import torch

    from xpu_ports.cli.plan import weight_sizes

    memory: Any = importlib.import_module(f"xpu_ports.models.{model_type}.memory")
    dtype = torch.bfloat16
    model, sizes, packed = weight_sizes(model_type, config)
    logits = batch * config.vocab_size * (dtype.itemsize + torch.float32.itemsize)
    activations = memory.activation_bytes(config, batch, prefill, dtype) + logits
    pieces, cache_reads = (
        memory.cache_pieces(config, batch, context, dtype),
        memory.cache_reads(config, batch, context, dtype),
    )

    def reads(tokens: int) -> Callable[[str], float]:
        return lambda key: memory.weight_reads(config, key, tokens)

    reasons: dict[str, str] = {}
    shares = []
    for count, (form, named) in itertools.product(counts, sizes.items()):
        ranks = [_Rank.of(model, model_type, form, rank, count) for rank in range(count)]
        reasons |= {f"{layers}, {count} cards": why for rank in ranks for layers, why in rank.reasons.items()}
        own_cache = max(rank.part_of_cache(pieces, named) for rank in ranks)
        calls, sent = _sent_of(ranks[0], model, batch, dtype)
        weights = max((rank.weights(named) for rank in ranks), key=sum)
        shares.append(
            Share(
                form, count, *weights, own_cache, activations,
                largest=max(size * ranks[0].fraction(key) for key, (_, size) in named.items()),
                moved=max(rank.reads(named, reads(batch), 1) for rank in ranks)
                + cache_reads * own_cache / max(1, sum(pieces.values())),
                flops=2 * batch * max(rank.reads(named, reads(1), 0) for rank in ranks),
                collectives=calls, sent=sent, made=batch,
                wrong=next((why for rank in ranks if form != "bf16" for why in rank.cut_blocks(packed)), ""),
            )
        )  # fmt: skip
    return shares, reasons


@dataclass(frozen=True)
class _Rank:
    """One of several cards, by the model's own plan."""

    count: int
    plan: Mapping[str, Any]
    # Parameter -> the part of it.
    parts: Mapping[str, Any]

    @classmethod
    def of(cls, model: Any, model_type: str, form: str, rank: int, count: int) -> _Rank:
        """Of a model without data, which is dense, as if its weights had the form."""
        if count == 1:
            return cls(1, {}, {})
        from xpu_ports.common.parallel import parts_of
        from xpu_ports.quant.mxfp4.quantize import quantization_config

        planner = importlib.import_module(f"xpu_ports.models.{model_type}.parallel").parallel_plan
        config = copy.copy(model.config)
        # Packed weights divide by blocks.
        config.quantization_config = None if form == "bf16" else quantization_config(None, [])
        plan = planner(config, rank, count)
        return cls(count, plan, parts_of(model, plan, rank, count))

    @property
    def reasons(self) -> dict[str, str]:
        return {layers: how for layers, how in self.plan.items() if isinstance(how, str)}

    def fraction(self, name: str) -> float:
        """Of a parameter."""
        part = self.parts.get(name)
        return 1.0 if part is None else math.prod(part.own) / math.prod(part.shape)

    def weights(self, sizes: Mapping[str, tuple[int, float]]) -> tuple[float, float]:
        """Bytes of those that are divided, and of the others."""
        divided = sum(size * self.fraction(key) for key, (_, size) in sizes.items() if key in self.parts)
        return divided, sum(size for key, (_, size) in sizes.items() if key not in self.parts)

    def reads(self, sizes: Mapping[str, tuple[int, float]], often: Callable[[str], float], unit: int) -> float:
        """Elements (unit 0) or bytes (unit 1) of weights that a step reads."""
        return sum(often(key) * size[unit] * self.fraction(key) for key, size in sizes.items())

    def part_of_cache(self, pieces: Mapping[str, int], names: Collection[str]) -> float:
        """Bytes of the cache; a piece divides as the parameters that it is named after."""
        total = 0.0
        for like, size in pieces.items():
            alike = [self.fraction(name) for name in names if like and name.endswith(f".{like}")]
            total += size * (statistics.fmean(alike) if alike else 1.0)
        return total

    def cut_blocks(self, packed: set[str]) -> Iterator[str]:
        """Packed weights whose blocks would be cut."""
        from xpu_ports.common.parallel import BLOCK

        for name in packed & self.parts.keys():
            part = self.parts[name]
            if any(edge % BLOCK for piece in part.pieces.get(len(part.shape) - 1, ()) for edge in piece):
                yield f"{name}: a part of {part.shape[-1]} columns begins or ends inside a block of {BLOCK}"
                return


def _sent_of(rank: _Rank, model: Any, tokens: int, dtype: torch.dtype) -> tuple[int, float]:
    """Collectives of a step, and the bytes that each card sends in them, as rings and trees of all libraries need."""
    from xpu_ports.common.parallel import planned

    calls, sent, others = 0, 0.0, (rank.count - 1) / rank.count
    for pattern, _ in planned(model, rank.plan) if rank.plan else ():
        how = rank.plan[pattern]
        if isinstance(how, str):
            continue
        calls += 1
        if how.output == "gather":
            sent += others * tokens * model.config.vocab_size * dtype.itemsize
        else:
            sent += 2 * others * tokens * model.config.hidden_size * dtype.itemsize
        if how.span > 1:
            # A sum of squares of each of the card's groups, which a few cards share.
            calls += 1
            sent += 2 * (how.span - 1) / how.span * tokens * 4
    return calls, sent


# ------------------------------------------------------------------------------------------------------------ pictures


def shares_of_flux2(
    config: Mapping[str, Any], counts: Sequence[int], side: int, text: int
) -> tuple[list[Share], dict[str, str]]:
    """What each card has of FLUX.2's transformer in a step; other parts of a pipeline have cards of their own.

    Args:
        config: the transformer's config.json, or an entry of LAYOUTS.
        counts: of cards.
        side: pixels of a square picture.
        text: tokens of text.
    """
    import torch

    from xpu_ports.cli.plan import is_packed
    from xpu_ports.quant.mxfp4.format import BLOCK

    port: Any = importlib.import_module("xpu_ports.models.flux2").Flux2Transformer2DModel
    memory: Any = importlib.import_module("xpu_ports.models.flux2.memory")
    dtype = torch.bfloat16
    with torch.device("meta"):
        model = port.from_config(config)
    full = dict(model.config)
    elements = {key: (p.numel(), p.shape) for key, p in model.named_parameters()}
    dense = {key: (n, float(n * dtype.itemsize)) for key, (n, _) in elements.items()}
    packed = {
        key: (n, n / 2 + n / BLOCK) if is_packed(key, shape) else dense[key] for key, (n, shape) in elements.items()
    }
    activations = memory.activation_bytes(full, _vae(), side, text, dtype)
    _, flops = memory.step_operations(full, side, text, dtype)
    shares = []
    for count, (form, named) in itertools.product(counts, (("bf16", dense), ("mxfp4", packed))):
        cut, wrong = _divided_by_diffusers(model, count)
        if count > 1 and form != "bf16":
            wrong = "diffusers divides no packed weights"
        parts = [size / count for key, (_, size) in named.items() if key in cut]
        rest = [size for key, (_, size) in named.items() if key not in cut]
        calls, sent = _sent_of_flux2(full, count, side, text, dtype)
        shares.append(
            Share(
                form, count, divided=sum(parts), whole=sum(rest), cache=0, activations=activations,
                largest=max([*parts, *rest]), moved=sum(parts) + sum(rest), flops=flops / count, collectives=calls,
                sent=sent, made=1, wrong=wrong,
            )
        )  # fmt: skip
    return shares, {}


def _divided_by_diffusers(model: Any, count: int) -> tuple[set[str], str]:
    """The parameters that diffusers divides among so many cards, and why it does not where it does not."""
    from xpu_ports.models.flux2.diffusers_api import resolve_tp_shard_specs

    if count == 1:
        return set(), ""
    if model.config.num_attention_heads % count:
        return set(), f"num_attention_heads = {model.config.num_attention_heads}"
    try:
        specs = resolve_tp_shard_specs(model, model._tp_plan, count)
    except ValueError as error:
        return set(), str(error)
    return {name for name, spec in specs.items() if spec.dim is not None}, ""


def _sent_of_flux2(
    config: Mapping[str, Any], count: int, side: int, text: int, dtype: torch.dtype
) -> tuple[int, float]:
    """(collectives, bytes that a card sends) of a step: sums behind attention and MLP, of each stream and of both."""
    from xpu_ports.models.flux2.memory import TOKEN_PIXELS

    if count == 1:
        return 0, 0.0
    double, single = config["num_layers"], config["num_single_layers"]
    tokens = (side // TOKEN_PIXELS) ** 2 + text
    # A double block sums twice for each stream, and both streams have all tokens.
    rows = (2 * double + single) * tokens
    width = config["num_attention_heads"] * config["attention_head_dim"] * dtype.itemsize
    return 4 * double + single, 2 * (count - 1) / count * rows * width


def _vae() -> dict[str, Any]:
    """The config of the released VAE, as far as memory asks for it: diffusers' own defaults."""
    from xpu_ports.models.flux2.diffusers_api import AutoencoderKLFlux2

    defaults = inspect.signature(AutoencoderKLFlux2.__init__).parameters
    return {"block_out_channels": defaults["block_out_channels"].default}


# -------------------------------------------------------------------------------------------------------------- tables


def seconds(card: Card, share: Share) -> float | None:
    """The least that a step takes on such cards; None where they have no link, or no published roofs."""
    if card.roofs is None or (share.cards > 1 and share.sent and card.link is None):
        return None
    sending = share.sent / card.link.rate if card.link is not None else 0.0
    return card.roofs.floor(round(share.moved), round(share.flops)) + sending


def verdict(card: Card, share: Share) -> dict[str, Any]:
    """Whether so many cards have room, and the rate that they cannot exceed."""
    from xpu_ports.common.cards import GIB

    too_large = card.largest_gib is not None and share.largest > card.largest_gib * GIB
    fits = share.total <= card.usable and not too_large and not share.wrong
    least = seconds(card, share)
    return {
        "card": card.name,
        "form": share.form,
        "cards": share.cards,
        "fits": fits,
        "left": card.usable - share.total,
        "roof_rate": share.made / least if fits and least is not None else None,
    }


def show(shares: Sequence[Share], cards: Sequence[Card], reasons: Mapping[str, str], unit: str) -> None:
    """What a card needs, and how many of which have it; with the roofs."""
    from xpu_ports.cli.plan import gib

    of = "token" if unit == "tok" else "step"
    rows = [
        [
            s.form, str(s.cards), gib(s.divided), gib(s.whole), gib(s.cache), gib(s.activations), gib(s.total),
            str(s.collectives), kilobytes(s.sent / s.made) if s.sent else "",
        ]
        for s in shares
    ]  # fmt: skip
    print(f"of each card: weights that are divided, weights that it has whole, the rest, and what it sends for a {of}")
    print()
    header = ["form", "cards", "divided", "whole", "cache", "activations, at most", "needs", "collectives", "sends"]
    _common.print_table(header, rows)
    print()
    counts = sorted({s.cards for s in shares})
    print(
        f"PREDICTED {of}s a second, {'one a step' if unit == 'tok' else 'over all cards'}: roofs, none of it measured"
    )
    print(
        "A card's reads at its memory's published bandwidth, then what it sends at its link's; no latency, no overhead"
    )
    print()
    rows = []
    for card in cards:
        for form in dict.fromkeys(s.form for s in shares):
            row = [cell(card, next(s for s in shares if (s.form, s.cards) == (form, n))) for n in counts]
            rows.append([card.name, form, *row])
    _common.print_table(["card", "form", *(f"{n} {'card' if n == 1 else 'cards'}" for n in counts)], rows)
    print()
    for card in cards:
        if card.link is not None:
            print(f"{card.name}: {card.link.name}, {card.link.rate / 1e9:.1f} GB/s each way; {card.link.source}")
    wrong = {f"{s.form}, {s.cards} cards": s.wrong for s in shares if s.wrong}
    for what, why in {**reasons, **wrong}.items():
        print(f"{what}: {'whole on each card: ' if what in reasons else ''}{why}")


def cell(card: Card, share: Share) -> str:
    """What a table says of so many cards."""
    from xpu_ports.cli.plan import gib

    said = verdict(card, share)
    if share.wrong:
        return "not divisible"
    if not said["fits"]:
        return f"lacks {gib(-said['left'])}" if said["left"] < 0 else "a tensor too large"
    rate = said["roof_rate"]
    if rate is None:
        return "fits"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def kilobytes(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"
