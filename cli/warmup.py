"""`xpu-ports warmup`: compile a checkpoint's kernels now, so that the first answer does not wait for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from xpu_ports.cli import _common


def warmup(
    checkpoint: _common.CheckpointArgument,
    batch: Annotated[str, typer.Option("--batch", metavar="N[,N]...", help="Batch sizes to prepare for.")] = "1",
    prompt: Annotated[str, typer.Option("--prompt", metavar="N[,N]...", help="Prompt lengths.")] = "16,100,512",
    device: _common.DeviceOption = "auto",
    dtype: _common.DtypeOption = _common.Dtype.AUTO,
    as_json: _common.JsonOption = False,
    verbose: _common.VerboseOption = False,
) -> None:
    """Run short texts of several lengths and batch sizes, which compiles every kernel that they need.

    Compiled kernels stay on disk, in Triton's cache, for later processes. Kernels differ by batch size and by whether
    lengths are multiples of 16, not by the lengths themselves.
    """
    batches, prompts = (_common.numbers(text, name) for text, name in ((batch, "--batch"), (prompt, "--prompt")))
    _common.check_checkpoint(checkpoint)
    with _common.stdout_kept_clean(as_json):
        result = run(checkpoint, batches, prompts, device, dtype, verbose)
    if as_json:
        _common.print_json(result)
        return
    where = f"in {result['cache']}" if result["cache"] else "in memory only: nothing is compiled on this device"
    print(f"{result['compiled']} kernels compiled in {result['seconds']:.1f} s, kept {where}")


def run(
    checkpoint: str, batches: list[int], prompts: list[int], device: str, dtype: _common.Dtype, verbose: bool
) -> dict[str, Any]:
    """The object that --json prints."""
    import torch

    model, _ = _common.load(checkpoint, _common.resolve_device(device), dtype, verbose)
    cache = _kernel_cache(model.device.type)
    before = _kernels(cache)
    start = time.perf_counter()
    for size in batches:
        for length in prompts:
            ids = torch.randint(model.config.vocab_size, (size, length), device=model.device)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None
            )
    return {
        **_common.describe(checkpoint, model),
        "batches": batches,
        "prompts": prompts,
        "compiled": len(_kernels(cache) - before),
        "seconds": time.perf_counter() - start,
        "cache": None if cache is None else str(cache),
    }


def _kernel_cache(device_type: str) -> Path | None:
    """Where Triton keeps compiled kernels; None on a device that runs none."""
    if device_type == "cpu":
        return None
    import os

    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _kernels(cache: Path | None) -> set[Path]:
    """The folders of compiled kernels, by the description that Triton writes last."""
    return set() if cache is None else {path.parent for path in cache.glob("*/__grp__*.json")}
