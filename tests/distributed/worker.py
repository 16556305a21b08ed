"""What each rank runs: models divided among the ranks of a job, measured like one that is whole.

    torchrun --nproc-per-node N worker.py JOBS OUT

JOBS is a JSON file, name -> checkpoint and what to do with it; OUT gets a file with results for each rank.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CLASSES = {
    "zamba2": "Zamba2ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}
NEW_TOKENS = 100


def model_class(path: str | Path) -> Any:
    model_type = json.loads((Path(path) / "config.json").read_text())["model_type"]
    return getattr(importlib.import_module(f"xpu_ports.models.{model_type}"), CLASSES[model_type])


def load(path: str | Path, **kwargs: Any) -> Any:
    return model_class(path).from_pretrained(path, dtype=torch.float32, **kwargs)


@torch.no_grad()
def measure(model: Any, new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    """Logits of a text and of a batch with padding on either side, and a greedy continuation."""
    ids = torch.randint(3, model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    padded = model(ids, attention_mask=mask).logits
    greedy = model.generate(
        ids[:1, :20],
        attention_mask=mask[1:, :20],
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
    )
    return {"logits": model(ids[:1]).logits, "padded": padded[mask.bool()], "greedy": greedy}


def sizes(model: Any) -> dict[str, int]:
    """Bytes.

    held: of all parameters here. whole: of those that are whole on each rank. divided: of the others on all ranks
    together, but once; again: what of them ranks hold more than once. read: of the files.
    """
    from xpu_ports.common.parallel import parts_of

    ranks = dist.get_world_size()
    plans = [parts_of(model, model._parallel_plan(model.config, r, ranks), r, ranks) for r in range(ranks)]
    found = {"held": 0, "whole": 0, "divided": 0, "again": 0, "read": model.bytes_read}
    for name, p in model.named_parameters():
        found["held"] += p.nbytes
        if name not in model._parts:
            found["whole"] += p.nbytes
            continue
        divided = math.prod(model._parts[name].shape) * p.element_size()
        found["divided"] += divided
        # A bias is rank 0's, which others hold as zeros.
        found["again"] += sum(math.prod(plan[name].own) for plan in plans) * p.element_size() - divided
    return found


@torch.no_grad()
def of_random_weights(model_class: Any, config: Any, device: torch.device | None = None) -> torch.Tensor:
    """The logits of a model that no rank has had as a whole, or of the whole one where a device is given."""
    from xpu_ports.common.bench.ranks import random_model, slowest

    config.dtype = torch.float32
    model = random_model(model_class, config, device)
    if device is None:
        assert slowest(float(dist.get_rank()), model) == dist.get_world_size() - 1
    return model(torch.arange(3, 40)[None]).logits


def run(job: dict[str, Any]) -> dict[str, Any]:
    from xpu_ports.common import dispatch

    # Ranks begin with random numbers of their own.
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    dispatch.reset_explain()
    try:
        model = load(job["path"], tp_plan="auto", **job.get("load", {}))
    except ValueError as error:
        return {"error": str(error)}
    lines = [(d.backend, d.reason) for d in dispatch.explain(show=False) if d.op == "tensor parallel"]
    result = {**measure(model, job.get("new_tokens", NEW_TOKENS)), **sizes(model), "explain": lines}
    result["shapes"] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if "save" in job:
        model.save_pretrained(job["save"])
    if "draft" in job:
        with torch.no_grad():
            result["draft"] = model.generate(result["greedy"][:, :20], draft="mtp", max_new_tokens=30, do_sample=False)
    if "random" in job:
        result["random"] = of_random_weights(type(model), model.config)
    if "sample" in job:
        with torch.no_grad():
            result["sample"] = model.generate(result["greedy"][:, :9], do_sample=True, max_new_tokens=12)
    return result


def main() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {name: run(job) for name, job in jobs.items()}
    torch.save(results, out / f"rank{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
