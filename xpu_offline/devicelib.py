"""Links Intel's device library from an extract of it: what the kernel at hand calls.

Triton reads all of the library, two megabytes, for each kernel that it compiles, and that takes as long as the rest of
the compilation. The code that comes out is the same, byte for byte: tests/xpu_offline/planted/library.py compares.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
import tempfile
from typing import Any

from triton._C.libtriton import intel, ir, llvm

_link = llvm.link_extern_libs


class Extracts:
    """Stands in for `llvm.link_extern_libs`; extracts are kept in a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._digests: dict[str, str] = {}
        # Names that were looked for in a library and are not in it: built-in functions of the device.
        self._absent: dict[str, set[str]] = {}

    def __call__(self, module: Any, libraries: list[str]) -> None:
        declared = {f.name for f in module.get_functions() if f.is_declaration()}
        # LLVM's own are in no library.
        called = {name for name in declared if not name.startswith("llvm.")}
        _link(module, [str(self._extract(called, library)) for library in libraries])

    def _extract(self, called: set[str], library: str) -> pathlib.Path:
        if library not in self._digests:
            self._digests[library] = hashlib.sha256(pathlib.Path(library).read_bytes()).hexdigest()
        absent = self._absent.setdefault(library, set())
        called = called - absent
        key = hashlib.sha256(" ".join([self._digests[library], *sorted(called)]).encode()).hexdigest()
        stored = self.folder / f"{key}.ll"
        if not stored.exists():
            extracted = _extracted(sorted(called), library)
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as partial:
                partial.write(extracted)
            pathlib.Path(partial.name).replace(stored)
            absent |= called - set(re.findall(r"^define .*?@([\w.$]+)\(", extracted, re.MULTILINE))
        return stored


def _extracted(called: list[str], library: str) -> str:
    """The functions called and those that they call, as LLVM's text."""
    context = ir.context()
    ir.load_dialects(context)
    intel.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as source:
        # Only names count for the linker, not types.
        source.write("".join(f'llvm.func @"{name}"()\n' for name in called))
        source.flush()
        module = ir.parse_mlir_module(source.name, context)
    module.context = context
    llvm_context = llvm.context()
    linked = llvm.to_module(module, llvm_context)
    intel.set_spv_target_triple(linked)
    _link(linked, [library])
    # Triton hides what it has linked; from here it is linked once more.
    return str(linked).replace("\ndefine internal ", "\ndefine ")
