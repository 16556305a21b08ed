"""What the kernel for NVIDIA's Hopper compiles to, on any machine: nothing spilled, products that run side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Of a multiprocessor, in bytes, for one program.
SHARED_MEMORY = 227 * 1024
# Tokens, heads, entries (0 for none), and how many of them are named (0 for all that are closed).
CALLS = {
    "split, named": (64, 64, 4096, 512),
    "whole, closed": (128, 128, 256, 0),
    "window": (64, 64, 0, 0),
}
# In a process of its own, since Triton's interpreter, which the tests run in, has no Gluon. What the op would launch is
# compiled instead.
PROGRAM = """
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

    from xpu_ports.common.kernels.fp8_pages import page_bytes
    from xpu_ports.common.kernels.sparse_mla import hopper
    from xpu_ports.common.kernels.sparse_mla import triton as module

    NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}


    class Compiled:
        \"\"\"Stands for the kernel: its launch compiles and keeps what came of it.\"\"\"

        def __init__(self, kernel):
            self.names, self.function = kernel.names, kernel.function

        def __getitem__(self, grid):
            return self.compile

        def compile(self, *args, num_warps, **constants):
            signature, aligned = dict.fromkeys(self.names, "constexpr"), {}
            fixed = ("before", "slots", "named")
            for i, (name, value) in enumerate(zip(self.names, args)):
                if isinstance(value, Tensor):
                    signature[name] = "*" + NAMES[value.dtype]
                elif isinstance(value, float):
                    signature[name] = "fp32"
                elif value == 1 and name not in fixed:
                    constants[name] = 1
                else:
                    signature[name] = "i32"
                if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and name not in fixed):
                    aligned[i,] = [["tt.divisibility", 16]]
            places = {(self.names.index(name),): value for name, value in constants.items()}
            source = GluonASTSource(self.function, signature, places, aligned)
            self.result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **constants: None


    kernel = hopper._sparse_mla_hopper_kernel = Compiled(hopper._sparse_mla_hopper_kernel)
    module._join_kernel = Nothing()
    # As on such a device.
    hopper.refuses = lambda device: None
    for name, (B, H, S, A) in json.loads(sys.argv[1]).items():
        kernel.result = None
        q = torch.empty(B, H, 512, dtype=torch.bfloat16, device="meta")
        window, entries = (torch.empty(B, -(-n // 64), page_bytes(512, 64), dtype=torch.uint8, device="meta")
                           for n in (128, S))
        indices = torch.empty(B, A, dtype=torch.int32, device="meta")
        lengths, sinks = torch.empty(B, dtype=torch.int64, device="meta"), torch.empty(H, device="meta")
        with use_architecture("nvidia"):
            module.sparse_mla_decode_triton(
                q, window, entries if S else None, indices if A else None, lengths, sinks, 128, 4, 64, 0.1
            )
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.result.asm["cubin"])
            file.flush()
            code = subprocess.check_output([tool, "-res-usage", "-sass", file.name], text=True)
        used = dict(re.findall(r"\\b(REG|STACK|LOCAL):(\\d+)", code))
        found = collections.Counter(re.findall(r"\\b(HGMMA|LDL|STL|WARPGROUP\\.DEPBAR)\\b", code))
        print(json.dumps({"name": name, "shared": kernel.result.metadata.shared, **used, **found}))
"""


def test_what_is_compiled() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), json.dumps(CALLS)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "XPU_PORTS_TUNING": "off"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if "skip" in lines[0]:
        pytest.skip(lines[0]["skip"])
    assert [line["name"] for line in lines] == list(CALLS)
    for line in lines:
        name = line["name"]
        assert line["shared"] <= SHARED_MEMORY, name
        spilled = [line.get(key, "0") for key in ("STACK", "LOCAL", "LDL", "STL")]
        assert spilled == ["0"] * 4, f"{name}: registers are spilled: {line}"
        # 32 for scores, 4 for the sums of each half of the columns, and 4 for those of the last tile. The compiler has
        # one wait for another where it finds that their registers overlap.
        assert line["HGMMA"] == 44, name
        assert line["WARPGROUP.DEPBAR"] < 10, f"{name}: products run one after another: {line}"
