"""Runs blocks of Python, each page's one after another in a namespace of its own: `run_blocks.py BLOCKS.json OUT.json`.

BLOCKS.json holds {page: [code, ...]}; OUT.json gets {page: {"error": a traceback or null, "out": what was printed}}.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def run(page: str, codes: list[str]) -> dict[str, str | None]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, code in enumerate(codes):
            try:
                exec(compile(code, f"{page}, block {number}", "exec"), namespace)
            except BaseException:
                return {"error": traceback.format_exc(), "out": printed.getvalue()}
    return {"error": None, "out": printed.getvalue()}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({page: run(page, codes) for page, codes in given.items()}))
