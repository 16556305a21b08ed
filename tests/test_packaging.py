"""The wheel: built without a network, complete, and the way the README says to install it."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cli", "common", "models", "quant")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# A model that somebody adds, with a package inside it.
NEW = {
    "models/new_model/__init__.py": "LAYERS = 7\n",
    "models/new_model/parts/__init__.py": "",
    "models/new_model/a.json": "{}",
}


def sources(root: Path) -> set[str]:
    """The Python files, markers and data of the four folders, as the wheel names them."""
    kinds = {".py", ".json", ".txt", ".typed"}
    files = (path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in kinds)
    return {f"xpu_ports/{path.relative_to(root).as_posix()}" for path in files if path.name != "ruff.toml"}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that building needs, and a new model, where building may leave its traces."""
    root = tmp_path_factory.mktemp("copy")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, root / name)
    for name, content in NEW.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip(["wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)], copy)
    [found] = target.iterdir()
    return found


def pip(arguments: list[str], folder: Path) -> None:
    """Run pip without a network: any index is out of reach."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def headers(wheel: Path) -> Message:
    return Parser().parsestr(metadata(wheel, "METADATA"))


def test_every_file_is_in_the_wheel(wheel: Path, copy: Path) -> None:
    """And nothing else but the metadata; a model that was just added too."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = sources(copy)
    assert {f"xpu_ports/{name}" for name in NEW} <= expected
    assert {f"xpu_ports/{folder}/py.typed" for folder in FOLDERS} <= expected
    assert names == expected


def test_every_folder_with_code_is_a_package() -> None:
    """Without __init__.py it would be missing in the wheel and work in a checkout."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.relative_to(ROOT)


def test_metadata(wheel: Path) -> None:
    project, found = PROJECT["project"], headers(wheel)
    assert (found["Name"], found["Version"]) == (project["name"], project["version"])
    assert wheel.name == f"xpu_ports-{project['version']}-py3-none-any.whl"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found.get_payload().strip(), "the README is not in the metadata"


def test_dependencies(wheel: Path) -> None:
    """No triton and no pin on torch: PyTorch for XPU brings its own."""
    core = [r for r in headers(wheel).get_all("Requires-Dist") if "extra ==" not in r]
    names = {r.split(">")[0].split("=")[0].strip(): r for r in core}
    assert {"torch", "transformers", "accelerate", "safetensors", "rich"} <= set(names)
    assert "triton" not in names
    assert names["torch"] == "torch>=2.11"
    assert names["transformers"] == "transformers>=5.24"


def test_installed_version_is_the_projects() -> None:
    assert importlib.metadata.version("xpu-ports") == PROJECT["project"]["version"]


def test_console_script(wheel: Path) -> None:
    entries = configparser.ConfigParser()
    entries.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(entries["console_scripts"]) == {"xpu-ports": "xpu_ports.cli.main:main"}
    [entry] = importlib.metadata.entry_points(group="console_scripts", name="xpu-ports")
    assert callable(entry.load())


def test_the_wheel_installs_and_imports(wheel: Path, tmp_path: Path) -> None:
    """Out of sight of the checkout: only what the wheel put there is imported."""
    target = tmp_path / "site"
    pip(["install", "--no-deps", "--target", str(target), str(wheel)], tmp_path)
    code = f"""
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__name__", "").lower()]
sys.path.insert(0, {str(target)!r})
import xpu_ports.models.new_model.parts, xpu_ports.quant, xpu_ports.common.kernels.rms_norm, xpu_ports.cli.main
import importlib.metadata
for name, module in sorted(sys.modules.items()):
    if name.startswith("xpu_ports."):
        assert module.__file__.startswith({str(target)!r}), module.__file__
print(xpu_ports.models.new_model.LAYERS, importlib.metadata.version("xpu-ports"))
"""
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7", PROJECT["project"]["version"]]
    assert (target / "bin" / "xpu-ports").exists() or (target / "Scripts").exists()
