"""`xpu-ports bench model`: prefill and decode of a whole model, beside transformers' own class on the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, StaticCache

import xpu_ports.models
from xpu_ports.cli import _common
from xpu_ports.common import graph
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.files import write_lines
from xpu_ports.common.bench.ranks import random_model, slowest
from xpu_ports.common.dispatch import Explanation, explain, reset_explain
from xpu_ports.quant.mxfp4.quantize import quantize_model

REPEATS = 3
# transformers' path is slow: fewer tokens give its rate as well.
PEER_TOKENS = 24
# Tokens of the short run that a rate leaves out.
FEW_TOKENS = 4


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """One variant at one batch size and prompt length. Times in seconds, rates over the whole batch."""

    variant: str
    batch: int
    prompt: int
    prefill_s: float
    prefill_tokens_per_s: float
    # Of the slowest and the fastest repetition.
    prefill_low: float
    prefill_high: float
    decode_tokens_per_s: float
    decode_low: float
    decode_high: float
    # Tokens that were decoded.
    new: int
    # Of one decode step run eagerly; None where they were not counted.
    launches: int | None = None
    kernel_ms: float | None = None
    weight_bytes: int = 0


def bench_model(
    name: str,
    layout: str | None,
    checkpoint: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    batches: list[int],
    prompts: list[int],
    new: int,
    peer: bool,
    out: Path | None,
    as_json: bool,
    compiled: bool = False,
    more: Callable[[Any], list[dict[str, Any]]] | None = None,
    packed: bool = False,
) -> None:
    """Measure and report; random weights where no checkpoint is given.

    Args:
        compiled: also the decode step through `torch.compile`, without our graphs.
        more: what else to measure of the model, as lines of the results.
        packed: with its weights in MXFP4, those that its layouts name in NOT_PACKED left as they are.

    Raises:
        ValueError: no such model or layout; weights are to be packed that a checkpoint or ranks have otherwise.
    """
    reset_explain()
    if packed and (checkpoint is not None or _common.ranks() > 1):
        raise ValueError("random weights are packed in one process: `xpu-ports convert` makes a checkpoint of others")
    peer = peer and not packed
    model, theirs = _build(name, layout, checkpoint, device, dtype, peer)
    if packed:
        layouts = importlib.import_module(f"xpu_ports.models.{name}.layouts")
        quantize_model(model, ignore=getattr(layouts, "NOT_PACKED", ()))
    results: list[ModelResult] = []
    for batch in batches:
        for prompt in prompts:
            # The same on all ranks.
            generator = torch.Generator(device).manual_seed(0)
            ids = torch.randint(3, model.config.vocab_size, (batch, prompt), device=device, generator=generator)
            if graph.graph_class(device) is not None:
                results.append(measure("captured", model, ids, new))
            with graph.use_graphs(False):
                results.append(measure("eager", model, ids, min(new, 48), count=True))
                if compiled:
                    results.append(_measure_compiled(model, ids, min(new, 48)))
            if theirs is not None:
                results.append(measure("transformers", theirs, ids, min(new, PEER_TOKENS), count=True))
            free(model)
    extra = [] if more is None else more(model)
    if _common.ranks() > 1:
        note = f"layers divided among {_common.ranks()} ranks: bytes, launches and kernels are the first's"
        extra.append({"kind": "note", "note": note})
    elif peer and theirs is None:
        note = "transformers' class has its weights under other names: it is measured with --checkpoint alone"
        extra.append({"kind": "note", "note": note})
    what = layout or str(checkpoint)
    _report(name, f"{what}-mxfp4" if packed else what, device, dtype, results, explain(show=False), out, as_json, extra)


def _build(
    name: str, layout: str | None, checkpoint: Path | None, device: torch.device, dtype: torch.dtype, peer: bool
) -> tuple[Any, Any]:
    """Our model and transformers' on the same weights, in the same memory; of several processes this one's part."""
    if name not in xpu_ports.models.PORTS:
        raise ValueError(f"no port of model type {name!r}; there are: {', '.join(xpu_ports.models.PORTS)}")
    class_name = xpu_ports.models.PORTS[name][1]["AutoModelForCausalLM"]
    ours = getattr(importlib.import_module(f"xpu_ports.models.{name}"), class_name)
    if checkpoint is not None and _common.ranks() > 1:
        return ours.from_pretrained(checkpoint, dtype=dtype, tp_plan="auto").eval(), None
    if checkpoint is not None:
        model = ours.from_pretrained(checkpoint, dtype=dtype).to(device)
    else:
        layouts = importlib.import_module(f"xpu_ports.models.{name}.layouts")
        config = layouts.layout_config(layout or next(iter(layouts.LAYOUTS)), dtype=dtype)
        if _common.ranks() > 1:
            return random_model(ours, config), None
        with default_dtype(dtype), torch.device(device):
            model = ours(config)
    model = model.eval()
    return model, _peer(class_name, model, checkpoint, dtype, device) if peer else None


def _peer(class_name: str, model: Any, checkpoint: Path | None, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model: on the memory of ours where it has the same weights, else loaded from the checkpoint.

    Returns:
        The model, or None where the weights are random and have other names or shapes than ours.
    """
    peer_class = getattr(importlib.import_module("transformers"), class_name)
    with torch.device("meta"):
        theirs = peer_class(model.config)
    ours = model.state_dict()
    if {k: t.shape for k, t in ours.items()} != {k: t.shape for k, t in theirs.state_dict().items()}:
        return None if checkpoint is None else peer_class.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    # Buffers that no checkpoint holds, such as rotary frequencies, stay on the meta device: take ours.
    theirs.load_state_dict(ours, assign=True)
    theirs.tie_weights()
    buffers = dict(model.named_buffers())
    for key, buffer in list(theirs.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = key.rpartition(".")
            theirs.get_submodule(owner).register_buffer(leaf, buffers[key].clone(), persistent=False)
    return theirs.eval()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def measure(variant: str, model: Any, ids: torch.Tensor, new: int, count: bool = False) -> ModelResult:
    """Prefill and decode through `generate`, ids [B, T]; several ranks give the times of the slowest.

    Args:
        variant: the name of the result.
        new: tokens to decode.
        count: also the kernels of one step, which then must not be captured.

    Raises:
        ValueError: times drown in noise.
    """
    batch, prompt = ids.shape
    synchronize = _synchronizer(ids.device)

    def generate(tokens: int) -> float:
        options = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        synchronize()
        return slowest(time.perf_counter() - start, model)

    generate(3)  # compiles, captures
    prefills = sorted(generate(1) for _ in range(REPEATS))
    rates = _rates(generate, batch, new)
    launches, kernel_ms = _count(model, ids) if count else (None, None)
    return ModelResult(
        variant=variant,
        batch=batch,
        prompt=prompt,
        new=new,
        **_figures(batch * prompt, prefills, rates),
        launches=launches,
        kernel_ms=kernel_ms,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


@torch.inference_mode()
def _measure_compiled(model: Any, ids: torch.Tensor, new: int) -> ModelResult:
    """The decode step as one graph of `torch.compile`, over a static cache; the prefill runs as it is."""
    batch, prompt = ids.shape
    synchronize = _synchronizer(ids.device)
    step = torch.compile(model, fullgraph=True)
    positions = torch.arange(prompt + new, device=ids.device)[None]

    def generate(tokens: int) -> float:
        cache = StaticCache(config=model.config, max_cache_len=prompt + new)
        synchronize()
        start = time.perf_counter()
        logits = model(input_ids=ids, cache=cache, logits_to_keep=1).logits
        for i in range(prompt, prompt + tokens - 1):
            token = logits[:, -1:].argmax(dim=-1)
            logits = step(input_ids=token, cache=cache, position_ids=positions[:, i : i + 1], logits_to_keep=1).logits
        synchronize()
        return slowest(time.perf_counter() - start, model)

    generate(4)  # compiles
    prefills = sorted(generate(1) for _ in range(REPEATS))
    rates = _rates(generate, batch, new)
    return ModelResult(
        variant="torch.compile",
        batch=batch,
        prompt=prompt,
        new=new,
        **_figures(batch * prompt, prefills, rates),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
    )


def _figures(tokens: int, prefills: list[float], rates: list[float]) -> dict[str, Any]:
    """The prefill of so many tokens and the rates of decoding, both from several repetitions in rising order."""
    prefill = statistics.median(prefills)
    return {
        "prefill_s": prefill,
        "prefill_tokens_per_s": tokens / prefill,
        "prefill_low": tokens / prefills[-1],
        "prefill_high": tokens / prefills[0],
        "decode_tokens_per_s": statistics.median(rates),
        "decode_low": rates[0],
        "decode_high": rates[-1],
    }


def _rates(generate: Callable[[int], float], batch: int, new: int) -> list[float]:
    """Tokens per second of a long run beyond a short one, in rising order.

    Prefill, and what the first steps set up, are in both and so in neither: on a busy host they vary by more than the
    steps take.

    Raises:
        ValueError: the difference drowns in noise.
    """
    rates: list[float] = []
    for _ in range(3 * REPEATS):
        short, long = generate(FEW_TOKENS), generate(new)
        # On a busy host the long run may be the shorter one, which says nothing.
        if long > short:
            rates.append(batch * (new - FEW_TOKENS) / (long - short))
        if len(rates) == REPEATS:
            break
    if rates:
        return sorted(rates)
    raise ValueError(f"{new} tokens took no longer than {FEW_TOKENS}, several times: decode more of them with --new")


def _count(model: Any, ids: torch.Tensor) -> tuple[int | None, float | None]:
    """Kernels launched by one eager decode step and the milliseconds that they took on the device."""
    if ids.device.type == "cpu":
        return None, None
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if ids.device.type == "cuda" else ProfilerActivity.XPU
    cache = model(input_ids=ids[:, :16], use_cache=True).cache
    token = ids[:, :1]
    for _ in range(3):
        model(input_ids=token, cache=cache, logits_to_keep=1)
    _synchronizer(ids.device)()
    with profile(activities=[activity, ProfilerActivity.CPU]) as profiled:
        model(input_ids=token, cache=cache, logits_to_keep=1)
        _synchronizer(ids.device)()
    kernels = [
        e
        for e in profiled.events()
        if e.device_type != torch.autograd.DeviceType.CPU and not e.name.startswith(("Memcpy", "Memset"))
    ]
    return len(kernels), sum(e.device_time_total for e in kernels) / 1e3


def _synchronizer(device: torch.device) -> Callable[[], None]:
    return (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize


def free(model: Any) -> None:
    """Give back a model's captured steps and what else is not in use."""
    model.__dict__.pop("_decode_graphs", None)
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _report(
    name: str,
    what: str,
    device: torch.device,
    dtype: torch.dtype,
    results: list[ModelResult],
    ledger: Explanation,
    out: Path | None,
    as_json: bool,
    extra: list[dict[str, Any]],
) -> None:
    lines: list[dict[str, Any]] = [
        {
            "kind": "model",
            "model": name,
            "layout": what,
            "dtype": str(dtype).removeprefix("torch."),
            **environment(device),
        }
    ]
    lines += [{"kind": "generate", **dataclasses.asdict(r)} for r in results]
    lines += extra
    lines += [{"kind": "explain", "explain": dataclasses.asdict(decision)} for decision in ledger]
    if as_json:
        for line in lines:
            print(json.dumps(line))
    else:
        console = Console(width=max(100, Console().width))
        console.print(_table(f"{name} {what}, {lines[0]['dtype']}", results))
        for line in extra:
            if line.get("kind") == "note":
                console.print(line["note"], highlight=False)
        console.print(str(ledger), highlight=False)
    if out is not None:
        sizes = f"b{'-'.join(str(b) for b in sorted({r.batch for r in results}))}"
        write_lines(out / f"model-{name}-{Path(what).name}-{sizes}.jsonl", lines)


def _table(title: str, results: list[ModelResult]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("batch", "prompt", "variant", "prefill tok/s", "decode tok/s", "low-high", "launches", "kernel ms"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for r in results:
        table.add_row(
            str(r.batch),
            str(r.prompt),
            r.variant,
            f"{r.prefill_tokens_per_s:,.0f}",
            f"{r.decode_tokens_per_s:,.1f}",
            f"{r.decode_low:,.1f}-{r.decode_high:,.1f}",
            "" if r.launches is None else str(r.launches),
            "" if r.kernel_ms is None else f"{r.kernel_ms:.2f}",
        )
    return table
