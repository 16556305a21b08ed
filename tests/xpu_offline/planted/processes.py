"""A file of tests whose process dies, one that fails and one that passes, run as the XPU check runs its files.

.venv-xpu/bin/python -m tests.xpu_offline.planted.processes SEEN
"""

from __future__ import annotations

import pathlib
import sys

from xpu_offline import files

SOURCES = {
    "dies": "import os\n\n\ndef test(xpu_architecture):\n    os.abort()\n",
    "fails": "def test(xpu_architecture):\n    assert xpu_architecture == 'max'\n",
    "passes": "def test(xpu_architecture):\n    pass\n",
    "has_none": "def test():\n    raise AssertionError\n",
}


def main() -> int:
    seen = pathlib.Path(sys.argv[1])
    paths = [seen / f"test_{name}.py" for name in SOURCES]
    for path, source in zip(paths, SOURCES.values(), strict=True):
        path.write_text(source)
    files.all_files = lambda: list(map(str, paths))
    return files.main([str(seen)])


if __name__ == "__main__":
    sys.exit(main())
