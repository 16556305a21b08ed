"""pytest plugin for a machine with a GPU: at the end, the error of every comparison beside what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from xpu_ports.common import accuracy

_ERRORS: dict[str, list[accuracy.Error]] = {}


def pytest_configure(config: pytest.Config) -> None:
    measure = accuracy.measure

    def recorded(*args: Any, **kwargs: Any) -> accuracy.Error:
        error = measure(*args, **kwargs)
        _ERRORS.setdefault(_current, []).append(error)
        return error

    accuracy.measure = recorded


_current = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _current
    _current = item.nodeid
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("errors: largest, allowed, relative")
    for test, errors in _ERRORS.items():
        worst = max(errors, key=lambda e: e.largest / e.allowed if e.allowed else float(e.largest > 0))
        figures = f"{worst.largest:.2e}  {worst.allowed:.2e}  {worst.relative:.1e}"
        terminalreporter.write_line(f"{figures}  {'ok ' if worst.within else 'OUT'}  {test}")
