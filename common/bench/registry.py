"""The ops' benchmark rows: shapes of the released models, and the peers that compute the same."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from xpu_ports.common.bench.case import Args, Case, Draw, Sample, count, sample_index, sample_rows
from xpu_ports.common.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from xpu_ports.common.kernels.concat_rms_norm import concat_rms_norm
from xpu_ports.common.kernels.decode_attention import decode_attention
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.gated_rms_norm import gated_norm_by_sum, gated_rms_norm, gated_square_sum
from xpu_ports.common.kernels.greedy_tokens import greedy_tokens
from xpu_ports.common.kernels.kda import CHUNK, chunk_kda, kda_gate, recurrent_kda
from xpu_ports.common.kernels.mamba2_decode_linear import mamba2_decode_linear
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.mla_decode import mla_decode
from xpu_ports.common.kernels.moe_experts import moe_experts
from xpu_ports.common.kernels.moe_router import moe_router_logits, moe_sigmoid_router
from xpu_ports.common.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_backward
from xpu_ports.common.kernels.rotary_embedding import rotary_angles, rotary_embedding
from xpu_ports.common.kernels.rotary_insert import rotary_insert
from xpu_ports.common.kernels.selective_state_update import selective_state_update
from xpu_ports.common.kernels.skinny_linear import adapted_linears, gated_norm_linear, linear, norm_glu, norm_linear
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan

_PEERS = "xpu_ports.common.bench.peers"
_ROWS = "T1-N4096", "T256-N4096", "T8192-N4096", "T65536-N4096"
# Of two cards one has half of the columns.
_HALVES = "T1-N2048", "T256-N2048", "T8192-N2048"
# Heads, their width, state and groups of Zamba2-1.2B; its in_proj has 8512 columns, its convolution 4352 channels.
_MIXER = "H64-P64-N128-G1"
_CHUNK = 256

Size = Mapping[str, int]


def _peers(function: str, *modules: str) -> dict[str, str]:
    return {module: f"{_PEERS}.{module}:{function}" for module in modules}


# ------------------------------------------------------------------------------------------------------------- norms


def _weight(draw: Draw, n: int) -> Tensor:
    return 1.0 + 0.1 * draw(n)


def _norm(size: Size, draw: Draw) -> Args:
    return draw(size["T"], size["N"]), _weight(draw, size["N"]), 1e-6


def _add_norm(size: Size, draw: Draw) -> Args:
    return draw(size["T"], size["N"]), draw(size["T"], size["N"]), _weight(draw, size["N"]), 1e-6


def _concat_norm(size: Size, draw: Draw) -> Args:
    T, D = size["T"], size["D"]
    return draw(T, D), draw(T, D), draw(T, D), _weight(draw, 2 * D), 1e-6


def _mixer_norm(size: Size, draw: Draw) -> Args:
    # Mamba-2's: the gate is a slice of the input projection's rows, Z wide (contiguous where there is no Z).
    T, N = size["T"], size["N"]
    z = draw(T, size.get("Z", N))[:, :N]
    return draw(T, N), z, _weight(draw, N), 1e-5, N // size["G"], False, "silu"


def _head_norm(size: Size, draw: Draw) -> Args:
    # KDA's: one norm a head.
    shape = size["T"], size["H"], size["N"]
    return draw(*shape), draw(*shape), _weight(draw, size["N"]), 1e-5, None, True, "sigmoid"


def _norm_by_sum(size: Size, draw: Draw) -> Args:
    T, N = size["T"], size["N"]
    x, z = draw(T, N), draw(T, N)
    return x, z, _weight(draw, N), 2 * gated_square_sum.reference(x, z), 2 * N, 1e-5


def _gated_mlp(size: Size, draw: Draw) -> Args:
    return draw(size["T"], 2 * size["F"]), None, "gelu"


def _rotary(size: Size, draw: Draw) -> Args:
    B, T, H, K = (size[letter] for letter in "BTHK")
    angles = draw.uniform(0.0, 6.28, 1, T, K // 2, dtype=torch.float32)
    return draw(B, T, H, K), draw(B, T, H, K), angles.cos(), angles.sin()


def _rotary_angles(size: Size, draw: Draw) -> Args:
    B, T, K = (size[letter] for letter in "BTK")
    # In models in fp32, whatever the others are in.
    frequencies = draw.uniform(0.0, 1.0, K // 2)
    return torch.arange(T, device=frequencies.device).repeat(B, 1), frequencies


def _rotary_insert(size: Size, draw: Draw) -> Args:
    B, T, H, S, K = (size[letter] for letter in "BTHSK")
    q, k, cos, sin = _rotary(size, draw)
    slots = torch.arange(S - T, S, device=q.device)
    return q, k, draw(B, T, H, K), cos, sin, slots, draw(B, H, S, K), draw(B, H, S, K)


def _not_inserted(args: Args) -> int:
    """Bytes of caches that are neither read nor written, where they count as both."""
    k, keys, values = args[1], args[6], args[7]
    return 2 * (keys.numel() + values.numel() - k.numel()) * keys.element_size()


def _insert_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    # The first and the last sequence.
    ends = sorted({0, args[0].shape[0] - 1})
    return tuple(sample_index(a, ends) if a.dim() == 4 else a for a in args), [sample_index(t, ends) for t in outputs]


def _greedy(size: Size, draw: Draw) -> Args:
    logits = draw(size["B"], size["V"])
    tokens = logits.new_zeros(size["B"], dtype=torch.int64)
    return logits, tokens, tokens == 0, tokens.new_ones(1), tokens.new_zeros(())


def _tokens_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    T = outputs[0].shape[1]
    some = torch.tensor(sorted({*range(0, T, max(1, T // 64)), T - 1}), device=outputs[0].device)
    return tuple(a[:, some] for a in args), [t[:, some] for t in outputs]


def _cache(size: Size, draw: Draw) -> Args:
    # Z is the capacity of a static cache, of which S keys count; without it all keys do.
    B, H, S, K = (size[letter] for letter in "BHSK")
    Z = size.get("Z", S)
    mask = None if Z == S else (torch.arange(Z, device=draw.device) < S)[None]
    return draw(B, H, K), draw(B, H, Z, K), draw(B, H, Z, K), mask, K**-0.5


def _unseen(args: Args) -> int:
    _, k, v, mask, _ = args
    off = 0.0 if mask is None else 1.0 - mask.float().mean().item()
    return round(off * (k.numel() * k.element_size() + v.numel() * v.element_size()))


def _cache_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    # The first and the last sequence, of each the first and the last head.
    q, k, v, *rest = args
    ends = [sorted({0, size - 1}) for size in q.shape[:2]]

    def take(t: Tensor) -> Tensor:
        return sample_index(sample_index(t, ends[0]).transpose(0, 1), ends[1]).transpose(0, 1)

    return (take(q), take(k), take(v), *rest), [take(outputs[0])]


def _latents(size: Size, draw: Draw) -> Args:
    B, H, S, R, K = (size[letter] for letter in "BHSRK")
    Z = size.get("Z", S)
    mask = None if Z == S else (torch.arange(Z, device=draw.device) < S)[None]
    # The published models' heads have 128 columns of their own beside the shared ones.
    return draw(B, H, R + K), draw(B, Z, R + K), mask, R, (128 + K) ** -0.5


def _unseen_latents(args: Args) -> int:
    _, rows, mask, *_ = args
    off = 0.0 if mask is None else 1.0 - mask.float().mean().item()
    return round(off * rows.numel() * rows.element_size())


def _latents_flops(size: Size) -> int:
    return 2 * size["B"] * size["H"] * size["S"] * (2 * size["R"] + size["K"])


def _latents_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    q, rows, *rest = args
    ends = sorted({0, q.shape[0] - 1})
    return (sample_index(q, ends), sample_index(rows, ends), *rest), [sample_index(outputs[0], ends)]


# ----------------------------------------------------------------------------------------------------- linear layers


def _matrix(draw: Draw, n: int, k: int) -> Tensor:
    return draw(n, k) * k**-0.5


def _linear(size: Size, draw: Draw) -> Args:
    T, N, K = (size[letter] for letter in "TNK")
    return draw(T, K), _matrix(draw, N, K), None


def _norm_linear(size: Size, draw: Draw) -> Args:
    T, N, K = (size[letter] for letter in "TNK")
    return draw(T, K), draw(T, K), _weight(draw, K), _matrix(draw, N, K), None, 1e-5


def _gated_norm_linear(size: Size, draw: Draw) -> Args:
    T, N, K = (size[letter] for letter in "TNK")
    return draw(T, K), draw(T, K), _weight(draw, K), _matrix(draw, N, K), None, K // size["G"], 1e-5


def _adapted(size: Size, draw: Draw) -> Args:
    # L layers of N outputs each.
    T, L, N, K, R = (size[letter] for letter in "TLNKR")
    weights, a, b = ([_matrix(draw, *shape) for _ in range(L)] for shape in ((N, K), (R, K), (N, R)))
    return draw(T, K), weights, a, b


def _glu(size: Size, draw: Draw) -> Args:
    T, F, K, R = (size[letter] for letter in "TFKR")
    a, b = _matrix(draw, R, K), _matrix(draw, 2 * F, R)
    return draw(T, K), _weight(draw, K), _matrix(draw, 2 * F, K), a, b, "gelu", 1e-5


def _glu_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    # Every hundredth output, of which each has a row of the weight's first half and one of the second.
    x, norm_weight, weight, a, b, *rest = args
    weight, b = (t.unflatten(0, (2, -1))[:, ::100].flatten(0, 1) for t in (weight, b))
    return (x, norm_weight, weight, a, b, *rest), [outputs[0][..., ::100]]


def _outputs_sample(position: int) -> Sample:
    """Every hundredth output of the layer whose weight is the argument at this position, and its other results."""

    def sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
        some = slice(None, None, 100)
        picked = tuple(a[some] if i == position else a for i, a in enumerate(args))
        return picked, [outputs[0][..., some], *outputs[1:]]

    return sample


# ----------------------------------------------------------------------------------------------------------- Mamba-2


def _conv(size: Size, draw: Draw) -> Args:
    # The input is a slice of the input projection's rows.
    B, T, D, W = (size[letter] for letter in "BTDW")
    x = draw(B, T, size.get("Z", D))[..., :D]
    return x, draw(D, W) * W**-0.5, draw(D), None, "silu"


def _conv_step(size: Size, draw: Draw) -> Args:
    B, D, W = (size[letter] for letter in "BDW")
    return draw(B, D, W - 1), draw(B, 1, D), draw(D, W) * W**-0.5, draw(D), None, "silu"


def _heads(size: Size, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """A_log, D and dt_bias of H heads as they are initialized: rates of 1 to 16, steps of 1 to 100 thousandths."""
    H = size["H"]
    step = torch.exp(draw.uniform(-6.9, -2.3, H, dtype=torch.float32))
    A_log = torch.log(draw.uniform(1.0, 16.0, H, dtype=torch.float32))
    return A_log, draw.uniform(0.5, 1.5, H, dtype=torch.float32), step + torch.log(-torch.expm1(-step))


def _scan(size: Size, draw: Draw) -> Args:
    B, T, H, P, N, G = (size[letter] for letter in "BTHPNG")
    A_log, D, dt_bias = _heads(size, draw)
    x, dt, b, c = draw(B, T, H, P), draw(B, T, H), draw(B, T, G, N), draw(B, T, G, N)
    return x, dt, A_log, b, c, D, dt_bias, None, _CHUNK, 0.0, None


def _scan_flops(size: Size) -> int:
    # Causal products within chunks, two products with the state.
    B, T, H, P, N, G = (size[letter] for letter in "BTHPNG")
    chunk = min(_CHUNK, T)
    return B * T * (chunk * N * G + chunk * P * H + 4 * N * P * H)


def _scan_elementwise(size: Size) -> int:
    # Decays between the tokens of a chunk: a difference, an exponential, a product; steps, and what x adds itself.
    B, T, H, P = (size[letter] for letter in "BTHP")
    return B * T * H * (3 * min(_CHUNK, T) // 2 + 5 + 3 * P)


def _scan_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    # One head of each group, over all of the time.
    x, dt, A_log, B, C, D, dt_bias, state, *rest = args
    heads = torch.arange(0, x.shape[2], x.shape[2] // B.shape[2], device=x.device)
    picked = (x[:, :, heads], dt[:, :, heads], A_log[heads], B, C, D[heads], dt_bias[heads], state, *rest)
    return picked, [outputs[0][:, :, heads], outputs[1][:, heads]]


def _state_step(size: Size, draw: Draw) -> Args:
    B, H, P, N, G = (size[letter] for letter in "BHPNG")
    A_log, D, dt_bias = _heads(size, draw)
    state = draw(B, H, P, N, dtype=torch.float32)
    return state, draw(B, H, P), draw(B, H), A_log, draw(B, G, N), draw(B, G, N), D, dt_bias, None


def _mixer_step(size: Size, draw: Draw) -> Args:
    B, H, P, N, G = (size[letter] for letter in "BHPNG")
    channels, W = H * P + 2 * G * N, 4
    A_log, D, dt_bias = _heads(size, draw)
    zxbcdt = draw(B, H * P + channels + H)
    conv_state, state = draw(B, channels, W - 1), draw(B, H, P, N, dtype=torch.float32)
    weight, bias = draw(channels, W) * W**-0.5, draw(channels)
    return zxbcdt, conv_state, state, weight, bias, A_log, D, dt_bias, _weight(draw, H * P), None, G, 1e-5


def _mixer_end(size: Size, draw: Draw) -> Args:
    *step, groups, eps = _mixer_step(size, draw)
    return *step, _matrix(draw, size["D"], size["H"] * size["P"]), None, groups, eps


def _mixer_elementwise(size: Size) -> int:
    # The convolution of all channels, the state, the gated norm.
    B, H, P, N, G = (size[letter] for letter in "BHPNG")
    return B * (13 * (H * P + 2 * G * N) + H * P * (5 * N + 3) + 9 * H * P)


# --------------------------------------------------------------------------------------------------------------- KDA


def _decays(size: Size, draw: Draw) -> Tensor:
    """Log-decays as layers are initialized, [B, T, H, K]: rates of 1 to 16, steps of 1 to 100 thousandths."""
    B, T, H, K = (size[letter] for letter in "BTHK")
    rate = draw.uniform(1.0, 16.0, H, 1, dtype=torch.float32)
    return draw.uniform(-6.9, -2.3, B, T, H, K, dtype=torch.float32).exp_().mul_(rate).neg_()


def _gate(size: Size, draw: Draw) -> Args:
    B, T, H, K = (size[letter] for letter in "BTHK")
    A_log = torch.log(draw.uniform(1.0, 16.0, H, dtype=torch.float32))
    return draw(B, T, H, K), A_log, draw.uniform(-6.9, -2.3, H * K, dtype=torch.float32), None


def _delta_rule(size: Size, draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g and beta."""
    B, T, H, K, V = (size[letter] for letter in "BTHKV")
    beta = draw.uniform(0.0, 1.0, B, T, H, dtype=torch.float32)
    return draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), _decays(size, draw), beta


def _kda(size: Size, draw: Draw) -> Args:
    return *_delta_rule(size, draw), None, size["K"] ** -0.5, True, None


def _kda_step(size: Size, draw: Draw) -> Args:
    B, H, K, V = (size[letter] for letter in "BHKV")
    state = draw(B, H, K, V, dtype=torch.float32)
    return state, *_delta_rule({**size, "T": 1}, draw), K**-0.5, True, None


def _kda_flops(size: Size) -> int:
    # By token and head: two triangles of scores, the triangle times what is written, three products with the state;
    # the systems of equations, a third of 64^3 a chunk, and their solution.
    B, T, H, K, V = (size[letter] for letter in "BTHKV")
    chunk = min(CHUNK, T)
    return B * T * H * (chunk * (2 * K + 2 * V + chunk // 3) + 6 * K * V)


def _first_head_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    # Over all of the time.
    q, k, v, g, beta, state, *rest = args
    return (*(t[:, :, :1] for t in (q, k, v, g, beta)), state, *rest), [outputs[0][:, :, :1], outputs[1][:, :1]]


# ----------------------------------------------------------------------------------------------------------- experts


# Products in fp32, which matrix units do not do, count among the operations outside of products.
def _router_logits(size: Size, draw: Draw) -> Args:
    T, E, D = (size[letter] for letter in "TED")
    wide = torch.promote_types(draw.dtype, torch.float32)
    return draw(T, D), draw(E, D, dtype=wide) * D**-0.5


def _router(size: Size, draw: Draw) -> Args:
    T, E = size["T"], size["E"]
    wide = torch.promote_types(draw.dtype, torch.float32)
    return draw(T, E, dtype=wide), 0.1 * draw(E, dtype=wide), size["A"], 2.446


def _experts(size: Size, draw: Draw) -> Args:
    # With a shared expert as wide as the others, as in the published models.
    T, E, D, F = (size[letter] for letter in "TEDF")
    weights, indices = moe_sigmoid_router.reference(*_router(size, draw))
    gate_up, shared_gate_up = _matrices(draw, E, 2 * F, D), _matrix(draw, 2 * F, D)
    down, shared_down = _matrices(draw, E, D, F), _matrix(draw, D, F)
    return draw(T, D), gate_up, down, indices, weights, None, shared_gate_up, shared_down


def _matrices(draw: Draw, e: int, n: int, k: int) -> Tensor:
    return draw(e, n, k).mul_(k**-0.5)


def _experts_flops(size: Size) -> int:
    return 6 * size["T"] * (size["A"] + 1) * size["D"] * size["F"]


def _experts_elementwise(size: Size) -> int:
    # SwiGLU in each expert, and the weighted sum over them.
    return size["T"] * (size["A"] + 1) * (5 * size["F"] + 2 * size["D"])


def _other_experts(args: Args) -> int:
    """Bytes of the experts that no token was sent to."""
    gate_up, down, indices = args[1:4]
    expert = gate_up[0].numel() * gate_up.element_size() + down[0].numel() * down.element_size()
    return (gate_up.shape[0] - indices.unique().numel()) * expert


def _tokens_of_experts(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    x, gate_up, down, indices, weights, *rest = args
    return (x[:4], gate_up, down, indices[:4], weights[:4], *rest), [outputs[0][:4]]


def _channels_sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
    x, weight, bias, *rest = args
    some = torch.arange(0, x.shape[-1], max(1, x.shape[-1] // 64), device=x.device)
    return (x[..., some], weight[some], bias[some], *rest), [outputs[0][..., some]]


def _batch_sample(*positions: int) -> Sample:
    """The first and the last sequence of the arguments at these positions and of all outputs."""

    def sample(args: Args, outputs: list[Tensor]) -> tuple[Args, list[Tensor]]:
        last = outputs[0].shape[0] - 1
        rows = sorted({0, last})
        picked = (sample_index(a, rows) if i in positions else a for i, a in enumerate(args))
        return tuple(picked), [sample_index(t, rows) for t in outputs]

    return sample


def _batches(*batches: int) -> tuple[str, ...]:
    return tuple(f"B{B}-{_MIXER}" for B in batches)


# -------------------------------------------------------------------------------------------------------------- rows

CASES = {
    case.name: case
    for case in (
        Case(
            "rms_norm",
            rms_norm,
            _ROWS,
            _norm,
            _peers("rms_norm", "pytorch", "liger", "transformers"),
            sample_rows,
            elementwise=count(TN=4),
        ),
        Case(
            "add_rms_norm",
            add_rms_norm,
            _ROWS,
            _add_norm,
            _peers("add_rms_norm", "pytorch", "liger", "transformers"),
            sample_rows,
            elementwise=count(TN=5),
        ),
        # The weight's gradient is a sum over all rows, so that no part of them can stand for it: no sample.
        Case(
            "rms_norm_backward",
            rms_norm_backward,
            _ROWS[:3],
            _add_norm,
            _peers("rms_norm_backward", "pytorch", "liger"),
            elementwise=count(TN=11),
        ),
        Case(
            "concat_rms_norm",
            concat_rms_norm,
            ("T1-D2048", "T256-D2048", "T8192-D2048"),
            _concat_norm,
            _peers("concat_rms_norm", "pytorch"),
            sample_rows,
            elementwise=count(TD=9),
        ),
        Case(
            "gated_rms_norm",
            gated_rms_norm,
            (*(f"T{T}-N4096-G{G}" for T in (1, 256, 8192, 65536) for G in (1, 2)), "T8192-N4096-G1-Z8512"),
            _mixer_norm,
            _peers("gated_rms_norm", "vllm", "mamba_ssm", "transformers"),
            sample_rows,
            elementwise=count(TN=9),
        ),
        Case(
            "gated_rms_norm.sigmoid",
            gated_rms_norm,
            tuple(f"T{T}-H32-N128" for T in (1, 256, 8192, 65536)),
            _head_norm,
            _peers("gated_rms_norm", "fla", "transformers"),
            sample_rows,
            elementwise=count(THN=8),
        ),
        Case(
            "gated_square_sum",
            gated_square_sum,
            _HALVES,
            lambda size, draw: (draw(size["T"], size["N"]), draw(size["T"], size["N"])),
            {},
            lambda args, outputs: (tuple(t[:64] for t in args), [outputs[0][:64]]),
            elementwise=count(TN=7),
        ),
        Case(
            "gated_norm_by_sum",
            gated_norm_by_sum,
            _HALVES,
            _norm_by_sum,
            {},
            lambda args, outputs: ((*(t[:64] for t in args[:2]), args[2], args[3][:64], *args[4:]), [outputs[0][:64]]),
            elementwise=count(TN=7, T=3),
        ),
        Case(
            "gated_activation",
            gated_activation,
            ("T1-F8192", "T256-F8192", "T8192-F8192"),
            _gated_mlp,
            _peers("gated_activation", "pytorch"),
            sample_rows,
            elementwise=count(TF=6),
        ),
        Case(
            "rotary_embedding",
            rotary_embedding,
            ("B1-T1-H32-K128", "B1-T256-H32-K128", "B1-T8192-H32-K128"),
            _rotary,
            _peers("rotary_embedding", "transformers"),
            _tokens_sample,
            elementwise=count(BTHK=6),
        ),
        # A cosine or a sine counts as one operation.
        Case(
            "rotary_angles",
            rotary_angles,
            ("B1-T1-K128", "B8-T1-K128", "B1-T8192-K128"),
            _rotary_angles,
            elementwise=count(BTK=2),
        ),
        # A decode step's, into a cache of S keys.
        Case(
            "rotary_insert",
            rotary_insert,
            ("B1-T1-H32-S1024-K128", "B8-T1-H32-S1024-K128"),
            _rotary_insert,
            {},
            _insert_sample,
            unread=_not_inserted,
            elementwise=count(BTHK=6),
        ),
        Case(
            "greedy_tokens",
            greedy_tokens,
            ("B1-V32000", "B8-V32000", "B8-V163840"),
            _greedy,
            elementwise=count(BV=1),
        ),
        Case(
            "linear",
            linear,
            tuple(f"T{T}-{layer}" for layer in ("N2048-K4096", "N2048-K8192", "N32000-K2048") for T in (1, 8)),
            _linear,
            _peers("linear", "pytorch"),
            _outputs_sample(1),
            flops=count(TNK=2),
        ),
        Case(
            "norm_linear",
            norm_linear,
            tuple(f"T{T}-N8512-K2048" for T in (1, 2, 4, 8)),
            _norm_linear,
            _peers("norm_linear", "pytorch"),
            _outputs_sample(3),
            flops=count(TNK=2),
            elementwise=count(TK=5),
        ),
        Case(
            "gated_norm_linear",
            gated_norm_linear,
            tuple(f"T{T}-{layer}" for layer in ("N2048-K4096-G1", "N3584-K7168-G2") for T in (1, 8)),
            _gated_norm_linear,
            _peers("gated_norm_linear", "pytorch"),
            _outputs_sample(3),
            flops=count(TNK=2),
            elementwise=count(TK=9),
        ),
        Case(
            "adapted_linears",
            adapted_linears,
            tuple(f"T{T}-{layers}-R128" for layers in ("L1-N16384-K2048", "L3-N4096-K4096") for T in (1, 8)),
            _adapted,
            _peers("adapted_linears", "pytorch"),
            flops=count(LTNK=2, LTRK=2, LTNR=2),
        ),
        Case(
            "norm_glu",
            norm_glu,
            tuple(f"T{T}-F8192-K2048-R128" for T in (1, 2, 4, 8)),
            _glu,
            {},
            _glu_sample,
            flops=count(TFK=4, TRK=2, TFR=4),
            elementwise=count(TK=4, TF=6),
        ),
        Case(
            "decode_attention",
            decode_attention,
            (
                "B1-H32-S256-K128",
                "B1-H32-S2048-K128",
                "B1-H32-S2048-K128-Z4096",
                "B1-H32-S2048-K224",
                "B32-H32-S256-K128",
                "B32-H32-S2048-K128",
                "B32-H32-S2048-K128-Z4096",
            ),
            _cache,
            _peers("decode_attention", "pytorch"),
            _cache_sample,
            unread=_unseen,
            flops=count(BHSK=4),
            elementwise=count(BHS=5),
        ),
        Case(
            "mla_decode",
            mla_decode,
            (
                "B1-H32-S256-R512-K64",
                "B1-H32-S2048-R512-K64",
                "B32-H32-S256-R512-K64",
                "B1-H32-S32768-R512-K64",
                "B32-H32-S2048-R512-K64",
                "B32-H32-S2048-R512-K64-Z4096",
            ),
            _latents,
            _peers("mla_decode", "pytorch"),
            _latents_sample,
            _latents_flops,
            unread=_unseen_latents,
            elementwise=count(BHS=5),
        ),
        Case(
            "causal_conv1d",
            causal_conv1d,
            ("B1-T256-D4352-W4-Z8512", "B1-T8192-D4352-W4-Z8512"),
            _conv,
            _peers("causal_conv1d", "pytorch", "fla"),
            _channels_sample,
            elementwise=count(BTDW=2, BTD=5),
        ),
        Case(
            "causal_conv1d_update",
            causal_conv1d_update,
            tuple(f"B{B}-D4352-W4" for B in (1, 32, 256)),
            _conv_step,
            _peers("causal_conv1d_update", "vllm"),
            _batch_sample(0, 1),
            elementwise=count(BDW=2, BD=5),
        ),
        Case(
            "ssd_chunk_scan",
            ssd_chunk_scan,
            tuple(f"B1-T{T}-{_MIXER}" for T in (2048, 8192, 32768)),
            _scan,
            _peers("ssd_chunk_scan", "mamba_ssm", "vllm"),
            _scan_sample,
            _scan_flops,
            compiles=False,
            elementwise=_scan_elementwise,
        ),
        Case(
            "selective_state_update",
            selective_state_update,
            _batches(1, 32, 256),
            _state_step,
            _peers("selective_state_update", "mamba_ssm", "vllm"),
            _batch_sample(0, 1, 2, 4, 5),
            elementwise=count(BHPN=5, BHP=3),
        ),
        Case(
            "kda_gate",
            kda_gate,
            tuple(f"B1-T{T}-H32-K128" for T in (1, 256, 8192)),
            _gate,
            _peers("kda_gate", "fla"),
            lambda args, outputs: ((args[0][:, -64:], *args[1:]), [outputs[0][:, -64:]]),
            elementwise=count(BTHK=7),
        ),
        Case(
            "chunk_kda",
            chunk_kda,
            ("B1-T2048-H32-K128-V128", "B1-T8192-H32-K128-V128", "B1-T8192-H96-K128-V128"),
            _kda,
            _peers("chunk_kda", "fla"),
            _first_head_sample,
            _kda_flops,
            compiles=False,
            elementwise=count(BTHK=16, BTHV=3),
        ),
        Case(
            "recurrent_kda",
            recurrent_kda,
            tuple(f"B{B}-H32-K128-V128" for B in (1, 32, 128)),
            _kda_step,
            _peers("recurrent_kda", "fla"),
            _batch_sample(0, 1, 2, 3, 4, 5),
            elementwise=count(BHKV=7, BHK=10),
        ),
        Case(
            "moe_router_logits",
            moe_router_logits,
            tuple(f"T{T}-E256-D2304" for T in (1, 32)),
            _router_logits,
            _peers("moe_router_logits", "pytorch"),
            elementwise=count(TED=2),
        ),
        Case(
            "moe_sigmoid_router",
            moe_sigmoid_router,
            tuple(f"T{T}-E256-A8" for T in (1, 32, 4096)),
            _router,
            {},
            lambda args, outputs: ((args[0][:64], *args[1:]), [output[:64] for output in outputs]),
            elementwise=count(TE=5),
        ),
        Case(
            "moe_experts",
            moe_experts,
            tuple(f"T{T}-E64-A8-D2304-F1024" for T in (1, 4, 32)),
            _experts,
            {},
            _tokens_of_experts,
            _experts_flops,
            compiles=False,
            unread=_other_experts,
            elementwise=_experts_elementwise,
        ),
        Case(
            "moe_experts_many",
            moe_experts,
            tuple(f"T{T}-E64-A8-D2304-F1024" for T in (64, 256, 4096)),
            _experts,
            {},
            _tokens_of_experts,
            _experts_flops,
            compiles=False,
            unread=_other_experts,
            has_kernel=False,
            elementwise=_experts_elementwise,
        ),
        Case(
            "mamba2_decode_step",
            mamba2_decode_step,
            _batches(1, 32, 256),
            _mixer_step,
            _peers("mamba2_decode_step", "vllm"),
            _batch_sample(0, 1, 2),
            elementwise=_mixer_elementwise,
        ),
        Case(
            "mamba2_decode_linear",
            mamba2_decode_linear,
            tuple(f"B{B}-{_MIXER}-D2048" for B in (1, 2, 4, 8)),
            _mixer_end,
            _peers("mamba2_decode_linear", "vllm"),
            _batch_sample(0, 1, 2),
            flops=count(BDHP=2),
            elementwise=_mixer_elementwise,
        ),
    )
}

# Rows that have a module of their own; imported by name, so that imports keep pointing one way.
for _module in (
    "xpu_ports.common.bench.deepseek_v4",
    "xpu_ports.common.bench.diffusion",
    "xpu_ports.quant.mxfp4.bench",
):
    CASES |= {case.name: case for case in importlib.import_module(_module).CASES}


def find(names: Iterable[str]) -> list[Case]:
    """The rows of these names; an op's name stands for all of its rows; all rows for none.

    Raises:
        ValueError: a name is neither a row's nor an op's.
    """
    found: dict[str, Case] = {}
    for name in names:
        rows = [case for case in CASES.values() if name in (case.name, case.op.name)]
        if not rows:
            near = difflib.get_close_matches(name, CASES, n=1)
            hint = f" did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no benchmark is named {name!r};{hint} there are {', '.join(CASES)}")
        found |= {case.name: case for case in rows}
    return list(found.values()) or list(CASES.values())
