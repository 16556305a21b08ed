"""What the report makes of observations: what fails, what is allowed, how parts of a run are put together."""

from __future__ import annotations

import json
import pathlib
import tomllib
from typing import Any

import pytest

from xpu_offline import report
from xpu_offline.kernels import entry_kernels


def row(**changes: Any) -> dict[str, Any]:
    good = {
        "kernel": "common.kernels.x.x_kernel",
        "architecture": "max",
        "launches": 2,
        "codes": 1,
        "shared": 0,
        "dpas": False,
        "block_read": False,
        "grf": [128],
        "simd": [32],
        "spills": {"model": 0, "tests": 0},
        "spilling": {"model": {}, "tests": {}},
        "undefined": [],
        "error": [1e-7, 2e-7],
        "failures": [],
    }
    return {**good, **changes}


def complete(**changes: Any) -> list[dict[str, Any]]:
    """One kernel on all architectures, changed on "max"."""
    return [row(**changes), row(architecture="xe2"), row(architecture="arc-a")]


def problems(rows: list[dict[str, Any]], allowances: str = "") -> list[str]:
    return report.problems(rows, ["common.kernels.x.x_kernel"], tomllib.loads(allowances))


SPILLS = """
[[spills]]
kernel = "common.kernels.x.x_kernel"
architectures = ["max"]
spills = 40
reason = "-"
"""


def test_nothing_wrong() -> None:
    assert problems(complete()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(error=[3e-7, 2e-7]), "error 3.00e-07, allowed 2.00e-07"),
        (dict(error=[1e-9, 0.0]), "error 1.00e-09"),
        (dict(error=None), "never compared"),
        (
            dict(spills={"model": 1, "tests": 9}, spilling={"model": {"N=8": 1}, "tests": {"N=7": 9}}),
            "spills 1, allowed 0\n    1: N=8",
        ),
        (dict(spills={"model": None, "tests": 9}), "spills 9, allowed 0"),
        (dict(shared=128 * 1024 + 1), "131073 bytes of shared memory"),
        (dict(undefined=["_Z9something"]), "_Z9something is not resolved"),
        (dict(failures=["CompilationError: at 3:4"]), "CompilationError: at 3:4"),
        (dict(launches=0), "no test launched it on max"),
    ],
)
def test_each_problem(changes: dict[str, Any], message: str) -> None:
    [problem] = problems(complete(**changes))
    assert message in problem


def test_missing_kernel_and_unknown_kernel() -> None:
    assert len(problems([])) == 3
    [problem] = problems([*complete(), row(kernel="common.kernels.y.y_kernel")])
    assert "y_kernel: launched, but not found in the source" in problem


def test_a_kernel_without_a_plan_on_an_architecture() -> None:
    rows = complete()
    unlaunched = SPILLS.partition("spills =")[0].replace("spills", "unlaunched").replace("max", "arc-a")
    assert problems(rows[:2], unlaunched) == []
    assert "no test launched it on max" in problems(rows[1:2], unlaunched)[0]
    [problem] = problems(rows, unlaunched)
    assert "x_kernel is launched on arc-a: take it out" in problem


def test_arc_a_may_spill_and_has_less_shared_memory() -> None:
    rows = complete()
    rows[2] |= {"spills": {"model": 900, "tests": 0}}
    assert problems(rows) == []
    rows[2] |= {"shared": 64 * 1024 + 1}
    assert "65537 bytes" in problems(rows)[0]


def test_spills_at_test_sizes_alone_are_allowed() -> None:
    assert problems(complete(spills={"model": 0, "tests": 300}, spilling={"model": {}, "tests": {"N=61": 300}})) == []


def test_allowances() -> None:
    assert problems(complete(spills={"model": 40, "tests": 0}), SPILLS) == []
    assert "spills 41, allowed 40" in problems(complete(spills={"model": 41, "tests": 0}), SPILLS)[0]
    assert "lower it" in problems(complete(spills={"model": 39, "tests": 0}), SPILLS)[0]
    known = '[[undefined]]\nsymbol = "intel_sub_group_2d_*"\nreason = "-"'
    assert problems(complete(undefined=["intel_sub_group_2d_block_read"]), known) == []


def test_every_allowance_has_a_reason() -> None:
    allowances = tomllib.loads(report.ALLOWANCES.read_text())
    assert all(len(a["reason"]) > 20 for group in allowances.values() for a in group)


def test_parts_are_put_together() -> None:
    one = [row(spills={"model": 3, "tests": None}, error=[1e-9, 1e-7], grf=[128])]
    two = [row(shared=512, error=[1e-8, 1e-7], grf=[256], dpas=True), row(architecture="xe2", error=None)]
    first, second = report.merge([one, two])
    assert (first["launches"], first["codes"], first["shared"]) == (4, 2, 512)
    assert first["spills"] == {"model": 3, "tests": 0}
    assert (first["error"], first["grf"], first["dpas"]) == ([1e-8, 1e-7], [128, 256], True)
    assert second["error"] is None


def test_files_and_status(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "x.py"
    source.write_text("@triton.jit\ndef _x_kernel(x_ptr): pass\n")
    seen = tmp_path / "seen.json"
    rows = [r | {"kernel": "x.x_kernel"} for r in complete()]
    seen.write_text(json.dumps(rows))
    arguments = [str(seen), "--root", str(tmp_path), "--source", str(source)]
    arguments += ["--markdown", str(tmp_path / "x.md"), "--json", str(tmp_path / "x.json")]
    assert report.main(arguments) == 0
    assert "| `x.x_kernel` | Max |" in (tmp_path / "x.md").read_text()
    assert json.loads((tmp_path / "x.json").read_text()) == {"kernels": rows, "problems": []}
    source.write_text(source.read_text() + "@triton.jit\ndef _y_kernel(x_ptr): pass\n")
    assert report.main(arguments) == 1
    assert "FAIL x.y_kernel: no test launched it on xe2" in capsys.readouterr().out


def test_kernels_are_told_from_functions(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.py").write_text(
        "@triton.jit\ndef helper(a): return a\n"
        "@triton.jit\ndef combine(a, b): return a + b\n"
        "@triton.jit\ndef both(a): return a\n"
        "@triton.jit(debug=True)\ndef _main_kernel(a): return tl.reduce(helper(both(a)), 0, combine)\n"
        "def launch(x):\n    both[(1,)](x)\n    _main_kernel[(1,)](x)\n"
    )
    (tmp_path / "b.py").write_text("@triton.jit\ndef _forgotten_kernel(a): return helper(a)\n")
    assert entry_kernels([tmp_path / "a.py", tmp_path / "b.py"], tmp_path) == [
        "a.both",
        "a.main_kernel",
        "b.forgotten_kernel",
    ]
