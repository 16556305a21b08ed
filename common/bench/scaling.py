"""What a model divided among ranks costs and gives: time in collectives, logits against an oracle, experts chosen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xpu_ports.common import accuracy, parallel
from xpu_ports.common.bench.timing import Stopwatch, device_kernels
from xpu_ports.common.compare.figures import LogitFigures
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.graph import capture, graph_class, use_graphs

# How the kernels of NCCL and of oneCCL begin; the first also names spans on the device's timeline, with a colon.
COLLECTIVES = ("nccl", "oneccl", "ccl_")


# Weights and indices of a layer's experts, [N, A] both.
Routing = tuple[Tensor, Tensor]


# ------------------------------------------------------------------------------------------------ time in collectives


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran on the device; seconds."""

    name: str
    start: float
    duration: float

    @property
    def is_collective(self) -> bool:
        return self.name.lower().startswith(COLLECTIVES)


@dataclass(frozen=True)
class Busy:
    """What the device did in a step; milliseconds, means over some steps."""

    steps: int
    # Kernels of a step, collectives among them.
    kernels: float
    collectives: float
    # From the first kernel's start to the last one's end.
    span_ms: float
    # All kernels, collectives among them, which wait for the other ranks as well.
    busy_ms: float
    collective_ms: float
    # The median of single collectives.
    collective_us: float

    @property
    def share(self) -> float:
        """Of the time in kernels, what collectives take."""
        return self.collective_ms / self.busy_ms if self.busy_ms else 0.0

    @classmethod
    def of(cls, kernels: list[Kernel], steps: int) -> Busy | None:
        """From the kernels of equal steps, of which the first waited for the profiler on other ranks and is left out.

        None where there are no kernels.
        """
        kernels = sorted(kernels, key=lambda k: k.start)
        if steps > 1 and kernels and len(kernels) % steps == 0:
            kernels, steps = kernels[len(kernels) // steps :], steps - 1
        if not kernels:
            return None
        among = sorted(k.duration for k in kernels if k.is_collective)
        span = max(k.start + k.duration for k in kernels) - kernels[0].start
        return cls(
            steps,
            len(kernels) / steps,
            len(among) / steps,
            1e3 * span / steps,
            1e3 * sum(k.duration for k in kernels) / steps,
            1e3 * sum(among) / steps,
            1e6 * among[len(among) // 2] if among else 0.0,
        )


def profiled(step: Callable[[], Any], steps: int, device: torch.device) -> Busy | None:
    """What the device does in some calls of a step, which is warm; None on a CPU. Replays of graphs are seen too."""
    if device.type == "cpu":
        return None

    def run() -> None:
        for _ in range(steps):
            step()

    torch.accelerator.synchronize()
    kernels = [
        Kernel(e.name, 1e-6 * e.time_range.start, 1e-6 * e.device_time)
        for e in device_kernels(run, device)
        if not e.name.startswith("nccl:")
    ]
    return Busy.of([k for k in kernels if k.duration > 0], steps)


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Ranks leave each other alone inside the block: numbers are wrong, times are those without what is sent."""

    def gather(x: Tensor, sizes: list[int], group: Any) -> Tensor:
        return torch.cat([x] * (len(sizes) + 1), dim=-1)[..., : sum(sizes)]

    module: Any = parallel
    kept = module.all_reduce, module.all_gather
    module.all_reduce, module.all_gather = (lambda x, group: x.contiguous()), gather
    try:
        yield
    finally:
        module.all_reduce, module.all_gather = kept


def all_reduce_times(
    group: Any, rows: int, columns: int, dtype: torch.dtype, device: torch.device, times: int = 32
) -> dict[str, float]:
    """Seconds of one sum over ranks of [rows, columns], called from Python and, where there are graphs, in one."""
    x = torch.zeros(rows, columns, dtype=dtype, device=device)

    def run() -> Tensor:
        for _ in range(times):
            parallel.all_reduce(x, group)
        return x

    stopwatch = Stopwatch(device)
    run()
    found = {"eager": min(stopwatch(run) for _ in range(3)) / times}
    if graph_class(device) is not None:
        replay, _ = capture(device, run)
        replay()
        found["captured"] = min(stopwatch(replay) for _ in range(5)) / times
    return found


# --------------------------------------------------------------------------------------------------- what comes out


def parts_of_model(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that run one after another: blocks, and what stands before and behind them."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(grandchild, nn.ModuleList) for grandchild in child.children()):
            yield from parts_of_model(child)
        else:
            yield child


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes in fp32 with the references of ops, on its own weights.

    A block at a time has its weights in fp32 as well, so that a model fits that would not as a whole. Without
    gradients, and not in inference mode.
    """
    kept: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        kept[module] = [(p, p.data) for p in module.parameters() if p.is_floating_point()]
        for p, data in kept[module]:
            p.data = data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for p, data in kept.pop(module):
            p.data = data

    handles = []
    for module in parts_of_model(model):
        handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]
    # Convolutions would round to TF32, unlike products.
    rounds, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        with use_backend("reference"), use_graphs(False):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = rounds
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def chosen_experts(model: nn.Module, given: list[Routing] | None = None) -> Iterator[list[Routing]]:
    """Inside the block a list gets what each router says, in the order of the layers.

    Args:
        model: whose classes of routers have names that end so.
        given: what they say instead, whatever they choose themselves.
    """
    chosen: list[Routing] = []

    def look(_module: nn.Module, _given: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, indices = output
        if given is not None:
            weights, indices = (t.to(logits.device) for t in given[len(chosen)])
        chosen.append((weights.cpu(), indices.cpu()))
        return logits, weights, indices

    handles = [m.register_forward_hook(look) for m in model.modules() if type(m).__name__.endswith("Router")]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def routing_by_steps(routing: list[Routing], prompt: int) -> list[Routing]:
    """What routers said of a whole text, in the order in which `logits_by_steps` asks them."""
    tokens = routing[0][0].shape[0]
    pieces = [(0, prompt), *((i, i + 1) for i in range(prompt, tokens))]
    return [(weights[a:b], indices[a:b]) for a, b in pieces for weights, indices in routing]


def differing_experts(a: list[Routing], b: list[Routing]) -> dict[str, int]:
    """How often two runs of the same tokens chose other experts: choices, those that differ, tokens with such a one."""
    pairs = [(x.sort(dim=-1).values, y.sort(dim=-1).values) for (_, x), (_, y) in zip(a, b, strict=True)]
    differ = torch.stack([(x != y).any(-1) for x, y in pairs])  # [layers, N]
    return {"choices": differ.numel(), "differ": int(differ.sum()), "tokens": int(differ.any(0).sum())}


def compared(got: Tensor, expected: Tensor, tokens: bool = True) -> dict[str, float]:
    """How far outputs [T, V] are from others: the largest difference beside the largest value, and the mean square.

    Args:
        got, expected: of one shape.
        tokens: they are logits: also the divergence, in nats, and how many of the most likely tokens are the same.
    """
    figures = LogitFigures()
    figures.add(expected, got, torch.zeros(got.shape[0], dtype=torch.int64))
    difference = (got.double() - expected.double()).square().mean().sqrt()
    found = {
        "largest": figures.largest,
        "scale": figures.scale,
        "relative": (difference / expected.double().square().mean().sqrt()).item(),
    }
    return found | ({"kl": figures.kl.mean().item(), "top_1": figures.top_1} if tokens else {})


def budgeted(got: Tensor, reference: Tensor, oracle: Tensor) -> dict[str, Any]:
    """The budget of `common/accuracy.py`, for an oracle in fp32: error, what is allowed, and whether it is within."""
    error = accuracy.measure(got, reference, oracle)
    return {"error": error.largest, "allowed": error.allowed, "of_rms": error.relative, "within": error.within}


# ------------------------------------------------------------------------------------------------- language models


class Decoding:
    """Steps of one token a row behind a prompt, all with the same token."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        """Read the prompt, [B, T]."""
        self.model, self.token = model, ids[:, :1]
        self.cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).cache

    def __call__(self) -> Tensor:
        """The logits of a step, [B, 1, V]."""
        return self.model(input_ids=self.token, cache=self.cache, use_cache=True, logits_to_keep=1).logits


def logits_by_steps(model: Any, ids: Tensor, prompt: int) -> Tensor:
    """Logits of ids [1, T] as decoding makes them, [T, V]: a prompt, then token by token."""
    outputs = model(input_ids=ids[:, :prompt], use_cache=True)
    rows = [outputs.logits[0]]
    step = functools.partial(model, cache=outputs.cache, use_cache=True, logits_to_keep=1)
    for i in range(prompt, ids.shape[1]):
        rows.append(step(input_ids=ids[:, i : i + 1]).logits[0])
    return torch.cat(rows)
