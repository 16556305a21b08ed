"""One model on the cards that this process is given, or is one of several of: what `scaling.py` starts.

    python benchmarks/scaling_part.py kimi_linear|deepseek_v4|deepseek_v4-more|flux2 FOLDER [--tiny]

Under torchrun, or with its variables, the model is divided. FOLDER gets a file of JSON lines, and what comes out of the
model, to be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import json
import os
import statistics
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xpu_ports.cli.bench_model import default_dtype, free, measure
from xpu_ports.common import dispatch
from xpu_ports.common.bench import scaling
from xpu_ports.common.bench.environment import environment
from xpu_ports.common.bench.ranks import random_model
from xpu_ports.common.bench.timing import Stopwatch
from xpu_ports.common.dispatch import use_backend
from xpu_ports.common.graph import SUBJECT, graph_class, use_graphs

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
# Seconds that ranks wait for each other, compilation included.
PATIENCE = 90
# Bytes that are left free of weights: context, buffers of collectives, captured steps, activations.
RESERVE = 9 << 30
MORE = "-more"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run of a language model, and the picture."""

    # Logits of so many tokens, of which by steps so many are a prompt.
    tokens: int = 64
    read: int = 32
    batches: tuple[int, ...] = (1, 32)
    prompt: int = 128
    # A prefill whose kernels are looked at.
    long: int = 4096
    new: int = 128
    eager_new: int = 32
    # Decode steps whose kernels are looked at.
    steps: int = 9
    # Tokens of a picture's side and of text.
    side: int = 64
    text: int = 512


TINY = Sizes(16, 8, (1, 2), 8, 32, 24, 12, 3, 4, 7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="the checkpoints of the repository")
    given = parser.parse_args()
    part = Part(given.model, given.folder, given.tiny)
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if part.device.type == "cuda" else None
    part.emit("environment", **environment(part.device), nccl=nccl)
    (pictures if part.name == "flux2" else language)(part)
    if part.cards > 1:
        dist.destroy_process_group()
    return 0


class Part:
    """One model on some cards: where it runs, and its lines."""

    def __init__(self, name: str, folder: Path, tiny: bool) -> None:
        self.name, self.folder, self.tiny = name, folder, tiny
        self.sizes = TINY if tiny else Sizes()
        self.rank, self.cards = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.begin = time.monotonic()
        kind = torch.accelerator.current_accelerator()
        self.device = torch.device("cpu") if kind is None else torch.device(kind.type, self.rank)
        if kind is None:
            torch.set_num_threads(1)
        else:
            torch.accelerator.set_device_index(self.rank)
        if self.cards > 1:
            backend = dist.get_default_backend_for_device(self.device)
            bound = {"device_id": self.device} if backend == "nccl" else {}
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=PATIENCE), **bound)

    def emit(self, kind: str, **fields: Any) -> None:
        """A line of the results, of the first rank."""
        if self.rank:
            return
        line = {"kind": kind, "model": self.name, "cards": self.cards, **fields}
        with (self.folder / f"{self.name}-{self.cards}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if kind == "explain":
            return
        text = ", ".join(f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in fields.items() if k != "error")
        print(f"  {self.name} x{self.cards} {time.monotonic() - self.begin:5.1f} s: {kind} {text[:160]}", flush=True)

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """What fails is said, and the rest goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.emit("failed", what=what, error=f"{type(error).__name__}: {error}"[:1500])
            print(f"    {type(error).__name__}: {str(error)[:400]}", flush=True)

    def save(self, what: str, value: Any) -> None:
        if self.rank == 0:
            torch.save(value, self.folder / f"{self.name}-{self.cards}-{what}.pt")

    def memory(self, when: str, model: Any) -> None:
        """Bytes of each card: weights, the most that was allocated, and what the device has given to all."""

        weights = sum(t.nbytes for t in map(_local, model.parameters()))
        mine = {"weights": weights, "peak": 0, "used": 0}
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            left, total = module.mem_get_info(self.device)
            mine |= {"peak": module.max_memory_allocated(self.device), "used": total - left}
        everyone: list[Any] = [mine] * self.cards
        if self.cards > 1:
            dist.all_gather_object(everyone, mine)
        self.emit("memory", when=when, **{key: [each[key] for each in everyone] for key in mine})


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


# ------------------------------------------------------------------------------------------------- language models


def language(part: Part) -> None:
    model_class, config = language_config(part)
    model = random_model(model_class, config, part.device if part.cards == 1 else None)
    _collect(part)
    part.emit("built", layers=config.num_hidden_layers, weights=sum(p.nbytes for p in model.parameters()))
    ids = random_ids(part, config, 1, part.sizes.tokens)
    if MORE not in part.name:
        with part.attempt("logits"), torch.no_grad(), use_graphs(False):
            compare_logits(part, model, ids)
        with part.attempt("eager"), use_graphs(False):
            rates(part, model, "eager", part.sizes.eager_new)
        part.memory("eager", model)
    # Last, should it fail or hang.
    if graph_class(part.device) is None:
        return
    with part.attempt("captured"):
        if MORE not in part.name:
            with torch.inference_mode():
                part.save("captured", scaling.logits_by_steps(model, ids, part.sizes.read).cpu())
        rates(part, model, "captured", part.sizes.new)
    part.memory("captured", model)
    if part.cards > 1 and MORE not in part.name:
        with part.attempt("sums"), torch.no_grad():
            for rows in (*part.sizes.batches, part.sizes.long):
                took = scaling.all_reduce_times(
                    model._ranks, rows, config.hidden_size, torch.bfloat16, part.device, 32 if rows < 100 else 4
                )
                part.emit("all_reduce", rows=rows, columns=config.hidden_size, **took)
        with part.attempt("without collectives"), scaling.without_collectives():
            rates(part, model, "captured, nothing sent", part.sizes.new)


def compare_logits(part: Part, model: Any, ids: Any) -> None:
    """Logits by kernels, by steps, by the references, in fp32, and with the experts that the references chose.

    Rounding alone makes some tokens choose other experts, whose outputs are others: with the experts given what is
    left is rounding.
    """

    def save(what: str, chosen: str = "", given: list[Any] | None = None) -> None:
        with scaling.chosen_experts(model, given) as experts:
            part.save(what, model(input_ids=ids, use_cache=False).logits[0].cpu())
        if chosen:
            part.save(chosen, experts)
        part.emit("logits", of=what, tokens=ids.shape[1])

    save("whole", "experts")
    part.save("steps", scaling.logits_by_steps(model, ids, part.sizes.read).cpu())
    routing = part.folder / f"{part.name}-1-reference_experts.pt"
    if part.cards == 1:
        with part.attempt("reference"), use_backend("reference"):
            save("reference", "reference_experts")
    given = torch.load(routing) if routing.exists() else None
    if given is not None:
        save("given", given=given)
        with scaling.chosen_experts(model, scaling.routing_by_steps(given, part.sizes.read)):
            part.save("steps_given", scaling.logits_by_steps(model, ids, part.sizes.read).cpu())
    if part.cards > 1:
        with part.attempt("oracle"), scaling.in_float32(model):
            save("oracle", "oracle_experts")
            if given is not None:
                save("oracle_given", given=given)


def language_config(part: Part) -> tuple[Any, Any]:
    from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
    from xpu_ports.models.deepseek_v4.layouts import LAYOUTS
    from xpu_ports.models.deepseek_v4.layouts import layout_config as deepseek_config
    from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
    from xpu_ports.models.kimi_linear.layouts import layout_config as kimi_config

    name = part.name.removesuffix(MORE)
    model_class: Any = {"kimi_linear": KimiLinearForCausalLM, "deepseek_v4": DeepseekV4ForCausalLM}[name]
    if part.tiny:
        config = model_class.config_class.from_pretrained(CHECKPOINTS / f"tiny-{name.replace('_', '-')}")
        config.dtype = torch.bfloat16
        return model_class, config
    if name == "kimi_linear":
        return model_class, kimi_config("48b", dtype=torch.bfloat16)
    ratios = LAYOUTS["flash"]["compress_ratios"]
    whole = deepseek_config("flash", dtype=torch.bfloat16)
    total = torch.get_device_module(part.device).get_device_properties(part.device).total_memory
    layers = layers_that_fit(model_class, whole, total, 2 if MORE in part.name else 1)
    return model_class, deepseek_config(
        "flash", dtype=torch.bfloat16, num_hidden_layers=layers, compress_ratios=[*ratios[:layers], 0]
    )


def layers_that_fit(model_class: Any, config: Any, memory: int, cards: int) -> int:
    """How many of a model's layers fit on cards of so many bytes, in the config's dtype."""
    with torch.device("meta"):
        model = model_class._from_config(config)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    held = sum(p.nbytes for p in model.parameters()) - sum(layers)
    # One of several ranks draws a layer's experts as a whole before it keeps its part.
    room = memory - RESERVE - (max(layers) if cards > 1 else 0)
    count = 0
    while count < len(layers) and (held + sum(layers[: count + 1])) / cards <= room:
        count += 1
    return count


def rates(part: Part, model: Any, variant: str, new: int) -> None:
    """Tokens a second, and what the device does in steps and in a prefill."""
    plain = "nothing" not in variant
    for batch in part.sizes.batches:
        ids = random_ids(part, model.config, batch, part.sizes.prompt)
        model.__dict__.pop("_decode_graphs", None)
        with part.attempt(f"{variant}, batch {batch}"):
            dispatch.reset_explain()
            rate = measure(variant, model, ids, new)
            ran = {(d.op, d.backend, d.reason) for d in dispatch.explain(show=False)}
            steps = sorted(f"{how}: {why}" for op, how, why in ran if op == SUBJECT)
            part.emit("rate", ran=steps, **dataclasses.asdict(rate))
            part.emit("explain", variant=variant, batch=batch, ops=sorted(map(str, ran)))
            if plain:
                with torch.inference_mode():
                    step = scaling.Decoding(model, ids)
                    for _ in range(3):
                        step()
                    busy(part, step, part.sizes.steps, variant=variant, what="decode", batch=batch)
        free(model)
    if variant == "eager":
        ids = random_ids(part, model.config, 1, part.sizes.long)
        with part.attempt("prefill"), torch.inference_mode():
            prefill = functools.partial(model, input_ids=ids, use_cache=True, logits_to_keep=1)
            seconds = times(part, prefill, 5)
            part.emit("prompt", tokens=part.sizes.long, seconds=seconds, tokens_per_s=part.sizes.long / seconds)
            busy(part, prefill, 3, variant=variant, what="prefill", batch=1)


def random_ids(part: Part, config: Any, batch: int, tokens: int) -> torch.Tensor:
    """The same on all ranks, [batch, tokens]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, config.vocab_size, (batch, tokens), generator=generator).to(part.device)


def times(part: Part, call: Callable[[], Any], repeats: int) -> float:
    """The median of a call's seconds by the slowest rank, warm."""
    stopwatch = Stopwatch(part.device)
    call()
    found = torch.tensor([stopwatch(call) for _ in range(repeats)], device=part.device)
    if part.cards > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def busy(part: Part, step: Callable[[], Any], steps: int, **what: Any) -> None:
    """A line for each rank with what its device does in a step; one that is late is waited for in collectives."""
    found = scaling.profiled(step, steps, part.device)
    everyone: list[Any] = [found] * part.cards
    if part.cards > 1:
        dist.all_gather_object(everyone, found)
    for rank, each in enumerate(everyone):
        if each is not None:
            part.emit("busy", **what, rank=rank, share=each.share, **dataclasses.asdict(each))


def _collect(part: Part) -> None:
    gc.collect()
    if part.device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.get_device_module(part.device).reset_peak_memory_stats(part.device)


# --------------------------------------------------------------------------------------------------------- pictures


def pictures(part: Part) -> None:
    from xpu_ports.cli.bench_pictures import Options, step

    model = picture_model(part)
    _collect(part)
    torch.manual_seed(0)
    options = Options(side=part.sizes.side, text=part.sizes.text)
    given = {k: v for k, v in step(model, torch.bfloat16, options, part.device).items() if v is not None}
    call = functools.partial(model, **given)
    with torch.no_grad(), use_graphs(False):
        with part.attempt("eager"):
            part.save("whole", _rows(call()[0]))
            part.emit("picture", variant="eager", seconds=times(part, call, 8), **dataclasses.asdict(options))
            busy(part, call, 3, variant="eager", what="step", batch=1)
            part.memory("eager", model)
        if part.cards == 1:
            with part.attempt("reference"), use_backend("reference"):
                part.save("reference", _rows(call()[0]))
            with part.attempt("oracle"), scaling.in_float32(model):
                wide = {k: v.float() if torch.is_tensor(v) else v for k, v in given.items()}
                part.save("oracle", _rows(model(**wide)[0]))
                part.emit("oracle")
    if part.cards == 1 and graph_class(part.device) is not None:
        with part.attempt("captured"), torch.no_grad():
            for _ in range(2):
                call()
            part.save("captured", _rows(call()[0]))
            part.emit("picture", variant="captured", seconds=times(part, call, 8), **dataclasses.asdict(options))
            part.memory("captured", model)


def _rows(output: Any) -> Any:
    return output[0].cpu()


def picture_model(part: Part) -> Any:
    """The transformer; each rank draws all of it, then diffusers leaves each its part."""
    from diffusers import TensorParallelConfig

    from xpu_ports.models.flux2 import Flux2Transformer2DModel
    from xpu_ports.models.flux2.layouts import LAYOUTS

    config: dict[str, Any] = dict(LAYOUTS["dev"])
    if part.tiny:
        read = json.loads((CHECKPOINTS / "tiny-flux2" / "transformer" / "config.json").read_text())
        config = {key: value for key, value in read.items() if not key.startswith("_")}
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model: Any = Flux2Transformer2DModel(**config)
    model.to_empty(device=part.device)
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator(part.device).manual_seed(zlib.crc32(name.encode()))
            if p.dim() > 1:
                # As wide as what nn.Linear draws.
                p.normal_(0.0, (3 * p.shape[1]) ** -0.5, generator=generator)
            else:
                p.fill_(1.0)
    model.requires_grad_(False).eval()
    part.emit("built", weights=sum(p.nbytes for p in model.parameters()))
    if part.cards > 1:
        model.enable_parallelism(config=TensorParallelConfig(tp_degree=part.cards))
    return model


if __name__ == "__main__":
    sys.exit(main())
