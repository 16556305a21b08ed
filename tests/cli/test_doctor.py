"""Doctor's checks on machines that are made up, its gathering on files that are, and both on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from xpu_ports.cli import _facts
from xpu_ports.cli._checks import Finding, cure, examine
from xpu_ports.cli._facts import Answer, Device, Facts, Kernel, Torch

B580 = Device(
    type="xpu",
    index=0,
    name="Intel(R) Arc(TM) B580 Graphics",
    architecture="xe2",
    total_memory=11605 * 2**20,
    free_memory=10 * 2**30,
    bf16=True,
    fp64=True,
    driver="1.14.36300",
)
A770 = replace(B580, name="Intel(R) Arc(TM) A770 Graphics", architecture="arc-a", bf16=False, fp64=False)
XPU_TORCH = Torch("2.13.0+xpu", xpu="20260101", devices=(B580,))
CUDA_TORCH = Torch("2.13.0+cu130", cuda="13.0")
CPU_TORCH = Torch("2.13.0+cpu")
PACKAGES = {"torch": "2.13.0+xpu", "transformers": "5.24.0", "huggingface-hub": "1.2.0"}

XPU_MACHINE = Facts(
    torch=XPU_TORCH,
    kernel=Kernel("3.7.1", seconds=12.0),
    distributions={**PACKAGES, "triton-xpu": "3.7.1"},
    requirements=("torch>=2.11", "transformers>=5.24", "huggingface_hub>=1.0"),
    gpus=("0x8086:0xe20b",),
    render_nodes={"/dev/dri/renderD128": True},
    level_zero_headers="/usr/include",
    sycl_headers="/venv/include",
    python_headers="/usr/include/python3.11/Python.h",
    compiler="/usr/bin/g++",
    python="3.11.7",
    system="Linux",
)
CPU_MACHINE = Facts(torch=CPU_TORCH, distributions=PACKAGES, requirements=XPU_MACHINE.requirements)
CUDA_MACHINE = replace(
    XPU_MACHINE,
    torch=replace(CUDA_TORCH, devices=(replace(B580, type="cuda", name="NVIDIA H200", architecture="nvidia"),)),
    kernel=Kernel("3.7.0"),
    distributions={**PACKAGES, "triton": "3.7.0"},
    gpus=("0x10de:0x2335",),
    level_zero_headers=None,
    sycl_headers=None,
)


def bad(facts: Facts) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.status != "ok"]


def the_one(facts: Facts) -> Finding:
    """The only finding that is not ok, which says what to do."""
    findings = bad(facts)
    assert len(findings) == 1, findings
    assert findings[0].do
    return findings[0]


def ok(facts: Facts, check: str) -> list[str]:
    return [finding.found for finding in examine(facts) if finding.check == check and finding.status == "ok"]


def without_triton(facts: Facts, **distributions: str) -> dict[str, str]:
    kept = {n: v for n, v in facts.distributions.items() if n not in _facts.TRITON_DISTRIBUTIONS}
    return {**kept, **{name.replace("_", "-"): version for name, version in distributions.items()}}


@pytest.mark.parametrize("facts", [XPU_MACHINE, CPU_MACHINE, CUDA_MACHINE], ids=["xpu", "cpu", "cuda"])
def test_a_sound_machine_has_no_complaint(facts):
    assert bad(facts) == []


def test_a_sound_xpu_machine_is_described():
    (device,) = ok(XPU_MACHINE, "device")
    assert device == (
        "xpu:0 Intel(R) Arc(TM) B580 Graphics (xe2), 11.3 GiB, 10.0 free, bf16 yes, fp64 yes, driver 1.14.36300"
    )
    assert ok(XPU_MACHINE, "torch") == ["torch 2.13.0+xpu, built for XPU 20260101; Python 3.11.7, Linux"]
    assert ok(XPU_MACHINE, "triton") == ["from triton-xpu 3.7.1", "the module is 3.7.1"]
    assert ok(XPU_MACHINE, "kernel") == ["a Triton kernel was compiled and ran on xpu in 12.0 s"]


# ------------------------------------------------------------------------------------------------- torch and the GPU


def test_torch_that_cannot_be_imported():
    facts = replace(XPU_MACHINE, torch=None, torch_error="ImportError: libsycl.so.8", kernel=None)
    finding = the_one(facts)
    assert (finding.check, finding.status) == ("torch", "fail")
    assert "libsycl.so.8" in finding.found


def test_cuda_wheel_on_an_intel_machine():
    facts = replace(
        XPU_MACHINE, torch=CUDA_TORCH, kernel=None, distributions=without_triton(XPU_MACHINE, triton="3.7.0")
    )
    finding = the_one(facts)
    assert (finding.check, finding.status) == ("build", "fail")
    assert "is for CUDA and finds no GPU; there is an Intel GPU (0x8086:0xe20b)" in finding.found
    assert "pip install torch --index-url https://download.pytorch.org/whl/xpu" in finding.do


def test_cuda_wheel_beside_an_integrated_intel_gpu_is_right():
    assert bad(replace(CUDA_MACHINE, gpus=("0x8086:0xa780", "0x10de:0x2335"))) == []


def test_cpu_wheel_on_an_intel_machine():
    finding = the_one(replace(CPU_MACHINE, gpus=("0x8086:0x56a0",)))
    assert (finding.check, finding.status) == ("build", "warn")
    assert "pip install torch --index-url https://download.pytorch.org/whl/xpu" in finding.do


def test_cpu_wheel_on_an_nvidia_machine():
    finding = the_one(replace(CPU_MACHINE, gpus=("0x10de:0x2335",)))
    assert (finding.check, finding.status) == ("build", "warn")
    assert "0x10de:0x2335" in finding.found


NO_XPU = replace(XPU_MACHINE, torch=replace(XPU_TORCH, devices=()), kernel=None)


@pytest.mark.parametrize(
    ("changes", "status", "found", "do"),
    [
        ({}, "fail", "there is an Intel GPU (0x8086:0xe20b)", "compute runtime"),
        ({"render_nodes": {"/dev/dri/renderD128": False}}, "fail", "may not open /dev/dri/renderD128", "render"),
        ({"environment": {"ZE_AFFINITY_MASK": "7"}}, "fail", "with ZE_AFFINITY_MASK=7 set", "unset"),
        ({"gpus": (), "render_nodes": {}}, "warn", "there is no Intel GPU to be seen", "driver"),
    ],
    ids=["driver", "permission", "hidden", "absent"],
)
def test_xpu_wheel_that_finds_no_device(changes, status, found, do):
    finding = the_one(replace(NO_XPU, **changes))
    assert (finding.check, finding.status) == ("device", status)
    assert found in finding.found
    assert do in finding.do


def test_arc_a_has_an_allocation_limit_and_no_fp64():
    facts = replace(XPU_MACHINE, torch=replace(XPU_TORCH, devices=(A770,)))
    finding = the_one(facts)
    assert (finding.check, finding.status) == ("allocation", "warn")
    assert "4 GB" in finding.found
    assert "UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1" in finding.do
    assert "bf16 emulated, fp64 no" in ok(facts, "device")[0]
    assert bad(replace(facts, environment={"UR_L0_USE_RELAXED_ALLOCATION_LIMITS": "1"})) == []


# ---------------------------------------------------------------------------------------------------------- packages


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("5.23.1", "transformers: 5.23.1 is installed, needs transformers>=5.24"),
        (None, "transformers: is not installed"),
    ],
)
def test_transformers_too_old_or_missing(version, found):
    packages = {**XPU_MACHINE.distributions, "transformers": version}
    finding = the_one(replace(XPU_MACHINE, distributions={n: v for n, v in packages.items() if v}))
    assert (finding.check, finding.status, finding.do) == ("packages", "fail", "pip install 'transformers>=5.24'")
    assert finding.found.startswith(found)


def test_a_development_version_meets_a_requirement():
    assert (
        bad(replace(XPU_MACHINE, distributions={**XPU_MACHINE.distributions, "torch": "2.14.0.dev20261001+xpu"})) == []
    )


@pytest.mark.parametrize("name", ["intel-extension-for-pytorch", "ipex-llm"])
def test_ipex(name):
    finding = the_one(replace(XPU_MACHINE, distributions={**XPU_MACHINE.distributions, name: "2.8.10"}))
    assert (finding.check, finding.status, finding.do) == ("ipex", "fail", f"pip uninstall -y {name}")


def test_two_tritons_over_one_another():
    both = {**XPU_MACHINE.distributions, "triton": "3.7.1"}
    finding = the_one(replace(XPU_MACHINE, distributions=both))
    assert (finding.check, finding.status) == ("triton", "fail")
    assert "triton 3.7.1, triton-xpu 3.7.1 are installed over one another" in finding.found
    assert finding.do == (
        "pip uninstall -y triton && pip install --force-reinstall --no-deps triton-xpu==3.7.1 "
        "--index-url https://download.pytorch.org/whl/xpu"
    )


def test_two_tritons_keep_the_one_of_a_cuda_torch():
    both = {**CUDA_MACHINE.distributions, "pytorch-triton-xpu": "3.7.0"}
    finding = the_one(replace(CUDA_MACHINE, distributions=both))
    assert finding.do == "pip uninstall -y pytorch-triton-xpu && pip install --force-reinstall --no-deps triton==3.7.0"


@pytest.mark.parametrize(
    ("facts", "installed", "found"),
    [
        (XPU_MACHINE, {"triton": "3.7.1"}, "triton 3.7.1 is not for Intel GPUs; torch for XPU brings its own"),
        (XPU_MACHINE, {}, "no Triton is installed; torch for XPU brings its own"),
        (
            CUDA_MACHINE,
            {"triton_xpu": "3.7.1"},
            "triton-xpu 3.7.1 is for torch for XPU; this is 2.13.0+cu130",
        ),
        (CUDA_MACHINE, {}, "not installed; torch for CUDA needs it"),
    ],
)
def test_the_wrong_triton(facts, installed, found):
    finding = the_one(replace(facts, distributions=without_triton(facts, **installed)))
    assert (finding.check, finding.status, finding.found) == ("triton", "fail", found)


def test_a_triton_that_is_too_old():
    old = without_triton(XPU_MACHINE, pytorch_triton_xpu="3.2.0")
    finding = the_one(replace(XPU_MACHINE, distributions=old, kernel=Kernel("3.2.0")))
    assert (finding.check, finding.status, finding.found) == ("triton", "fail", "Triton 3.2.0 is older than 3.3")


def test_a_module_that_is_not_its_distribution():
    finding = the_one(replace(XPU_MACHINE, kernel=Kernel("3.9.0")))
    assert (finding.check, finding.status) == ("triton", "fail")
    assert "the module is 3.9.0, its distribution 3.7.1" in finding.found


def test_a_distribution_with_a_local_version_is_the_module():
    same = without_triton(XPU_MACHINE, pytorch_triton_xpu="3.7.1+git8b0b8b0")
    assert bad(replace(XPU_MACHINE, distributions=same)) == []


# ------------------------------------------------------------------------------------------------- compiling kernels


def test_a_kernel_that_does_not_compile_for_want_of_a_header():
    error = "main.cpp:17:10: fatal error: level_zero/ze_api.h: No such file or directory"
    facts = replace(XPU_MACHINE, kernel=Kernel(None, error=error), level_zero_headers=None)
    kernel, headers = bad(facts)
    assert (kernel.check, kernel.status) == ("kernel", "fail")
    assert error in kernel.found
    assert "libze-dev" in kernel.do
    assert (headers.check, headers.status) == ("headers", "fail")
    assert headers.found == "not found: level_zero/ze_api.h"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("AssertionError: sycl headers not found, please install `icpx` compiler", "intel-sycl-rt"),
        ("fatal error: Python.h: No such file or directory", "python3-dev"),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", "g++"),
        ("the process was killed by SIGABRT", "driver"),
        ("no answer after 180 s", "driver"),
        ("ValueError: something new", "XPU_PORTS_BACKEND=reference"),
    ],
)
def test_what_to_do_about_a_kernel(error, words):
    assert words in cure(error)


def test_headers_that_no_kernel_misses_are_no_complaint():
    facts = replace(XPU_MACHINE, level_zero_headers=None, sycl_headers=None, compiler=None)
    assert bad(facts) == []
    assert ok(facts, "headers") == [
        "not found, and not missed by the kernel: a C++ compiler, level_zero/ze_api.h, sycl/sycl.hpp"
    ]


def test_on_a_cpu_a_kernel_is_interpreted_where_there_is_a_triton():
    facts = replace(CPU_MACHINE, kernel=Kernel("3.9.0", interpreted=True, seconds=2.0))
    facts = replace(facts, distributions={**PACKAGES, "triton": "3.9.0"})
    assert ok(facts, "kernel") == ["a Triton kernel was interpreted on the CPU in 2.0 s"]
    assert ok(CPU_MACHINE, "kernel") == ["none to compile: on the CPU every op runs its reference"]
    assert ok(CPU_MACHINE, "triton") == ["not installed, and not needed on the CPU"]


def test_ocloc_is_missed_only_by_native_binaries():
    assert ok(XPU_MACHINE, "ocloc")[0].startswith("not found; needed only")
    assert ok(replace(XPU_MACHINE, ocloc="/usr/bin/ocloc"), "ocloc") == ["/usr/bin/ocloc"]
    finding = the_one(replace(XPU_MACHINE, environment={"TRITON_XPU_GEN_NATIVE_CODE": "1"}))
    assert (finding.check, finding.status) == ("ocloc", "fail")
    assert ok(CPU_MACHINE, "ocloc") == []


@pytest.mark.parametrize(
    ("environment", "backend_error", "status", "words"),
    [
        ({"TRITON_INTERPRET": "1"}, None, "warn", "kernels run in Python"),
        ({"XPU_PORTS_ARCHITECTURE": "max"}, None, "warn", "XPU_PORTS_ARCHITECTURE=max"),
        ({"XPU_PORTS_BACKEND": "reference"}, None, "warn", "XPU_PORTS_BACKEND=reference forces"),
        ({"XPU_PORTS_BACKEND": "tritn"}, "no back end is named 'tritn'", "fail", "no back end is named 'tritn'"),
    ],
)
def test_variables_that_change_what_runs(environment, backend_error, status, words):
    finding = the_one(replace(XPU_MACHINE, environment=environment, backend_error=backend_error))
    assert (finding.check, finding.status) == ("environment", status)
    assert words in finding.found


def test_tables_of_tuned_launches():
    """One that does not count leaves the built-in tiles; one that the environment names makes launches fail."""
    torch = replace(XPU_TORCH, tuned=("3 tiles of a.json",), tuning_errors=("b.json: made with Triton 3.5",))
    assert ok(XPU_MACHINE, "tuning") == []
    assert ok(replace(XPU_MACHINE, torch=torch), "tuning") == ["3 tiles of a.json"]
    finding = the_one(replace(XPU_MACHINE, torch=torch))
    assert (finding.check, finding.status) == ("tuning", "warn")
    assert finding.found == "b.json: made with Triton 3.5; the built-in tiles are used"
    finding = the_one(replace(XPU_MACHINE, torch=torch, environment={"XPU_PORTS_TUNING": "b.json"}))
    assert (finding.status, finding.found) == ("fail", "XPU_PORTS_TUNING: b.json: made with Triton 3.5")


def test_interpreting_on_a_cpu_is_no_complaint():
    assert bad(replace(CPU_MACHINE, environment={"TRITON_INTERPRET": "1"})) == []


# --------------------------------------------------------------------------------------------------------- gathering


def plant(root: Path, address: str, vendor: str, kind: str, device: str, card: str | None = None) -> None:
    """A PCI device under /sys and, if it has a DRM driver, its card."""
    folder = root / "devices" / address
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("class", kind), ("device", device)):
        (folder / name).write_text(value + "\n")
    (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (root / "bus/pci/devices" / address).symlink_to(folder)
    if card:
        (root / "class/drm" / card).mkdir(parents=True)
        (root / "class/drm" / card / "device").symlink_to(folder)


def test_gpus_are_found_by_driver_or_bus_and_once(tmp_path):
    plant(tmp_path, "0000:00:02.0", "0x8086", "0x030000", "0xe20b", card="card0")
    plant(tmp_path, "0000:01:00.0", "0x8086", "0x038000", "0x0bd5")
    plant(tmp_path, "0000:02:00.0", "0x8086", "0x020000", "0x15f3")
    plant(tmp_path, "0000:03:00.0", "0x10de", "0x030200", "0x2335")
    gpus = _facts.pci_gpus(tmp_path)
    assert sorted(gpus) == ["0x10de:0x2335", "0x8086:0x0bd5", "0x8086:0xe20b"]
    assert _facts.pci_gpus(tmp_path / "nothing") == ()


def test_level_zero_headers_are_looked_for_where_triton_does(tmp_path):
    assert _facts.level_zero_headers({"ZE_PATH": str(tmp_path)}) in (None, "/usr/include")
    header = tmp_path / "include" / "level_zero" / "ze_api.h"
    header.parent.mkdir(parents=True)
    header.touch()
    found = str(tmp_path / "include")
    assert _facts.level_zero_headers({"ZE_PATH": str(tmp_path)}) == found
    assert _facts.level_zero_headers({"LEVEL_ZERO_V1_SDK_PATH": str(tmp_path), "ZE_PATH": "/nowhere"}) == found
    assert _facts.level_zero_headers({"CPATH": f"/nowhere:{found}"}) == found


def test_sycl_headers_are_looked_for_where_triton_does(tmp_path):
    for root in (tmp_path / "icpx", tmp_path / "oneapi" / "compiler" / "latest"):
        (root / "include" / "sycl").mkdir(parents=True)
        (root / "include" / "sycl" / "sycl.hpp").touch()
    compiler = tmp_path / "icpx" / "bin" / "icpx"
    compiler.parent.mkdir()
    compiler.touch(mode=0o755)
    oneapi = {"PATH": "", "ONEAPI_ROOT": str(tmp_path / "oneapi")}
    assert _facts.sycl_headers(oneapi) == f"{tmp_path}/oneapi/compiler/latest/include"
    assert _facts.sycl_headers({**oneapi, "PATH": str(compiler.parent)}) == f"{tmp_path}/icpx/include"


def test_own_requirements_are_those_without_extras():
    names = {_facts.requirement_name(requirement) for requirement in _facts.own_requirements()}
    assert {"torch", "transformers", "safetensors", "huggingface-hub"} <= names
    assert not names & {"triton", "pytest", "ruff"}


def test_installed_names_are_normalized():
    found = _facts.installed({"xpu-ports", "huggingface-hub", "no-such-distribution"})
    assert set(found) == {"xpu-ports", "huggingface-hub"}


@pytest.fixture
def fake_python(tmp_path, monkeypatch):
    """Makes the probe run a shell script in the place of Python."""

    def write(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@pytest.mark.skipif(os.name == "nt", reason="the fake probes are shell scripts")
@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -SEGV $$", f"the process was killed by {signal.SIGSEGV.name}"),
        ("exec sleep 30", "no answer after 1 s"),
        ("echo Traceback >&2; echo 'ImportError: libsycl.so.8' >&2; echo >&2; exit 1", "ImportError: libsycl.so.8"),
        ("exit 7", "the process ended with exit code 7"),
    ],
    ids=["crash", "hang", "error", "silent"],
)
def test_a_probe_that_fails_is_told_in_one_line(fake_python, script, error):
    fake_python(script)
    answer = _facts.ask(["devices"], timeout=1)
    assert (answer.value, answer.error) == (None, error)
    assert _facts.kernel_result(answer, 1.0).error == error


@pytest.mark.skipif(os.name == "nt", reason="the fake probes are shell scripts")
def test_devices_are_read_from_the_probe(fake_python):
    tables = {"tuned": ["3 tiles of a.json"], "tuning_errors": ["b.json: not a table"]}
    answer = {"version": "2.13.0+xpu", "xpu": "2026", "devices": [{**vars(B580)}], **tables}
    fake_python(f"echo '{json.dumps(answer)}'")
    expected = Torch("2.13.0+xpu", "2026", None, None, (B580,), ("3 tiles of a.json",), ("b.json: not a table",))
    assert _facts.ask_torch() == (expected, None)


def test_a_compiler_error_goes_before_the_traceback_that_follows():
    log = "main.cpp:1:10: fatal error: Python.h: No such file\ncompilation terminated.\nTraceback ...\n"
    value = {"triton": "3.7.1", "interpreted": False, "error": "CalledProcessError: Command\n['g++'] failed"}
    kernel = _facts.kernel_result(Answer(dict(value), None, log), 3.0)
    assert kernel == Kernel("3.7.1", False, "main.cpp:1:10: fatal error: Python.h: No such file", log, 3.0)
    kernel = _facts.kernel_result(Answer(dict(value)), 3.0)
    assert kernel.error == "CalledProcessError: Command ['g++'] failed"


def test_a_kernel_that_fails_is_an_answer():
    """A compiled kernel cannot take a CPU tensor."""
    pytest.importorskip("triton")
    kernel = _facts.kernel_result(_facts.ask(["kernel", "cpu"], 120), 0.0)
    assert kernel.triton is not None
    assert not kernel.interpreted
    assert kernel.error
    assert kernel.error in kernel.log


def test_a_wrong_choice_in_the_environment_is_found():
    answer = _facts.ask(["choices"], 120, XPU_PORTS_BACKEND="tritn")
    assert "XPU_PORTS_BACKEND='tritn': no back end is named 'tritn'" in str(answer.error)


# -------------------------------------------------------------------------------------------------------- the command


def test_this_machine_in_json(cli, monkeypatch):
    monkeypatch.delenv("XPU_PORTS_BACKEND", raising=False)
    outcome = cli("doctor", "--json")
    result = json.loads(outcome.out)
    statuses = [finding["status"] for finding in result["findings"]]
    assert outcome.code == (1 if "fail" in statuses else 0)
    assert result["ok"] == (outcome.code == 0)
    assert result["facts"]["distributions"]["torch"] == result["facts"]["torch"]["version"]
    assert {"torch", "device", "packages", "triton", "kernel"} <= {finding["check"] for finding in result["findings"]}
    if not result["facts"]["torch"]["devices"] and importlib.util.find_spec("triton"):
        assert result["facts"]["kernel"]["interpreted"]
        assert result["facts"]["kernel"]["error"] is None


def test_table_shows_what_to_do_and_verbose_the_log(cli, monkeypatch):
    kernel = Kernel(None, error="RuntimeError: broken", log="the whole log")
    monkeypatch.setattr(_facts, "gather", lambda: replace(XPU_MACHINE, kernel=kernel))
    outcome = cli("doctor", "--verbose")
    assert outcome.code == 1
    lines = [line.strip() for line in outcome.out.splitlines()]
    at = lines.index("fail  kernel    a Triton kernel did not run: RuntimeError: broken")
    assert lines[at + 1].startswith("-> see the error with --verbose")
    assert "the whole log" in outcome.err
    assert "1 failed, 0 to look at" in outcome.err
    assert "the whole log" not in cli("doctor").err
