"""What the commands share: options, loading a checkpoint, tables, JSON, and the error that users see.

Nothing heavy is imported at the top: `xpu-ports --help` reads every command file.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

XPU_INDEX = "https://download.pytorch.org/whl/xpu"
INSTALL_XPU = f"pip install torch --index-url {XPU_INDEX}"


class UserError(Exception):
    """Something that the user can put right: shown as one line, exit code 2."""


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True)
class Setup:
    """What the options say about where and how a model runs."""

    device: str
    dtype: Dtype
    backend: str | None
    verbose: bool


CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="Folder of a checkpoint, or its name on the Hub.", show_default=False)
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|xpu|cuda",
        help="auto takes an XPU, then a CUDA device, then the CPU. With an index where there are several: xpu:1.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="auto takes the dtype that the checkpoint names.")]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="SPEC",
        help="Force back ends, as XPU_PORTS_BACKEND does: triton, or gated_rms_norm=reference,triton.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Warnings of libraries, and the traceback of an error.")
]


def numbers(text: str, option: str) -> list[int]:
    """The positive numbers of an option such as `--batch 1,32`.

    Raises:
        UserError: it is something else.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise UserError(f"{option} is {text!r}, expected positive numbers with commas between them")
    return values


# -------------------------------------------------------------------------------------------------- several processes


def ranks() -> int:
    """How many processes torchrun has started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is."""
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """While the block runs, only the first of several processes prints; errors leave the block and are printed by each.

    What they share is taken down at the end, unless there was an error, when the others may be waiting.
    """
    if ranks() == 1:
        yield
        return
    with contextlib.ExitStack() as stack:
        if rank() > 0:
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        yield
        import torch.distributed

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- devices


def describe_build(xpu: str | None, cuda: str | None, hip: str | None) -> str:
    """What a torch build is for, by its `torch.version.xpu`, `.cuda` and `.hip`."""
    if xpu:
        return f"XPU {xpu}"
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {hip}" if hip else "the CPU only"


def resolve_device(name: str) -> torch.device:
    """The device that `--device` names; of several processes each has its own.

    Raises:
        UserError: there is no such device here; says which torch is installed and what to do.
    """
    kind, _, index = name.partition(":")
    if ranks() > 1:
        if index:
            raise UserError(f"--device {name}: each of {ranks()} processes has a device of its own, without an index")
        device = _one_device(kind, "", name)
        return device if device.type == "cpu" else _one_device(device.type, os.environ["LOCAL_RANK"], name)
    return _one_device(kind, index, name)


def _one_device(kind: str, index: str, name: str) -> torch.device:
    import torch

    if kind == "auto" and not index:
        kind = next((k for k in ("xpu", "cuda") if getattr(torch, k).is_available()), "cpu")
        return torch.device(kind)
    if kind not in ("cpu", "xpu", "cuda") or (":" in name and not name.partition(":")[2].isdecimal()):
        raise UserError(f"--device is {name!r}, expected auto, cpu, xpu or cuda, or one of several as in xpu:1")
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind)
    if not module.is_available():
        version = torch.version
        raise UserError(
            f"--device {name}: torch {torch.__version__}, built for "
            f"{describe_build(version.xpu, version.cuda, version.hip)}, finds no {kind.upper()} device; "
            + _what_to_do(kind, built=bool(getattr(version, kind)))
        )
    if int(index or 0) >= module.device_count():
        wanted = f"--device {name}" if ranks() == 1 else f"process {rank()} of {ranks()}"
        raise UserError(f"{wanted}: the last {kind} device is {kind}:{module.device_count() - 1}")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def _what_to_do(kind: str, built: bool) -> str:
    if built:
        return "`xpu-ports doctor` looks for the cause"
    if kind == "xpu":
        return f"for Intel GPUs: {INSTALL_XPU}"
    return "for NVIDIA GPUs: pip install torch from the index of your CUDA version"


def device_name(device: torch.device) -> str:
    import torch

    if device.type == "cpu":
        return cpu_name()
    return getattr(torch, device.type).get_device_name(device)


def cpu_name() -> str:
    """The processor as the system names it; Linux does so in /proc alone."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


# ----------------------------------------------------------------------------------------------------------- loading


def supported_model_types() -> list[str]:
    """The model types of language models that there is a port for."""
    from xpu_ports import models

    return sorted(name for name, (_, classes) in models.PORTS.items() if "AutoModelForCausalLM" in classes)


def check_checkpoint(checkpoint: str) -> None:
    """Look at a local checkpoint before anything heavy is imported; a name on the Hub passes.

    Raises:
        UserError: no such folder, not a checkpoint, or a model that there is no port for.
    """
    folder = Path(checkpoint).expanduser()
    if not folder.exists():
        if may_be_on_hub(checkpoint):
            return
        raise UserError(f"{checkpoint}: no such folder")
    if not folder.is_dir():
        raise UserError(f"{checkpoint}: a file, expected the folder with config.json and the weights")
    path = folder / "config.json"
    if not path.is_file():
        pipeline = (folder / "model_index.json").is_file()
        what = "a diffusers pipeline, not a language model" if pipeline else "not a checkpoint"
        raise UserError(f"{checkpoint}: {what}: there is no config.json in it")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    found = config.get("model_type") if isinstance(config, dict) else None
    check_model_type(found, str(path))


def may_be_on_hub(checkpoint: str) -> bool:
    """Whether it looks like owner/name, and owner is not a folder here, in which name is a slip."""
    owner, slash, name = checkpoint.partition("/")
    return bool(slash and name) and "/" not in name and owner[:1] not in ("", ".", "~") and not Path(owner).exists()


def check_model_type(found: str | None, where: str) -> str:
    """The model type that a config.json names.

    Raises:
        UserError: there is no port of it.
    """
    known = supported_model_types()
    if found is None or found not in known:
        what = "missing" if found is None else repr(found)
        raise UserError(f"{where}: model_type is {what}, expected one that there is a port for: {', '.join(known)}")
    return found


def load(
    checkpoint: str, device: torch.device, dtype: Dtype, verbose: bool = False
) -> tuple[Any, PreTrainedTokenizerBase]:
    """The port of a checkpoint on its device, and its tokenizer.

    Args:
        checkpoint: a folder that `check_checkpoint` has passed, or a name on the Hub.
        device: where all of it goes; of several processes each takes its part of every layer.
        dtype: of its weights.
        verbose: let libraries warn.

    Raises:
        UserError: the checkpoint is not one that can be run.
        ValueError, OSError: a file of it is missing, damaged, or holds what the model does not expect.
    """
    quiet_libraries(verbose)
    checkpoint = str(Path(checkpoint).expanduser())
    model_type = model_type_of(checkpoint)
    where: dict[str, Any] = {"device_map": {"": device}} if ranks() == 1 else {"tp_plan": "auto"}
    model = port(model_type).from_pretrained(checkpoint, dtype=dtype.value, **where)
    stray = {p.device.type for p in model.parameters()} - {device.type}
    if stray:
        raise UserError(f"{checkpoint}: asked for {device}, but weights are on {', '.join(sorted(stray))}")
    return model.eval(), _load_tokenizer(checkpoint)


def model_type_of(checkpoint: str) -> str:
    """The model type of a language model, which the Hub is asked for where there is no such folder.

    Raises:
        UserError: there is no such checkpoint, or no port of it.
    """
    from xpu_ports.common.configuration import find_config, read_config

    try:
        config = find_config(checkpoint)
    except OSError as error:
        # Only a name on the Hub gets here: a folder without the file has been refused before.
        raise UserError(f"{checkpoint}: no such folder, and the Hub does not give it: {error}") from error
    return check_model_type(read_config(config).get("model_type"), config)


def port(model_type: str) -> type[PreTrainedModel]:
    """The class that runs language models of a type, out of `supported_model_types()`."""
    from xpu_ports import models

    _, classes = models.PORTS[model_type]
    return getattr(importlib.import_module(f"xpu_ports.models.{model_type}"), classes["AutoModelForCausalLM"])


def _load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint)
    except Exception as error:
        # The tokenizers library raises a bare Exception for a file that it cannot read.
        raise UserError(f"{checkpoint}: the tokenizer cannot be loaded: {error}") from error


def quiet_libraries(verbose: bool) -> None:
    """Keep warnings and, where nobody watches, progress bars off stderr."""
    import huggingface_hub.utils.logging as hub_logging
    from transformers.utils import logging

    if not verbose:
        logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def read_prompt(prompt: str) -> str:
    """The prompt; "-" reads it from stdin, less the newline that ends its last line.

    Raises:
        UserError: it is empty.
    """
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text.strip():
        raise UserError("PROMPT is empty" + (": nothing came from stdin" if prompt == "-" else ""))
    return text


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask of a prompt, [1, T] on the device."""
    inputs = tokenizer(prompt, return_tensors="pt")
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


@contextlib.contextmanager
def forced(backend: str | None) -> Iterator[None]:
    """Run a block with the back ends that `--backend` forces, if any."""
    if backend is None:
        yield
        return
    from xpu_ports.common import dispatch

    with dispatch.use_choices(backend, where="--backend"):
        yield


@contextlib.contextmanager
def loaded(checkpoint: str, setup: Setup) -> Iterator[tuple[Any, PreTrainedTokenizerBase]]:
    """`load`, and a block in which the model runs with the back ends that are forced."""
    with forced(setup.backend):
        yield load(checkpoint, resolve_device(setup.device), setup.dtype, setup.verbose)


# ------------------------------------------------------------------------------------------------------------ output


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; Triton's is None without it."""
    from xpu_ports.common import tritonlib

    return {
        **{name: importlib.metadata.version(name) for name in ("xpu-ports", "torch", "transformers")},
        "triton": tritonlib.triton.__version__ if tritonlib.AVAILABLE else None,
        "python": platform.python_version(),
    }


def describe(checkpoint: str, model: PreTrainedModel) -> dict[str, Any]:
    """What was loaded and where, for JSON and for the line above a table."""
    return {
        "checkpoint": checkpoint,
        "model_type": model.config.model_type,
        "model_class": f"{type(model).__module__}.{type(model).__name__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": str(model.device),
        "device_name": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }


@contextlib.contextmanager
def stdout_kept_clean(clean: bool) -> Iterator[None]:
    """While the block runs, send what libraries print to stderr, so that stdout holds one JSON object."""
    with contextlib.redirect_stdout(sys.stderr) if clean else contextlib.nullcontext():
        yield


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))


def print_rich(renderable: Any, stderr: bool = False) -> None:
    """Print a rich object; in a file or a pipe a row stays one line, without colors."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 10_000, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), file=stream, flush=True)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], stderr: bool = False) -> None:
    """A table without a frame; columns of calls are aligned at the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(Text(name), justify="right" if name.endswith("calls") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    print_rich(table, stderr)
