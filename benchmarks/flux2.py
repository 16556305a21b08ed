"""One step of FLUX.2's transformer with random weights, beside diffusers' class on the same memory.

    python benchmarks/flux2.py [--layout klein-4b|klein-9b|dev] [--side 64] [--text 512] [--compile] [--out FILE]

Prints and writes milliseconds a step, launches a step, and how far the two outputs are from each other. A side of 64
tokens is a picture of 1024 x 1024.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from xpu_ports.common import dispatch
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.timing import Plan, Run, Stopwatch, capture_run, captured, eager_run, interleave
from xpu_ports.models.flux2 import Flux2Transformer2DModel
from xpu_ports.models.flux2.layouts import LAYOUTS

PLAN = Plan(sample=0.1, samples=10, budget=60.0, most_calls=20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="klein-4b")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--text", type=int, default=512)
    parser.add_argument("--layers", type=int, help="blocks of each kind, instead of all")
    parser.add_argument("--compile", action="store_true", help="also through torch.compile, which takes minutes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    config = LAYOUTS[options.layout]
    if options.layers:
        config = config | {"num_layers": options.layers, "num_single_layers": options.layers}
    ours, theirs = models(config, device)
    given = step(ours, options.side, options.text, device)
    lines = [{"kind": "environment", **environment(device)}]
    for line in measure(ours, theirs, given, device, options.compile):
        lines.append({"kind": "step", "model": f"flux2 {options.layout}", "layers": options.layers, **line})
        print(json.dumps(lines[-1]), flush=True)
    dispatch.reset_explain()
    ours(**given)
    dispatch.explain()
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


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
    ours: nn.Module, theirs: nn.Module, given: dict[str, Any], device: torch.device, compiled: bool
) -> Iterator[dict[str, Any]]:
    """A line a variant; eager ones are timed in turn."""
    stopwatch = Stopwatch(device)
    calls: dict[str, Callable[[], tuple]] = {
        "eager": functools.partial(ours, **given),
        "diffusers": functools.partial(theirs, **given),
    }
    if compiled:
        calls["compiled"] = functools.partial(torch.compile(ours), **given)
        calls["diffusers compiled"] = functools.partial(torch.compile(theirs), **given)
    [expected] = calls["diffusers"]()
    differences = {name: _relative(call()[0], expected) for name, call in calls.items()}
    runs = {name: eager_run([call], stopwatch, PLAN) for name, call in calls.items()}
    for name, timing in interleave(stopwatch, runs, PLAN).items():
        yield _line(name, timing, differences[name], launches(calls[name], device))
    if captured(device) is not None:
        graph: Run = capture_run(device, [calls["eager"]], stopwatch, PLAN)
        [timing] = interleave(stopwatch, {"graph": graph}, PLAN, ahead=True).values()
        yield _line("graph", timing, differences["eager"], 1)


def _line(variant: str, timing: Any, difference: float, count: int | None) -> dict[str, Any]:
    return {"variant": variant, **dataclasses.asdict(timing), "difference": difference, "launches": count}


def _relative(x: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return ((x.float() - expected.float()).norm() / expected.float().norm()).item()


def launches(call: Callable[[], Any], device: torch.device) -> int | None:
    """Kernels that a call runs on the device; None on a CPU."""
    if device.type == "cpu":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activity, kind = getattr(ProfilerActivity, device.type.upper()), getattr(DeviceType, device.type.upper())
    with profile(activities=[activity]) as profiled:
        call()
        torch.accelerator.synchronize()
    events = [e for e in profiled.events() if e.device_type == kind]
    return sum(1 for e in events if not e.name.startswith(("Memcpy", "Memset")))


if __name__ == "__main__":
    sys.exit(main())
