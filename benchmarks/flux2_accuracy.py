"""How far FLUX.2 here is from diffusers: by block, by latents after all steps, and in the picture.

    python benchmarks/flux2_accuracy.py [--checkpoint FOLDER] [--prompt TEXT] [--dtype DTYPE] [--steps N] [--out FOLDER]
        [--mxfp4]

Writes accuracy.jsonl and side-by-side.png (with --mxfp4, which packs our transformer's weights, mxfp4.jsonl and
mxfp4.png): ours, diffusers', and the difference of both times 16. For scale each
difference stands beside the one between diffusers in that dtype and diffusers in fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from xpu_ports.common.bench.environment import environment
from xpu_ports.common.dispatch import explain
from xpu_ports.models.flux2 import load_pipeline
from xpu_ports.models.flux2.packed import quantize_transformer

ROOT = Path(__file__).parents[1]
AMPLIFIED = 16
ENLARGED = 256


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default=str(ROOT / "checkpoints" / "tiny-flux2"))
    parser.add_argument("--prompt", default="a red three")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--side", type=int, default=64, help="pixels of the picture's side")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--text", type=int, default=32, help="tokens of text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu" / "flux2")
    parser.add_argument("--mxfp4", action="store_true", help="pack our transformer's weights")
    options = parser.parse_args()
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    dtype = getattr(torch, options.dtype)
    loaders = {
        "ours": (load_packed if options.mxfp4 else load_pipeline, dtype),
        "diffusers": (diffusers.DiffusionPipeline.from_pretrained, dtype),
        "fp32": (diffusers.DiffusionPipeline.from_pretrained, torch.float32),
    }
    runs = {name: draw(load(options.checkpoint, dtype=of).to(device), options) for name, (load, of) in loaders.items()}
    lines: list[dict[str, Any]] = [{"kind": "environment", **environment(device)}]
    for name in runs["ours"]:
        ours, theirs, exact = (runs[run][name].float() for run in ("ours", "diffusers", "fp32"))
        lines.append(
            {
                "kind": "difference", "of": name, "dtype": options.dtype, "mxfp4": options.mxfp4,
                "ours_to_diffusers": relative(ours, theirs),
                "ours_to_fp32": relative(ours, exact), "diffusers_to_fp32": relative(theirs, exact),
                "largest": (ours - theirs).abs().max().item(),
            }
        )  # fmt: skip
        print(json.dumps(lines[-1]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / ("mxfp4.jsonl" if options.mxfp4 else "accuracy.jsonl")).write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    side_by_side(runs["ours"]["picture"], runs["diffusers"]["picture"]).save(
        options.out / ("mxfp4.png" if options.mxfp4 else "side-by-side.png")
    )
    explain()
    return 0


def load_packed(*args: Any, **kwargs: Any) -> Any:
    """Our pipeline with MXFP4 weights."""
    pipe: Any = load_pipeline(*args, **kwargs)
    quantize_transformer(pipe.transformer)
    return pipe


def draw(pipe: Any, options: argparse.Namespace) -> dict[str, Tensor]:
    """Outputs of all blocks in the first forward of the transformer, the last latents, and the picture [H, W, 3]."""
    pipe.set_progress_bar_config(disable=True)
    found: dict[str, Tensor] = {}
    blocks = {f"double block {i}": b for i, b in enumerate(pipe.transformer.transformer_blocks)}
    blocks |= {f"single block {i}": b for i, b in enumerate(pipe.transformer.single_transformer_blocks)}
    handles = [block.register_forward_hook(keeper(found, name)) for name, block in blocks.items()]
    arguments = dict(
        prompt=options.prompt, height=options.side, width=options.side, num_inference_steps=options.steps,
        guidance_scale=options.guidance, max_sequence_length=options.text,
    )  # fmt: skip

    def keep_latents(pipe: Any, step: int, time: Any, kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        found["latents"] = kwargs["latents"].cpu()
        return kwargs

    generator = torch.Generator().manual_seed(0)
    [picture] = pipe(**arguments, generator=generator, output_type="np", callback_on_step_end=keep_latents).images
    for handle in handles:
        handle.remove()
    return {**found, "picture": torch.from_numpy(picture)}


def keeper(found: dict[str, Tensor], name: str) -> Any:
    """A hook that keeps a block's first output; of the two streams of a double block, which stand in either order."""

    def keep(block: nn.Module, arguments: tuple, output: Any) -> None:
        if name not in found:
            streams = [output] if isinstance(output, Tensor) else sorted(output, key=lambda t: t.shape[1])
            found[name] = torch.cat(streams, dim=1).cpu()

    return keep


def relative(x: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return ((x - expected).norm() / expected.norm()).item()


def side_by_side(ours: Tensor, theirs: Tensor) -> Image.Image:
    """Both pictures and their difference, amplified."""
    difference = ((ours - theirs).abs() * AMPLIFIED).clamp(0, 1)
    row = torch.cat([ours, theirs, difference], dim=1)
    picture = Image.fromarray((row.numpy() * 255).round().astype(np.uint8))
    scale = max(1, ENLARGED // ours.shape[0])
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


if __name__ == "__main__":
    sys.exit(main())
