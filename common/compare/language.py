"""A language model beside its reference: logits, layers, cached decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common import dispatch
from xpu_ports.common.compare.bounds import Bounds, Check
from xpu_ports.common.compare.decode import DECODE, decode_section, fed_decode, first_decoded, joined, part_of
from xpu_ports.common.compare.figures import LogitFigures, Nll
from xpu_ports.common.compare.layers import LayerErrors, Layers, first_culprit, traced, watched
from xpu_ports.common.compare.report import Report, Section
from xpu_ports.common.compare.running import logits_of, release, running, say
from xpu_ports.common.compare.spool import Spool, spool
from xpu_ports.common.compare.subject import Options, Subject, load
from xpu_ports.common.configuration import find_config, read_config

# A text that comes with the package.
TEXT = Path(__file__).with_name("text.txt")
Loader = Callable[[], Any]


def tokens_of(options: Options) -> list[Tensor]:
    """The text in windows, [T] each, of `options.window` tokens; a short text is one window.

    Raises:
        ValueError: it has fewer than two tokens.
        OSError: there is no such file, or no tokenizer.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint)
    text = (options.text or TEXT).read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if ids.shape[0] < 2:
        raise ValueError(f"{options.text}: {ids.shape[0]} tokens, too few to predict any")
    whole = min(ids.shape[0] // options.window, options.windows)
    return list(ids[: whole * options.window].split(options.window)) if whole else [ids]


@dataclass
class Side:
    """A model that the port is compared with: how to get it, and what it left behind."""

    title: str
    load: Loader
    layers: Layers
    bounds: Bounds
    # In which its ops are the references.
    backend: str | None = None
    # Fields of the config in which the port is aligned to it.
    aligned: Mapping[str, Any] = field(default_factory=dict)
    names_differ: bool = True
    logits: list[Tensor] = field(default_factory=list)
    # Streams before and behind each layer in the first window.
    streams: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@torch.no_grad()
def compare(subject: Subject, options: Options) -> Report:
    """Run the reference, then the port, and measure.

    Raises:
        ValueError, OSError: something of the checkpoint or of the options does not fit the model.
    """
    config = read_config(find_config(options.checkpoint))
    check_options(subject, options, config)
    windows = tokens_of(options)
    with spool() as files:
        sides, yardstick = _sides(subject, options, config)
        for side in filter(None, [yardstick, *sides]):
            _run_reference(side, windows, files, options)
        dispatch.reset_explain()
        report = _run_port(subject, options, sides, yardstick, windows, files)
        report.explain = [dataclasses.asdict(decision) for decision in dispatch.explain(show=False)]
        for side, section in zip(sides, report.sections, strict=False):
            _locate(
                subject, options, side, section, windows[0], functools.partial(_port, subject, options, side.aligned)
            )
        _locate_in_decode(subject, options, report.sections, windows[0], files)
    return report


def check_options(subject: Subject, options: Options, config: Mapping[str, Any]) -> None:
    """What a model does not have is an error before anything is loaded."""
    if options.reference == "diffusers":
        raise ValueError("--reference diffusers is for pictures; a language model has transformers and reference-path")
    if options.cache is not None and options.cache not in subject.caches:
        raise ValueError(f"--cache {options.cache}: {subject.port.__name__} has no such cache")
    if options.quant is not None and "quantization_config" in config:
        raise ValueError(f"--quant {options.quant}: the checkpoint is quantized already: leave it out")


def _bounds(subject: Subject, options: Options, dtype: torch.dtype, cost: bool) -> Bounds:
    """The bounds beside a reference of the same weights and cache, or beside a dense one."""
    if cost and options.quant is not None:
        return subject.bounds[options.quant]
    if cost and options.cache is not None:
        return subject.bounds[options.cache]
    name = str(dtype).removeprefix("torch.")
    if name not in subject.bounds:
        raise ValueError(f"--dtype {name}: {subject.port.__name__} states bounds for {', '.join(subject.bounds)} only")
    return subject.bounds[name]


def _decode_bounds(subject: Subject, options: Options, dtype: torch.dtype) -> Bounds:
    """The bounds of cached steps beside a forward: a cache of few bits may round by one of its own places."""
    return subject.bounds[options.cache] if options.cache is not None else _bounds(subject, options, dtype, cost=False)


def _sides(subject: Subject, options: Options, config: Mapping[str, Any]) -> tuple[list[Side], Side | None]:
    """What the port is compared with, and the reference in fp32 where it is asked for."""
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = options.dtype or getattr(torch, str(named))
    reference = options.reference or ("reference-path" if "quantization_config" in config else "transformers")
    label = str(dtype).removeprefix("torch.")
    cost = functools.partial(_bounds, subject, options, dtype)
    if reference == "reference-path":
        path = Side(
            f"beside the reference ops, {label}", functools.partial(_port, subject, options, {}), subject.layers,
            cost(False), backend="reference", names_differ=False,
        )  # fmt: skip
        return [path], None
    theirs = functools.partial(load, subject.reference, options, subject.reference_aligned)
    weights = ", dense weights" if options.quant else ", dense cache" if options.cache else ""
    sides = [
        Side(f"beside transformers, {label}{weights}", theirs, subject.reference_layers, cost(True),
             aligned=subject.aligned)
    ]  # fmt: skip
    if options.quant is not None:
        assert subject.round_weights is not None
        dense = functools.partial(_port, subject, options, subject.aligned, "round")
        sides.append(
            Side(f"beside dense weights of the same values, {label}", dense, subject.layers, cost(False),
                 aligned=subject.aligned, names_differ=False)
        )  # fmt: skip
    yardstick = None
    if options.yardstick and dtype != torch.float32:
        exact = functools.partial(load, subject.reference, options, subject.reference_aligned, dtype=torch.float32)
        yardstick = Side("beside transformers, float32", exact, subject.reference_layers, Bounds("the yardstick"))
    return sides, yardstick


def _port(subject: Subject, options: Options, changes: Mapping[str, Any], weights: str | None = None) -> Any:
    """The port as the options say; `weights` "round" for dense ones of packed values."""
    kwargs = subject.caches[options.cache] if options.cache is not None else {}
    model = load(subject.port, options, changes, **kwargs)
    if weights == "round":
        assert subject.round_weights is not None
        return subject.round_weights(model)
    if options.quant is not None:
        assert subject.quantize is not None
        return subject.quantize(model)
    return model


def _run_reference(side: Side, windows: list[Tensor], files: Spool, options: Options) -> None:
    say(f"{side.title}: the reference runs")
    with running(side.backend or options.backend):
        model = side.load()

        def keep(i: int, x: Tensor, y: Tensor) -> None:
            side.streams[i] = files.keep(x), files.keep(y)

        for n, ids in enumerate(windows):
            with watched(model, side.layers, keep) if n == 0 else contextlib.nullcontext():
                side.logits.append(files.keep(logits_of(model, ids)))
    del model
    release()


def _run_port(
    subject: Subject, options: Options, sides: list[Side], yardstick: Side | None, windows: list[Tensor], files: Spool
) -> Report:
    """All that is measured on the port."""
    say("the port runs")
    changes = sides[0].aligned
    with running(options.backend):
        model = _port(subject, options, changes)
        report = Report(_title(subject, options), _facts(model, options, windows))
        report.sections = _logit_sections(model, sides, yardstick, windows)
        for side, section in zip(sides, report.sections, strict=False):
            section.layers = _layer_errors(subject, model, side, windows[0])
        if changes:
            report.notes.append(subject.alignment)
            del model
            release()
            say("the port runs as it ships")
            model = _port(subject, options, {})
            report.sections.append(_as_shipped(model, windows))
        bounds = _decode_bounds(subject, options, model.dtype)
        report.sections.append(decode_section(subject, model, windows[0], bounds, options.steps, files))
        del model
        release()
        if subject.more is not None:
            report.sections += subject.more(subject, options, windows[0])
    return report


def _title(subject: Subject, options: Options) -> str:
    variant = "".join(f", {value}" for value in (options.quant, options.cache and f"{options.cache} cache") if value)
    return f"{subject.port.__name__}, {options.checkpoint}{variant}"


def _facts(model: Any, options: Options, windows: list[Tensor]) -> dict[str, Any]:
    return {
        "checkpoint": options.checkpoint,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "quant": options.quant,
        "cache": options.cache,
        "text": str(options.text or "the package's own"),
        "tokens": sum(ids.shape[0] for ids in windows),
        "windows": len(windows),
    }


def _logit_sections(model: Any, sides: list[Side], yardstick: Side | None, windows: list[Tensor]) -> list[Section]:
    figures = [LogitFigures() for _ in sides]
    exact, theirs = LogitFigures(), LogitFigures()
    for n, ids in enumerate(windows):
        logits = logits_of(model, ids)
        for side, figure in zip(sides, figures, strict=True):
            figure.add(side.logits[n], logits, ids)
        if yardstick is not None:
            exact.add(yardstick.logits[n], logits, ids)
            theirs.add(yardstick.logits[n], sides[0].logits[n], ids)
    sections = [
        Section(
            side.title, logit_checks(figure, side.bounds), kl_by_position=figure.kl_by_position(),
            histogram=figure.histogram(), why=side.bounds.why,
        )
        for side, figure in zip(sides, figures, strict=True)
    ]  # fmt: skip
    if yardstick is not None:
        ours, other = (f.kl.median().item() for f in (exact, theirs))
        sections.append(
            Section(
                yardstick.title,
                [
                    Check("KL to it, mean, port", exact.kl.mean().item()),
                    Check("KL to it, mean, reference", theirs.kl.mean().item()),
                    Check("KL to it, median, port over reference", ours / max(other, 1e-12),
                          sides[0].bounds.yardstick),
                ],
                kl_by_position=exact.kl_by_position(),
            )
        )  # fmt: skip
    return sections


def logit_checks(figure: LogitFigures, bounds: Bounds) -> list[Check]:
    """What a table says of logits."""
    scale = max(figure.scale, 1e-12)
    ratio = figure.perplexity / figure.perplexity_expected
    kl = figure.kl
    return [
        Check("perplexity, reference", figure.perplexity_expected),
        Check("perplexity, port", figure.perplexity),
        Check("perplexity, ratio less 1", max(ratio, 1 / ratio) - 1 if ratio > 0 else float("nan"), bounds.perplexity),
        Check("logits, largest difference", figure.largest),
        Check("logits, largest difference over largest logit", figure.largest / scale, bounds.logits),
        Check("logits, mean difference", figure.mean),
        Check("KL, mean", kl.mean().item(), bounds.kl),
        Check("KL, median", kl.median().item()),
        Check("KL, largest", kl.max().item()),
        Check("same likeliest token", figure.top_1, bounds.top_1, at_least=True),
        Check("of the 5 likeliest, the same", figure.top_5),
    ]


def _layer_errors(subject: Subject, model: Any, side: Side, ids: Tensor) -> list[Any]:
    """Each layer on the reference's input, and the streams where the port goes its own way."""
    errors = LayerErrors(side.bounds.layer, subject.kinds(model.config))

    def give(i: int, x: Tensor) -> Tensor:
        return side.streams[i][0].to(x, copy=True)

    with watched(model, subject.layers, lambda i, x, y: errors.add(i, *side.streams[i], y), give):
        logits_of(model, ids)
    with watched(model, subject.layers, lambda i, x, y: errors.add_stream(i, side.streams[i][1], y)):
        logits_of(model, ids)
    return errors.finish()


def _as_shipped(model: Any, windows: list[Tensor]) -> Section:
    nll = Nll()
    for ids in windows:
        nll.add(logits_of(model, ids), ids)
    return Section("the port as it ships", [Check("perplexity", nll.perplexity)])


# ------------------------------------------------------------------------------------------------ the first that is off


def _locate(subject: Subject, options: Options, side: Side, section: Section, ids: Tensor, port: Loader) -> None:
    """Find the module in the first layer that is outside, running each model once more."""
    first = section.first_outside
    if first is None or side.bounds.layer is None:
        return
    say(f"{section.title}: layer {first.layer} is outside its bound; looking inside")

    def give(i: int, x: Tensor) -> Tensor:
        return side.streams[i][0].to(x, copy=True)

    # The reference on its own streams too: what it is handed has one form, however its layers pass it on.
    with running(side.backend or options.backend):
        model = side.load()
        layer = side.layers.of(model)[first.layer]
        with watched(model, side.layers, lambda *_: None, give), traced(layer) as expected:
            logits_of(model, ids)
    del model, layer
    release()
    with running(options.backend):
        model = port()
        layer = subject.layers.of(model)[first.layer]
        with watched(model, subject.layers, lambda *_: None, give), traced(layer) as got:
            logits_of(model, ids)
    del model, layer
    release()
    section.culprit = first_culprit(first, expected, got, subject.names, side.bounds.layer)


def _locate_in_decode(subject: Subject, options: Options, sections: list[Section], ids: Tensor, files: Spool) -> None:
    """The same in cached steps, beside the port's own forward."""
    section = next((s for s in sections if s.title == DECODE), None)
    first = None if section is None else section.first_outside
    if section is None or first is None:
        return
    say(f"{section.title}: layer {first.layer} is outside its bound; looking inside")
    start = first_decoded(ids, options.steps)
    streams: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(i: int, x: Tensor, y: Tensor) -> None:
        streams[i] = files.keep(x), files.keep(y)

    with running(options.backend):
        model = _port(subject, options, {})
        layer = subject.layers.of(model)[first.layer]
        with watched(model, subject.layers, keep):
            logits_of(model, ids)

        def give(i: int, x: Tensor) -> Tensor:
            return streams[i][0].to(x, copy=True)

        with watched(model, subject.layers, lambda *_: None, give), traced(layer) as whole:
            logits_of(model, ids)
        with traced(layer) as events:
            for t in fed_decode(model, subject.layers, ids, start, streams, lambda *_: None):
                if t == start:
                    # Of the prefill.
                    events.clear()
        bound = _decode_bounds(subject, options, model.dtype).layer
    assert bound is not None
    del model
    release()
    # One event for each step: made one for all, as the forward has it.
    got = joined(events)
    expected = [part_of(event, start, ids.shape[0]) for event in whole]
    section.culprit = first_culprit(first, expected, got, dataclasses.replace(subject.names, apart=()), bound)
