"""Conversions in parts and by several processes: the bytes of one in one go, and what keeps parts from being merged."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import KimiLinearForCausalLM

from tests.quant.convert.sources import write
from tests.quant.producers import tiny_llama
from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.common.weights import expected_tensors
from xpu_ports.models.kimi_linear.weight_rules import hf_rules
from xpu_ports.quant.convert import model, parts, writer
from xpu_ports.quant.convert.formats import Source, read_source
from xpu_ports.quant.convert.layouts import plan_layout
from xpu_ports.quant.convert.parts import Part
from xpu_ports.quant.convert.plan import Plan, ToMXFP4, plan_bf16, plan_mxfp4
from xpu_ports.quant.convert.writer import STATE, Job

HERE = Path(__file__).parent
KIMI = HERE.parents[2] / "checkpoints" / "tiny-kimi-linear"
# Bytes of a file.
LIMIT = 12_000
OPTIONS = {"--to": "mxfp4", "--scale-rule": "even"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    tiny_llama().bfloat16().save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> Job:
    return writer.job(plan_mxfp4(read_source(source), ToMXFP4()), tmp_path / "target", LIMIT)


def begin(whole: Job, part: Part, resume: bool = False) -> tuple[Job, list]:
    job = parts.part_job(whole, part, OPTIONS)
    return job, parts.check_target(job, whole, resume)


def make(whole: Job, part: Part, resume: bool = False, progress: Callable[[int], None] = lambda _: None) -> None:
    job, todo = begin(whole, part, resume)
    writer.write(job, todo, 1, progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --------------------------------------------------------------------------------------------------------------- bytes


def _mxfp4(source: Source) -> Plan:
    return plan_mxfp4(source, ToMXFP4(activations="mxfp4"))


def _layout(layout: str) -> Callable[[Source], Plan]:
    def planned(source: Source) -> Plan:
        config = model.read_config(source.folder)
        return plan_layout(source, layout, hf_rules(config), expected_tensors(KimiLinearForCausalLM, config))

    return planned


@pytest.mark.parametrize(
    ("plan", "limit"),
    [(_mxfp4, 300_000), (plan_bf16, 800_000), (_layout("hf"), 800_000), (_layout("official"), 800_000)],
    ids=["mxfp4", "bf16", "hf", "official"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_merged_parts_are_one_conversion(
    tmp_path: Path, plan: Callable[[Source], Plan], limit: int, count: int
) -> None:
    planned = plan(read_source(KIMI))
    write(planned, tmp_path / "one", limit)
    whole = writer.job(planned, tmp_path / "parts", limit)
    assert len(whole.shards) > 3
    for number in range(count, 0, -1):
        make(whole, Part(number, count))
    assert parts.merge(whole, OPTIONS) == count
    made = contents(tmp_path / "parts")
    assert made == contents(tmp_path / "one")
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= made.keys()


def test_parts_are_made_at_the_same_time(whole: Job, tmp_path: Path) -> None:
    """Another begins, and ends, while one is in the middle of a file."""
    done: list[Part] = []

    def others(_: int) -> None:
        for part in (Part(1, 3), Part(3, 3)):
            if part not in done:
                done.append(part)
                make(whole, part, progress=others)

    make(whole, Part(2, 3), progress=others)
    parts.merge(whole, OPTIONS)
    write(whole.plan, tmp_path / "one", LIMIT)
    assert contents(whole.target) == contents(tmp_path / "one")


def test_folders_that_are_brought_together(whole: Job, source: Path, tmp_path: Path) -> None:
    """As of machines that share no disk and have copies of the source of their own."""
    copy = Path(shutil.copytree(source, tmp_path / "elsewhere", copy_function=shutil.copyfile))
    there = writer.job(plan_mxfp4(read_source(copy), ToMXFP4()), tmp_path / "their-target", LIMIT)
    assert there.fingerprint != whole.fingerprint
    make(there, Part(2, 2))
    make(whole, Part(1, 2))
    shutil.copytree(there.target, whole.target, dirs_exist_ok=True)
    parts.merge(whole, OPTIONS)
    write(whole.plan, tmp_path / "one", LIMIT)
    assert contents(whole.target) == contents(tmp_path / "one")


def test_every_shard_is_of_one_part(whole: Job) -> None:
    for count in range(1, len(whole.shards) + 1):
        made = [parts.part_job(whole, Part(i, count), OPTIONS).shards for i in range(1, count + 1)]
        assert [shard for shards in made for shard in shards] == list(whole.shards)
        assert max(map(len, made)) - min(map(len, made)) <= 1
    with pytest.raises(CheckpointError, match=r"a file for each of 99 parts, found \d+ in all; --shard-size"):
        parts.part_job(whole, Part(1, 99), OPTIONS)


# ---------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_point(source: Path, tmp_path: Path, every: int) -> None:
    """Within a part, between two, and while they are merged."""
    command = [sys.executable, HERE / "killed.py", source, tmp_path, "60000", str(every), "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 80


def test_a_part_is_gone_on_with(whole: Job) -> None:
    def stop(_: int) -> None:
        if len(list(whole.target.glob("*.safetensors"))) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(whole, Part(1, 2), progress=stop)
    make(whole, Part(2, 2))
    with pytest.raises(CheckpointError, match=r"expected nothing of this part, found .*--resume goes on"):
        begin(whole, Part(1, 2))
    with pytest.raises(CheckpointError, match=r"part 1/2 done, found .*; --part 1/2 --resume goes on"):
        parts.merge(whole, OPTIONS)
    job, todo = begin(whole, Part(1, 2), resume=True)
    assert len(todo) == len(job.shards) - 1
    writer.write(job, todo, 1, lambda _: None)
    # Once more changes nothing.
    assert begin(whole, Part(1, 2), resume=True)[1] == []
    parts.merge(whole, OPTIONS)
    assert parts.merge(whole, OPTIONS) == 0


def test_the_same_part_twice_at_once(whole: Job) -> None:
    def second(_: int) -> None:
        with pytest.raises(CheckpointError, match=r"expected one conversion at a time, found another at work"):
            make(whole, Part(1, 2), resume=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(whole, Part(1, 2), progress=second)


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_part_is_missing(whole: Job) -> None:
    whole.target.mkdir()
    with pytest.raises(CheckpointError, match=r"expected parts to merge, found none; --part makes one"):
        parts.merge(whole, OPTIONS)
    make(whole, Part(2, 4))
    with pytest.raises(
        CheckpointError, match=r"expected parts 1/4 to 4/4, found no 1/4, 3/4, 4/4; --part 1/4 makes it"
    ):
        parts.merge(whole, OPTIONS)
    assert not (whole.target / "config.json").exists()


def test_a_part_is_there_twice(whole: Job) -> None:
    for number in (1, 2):
        make(whole, Part(number, 2))
    index = whole.target / Part(2, 2).index
    shutil.copy(index, index.with_name("part-00002-of-00002.index (1).json"))
    with pytest.raises(CheckpointError, match=r"expected part 2/2 once, found .*\(1\).json and part-00002-of-00002"):
        parts.merge(whole, OPTIONS)


def test_parts_of_other_counts(whole: Job) -> None:
    make(whole, Part(1, 2))
    with pytest.raises(
        CheckpointError, match=r"part-00001-of-00002.index.json: parts: expected 3, as asked for, found 2"
    ):
        begin(whole, Part(2, 3))
    other = writer.job(whole.plan, whole.target.with_name("other"), LIMIT)
    make(other, Part(2, 3))
    shutil.copytree(other.target, whole.target, dirs_exist_ok=True)
    with pytest.raises(
        CheckpointError, match=r"00003.index.json: parts: expected 2, as in part-00001-of-00002.index.json"
    ):
        parts.merge(whole, OPTIONS)


def test_parts_of_other_options(whole: Job, source: Path) -> None:
    """Told before any work, and when they are merged."""
    with pytest.raises(KeyboardInterrupt):
        make(whole, Part(1, 2), progress=_interrupt)
    other = writer.job(plan_mxfp4(read_source(source), ToMXFP4(scale_rule="floor")), whole.target, LIMIT)
    options = {**OPTIONS, "--scale-rule": "floor"}
    job = parts.part_job(other, Part(2, 2), options)
    message = r"made with --scale-rule: expected floor, as asked for, found even; a part of another conversion"
    with pytest.raises(CheckpointError, match=message):
        parts.check_target(job, other, resume=False)
    make(whole, Part(1, 2), resume=True)
    with pytest.raises(CheckpointError, match=rf"part-00001-of-00002.index.json: {message}"):
        parts.merge(other, options)
    # Where options do not tell, as of another version of a library, the plan does.
    with pytest.raises(CheckpointError, match=r"part-00001-of-00002.index.json: plan: expected "):
        parts.merge(other, OPTIONS)


def test_parts_of_another_source(whole: Job, source: Path, tmp_path: Path) -> None:
    """That differs in numbers alone."""
    make(whole, Part(1, 2))
    file = sorted(source.glob("*.safetensors"))[1]
    tensors = load_file(file)
    key = next(iter(tensors))
    save_file({**tensors, key: tensors[key] + 1}, file, {"format": "pt"})
    changed = writer.job(plan_mxfp4(read_source(source), ToMXFP4()), whole.target, LIMIT)
    assert changed.digest == whole.digest
    with pytest.raises(CheckpointError, match=rf"source {file.name}: expected \w+, as asked for, found \w+"):
        make(changed, Part(2, 2))


def test_a_file_of_a_part_is_missing(whole: Job) -> None:
    for number in (1, 2):
        make(whole, Part(number, 2))
    last = whole.target / whole.shards[-1].name
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(
        CheckpointError, match=rf"{last.name}: expected \d+ bytes, as part-00002-of-00002.index.json says"
    ):
        parts.merge(whole, OPTIONS)
    last.unlink()
    with pytest.raises(CheckpointError, match=r"found no such file; was it copied whole"):
        parts.merge(whole, OPTIONS)
    make(whole, Part(2, 2), resume=True)
    parts.merge(whole, OPTIONS)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", STATE])
def test_something_else_in_the_folder(whole: Job, name: str) -> None:
    make(whole, Part(1, 1))
    (whole.target / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"expected parts of this conversion alone, found {name} in it"):
        begin(whole, Part(1, 1), resume=True)
    with pytest.raises(CheckpointError, match=rf"expected parts of this conversion alone, found {name} in it"):
        parts.merge(whole, OPTIONS)
    assert (whole.target / name).read_text() == "{}"


def test_an_index_that_is_none(whole: Job) -> None:
    make(whole, Part(1, 2))
    index = whole.target / Part(1, 2).index
    for text in ("[]", '{"part": 1}', "{"):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"part-00001-of-00002.index.json: expected the index of a part"):
            begin(whole, Part(2, 2))


def test_one_go_where_parts_are(whole: Job) -> None:
    make(whole, Part(1, 2))
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"expected an empty folder|expected the same conversion"):
            writer.check_target(whole, resume)


def _interrupt(_: int) -> None:
    raise KeyboardInterrupt


# ----------------------------------------------------------------------------------------------------------- processes


def test_processes_make_the_same_bytes(whole: Job, tmp_path: Path) -> None:
    told: list[int] = []
    writer.write(whole, writer.check_target(whole, resume=False), 1, told.append, processes=2)
    assert sum(told) == sum(step.bytes for step in whole.steps)
    write(whole.plan, tmp_path / "one", LIMIT)
    assert contents(whole.target) == contents(tmp_path / "one")


def test_an_error_in_one_process(whole: Job) -> None:
    last = whole.plan.steps[-1].stored[0]
    os.truncate(last.info.file, last.info.end - 1)
    with pytest.raises(CheckpointError, match=rf"{last.key}: expected \d+ bytes, found \d+; the file was cut"):
        writer.write(whole, writer.check_target(whole, resume=False), 1, lambda _: None, processes=2)


def test_a_process_is_killed(whole: Job, tmp_path: Path) -> None:
    """As one is that takes more memory than there is."""

    def kill(_: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(CheckpointError, match=r"every process to finish, found one that was killed; .*--resume"):
        writer.write(whole, writer.check_target(whole, resume=False), 1, kill, processes=2)
    writer.write(whole, writer.check_target(whole, resume=True), 1, lambda _: None)
    write(whole.plan, tmp_path / "one", LIMIT)
    assert contents(whole.target) == contents(tmp_path / "one")


KILLED = """
import os, pickle, signal, sys
from xpu_ports.quant.convert import writer

def killed(n):
    if n:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    job = pickle.load(open(sys.argv[1], "rb"))
    writer.write(job, writer.check_target(job, resume=False), 1, killed, processes=2)
"""


def _at_work(job: Job) -> bool:
    try:
        with writer._locked(job):
            return False
    except CheckpointError as error:
        return "another at work" in str(error)


def test_the_parent_is_killed(whole: Job, tmp_path: Path) -> None:
    """Its processes end, and with them the lock."""
    (tmp_path / "job").write_bytes(pickle.dumps(whole))
    (tmp_path / "killed_parent.py").write_text(KILLED)
    done = subprocess.run([sys.executable, tmp_path / "killed_parent.py", tmp_path / "job"], check=False)
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 30
    while _at_work(whole):
        assert time.monotonic() < until
        time.sleep(0.1)
    writer.write(whole, writer.check_target(whole, resume=True), 1, lambda _: None)
    write(whole.plan, tmp_path / "one", LIMIT)
    assert contents(whole.target) == contents(tmp_path / "one")
