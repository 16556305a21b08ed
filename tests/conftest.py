"""Options and fixtures that all tests share."""

from __future__ import annotations

import os

# Triton decides when a kernel is decorated whether it is interpreted, so this comes before any import of one.
os.environ.setdefault("TRITON_INTERPRET", "1")

import zlib

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests that take long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="takes long: run with --full"))


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The seed is a hash of the test's id: stable for a test, different between tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
