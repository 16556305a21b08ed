"""Every notebook runs as a reader would run it, shows what it promises, and is stored with what its code showed."""

from __future__ import annotations

import base64
import importlib.util
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import numpy as np
import pytest
from nbclient.exceptions import CellExecutionError
from PIL import Image

from tests.test_architecture import ABSOLUTE

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
# Notebook -> pictures and plots that it shows.
PICTURES = {"text": 1, "pictures": 4, "quantize": 6, "slow": 3}
MOST_BYTES = 350_000


def run_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_run", NOTEBOOKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = run_module()


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def pictures(notebook: nbformat.NotebookNode) -> Iterator[bytes]:
    """The PNGs that a notebook's cells show."""
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output.data["image/png"])


def is_blank(png: bytes) -> bool:
    """Whether it is one colour, or one but for a frame: fewer than 1 in 100 pixels differ from the most frequent."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    counts = np.bincount(pixels.ravel(), minlength=256)
    return bool(counts.max() > 0.99 * pixels.size)


def check_pictures(notebook: nbformat.NotebookNode, expected: int) -> None:
    shown = list(pictures(notebook))
    assert len(shown) == expected
    for number, png in enumerate(shown):
        assert not is_blank(png), f"picture {number} is blank"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The notebooks in a folder of their own, with what they read beside it."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, folder)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    return folder


def test_all_are_tested() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_runs(name: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fresh kernel, without Triton's interpreter, which tests have and readers do not."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("XPU_PORTS_TUNING", raising=False)
    for cell in (notebook := read(name)).cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbformat.write(notebook, copy / f"{name}.ipynb")
    check_pictures(RUN.execute(copy / f"{name}.ipynb"), PICTURES[name])


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_stored(name: str) -> None:
    """Outputs of the code that is there, whole, in order, small, and of no place in particular."""
    notebook = read(name)
    assert notebook.metadata[RUN.RAN] == RUN.code_hash(notebook), f"run it: python notebooks/run.py {name}"
    check_pictures(notebook, PICTURES[name])
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < MOST_BYTES
    texts = [cell.source for cell in notebook.cells]
    texts += [output.get("text", "") for cell in cells for output in cell.outputs]
    for text in texts:
        assert not ABSOLUTE.search(text)
        assert "/tmp/" not in text


# ------------------------------------------------------------------------------------------------------------- planted


def planted(folder: Path, source: str) -> Path:
    path = folder / "planted.ipynb"
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=read("text").metadata), path
    )
    return path


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def test_an_error_in_a_cell_is_one(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="no such thing"):
        RUN.execute(planted(tmp_path, "raise RuntimeError('no such thing')"))


def test_blank_pictures_are_seen() -> None:
    white, noise = np.full((64, 64), 255, np.uint8), np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)
    dot = white.copy()
    dot[0, :40] = 0
    assert is_blank(png(white))
    assert is_blank(png(dot))
    assert not is_blank(png(noise))


def test_a_missing_picture_and_other_code_are_seen() -> None:
    notebook = read("text")
    with pytest.raises(AssertionError):
        check_pictures(notebook, PICTURES["text"] + 1)
    notebook.cells[1].source += "\nprint()"
    assert notebook.metadata[RUN.RAN] != RUN.code_hash(notebook)
