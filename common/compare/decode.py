"""Cached steps beside one forward of the same model: a state that is stale, lost or misplaced shows here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.compare.bounds import Bounds, Check
from xpu_ports.common.compare.figures import LogitFigures
from xpu_ports.common.compare.layers import Event, LayerErrors, Layers, watched
from xpu_ports.common.compare.report import Section
from xpu_ports.common.compare.running import logits_of
from xpu_ports.common.compare.spool import Spool
from xpu_ports.common.compare.subject import Subject

DECODE = "decode beside one forward"


def decode_section(subject: Subject, model: Any, ids: Tensor, bounds: Bounds, steps: int, files: Spool) -> Section:
    """The last tokens of a window one by one with a cache, beside one forward of all of them.

    Args:
        subject, model: the port.
        ids: [T], the window.
        bounds: its `decode` and `layer` count.
        steps: how many tokens, at most half of the window.
        files: for the streams.
    """
    start = first_decoded(ids, steps)
    streams: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(i: int, x: Tensor, y: Tensor) -> None:
        streams[i] = files.keep(x), files.keep(y)

    with watched(model, subject.layers, keep):
        expected = logits_of(model, ids)[start:].cpu()
    got = torch.cat([logits.cpu() for _, logits in decode(model, ids, start)])
    figure = LogitFigures()
    figure.add(expected, got, ids[start:])
    errors = LayerErrors(bounds.layer, subject.kinds(model.config))
    for _ in fed_decode(model, subject.layers, ids, start, streams, errors.add):
        pass
    checks = [
        Check("tokens", float(len(ids) - start)),
        Check(
            "logits, largest difference over largest logit", figure.largest / max(figure.scale, 1e-12), bounds.decode
        ),
        Check("KL, mean", figure.kl.mean().item()),
        Check("same likeliest token", figure.top_1),
    ]
    kl = figure.kl_by_position()
    return Section(DECODE, checks, errors.finish(), kl_by_position=kl, first_position=start, why=bounds.why)


def first_decoded(ids: Tensor, steps: int) -> int:
    return ids.shape[0] - min(steps, ids.shape[0] // 2)


def decode(model: Any, ids: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
    """(position, logits [1, V]) of the tokens from `start` on, each in a step of its own behind one prefill."""
    ids = ids[None].to(model.device)
    cache = model(ids[:, :start], use_cache=True).cache
    for t in range(start, ids.shape[1]):
        yield t, model(ids[:, t : t + 1], cache=cache, use_cache=True).logits[0]


def fed_decode(
    model: Any,
    layers: Layers,
    ids: Tensor,
    start: int,
    streams: Mapping[int, tuple[Tensor, Tensor]],
    add: Callable[[int, Tensor, Tensor, Tensor], None],
) -> Iterator[int]:
    """`decode` with every layer on the stream that one forward had there; gives each position before its step."""
    ids = ids[None].to(model.device)
    at = slice(0, start)

    def give(i: int, x: Tensor) -> Tensor:
        return streams[i][0][:, at].to(x, copy=True)

    def keep(i: int, x: Tensor, y: Tensor) -> None:
        if at.start:
            add(i, streams[i][0][:, at], streams[i][1][:, at], y)

    with watched(model, layers, keep, give):
        cache = model(ids[:, at], use_cache=True).cache
        for t in range(start, ids.shape[1]):
            yield t
            at = slice(t, t + 1)
            model(ids[:, at], cache=cache, use_cache=True)


def joined(events: list[Event]) -> list[Event]:
    """The events of several steps, one after another along the tokens."""
    steps: dict[tuple[str, str], list[list[Tensor]]] = {}
    for event in events:
        steps.setdefault((event.module, event.side), []).append(event.tensors)
    return [
        Event(module, side, [torch.cat([_tokens_first(t) for t in parts]) for parts in zip(*tensors, strict=False)])
        for (module, side), tensors in steps.items()
    ]


def _tokens_first(t: Tensor) -> Tensor:
    """[1, T, ...] or [T, ...] as rows."""
    return t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t


def part_of(event: Event, start: int, tokens: int) -> Event:
    """What a forward's event has of the tokens from `start` on; what has no tokens is left out."""
    kept = [t[:, start:] if t.dim() > 2 and t.shape[1] == tokens else t[start:] for t in event.tensors
            if t.dim() > 1 and tokens in t.shape[:2]]  # fmt: skip
    return Event(event.module, event.side, kept)
