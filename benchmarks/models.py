"""Whole models with random weights at released sizes, beside transformers' classes; results in the folder OUT.

    python benchmarks/models.py [MODEL...]

A model's peers must not be on PYTHONPATH half-installed: transformers takes what it finds.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from xpu_ports.cli.bench_model import bench_model
from xpu_ports.common.bench.timing import measure_ceilings
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM

OUT = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
ROOT = Path(__file__).parents[1]
TINY, HELDOUT = ROOT / "checkpoints" / "tiny-deepseek-v4", ROOT / "tests" / "data" / "heldout.txt"
LONG_PROMPTS = (16384, 32768, 65536)
# Models of which the bytes that a step must read are counted.
ROOFS: dict[str, Any] = {"kimi_linear": KimiLinearForCausalLM, "deepseek_v4": DeepseekV4ForCausalLM}
# (model, layout, batch sizes, prompt lengths, tokens to decode, beside transformers, beside torch.compile)
RUNS = (
    ("zamba2", "1.2b", [1, 32], [128], 128, True, False),
    ("zamba2", "1.2b", [16], [2048], 16, True, False),
    ("zamba2", "2.7b", [1], [128], 64, False, False),
    ("zamba2", "7b", [1], [128], 64, False, False),
    # transformers' weights have other names than ours, so it does not run on the same memory.
    ("kimi_linear", "48b-8-layers", [1, 32], [128], 128, False, False),
    ("kimi_linear", "48b", [1], [128], 64, False, False),
    ("deepseek_v4", "flash-6-layers", [1, 8], [2048], 64, False, False),
    # Last: the compiler takes minutes.
    ("zamba2", "1.2b", [1], [128], 32, False, True),
)


def main(names: list[str]) -> int:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    for name, layout, batches, prompts, new, peer, compiled in RUNS:
        if names and name not in names:
            continue
        more = functools.partial(deepseek_lines, device=device) if name == "deepseek_v4" else None
        bench_model(name, layout, None, device, torch.bfloat16, batches, prompts, new, peer, OUT, False, compiled, more)
        torch.accelerator.empty_cache()
        if name in ROOFS:
            _print_roof(name, layout, device)
    return 0


def _print_roof(name: str, layout: str, device: torch.device) -> None:
    """What reading each weight that a decode step at batch 1 needs would take, at the speed of a copy."""
    layouts = importlib.import_module(f"xpu_ports.models.{name}.layouts")
    weight_reads = importlib.import_module(f"xpu_ports.models.{name}.memory").weight_reads
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = ROOFS[name](layouts.layout_config(layout))
    finally:
        torch.set_default_dtype(before)
    moved = sum(weight_reads(model.config, key, 1) * weight.nbytes for key, weight in model.named_parameters())
    copy = measure_ceilings(device).copy
    print(f"{name} {layout}: {moved / 1e9:.2f} GB a step at batch 1, at most {copy / moved:,.0f} tokens/s")


# ------------------------------------------------------------------------------------------ DeepSeek-V4: drafts, memory


def deepseek_lines(model: Any, device: torch.device) -> list[dict[str, Any]]:
    """Drafts, here and on the trained tiny checkpoint, what a cache takes, and the memory of long prompts."""
    lines = [*draft_lines(model, "random weights", torch.randint(3, 100, (1, 2048), device=device))]
    tiny = DeepseekV4ForCausalLM.from_pretrained(TINY, mtp=True, dtype=torch.bfloat16).to(device).eval()
    text = AutoTokenizer.from_pretrained(TINY)(HELDOUT.read_text()[:2000], return_tensors="pt").input_ids
    lines += draft_lines(tiny, "tiny-deepseek-v4", text[:, :128].to(device))
    model.__dict__.pop("_decode_graphs", None)
    lines += [prefill_line(model, tokens, dtype, device) for dtype in ("bf16", "fp8") for tokens in LONG_PROMPTS]
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


@torch.inference_mode()
def draft_lines(model: Any, what: str, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Tokens a second of one sequence, plain and with guesses, captured both."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def seconds(new: int, **drafts: Any) -> float:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options, **drafts)
        torch.accelerator.synchronize()
        return time.perf_counter() - start

    lines = []
    for number in (0, 1, 2):
        drafts = {"draft": "mtp", "num_draft_tokens": number} if number else {}
        seconds(8, **drafts)
        prefill = statistics.median(seconds(1, **drafts) for _ in range(3))
        took = statistics.median(seconds(129, **drafts) for _ in range(3)) - prefill
        acceptance = model.draft_acceptance if number else None
        # A round gives a token, and one for each right guess.
        rounds = 128 / took / (1 + number * acceptance) if number else None
        lines.append(
            {"kind": "drafts", "weights": what, "drafts": number, "prompt": ids.shape[1], "tokens_per_s": 128 / took,
             "acceptance": acceptance, "rounds_per_s": rounds}
        )  # fmt: skip
    return lines


@torch.inference_mode()
def prefill_line(model: Any, tokens: int, dtype: str, device: torch.device) -> dict[str, Any]:
    """The most memory that a prompt takes beside the weights, and what of it the cache is."""
    module = torch.get_device_module(device)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=device)
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.synchronize()
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    start = time.perf_counter()
    cache = DeepseekV4Cache(model.config, dtype)
    model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    torch.accelerator.synchronize()
    took = time.perf_counter() - start
    stores = {name: 0 for name in ("window", "entries", "state", "index_entries", "index_state")}
    for layer in cache.layers:
        for name, size in layer.memory().items():
            stores[name] += size
    return {
        "kind": "prefill",
        "cache_dtype": dtype,
        "tokens": tokens,
        "peak_bytes": module.max_memory_allocated(device) - before,
        "cache_bytes": cache.memory(),
        # What grows with the text.
        "bytes_per_token": (stores["entries"] + stores["index_entries"]) / tokens,
        "stores": stores,
        "seconds": took,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
