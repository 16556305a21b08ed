"""Shards in processes of their own, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

import torch

from xpu_ports.common.checkpoint import CheckpointError
from xpu_ports.quant.convert.shards import Shard, ShardWriter

# Seconds between two looks at how far the processes are.
_LOOK = 0.2


class _Lock:
    """An open file whose lock lasts until the last process that has it ends."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> tuple[type[_Lock], tuple[Any]]:
        # Only while a process is being started can the file go along.
        return _Lock, (reduction.DupFd(self.held),)


class _StoppedError(Exception):
    """Another process has failed, or the user has stopped all."""


# What the processes share: bytes written so far, and whether to stop. Set in each of them.
_shared: tuple[Any, Any]


def _begin(shared: tuple[Any, Any], lock: _Lock | None, threads: int) -> None:
    """Prepare a process."""
    global _shared
    _shared = shared
    # The parent tells when the user interrupts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    if lock is not None:
        lock.held.detach()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot say so."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _told(n: int) -> None:
    written, stopped = _shared
    if stopped.value:
        raise _StoppedError
    with written.get_lock():
        written.value += n


def _make(folder: Path, shard: Shard, threads: int) -> dict[str, int]:
    return ShardWriter(folder, shard, threads, _told).write()


def write_shards(
    folder: Path, shards: Sequence[Shard], processes: int, threads: int, lock: int, progress: Callable[[int], None]
) -> dict[str, int]:
    """Make shards, each in one of several processes, which end when this one does.

    Args:
        folder: where they go.
        shards: to be made.
        processes: how many are made at a time.
        threads: how many steps of a shard run at a time.
        lock: an open file whose lock the processes keep too.
        progress: told the bytes that have been written since it was last told.

    Returns:
        Packed weight -> how many of its blocks hold NaN or infinity.

    Raises:
        CheckpointError: one cannot be written, a source file is not what it was, or a process was killed.
    """
    # A forked process would have torch's threads, but none that run.
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0), context.Value("b", 0)
    held = _Lock(lock) if hasattr(reduction, "DupFd") else None
    begin = shared, held, max(1, torch.get_num_threads())
    not_finite: dict[str, int] = {}
    with ProcessPoolExecutor(processes, context, _begin, begin) as pool:
        made = [pool.submit(_make, folder, shard, threads) for shard in shards]
        try:
            _watch(made, shared[0], progress)
            for future in made:
                not_finite |= future.result()
        except BrokenProcessPool:
            hint = "out of memory, perhaps: --resume goes on, with fewer --jobs"
            raise CheckpointError(folder, None, "every process to finish", "one that was killed", hint) from None
        finally:
            shared[1].value = 1
            pool.shutdown(cancel_futures=True)
    return not_finite


def _watch(made: Sequence[Future], written: Any, progress: Callable[[int], None]) -> None:
    """Tell the progress until all is made or one has failed; raises its error."""
    told, left = 0, set(made)
    while left:
        done, left = wait(left, _LOOK, "FIRST_COMPLETED")
        now = written.value
        progress(now - told)
        told = now
        for future in done:
            future.result()
