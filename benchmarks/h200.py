"""Make the H200 numbers of the documentation: the kernels' tests on the GPU, then the ops beside their peers.

    python benchmarks/h200.py [tests] [ops[:NAME,...]] [tune[:NAME,...]] [models[:NAME,...]]
        [flux2[:OPTION,...]] [drafts[:OPTION,...]] [scaling[:OPTION,...]]

Needs nothing installed but torch, Triton and pytest, and diffusers for flux2 and for scaling, which wants two cards:
the checkout is imported in place. Results go to the folder in OUT, or to benchmarks/results. Each section runs in a
process of its own, so that one that fails leaves the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
FOLDERS = ("cli", "common", "models", "quant")
# Seconds after which a section is stopped.
LIMITS = {"tests": 200, "ops": 300, "tune": 150, "models": 420, "flux2": 150, "drafts": 150, "scaling": 480}
SCRIPTS = {"drafts": "deepseek_v4_drafts.py"}
# Those that run on the accelerator, of which most of the time goes into compiling.
TESTED = ("tests/common/kernels", "tests/common/test_replay.py", "tests/quant/mxfp4/kernels")
NORMS = "rms_norm,add_rms_norm,rms_norm_backward,gated_rms_norm"
DEFAULT = ("tests", f"ops:{NORMS}")


def main(sections: tuple[str, ...]) -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    for stale in OUT.glob("*.summary"):
        stale.unlink()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(Path(folder))
        for section in sections:
            start = time.perf_counter()
            print(f"\n== {section}", flush=True)
            name, _, arguments = section.partition(":")
            command = [*_command(name), *filter(None, arguments.split(","))]
            # As many processes as there are cores have one each for what they compute on the CPU.
            threads = {"OMP_NUM_THREADS": "1"} if name == "tests" else {}
            code = _run(command, {**environment, **threads}, LIMITS[name])
            print(f"== {section}: exit {code}, {time.perf_counter() - start:.0f} s", flush=True)
            if code != 0:
                failed.append(section)
    for summary in sorted(OUT.glob("*.summary")):
        print(f"\n== {summary.stem}\n{summary.read_text()}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _run(command: list[str], environment: dict[str, str], limit: float) -> int | str:
    """The exit code, or that it was stopped with everything that it started: workers would disturb the next times."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        # Asked first: pytest then says what has failed so far.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        return f"stopped after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(folder: Path) -> dict[str, str]:
    """The variables of the sections: the checkout importable as xpu_ports, kernels compiled rather than interpreted."""
    package = folder / "xpu_ports"
    package.mkdir()
    for name in FOLDERS:
        (package / name).symlink_to(ROOT / name)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "0",
        "OUT": str(OUT),
    }


def _command(section: str) -> list[str]:
    if section == "tests":
        workers = ["-n", str(min(16, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
        options = ["--backend", "cuda", "-q", "--tb=short", "--maxfail=15", "-p", "no:cacheprovider"]
        return [sys.executable, "-m", "pytest", *TESTED, *options, *workers]
    return [sys.executable, str(ROOT / "benchmarks" / SCRIPTS.get(section, f"{section}.py"))]


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:]) or DEFAULT))
