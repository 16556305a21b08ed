"""What a second card brings: Kimi Linear 48B, DeepSeek-V4-Flash and FLUX.2-dev on one card and on two, random weights.

    python benchmarks/scaling.py [--models kimi_linear,deepseek_v4,flux2,deepseek_v4-more] [--seconds 450] [--tiny]

Each model runs in a process of its own on one card, then in two on two cards, with the same weights. Logits of 64
tokens, or a step of a picture, go against an fp32 oracle by the budget of `common/accuracy.py`; beside them stand
rates, what the device does in a step and how much of that is collectives, and memory. deepseek_v4 has as many of
Flash's layers as fit on one card, deepseek_v4-more as many as fit on two. Results: scaling.jsonl in the folder OUT, or
in benchmarks/results, written anew as they come; a process that hangs is stopped. --tiny runs the checkpoints of the
repository, on a CPU through Gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PART = ROOT / "benchmarks" / "scaling_part.py"
# NVLink's multicast is off, in NCCL, PyTorch and NVSHMEM; errors end processes instead of letting them wait.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
# Seconds below which no part is begun.
SHORTEST = 15
# Parts that run side by side on one card each, then those on both, with the seconds after which each is stopped.
ALONE = ((("kimi_linear", 140), ("flux2", 80)), (("deepseek_v4", 140),))
TOGETHER = (("kimi_linear", 130), ("deepseek_v4", 130), ("flux2", 100), ("deepseek_v4-more", 80))


def main() -> int:
    given = arguments()
    out = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    names = given.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder), out / "scaling.jsonl", time.monotonic() + given.seconds, given.tiny)
        lanes = [[(n, s) for n, s in lane if n in names] for lane in ALONE]
        parts.run_lanes(lanes)
        # Beside the parts that follow.
        comparisons = []
        for name, limit in TOGETHER:
            if name in names:
                parts.run(name, 2, limit)
                comparisons.append(threading.Thread(target=parts.compare, args=(name,)))
                comparisons[-1].start()
        for comparison in comparisons:
            comparison.join()
        parts.write()
        print(summary(parts.lines()), flush=True)
        print(f"failed: {', '.join(parts.failed)}" if parts.failed else "", flush=True)
    return 1 if parts.failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(name for name, _ in TOGETHER))
    parser.add_argument("--seconds", type=float, default=450, help="for all of it")
    parser.add_argument("--tiny", action="store_true", help="the checkpoints of the repository, to try the script")
    given = parser.parse_args()
    known = [name for name, _ in TOGETHER]
    for name in given.models.split(","):
        if name not in known:
            parser.error(f"no model is named {name!r}; there are: {', '.join(known)}")
    return given


# --------------------------------------------------------------------------------------- processes, one after another


class Parts:
    """Starts the parts, gathers their lines, and stops those that take too long."""

    def __init__(self, folder: Path, file: Path, until: float, tiny: bool) -> None:
        self.folder, self.file, self.until, self.tiny = folder, file, until, tiny
        self.begin = time.monotonic()
        self.failed: list[str] = []
        self.notes: list[dict[str, Any]] = []
        self._written = 0

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.1f} s] {text}", flush=True)

    def start(self, name: str, cards: int, card: int = 0) -> list[subprocess.Popen]:
        """The processes of a part, one a card, as torchrun starts them; but here they can be stopped."""
        self.say(f"{name} on {cards}: start")
        command = [sys.executable, str(PART), name, str(self.folder), *(["--tiny"] if self.tiny else [])]
        threads = "1" if self.tiny else "8"
        environment = {**os.environ, **ENVIRONMENT, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
        if cards == 1 and not self.tiny:
            environment |= {"CUDA_VISIBLE_DEVICES": str(card), "ZE_AFFINITY_MASK": str(card)}
        if cards > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(cards)}
        processes = []
        for rank in range(cards):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if cards > 1 else {}
            with self._log(name, cards, rank).open("w") as log:
                processes.append(subprocess.Popen(command, env=environment | own, stderr=log, start_new_session=True))
        return processes

    def _log(self, name: str, cards: int, rank: int) -> Path:
        return self.folder / f"{name}-{cards}-{rank}.log"

    def run_lanes(self, lanes: list[list[tuple[str, float]]]) -> None:
        """Parts on one card each, the lanes side by side."""
        running: dict[int, tuple[str, list[subprocess.Popen], float]] = {}
        waiting = {card: list(lane) for card, lane in enumerate(lanes)}
        while running or any(waiting.values()):
            for card, lane in waiting.items():
                # On a CPU they would take each other's time.
                if card not in running and lane and not (self.tiny and running):
                    name, limit = lane.pop(0)
                    running[card] = name, self.start(name, 1, card), self._limit(limit)
            for card, (name, processes, limit) in list(running.items()):
                if _are_done(processes) or time.monotonic() > limit:
                    self._end(name, processes)
                    del running[card]
            self.write()
            time.sleep(0.5)

    def run(self, name: str, cards: int, limit: float) -> None:
        """One part on all cards."""
        if self.until - time.monotonic() < SHORTEST:
            self.failed.append(f"{name} on {cards}")
            self.say(f"{name} on {cards}: no time left")
            return
        processes, end = self.start(name, cards), self._limit(limit)
        while not _are_done(processes) and time.monotonic() < end:
            self.write()
            time.sleep(0.5)
        self._end(name, processes)

    def _limit(self, seconds: float) -> float:
        return min(time.monotonic() + seconds, self.until)

    def _end(self, name: str, processes: list[subprocess.Popen]) -> None:
        """Stop what still runs, and say how it went."""
        stopped = not _are_done(processes)
        codes = [process.poll() for process in processes]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        cards = len(processes)
        why = "stopped, out of time" if stopped else f"exit {', '.join(map(str, codes))}"
        self.say(f"{name} on {cards}: {why}")
        if codes == [0] * cards:
            return
        self.failed.append(f"{name} on {cards}")
        for rank in range(cards):
            tail = self._log(name, cards, rank).read_text()[-2000:]
            print(f"rank {rank}: {tail}", flush=True)
            line = {"kind": "failed", "model": name, "cards": cards, "what": f"rank {rank}"}
            self.notes.append({**line, "error": f"{why}: {tail}"})

    def lines(self) -> list[dict[str, Any]]:
        """All lines there are, those of the environment first."""
        found = []
        for file in sorted(self.folder.glob("*.jsonl")):
            # The last line may be being written.
            found += [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted([*found, *self.notes], key=lambda line: line["kind"] != "environment")

    def write(self) -> None:
        from xpu_ports.common.bench.files import write_lines

        lines = self.lines()
        if len(lines) != self._written:
            write_lines(self.file, lines)
            self._written = len(lines)

    def compare(self, name: str) -> None:
        """What one card and two gave, against the oracle and with each other."""
        import torch

        from xpu_ports.common.bench.scaling import budgeted, compared, differing_experts

        compared = functools.partial(compared, tokens=name != "flux2")
        found: dict[tuple[int, str], Any] = {}
        for file in self.folder.glob(f"{name}-*.pt"):
            cards, what = file.stem.removeprefix(f"{name}-").split("-", 1)
            found[int(cards), what] = torch.load(file)

        def note(kind: str, got: tuple[int, str], expected: tuple[int, str], say: Callable[[Any, Any], Any]) -> None:
            if got in found and expected in found:
                names = {"got": f"{got[1]} on {got[0]}", "expected": f"{expected[1]} on {expected[0]}"}
                self.notes.append({"kind": kind, "model": name, **names, **say(found[got], found[expected])})

        def against(oracle: tuple[int, str], got: tuple[int, str]) -> None:
            if (1, "reference") in found:
                reference = found[1, "reference"]
                note("accuracy", got, oracle, lambda x, y: {**compared(x, y), **budgeted(x, reference, y)})

        # A picture's oracle runs on one card.
        cards = 1 if (1, "oracle") in found else 2
        for what in ("whole", "steps", "captured"):
            for each in (1, 2):
                against((cards, "oracle"), (each, what))
        for what in ("given", "steps_given"):
            for each in (1, 2):
                against((cards, "oracle_given"), (each, what))
        for what in ("oracle", "oracle_given"):
            note("accuracy", (1, "reference"), (cards, what), compared)
        for what in ("whole", "given", "steps", "steps_given", "captured"):
            note("accuracy", (2, what), (1, what), compared)
        note("accuracy", (2, "captured"), (2, "steps"), compared)
        # How far apart equally good ways are on one card.
        for what in ("reference", "steps", "captured"):
            note("accuracy", (1, what), (1, "whole"), compared)
        for got in ((1, "experts"), (2, "experts"), (1, "reference_experts")):
            note("experts", got, (2, "oracle_experts"), differing_experts)
        note("experts", (2, "experts"), (1, "experts"), differing_experts)
        note("experts", (1, "reference_experts"), (1, "experts"), differing_experts)


def _are_done(processes: list[subprocess.Popen]) -> bool:
    """All have ended, or one has failed, for which the others would wait."""
    codes = [process.poll() for process in processes]
    return None not in codes or any(codes)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---------------------------------------------------------------------------------------------------------- summary


NAMES = {"kimi_linear": "kimi", "deepseek_v4": "v4", "deepseek_v4-more": "v4+"}


def summary(lines: list[dict[str, Any]]) -> str:
    """The results in words, a line each; of what the device does only the rank that waits least for the other."""
    least: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if line["kind"] == "busy":
            key = tuple(line[name] for name in ("model", "cards", "variant", "what", "batch"))
            if key not in least or line["collective_ms"] < least[key]["collective_ms"]:
                least[key] = line
    shown = (line for line in lines if line["kind"] != "busy" or line in least.values())
    return "\n".join(["", *filter(None, map(_described, shown))])


def _described(line: dict[str, Any]) -> str:
    """A line of the results; empty for those that are in the file alone."""
    kind, head = line["kind"], NAMES.get(line["model"], line["model"])
    if kind == "accuracy":
        tokens = f" KL {line['kl']:.1e} top-1 {line['top_1']:.0%}" if "kl" in line else ""
        budget = f" error {line['error']:.3g} of {line['allowed']:.3g}" if "allowed" in line else ""
        return (
            f"{head} {line['got']} - {line['expected']}: {line['largest']:.3g} of {line['scale']:.3g}, "
            f"rms {line['relative']:.1e}{tokens}{budget}"
        )
    if kind == "experts":
        return (
            f"{head} {line['got']} - {line['expected']}: {line['differ']} of {line['choices']} choices differ, "
            f"in {line['tokens']} tokens"
        )
    head += f" x{line['cards']}"
    if kind == "built":
        return f"{head} {line['weights'] / 2**30:.2f} GiB, layers {line.get('layers', 'all')}"
    if kind == "rate":
        return (
            f"{head} {line['variant']} b{line['batch']}: {line['decode_tokens_per_s']:,.1f} tok/s "
            f"({line['decode_low']:,.1f}-{line['decode_high']:,.1f}), prompt {line['prefill_tokens_per_s']:,.0f} tok/s"
            f" {'; '.join(line['ran'])}"
        )
    if kind == "prompt":
        return f"{head} prompt of {line['tokens']}: {1e3 * line['seconds']:.1f} ms, {line['tokens_per_s']:,.0f} tok/s"
    if kind == "picture":
        return f"{head} {line['variant']}: {1e3 * line['seconds']:.1f} ms a step"
    if kind == "busy":
        sums = (
            f", {line['collectives']:.0f} collectives {line['collective_ms']:.3f} ms = {line['share']:.1%}, "
            f"each {line['collective_us']:.1f} us"
        )
        return (
            f"{head} {line['variant']} {line['what']} b{line['batch']}: {line['kernels']:.0f} kernels "
            f"{line['busy_ms']:.3f} ms in {line['span_ms']:.3f} ms{sums if line['collectives'] else ''}"
        )
    if kind == "all_reduce":
        took = ", ".join(f"{name} {1e6 * line[name]:.1f} us" for name in ("eager", "captured") if name in line)
        return f"{head} sum of {line['rows']} x {line['columns']}: {took}"
    if kind == "memory":
        sizes = {key: " ".join(f"{size / 2**30:.2f}" for size in line[key]) for key in ("weights", "peak", "used")}
        return f"{head} {line['when']} GiB: {', '.join(f'{key} {text}' for key, text in sizes.items())}"
    return f"{head} FAILED {line['what']}: {line['error'][:160]}" if kind == "failed" else ""


if __name__ == "__main__":
    sys.exit(main())
