"""`xpu-ports convert`: checkpoints to MXFP4, to bf16, or to another layout of names, shard by shard."""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xpu_ports.cli import _common

if TYPE_CHECKING:
    from xpu_ports.quant.convert.formats import Source
    from xpu_ports.quant.convert.plan import Plan
    from xpu_ports.quant.convert.shards import Shard
    from xpu_ports.quant.convert.writer import Job


class To(enum.StrEnum):
    MXFP4 = "mxfp4"
    BF16 = "bf16"


class Layout(enum.StrEnum):
    HF = "hf"
    OFFICIAL = "official"


class Activations(enum.StrEnum):
    SOURCE = "source"
    NONE = "none"
    MXFP4 = "mxfp4"


class ScaleRule(enum.StrEnum):
    EVEN = "even"
    FLOOR = "floor"
    RCEIL = "rceil"


SourceArgument = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="Folder of the checkpoint; of FLUX.2 a single file too.", show_default=False),
]
TargetArgument = Annotated[
    Path, typer.Argument(metavar="DST", help="Folder to make, or an empty one.", show_default=False)
]
ToOption = Annotated[To | None, typer.Option("--to", help="What the weights become.", show_default=False)]
LayoutOption = Annotated[
    Layout | None,
    typer.Option(
        "--layout", help="Or: whose names they get, transformers' (diffusers') or the published.", show_default=False
    ),
]
ActivationsOption = Annotated[
    Activations, typer.Option("--activations", help="What layers round their input to: mxfp4 makes W4A4.")
]
ScaleRuleOption = Annotated[ScaleRule, typer.Option("--scale-rule", help="How a block's scale is chosen.")]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="NAME|re:PATTERN",
        help="A layer that is not quantized, as compressed-tensors means it; repeatable. Left out, FLUX.2's embeddings "
        "and last layers are not.",
        show_default=False,
    ),
]
FixScalesOption = Annotated[
    bool, typer.Option("--fix-scales", help="Multiply the scales of compressed-tensors before 0.14 by 4.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what each tensor becomes; write nothing.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a conversion that was stopped.")]
JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs", metavar="N", min=1, help="Files made at a time, a process each; of fewer files, tensors at a time."
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        help="Make the I-th of N parts, counted from 1, here or on another machine.",
        show_default=False,
    ),
]
MergeOption = Annotated[
    bool, typer.Option("--merge", help="Make one checkpoint of the parts that lie in DST; options as theirs.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Read the result again: its bytes, and the error of each tensor.")
]
ShardSizeOption = Annotated[
    float, typer.Option("--shard-size", metavar="GB", min=0, help="Largest file of weights, in 10^9 bytes.")
]


def convert(
    src: SourceArgument,
    dst: TargetArgument,
    to: ToOption = None,
    layout: LayoutOption = None,
    activations: ActivationsOption = Activations.SOURCE,
    scale_rule: ScaleRuleOption = ScaleRule.EVEN,
    ignore: IgnoreOption = None,
    fix_scales: FixScalesOption = False,
    dry_run: DryRunOption = False,
    resume: ResumeOption = False,
    jobs: JobsOption = 1,
    part: PartOption = None,
    merge: MergeOption = False,
    verify: VerifyOption = False,
    shard_size: ShardSizeOption = 5.0,
    verbose: _common.VerboseOption = False,
) -> None:
    """Convert a checkpoint: to MXFP4 (compressed-tensors), to bf16, or to another layout of names.

    Reads safetensors of any size in little memory: bf16, fp16 and fp32, and MXFP4 as compressed-tensors, gpt-oss,
    Quark, ModelOpt and DeepSeek-V4 (with its FP8) have it. A conversion that is stopped leaves no half file.

    Of FLUX.2 the transformer is converted: in a pipeline's folder, whose other parts are copied, by itself, or in a
    single file with Black Forest Labs' names, which --layout official makes.
    """
    if (to is None) == (layout is None):
        raise _common.UserError("say what to make: --to mxfp4, --to bf16, --layout hf or --layout official")
    if to != To.MXFP4:
        _only_for_mxfp4(activations, scale_rule, ignore)
    number = _part(part)
    if merge and (part or resume or dry_run):
        raise _common.UserError("--merge goes without --part, --resume and --dry-run")
    _check_source(src)
    _common.quiet_libraries(verbose)

    from xpu_ports.quant.convert import parts, writer

    source = _read(src, fix_scales)
    if layout is not None:
        plan = _plan_layout(source, layout)
    else:
        plan = _plan(source, to, activations, scale_rule, ignore or [])
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    job = whole = writer.job(plan, dst, max(1, round(shard_size * 1e9)))
    options = {
        "--to": str(to),
        "--layout": str(layout),
        "--activations": str(activations),
        "--scale-rule": str(scale_rule),
        "--ignore": ", ".join(ignore or []) or "none",
        "--fix-scales": str(fix_scales),
        "--shard-size": str(shard_size),
    }
    if number is not None:
        job = parts.part_job(whole, parts.Part(*number), options)
    if dry_run:
        _show(job)
        return
    if merge:
        count = parts.merge(whole, options)
        print(f"{dst}: {_size(whole.size)} in {_files(len(whole.shards))}, {count} parts merged")
    else:
        todo = writer.check_target(job, resume) if job is whole else parts.check_target(job, whole, resume)
        _write(job, todo, jobs)
    if verify:
        _verify(job)


def _part(text: str | None) -> tuple[int, int] | None:
    """(which, of how many)."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise _common.UserError(f"--part: expected I/N with I from 1 to N, as 2/4, found {text!r}")
    return int(found[1]), int(found[2])


def _only_for_mxfp4(activations: Activations, scale_rule: ScaleRule, ignore: list[str] | None) -> None:
    given = {
        "--activations": activations != Activations.SOURCE,
        "--scale-rule": scale_rule != ScaleRule.EVEN,
        "--ignore": bool(ignore),
    }
    for option in (name for name, is_given in given.items() if is_given):
        raise _common.UserError(f"{option} is for --to mxfp4")


def _check_source(src: Path) -> None:
    if not src.is_dir() and not _is_weights(src):
        hint = f"; `hf download {src}` fetches it first" if _common.may_be_on_hub(str(src)) else ""
        what = "a file, expected the folder with config.json and the weights" if src.exists() else "no such folder"
        raise _common.UserError(f"{src}: {what}{hint}")


def _is_weights(src: Path) -> bool:
    return src.is_file() and src.suffix == ".safetensors"


def _read(src: Path, fix_scales: bool) -> Source:
    from xpu_ports.quant.convert.formats import read_source

    if _is_weights(src):
        return _flux2().read_single_file(src)
    if (src / "model_index.json").is_file():
        return read_source(src, fix_scales, _flux2().PART)
    return read_source(src, fix_scales)


def _flux2() -> Any:
    """FLUX.2's side of a conversion, which diffusers is needed for."""
    try:
        return importlib.import_module("xpu_ports.models.flux2.conversion")
    except ImportError as error:
        raise _common.UserError(str(error)) from error


def _is_of_diffusers(source: Source) -> bool:
    return "_class_name" in source.config


def _port(source: Source) -> Any:
    """The port's class of a checkpoint's architecture; None where there is none."""
    from xpu_ports import models

    if _is_of_diffusers(source):
        return _flux2().port(source)
    model_type = str(source.config.get("model_type"))
    _, classes = models.PORTS.get(model_type, ("", {}))
    named = source.config.get("architectures") or ()
    name = next((name for name in classes.values() if name in named), None)
    return None if name is None else getattr(importlib.import_module(f"xpu_ports.models.{model_type}"), name)


def _plan(source: Source, to: To | None, activations: Activations, scale_rule: ScaleRule, ignore: list[str]) -> Plan:
    from xpu_ports.quant.convert.plan import ToMXFP4, plan_bf16, plan_mxfp4

    port = _port(source)
    if _is_of_diffusers(source):
        source = _flux2().checked(source)
        ignore = ignore or _flux2().DENSE
    if to == To.BF16:
        return plan_bf16(source, port)
    asked = None if activations == Activations.NONE else activations.value
    return plan_mxfp4(source, ToMXFP4(asked, scale_rule.value, tuple(ignore)), port)


def _plan_layout(source: Source, layout: Layout) -> Plan:
    from xpu_ports import models
    from xpu_ports.common.weights import expected_tensors
    from xpu_ports.quant.convert import model
    from xpu_ports.quant.convert.layouts import plan_layout

    if _is_of_diffusers(source):
        return _flux2().plan_layout(source, layout.value)
    model_type = source.config.get("model_type")
    rules = None
    if model_type in models.PORTS:
        name = f"xpu_ports.models.{model_type}.weight_rules"
        if importlib.util.find_spec(name) is not None:
            rules = getattr(importlib.import_module(name), "hf_rules", None)
    if rules is None:
        known = model_type in models.PORTS
        why = "its port has one layout only" if known else "there is no port of it"
        raise _common.UserError(f"{source.where}: --layout {layout} of model_type {model_type!r}: {why}")
    config = model.read_config(source.folder)
    # transformers' own class: its names are what "hf" means.
    cls = model.transformers_class(config, source.where)
    return plan_layout(source, layout.value, rules(config), expected_tensors(cls, config))


# -------------------------------------------------------------------------------------------------------------- output


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.2f} TB"


def _show(job: Job) -> None:
    from xpu_ports.quant.convert.writer import free_bytes

    rows = []
    for step in job.steps:
        first = step.outputs[0]
        shape = " x ".join(map(str, first.shape)) or "1"
        names = first.name if len(step.outputs) == 1 else f"{first.name}, {step.outputs[1].name.rpartition('.')[2]}"
        rows.append([names, step.label, str(first.dtype).removeprefix("torch."), shape, _size(step.bytes)])
    _common.print_table(["tensor", "how", "dtype", "shape", "bytes"], rows)
    before = sum(info.end - info.begin for info in job.plan.source.found.values())
    after = sum(step.bytes for step in job.steps)
    print()
    print(
        f"{job.plan.source.format}, {len(job.plan.source.found)} tensors, {_size(before)} -> {len(rows)} conversions, "
        f"{_size(after)} in {_files(len(job.shards)).removesuffix(' of weights')}; "
        f"copied besides: {', '.join(job.copied) or 'nothing'}; "
        f"{_size(free_bytes(job.target))} free for {_size(job.size)}. Nothing was written."
    )


def _files(count: int) -> str:
    return f"{count} {'file' if count == 1 else 'files'} of weights"


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with bytes, rate and time to go on a terminal's stderr; nothing in a file or a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns: list[Any] = [
        TextColumn(title),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)


def _write(job: Job, todo: Sequence[Shard], jobs: int) -> None:
    import torch

    from xpu_ports.quant.convert import writer

    processes = max(1, min(jobs, len(todo)))
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // jobs))
    try:
        with _progress("converting", sum(step.bytes for shard in todo for step in shard.steps)) as progress:
            not_finite = writer.write(job, todo, max(1, jobs // processes), progress, processes)
    finally:
        torch.set_num_threads(threads)
    for name, blocks in not_finite.items():
        print(f"warning: {name}: {blocks} blocks hold NaN or infinity, and are NaN", file=sys.stderr)
    done = f", {len(job.shards) - len(todo)} of them there already" if len(todo) < len(job.shards) else ""
    print(f"{job.target}: {_size(job.size)} in {_files(len(job.shards))}{done}")


def _verify(job: Job) -> None:
    from xpu_ports.quant.convert import verify

    rows, wrong, same = [], [], 0
    with _progress("verifying", sum(step.bytes for step in job.steps)) as progress:
        for checked in verify.verify(job, progress):
            wrong += [checked.wrong] if checked.wrong else []
            if checked.relative or checked.wrong:
                verdict = "wrong bytes" if checked.wrong else "as planned"
                rows.append([checked.name, checked.label, f"{checked.relative:.4f}", f"{checked.largest:.3g}", verdict])
            else:
                same += 1
    if rows:
        _common.print_table(["tensor", "how", "relative error (RMS)", "largest error", "bytes"], rows)
    print(f"{len(rows)} rounded, {same} exactly as in the source, {len(wrong)} wrong")
    if wrong:
        print(f"xpu-ports: {wrong[0]} is not what the source gives", file=sys.stderr)
        raise typer.Exit(1)
