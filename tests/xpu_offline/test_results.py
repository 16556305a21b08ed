"""Earlier results stand in for a run only where nothing has changed since."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

from xpu_offline import results

TEST_FILE = "tests/test_double.py"
ROWS = [dict(kernel="double", launches=3)]


@pytest.fixture
def project(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A project with one test that passed, of one kernel."""
    for name in ("pyproject.toml", "kernels.py", TEST_FILE):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}\n")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "versions", lambda: ["triton-xpu 3.3.0b1"])
    monkeypatch.setattr(results, "sources", lambda: ["kernels.py", TEST_FILE])
    results.store(tmp_path / "cache", TEST_FILE, ["-k", "odd"], ROWS, "3 tests")
    return tmp_path


def recall(project: pathlib.Path, *arguments: str) -> object:
    return results.recall(project / "cache", TEST_FILE, list(arguments or ("-k", "odd")))


def test_nothing_has_changed(project: pathlib.Path) -> None:
    kept = recall(project)
    assert kept["rows"] == ROWS
    assert kept["summary"] == "3 tests"


@pytest.mark.parametrize("name", ["kernels.py", TEST_FILE, "pyproject.toml"])
def test_a_source_has_changed(project: pathlib.Path, name: str) -> None:
    (project / name).write_text("# other\n")
    assert recall(project) is None


def test_a_source_is_gone(project: pathlib.Path) -> None:
    (project / "kernels.py").unlink()
    assert recall(project) is None


def test_other_versions(project: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "versions", lambda: ["triton-xpu 3.4.0"])
    assert recall(project) is None


def test_other_arguments(project: pathlib.Path) -> None:
    assert recall(project, "--full") is None
    assert results.recall(project / "cache", "tests/test_triple.py", ["-k", "odd"]) is None


def test_what_a_process_has_imported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernels.py", ".venv/lib/torch.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("kernels.py", ".venv/lib/torch.py", "gone.py"):
        module = types.ModuleType(f"planted.{name}")
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert results.sources(tmp_path) == ["kernels.py"]
