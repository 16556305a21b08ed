"""The XPU check catches what it has to catch: planted faults, run through Intel's compiler in .venv-xpu."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import pytest

from xpu_offline.kernels import ROOT

PYTHON = ROOT / ".venv-xpu/bin/python"
PLANTED = ROOT / "tests/xpu_offline/planted"
ARCHITECTURES = ("max", "xe2", "arc-a")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="the XPU check was not run: there is no .venv-xpu (make xpu-check builds it)"
)


@dataclass(frozen=True)
class Outcome:
    """What a run of the planted ops' tests said."""

    # Test id without its file: the message of its failure, or "".
    tests: dict[str, str]
    rows: list[dict]
    # The report's output and exit status.
    report: str
    status: int


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("planted")
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xpu_offline.plugin"]
    command += ["--backend", "xpu-offline", "--xpu-observations", folder / "seen.json", "--junitxml", folder / "x.xml"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "XPU_PORTS_", "PYTEST_"))}
    run = subprocess.run(
        [*command, PLANTED / "faults.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (folder / "seen.json").exists(), run.stdout[-3000:] + run.stderr[-3000:]
    judged = subprocess.run(
        [PYTHON, "-m", "xpu_offline.report", folder / "seen.json", "--source", PLANTED / "ops.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    tests = {}
    for case in ET.parse(folder / "x.xml").iter("testcase"):
        failure = case.find("failure")
        tests[case.get("name", "")] = "" if failure is None else failure.get("message", "") + (failure.text or "")
    return Outcome(tests, json.loads((folder / "seen.json").read_text()), judged.stdout, judged.returncode)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_new_op_needs_no_more_than_its_tests(outcome: Outcome, architecture: str) -> None:
    """The op that is right: found by its source, launched, compiled and compared, and nothing said against it."""
    assert outcome.tests[f"test_good[xpu-offline-{architecture}]"] == ""
    assert outcome.tests[f"test_far_rows[{architecture}-good]"] == ""
    name = "tests.xpu_offline.planted.ops.good_kernel"
    [row] = [r for r in outcome.rows if (r["kernel"], r["architecture"]) == (name, architecture)]
    assert row["launches"] > 0
    assert row["grf"] == [128]
    assert row["error"][0] <= row["error"][1]
    assert f"{name} " not in outcome.report
    assert f"{name}:" not in outcome.report


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("constant", "allowed"),
        ("unmasked", "elements that are in the storage but not in the tensor"),
        ("twice", "written by more than one program"),
        ("unwritten", "NaN or infinite where the oracle is not"),
    ],
)
def test_wrong_numbers_and_writes(outcome: Outcome, fault: str, message: str, architecture: str) -> None:
    assert message in outcome.tests[f"test_{fault}[xpu-offline-{architecture}]"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_overflow_of_an_address(outcome: Outcome, architecture: str) -> None:
    """It gives wrong numbers, not a crash: the process went on to the tests after it."""
    assert "torch.equal" in outcome.tests[f"test_far_rows[{architecture}-overflow]"]


def test_kernel_without_a_launch(outcome: Outcome) -> None:
    for architecture in ARCHITECTURES:
        assert f"ops.never_launched_kernel: no test launched it on {architecture}" in outcome.report


def test_wrong_numbers_fail_the_report(outcome: Outcome) -> None:
    assert outcome.status == 1
    assert "ops.constant_kernel on max: error" in outcome.report


def test_spilling_tile(outcome: Outcome) -> None:
    for architecture in ("max", "xe2"):
        assert f"ops.spilling_kernel on {architecture}: spills" in outcome.report


def test_matrix_units_are_seen(outcome: Outcome) -> None:
    dpas = {r["architecture"]: r["dpas"] for r in outcome.rows if r["kernel"].endswith("spilling_kernel")}
    assert dpas == {"max": True, "xe2": True, "arc-a": False}


def test_shared_memory_of_arc_a(outcome: Outcome) -> None:
    assert "ops.shared_kernel on arc-a: 67584 bytes of shared memory, the device has 65536" in outcome.report
    assert "ops.shared_kernel on max: 67584" not in outcome.report
    assert "out of resource: shared memory" in outcome.tests["test_shared[arc-a]"]
