"""`xpu-ports bench model flux2`: a step of FLUX.2's transformer beside diffusers' class, on the same memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xpu_ports.cli.bench_model import default_dtype
from xpu_ports.common import dispatch
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.files import write_lines
from xpu_ports.common.bench.timing import Plan, Run, Stopwatch, device_kernels, eager_run, interleave
from xpu_ports.common.graph import graph_class, use_graphs
from xpu_ports.models.flux2 import Flux2Transformer2DModel, diffusers_api
from xpu_ports.models.flux2.layouts import LAYOUTS
from xpu_ports.models.flux2.packed import quantize_transformer

PLAN = Plan(sample=0.1, samples=8, budget=10.0, most_calls=20)


@dataclass(frozen=True)
class Options:
    """What is measured beside a step of ours."""

    # Tokens of a square picture's side, and of text.
    side: int = 64
    text: int = 512
    # Blocks of each kind, instead of all.
    layers: int | None = None
    peer: bool = True
    mxfp4: bool = False
    compiled: bool = False
    # Each attention that PyTorch has on CUDA.
    attention: bool = False
    # Print the kernels that take longest, so many.
    kernels: int = 0


def bench_pictures(
    layout: str | None,
    checkpoint: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    options: Options,
    out: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure and report; random weights where no checkpoint is given.

    Args:
        layout: a released size; the first one when left out.
        checkpoint: a folder of a pipeline, of which the transformer is measured.
        device, dtype: of the weights.
        options: what to measure.
        out: folder for flux2-LAYOUT.jsonl, or that file; it holds what was measured even where a later variant fails.
        as_json: print JSON lines alone.

    Raises:
        ValueError: no such layout.
    """
    name = checkpoint.name if checkpoint is not None else layout or "klein-4b"
    ours, theirs = _models(name, checkpoint, device, dtype, options)
    path = out / f"flux2-{name}.jsonl" if out is not None and out.suffix != ".jsonl" else out
    lines: list[dict[str, Any]] = [
        {"kind": "environment", **environment(device), "diffusers": diffusers_api.__version__}
    ]
    size: dict[str, Any] = {"side": options.side, "text": options.text, "layers": options.layers}
    if dtype != torch.bfloat16:
        size["dtype"] = str(dtype).removeprefix("torch.")
    for line in measure(ours, theirs, step(ours, dtype, options, device), device, options):
        lines.append({"kind": "step", "model": f"flux2 {name}", **size, **line})
        if path is not None:
            write_lines(path, lines)
    dispatch.reset_explain()
    with torch.no_grad(), use_graphs(False):
        ours(**step(ours, dtype, options, device))
    if as_json:
        for line in lines:
            print(json.dumps(line))
        return
    Console(width=max(100, Console().width)).print(_table(f"flux2 {name}, a step", lines[1:]))
    dispatch.explain()


def _models(
    name: str, checkpoint: Path | None, device: torch.device, dtype: torch.dtype, options: Options
) -> tuple[nn.Module, nn.Module | None]:
    """Ours and diffusers' with the same weights, in the same memory."""
    if checkpoint is not None:
        ours = Flux2Transformer2DModel.from_pretrained(checkpoint, subfolder="transformer", torch_dtype=dtype)
        ours = ours.to(device)
        config = {key: value for key, value in ours.config.items() if not key.startswith("_")}
    else:
        if name not in LAYOUTS:
            raise ValueError(f"no FLUX.2 layout is named {name!r}; there are: {', '.join(LAYOUTS)}")
        config = dict(LAYOUTS[name])
        if options.layers:
            config |= {"num_layers": options.layers, "num_single_layers": options.layers}
        torch.manual_seed(0)
        with default_dtype(dtype), device:
            ours = Flux2Transformer2DModel(**config)
    ours = ours.eval().requires_grad_(False)
    if not options.peer:
        return ours, None
    with default_dtype(dtype), torch.device("meta"):
        theirs: Any = diffusers_api.DiffusersFlux2Transformer2DModel(**config)
    theirs.load_state_dict(ours.state_dict(), assign=True)
    return ours, theirs.eval().requires_grad_(False)


def step(model: Any, dtype: torch.dtype, options: Options, device: torch.device) -> dict[str, Any]:
    """Arguments of a step for one square picture."""
    side, text = options.side, options.text
    zero, rows = torch.zeros(1), torch.arange(float(side))
    with device:
        return {
            "hidden_states": torch.randn(1, side * side, model.config.in_channels).to(dtype),
            "encoder_hidden_states": torch.randn(1, text, model.config.joint_attention_dim).to(dtype),
            "timestep": torch.full((1,), 0.5).to(dtype),
            "guidance": torch.full((1,), 4.0).to(dtype) if model.config.guidance_embeds else None,
            "img_ids": torch.cartesian_prod(zero.to(device), *[rows.to(device)] * 2, zero.to(device)),
            "txt_ids": torch.cartesian_prod(*[zero.to(device)] * 3, torch.arange(float(text))),
            "return_dict": False,
        }


@torch.no_grad()
def measure(
    ours: nn.Module, theirs: nn.Module | None, given: dict[str, Any], device: torch.device, options: Options
) -> Iterator[dict[str, Any]]:
    """A line a variant, those of equal weights timed in turn."""
    eager = functools.partial(use_graphs, False)
    step = functools.partial(ours, **given)
    variants = {"eager": Variant(step, eager)}
    if theirs is not None:
        variants = {"diffusers": Variant(functools.partial(theirs, **given)), **variants}
    if graph_class(device) is not None:
        variants["captured"] = Variant(step)
    if options.attention and device.type == "cuda":
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            variants[f"eager, {backend.name}"] = Variant(step, functools.partial(_with, eager, backend))
    if options.compiled:
        variants["compiled"] = Variant(functools.partial(torch.compile(ours), **given))
        if theirs is not None:
            variants["diffusers compiled"] = Variant(functools.partial(torch.compile(theirs), **given))
    # Without diffusers the differences are those from our own eager step.
    [expected] = next(iter(variants.values())).step()
    yield from timed(variants, expected, ours, device, options)
    if options.mxfp4:
        quantize_transformer(ours)
        packed = {"mxfp4 eager": Variant(step, eager)}
        if graph_class(device) is not None:
            packed["mxfp4 captured"] = Variant(step)
        yield from timed(packed, expected, ours, device, options)


@dataclass(frozen=True)
class Variant:
    """A step, and what is entered around it."""

    step: Callable[[], tuple]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@contextlib.contextmanager
def _with(eager: Callable[[], contextlib.AbstractContextManager], backend: SDPBackend) -> Iterator[None]:
    with eager(), sdpa_kernel(backend):
        yield


def timed(
    variants: dict[str, Variant], expected: Tensor, ours: nn.Module, device: torch.device, options: Options
) -> Iterator[dict[str, Any]]:
    stopwatch = Stopwatch(device)
    differences: dict[str, float] = {}
    runs: dict[str, Run] = {}
    for name, variant in variants.items():
        with variant.context():
            # The third call of a step that is captured is a replay.
            outputs = [variant.step()[0] for _ in range(3)]
        differences[name] = _relative(outputs[-1], expected)
        runs[name] = eager_run([variant.step], stopwatch, PLAN, variant.context)
    gigabytes = sum(p.nbytes for p in ours.parameters()) / 1e9
    for name, timing in interleave(stopwatch, runs, PLAN).items():
        with variants[name].context():
            kernels = profiled(variants[name].step, device)
        busy = None if kernels is None else sum(seconds for _, seconds in kernels)
        count = None if kernels is None else len(kernels)
        yield {
            "variant": name, **dataclasses.asdict(timing), "busy": busy, "launches": count,
            "difference": differences[name], "gigabytes": gigabytes,
        }  # fmt: skip
        if options.kernels and kernels is not None:
            print(longest(kernels, options.kernels), flush=True)


def _relative(x: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return ((x.float() - expected.float()).norm() / expected.float().norm()).item()


def profiled(call: Callable[[], Any], device: torch.device) -> list[tuple[str, float]] | None:
    """Kernels that a call runs on the device, and seconds that each takes; None on a CPU."""
    if device.type == "cpu":
        return None
    return [(e.name, e.device_time * 1e-6) for e in device_kernels(call, device)]


def longest(kernels: list[tuple[str, float]], most: int) -> str:
    """A line a kernel: milliseconds, launches, name."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, each in kernels:
        seconds[name].append(each)
    rows = sorted(seconds.items(), key=lambda item: -sum(item[1]))[:most]
    return "\n".join(f"{1e3 * sum(each):9.3f} ms {len(each):4d} x {name[:110]}" for name, each in rows)


def _table(title: str, lines: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("variant", "ms", "low-high", "kernel ms", "launches", "difference", "GB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for line in lines:
        median, low, high = (1e3 * line[name] for name in ("median", "low", "high"))
        busy, launches = line["busy"], line["launches"]
        table.add_row(
            line["variant"], f"{median:,.1f}", f"{low:,.1f}-{high:,.1f}", "" if busy is None else f"{1e3 * busy:,.1f}",
            "" if launches is None else f"{launches:,}", f"{line['difference']:.1e}", f"{line['gigabytes']:.2f}",
        )  # fmt: skip
    return table
