"""The places of the largest scores without sorting them: a threshold, found bit by bit, and counts of what reaches it.

Counts are sums of integers, so that the choice is the same on every device, whatever the order of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.device import architecture, grf_options
from xpu_ports.common.kernels.indexer import stable_topk
from xpu_ports.common.tritonlib import AVAILABLE, WHY_NOT, cdiv, kernel, next_power_of_2, on_device_of, tl, triton

# A program holds so many scores, of which it chooses a part.
SEGMENT = 16384
# Half of what a program holds on Arc A, so that each pass over a long row leaves a shorter one.
MOST_CHOSEN = SEGMENT // 4


def _refuses_topk(scores: Tensor, k: int) -> str | None:
    if not AVAILABLE:
        return WHY_NOT
    if scores.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"scores have dtype {scores.dtype}, not one of float16, bfloat16, float32"
    if not 1 <= scores.dim() <= 3:
        return f"scores have {scores.dim()} dimensions, not 1 to 3"
    return None if 1 <= k <= MOST_CHOSEN else f"{k} to choose, not 1 to {MOST_CHOSEN}"


@triton.jit
def _ordered(scores, LOWEST: tl.constexpr):
    """int32 that are in the order of the scores; NaN is the lowest number, and zero has no sign."""
    x = scores.to(tl.float32)
    x = tl.where(x != x, LOWEST, x)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    # Of negative numbers the larger bits are the lower number.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(keys, K: tl.constexpr):
    """A number that at least K of the keys reach, of the largest such, bit by bit; any that just K reach will do."""
    threshold = tl.full((), -2147483648, tl.int32)
    bit = tl.full((), 31, tl.int32)
    reached = tl.full((), -1, tl.int32)
    while (bit >= 0) & (reached != K):
        # The highest bit is the sign, which is set in the lower half: turned over like the others.
        higher = threshold ^ (tl.full((), 1, tl.int32) << bit)
        count = tl.sum((keys >= higher).to(tl.int32), axis=0)
        threshold = tl.where(count >= K, higher, threshold)
        reached = tl.where(count >= K, count, reached)
        bit -= 1
    return threshold


@triton.jit
def _read(scores_ptr, places_ptr, offs, first, length, stride_s, LOWEST: tl.constexpr, NAMED: tl.constexpr):
    """Places, and what is in their order's stead, of a segment that begins at `first`; minus infinity behind it."""
    mask = offs < length
    if NAMED:
        places = tl.load(places_ptr + first + offs, mask=mask, other=-1)
        mask = places >= 0
    else:
        places = first.to(tl.int32) + offs
    scores = tl.load(scores_ptr + places.to(tl.int64) * stride_s, mask=mask, other=float("-inf"))
    return places, _ordered(scores, LOWEST)


@triton.jit
def _sum_before(counts, LINE: tl.constexpr):
    """Sums of all counts before each, by lines of a power of two: those within one need no other warp."""
    BLOCK_S: tl.constexpr = counts.shape[0]
    if LINE < BLOCK_S:
        lines = tl.reshape(counts, (BLOCK_S // LINE, LINE))
        sums = tl.sum(lines, axis=1)
        upto = tl.reshape((tl.cumsum(sums, axis=0) - sums)[:, None] + tl.cumsum(lines, axis=1), (BLOCK_S,))
    else:
        upto = tl.cumsum(counts, axis=0)
    return upto - counts


# The number of scores changes with every few tokens: one kernel for all of a tile.
@kernel
@triton.jit(do_not_specialize=["S", "length"])
def _stable_topk_kernel(
    scores_ptr,
    places_ptr,
    chosen_ptr,
    N,
    S,
    length,
    stride_m,
    stride_n,
    stride_s,
    K: tl.constexpr,
    NAMED: tl.constexpr,
    LOWEST: tl.constexpr,
    NEVER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`length` scores of a row, or of the places of it that are named: the K largest, in the order they stand in."""
    row = tl.program_id(0).to(tl.int64)
    segment, segments = tl.program_id(1), tl.num_programs(1)
    first = segment.to(tl.int64) * length
    scores_ptr += row // N * stride_m + row % N * stride_n
    places_ptr += row * S
    chosen_ptr += (row * segments + segment) * K
    length = tl.minimum(length, S - first)
    _, scores = _read(scores_ptr, places_ptr, tl.arange(0, BLOCK_S), first, length, stride_s, LOWEST, NAMED)
    threshold = tl.maximum(_threshold(scores, K), NEVER)
    surely = tl.sum((scores > threshold).to(tl.int32), axis=0)
    # Of those on the threshold the first that there is room for: none where it is minus infinity.
    total = tl.where(threshold == NEVER, surely, K)
    room = total - surely
    # Read again, so that registers are free.
    places, keys = _read(scores_ptr, places_ptr, tl.arange(0, BLOCK_S), first, length, stride_s, LOWEST, NAMED)
    above, level = keys > threshold, keys == threshold
    # Both counts in one: a segment has fewer than 2^15.
    before = _sum_before((above.to(tl.int32) << 16) | level.to(tl.int32), LINE)
    levels = before & 0xFFFF
    taken = above | (level & (levels < room))
    tl.store(chosen_ptr + (before >> 16) + tl.minimum(levels, room), places, mask=taken)
    offs_k = tl.arange(0, BLOCK_K)
    tl.store(chosen_ptr + offs_k, tl.full((BLOCK_K,), -1, tl.int32), mask=(offs_k < K) & (offs_k >= total))


@stable_topk.implement("triton", "xpu", "cuda", refuses=_refuses_topk)
def stable_topk_triton(scores: Tensor, k: int) -> Tensor:
    """The K largest of a long row are among the K largest of its parts, which then are a shorter row."""
    S = scores.shape[-1]
    K = min(k, S)
    chosen = torch.empty((*scores.shape[:-1], K), dtype=torch.int32, device=scores.device)
    if chosen.numel() == 0:
        return chosen
    strides = (0, 0, *scores.stride())[-3:]
    N = scores.shape[-2] if scores.dim() > 1 else 1
    rows = chosen.numel() // K
    places: Tensor | None = None
    arch = architecture(scores.device)
    # Arc A has half the registers.
    most = SEGMENT // 2 if arch.name == "arc-a" else SEGMENT
    while True:
        segments = cdiv(S, most)
        out = chosen
        if segments > 1:
            out = torch.empty((rows, segments * K), dtype=torch.int32, device=scores.device)
        length = cdiv(S, segments)
        block_s = next_power_of_2(length)
        with on_device_of(scores):
            _stable_topk_kernel[(rows, segments)](
                scores,
                scores if places is None else places,
                out,
                N,
                S,
                length,
                *strides,
                K=K,
                NAMED=places is not None,
                LOWEST=torch.finfo(scores.dtype).min,
                # What minus infinity is in `_ordered`.
                NEVER=-0x7F800001,
                BLOCK_S=block_s,
                # On Intel one scan of all takes fewer registers.
                LINE=block_s if arch.has_grf_modes else min(block_s, 128),
                BLOCK_K=next_power_of_2(K),
                num_warps=max(1, min(block_s // 256, 32)),
                # 16 scores a lane are more than 128 registers hold on Intel, and 8 on Arc A.
                **grf_options(256 if block_s > 8192 or most < SEGMENT else 128, arch),
            )
        if segments == 1:
            return chosen
        places, S = out, segments * K
