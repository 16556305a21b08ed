"""Tests, under `xpu_offline.plugin`: every kernel compiled as it is launched for the sizes of the released models.

The sizes are those of the benchmark registry. Nothing runs: a tile that spills shows in the native code, and tests of
numbers are too small to have it.
"""

from __future__ import annotations

import pytest
import torch

from xpu_offline.driver import compile_only
from xpu_offline.unfilled import Uncomputed, arguments
from xpu_ports.common.bench.case import Case
from xpu_ports.common.bench.registry import CASES
from xpu_ports.common.dispatch import BackendError, use_backend

# What has no plan on an architecture or for a dtype, and why.
WITHOUT_PLAN: dict[tuple[str, str | torch.dtype], str] = {
    ("mla_decode", torch.float32): "which matrix units take",
    ("indexer_scores", torch.float32): "which matrix units take",
}
SIZES = [
    (case, size)
    for case in CASES.values()
    for size in case.sizes
    if case.has_kernel and any(i.backend == "triton" for i in case.op.implementations)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("case", "size"), SIZES, ids=[f"{case.name}-{size}" for case, size in SIZES])
def test_compiles(xpu_architecture: str, case: Case, size: str, dtype: torch.dtype) -> None:
    args = arguments(case, size, dtype)
    why = WITHOUT_PLAN.get((case.op.name, dtype)) or WITHOUT_PLAN.get((case.op.name, xpu_architecture))
    with compile_only(), use_backend("triton"), Uncomputed():
        if why is not None:
            with pytest.raises(BackendError, match=why):
                case.op(*args)
            return
        case.op(*args)
