"""A packed Llama of 503 M parameters on a CPU, beside transformers with compressed-tensors: time and memory.

    python benchmarks/mxfp4_cpu.py [OUT]

Makes the checkpoints (random weights, 280 MB each) in a temporary folder, then loads and runs each in a process of its
own, twice in turn. A line of the results: seconds of `from_pretrained`, of the first forward and of later ones
(on the wall, and of processor time over all threads), and the peak of the process's resident memory, beside what it was
when everything was imported and nothing loaded.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import xpu_ports.quant
from xpu_ports.common.bench.environment import environment
from xpu_ports.quant.mxfp4.quantize import quantize_model

OUT = Path(__file__).parent / "results" / "cpu" / "mxfp4-llama-503m.jsonl"
SIZES = {
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
SCHEMES = {"W4A16": None, "W4A4": "mxfp4"}
TOKENS = 16
LATER = 5
ROUNDS = 2
MB = 1e6


def make(folder: Path, activations: str | None) -> int:
    """Write the checkpoint; returns its number of parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().eval()
    parameters = sum(p.numel() for p in model.parameters())
    quantize_model(model, activations, ignore=["lm_head"]).save_pretrained(folder)
    return parameters


def measure(library: str, folder: Path) -> dict[str, Any]:
    """What one fresh process shows."""
    if library == "xpu_ports":
        xpu_ports.quant.register()
    else:
        # Not part of what is measured.
        import compressed_tensors.compressors  # noqa: F401
    input_ids = torch.arange(TOKENS)[None]
    before = _peak()
    marks = [_now()]
    model = AutoModelForCausalLM.from_pretrained(folder)
    marks.append(_now())
    with torch.no_grad():
        for _ in range(1 + LATER):
            logits = model(input_ids).logits
            marks.append(_now())
    assert logits.isfinite().all()
    found: dict[str, Any] = {"imported_mb": before / MB, "peak_mb": _peak() / MB}
    for clock, name in enumerate(("s", "cpu_s")):
        spans = [later[clock] - earlier[clock] for earlier, later in itertools.pairwise(marks)]
        found |= {f"load_{name}": spans[0], f"first_forward_{name}": spans[1]}
        found[f"later_forward_{name}"] = statistics.median(spans[2:])
    return found


def _now() -> tuple[float, float]:
    """Seconds on the wall, and of processor time, which other processes leave alone."""
    return time.perf_counter(), time.process_time()


def _peak() -> int:
    """Bytes. Not getrusage's figure, which a process begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> int:
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
        return 0
    out = Path(sys.argv[1]) if sys.argv[1:] else OUT
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(torch.device("cpu"))}]
    with tempfile.TemporaryDirectory() as temporary:
        for scheme, activations in SCHEMES.items():
            folder = Path(temporary) / scheme
            parameters = make(folder, activations)
            for turn in range(ROUNDS):
                for library in ("xpu_ports", "transformers"):
                    command = [sys.executable, __file__, "measure", library, str(folder)]
                    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    lines.append(
                        {
                            "kind": "load-and-run", "library": library, "scheme": scheme, "round": turn,
                            "parameters": parameters, "tokens": TOKENS, "threads": torch.get_num_threads(),
                            "load_average": os.getloadavg()[0], **json.loads(run.stdout.splitlines()[-1]),
                        }
                    )  # fmt: skip
                    print(json.dumps(lines[-1]), flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
