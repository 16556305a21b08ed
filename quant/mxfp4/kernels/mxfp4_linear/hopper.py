"""Many rows of x against a weight in MXFP4 on NVIDIA's Hopper, in Gluon.

A program makes a tile of outputs. One warp has rows of x and packed codes copied to shared memory in boxes, some
steps ahead. The other warps decode codes in registers, as the first factor of an asynchronous product whose second
factor, x, stays in shared memory; while one step is multiplied they decode the next. What `fragments.py` does as well,
but Triton lets it neither leave a product running over the decoding nor take x as it is in memory: here four lanes
read the same word and each decodes the byte whose two columns are its own.

A weight's number is code 2^-126, made from bits, times one or two powers of two, so it is exact at any scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from xpu_ports.common import gluonlib
from xpu_ports.common.boxes import Box, boxed
from xpu_ports.common.device import architecture
from xpu_ports.common.gluonlib import allocate_barriers, barrier, copy_box, gl, gluon, hopper, init_barriers
from xpu_ports.common.launch_order import overlap_options, wait_for_inputs
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of

# Rows of x for which it is faster than `fragments.py` and than decoding to memory for the vendor's product.
SMALLEST, LARGEST = 65, 2048
# The part of the multiprocessors that has to have work, on average of all rounds of tiles.
BUSY = 0.7
# Columns of a turn: a box of codes has 128 bytes of a row, which are four steps of x.
_TURN = 256


def _decoding() -> str:
    """Assembly for eight times two words, as `_decode` passes them: outputs $0 to $15, words from $16 and from $24 on.

    Of both words the bytes that $32 picks are in either half of c; a shift brings the low nibbles of one half beside
    the high nibbles of the other, and each pair is put where bf16 has sign, last exponent bits and mantissa. From $40
    on are powers of two, from $48 on scales, from $56 on what tells of a scale beyond 127: those numbers take two
    powers, $1 not being a bf16, and a branch, so that others do not take the time.
    """
    lines = [".reg .b32 c, v, s, t, u;", ".reg .pred p;"]
    for i in range(8):
        lines += [
            f"prmt.b32 c, ${16 + i}, ${24 + i}, ${32 + i};",
            "shl.b32 v, c, 4;",
            "lop3.b32 v, v, c, 0x0000FFFF, 0xE4;",
            "and.b32 s, v, 0x80808080;",
            "shl.b32 t, v, 2;",
            "shl.b32 u, s, 8;",
            f"lop3.b32 ${i}, t, u, 0x01C001C0, 0xE4;",
            "shr.u32 t, v, 6;",
            f"lop3.b32 ${8 + i}, t, s, 0x01C001C0, 0xE4;",
        ]
    lines += [f"or.b32 u, {'u' if i > 1 else '$56'}, ${56 + i};" for i in range(1, 8)]
    lines += ["setp.gt.u32 p, u, 127;", "vote.sync.any.pred p, p, 0xFFFFFFFF;", "@p bra.uni LARGE;"]
    lines += [f"mul.rn.bf16x2 ${j}, ${j}, ${40 + i};" for i in range(8) for j in (i, 8 + i)]
    lines += ["bra.uni DONE;", "LARGE:"]
    for i in range(8):
        lines += [
            f"min.u32 t, ${48 + i}, 128;",
            "mad.lo.u32 t, t, 0x00800080, 0x3F003F00;",
            f"max.u32 u, ${48 + i}, 128;",
            "mad.lo.u32 u, u, 0x00800080, 0xFF7FFF80;",
            f"setp.eq.u32 p, ${48 + i}, 255;",
            "selp.b32 u, 0x7FC07FC0, u, p;",
        ]
        lines += [f"mul.rn.bf16x2 ${j}, ${j}, {power};" for j in (i, 8 + i) for power in "tu"]
    return "\n".join(["{", *lines, "DONE:", "}"])


_DECODING = gl.constexpr(_decoding())
_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 48))


@gluon.constexpr_function
def _layout_words(warps, words):
    """Of [16 warps, words]: each warp has 16 rows, each lane two, and four lanes have the same two."""
    columns = [[0, 1 << i] for i in range(words.bit_length() - 1)]
    rows = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, [8, 0]], lanes, rows, [], [16 * warps, words])


@gluon.constexpr_function
def _layout_bytes(warps):
    """Of [16 warps, block, half of it, byte of a word, word]: as `_layout_words`, a byte for each of the four lanes."""
    rows = [[16 << i, 0, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
    registers = [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, rows, [], [16 * warps, 2, 2, 4, 2])


@gluon.jit
def _read_scale(ptrs, blocks, turn, turns, K, EVEN: gl.constexpr):
    """Scales of a turn's eight blocks; EVEN: K is whole turns. Beyond the last are the last's, of codes of 0."""
    if EVEN:
        at = gl.expand_dims(blocks, 0) + 8 * gl.minimum(turn, turns - 1)
    else:
        at = gl.expand_dims(gl.minimum(blocks + 8 * turn, K // 32 - 1), 0)
    return gl.load(ptrs + at)


@gluon.jit
def _steps_of(scale, ROWS: gl.constexpr):
    """[ROWS, 8] to four of [ROWS, 2]."""
    first, second = gl.split(gl.permute(gl.reshape(scale, (ROWS, 2, 2, 2)), (0, 3, 2, 1)))
    scale_0, scale_1 = gl.split(first)
    scale_2, scale_3 = gl.split(second)
    return scale_0, scale_1, scale_2, scale_3


@gluon.jit
def _spread(scales, WARPS: gl.constexpr):
    """[16 WARPS, 2] in the layout of `_layout_bytes`, without the last dimension, to be broadcast."""
    BLOCKS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, _layout_bytes(WARPS))))
    return gl.expand_dims(gl.expand_dims(gl.convert_layout(scales, BLOCKS, assert_trivial=True), 2), 3)


@gluon.jit
def _decode(words, scale, seen, WARPS: gl.constexpr, FACTOR: gl.constexpr):
    """Words [16 WARPS, 8] and scales [16 WARPS, 2] to [16 WARPS, 64], bf16: as pairs in 32 bits, and as FACTOR."""
    BYTES: gl.constexpr = _layout_bytes(WARPS)
    WORDS: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, BYTES))
    BYTE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(4, BYTES))))
    even, odd = gl.split(gl.reshape(words, (16 * WARPS, 2, 2, 2)))
    even = gl.expand_dims(gl.convert_layout(even, WORDS, assert_trivial=True), 3)
    odd = gl.expand_dims(gl.convert_layout(odd, WORDS, assert_trivial=True), 3)
    pick = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, BYTE) * 0x1111 + 0x4040, 0), 0), 0)
    # 2^(scale - 1), with which the code times 2^-126 is exact.
    s = scale.to(gl.int32)
    power = _spread(s * 0x00800080 + 0x3F003F00, WARPS)
    first, second = gl.inline_asm_elementwise(
        _DECODING,
        _OPERANDS,
        [even, odd, pick, power, _spread(s, WARPS), _spread(seen, WARPS)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=8,
    )
    pairs = gl.join(first, second)
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    # [row, block, half of it, word, byte, nibble]
    w = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 2, 4, 3, 5)), (16 * WARPS, 64))
    return pairs, gl.convert_layout(w, FACTOR, assert_trivial=True)


@gluon.jit
def _copy(x, words, start_m, start_n, turns, buffers, barriers, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          STAGES: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """Ask for boxes as they are free: x a step at a time, codes a turn of four steps at a time and further ahead."""
    x_buffers, word_buffers = buffers
    x_ready, x_free, words_ready, words_free = barriers
    AHEAD: gl.constexpr = TURNS - 2
    for turn in range(-AHEAD, turns):
        later = turn + AHEAD
        at = later % TURNS
        more = later < turns
        hopper.mbarrier.wait(words_free.index(at), ((later // TURNS) & 1) ^ 1, pred=more)
        hopper.mbarrier.expect(words_ready.index(at), BLOCK_N * 128, pred=more)
        copy_box(words, [start_n, 32 * later], words_ready.index(at), word_buffers.index(at), pred=more)
        if turn >= 0:
            for step in gl.static_range(4):
                i = 4 * turn + step
                at = i % STAGES
                hopper.mbarrier.wait(x_free.index(at), ((i // STAGES) & 1) ^ 1)
                hopper.mbarrier.expect(x_ready.index(at), BLOCK_M * 128)
                copy_box(x, [start_m, 64 * i], x_ready.index(at), x_buffers.index(at))


@gluon.jit
def _quarters(acc, PART: gl.constexpr):
    """[N, M] to four of [N, M / 4]."""
    N: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    first, second = gl.split(gl.permute(gl.reshape(acc, (N, 2, 2, M // 4)), (0, 3, 2, 1)))
    part_0, part_1 = gl.split(first)
    part_2, part_3 = gl.split(second)
    return (
        gl.convert_layout(part_0, PART, assert_trivial=True),
        gl.convert_layout(part_1, PART, assert_trivial=True),
        gl.convert_layout(part_2, PART, assert_trivial=True),
        gl.convert_layout(part_3, PART, assert_trivial=True),
    )


@gluon.jit
def _write(part, y_ptr, bias, stage, start_m, start_n, rows, N, BIAS: gl.constexpr, WARPS: gl.constexpr):
    """Outputs [BLOCK_N, some rows of x] to y, through shared memory: lanes side by side write them side by side."""
    BLOCK_N: gl.constexpr = part.shape[0]
    PER: gl.constexpr = 128 // y_ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = min(32, BLOCK_N // PER)
    ROWS: gl.constexpr = gl.BlockedLayout([1, PER], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    if BIAS:
        part += gl.expand_dims(bias, 1)
    stage.store(part.to(y_ptr.dtype.element_ty).permute((1, 0)))
    barrier()
    offs_m = start_m + gl.arange(0, part.shape[1], gl.SliceLayout(1, ROWS)).to(gl.int64)
    offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, ROWS))
    y_ptrs = y_ptr + (gl.expand_dims(offs_m * N, 1) + gl.expand_dims(offs_n, 0))
    gl.store(y_ptrs, stage.load(ROWS), mask=gl.expand_dims(offs_m < rows, 1) & gl.expand_dims(offs_n < N, 0))
    barrier()


@gluon.jit
def _multiply(y_ptr, scale_ptr, bias_ptr, rows, N, K, stride_s, start_m, start_n, turns, buffers, stage, barriers,
              BIAS: gl.constexpr, EVEN: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr,
              STAGES: gl.constexpr, TURNS: gl.constexpr):  # fmt: skip
    """Decode and multiply what `_copy` brings, and write the tile."""
    x_buffers, word_buffers = buffers
    x_ready, x_free, words_ready, words_free = barriers
    BLOCK_N: gl.constexpr = 16 * WARPS
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M // 4, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    WORDS: gl.constexpr = _layout_words(WARPS, 8)
    blocks = gl.arange(0, 8, gl.SliceLayout(0, WORDS))
    # Rows beyond the last are the last.
    rows_s = gl.minimum(start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS)), N - 1).to(gl.int64) * stride_s
    scale_ptrs = gl.expand_dims(scale_ptr + rows_s, 1)
    scale = _read_scale(scale_ptrs, blocks, 0, turns, K, EVEN)
    taken = gl.zeros([BLOCK_N, 2, 2, 4, 2], gl.int32, _layout_bytes(WARPS))
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUM)
    for turn in range(turns):
        scale_next = _read_scale(scale_ptrs, blocks, turn + 1, turns, K, EVEN)
        scales = _steps_of(scale, BLOCK_N)
        seen = (scales[0] | scales[1] | scales[2] | scales[3]).to(gl.int32)
        at_w = turn % TURNS
        hopper.mbarrier.wait(words_ready.index(at_w), (turn // TURNS) & 1)
        for step in gl.static_range(4):
            words = word_buffers.index(at_w).slice(8 * step, 8, dim=1).load(WORDS)
            pairs, w = _decode(words, scales[step], seen, WARPS, FACTOR)
            i = 4 * turn + step
            at = i % STAGES
            hopper.mbarrier.wait(x_ready.index(at), (i // STAGES) & 1)
            acc = hopper.warpgroup_mma(w, x_buffers.index(at).permute((1, 0)), acc, is_async=True)
            # The step before has ended then. Until it is waited for, a product reads its weights and writes the sum
            # in registers: passed through the wait, they are nobody else's before. A loop of four steps has two
            # sets of them for weights. Where registers overlap the compiler has each product waited for instead,
            # which test_hopper.py looks for.
            acc, taken = hopper.warpgroup_mma_wait(1, deps=(acc, taken))
            taken = pairs
            hopper.mbarrier.arrive(x_free.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        hopper.mbarrier.arrive(words_free.index(at_w), count=1)
        scale = scale_next
    acc, taken = hopper.warpgroup_mma_wait(0, deps=(acc, taken))
    part_0, part_1, part_2, part_3 = _quarters(acc, PART)
    offs_p = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, PART))
    bias = offs_p.to(gl.float32)
    if BIAS:
        bias = gl.load(bias_ptr + offs_p, mask=offs_p < N, other=0.0).to(gl.float32)
    _write(part_0, y_ptr, bias, stage, start_m, start_n, rows, N, BIAS, WARPS)
    _write(part_1, y_ptr, bias, stage, start_m + BLOCK_M // 4, start_n, rows, N, BIAS, WARPS)
    _write(part_2, y_ptr, bias, stage, start_m + BLOCK_M // 2, start_n, rows, N, BIAS, WARPS)
    _write(part_3, y_ptr, bias, stage, start_m + BLOCK_M // 4 * 3, start_n, rows, N, BIAS, WARPS)


@kernel
@boxed(
    x=Box("rows", "K", "stride_x", lambda constants: (constants["BLOCK_M"], 64)),
    words=Box("N", "columns_w", "stride_w", lambda constants: (16 * constants["num_warps"], 32)),
)
# Compiled once for any number of rows.
@gluon.jit(do_not_specialize=["rows", "columns_w", "stride_x", "stride_w", "row_tiles", "turns"])
def _tile_kernel(
    y_ptr,
    x,
    words,
    scale_ptr,
    bias_ptr,
    rows,
    N,
    K,
    columns_w,
    stride_x,
    stride_w,
    stride_s,
    row_tiles,
    turns,
    BIAS: gl.constexpr,
    EVEN: gl.constexpr,
    OVERLAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """16 outputs a warp of BLOCK_M rows. STAGES boxes of x are there at a time, TURNS of codes."""
    wait_for_inputs(OVERLAP)
    BLOCK_N: gl.constexpr = 16 * num_warps
    BITS: gl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth
    STAGE: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    # Programs of the same outputs run side by side: the weight is in the cache.
    start_m = gl.program_id(0) % row_tiles * BLOCK_M
    start_n = gl.program_id(0) // row_tiles * BLOCK_N
    x_buffers = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, 64], x.layout)
    word_buffers = gl.allocate_shared_memory(words.dtype, [TURNS, BLOCK_N, 32], words.layout)
    stage = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [BLOCK_M // 4, BLOCK_N], STAGE)
    x_ready, x_free = allocate_barriers(STAGES), allocate_barriers(STAGES)
    words_ready, words_free = allocate_barriers(TURNS), allocate_barriers(TURNS)
    init_barriers((x_ready, x_free), STAGES)
    init_barriers((words_ready, words_free), TURNS)
    hopper.fence_async_shared()
    buffers = (x_buffers, word_buffers)
    barriers = (x_ready, x_free, words_ready, words_free)
    gl.warp_specialize(
        [
            (
                _multiply,
                (y_ptr, scale_ptr, bias_ptr, rows, N, K, stride_s, start_m, start_n, turns, buffers, stage, barriers,
                 BIAS, EVEN, BLOCK_M, num_warps, STAGES, TURNS),
            ),
            (_copy, (x, words, start_m, start_n, turns, buffers, barriers, BLOCK_M, BLOCK_N, STAGES, TURNS)),
        ],
        [1],
        [24],
    )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """How the work is cut: rows of x, warps of 16 outputs, steps of x and turns of codes that are there at a time.

    `registers` is the most that a thread may start with, for two programs to run side by side; 0 for no limit.
    """

    block_m: int
    warps: int
    stages: int
    turns: int
    registers: int = 0


def tile(M: int) -> Tile:
    """For M rows of x. By times on an H200."""
    # 256 are the most rows that one program takes, with sums in half of the registers. Of fewer, two programs fill a
    # multiprocessor, and one decodes while the other waits.
    return Tile(128, 4, 4, 3, registers=128) if M <= 128 else Tile(256, 8, 4, 3)


def takes(x: Tensor, packed: Tensor) -> bool:
    """Whether this kernel runs here and is meant for x, bf16, its rows and the weight's at multiples of 16 bytes.

    Of outputs there have to be enough for most of the device.
    """
    K = x.shape[-1]
    M, N = x.numel() // K, packed.shape[0]
    if x.dtype != torch.bfloat16 or not SMALLEST <= M <= LARGEST or gluonlib.refuses(x.device) is not None:
        return False
    cut, units = tile(M), architecture(x.device).units
    tiles = cdiv(M, cut.block_m) * cdiv(N, 16 * cut.warps)
    at_once = units * 8 // cut.warps
    if tiles < BUSY * at_once * cdiv(tiles, at_once):
        return False
    merged = row_strides(x, dims=1)
    if merged is None:
        return False
    (_,), ((stride,),) = merged
    evenly = x.data_ptr() % 16 == 0 and packed.data_ptr() % 16 == 0
    return evenly and _steps(stride, 8, K) and (N == 1 or _steps(packed.stride(0), 16, K // 2))


def _steps(stride: int, multiple: int, columns: int) -> bool:
    """Whether rows with that stride begin at multiples of 16 bytes, one behind the other."""
    return stride % multiple == 0 and stride >= columns


def launch(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fill y, contiguous [..., N] in any floating dtype, with x W^T + b, of what `takes` takes."""
    N, K = packed.shape[0], x.shape[-1]
    rows = y.numel() // N
    cut = tile(rows)
    (_,), ((stride_x,),) = row_strides(x, dims=1)  # type: ignore[misc]
    words = packed.view(torch.int32)
    row_tiles = cdiv(rows, cut.block_m)
    overlap = overlap_options(x.device)
    with on_device_of(x):
        _tile_kernel[(row_tiles * cdiv(N, 16 * cut.warps),)](
            y,
            x,
            words,
            scale,
            x if bias is None else bias,
            rows,
            N,
            K,
            K // 8,
            stride_x,
            # Of one row the stride is nobody's.
            words.stride(0) if N > 1 else K // 8,
            scale.stride(0),
            row_tiles,
            cdiv(K, _TURN),
            BIAS=bias is not None,
            EVEN=K % _TURN == 0,
            OVERLAP=bool(overlap),
            BLOCK_M=cut.block_m,
            STAGES=cut.stages,
            TURNS=cut.turns,
            num_warps=cut.warps,
            **({"maxnreg": cut.registers} if cut.registers else {}),
            **overlap,
        )
