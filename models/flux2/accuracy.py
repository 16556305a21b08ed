"""FLUX.2 beside diffusers: `python -m xpu_ports.models.flux2.accuracy CKPT`, as `xpu-ports accuracy CKPT`.

Blocks are compared in the first step, each on the reference's input; latents after every step; the picture at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xpu_ports.common import dispatch
from xpu_ports.common.compare.bounds import Bounds, Check
from xpu_ports.common.compare.command import main
from xpu_ports.common.compare.layers import Event, LayerErrors, Layers, Names, first_culprit, traced, watched
from xpu_ports.common.compare.report import Report, Section
from xpu_ports.common.compare.running import release, running, say
from xpu_ports.common.compare.spool import Spool, spool
from xpu_ports.common.compare.subject import Options
from xpu_ports.models.flux2.diffusers_api import DiffusionPipeline
from xpu_ports.models.flux2.modeling_flux2 import NormedStream
from xpu_ports.models.flux2.packed import quantize_transformer
from xpu_ports.models.flux2.pipeline import load_pipeline

BOUNDS = {
    "float32": Bounds(
        "sums in another order: ten times what the tiny checkpoint shows, where errors of 20 steps add up",
        layer=2e-5, latents=1e-4, picture=1e-4,
    ),
    "bfloat16": Bounds(
        "both round at other places: three times what the tiny checkpoint shows",
        layer=0.03, latents=0.03, picture=0.01,
    ),
    "float16": Bounds(
        "as bfloat16, with eight times its precision",
        layer=0.004, latents=0.006, picture=0.002,
    ),
    "mxfp4": Bounds(
        "four bits a weight of the transformer: twice what the tiny checkpoint loses, and larger models lose less",
        layer=0.35, latents=0.25, picture=0.02,
    ),
}  # fmt: skip
# The difference of two pictures is shown so many times as large, and small pictures enlarged to this side.
AMPLIFIED = 16
ENLARGED = 256


def blocks(transformer: Any) -> list[nn.Module]:
    return [*transformer.transformer_blocks, *transformer.single_transformer_blocks]


def _is_double(args: tuple[Any, ...]) -> bool:
    """Whether arguments are a double block's, which has a modulation for each stream."""
    return len(args) == 6


def _put(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not _is_double(args):
        return (NormedStream(x), *args[1:]), kwargs
    L = args[1].shape[1]
    return (x[:, L:].clone(), x[:, :L].clone(), *args[2:]), kwargs


def _their_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    text = kwargs.get("encoder_hidden_states")
    return kwargs["hidden_states"] if text is None else torch.cat([text, kwargs["hidden_states"]], dim=1)


# The stream is text, then picture.
OURS = Layers(
    of=blocks,
    read=lambda args, kwargs: torch.cat([args[1], args[0]], dim=1) if _is_double(args) else args[0].x,
    result=lambda out: out.x if isinstance(out, NormedStream) else torch.cat([out[1], out[0]], dim=1),
    put=_put,
)
THEIRS = Layers(
    of=blocks, read=_their_input, result=lambda out: out if isinstance(out, Tensor) else torch.cat(out, dim=1)
)


@dataclass
class Drawing:
    """What one pipeline left behind."""

    # The first call of the transformer.
    call: dict[str, Any] = field(default_factory=dict)
    streams: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # After each step.
    latents: list[Tensor] = field(default_factory=list)
    # [H, W, 3], 0 to 1.
    picture: Tensor = field(default_factory=lambda: torch.zeros(0))


@torch.no_grad()
def draw(pipe: Any, layers: Layers, options: Options, files: Spool) -> Drawing:
    """Draw with a pipeline and keep what is compared."""
    pipe.set_progress_bar_config(disable=True)
    found = Drawing()

    def keep_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.call = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()}

    def keep_streams(i: int, x: Tensor, y: Tensor) -> None:
        found.streams[i] = files.keep(x), files.keep(y)

    def keep_latents(pipe: Any, step: int, time: Any, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        found.latents.append(files.keep(kwargs["latents"].float()))
        return kwargs

    size = {} if options.side is None else {"height": options.side, "width": options.side}
    # Noise from the CPU is the same on every device.
    noise = torch.Generator().manual_seed(0)
    with contextlib.ExitStack() as first_step:
        first_step.enter_context(watched(pipe.transformer, layers, keep_streams))
        first_step.callback(pipe.transformer.register_forward_pre_hook(keep_call, with_kwargs=True).remove)
        # Later steps run without hooks, as they would for a user: captured, where the device has graphs.
        first_step.callback(pipe.transformer.register_forward_hook(lambda *_: first_step.close()).remove)
        [picture] = pipe(
            prompt=options.prompt, num_inference_steps=options.draw_steps, guidance_scale=options.guidance,
            max_sequence_length=options.text_tokens, generator=noise, output_type="np",
            callback_on_step_end=keep_latents, **size,
        ).images  # fmt: skip
    found.picture = torch.from_numpy(picture)
    return found


def compare(options: Options) -> Report:
    """Draw with the reference, then with the port, and measure.

    Raises:
        ValueError: an option that pictures have nothing for.
        OSError: the checkpoint is not there.
    """
    if options.cache is not None:
        raise ValueError("--cache is for language models: FLUX.2 has none")
    if options.reference == "transformers":
        raise ValueError("--reference transformers is for language models; FLUX.2 has diffusers and reference-path")
    options = dataclasses.replace(options, dtype=options.dtype or torch.bfloat16)
    assert options.dtype is not None
    dtype = str(options.dtype).removeprefix("torch.")
    own = options.reference == "reference-path" or (options.reference is None and _is_packed(options.checkpoint))
    bounds = BOUNDS[dtype if own or options.quant is None else options.quant]
    title = f"beside the reference ops, {dtype}" if own else f"beside diffusers, {dtype}"
    title += ", dense weights" if options.quant is not None and not own else ""
    backend = "reference" if own else None
    theirs: Callable[..., Any] = functools.partial(
        _pipeline, *((_port, options) if own else (DiffusionPipeline.from_pretrained, options))
    )
    layers = OURS if own else THEIRS
    with spool() as files:
        exact = None
        if options.yardstick and options.dtype != torch.float32:
            exact = _draw(functools.partial(theirs, torch.float32), layers, options, files, backend, "the yardstick")
        expected = _draw(theirs, layers, options, files, backend, title)
        dispatch.reset_explain()
        ours: Callable[..., Any] = functools.partial(_pipeline, _port, options)
        say("the port draws")
        with running(options.backend):
            pipe = ours()
            got = draw(pipe, OURS, options, files)
            section = Section(f"blocks {title}", layers=_block_errors(pipe.transformer, expected, bounds),
                              why=bounds.why)  # fmt: skip
            report = Report(f"FLUX.2, {options.checkpoint}", _facts(pipe, options))
        del pipe
        release()
        report.sections = [section, _picture_section(title, expected, got, bounds, exact)]
        report.explain = [dataclasses.asdict(decision) for decision in dispatch.explain(show=False)]
        _locate(section, expected, theirs, layers, backend, ours, options, bounds)
        if options.out is not None:
            name = f"The port, the reference, and their difference times {AMPLIFIED}"
            report.pictures[name] = side_by_side(got.picture, expected.picture, options.out / "side-by-side.png")
    return report


def _is_packed(checkpoint: str) -> bool:
    """Whether a folder's transformer is packed, which has no dense reference."""
    config = Path(checkpoint) / "transformer" / "config.json"
    return config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8"))


def _pipeline(loader: Callable[..., Any], options: Options, dtype: torch.dtype | None = None) -> Any:
    pipe = loader(options.checkpoint, dtype=dtype or options.dtype)
    if loader is _port and options.quant is not None:
        quantize_transformer(pipe.transformer)
    return pipe.to(options.device)


def _port(*args: Any, **kwargs: Any) -> Any:
    return load_pipeline(*args, **kwargs)


def _draw(
    load: Callable[[], Any], layers: Layers, options: Options, files: Spool, backend: str | None, title: str
) -> Drawing:
    say(f"{title}: the reference draws")
    with running(backend):
        pipe = load()
        found = draw(pipe, layers, options, files)
    del pipe
    release()
    return found


def _facts(pipe: Any, options: Options) -> dict[str, Any]:
    return {
        "checkpoint": options.checkpoint,
        "model_type": "flux2",
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "device": str(options.device),
        "prompt": options.prompt,
        "steps": options.draw_steps,
        "guidance": options.guidance,
    }


def _block_errors(transformer: Any, expected: Drawing, bounds: Bounds) -> list[Any]:
    """Each block on the reference's input in the first step, and the streams where the port goes its own way."""
    doubles = len(transformer.transformer_blocks)
    kinds = {i: "double" if i < doubles else "single" for i in range(len(blocks(transformer)))}
    errors = LayerErrors(bounds.layer, kinds)
    streams = expected.streams
    with watched(transformer, OURS, lambda i, x, y: errors.add(i, *streams[i], y), _given(streams)):
        transformer(**expected.call)
    with watched(transformer, OURS, lambda i, x, y: errors.add_stream(i, streams[i][1], y)):
        transformer(**expected.call)
    return errors.finish()


def _given(streams: Mapping[int, tuple[Tensor, Tensor]]) -> Callable[[int, Tensor], Tensor]:
    return lambda i, x: streams[i][0].to(x, copy=True)


def _picture_section(title: str, expected: Drawing, got: Drawing, bounds: Bounds, exact: Drawing | None) -> Section:
    difference = (got.picture - expected.picture).abs()
    mse = difference.square().mean().item()
    by_step = [relative(a, b) for a, b in zip(got.latents, expected.latents, strict=True)]
    checks = [
        Check("latents, relative error after the last step", by_step[-1], bounds.latents),
        Check("picture, mean difference (values 0 to 1)", difference.mean().item(), bounds.picture),
        Check("picture, largest difference", difference.max().item()),
        Check("picture, PSNR in dB", -10 * math.log10(max(mse, 1e-12))),
    ]
    if exact is not None:
        for name, drawing in (("port", got), ("reference", expected)):
            error = relative(drawing.latents[-1], exact.latents[-1])
            checks.append(Check(f"latents, {name} beside the reference in float32", error))
    return Section(f"latents and picture {title}", checks, latents_by_step=by_step, why=bounds.why)


def relative(x: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return ((x - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def _locate(
    section: Section,
    expected: Drawing,
    theirs: Callable[[], Any],
    layers: Layers,
    backend: str | None,
    ours: Callable[[], Any],
    options: Options,
    bounds: Bounds,
) -> None:
    """Find the module in the first block that is outside, running each transformer once more."""
    first = section.first_outside
    if first is None or bounds.layer is None:
        return
    say(f"block {first.layer} is outside its bound; looking inside")

    def events(load: Callable[[], Any], of: Layers, forced: str | None, give: Any) -> list[Event]:
        with running(forced):
            transformer = load().transformer
            block = of.of(transformer)[first.layer]
            with watched(transformer, of, lambda *_: None, give), traced(block) as found:
                transformer(**expected.call)
        del transformer
        release()
        return found

    there = events(theirs, layers, backend, None)
    here = events(ours, OURS, options.backend, _given(expected.streams))
    section.culprit = first_culprit(first, there, here, Names(), bounds.layer)


def side_by_side(ours: Tensor, theirs: Tensor, path: Path) -> Path:
    """Write both pictures and their difference, amplified, each [H, W, 3]."""
    import numpy as np
    from PIL import Image

    difference = ((ours - theirs).abs() * AMPLIFIED).clamp(0, 1)
    gap = torch.ones(ours.shape[0], max(1, ours.shape[1] // 32), 3)
    row = torch.cat([ours, gap, theirs, gap, difference], dim=1)
    picture = Image.fromarray((row.numpy() * 255).round().astype(np.uint8))
    scale = max(1, ENLARGED // ours.shape[0])
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    return path


if __name__ == "__main__":
    sys.exit(main(compare, "python -m xpu_ports.models.flux2.accuracy"))
