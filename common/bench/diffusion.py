"""Benchmark rows of the ops of diffusion transformers, at the sizes of FLUX.2: Klein-4B (24 heads) and dev (48).

4608 tokens are a picture of 1024 x 1024 beside 512 of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from xpu_ports.common.bench.case import Args, Case, Draw, Formula, count
from xpu_ports.common.dispatch import Op
from xpu_ports.common.kernels.ada_layer_norm import ada_layer_norm
from xpu_ports.common.kernels.concat_swiglu import concat_swiglu
from xpu_ports.common.kernels.gated_residual import gated_residual
from xpu_ports.common.kernels.gated_residual_norm import gated_residual_norm
from xpu_ports.common.kernels.qk_norm_rope import qk_norm_rope

_PEERS = "xpu_ports.common.bench.peers.diffusion"
_SIZES = (512, 3072), (4608, 3072), (4608, 6144)
_ROWS = [f"T{T}-N{D}" for T, D in _SIZES]


def _heads(size: Mapping[str, int], draw: Draw) -> Args:
    # q and k are slices of a single block's projection, [q | k | v | gate | up].
    T, H, K = (size[letter] for letter in "THK")
    q, k = (t.unflatten(-1, (H, K)) for t in draw(1, T, 9 * H * K).split([H * K, H * K, 7 * H * K], dim=-1)[:2])
    turned = draw.uniform(0.0, 6.28, T, K // 2, dtype=torch.float32)
    weights = [[1.0 + 0.1 * draw(K)] for _ in "qk"]
    return q, k, *weights, torch.cat([turned.cos(), turned.sin()], dim=-1), None, 0, True, 1e-6, True


def _modulated(size: Mapping[str, int], draw: Draw) -> Args:
    T, N = (size[letter] for letter in "TN")
    shift, scale, _ = draw(1, 1, 3 * N).chunk(3, dim=-1)
    return draw(1, T, N), scale, shift, 1e-6


def _residual(size: Mapping[str, int], draw: Draw) -> Args:
    T, N = (size[letter] for letter in "TN")
    return draw(1, T, N), draw(1, T, N), draw(1, 1, 3 * N)[..., 2 * N :], None


def _residual_norm(size: Mapping[str, int], draw: Draw) -> Args:
    T, N = (size[letter] for letter in "TN")
    return draw(1, T, N), draw(1, T, N), *draw(1, 1, 3 * N).chunk(3, dim=-1), 1e-6, None


def _parallel(size: Mapping[str, int], draw: Draw) -> Args:
    T, D, F = (size[letter] for letter in "TDF")
    return draw(1, T, D), draw(1, T, 3 * D + 2 * F)[..., 3 * D :]


def _tokens(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    """The same few tokens of everything that has them: [1, T, ...], and tables [T, ...]."""
    T = outputs[0].shape[1]
    some = torch.tensor(sorted({*range(0, T, max(1, T // 64)), T - 1}), device=outputs[0].device)

    def take(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 2:
            return value[some]
        return value[:, some] if value.shape[1] == T else value

    return tuple(map(take, args)), [t[:, some] for t in outputs]


def _case(
    name: str, op: Op, inputs: Callable[[Mapping[str, int], Draw], Args], elementwise: Formula, *sizes: str
) -> Case:
    return Case(name, op, sizes, inputs, {"pytorch": f"{_PEERS}:{name}"}, _tokens, elementwise=elementwise)


CASES = (
    _case("qk_norm_rope", qk_norm_rope, _heads, count(THK=14), "T512-H24-K128", "T4608-H24-K128", "T4608-H48-K128"),
    _case("ada_layer_norm", ada_layer_norm, _modulated, count(TN=9), *_ROWS),
    _case("gated_residual", gated_residual, _residual, count(TN=2), *_ROWS),
    _case("gated_residual_norm", gated_residual_norm, _residual_norm, count(TN=11), *_ROWS),
    _case("concat_swiglu", concat_swiglu, _parallel, count(TF=5), *(f"T{T}-D{D}-F{3 * D}" for T, D in _SIZES)),
)
