"""Compiles kernels with Intel's whole device library and with extracts of it, and prints what differs.

.venv-xpu/bin/python -m tests.xpu_offline.planted.library FOLDER
"""

from __future__ import annotations

import os
import pathlib
import sys

from xpu_offline.driver import prepare_environment

FOLDER = pathlib.Path(sys.argv[1])
prepare_environment(FOLDER)
# Not what an earlier compilation has left.
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton._C.libtriton import llvm  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402

from xpu_offline.devicelib import Extracts  # noqa: E402
from xpu_offline.targets import CPU, TARGETS  # noqa: E402


@triton.jit
def _nothing_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """No function of the library."""
    offs = tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs) * 2.0)


@triton.jit
def _one_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """One that calls others."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.div_rn(x, tl.sum(x, 0)))


@triton.jit
def _several_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Several, with tables."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.erf(x) + tl.rsqrt(x) + libdevice.log1p(x) + libdevice.tanh(x) + libdevice.sinpi(x))


def main() -> None:
    whole = llvm.link_extern_libs
    ways = {"whole": whole, "extract": Extracts(FOLDER / "new"), "extract kept": Extracts(FOLDER / "new")}
    for target in (TARGETS["max"].triton, TARGETS["arc-a"].triton, CPU):
        for kernel in (_nothing_kernel, _one_kernel, _several_kernel):
            source = ASTSource(kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32", "BLOCK": "constexpr"}, {(2,): 64})
            codes = {}
            for name, link in ways.items():
                llvm.link_extern_libs = link
                codes[name] = triton.compile(source, target=target).asm["spv"]
            same = len({*codes.values()}) == 1
            print(target.arch["name"], kernel.__name__, len(codes["whole"]), "same" if same else "differs")


if __name__ == "__main__":
    main()
