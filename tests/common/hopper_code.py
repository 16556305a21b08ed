"""What kernels in Gluon compile to for NVIDIA's Hopper, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of a multiprocessor, in bytes, for one program.
SHARED_MEMORY = 227 * 1024
# In a process of its own, since Triton's interpreter, which the tests run in, has no Gluon.
_PROGRAM = '''
import collections
import json
import re
import subprocess
import sys
import tempfile

import torch
from torch import Tensor

from xpu_ports.common import gluonlib
from xpu_ports.common.device import use_architecture


def skip(why):
    print(json.dumps({"skip": why}))
    sys.exit()


if gluonlib._WHY_NOT is not None:
    skip(gluonlib._WHY_NOT)
import triton
from triton.backends.compiler import GPUTarget

if "nvidia" not in triton.backends.backends:
    skip("this Triton compiles nothing for NVIDIA's GPUs")
try:
    tool = triton.knobs.nvidia.cuobjdump.path
    triton.knobs.nvidia.ptxas.path
except (AttributeError, RuntimeError) as error:
    skip(f"ptxas or cuobjdump is missing: {error}")
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout

NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "launch_pdl", "maxnreg")


class Compiled:
    """Stands for a kernel of `tritonlib`, also with boxes: its launch compiles and keeps what came of it."""

    def __init__(self, kernel):
        self.names, self.boxes = kernel.names, getattr(kernel.function, "boxes", {})
        self.function = kernel.function.function if self.boxes else kernel.function

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **constants):
        options = {name: constants.pop(name) for name in OPTIONS if name in constants}
        known = {**constants, **options}
        constants.update((name, known[name]) for name in OPTIONS if name in self.names)
        signature, aligned = dict.fromkeys(self.names, "constexpr"), {}
        for i, (name, value) in enumerate(zip(self.names, args)):
            if i in self.boxes:
                shape = list(self.boxes[i].shape(known))
                layout = NVMMASharedLayout(128, 8 * value.itemsize, 2)
                signature[name] = f"tensordesc<{NAMES[value.dtype]}{shape},{layout!r}>"
            elif isinstance(value, Tensor):
                signature[name] = "*" + NAMES[value.dtype]
                aligned[i,] = [["tt.divisibility", 16]]
            elif value == 1 and not self.function.params[i].do_not_specialize:
                constants[name] = 1
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if value % 16 == 0 and not self.function.params[i].do_not_specialize:
                    aligned[i,] = [["tt.divisibility", 16]]
        places = {(self.names.index(name),): value for name, value in constants.items()}
        source = GluonASTSource(self.function, signature, places, aligned)
        self.result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

    def report(self, **described):
        """Print its shared memory, and how often its code has some instructions: spills also in loops alone."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.result.asm["cubin"])
            file.flush()
            code = subprocess.check_output([tool, "-sass", file.name], text=True)
        names = re.findall(r"\\b(HGMMA|QGMMA|HMMA|LDL|STL|WARPGROUP\\.DEPBAR|UTMALDG|UTMASTG)\\b", code)
        described["in loops"] = len(re.findall(r"\\b(?:LDL|STL)\\b", in_loops(code)))
        described["triton"] = triton.__version__
        print(json.dumps({**described, "shared": self.result.metadata.shared, **collections.Counter(names)}))


def in_loops(code):
    """The instructions of a program's innermost loops that multiply matrices or copy."""
    lines = [(int(at, 16), text) for at, text in re.findall(r"/\\*([0-9a-f]{4,5})\\*/\\s+(.*?);", code)]
    branches = [(at, re.match(r"@.* BRA (0x[0-9a-f]+)", text)) for at, text in lines]
    loops = [range(int(branch[1], 16), at + 1) for at, branch in branches if branch and int(branch[1], 16) < at]
    works = {at for at, text in lines if re.search(r"\\b(HGMMA|LDGSTS)\\b", text)}
    loops = [loop for loop in loops if any(at in loop for at in works)]
    innermost = [loop for loop in loops if not any(o != loop and o[0] in loop and o[-1] in loop for o in loops)]
    return "\\n".join(text for at, text in lines if any(at in loop for loop in innermost))


class Nothing:
    """Stands for a kernel that is not asked about."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


'''


def hopper_code(program: str) -> list[dict[str, Any]]:
    """What a program's calls of `Compiled.report` tell; skips the test where nothing can be compiled."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "XPU_PORTS_TUNING": "off"}
    command = [sys.executable, "-c", _PROGRAM + textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if "skip" in lines[0]:
        pytest.skip(lines[0]["skip"])
    return lines
