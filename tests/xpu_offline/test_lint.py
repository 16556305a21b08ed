"""The lint finds each fault, once, in source that has it, and nothing in the project's kernels."""

from __future__ import annotations

import pathlib

import pytest

from xpu_offline.kernels import source_files
from xpu_offline.lint import lint, main

KERNEL = """
@triton.jit
def _kernel(x_ptr, y_ptr, rows, n_columns, stride_x, stride_y, N: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    {}
"""


def findings(tmp_path: pathlib.Path, source: str, name: str = "x.py") -> list[str]:
    path = tmp_path / name
    path.write_text(source)
    return [finding.what for finding in lint([path])]


def test_the_projects_kernels() -> None:
    assert lint(source_files()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (KERNEL.format("tl.make_block_ptr(x_ptr, (8,), (1,), (0,), (8,), (0,))"), "block pointers"),
        (KERNEL.format("tl.make_tensor_descriptor(x_ptr, [8], [1], [8])"), "not in every release"),
        ("import triton.tools.tensor_descriptor as t\nd = t.TensorDescriptor(x)", "in every release"),
        ("@triton.autotune([triton.Config({})], key=['N'])" + KERNEL.format("pass"), "autotune"),
        (KERNEL.format("x = tl.load(x_ptr).to(tl.float64)"), "fp64"),
        (KERNEL.format("x = tl.inline_asm_elementwise('', '', [pid], tl.int32, True, 1)"), "inline assembly"),
        ("def f(x):\n    _k[(1,)](x, num_warps=64)", "num_warps up to 64"),
        ("def f(x, n):\n    _k[(1,)](x, num_warps=max(1, min(64, n // 256)))", "num_warps up to 64"),
        ("def f(x):\n    options = {'num_warps': 64}", "num_warps up to 64"),
        ("def f(x):\n    _k[(1,)](x.contiguous())", ".contiguous()"),
        ("def g(x):\n    return x.contiguous()\ndef f(x):\n    _k[(1,)](g(x))", ".contiguous()"),
        ("@f.implement('triton', 'xpu', refuses=r)\ndef g(x):\n    return h(x.contiguous())", ".contiguous()"),
        ("def f(x):\n    _k[(1,)](x, grf_mode='large')", "grf_mode"),
        ("def f(x):\n    options = {'grf_mode': '256'}", "grf_mode"),
    ],
)
def test_each_fault(tmp_path: pathlib.Path, source: str, message: str) -> None:
    [what] = findings(tmp_path, source)
    assert message in what


@pytest.mark.parametrize(
    "line",
    [
        "x = tl.load(x_ptr + pid * stride_x + offs)",
        "x_ptr += pid * stride_x",
        "row = pid * BLOCK + offs; x = tl.load(x_ptr + row[:, None] * stride_x)",
        "b = pid // n_columns; x = tl.load(x_ptr + b * stride_x)",
        "x = tl.load(x_ptr + (pid * stride_x).to(tl.int64))",
        "page = tl.load(y_ptr); x = tl.load(x_ptr + page * stride_x)",
        "x = tl.load(x_ptr + pid * N + offs)",
        "x = tl.load(x_ptr + offs + pid * n_columns)",
        "x = tl.load(x_ptr + offset(pid, stride_x) + offs)",
    ],
)
def test_narrow_addresses(tmp_path: pathlib.Path, line: str) -> None:
    source = "@triton.jit\ndef offset(row, stride):\n    return row * stride\n" + KERNEL.format(line)
    [what] = findings(tmp_path, source)
    assert "cast the index to int64" in what


@pytest.mark.parametrize("start", ["pid", "tl.load(y_ptr)"])
def test_narrow_addresses_in_a_loop(tmp_path: pathlib.Path, start: str) -> None:
    body = f"for row in range({start}, rows):\n        x = tl.load(x_ptr + row * stride_x + offs)"
    [what] = findings(tmp_path, KERNEL.format(body))
    assert "row * stride_x" in what


@pytest.mark.parametrize(
    "line",
    [
        "x = tl.load(x_ptr + pid.to(tl.int64) * stride_x + offs)",
        "pid = pid.to(tl.int64); x_ptr += pid * stride_x",
        "offs_n = pid * BLOCK + offs; x = tl.load(x_ptr + offs_n)",
        "h = pid % n_columns; x = tl.load(x_ptr + h * stride_x)",
        "i = pid * BLOCK + offs; mask = i < N; x = tl.load(x_ptr + i // 4 * stride_x + i % 4, mask)",
        "x = tl.load(x_ptr + offs[:, None] * stride_x + offs[None, :])",
        "n = pid * n_columns; mask = offs < n",
        "x = tl.load(x_ptr) * 2.0; tl.store(y_ptr + offs, x)",
    ],
)
def test_wide_and_small_addresses(tmp_path: pathlib.Path, line: str) -> None:
    assert findings(tmp_path, KERNEL.format(line)) == []


@pytest.mark.parametrize(
    "source",
    [
        "if hasattr(tl, 'make_tensor_descriptor'):\n    d = tl.make_tensor_descriptor",
        "from xpu_ports.common.gluonlib import TensorDescriptor\nd = TensorDescriptor(x, [8], [1], [8], layout)",
        "def f(x, n):\n    _k[(1,)](x, num_warps=max(1, min(32, n // 512)))",
        "@op\ndef reference(x):\n    return x.contiguous()\ndef f(x):\n    _k[(1,)](x)",
        "def f(x):\n    _k[(1,)](x, **grf_options(256, a))",
    ],
)
def test_what_is_fine(tmp_path: pathlib.Path, source: str) -> None:
    assert findings(tmp_path, source) == []


def test_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.py"
    path.write_text("def f(x):\n    _k[(1,)](x.contiguous())\n")
    assert main([str(path)]) == 1
    assert f"{path}:2: .contiguous()" in capsys.readouterr().out
    path.write_text("")
    assert main([str(path)]) == 0
