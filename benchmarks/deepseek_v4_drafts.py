"""Decoding with guesses beside plain decoding, on prompts of held-out text: the tokens must be the same.

    python benchmarks/deepseek_v4_drafts.py [--prompts 20] [--tokens 500] [--drafts 1] [--out FILE]

tiny-deepseek-v4 in fp32, greedy, on the accelerator if there is one. A line of the results is a prompt: whether both
gave the same tokens, how many guesses were right, and the seconds of each. Exits with 1 where tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from xpu_ports.common import dispatch
from xpu_ports.common.bench.environment import environment
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM

ROOT = Path(__file__).parents[1]
CHECKPOINT, TEXT = ROOT / "checkpoints" / "tiny-deepseek-v4", ROOT / "tests" / "data" / "heldout.txt"
RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results" / "cpu")
# Tokens of a prompt.
PROMPT = 64


def prompts(count: int) -> Tensor:
    """[count, PROMPT] tokens, from all over the text."""
    text = AutoTokenizer.from_pretrained(CHECKPOINT)(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, text.shape[0] - PROMPT, count).long()
    return text[starts[:, None] + torch.arange(PROMPT)]


@torch.no_grad()
def compare(model: Any, prompt: Tensor, tokens: int, drafts: int) -> dict[str, Any]:
    """One prompt [1, PROMPT] both ways."""
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    start = time.perf_counter()
    plain = model.generate(prompt, **options).tolist()
    between = time.perf_counter()
    drafted = model.generate(prompt, draft="mtp", num_draft_tokens=drafts, **options).tolist()
    return {
        "kind": "drafts",
        "tokens": tokens,
        "drafts": drafts,
        "same": plain == drafted,
        "acceptance": model.draft_acceptance,
        "plain_s": between - start,
        "drafted_s": time.perf_counter() - between,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--drafts", type=int, default=1, help="guesses at a time")
    parser.add_argument("--out", type=Path, default=RESULTS / "deepseek-v4-drafts.jsonl")
    options = parser.parse_args()
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    model = DeepseekV4ForCausalLM.from_pretrained(CHECKPOINT, mtp=True, dtype=torch.float32).eval().to(device)
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(device)}]
    for prompt in prompts(options.prompts).to(device).split(1):
        lines.append(compare(model, prompt, options.tokens, options.drafts))
        print(json.dumps(lines[-1]), flush=True)
    found = lines[1:]
    dispatch.explain()
    summary = {name: sum(line[name] for line in found) / len(found) for name in ("same", "acceptance")}
    for name in ("plain", "drafted"):
        summary[f"{name}_tokens_per_s"] = options.tokens * len(found) / sum(line[f"{name}_s"] for line in found)
    print(json.dumps(summary))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0 if all(line["same"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
