"""The devices that kernels are compiled for: what a driver would report of them, and who compiles their native code.

Sources of the properties: what torch and Triton report for Max 1550, B580 and A770; Intel's extension lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Target:
    """An architecture of `xpu_ports.common.device`, as Triton's compiler is told about it."""

    triton: GPUTarget
    # The device that ocloc compiles for. Its 2022 release has no Xe2, so Max stands in: the same sub-group sizes,
    # registers and matrix instruction widths.
    native: str


def _gpu(name: str, lanes: list[int], sub_groups: int, matrix: bool, fp64: bool) -> GPUTarget:
    properties: dict[str, Any] = {
        "name": name,
        "platform_name": "",
        "vendor": "Intel",
        "version": "",
        # 0 keeps the compiler from asking ocloc, which would overwrite what is said here.
        "architecture": 0,
        # Kept for the runtime; no code depends on them.
        "gpu_eu_count": 0,
        "gpu_subslice_count": 0,
        "max_work_group_size": 1024,
        "max_num_sub_groups": sub_groups,
        "sub_group_sizes": lanes,
        "has_fp64": fp64,
        "has_subgroup_matrix_multiply_accumulate": matrix,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": matrix,
        "has_subgroup_2d_block_io": matrix,
        "has_bfloat16_conversions": matrix,
    }
    return GPUTarget("xpu", properties, 32)


# What the compiler reads is the same for Max and Xe2, so one compilation serves both where the launch is the same.
_XE_HPC_AND_XE2 = _gpu("Xe HPC, Xe2", [16, 32], 64, True, True)

TARGETS = {
    "max": Target(_XE_HPC_AND_XE2, "pvc"),
    "xe2": Target(_XE_HPC_AND_XE2, "pvc"),
    "arc-a": Target(_gpu("Xe HPG", [8, 16, 32], 128, False, False), "acm-g10"),
}

# What runs here: code of the same back end without matrix instructions and 2D block reads, which a CPU can run too.
# The name is part of the cache's key, and says what `xpu_offline.driver` changes in the code.
CPU = _gpu("CPU, bf16 products in fp32", [16, 32], 64, False, True)
