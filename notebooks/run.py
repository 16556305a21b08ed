"""Run the notebooks where they are and keep what they show: `python notebooks/run.py [NAME...]`.

A notebook is stored with its outputs, so that a reader of the repository sees pictures and plots without running
anything. The hash of its code is kept beside them: tests/notebooks fails for outputs of other code than what is there.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
RAN = "outputs_of"
# Seconds that one cell may take.
CELL_SECONDS = 300


def code_hash(notebook: nbformat.NotebookNode) -> str:
    """Of the code in a notebook, cell by cell."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(cells).encode()).hexdigest()[:16]


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in a kernel of its own, in its folder.

    Returns:
        The notebook with outputs. What cells wrote to stderr (progress bars, warnings of libraries) is not kept.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            # A picture of Pillow's shows itself twice.
            output.get("data", {}).pop("image/jpeg", None)
    # Those that the kernel reports hold the version of the Python that ran it.
    notebook.metadata = {**{k: notebook.metadata[k] for k in ("kernelspec", "language_info")}, RAN: code_hash(notebook)}
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main(names: Sequence[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        print(path.name, flush=True)
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main([name.removesuffix(".ipynb") for name in sys.argv[1:]])
