"""pytest plugin: the back end `xpu-offline` for the tests of ops.

    .venv-xpu/bin/python -m pytest -p xpu_offline.plugin --backend xpu-offline tests/common/kernels

Each test that takes a `target` (or `xpu_architecture` itself) runs once for each Intel architecture: the launch wrapper
configures for it, Intel's compiler compiles for it, and the code of the same back end for a device without matrix units
runs on this CPU. All other tests are left out, and of combinations of parameters all but a few, unless `--full` asks
for them. What was seen is written to `--xpu-observations`.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from xpu_offline import results
from xpu_offline.driver import install, prepare_environment
from xpu_offline.narrow import every_value
from xpu_offline.record import Record
from xpu_offline.targets import TARGETS

CACHE = pathlib.Path(os.environ.get("XPU_OFFLINE_CACHE", pathlib.Path(sys.prefix, "xpu-offline-cache")))

# Before anything imports a kernel.
prepare_environment(CACHE)

from xpu_ports.common import accuracy, dispatch  # noqa: E402
from xpu_ports.common.device import use_architecture  # noqa: E402

RECORD = Record()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--xpu-observations",
        type=pathlib.Path,
        default=CACHE / "observations.json",
        metavar="PATH",
        help="where to write what was seen of each kernel",
    )
    parser.addoption(
        "--xpu-results-of",
        metavar="FILE",
        help="keep the results of this file of tests, the only one of the run, for the next check",
    )


def pytest_configure(config: pytest.Config) -> None:
    observations = config.getoption("--xpu-observations")
    RECORD.keep_breadcrumbs_at(observations.with_name(observations.name + ".compiling"))
    install(RECORD, CACHE)
    dispatch.EMULATED_ON_CPU.add("triton")
    _record_comparisons()


def _record_comparisons() -> None:
    measure = accuracy.measure

    def recorded(*args: Any, **kwargs: Any) -> accuracy.Error:
        error = measure(*args, **kwargs)
        RECORD.compared(error.largest, error.allowed)
        return error

    accuracy.measure = recorded


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames and "xpu_architecture" not in metafunc.fixturenames:
        metafunc.fixturenames.append("xpu_architecture")
    if "xpu_architecture" in metafunc.fixturenames:
        metafunc.parametrize("xpu_architecture", list(TARGETS), indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [i for i in items if hasattr(i, "callspec") and "xpu_architecture" in i.callspec.params]
    if not config.getoption("--full", default=False):
        ours = _narrowed([i for i in ours if not i.get_closest_marker("full")])
    kept = set(ours)
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = ours


def _narrowed(items: list[pytest.Function]) -> list[pytest.Function]:
    """Of each test as many combinations as have every value of every parameter, each on all architectures.

    The reference and the interpreter run all of them. Here each is another code, and its compilation takes seconds.
    """
    by_test: dict[tuple[pathlib.Path, type | None, str], dict[tuple, list[pytest.Function]]] = {}
    for item in items:
        values = {k: repr(v) for k, v in item.callspec.params.items() if k != "xpu_architecture"}
        by_test.setdefault((item.path, item.cls, item.originalname), {}).setdefault(tuple(values.items()), []).append(
            item
        )
    kept: list[pytest.Function] = []
    for combinations in by_test.values():
        listed = list(combinations)
        kept += [item for i in every_value([dict(c) for c in listed]) for item in combinations[listed[i]]]
    return kept


@pytest.fixture
def xpu_architecture(request: pytest.FixtureRequest) -> str:
    """The name of the architecture that the test runs for; tests need not ask for it."""
    return request.param


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    RECORD.new_test()
    with use_architecture(item.callspec.params["xpu_architecture"]):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: a later test may take the process down."""
    if report.failed:
        message = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else str(report.longrepr)
        print(f"\nFAILED {report.nodeid}: {message.strip()[:300]}", file=sys.__stdout__, flush=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    RECORD.write(session.config.getoption("--xpu-observations"))
    test_file = session.config.getoption("--xpu-results-of")
    if test_file is None or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return
    rows = RECORD.rows()
    if any(row["failures"] for row in rows):
        return
    # What stands behind the test file is what the caller of the check gave.
    arguments = list(session.config.invocation_params.args)
    arguments = arguments[len(arguments) - arguments[::-1].index(test_file) :]
    results.store(CACHE, test_file, arguments, rows, f"{session.testscollected - session.testsfailed} tests")
