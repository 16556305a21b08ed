"""What has to be read from and changed in a SPIR-V module so that Intel's OpenCL runtime runs it on a CPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEADER_WORDS = 5
_EXTENSION, _EXECUTION_MODE, _CAPABILITY, _DECORATE, _EXECUTION_MODE_ID = 10, 16, 17, 71, 331
_KERNEL_ATTRIBUTES_CAPABILITY = 5892
_KERNEL_ATTRIBUTES_MODES = (5893, 5894, 5895, 5896)
_BUILTIN = 11
_NUM_WORKGROUPS, _WORKGROUP_ID, _GLOBAL_OFFSET = 24, 26, 33


def _words(spirv: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(spirv) // 4}I", spirv))


def _instructions(words: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """(position, opcode, operands) of each instruction."""
    at = _HEADER_WORDS
    while at < len(words):
        length = words[at] >> 16
        yield at, words[at] & 0xFFFF, words[at + 1 : at + length]
        at += length


def for_cpu(spirv: bytes) -> bytes:
    """Drop SPV_INTEL_kernel_attributes: hints for a scheduler that the CPU runtime does not accept."""
    words = _words(spirv)
    kept = words[:_HEADER_WORDS]
    for at, opcode, operands in _instructions(words):
        drop = (
            (opcode == _CAPABILITY and operands[0] == _KERNEL_ATTRIBUTES_CAPABILITY)
            or (opcode in (_EXECUTION_MODE, _EXECUTION_MODE_ID) and operands[1] in _KERNEL_ATTRIBUTES_MODES)
            or (opcode == _EXTENSION and b"SPV_INTEL_kernel_attributes" in struct.pack(f"<{len(operands)}I", *operands))
        )
        if not drop:
            kept += words[at : at + 1 + len(operands)]
    return struct.pack(f"<{len(kept)}I", *kept)


def uses_grid_size(spirv: bytes) -> bool:
    """Whether the kernel asks how many programs there are (`tl.num_programs`)."""
    return _has_variable(spirv, _NUM_WORKGROUPS)


def has_program_ids(spirv: bytes) -> bool:
    """Whether program ids are read from a variable. A kernel without calls into the device library calls a function."""
    return _has_variable(spirv, _WORKGROUP_ID)


def _has_variable(spirv: bytes, builtin: int) -> bool:
    return any(
        opcode == _DECORATE and operands[1:3] == [_BUILTIN, builtin]
        for _, opcode, operands in _instructions(_words(spirv))
    )


def program_id_from_offset(spirv: bytes) -> bytes:
    """Take program ids from the launch's global offset: one work-group at offset (i, j, k) is then program (i, j, k).

    So any set of programs can run in any order, which shows who wrote what.
    """
    words = _words(spirv)
    for at, opcode, operands in _instructions(words):
        if opcode == _DECORATE and operands[1:3] == [_BUILTIN, _WORKGROUP_ID]:
            words[at + 3] = _GLOBAL_OFFSET
    return struct.pack(f"<{len(words)}I", *words)
