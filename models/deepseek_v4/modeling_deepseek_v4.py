"""DeepSeek-V4, after the report of that name (DeepSeek-AI) and the inference code published with the weights.

- attention with one key a token, which is its value too, over a window; beside it over windows of 4 tokens made one,
  of which an indexer picks some, or of 128 tokens, all of them; in one softmax with a sink
- four residual streams, mixed by doubly stochastic matrices (mHC)
- a mixture of experts after each attention; the first layers choose by a table of tokens

Letters: B batch, T tokens, S residual streams, D model width, H heads, K head width, R rank of queries, E experts, A
experts of a token, F MLP width, r tokens of a compressed entry, C indexer's head width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from xpu_ports.common.generation import CapturedGeneration
from xpu_ports.common.graph import captured_decode
from xpu_ports.common.kernels.compress import compress_csa, compress_hca
from xpu_ports.common.kernels.fp8_pages import cache_rows
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.indexer import indexer_scores, stable_topk
from xpu_ports.common.kernels.mhc import mhc_head, mhc_post, mhc_post_products, mhc_pre, products_save_time
from xpu_ports.common.kernels.mla_rope import (
    inverse_rope_grouped_out,
    norm_rope_insert,
    qnorm_rope_kv_insert,
    rope_tail,
)
from xpu_ports.common.kernels.moe_experts import moe_experts
from xpu_ports.common.kernels.moe_router import moe_router_logits
from xpu_ports.common.kernels.moe_sqrtsoftplus_router import moe_hash_router, moe_sqrtsoftplus_router
from xpu_ports.common.kernels.sparse_mla import sparse_mla_decode, sparse_mla_prefill
from xpu_ports.common.modules import RMSNorm, is_plain, known_early, project, project_adapted, weights_read
from xpu_ports.common.sequence import mask_of_tokens
from xpu_ports.models.deepseek_v4.caching import ROLLBACK, DeepseekV4Cache, DeepseekV4CacheLayer
from xpu_ports.models.deepseek_v4.capture import DeepseekV4StepGraph
from xpu_ports.models.deepseek_v4.configuration_checks import DEEPSEEK_V4_CHECKS
from xpu_ports.models.deepseek_v4.parallel import parallel_plan
from xpu_ports.models.deepseek_v4.published import (
    checkpoint_config,
    dense_weights,
    drop_quantization,
    generation_config,
    published_folder,
)
from xpu_ports.models.deepseek_v4.rope import Positions
from xpu_ports.models.deepseek_v4.speculation import check_speculation, speculate
from xpu_ports.models.deepseek_v4.weight_rules import weight_rules
from xpu_ports.quant.loading import PackedLoading

SLIDING = "sliding_attention"
SPARSE = "compressed_sparse_attention"
# Queries that attend at once: what they look at grows with the sequence, and their product with it must not square.
TILE = 1024


@dataclass
class Entries:
    """The compressed entries that a call's tokens close, in the layers of one kind: NW windows a row at most."""

    # [B, NW], int64: where each goes, -1 for those that are not closed.
    slots: Tensor
    # [B, NW, rope / 2] each, of the window's first token.
    cos: Tensor
    sin: Tensor
    # At least the entries that any row has after this call, as the host knows.
    total: int


@dataclass
class Step:
    """What all layers need to know of a call's tokens. Each row's own tokens stand first, padding behind them."""

    # [B, T], token ids; None where only embeddings are known.
    ids: Tensor | None
    # [B], int64: tokens of each row before these, and how many of these are its own.
    start: Tensor
    count: Tensor
    # Whether the cache was empty, as the host knows it.
    fresh: bool
    # [B, T], int64: slots of the window's ring, -1 for what it does not keep.
    slots: Tensor
    # [B T], int64: how many of its row's tokens each sees, where they attend one by one to all that the cache holds,
    # which hangs on no number that the host knows; else None.
    seen: Tensor | None
    # [B, span - 1], int64: slots of the tokens before these, where those attend together behind a past; else None.
    past: Tensor | None
    # cos and sin, [B, T, rope / 2], by kind of layer.
    rotations: dict[str, tuple[Tensor, Tensor]]
    entries: dict[str, Entries]
    # The same on other devices, where some layers are.
    copies: dict[torch.device, Step] = field(default_factory=dict, repr=False)

    def to(self, device: Any, **kwargs: Any) -> Step:
        """The same on another device, moved there once: accelerate's hooks ask a layer's arguments for it."""
        device = torch.device(device)
        if device == self.start.device:
            return self
        if device not in self.copies:
            moved = {f.name: _moved(getattr(self, f.name), device, kwargs) for f in fields(self) if f.name != "copies"}
            self.copies[device] = Step(**moved)
        return self.copies[device]


def _moved(value: Any, device: torch.device, kwargs: dict[str, Any]) -> Any:
    """What a step holds, with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device, **kwargs)
    if isinstance(value, dict):
        return {key: _moved(item, device, kwargs) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(item, device, kwargs) for item in value)
    if isinstance(value, Entries):
        return Entries(*(_moved(getattr(value, f.name), device, kwargs) for f in fields(value)))
    return value


class DeepseekV4Projection(nn.Module):
    """The weight of a projection that an op does with more to it: no `nn.Linear`, which would be packed or adapted."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))


class DeepseekV4Compressor(nn.Module):
    """Windows of r tokens made one row (report, sections 2.3.1 and 2.3.2)."""

    def __init__(self, config: Any, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.ratio = kind, config.compress_rates[kind]
        self.compress = compress_csa if kind == SPARSE else compress_hca
        # Of the window itself, and in sparse layers of the next one as well.
        columns = (2 if kind == SPARSE else 1) * width
        self.kv_gate_proj = DeepseekV4Projection(config.hidden_size, 2 * columns)
        self.position_bias = nn.Parameter(torch.zeros(self.ratio, columns, dtype=torch.float32))
        self.kv_norm = RMSNorm(width, eps=config.rms_norm_eps)

    # Their weights are read here, so their own forward, and accelerate's hook on it, does not run.
    @weights_read("kv_gate_proj", "kv_norm")
    def insert(self, x: Tensor, step: Step, state: Tensor, store: Tensor, index: bool) -> Tensor:
        """Put the entries that x [B, T, D] closes into a store; [B, NW, width], as it holds them."""
        # In fp32, as trained: a softmax over few tokens is as exact as its scores.
        x = moe_router_logits(x.flatten(0, 1), self.kv_gate_proj.weight).unflatten(0, x.shape[:2])
        pool = self.compress(x, self.position_bias, state, step.start, step.count)
        new = step.entries[self.kind]
        norm = self.kv_norm
        return norm_rope_insert(pool, norm.weight, new.cos, new.sin, new.slots, store, norm.variance_epsilon, index)


class DeepseekV4IndexerScorer(nn.Module):
    """What each of the indexer's heads counts for a token.

    The report's scale of the products, (C heads)^-1/2, is left out: the same for all entries, it changes no choice.
    """

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(config.hidden_size, config.index_n_heads, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, heads] of x [B, T, D]."""
        return project(self.weights_proj, x)


class DeepseekV4Indexer(DeepseekV4Compressor):
    """Which compressed entries a token looks at, by keys of its own (report, section 2.3.1, equations 13 to 17)."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config, SPARSE, config.index_head_dim)
        self.C, self.top_k = config.index_head_dim, config.index_topk
        self.q_b_proj = nn.Linear(config.q_lora_rank, config.index_n_heads * self.C, bias=False)
        self.scorer = DeepseekV4IndexerScorer(config)

    def forward(self, x: Tensor, residual: Tensor, step: Step, layer: DeepseekV4CacheLayer) -> Choice | None:
        """What chooses for the tokens x [B, T, D], whose queries are made of residual [B, T, R].

        None where there are no more entries than are chosen. The keys of this call's entries are inserted either way.
        """
        self.insert(x, step, layer.index_state, layer.index_entries, True)
        total = step.entries[SPARSE].total if step.seen is None else layer.slots()
        if total <= self.top_k:
            return None
        q = rope_tail(project(self.q_b_proj, residual).unflatten(-1, (-1, self.C)), *step.rotations[SPARSE])
        keys = layer.first(layer.index_entries, total)
        return Choice(q, self.scorer(x), keys, total, step.start, self.ratio, self.top_k)


@dataclass
class Choice:
    """The indexer's queries and keys, to choose for some tokens at a time."""

    # [B, T, heads, C], [B, T, heads], and a store of `total` entries.
    q: Tensor
    weights: Tensor
    keys: Tensor
    total: int
    start: Tensor
    ratio: int
    top_k: int

    def of(self, first: int, last: int) -> Tensor:
        """The entries of tokens `first` to `last` of this call, [B, last - first, top_k]."""
        q, weights, start = self.q, self.weights, self.start
        if last - first < q.shape[1]:
            q, weights = q[:, first:last], weights[:, first:last]
        if first:
            start = start + first
        scores = indexer_scores(q, weights, self.keys, self.total, start, self.ratio)
        return stable_topk(scores, self.top_k)


class DeepseekV4SelfCompressor(DeepseekV4Compressor):
    """The compressor of attention's own rows, which has the indexer in sparse layers."""

    def __init__(self, config: DeepseekV4Config, kind: str) -> None:
        super().__init__(config, kind, config.head_dim)
        if kind == SPARSE:
            self.indexer = DeepseekV4Indexer(config)

    def forward(
        self, x: Tensor, residual: Tensor, step: Step, layer: DeepseekV4CacheLayer
    ) -> tuple[Tensor | None, Choice | None]:
        """(a store of all entries, what chooses among them) after the tokens x [B, T, D]."""
        new = step.entries[self.kind]
        layer.reserve(new.total)
        rows = self.insert(x, step, layer.state, layer.entries, False)
        choice = self.indexer(x, residual, step, layer) if self.kind == SPARSE else None
        if step.seen is not None:
            return layer.entries, choice
        if new.total == 0:
            return None, None
        # From an empty cache the new entries are all, and gradients go through them.
        return rows if step.fresh else layer.first(layer.entries, new.total), choice


class DeepseekV4Attention(nn.Module):
    """Attention over a window and compressed entries (report, section 2.3), of one kind or another.

    All heads share a token's key, which is its value as well; what is summed up is turned back by the query's position.
    The output is projected by groups of heads first.
    """

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        self.kind, self.ratio = kind, config.compress_rates.get(kind, 1)
        self.H, self.K, self.rope = config.num_attention_heads, config.head_dim, config.qk_rope_head_dim
        self.span, self.scaling = config.sliding_window, self.K**-0.5
        D, R = config.hidden_size, config.q_lora_rank
        out = config.o_groups * config.o_lora_rank
        self.q_a_proj = nn.Linear(D, R, bias=False)
        self.q_a_norm = RMSNorm(R, eps=config.rms_norm_eps)
        self.q_b_proj = nn.Linear(R, self.H * self.K, bias=False)
        self.kv_proj = nn.Linear(D, self.K, bias=False)
        self.kv_norm = RMSNorm(self.K, eps=config.rms_norm_eps)
        self.o_a_proj = DeepseekV4Projection(self.H * self.K // config.o_groups, out)
        self.o_b_proj = nn.Linear(out, D, bias=False)
        self.sinks = nn.Parameter(torch.zeros(self.H, dtype=torch.float32))
        self.compressor = None if kind == SLIDING else DeepseekV4SelfCompressor(config, kind)

    # Their weights are read here, so their own forward, and accelerate's hook on it, does not run.
    @weights_read("kv_norm", "o_a_proj")
    def forward(self, x: Tensor, step: Step, layer: DeepseekV4CacheLayer) -> Tensor:
        """Attend over the past; [B, T, D] of x [B, T, D], whose rows and entries go into the layer's cache."""
        if not layer.is_initialized:
            # Where this layer is, which may be another device than that of the first.
            layer.lazy_initialization(x)
        q, kv = project_adapted(x, [self.q_a_proj, self.kv_proj], [])
        residual = self.q_a_norm(q)
        q = project(self.q_b_proj, residual).unflatten(-1, (self.H, self.K))
        cos, sin = step.rotations[self.kind]
        past = None if step.past is None else cache_rows(layer.window, step.past, self.K, self.rope)
        norm = self.kv_norm
        q, kv = qnorm_rope_kv_insert(q, kv, norm.weight, cos, sin, step.slots, layer.window, norm.variance_epsilon)
        entries, choice = (None, None) if self.compressor is None else self.compressor(x, residual, step, layer)
        if step.seen is not None:
            o = self.decode(q, layer.window, entries, choice, step.seen)
        else:
            o = self.prefill(q, kv if past is None else torch.cat([past, kv], dim=1), entries, choice, step)
        return project(self.o_b_proj, inverse_rope_grouped_out(o, cos, sin, self.o_a_proj.weight))

    def decode(self, q: Tensor, window: Tensor, entries: Tensor | None, choice: Choice | None, seen: Tensor) -> Tensor:
        """Tokens one by one, q [B, T, H, K]: one of each row, or some of the only row, which then is T rows."""
        T = q.shape[1]
        indices = None if choice is None else choice.of(0, T).flatten(0, 1)
        if T > 1:
            window = window.expand(T, -1, -1)
            entries = None if entries is None else entries.expand(T, -1, -1)
        o = sparse_mla_decode(
            q.flatten(0, 1), window, entries, indices, seen, self.sinks, self.span, self.ratio, self.rope, self.scaling
        )
        return o.unflatten(0, q.shape[:2])

    def prefill(self, q: Tensor, rows: Tensor, entries: Tensor | None, choice: Choice | None, step: Step) -> Tensor:
        """A sequence or a piece of one, q [B, T, H, K], on rows [B, P + T, K], of P tokens before; tile by tile."""
        T, outputs = q.shape[1], []
        P = rows.shape[1] - T
        for first in range(0, T, TILE):
            last = min(first + TILE, T)
            seen = rows[:, max(0, P + first - self.span + 1) : P + last]
            indices = None if choice is None else choice.of(first, last)
            start = step.start + first
            outputs.append(
                sparse_mla_prefill(
                    q[:, first:last], seen, entries, indices, start, self.sinks, self.span, self.ratio, self.rope,
                    self.scaling,
                )
            )  # fmt: skip
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


class DeepseekV4MLP(nn.Module):
    """The shared expert."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        D, F = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_up_proj = nn.Linear(D, 2 * F, bias=False)
        self.down_proj = nn.Linear(F, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = project(self.gate_up_proj, x)
        return project(self.down_proj, gated_activation(gate_up, None, "silu", self.limit))


class DeepseekV4Experts(nn.Module):
    """The routed experts' weights, one tensor for each of their two layers."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * F, D))
        self.down_proj = nn.Parameter(torch.zeros(E, D, F))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, shared: DeepseekV4MLP | None = None) -> Tensor:
        """The experts' sum for x [N, D], with that of a shared one whose weights are read here, where there is one."""
        gate_up, down = (None, None) if shared is None else (shared.gate_up_proj.weight, shared.down_proj.weight)
        return moe_experts(x, self.gate_up_proj, self.down_proj, indices, weights, self.limit, gate_up, down)


class DeepseekV4TopKRouter(nn.Module):
    """The choice of experts by their scores (report, section 2.1)."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        bias = torch.zeros(config.n_routed_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [N, E], weights [N, A], indices [N, A]) of x [N, D]; ids are not read."""
        logits = moe_router_logits(x, self.weight)
        return logits, *moe_sqrtsoftplus_router(logits, self.e_score_correction_bias, self.top_k, self.scale)


class DeepseekV4HashRouter(nn.Module):
    """The choice of experts by the token, in the first layers (report, section 2.1)."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.scale = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        table = torch.zeros(config.vocab_size, config.num_experts_per_tok, dtype=torch.int64)
        self.register_buffer("tid2eid", table)

    def forward(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [N, E], weights [N, A], indices [N, A]) of x [N, D] and the tokens' ids [N]."""
        if ids is None:
            raise ValueError("the first layers choose experts by token: give input_ids beside inputs_embeds")
        logits = moe_router_logits(x, self.weight)
        return logits, *moe_hash_router(logits, self.tid2eid, ids, self.scale)


class DeepseekV4SparseMoeBlock(nn.Module):
    """Routed experts beside a shared one (report, section 2.1)."""

    def __init__(self, config: DeepseekV4Config, kind: str) -> None:
        super().__init__()
        self.gate = (DeepseekV4HashRouter if kind == "hash_moe" else DeepseekV4TopKRouter)(config)
        self.experts = DeepseekV4Experts(config)
        self.shared_experts = DeepseekV4MLP(config)

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """[B, T, D] of x [B, T, D] and ids [B, T]."""
        tokens = x.flatten(0, 1)  # [N, D]
        _, weights, indices = self.gate(tokens, None if ids is None else ids.flatten())
        shared = self.shared_experts
        hooks = shared._forward_hooks or shared._forward_pre_hooks
        if type(self.experts) is DeepseekV4Experts and not hooks and all(is_plain(m) for m in shared.children()):
            return self.experts(tokens, indices, weights, shared).view_as(x)
        return self.experts(tokens, indices, weights).view_as(x) + shared(x)


class DeepseekV4HyperConnection(nn.Module):
    """How the residual streams go into a layer and its output back into them (report, section 2.2)."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.norm_eps, self.eps, self.iterations = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
        S, wide = config.hc_mult, torch.float32
        self.fn = nn.Parameter(torch.zeros((2 + S) * S, S * config.hidden_size, dtype=wide))
        self.base = nn.Parameter(torch.zeros((2 + S) * S, dtype=wide))
        self.scale = nn.Parameter(torch.zeros(3, dtype=wide))

    def forward(self, x: Tensor, products: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(the layer's input [B, T, D], and what `mhc_post` takes) of x [B, T, S, D] and `streams_after`'s products."""
        return mhc_pre(x, self.fn, self.scale, self.base, self.norm_eps, self.eps, self.iterations, products)


class DeepseekV4HyperHead(nn.Module):
    """The streams made one."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        self.norm_eps, self.eps = config.rms_norm_eps, config.hc_eps
        S, wide = config.hc_mult, torch.float32
        self.hc_fn = nn.Parameter(torch.zeros(S, S * config.hidden_size, dtype=wide))
        self.hc_base = nn.Parameter(torch.zeros(S, dtype=wide))
        self.hc_scale = nn.Parameter(torch.zeros(1, dtype=wide))

    def forward(self, x: Tensor, products: Tensor | None = None) -> Tensor:
        """[B, T, D] of x [B, T, S, D] and `streams_after`'s products."""
        return mhc_head(x, self.hc_fn, self.hc_scale, self.hc_base, self.norm_eps, self.eps, products)


def streams_after(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, fn: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The streams x [B, T, S, D] with a layer's output y [B, T, D] put in, and what who reads them next has to make.

    That are products with its weights fn, which are left to it where None are known, and where it reads the streams
    sooner than they are multiplied here.
    """
    if fn is None or not products_save_time(y, x, fn):
        return mhc_post(y, x, post, comb), None
    return mhc_post_products(y, x, post, comb, fn)


class DeepseekV4DecoderLayer(GradientCheckpointingLayer):
    """Attention, then experts, each between the residual streams (report, section 2.2)."""

    def __init__(self, config: DeepseekV4Config, kind: str, mlp_kind: str) -> None:
        super().__init__()
        self.self_attn = DeepseekV4Attention(config, kind)
        self.mlp = DeepseekV4SparseMoeBlock(config, mlp_kind)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_hc = DeepseekV4HyperConnection(config)
        self.ffn_hc = DeepseekV4HyperConnection(config)

    def forward(
        self,
        x: Tensor,
        step: Step,
        layer: DeepseekV4CacheLayer,
        products: Tensor | None = None,
        next_fn: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(streams [B, T, S, D], their products with `next_fn`) of x [B, T, S, D] and what is made of it already."""
        y, post, comb = self.attn_hc(x, products)
        fn = known_early(self.ffn_hc, "fn", x.device)
        x, products = streams_after(self.self_attn(self.input_layernorm(y), step, layer), x, post, comb, fn)
        y, post, comb = self.ffn_hc(x, products)
        return streams_after(self.mlp(self.post_attention_layernorm(y), step.ids), x, post, comb, next_fn)


class DeepseekV4MTPLayer(DeepseekV4DecoderLayer):
    """A layer that guesses the token after the next (arXiv:2412.19437, section 2.2; the inference code).

    Its streams are those behind the last layer, before they are made one, with the next token's embedding added.
    """

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config, SLIDING, "moe")
        D = config.hidden_size
        self.enorm = RMSNorm(D, eps=config.rms_norm_eps)
        self.hnorm = RMSNorm(D, eps=config.rms_norm_eps)
        self.e_proj = nn.Linear(D, D, bias=False)
        self.h_proj = nn.Linear(D, D, bias=False)
        self.norm = RMSNorm(D, eps=config.rms_norm_eps)
        self.hc_head = DeepseekV4HyperHead(config)

    def guess(self, e: Tensor, x: Tensor, step: Step, layer: DeepseekV4CacheLayer) -> tuple[Tensor, Tensor]:
        """(what the head takes [B, T, D], streams [B, T, S, D]) of embeddings e [B, T, D] and streams x."""
        e = project(self.e_proj, self.enorm(e))
        x = e[:, :, None] + project(self.h_proj, self.hnorm(x))
        x, products = self(x, step, layer, None, known_early(self.hc_head, "hc_fn", x.device))
        return self.norm(self.hc_head(x, products)), x


class DeepseekV4PreTrainedModel(PackedLoading, PreTrainedModel):
    config: DeepseekV4Config
    _config_checks = DEEPSEEK_V4_CHECKS
    _parallel_plan = staticmethod(parallel_plan)
    config_class = DeepseekV4Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekV4DecoderLayer"]
    _is_stateful = True
    _can_record_outputs = {
        "router_logits": [OutputRecorder(cls, index=0) for cls in (DeepseekV4HashRouter, DeepseekV4TopKRouter)]
    }
    # Layers that guess further, where they are not asked for.
    _keys_to_ignore_on_load_unexpected = [r"^mtp\."]
    _keep_in_fp32_modules_strict = [
        *("attn_hc", "ffn_hc", "hc_head", "sinks", "position_bias", "e_score_correction_bias"),
        *("q_a_norm", "kv_norm", "input_layernorm", "post_attention_layernorm", "norm"),
    ]

    def __init__(self, config: DeepseekV4Config, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        self._weight_rules = weight_rules(config)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: Any = None,
        cache_dtype: str | None = None,
        mtp: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """`StrictLoading.from_pretrained`; published FP8 and FP4 weights become dense (`published.py`).

        Args:
            pretrained_model_name_or_path, model_args, config, kwargs: as there.
            cache_dtype: what caches hold if nothing else is said (`DeepseekV4Cache`).
            mtp: load the layers that guess further too, which the files must then have.

        Raises:
            ValueError: there is no such cache_dtype.
            CheckpointError: as there.
        """
        path = pretrained_model_name_or_path
        switches = {k: v for k, v in (("cache_dtype", cache_dtype), ("mtp", mtp)) if v is not None}
        folder = published_folder(path, kwargs)
        if folder is None and not switches:
            return super().from_pretrained(path, *model_args, config=config, **kwargs)
        if folder is not None:
            # It is in the folder's name.
            kwargs.pop("subfolder", None)
        config = checkpoint_config(cls, path if folder is None else folder, config, kwargs)
        for name, value in switches.items():
            setattr(config, name, value)
        DeepseekV4Cache(config)
        if folder is None:
            return super().from_pretrained(path, *model_args, config=config, **kwargs)
        drop_quantization(config)
        loaded = super().from_pretrained(None, *model_args, config=config, state_dict=dense_weights(folder), **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = str(path)
        model.generation_config = generation_config(folder) or model.generation_config
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, DeepseekV4Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, (DeepseekV4TopKRouter, DeepseekV4HashRouter, DeepseekV4Projection)):
            init.normal_(module.weight, mean=0.0, std=std)
            if isinstance(module, DeepseekV4TopKRouter):
                init.zeros_(module.e_score_correction_bias)
            elif isinstance(module, DeepseekV4HashRouter):
                # Experts that differ, all of them as often.
                table = torch.arange(module.tid2eid.numel(), device=module.tid2eid.device) % module.weight.shape[0]
                init.copy_(module.tid2eid, table.view_as(module.tid2eid))
        elif isinstance(module, DeepseekV4HyperConnection):
            init.normal_(module.fn, mean=0.0, std=std)
            init.zeros_(module.base)
            init.ones_(module.scale)
        elif isinstance(module, DeepseekV4HyperHead):
            init.normal_(module.hc_fn, mean=0.0, std=std)
            init.zeros_(module.hc_base)
            init.ones_(module.hc_scale)
        elif isinstance(module, DeepseekV4Attention):
            init.zeros_(module.sinks)
        elif isinstance(module, DeepseekV4Compressor):
            init.zeros_(module.position_bias)


class DeepseekV4Model(DeepseekV4PreTrainedModel):
    """Embeddings, layers, the streams made one, final norm."""

    # Published names do not tell the base model's tensors from the head's.
    _keys_to_ignore_on_load_unexpected = [r"^mtp\.", r"^(lm_)?head\.weight$"]

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        kinds: Any = zip(config.layer_types or (), config.mlp_layer_types or (), strict=True)
        self.layers = nn.ModuleList([DeepseekV4DecoderLayer(config, *kind) for kind in kinds])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hc_head = DeepseekV4HyperHead(config)
        rotations: Any = config.rope_parameters
        self.positions = Positions(rotations, config.qk_rope_head_dim, config.compress_rates or {})
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Run the layers over tokens.

        Args:
            input_ids: [B, T]. The first layers choose experts by them, so they stand beside embeddings too.
            attention_mask: [B, past + T], nonzero where a token counts; padding may stand anywhere.
            position_ids: not read: positions are counted from each row's first token.
            cache: a `DeepseekV4Cache` with the tokens before; made when `use_cache` and left out.
            inputs_embeds: [B, T, D], instead of the tokens' own.
            use_cache: return the cache; the config's when left out.

        Raises:
            ValueError: there are neither ids nor embeddings, no ids where experts are chosen by them, a cache of
                another class, or a mask of another shape.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("give input_ids, or inputs_embeds, or both")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions, expected [batch, tokens]")
        if cache is None:
            cache = DeepseekV4Cache(self.config)
        elif not isinstance(cache, DeepseekV4Cache):
            raise ValueError(f"cache is a {type(cache).__name__}, expected a DeepseekV4Cache")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = mask_of_tokens(attention_mask, h.shape[1])
        order = None
        if mask is not None and h.shape[1] > 1:
            # Each row's own tokens first, in their order.
            order = (mask == 0).int().argsort(dim=1, stable=True)
            h = h.gather(1, order[..., None].expand_as(h))
            input_ids = None if input_ids is None else input_ids.gather(1, order)
        step = self.prepare(input_ids, h, mask, cache)
        x = h[:, :, None].expand(-1, -1, self.config.hc_mult, -1)  # [B, T, S, D]
        want_hidden = kwargs.pop("output_hidden_states", None) or False
        hidden_states = [x] if want_hidden else []
        # Who reads the streams behind each layer.
        readers: Any = [*((layer.attn_hc, "fn") for layer in self.layers[1:]), (self.hc_head, "hc_fn")]
        products = None
        for layer, kept, (reader, name) in zip(self.layers, cache.layers, readers, strict=True):
            x, products = layer(x, step, kept, products, known_early(reader, name, x.device))
            hidden_states += [x] if want_hidden else []
        cache.lengths.advance(step.count, h.shape[1], mask)
        h = self.norm(self.hc_head(x, products))
        if order is not None:
            back = order.argsort(dim=1)
            h = h.gather(1, back[..., None].expand_as(h))
            hidden_states = [t.gather(1, back[..., None, None].expand_as(t)) for t in hidden_states]
        return MoeModelOutputWithPast(
            last_hidden_state=h,
            cache=cache if use_cache else None,
            hidden_states=tuple(hidden_states) if want_hidden else None,
        )

    def prepare(self, ids: Tensor | None, h: Tensor, mask: Tensor | None, cache: DeepseekV4Cache) -> Step:
        """What all layers need to know of the tokens h [B, T, D], of which each row's own stand first."""
        (B, T, _), device = h.shape, h.device
        cache.release()
        lengths = cache.lengths
        if lengths.tokens is None:
            lengths.tokens = torch.zeros(B, dtype=torch.int64, device=device)
        if lengths.tokens.shape[0] != B:
            raise ValueError(f"the cache has {lengths.tokens.shape[0]} rows, the call {B}")
        start, count = lengths.tokens, lengths.count
        if count is None:
            count = torch.full_like(start, T) if mask is None else (mask != 0).sum(1)
        fresh, ring = lengths.columns == 0, cache.layers[0].window_slots
        kinds = sorted({layer.kind for layer in cache.layers} - {SLIDING})
        (own, *main), (_, *compress), *closed = self.positions(start, start + count, T, kinds)
        # fmod leaves -1 as it is.
        slots = own.fmod(ring)
        if ring < T:
            # Of tokens that share a slot the last stays.
            slots = slots.masked_fill(torch.arange(T, device=device) < count[:, None] - ring, -1)
        seen = past = None
        if not fresh and (T == 1 or (B == 1 and T <= ROLLBACK + 1)):
            # A few tokens as steps are, one after another: the same sums, whatever is guessed and taken back.
            seen = (own + 1).flatten()
        elif not fresh:
            before = start[:, None] + torch.arange(1 - self.config.sliding_window, 0, device=device)
            past = torch.where(before >= 0, before % ring, -1)
        return Step(
            ids=ids,
            start=start,
            count=count,
            fresh=fresh,
            slots=slots,
            seen=seen,
            past=past,
            rotations={SLIDING: tuple(main), **dict.fromkeys(kinds, tuple(compress))},
            entries={
                kind: Entries(*windows, total=(lengths.columns + T) // self.positions.rates[kind])
                for kind, windows in zip(kinds, closed, strict=True)
            },
        )


class DeepseekV4ForCausalLM(DeepseekV4PreTrainedModel, CapturedGeneration, GenerationMixin):
    """DeepSeek-V4 with the head that gives logits."""

    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__(config)
        self.model = DeepseekV4Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if getattr(config, "mtp", False):
            self.mtp = nn.ModuleList([DeepseekV4MTPLayer(config) for _ in range(config.num_nextn_predict_layers)])
            self._keys_to_ignore_on_load_unexpected = []
        self.post_init()

    def guess(
        self,
        input_ids: Tensor,
        streams: Tensor,
        cache: DeepseekV4Cache | None = None,
        layer: int = 0,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the token after the next, by a layer of `from_pretrained(..., mtp=True)`.

        Args:
            input_ids: [B, T], the token that follows each position.
            streams: [B, T, S, D], of these positions: the last `hidden_states` of `forward`, or what this gave.
            cache: `DeepseekV4Cache.of_mtp` with the positions before; None for a sequence from its start.
            layer: which of the layers.
            logits_to_keep: of how many last positions to give logits; 0 for all.

        Returns:
            (logits [B, T, V], streams [B, T, S, D]).
        """
        e = self.model.embed_tokens(input_ids)
        cache = DeepseekV4Cache.of_mtp(self.config) if cache is None else cache
        step = self.model.prepare(input_ids, e, None, cache)
        mtp: Any = self.mtp[layer]
        h, streams = mtp.guess(e, streams, step, cache.layers[0])
        cache.lengths.advance(step.count, e.shape[1], None)
        return project(self.lm_head, slice_logits_to_keep(h, logits_to_keep)), streams

    @captured_decode(steps=DeepseekV4StepGraph)
    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Logits of the next token at each position, and the loss where labels are given.

        Args:
            labels: [B, T], token ids, -100 where there is none to predict; shifted inside.
            logits_to_keep: how many last positions, or which ones; 0 for all.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: see `DeepseekV4Model.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = project(self.lm_head, slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
        )

    def generate(self, *args: Any, draft: str | None = None, num_draft_tokens: int = 1, **kwargs: Any) -> Any:
        """transformers' `generate`, with guesses that are checked many at a time where they are asked for.

        Args:
            args, kwargs: as there; with guesses one sequence without padding, greedy or sampled.
            draft: "mtp" for the layer of `from_pretrained(..., mtp=True)`; None for none.
            num_draft_tokens: guesses at a time. `draft_acceptance` then tells how many of them were right.

        Raises:
            ValueError: the model has no such layer, or the call is one that guesses are not made for.
        """
        if draft is None:
            return super().generate(*args, **kwargs)
        check_speculation(draft, num_draft_tokens, self)
        # transformers does not hand its own on to a loop that is not its own.
        streamer = kwargs.pop("streamer", None)
        loop = functools.partial(speculate, num_draft_tokens=num_draft_tokens, streamer=streamer)
        return super().generate(*args, custom_generate=loop, **kwargs)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Called by `generate`; gives it this model's cache where the caller has none.

        Raises:
            ValueError: another implementation is asked for.
        """
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *args, **kwargs
            )
            return
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}: this model has one cache of its "
                "own, whose dtype config.cache_dtype says"
            )
        model_kwargs["cache"] = DeepseekV4Cache(self.config)
