"""Run by the tests in a process of its own: kills a conversion at each of its steps, and resumes it.

    python killed.py SOURCE WORK SHARD_BYTES EVERY [PARTS]

Every write of a tensor's piece, every fsync, every renaming and every removal of a file is a point to be killed at; of
these every EVERY-th is tried.
Each run is a child that kills itself with SIGKILL; then all files under final names must be those of an undisturbed
run, and a second child, resuming, must make them complete. Prints how many points there were. With PARTS the conversion
is made in parts, which are merged; the undisturbed one in one go.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from xpu_ports.quant.convert import parts, shards, writer
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.parts import Part
from xpu_ports.quant.convert.plan import ToMXFP4, plan_mxfp4


class Points:
    """Counts what happens, and kills the process before the n-th of it."""

    def __init__(self, last: int | None) -> None:
        self.last, self.count = last, 0

    def pass_by(self, *_: object) -> None:
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def before(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def counted(*args: object, **kwargs: object) -> object:
            self.pass_by()
            return call(*args, **kwargs)

        return counted


def convert(job: writer.Job, points: Points, resume: bool, count: int = 0) -> None:
    os.replace, os.fsync = points.before(os.replace), points.before(os.fsync)
    pathlib.Path.unlink = points.before(pathlib.Path.unlink)
    if not count:
        writer.write(job, writer.check_target(job, resume), 1, points.pass_by)
        return
    there = contents(job.target) if resume else {}
    # Once merging has begun, there are no parts to go on with.
    if not there.keys() & {writer.STATE, "config.json"}:
        for part in (Part(i, count) for i in range(1, count + 1)):
            one = parts.part_job(job, part, {})
            writer.write(one, parts.check_target(one, job, resume), 1, points.pass_by)
    parts.merge(job, {})


def in_child(work: Callable[[], object]) -> int:
    """The child's exit status, as os.wait gives it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(source: Path, work: Path, limit: int, every: int, count: int = 0) -> None:
    torch.set_num_threads(1)
    # So that a file is gone on with, and not begun again.
    shards._SYNC_BYTES = 10_000
    plan = plan_mxfp4(read_source(source), ToMXFP4())
    whole, job = (writer.job(plan, work / name, limit) for name in ("whole", "target"))
    counted = work / "count"

    def undisturbed() -> None:
        points = Points(None)
        convert(whole, points, False, count)
        counted.write_text(str(points.count))

    assert in_child(undisturbed) == 0
    if count:
        shutil.rmtree(whole.target)
        assert in_child(lambda: convert(whole, Points(None), False)) == 0
    expected = contents(whole.target)
    total = int(counted.read_text())
    for point in range(0, total, every):
        status = in_child(lambda n=point: convert(job, Points(n), False, count))
        assert os.WIFSIGNALED(status), (point, status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        there = {name: content for name, content in contents(job.target).items() if not name.startswith((".", "part-"))}
        wrong = [name for name, content in there.items() if expected.get(name) != content]
        assert not wrong, (point, wrong)
        assert in_child(lambda: convert(job, Points(None), True, count)) == 0, point
        assert contents(job.target) == expected, point
        shutil.rmtree(job.target)
    print(total)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
