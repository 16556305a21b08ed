"""One step of FLUX.2's transformer with random weights, beside diffusers' class on the same memory.

    python benchmarks/flux2.py [--layout klein-4b|klein-9b|dev] [--side 64] [--text 512] [--mxfp4] [--compile]
        [--attention] [--kernels N] [--out FILE]

Prints and writes milliseconds a step, launches a step, and how far outputs are from diffusers': called eagerly, through
a captured graph as pipelines do by themselves, and with MXFP4 weights. A side of 64 tokens is a picture of 1024 x 1024.
The file is flux2-LAYOUT.jsonl in the folder OUT, if that is set.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xpu_ports.common import dispatch
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.timing import Plan, Run, Stopwatch, eager_run, interleave
from xpu_ports.common.graph import graph_class, use_graphs
from xpu_ports.models.flux2 import Flux2Transformer2DModel
from xpu_ports.models.flux2.layouts import LAYOUTS
from xpu_ports.models.flux2.packed import quantize_transformer

PLAN = Plan(sample=0.1, samples=8, budget=10.0, most_calls=20)


def main() -> int:
    options = arguments()
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    config = LAYOUTS[options.layout]
    if options.layers:
        config = config | {"num_layers": options.layers, "num_single_layers": options.layers}
    ours, theirs = models(config, device)
    given = step(ours, options.side, options.text, device)
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(device), "diffusers": diffusers.__version__}]
    size = {"side": options.side, "text": options.text, "layers": options.layers}
    for line in measure(ours, theirs, given, device, options):
        lines.append({"kind": "step", "model": f"flux2 {options.layout}", **size, **line})
        print(json.dumps(lines[-1]), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    dispatch.reset_explain()
    with torch.no_grad(), use_graphs(False):
        ours(**given)
    dispatch.explain()
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="klein-4b")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--text", type=int, default=512)
    parser.add_argument("--layers", type=int, help="blocks of each kind, instead of all")
    parser.add_argument("--mxfp4", action="store_true", help="also with packed weights")
    parser.add_argument("--compile", action="store_true", help="also through torch.compile, which takes minutes")
    parser.add_argument("--attention", action="store_true", help="also with each attention that PyTorch has on CUDA")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out is None and os.environ.get("OUT"):
        options.out = Path(os.environ["OUT"]) / f"flux2-{options.layout}.jsonl"
    return options


@contextlib.contextmanager
def bfloat16() -> Iterator[None]:
    """Parameters are made in bf16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def models(config: dict[str, Any], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Ours and diffusers' with the same random weights, in the same memory."""
    torch.manual_seed(0)
    with bfloat16():
        with device:
            ours = Flux2Transformer2DModel(**config)
        with torch.device("meta"):
            theirs = diffusers.Flux2Transformer2DModel(**config)
    theirs.load_state_dict(ours.state_dict(), assign=True)
    return (ours.eval().requires_grad_(False), theirs.eval().requires_grad_(False))


def step(model: nn.Module, side: int, text: int, device: torch.device) -> dict[str, Any]:
    """Arguments of a step for one picture of side x side tokens."""
    zero, rows = torch.zeros(1), torch.arange(float(side))
    with device:
        return {
            "hidden_states": torch.randn(1, side * side, model.config.in_channels).bfloat16(),
            "encoder_hidden_states": torch.randn(1, text, model.config.joint_attention_dim).bfloat16(),
            "timestep": torch.full((1,), 0.5).bfloat16(),
            "guidance": torch.full((1,), 4.0).bfloat16() if model.config.guidance_embeds else None,
            "img_ids": torch.cartesian_prod(zero.to(device), *[rows.to(device)] * 2, zero.to(device)),
            "txt_ids": torch.cartesian_prod(*[zero.to(device)] * 3, torch.arange(float(text))),
            "return_dict": False,
        }


@torch.no_grad()
def measure(
    ours: nn.Module, theirs: nn.Module, given: dict[str, Any], device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A line a variant, those of equal weights timed in turn."""
    eager = functools.partial(use_graphs, False)
    step, other = functools.partial(ours, **given), functools.partial(theirs, **given)
    variants = {"diffusers": Variant(other), "eager": Variant(step, eager)}
    if graph_class(device) is not None:
        variants["captured"] = Variant(step)
    if options.attention and device.type == "cuda":
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            variants[f"eager, {backend.name}"] = Variant(step, functools.partial(_with, eager, backend))
    if options.compile:
        variants["compiled"] = Variant(functools.partial(torch.compile(ours), **given))
        variants["diffusers compiled"] = Variant(functools.partial(torch.compile(theirs), **given))
    [expected] = other()
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
    variants: dict[str, Variant], expected: Tensor, ours: nn.Module, device: torch.device, options: argparse.Namespace
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
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activity, kind = getattr(ProfilerActivity, device.type.upper()), getattr(DeviceType, device.type.upper())
    with profile(activities=[activity]) as found:
        call()
        torch.accelerator.synchronize()
    events = [e for e in found.events() if e.device_type == kind]
    return [(e.name, e.device_time * 1e-6) for e in events if not e.name.startswith(("Memcpy", "Memset"))]


def longest(kernels: list[tuple[str, float]], most: int) -> str:
    """A line a kernel: milliseconds, launches, name."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, each in kernels:
        seconds[name].append(each)
    rows = sorted(seconds.items(), key=lambda item: -sum(item[1]))[:most]
    return "\n".join(f"{1e3 * sum(each):9.3f} ms {len(each):4d} x {name[:110]}" for name, each in rows)


if __name__ == "__main__":
    sys.exit(main())
