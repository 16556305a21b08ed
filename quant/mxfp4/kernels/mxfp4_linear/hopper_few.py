"""2 to 16 rows of x against a weight in MXFP4 on Hopper: weights come by copies some turns ahead.

The arithmetic is that of `fragments.py`, but for the scales: the products of a block of 32 columns are summed from
codes alone and the sums multiplied, which are fewer. As in `hopper_row.py` the weight comes by asynchronous copies to
shared memory, which take no registers, here through a ring of buffers; and the kernel is started while the one before
it ends (`launch_order.py`) and asks for its first weights before it waits for x.
"""

# Triton's tuples grow by additions alone, which mypy takes for other types.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import Architecture, architecture
from xpu_ports.common.gluonlib import copy_async, gl, gluon, hopper, refuses, seen_as
from xpu_ports.common.launch_order import overlap_options, wait_for_inputs
from xpu_ports.common.layout import row_strides
from xpu_ports.common.tritonlib import cdiv, kernel, on_device_of
from xpu_ports.quant.mxfp4.kernels.decoding import multiplied_pair
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear.hopper_row import add_exactly, bits, in_steps, pairs_of, up_to_power

# Rows of x, from one more than `hopper_row.py` has to what two products take.
FEWEST, MOST = 2, 16
# Warps of a program, between which K is divided, and columns that a warp takes at a time.
WARPS = 8
COLUMNS = 64
# Columns of x whose scales fit into shared memory beside the ring.
SMALLEST, LARGEST = 2048, 8192
# Outputs of a product.
TILE = 16
# The most of a thread, with which two programs run side by side.
REGISTERS = 128

# Words of columns 2 c and 2 c + 1, and of 2 c + 4 and 2 c + 5, to those of columns 2 c and 2 c + 4, and of 2 c + 1 and
# 2 c + 5, times a factor: in these pairs codes are decoded.
_PAIRS = gl.constexpr(
    """{
    .reg .b32 even, odd;
    prmt.b32 even, $2, $3, 0x5410;
    prmt.b32 odd, $2, $3, 0x7632;
    mul.rn.bf16x2 $0, even, $4;
    mul.rn.bf16x2 $1, odd, $4;
    }"""
)


# ------------------------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def _powers(n):
    return [1 << i for i in range(bits(n))]


@gluon.constexpr_function
def _words_in_memory(warps, rows):
    # Four words are moved by the row, so that those of eight rows that are read at once have banks of their own.
    of_rows = [[b, 4 * b if b < 8 else 0] for b in _powers(rows)]
    return gl.SharedLinearLayout([*[[0, b] for b in _powers(8 * warps)], *of_rows])


@gluon.constexpr_function
def _words_of_lanes(warps, rows):
    # Lane 4 g + t has word t of both blocks of its warp, of rows g and g + 8.
    registers = [[0, 4], *[[8 * b, 0] for b in _powers(rows // 8)]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * b] for b in _powers(warps)], [], [rows, 8 * warps])


@gluon.constexpr_function
def _scales_of_lanes(warps, rows):
    # As the products' sums lie: lane 4 g + t has both blocks of rows g and g + 8, whatever t is.
    registers = [[0, 1], *[[8 * b, 0] for b in _powers(rows // 8)]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 2 * b] for b in _powers(warps)], [], [rows, 2 * warps])


@gluon.constexpr_function
def _x_of_lanes(warps, rows):
    # Lane 4 g + t has the columns of word t of both blocks, of rows g and g + 8: [warp, row, block, t, two columns].
    more = [[0, 8 * b, 0, 0, 0] for b in _powers(rows // 8)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    of_warps = [[b, 0, 0, 0, 0] for b in _powers(warps)]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 0, 1, 0, 0], *more], lanes, of_warps, [], [warps, rows, 2, 4, 4]
    )


@gluon.constexpr_function
def _sums_in_memory(warps, outputs, rows):
    # Outputs side by side, moved by the row so that what a warp writes at once has banks of its own.
    of_rows = [[0, {2: 8, 4: 16}.get(b, 0) % outputs, b] for b in _powers(rows)]
    of_warps = [[b, 0, 0] for b in _powers(warps)]
    return gl.SharedLinearLayout([*[[0, b, 0] for b in _powers(outputs)], *of_rows, *of_warps])


@gluon.constexpr_function
def _sums_of_threads(warps, outputs, rows):
    # A thread has the sums of all warps of one output and row.
    over_rows = min(warps, outputs * rows // 32)
    return gl.BlockedLayout([warps, 1, 1], [1, outputs, 32 // outputs], [1, warps // over_rows, over_rows], [1, 2, 0])


# ------------------------------------------------------------------------------------------------------------ numbers


@gluon.jit
def _halves(pairs):
    """The two bf16 of 32 bits, which come last."""
    low = pairs.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _ordered(x, WARPS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """[warp, row, block, t, two columns] to [WARPS, 32, ROWS] of either block, times 2^100.

    Its 32 columns are [J / 2, J % 2, t, half]: nibbles J and J + 4 of word t.
    """
    first, second = gl.split(gl.permute(gl.reshape(x, (WARPS, ROWS, 2, 4, 2, 2)), (0, 1, 2, 3, 5, 4)))
    factor = gl.full(first.shape, 0x71807180, gl.int32, first.type.layout)
    even, odd = gl.inline_asm_elementwise(
        _PAIRS, "=&r,=&r,r,r,r", [first, second, factor], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    # From [warp, row, block, t, J / 2, J % 2, half].
    x_0, x_1 = gl.split(gl.permute(_halves(gl.join(even, odd)), (0, 4, 5, 3, 6, 1, 2)))
    x_0 = gl.convert_layout(gl.reshape(x_0, (WARPS, 32, ROWS)), layout, assert_trivial=True)
    x_1 = gl.convert_layout(gl.reshape(x_1, (WARPS, 32, ROWS)), layout, assert_trivial=True)
    return x_0, x_1


@gluon.jit
def _codes(words, WARPS: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """[OUT, WARPS, t] to [WARPS, OUT, 32] bf16 times 2^-126, columns as those of x."""
    if ROWS == 8:
        a, b, c, d = pairs_of(words)
    else:
        # With fewer registers.
        a, b = multiplied_pair(words, 0), multiplied_pair(words, 1)
        c, d = multiplied_pair(words, 2), multiplied_pair(words, 3)
    even, odd = gl.join(a, b), gl.join(c, d)
    # From [.., J % 2, J / 2, half].
    w = gl.permute(_halves(gl.join(even, odd)), (1, 0, 4, 3, 2, 5))
    return gl.convert_layout(gl.reshape(w, (WARPS, OUT, 32)), layout, assert_trivial=True)


@gluon.jit
def _add_products(
    total, words, scale, x_0, x_1, WARPS: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, MMA: gl.constexpr
):
    """total and words [OUT, 8 WARPS] with scales [OUT, 2 WARPS] times x, times 2^-26."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    words_0, words_1 = gl.split(gl.permute(gl.reshape(words, (OUT, WARPS, 2, 4)), (0, 1, 3, 2)))
    # 0 for 2^-127, infinity for NaN.
    factor = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    factor_0, factor_1 = gl.split(gl.permute(gl.reshape(factor, (OUT, WARPS, 2)), (1, 0, 2)))
    factor_0 = gl.convert_layout(factor_0, gl.SliceLayout(2, MMA), assert_trivial=True)
    factor_1 = gl.convert_layout(factor_1, gl.SliceLayout(2, MMA), assert_trivial=True)
    zero = gl.zeros((WARPS, OUT, ROWS), gl.float32, MMA)
    total += hopper.mma_v2(_codes(words_0, WARPS, OUT, ROWS, A), x_0, zero) * gl.expand_dims(factor_0, 2)
    total += hopper.mma_v2(_codes(words_1, WARPS, OUT, ROWS, A), x_1, zero) * gl.expand_dims(factor_1, 2)
    return total


@gluon.jit
def _write_exactly(
    x_ptr, words_ptr, scale_ptr, bias_ptr, y_ptr, M, N, start, own, eights_x, stride_w_n, stride_s_n,
    K: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr, OUT: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """A program's outputs as fp32 numbers make them, from memory: one row and one tile after another."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    rows = gl.arange(0, OUT, gl.SliceLayout(1, LANES))
    columns = gl.arange(0, 32, gl.SliceLayout(0, LANES))
    for m in range(M):
        for tile in range(TILES):
            at_rows = tile * OUT + rows
            total = gl.zeros((OUT, 32), gl.float32, LANES)
            for turn in range(K // 256):
                at = turn * 32 + columns
                code = gl.load(words_ptr + (at_rows * stride_w_n)[:, None] + at[None, :])
                scale = gl.load(scale_ptr + (at_rows * stride_s_n)[:, None] + (at // 4)[None, :])
                total = add_exactly(total, code, scale, x_ptr + 8 * (m * eights_x + at))
            _write(gl.sum(total, axis=1), bias_ptr, y_ptr + m * N, start + at_rows, start + at_rows >= own, BIAS)


@gluon.jit
def _write(y, bias_ptr, y_ptrs, offs_n, mask, BIAS: gl.constexpr):
    if BIAS:
        y += gl.load(bias_ptr + offs_n).to(gl.float32)
    gl.store(y_ptrs + offs_n, y.to(y_ptrs.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------------- kernel


@kernel
@gluon.jit
def _hopper_few_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    eights_x,
    stride_w_n,
    stride_s_n,
    K: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    OUT: gl.constexpr,
    TILES: gl.constexpr,
    ROWS: gl.constexpr,
    RING: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """TILES times OUT outputs of up to ROWS rows, 8 or 16; K in turns over the warps."""
    TURNS: gl.constexpr = K // (64 * WARPS)
    WORDS: gl.constexpr = 8 * WARPS
    EIGHTS: gl.constexpr = WARPS // 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    # The last program has outputs of the one before it where its own are fewer.
    own = gl.program_id(0) * (OUT * TILES)
    start = gl.minimum(own, N - OUT * TILES)
    words_ptr += start.to(gl.int64) * stride_w_n
    scale_ptr += start.to(gl.int64) * stride_s_n
    # Buffers for each tile: the compiler has copies to the same one wait for each other.
    rings = ()
    scales = ()
    for _ in gl.static_range(TILES):
        rings = rings + (gl.allocate_shared_memory(gl.int32, [RING, OUT, WORDS], _words_in_memory(WARPS, OUT)),)
        scales = scales + (
            gl.allocate_shared_memory(
                gl.int64, [up_to_power(TURNS), OUT, EIGHTS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
            ),
        )
    # All scales in eights, as [turn, row, eight]; those of a row side by side.
    several: gl.constexpr = min(32, up_to_power(TURNS))
    COPY_S: gl.constexpr = gl.BlockedLayout([1, 1, EIGHTS], [several, 32 // several, 1], [1, WARPS, 1], [2, 0, 1])
    turns_s = gl.arange(0, up_to_power(TURNS), gl.SliceLayout(1, gl.SliceLayout(2, COPY_S)))[:, None, None]
    rows_s = gl.arange(0, OUT, gl.SliceLayout(0, gl.SliceLayout(2, COPY_S)))[None, :, None]
    eights_s = gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(1, COPY_S)))[None, None, :]
    step_s = stride_s_n // 8
    scale_ptrs = scale_ptr.to(gl.pointer_type(gl.int64), bitcast=True) + (rows_s * step_s + turns_s * EIGHTS + eights_s)
    # Words in fours, 16 bytes, of a row side by side.
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (WORDS // 4), WORDS // 4], [WARPS, 1], [1, 0])
    rows_w = gl.arange(0, OUT, gl.SliceLayout(1, COPY))
    at_w = (rows_w * stride_w_n)[:, None] + gl.arange(0, WORDS, gl.SliceLayout(0, COPY))[None, :]
    for turn in gl.static_range(RING - 1):
        for tile in gl.static_range(TILES):
            copy_async(rings[tile].index(turn), words_ptr + (turn * WORDS + tile * OUT * stride_w_n) + at_w)
        if turn == 0:
            # With the first turn's words, and behind them.
            for tile in gl.static_range(TILES):
                if up_to_power(TURNS) == TURNS:
                    copy_async(scales[tile], scale_ptrs + tile * OUT * step_s)
                else:
                    copy_async(scales[tile], scale_ptrs + tile * OUT * step_s, mask=turns_s < TURNS)
        hopper.async_copy.commit_group()
    # Weights are no other kernel's results.
    wait_for_inputs(OVERLAP)
    # Two columns of x at a time; rows beyond the last are the last.
    X: gl.constexpr = _x_of_lanes(WARPS, ROWS)
    X_3: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, X))
    X_2: gl.constexpr = gl.SliceLayout(2, X_3)
    warps_x = gl.arange(0, WARPS, gl.SliceLayout(1, X_2))[:, None, None, None, None]
    rows_x = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(0, X_2)), M - 1)[None, :, None, None, None]
    blocks_x = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, X_3)))[None, None, :, None, None]
    X_T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, X))))
    X_C: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, X))))
    t_x = gl.arange(0, 4, X_T)[None, None, None, :, None]
    pairs_x = gl.arange(0, 4, X_C)[None, None, None, None, :]
    at_x = rows_x * (4 * eights_x) + 32 * warps_x + 16 * blocks_x + 4 * t_x + pairs_x
    x_ptrs = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at_x
    totals = ()
    for _ in gl.static_range(TILES):
        totals = totals + (gl.zeros((WARPS, OUT, ROWS), gl.float32, MMA),)
    x = gl.load(x_ptrs)
    for turn in range(TURNS):
        x_0, x_1 = _ordered(x, WARPS, ROWS, gl.DotOperandLayout(1, MMA, 2))
        x = gl.load(x_ptrs + gl.minimum(turn + 1, TURNS - 1) * (32 * WARPS))
        hopper.async_copy.wait_group(RING - 2)
        # To where the turn before has read.
        ahead = turn + RING - 1
        if ahead < TURNS:
            for tile in gl.static_range(TILES):
                copy_async(
                    rings[tile].index(ahead % RING), words_ptr + (ahead * WORDS + tile * OUT * stride_w_n) + at_w
                )
        hopper.async_copy.commit_group()
        sums = ()
        for tile in gl.static_range(TILES):
            words = rings[tile].index(turn % RING).load(_words_of_lanes(WARPS, OUT))
            scale_bytes = seen_as(
                scales[tile],
                gl.uint8,
                [up_to_power(TURNS), OUT, 2 * WARPS],
                gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
            )
            scale = scale_bytes.index(turn).load(_scales_of_lanes(WARPS, OUT))
            sums = sums + (_add_products(totals[tile], words, scale, x_0, x_1, WARPS, OUT, ROWS, MMA),)
        totals = sums
    # The sums of the warps.
    buffers = ()
    for tile in gl.static_range(TILES):
        buffers = buffers + (
            gl.allocate_shared_memory(gl.float32, [WARPS, OUT, ROWS], _sums_in_memory(WARPS, OUT, ROWS)),
        )
        buffers[tile].store(totals[tile])
    SUMS: gl.constexpr = _sums_of_threads(WARPS, OUT, ROWS)
    offs_r = gl.arange(0, OUT, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
    offs_m = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    results = ()
    largest = gl.zeros((OUT, ROWS), gl.int32, gl.SliceLayout(0, SUMS))
    for tile in gl.static_range(TILES):
        # 2^26 is what codes and x are without; of sums below 2^-100 that has cost some bits.
        y = gl.sum(buffers[tile].load(SUMS), axis=0) * 67108864.0
        largest = gl.maximum(largest, y.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
        results = results + (y,)
    if gl.max(gl.max(largest, axis=1), axis=0) >= 0x7F800000:
        # For a scale of NaN or a large one, an x that is not finite, or a large one.
        _write_exactly(
            x_ptr, words_ptr, scale_ptr, bias_ptr, y_ptr, M, N, start, own, eights_x, stride_w_n, stride_s_n,
            K, BIAS, WARPS, OUT, TILES,
        )  # fmt: skip
    else:
        for tile in gl.static_range(TILES):
            offs_n = start + tile * OUT + offs_r + 0 * offs_m
            _write(results[tile], bias_ptr, y_ptr + offs_m * N, offs_n, (offs_n >= own) & (offs_m < M), BIAS)


def cut(arch: Architecture, rows: int, N: int) -> int:
    """Tiles of outputs a program, by times on an H200."""

    def work(tiles: int) -> int:
        # Of the multiprocessor with the most; to bring x into its order costs as much as a tile.
        return cdiv(cdiv(N, TILE * tiles), arch.units) * (tiles + 1)

    # Of 16 rows, more tiles' sums do not fit into the registers.
    return min((n for n in ((1, 2, 3) if rows > 8 else (1, 2, 3, 4, 6)) if TILE * n <= N), key=work)


def takes(x: Tensor, packed: Tensor, scale: Tensor) -> bool:
    """Whether this kernel runs here and is meant for these rows of x, bf16, that one stride walks, and one weight."""
    N, K = packed.shape[0], x.shape[-1]
    if x.dtype != torch.bfloat16 or not FEWEST <= x.numel() // K <= MOST or N < TILE:
        return False
    if not SMALLEST <= K <= LARGEST or K % (COLUMNS * WARPS) or refuses(x.device) is not None:
        return False
    strides = row_strides(x, dims=1)
    if strides is None or MOST * strides[1][0][0] >= 2**31:
        return False
    return in_steps(x, 8, 8) and in_steps(packed, 64, 16) and in_steps(scale, 8, 8)


def launch(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Fill y, contiguous [rows, N] in any floating dtype, of what is taken."""
    N, K = packed.shape[0], x.shape[-1]
    (rows,), ((stride_x,),) = row_strides(x, dims=1)  # type: ignore[misc]
    words = packed.view(torch.int32)
    tiles = cut(architecture(x.device), rows, N)
    few = rows <= 8
    overlap = overlap_options(x.device)
    with on_device_of(x):
        _hopper_few_kernel[(cdiv(N, TILE * tiles),)](
            x,
            words,
            scale,
            x if bias is None else bias,
            y,
            rows,
            N,
            # In units that are aligned, whatever they are.
            stride_x // 8,
            words.stride(0),
            scale.stride(0),
            K=K,
            BIAS=bias is not None,
            WARPS=WARPS,
            OUT=TILE,
            TILES=tiles,
            ROWS=8 if few else 16,
            # Turns that the ring holds: by times on an H200.
            RING=3 if few else 4,
            OVERLAP=bool(overlap),
            num_warps=WARPS,
            maxnreg=REGISTERS,
            **overlap,
        )
