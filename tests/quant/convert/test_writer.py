"""Files of a conversion: their bytes, what interrupts them, what they need of disk and memory."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig

from tests.quant.convert.sources import load, tensors_of, write
from tests.quant.producers import tiny_llama
from xpu_ports.common.checkpoint import CheckpointError, checkpoint_files, read_headers
from xpu_ports.quant.convert import shards, verify, writer
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.plan import ToMXFP4, plan_bf16, plan_mxfp4
from xpu_ports.quant.convert.writer import STATE, Job

HERE = Path(__file__).parent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama in several files, with what lies beside weights."""
    folder = tmp_path / "source"
    tiny_llama().bfloat16().save_pretrained(folder, max_shard_size="60KB")
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "recipe.yaml", ".hidden"):
        (folder / name).write_text(name)
    (folder / "original").mkdir()
    return folder


@pytest.fixture
def job(source: Path, tmp_path: Path) -> Job:
    return writer.job(plan_mxfp4(read_source(source), ToMXFP4()), tmp_path / "target", 30_000)


def run(job: Job, resume: bool = False, threads: int = 1, progress: Callable[[int], None] = lambda _: None) -> None:
    writer.write(job, writer.check_target(job, resume), threads, progress)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


# --------------------------------------------------------------------------------------------------------------- files


def test_files(job: Job, source: Path) -> None:
    told: list[int] = []
    run(job, progress=told.append)
    assert sum(told) == sum(step.bytes for step in job.plan.steps)
    count = len(job.shards)
    assert count > 2
    shards = {f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)}
    others = {"config.json", "model.safetensors.index.json", "generation_config.json", "tokenizer.json",
              "chat_template.jinja"}  # fmt: skip
    assert {path.name for path in job.target.iterdir()} == shards | others
    assert (job.target / "tokenizer.json").read_text() == "tokenizer.json"
    assert sum(path.stat().st_size for path in job.target.iterdir()) == job.size
    # Read by our checks of index and files, and by the safetensors library.
    found = read_headers(checkpoint_files(job.target))
    assert found.keys() == {output.name for step in job.plan.steps for output in step.outputs}
    index = json.loads((job.target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.end - info.begin for info in found.values())
    for name in shards:
        with safe_open(job.target / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            listed = [key for key, shard in index["weight_map"].items() if shard == name]
            assert all(file.get_tensor(key).shape == found[key].shape for key in listed)
    big = [shard for shard in job.shards if shard.size - len(shard.header) > 30_000]
    assert all(len(shard.steps) == 1 for shard in big)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    """An odd number of bytes before floats would make them unreadable for views of the file."""
    tensors, _ = tensors_of(tiny_llama().bfloat16(), tmp_path / "source")
    save_file({"a": torch.ones(3, dtype=torch.bool), **tensors}, tmp_path / "source" / "model.safetensors")
    job = writer.job(plan_bf16(read_source(tmp_path / "source")), tmp_path / "target")
    run(job)
    assert torch.equal(load(job.target)["model.norm.weight"], tensors["model.norm.weight"])
    for key, info in read_headers(checkpoint_files(job.target)).items():
        assert info.begin % info.dtype.itemsize == 0, key


@pytest.mark.parametrize("threads", [2, 5])
def test_bytes_do_not_depend_on_threads_and_pieces(
    job: Job, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(job)
    monkeypatch.setattr(shards, "_ELEMENTS", 700)
    write(job.plan, tmp_path / "again", 30_000, threads)
    assert digests(tmp_path / "again") == digests(job.target)


# ----------------------------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_point(source: Path, tmp_path: Path, every: int) -> None:
    before = digests(source)
    command = [sys.executable, HERE / "killed.py", source, tmp_path, "60000", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 60
    assert digests(source) == before


def test_finished_shards_are_not_made_again(job: Job) -> None:
    def stop(_: int) -> None:
        if len(list(job.target.glob("*.safetensors"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, progress=stop)
    there = sorted(p.name for p in job.target.iterdir())
    assert there == sorted(
        [STATE, shards.partial(job.target / job.shards[2].name).name, *(s.name for s in job.shards[:2])]
    )
    first = job.target / job.shards[0].name
    age = first.stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"an empty folder, or none.*--resume goes on with what is there"):
        run(job)
    run(job, resume=True)
    assert first.stat().st_mtime_ns == age
    assert not list(job.target.glob(".*"))
    after = digests(job.target)
    # Once more changes nothing.
    run(job, resume=True)
    assert digests(job.target) == after


def test_a_shard_is_gone_on_with(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are on the disk are not made again, and what they had to tell is not forgotten."""
    monkeypatch.setattr(shards, "_SYNC_BYTES", 10_000)
    tensors = load(source)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    plan = plan_mxfp4(read_source(tmp_path), ToMXFP4())
    work = tmp_path.parent / f"{tmp_path.name}-target"
    job = writer.job(plan, work / "target")
    told: list[int] = []

    def stop(n: int) -> None:
        told.append(n)
        if len(told) == len(plan.steps):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, progress=stop)
    journal = shards.steps_file(job.target / "model.safetensors")
    done = len(journal.read_bytes().splitlines())
    assert len(plan.steps) // 4 < done < len(plan.steps)
    # A line that was being written when the power failed.
    journal.write_bytes(journal.read_bytes() + b"1")
    made: list[int] = []
    for step in plan.steps:
        monkeypatch.setattr(step, "make", lambda a, b, step=step: made.append(1) or type(step).make(step, a, b))
    again: list[int] = []
    bad = writer.write(job, writer.check_target(job, resume=True), 1, again.append)
    assert len(made) == len(plan.steps) - done
    assert sum(again) == sum(step.bytes for step in plan.steps)
    assert bad == {"model.layers.0.mlp.down_proj.weight_packed": 1}
    write(plan, work / "whole")
    assert digests(work / "whole") == digests(job.target)


def test_a_kill_between_a_shard_and_its_list_of_steps(job: Job) -> None:
    run(job)
    whole = digests(job.target)
    (job.target / STATE).write_text(json.dumps({"fingerprint": job.fingerprint}))
    shards.steps_file(job.target / job.shards[0].name).write_text("0 0\n")
    run(job, resume=True)
    assert digests(job.target) == whole


def test_resume_of_another_conversion(job: Job, source: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(job, progress=_raise(KeyboardInterrupt(), 3))
    other = writer.job(plan_mxfp4(read_source(source), ToMXFP4(scale_rule="floor")), job.target, 30_000)
    with pytest.raises(CheckpointError, match=r"expected the same conversion, begun before, found something else"):
        run(other, resume=True)
    os.utime(next(source.glob("*.safetensors")), (0, 0))
    with pytest.raises(CheckpointError, match=r"another source, other options"):
        run(writer.job(job.plan, job.target, 30_000), resume=True)


def test_two_at_once(job: Job) -> None:
    def second(_: int) -> None:
        with pytest.raises(CheckpointError, match=r"expected one conversion at a time, found another at work"):
            run(job, resume=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(job, progress=second)
    run(job, resume=True)


def _raise(error: BaseException, after: int) -> Callable[[int], None]:
    """Progress that raises at the n-th piece."""
    left = iter(range(after))

    def progress(_: int) -> None:
        if next(left, None) is None:
            raise error

    return progress


# ---------------------------------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("threads", [1, 3])
def test_the_disk_fills_up(job: Job, source: Path, threads: int) -> None:
    before = digests(source)
    full = OSError(errno.ENOSPC, "No space left on device")
    name = job.shards[1].name
    pieces = len(job.shards[0].steps) * 2 + 2
    with pytest.raises(CheckpointError, match=rf"{name}: .*expected room on the disk, found none left; .*--resume"):
        run(job, threads=threads, progress=_raise(full, pieces))
    assert sorted(p.name for p in job.target.iterdir()) == [STATE, job.shards[0].name]
    assert digests(source) == before
    run(job, resume=True)
    assert all(not checked.wrong for checked in verify.verify(job))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk(job: Job, source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (disk / "other").write_bytes(bytes(2**20 - job.size // 2))
    small = writer.job(job.plan, disk / "target", 30_000)
    with pytest.raises(CheckpointError, match=r"expected \d+ bytes free, found \d+; nothing has been written"):
        run(small)
    assert not small.target.exists()
    # Another process takes the room meanwhile.
    monkeypatch.setattr(writer, "free_bytes", lambda path: 1 << 40)
    with pytest.raises(CheckpointError, match=r"expected room on the disk, found none left"):
        run(small)
    assert not list(small.target.glob(".*.partial"))
    done = [shard for shard in small.shards if (small.target / shard.name).exists()]
    assert 0 < len(done) < len(small.shards)
    assert all(writer.is_written(small.target / shard.name, shard) for shard in done)
    (disk / "other").unlink()
    run(small, resume=True)
    assert all(not checked.wrong for checked in verify.verify(small))


def test_a_read_only_target(job: Job, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(CheckpointError, match=r"target: expected a place that can be written, found Read-only file"):
        run(writer.job(job.plan, disk / "target"))


def test_a_target_that_may_not_be_made(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(CheckpointError, match=r"target: expected a place that can be written, found Permission denied"):
        run(job)


@pytest.mark.parametrize("where", ["source", "source/inner", "."])
def test_target_and_source_are_apart(job: Job, tmp_path: Path, where: str) -> None:
    with pytest.raises(CheckpointError, match=r"a folder apart from the source's"):
        run(writer.job(job.plan, tmp_path / where), resume=True)


def test_a_link_into_the_source(job: Job, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(CheckpointError, match=r"a folder apart from the source's"):
        run(writer.job(job.plan, tmp_path / "link" / "inner"))


def test_a_target_with_something_in_it(job: Job) -> None:
    job.target.mkdir()
    (job.target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"expected an empty folder, or none, found notes.txt in it"):
        run(job)
    with pytest.raises(CheckpointError, match=r"expected the same conversion, begun before"):
        run(job, resume=True)
    assert digests(job.target).keys() == {"notes.txt"}


def test_a_target_that_is_a_file(job: Job) -> None:
    job.target.write_text("mine")
    with pytest.raises(CheckpointError, match=r"expected a folder, or nothing yet, found a file"):
        run(job)


# ---------------------------------------------------------------------------------------------------------- the source


def test_a_truncated_source(source: Path, tmp_path: Path) -> None:
    file = sorted(source.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=rf"{file.name}: expected \d+ bytes, found \d+; the file is truncated"):
        read_source(source)


def test_a_source_that_is_cut_meanwhile(job: Job) -> None:
    last = job.plan.steps[-1].stored[0]
    os.truncate(last.info.file, last.info.end - 1)
    with pytest.raises(CheckpointError, match=rf"{last.key}: expected \d+ bytes, found \d+; the file was cut"):
        run(job)
    assert all(writer.is_written(path, s) for s in job.shards for path in [job.target / s.name] if path.exists())


def test_a_shard_that_is_missing(source: Path) -> None:
    sorted(source.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"expected it in model-00002-of-\d+.safetensors, found no such file"):
        read_source(source)


# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_tells_the_error_of_each_tensor(job: Job) -> None:
    run(job)
    checked = {c.name: c for c in verify.verify(job)}
    assert len(checked) == len(job.plan.steps)
    assert not any(c.wrong for c in checked.values())
    assert checked["model.norm.weight"].relative == 0
    layer = "model.layers.0.mlp.down_proj"
    weight = load(job.plan.source.folder)[f"{layer}.weight"].double()
    dense = job.target.parent / "dense"
    write(plan_bf16(read_source(job.target)), dense)
    moved = load(dense)[f"{layer}.weight"].double() - weight
    found = checked[f"{layer}.weight_packed"]
    assert found.relative == pytest.approx(float(moved.norm() / weight.norm()), rel=1e-5)
    assert found.largest == pytest.approx(float(moved.abs().max()), rel=1e-5)
    assert 0.05 < found.relative < 0.2


def test_verify_finds_a_flipped_bit(job: Job) -> None:
    run(job)
    shard = next(s for s in job.shards if "lm_head.weight_scale" in s.at)
    with (job.target / shard.name).open("r+b") as file:
        file.seek(shard.at["lm_head.weight_scale"] + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert [c.wrong for c in verify.verify(job) if c.wrong] == ["lm_head.weight_scale"]


def test_verify_finds_a_missing_tensor(job: Job) -> None:
    run(job)
    path = job.target / job.shards[0].name
    save_file({"model.norm.weight": torch.ones(64)}, path)
    with pytest.raises(CheckpointError, match=r"expected .*, found "):
        list(verify.verify(job))


# -------------------------------------------------------------------------------------------------------------- memory


def _random_llama(folder: Path, hidden: int, layers: int, vocabulary: int) -> int:
    """A checkpoint of random bf16 numbers, written a file a layer; gives the bytes of its largest tensor."""
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=16, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    weight_map = {}

    def put(name: str, **shapes: tuple[int, ...]) -> None:
        tensors = {f"{key}.weight": torch.empty(s, dtype=torch.bfloat16).normal_(std=0.02) for key, s in shapes.items()}
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    for i in range(layers):
        square = {f"model.layers.{i}.self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
        wide = {f"model.layers.{i}.mlp.{n}_proj": (4 * hidden, hidden) for n in ("gate", "up")}
        norms = {f"model.layers.{i}.{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
        put(f"{i}.safetensors", **square, **wide, **norms, **{f"model.layers.{i}.mlp.down_proj": (hidden, 4 * hidden)})
    put("head.safetensors", **{"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)},
        **{"model.norm": (hidden,)})  # fmt: skip
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return 2 * hidden * max(vocabulary, 4 * hidden)


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 4])
def test_peak_memory(tmp_path: Path, threads: int) -> None:
    """1.1 GB in two of whose largest tensors, and 1 GB, all must happen; what torch needs by itself is counted."""
    largest = _random_llama(tmp_path / "source", 2048, 8, 32000)
    command = [sys.executable, HERE / "peak.py", tmp_path / "source", tmp_path / "target", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < 2 * largest + 10**9
    # And most of that is torch: the conversion itself needs little.
    assert after - before < 400e6
