"""`xpu-ports image`: draw a picture with FLUX.2, with its speed and what ran it."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from PIL.Image import Image

INDEX = "model_index.json"
FORMATS = (".png", ".jpg", ".jpeg", ".webp")


def image(
    checkpoint: _common.CheckpointArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to draw; - reads it from stdin.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it: .png, .jpg or .webp.")],
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="The pipeline's own when left out.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, metavar="G", help="Above 1 follows the prompt more.")] = None,
    height: Annotated[int | None, typer.Option(min=1, metavar="PIXELS", help="1024 when left out.")] = None,
    width: Annotated[int | None, typer.Option(min=1, metavar="PIXELS", help="1024 when left out.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="S", help="Of the noise.")] = 0,
    reference: Annotated[
        list[Path] | None, typer.Option("--image", metavar="FILE", help="A picture to edit; repeatable.")
    ] = None,
    text_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of text; 512.")] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Only the part that runs is on the device.")] = False,
    device: _common.DeviceOption = "auto",
    dtype: _common.DtypeOption = _common.Dtype.AUTO,
    backend: _common.BackendOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Then tell which back end ran each op, and why.")] = False,
    as_json: _common.JsonOption = False,
    verbose: _common.VerboseOption = False,
) -> None:
    """Draw a picture: into a file, then its speed to stderr.

    The time includes compiling kernels that are used for the first time.
    """
    check_checkpoint(checkpoint)
    check_out(out)
    prompt = _common.read_prompt(prompt)
    wanted = {
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "height": height,
        "width": width,
        "max_sequence_length": text_tokens,
        "image": [read_picture(path) for path in reference or []] or None,
    }
    setup = _common.Setup(device, dtype, backend, verbose)
    with _common.stdout_kept_clean(as_json):
        result = run(checkpoint, prompt, setup, seed, {k: v for k, v in wanted.items() if v is not None}, out, offload)
    if as_json:
        _common.print_json(result)
        return
    print(
        f"{out}: {result['width']} x {result['height']}, {result['steps']} steps in {result['seconds']:.2f} s "
        f"({result['dtype']} on {result['device']})",
        file=sys.stderr,
    )
    if explain:
        rows = [[d["op"], d["backend"], d["device"], str(d["calls"]), d["reason"]] for d in result["explain"]]
        _common.print_table(["op", "back end", "device", "calls", "why"], rows, stderr=True)


def check_checkpoint(checkpoint: str) -> None:
    """Look at a local pipeline before anything heavy is imported; a name on the Hub passes.

    Raises:
        UserError: no such folder, or not a pipeline of FLUX.2.
    """
    folder = Path(checkpoint).expanduser()
    if not folder.exists():
        if _common.may_be_on_hub(checkpoint):
            return
        raise _common.UserError(f"{checkpoint}: no such folder")
    path = folder / INDEX
    if not path.is_file():
        raise _common.UserError(f"{checkpoint}: not a diffusers pipeline: there is no {INDEX} in it")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _common.UserError(f"{path}: not JSON: {error}") from error
    name = index.get("_class_name") if isinstance(index, dict) else None
    if not str(name).startswith("Flux2"):
        raise _common.UserError(f"{path}: _class_name is {name!r}, expected a pipeline of FLUX.2")


def check_out(out: Path) -> None:
    """Find out before the work is done.

    Raises:
        UserError: a format that is not written, or a folder that is not there.
    """
    if out.suffix.lower() not in FORMATS:
        raise _common.UserError(f"--out is {str(out)!r}, expected a name that ends in {', '.join(FORMATS)}")
    if not out.parent.is_dir():
        raise _common.UserError(f"--out {out}: no such folder: {out.parent}")


def read_picture(path: Path) -> Image:
    """A picture in RGB.

    Raises:
        UserError: there is none that can be read.
    """
    try:
        from PIL import Image

        return Image.open(path).convert("RGB")
    except ImportError as error:
        raise _common.UserError(f"--image needs Pillow: pip install 'xpu-ports[flux2]' ({error})") from error
    except OSError as error:
        raise _common.UserError(f"--image {path}: {error}") from error


def run(
    checkpoint: str,
    prompt: str,
    setup: _common.Setup,
    seed: int,
    arguments: dict[str, Any],
    out: Path,
    offload: bool,
) -> dict[str, Any]:
    """Load, draw, write, and tell all of it: the object that --json prints.

    Args:
        checkpoint, prompt: as given.
        setup: where and how.
        seed: of the noise, which is drawn on the CPU: the same on every device.
        arguments: of the pipeline.
        out: the file.
        offload: keep on the device only the part that runs.
    """
    import torch

    from xpu_ports.common import dispatch

    device = _common.resolve_device(setup.device)
    pipe = load(checkpoint, setup, device, offload)
    check_size(pipe, arguments)
    dispatch.reset_explain()
    with _common.forced(setup.backend):
        start = time.perf_counter()
        # Pictures come back on the CPU, so the device is done with them.
        [picture] = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **arguments).images
        seconds = time.perf_counter() - start
    picture.save(out)
    return {
        "checkpoint": checkpoint,
        "pipeline": type(pipe).__name__,
        "out": str(out),
        "width": picture.width,
        "height": picture.height,
        "steps": pipe.num_timesteps,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
        "device": str(device),
        "device_name": _common.device_name(device),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "versions": _common.versions(),
        "explain": [dataclasses.asdict(decision) for decision in dispatch.explain(show=False)],
    }


def load(checkpoint: str, setup: _common.Setup, device: Any, offload: bool) -> Any:
    """The pipeline on its device; auto is the published files' dtype.

    Raises:
        UserError: diffusers is not installed, or offloading has nowhere to go from.
    """
    import torch

    _common.quiet_libraries(setup.verbose)
    try:
        from xpu_ports.models.flux2 import load_pipeline
        from xpu_ports.models.flux2.diffusers_api import disable_progress_bar
    except ImportError as error:
        raise _common.UserError(str(error)) from error
    if not setup.verbose:
        logging.getLogger("diffusers").setLevel(logging.ERROR)
    # Of the parts that are loaded, which takes no time next to the steps.
    disable_progress_bar()
    if offload and device.type == "cpu":
        raise _common.UserError("--offload moves parts to a device and back, and there is only the CPU")
    dtype = torch.bfloat16 if setup.dtype == _common.Dtype.AUTO else getattr(torch, setup.dtype.value)
    pipe: Any = load_pipeline(str(Path(checkpoint).expanduser()), dtype=dtype)
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty(), unit="step")
    if offload:
        pipe.enable_model_cpu_offload(device=device)
        return pipe
    return pipe.to(device)


def check_size(pipe: Any, arguments: dict[str, Any]) -> None:
    """A token is a square of pixels, and a picture has whole ones.

    Raises:
        UserError: it would be cut, without a word.
    """
    side = 2 * pipe.vae_scale_factor
    for name in ("height", "width"):
        if arguments.get(name, side) % side:
            raise _common.UserError(f"--{name} is {arguments[name]}, expected a multiple of {side}")
