"""FLUX.2's transformer, after Black Forest Labs' published code (github.com/black-forest-labs/flux2).

- text and picture are streams of their own in the double blocks, joined in attention (MMDiT, arXiv:2403.03206)
- single blocks on the joined stream, attention and MLP in parallel (ViT-22B, arXiv:2302.05442)
- scale, shift and gate from the time of the step (adaLN-Zero, arXiv:2212.09748), shared by all blocks of a kind
- queries and keys normalized by head, then rotated by four axes of positions: picture, row, column, text token
- no biases, LayerNorms without weights

Letters: B batch, L text tokens, S picture tokens, T = L + S, H heads, K head width, D = H K.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from xpu_ports.common.graph import captured_step
from xpu_ports.common.kernels.ada_layer_norm import ada_layer_norm
from xpu_ports.common.kernels.concat_swiglu import concat_swiglu
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.gated_residual import gated_residual
from xpu_ports.common.kernels.gated_residual_norm import gated_residual_norm
from xpu_ports.common.kernels.qk_norm_rope import qk_norm_rope
from xpu_ports.models.flux2.diffusers_api import (
    DiffusersFlux2Transformer2DModel,
    Flux2AttnProcessor,
    Flux2KVAttnProcessor,
    Flux2KVCache,
    Flux2KVLayerCache,
    Flux2KVParallelSelfAttnProcessor,
    Flux2ParallelSelfAttnProcessor,
    Flux2Transformer2DModelOutput,
    apply_lora_scale,
    register_to_config,
)
from xpu_ports.models.flux2.loading import StrictFlux2Loading

# Frequencies of the sinusoid of a time are 10000^(-i / half).
MAX_PERIOD = 10000
# What attention here computes, so that pipelines may ask for these.
PROCESSORS = (
    Flux2AttnProcessor,
    Flux2KVAttnProcessor,
    Flux2ParallelSelfAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)


@dataclass(frozen=True)
class _Table:
    """A table of angles and the positions that it is of: their values, and which tensors had them at which version."""

    values: list[Tensor]
    tensors: list[weakref.ref]
    versions: list[int]
    table: Tensor

    def is_of(self, ids: list[Tensor]) -> bool:
        return self.versions == _versions(ids) and all(r() is t for r, t in zip(self.tensors, ids, strict=True))

    def equals(self, ids: list[Tensor]) -> bool:
        return all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
            for a, b in zip(self.values, ids, strict=True)
        )


def _versions(tensors: list[Tensor]) -> list[int]:
    """How often each was written; inference mode does not count it, and pipelines do not write positions there."""
    return [0 if t.is_inference() else t._version for t in tensors]


class Flux2PosEmbed(nn.Module):
    """Angles of the four axes of a position side by side, axis i with axes_dim[i] / 2 frequencies theta^(-2j / dim)."""

    def __init__(self, theta: int, axes_dim: tuple[int, ...]) -> None:
        super().__init__()
        self.theta, self.axes_dim = theta, tuple(axes_dim)
        self._kept: list[_Table] = []

    def forward(self, txt_ids: Tensor, img_ids: Tensor) -> Tensor:
        """The table that `qk_norm_rope` takes, for positions [L, 4] and [S, 4], or the first of [B, L, 4], [B, S, 4].

        Returns:
            [T, K] fp32: cosines beside sines, text first. Kept for equal positions. The same tensors, which pipelines
            pass from step to step, are known without a look at them; others are compared, which waits for the device.
        """
        if torch.compiler.is_compiling():
            return self._table(txt_ids, img_ids)
        ids = [txt_ids, img_ids]
        for kept in self._kept:
            if kept.is_of(ids):
                return kept.table
        table = next((kept.table for kept in self._kept if kept.equals(ids)), None)
        if table is None:
            table = self._table(txt_ids, img_ids)
        # Two for guidance; the others for a pipeline that alternates between two prompts.
        new = _Table([t.clone() for t in ids], [weakref.ref(t) for t in ids], _versions(ids), table)
        self._kept = [new, *self._kept[:3]]
        return table

    def _table(self, txt_ids: Tensor, img_ids: Tensor) -> Tensor:
        # On the CPU, since not every device has fp64.
        ids = torch.cat([t[0] if t.dim() == 3 else t for t in (txt_ids, img_ids)]).cpu().double()
        angles = [
            ids[:, i, None] * self.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            for i, dim in enumerate(self.axes_dim)
        ]
        turned = torch.cat(angles, dim=-1)
        return torch.cat([turned.cos(), turned.sin()], dim=-1).float().to(img_ids.device)


class TimestepEmbedding(nn.Module):
    """The sinusoid of a number, [B], through an MLP of two layers."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.channels = channels
        self.linear_1 = nn.Linear(channels, dim, bias=False)
        self.linear_2 = nn.Linear(dim, dim, bias=False)

    def forward(self, t: Tensor) -> Tensor:
        half = self.channels // 2
        frequencies = torch.exp(-math.log(MAX_PERIOD) / half * torch.arange(half, dtype=torch.float32, device=t.device))
        angles = t[:, None].float() * frequencies
        sinusoid = torch.cat([angles.cos(), angles.sin()], dim=-1).to(t.dtype)
        return self.linear_2(F.silu(self.linear_1(sinusoid)))


class Flux2TimestepGuidanceEmbeddings(nn.Module):
    """The time of the step and, in models that were distilled from guidance, its scale: [B, D]."""

    def __init__(self, channels: int, dim: int, guidance_embeds: bool) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(channels, dim)
        self.guidance_embedder = TimestepEmbedding(channels, dim) if guidance_embeds else None

    def forward(self, timestep: Tensor, guidance: Tensor | None) -> Tensor:
        embedded = self.timestep_embedder(timestep)
        if guidance is not None and self.guidance_embedder is not None:
            embedded = embedded + self.guidance_embedder(guidance)
        return embedded


class Flux2Modulation(nn.Module):
    """(shift, scale, gate) of each of `sets` layers, side by side: [B, 1, 3 sets D]."""

    def __init__(self, dim: int, sets: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, 3 * sets * dim, bias=False)

    def forward(self, temb: Tensor) -> Tensor:
        return self.linear(F.silu(temb))[:, None]


@dataclass(frozen=True)
class Context:
    """What all attention layers of a forward have in common."""

    # [T, K] fp32, cosines beside sines.
    cos_sin: Tensor
    # L.
    text: int
    # Whether normalized queries and keys are rounded before they are rotated.
    round_norm: bool
    # Broadcast to [B, H, T, T]; True or 0 where a query may see a key.
    mask: Tensor | None = None
    # "extract": the first `references` picture tokens see themselves alone, and their keys and values are kept.
    # "cached": these keys and values stand between those of text and picture.
    mode: str | None = None
    references: int = 0


def attention(q: Tensor, k: Tensor, v: Tensor, context: Context, kept: Flux2KVLayerCache | None) -> Tensor:
    """Full attention of [B, T, H, K], as [B, T, H K]; `kept` are this layer's keys and values of reference pictures."""
    if kept is None:
        return _attend(q, k, v, context.mask)
    L, end = context.text, context.text + context.references
    if context.mode == "cached":
        k, v = (torch.cat([t[:, :L], ref, t[:, L:]], dim=1) for t, ref in zip((k, v), kept.get(), strict=True))
        return _attend(q, k, v)
    # Copies: what they are slices of is much larger.
    kept.store(k[:, L:end].clone(), v[:, L:end].clone())
    others = _attend(torch.cat([q[:, :L], q[:, end:]], dim=1), k, v)
    references = _attend(*(t[:, L:end] for t in (q, k, v)))
    return torch.cat([others[:, :L], references, others[:, L:]], dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class _NormedAttention(nn.Module):
    """What both kinds of attention share."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm_q = nn.RMSNorm(head_dim, eps=eps)
        self.norm_k = nn.RMSNorm(head_dim, eps=eps)

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weights: list[Tensor], k_weights: list[Tensor], context: Context
    ) -> tuple[Tensor, Tensor]:
        """Normalized and rotated, in place where no gradient is needed."""
        if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, *q_weights, *k_weights)):
            q, k = q.clone(), k.clone()
        qk_norm_rope(
            q,
            k,
            q_weights,
            k_weights,
            context.cos_sin,
            split=context.text,
            eps=self.norm_q.eps,
            round_norm=context.round_norm,
        )
        return q, k

    def set_processor(self, processor: Any) -> None:
        """Take a processor of diffusers for FLUX.2, all of which are what runs here anyway.

        Raises:
            ValueError: another one, which would not run.
        """
        if not isinstance(processor, PROCESSORS):
            raise ValueError(f"attention is fused and does not run {type(processor).__name__}")


class Flux2Attention(_NormedAttention):
    """Joint attention of a double block: each stream has its own projections and norms."""

    def __init__(self, dim: int, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(heads, head_dim, eps)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        # Not a Sequential: the published keys have an index.
        self.to_out = nn.ModuleList([nn.Linear(dim, dim, bias=False)])
        self.norm_added_q = nn.RMSNorm(head_dim, eps=eps)
        self.norm_added_k = nn.RMSNorm(head_dim, eps=eps)
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.to_add_out = nn.Linear(dim, dim, bias=False)

    # Their weights are read here, so their own forward, and accelerate's hook on it, does not run.
    @force_accelerate_hooks(["norm_q", "norm_k", "norm_added_q", "norm_added_k"])
    def forward(
        self, x: Tensor, text: Tensor, context: Context, kept: Flux2KVLayerCache | None
    ) -> tuple[Tensor, Tensor]:
        """(picture, text) of x [B, S, D] and text [B, L, D]."""
        projections = (self.add_q_proj, self.to_q), (self.add_k_proj, self.to_k), (self.add_v_proj, self.to_v)
        q, k, v = (_joined(layers, (text, x)).unflatten(-1, (-1, self.head_dim)) for layers in projections)
        q_weights: list[Tensor] = [self.norm_added_q.weight, self.norm_q.weight]
        k_weights: list[Tensor] = [self.norm_added_k.weight, self.norm_k.weight]
        q, k = self.norm_rope(q, k, q_weights, k_weights, context)
        text, x = attention(q, k, v, context, kept).split([text.shape[1], x.shape[1]], dim=1)
        return self.to_out[0](x), self.to_add_out(text)


def _joined(layers: tuple[nn.Linear, nn.Linear], streams: tuple[Tensor, Tensor]) -> Tensor:
    """Each layer on its stream, [1 or B, L, D] and [1 or B, S, D], one after the other: [1 or B, T, N]."""
    if streams[0].shape[0] > 1 or torch.is_grad_enabled() or not all(map(_is_plain, layers, streams)):
        return torch.cat([layer(x) for layer, x in zip(layers, streams, strict=True)], dim=1)
    # Products have their place at once.
    weights = [layer.weight for layer in layers]
    L = streams[0].shape[1]
    y = streams[0].new_empty(1, L + streams[1].shape[1], weights[0].shape[0])
    for x, weight, part in zip(streams, weights, (y[0, :L], y[0, L:]), strict=True):
        torch.mm(x[0], weight.t(), out=part)
    return y


def _is_plain(layer: nn.Module, x: Tensor) -> bool:
    """Whether a layer without bias does nothing but the product: no adapter, no packed weight, no hook."""
    if torch.compiler.is_compiling() or type(layer) is not nn.Linear or layer.weight.dtype != x.dtype:
        return False
    # accelerate and diffusers put their hooks in place of a module's forward.
    return "forward" not in layer.__dict__ and not layer._forward_hooks and not layer._forward_pre_hooks


class Flux2FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202), gate and up in one projection."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(dim, 2 * inner, bias=False)
        self.linear_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(gated_activation(self.linear_in(x), None, "silu"))


class Flux2TransformerBlock(nn.Module):
    """Double block: two streams, one attention."""

    def __init__(self, dim: int, heads: int, head_dim: int, inner: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.attn = Flux2Attention(dim, heads, head_dim, eps)
        self.ff = Flux2FeedForward(dim, inner)
        self.ff_context = Flux2FeedForward(dim, inner)

    def forward(
        self,
        x: Tensor,
        text: Tensor,
        x_modulation: Tensor,
        text_modulation: Tensor,
        context: Context,
        kept: Flux2KVLayerCache | None,
    ) -> tuple[Tensor, Tensor]:
        """(picture [B, S, D], text [B, L, D]); modulations are [B, 1 or tokens, 6 D]."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = x_modulation.chunk(6, dim=-1)
        t_shift, t_scale, t_gate, t_mlp_shift, t_mlp_scale, t_mlp_gate = text_modulation.chunk(6, dim=-1)
        y, t = self.attn(
            ada_layer_norm(x, scale, shift, self.eps), ada_layer_norm(text, t_scale, t_shift, self.eps), context, kept
        )
        x, y = gated_residual_norm(x, y, gate, mlp_scale, mlp_shift, self.eps)
        text, t = gated_residual_norm(text, t, t_gate, t_mlp_scale, t_mlp_shift, self.eps)
        x = gated_residual(x, self.ff(y), mlp_gate)
        return x, gated_residual(text, self.ff_context(t), t_mlp_gate, _largest(text))


class Flux2ParallelSelfAttention(_NormedAttention):
    """Attention and MLP of a single block, with one projection in, [q | k | v | gate | up], and one out."""

    def __init__(self, dim: int, heads: int, head_dim: int, inner: int, eps: float) -> None:
        super().__init__(heads, head_dim, eps)
        self.sizes = [dim, dim, dim, 2 * inner]
        self.to_qkv_mlp_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.to_out = nn.Linear(dim + inner, dim, bias=False)
        # Where diffusers' tensor parallelism finds what stands side by side in these two.
        into: Any = self.to_qkv_mlp_proj
        out: Any = self.to_out
        into._tp_packed_col_blocks, out._tp_packed_row_blocks = [dim, dim, dim, inner, inner], [dim, inner]

    @force_accelerate_hooks(["norm_q", "norm_k"])
    def forward(self, x: Tensor, context: Context, kept: Flux2KVLayerCache | None) -> Tensor:
        """[B, T, D], text first."""
        y = self.to_qkv_mlp_proj(x)
        # Of several ranks each has as large a part of all.
        *qkv, gate_up = y.split([size * y.shape[-1] // sum(self.sizes) for size in self.sizes], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in qkv)
        q, k = self.norm_rope(q, k, [self.norm_q.weight], [self.norm_k.weight], context)
        return self.to_out(concat_swiglu(attention(q, k, v, context, kept), gate_up))


class NormedStream(NamedTuple):
    """A stream [B, T, D] and its norm, with which the next block begins; None where that is for the block to make."""

    x: Tensor
    norm: Tensor | None = None


class Flux2SingleTransformerBlock(nn.Module):
    """Single block: attention beside the MLP, on both streams as one.

    Its sum is normalized for the next block in one go: all have the same modulation.
    """

    def __init__(self, dim: int, heads: int, head_dim: int, inner: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.attn = Flux2ParallelSelfAttention(dim, heads, head_dim, inner, eps)

    def forward(
        self, stream: NormedStream, modulation: Tensor, context: Context, kept: Flux2KVLayerCache | None
    ) -> NormedStream:
        """The modulation is [B, 1 or T, 3 D]."""
        shift, scale, gate = modulation.chunk(3, dim=-1)
        x, norm = stream
        if norm is None:
            norm = ada_layer_norm(x, scale, shift, self.eps)
        y = self.attn(norm, context, kept)
        return NormedStream(*gated_residual_norm(x, y, gate, scale, shift, self.eps, _largest(x)))


def _largest(x: Tensor) -> float | None:
    """Where fp16 sums end: some layers' outputs leave its range."""
    return torch.finfo(torch.float16).max if x.dtype == torch.float16 else None


class AdaLayerNormContinuous(nn.Module):
    """The last norm; its scale comes before its shift."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.linear = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(temb))[:, None].chunk(2, dim=-1)
        return ada_layer_norm(x, scale, shift, self.eps)


class Flux2Transformer2DModel(StrictFlux2Loading, DiffusersFlux2Transformer2DModel):
    """FLUX.2 [dev] and [klein] with diffusers' config, keys and call.

    A subclass of diffusers' class, so that pipelines, LoRA and whoever asks take it for one; of that it runs nothing.
    `round_norm` says whether normalized queries and keys are rounded to the model's dtype before they are rotated, as
    diffusers does; without it they stay in fp32.
    """

    # Attention here does not exchange keys with other devices, as diffusers' processors do under its plan for that.
    _cp_plan = None
    round_norm = True

    @register_to_config
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 128,
        out_channels: int | None = None,
        num_layers: int = 8,
        num_single_layers: int = 48,
        attention_head_dim: int = 128,
        num_attention_heads: int = 48,
        joint_attention_dim: int = 15360,
        timestep_guidance_channels: int = 256,
        mlp_ratio: float = 3.0,
        axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32),
        rope_theta: int = 2000,
        eps: float = 1e-6,
        guidance_embeds: bool = True,
    ) -> None:
        # Not diffusers' own, which builds its modules.
        super(DiffusersFlux2Transformer2DModel, self).__init__()
        if sum(axes_dims_rope) != attention_head_dim or any(dim % 2 for dim in axes_dims_rope):
            raise ValueError(
                f"axes_dims_rope is {axes_dims_rope}, not even numbers that sum up to {attention_head_dim}"
            )
        dim = num_attention_heads * attention_head_dim
        block = dim, num_attention_heads, attention_head_dim, int(dim * mlp_ratio), eps
        self.out_channels = out_channels or in_channels
        self.inner_dim = dim
        self.pos_embed = Flux2PosEmbed(rope_theta, axes_dims_rope)
        self.time_guidance_embed = Flux2TimestepGuidanceEmbeddings(timestep_guidance_channels, dim, guidance_embeds)
        self.double_stream_modulation_img = Flux2Modulation(dim, 2)
        self.double_stream_modulation_txt = Flux2Modulation(dim, 2)
        self.single_stream_modulation = Flux2Modulation(dim, 1)
        self.x_embedder = nn.Linear(in_channels, dim, bias=False)
        self.context_embedder = nn.Linear(joint_attention_dim, dim, bias=False)
        self.transformer_blocks = nn.ModuleList(Flux2TransformerBlock(*block) for _ in range(num_layers))
        self.single_transformer_blocks = nn.ModuleList(
            Flux2SingleTransformerBlock(*block) for _ in range(num_single_layers)
        )
        self.norm_out = AdaLayerNormContinuous(dim, eps)
        self.proj_out = nn.Linear(dim, patch_size * patch_size * self.out_channels, bias=False)
        self.gradient_checkpointing = False

    @apply_lora_scale("joint_attention_kwargs")
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        kv_cache: Flux2KVCache | None = None,
        kv_cache_mode: str | None = None,
        num_ref_tokens: int = 0,
        ref_fixed_timestep: float = 0.0,
    ) -> Flux2Transformer2DModelOutput | tuple:
        """One step's prediction.

        Args:
            hidden_states: [B, S, in_channels], the packed latents, reference pictures among them.
            encoder_hidden_states: [B, L, joint_attention_dim], the text.
            timestep: [B], the time from 0 to 1.
            img_ids, txt_ids: [S, 4] and [L, 4] positions, or [B, ...] of which the first counts.
            guidance: [B], the scale that a distilled model is asked to follow; ignored by one without.
            joint_attention_kwargs: "scale" of the LoRA, and "attention_mask", [B, T] or broadcast to [B, H, T, T],
                True (or 0) where a query may see a key.
            return_dict: an output object instead of a tuple.
            kv_cache: what the step with "extract" returned.
            kv_cache_mode: "extract" for the step that keeps the reference pictures' keys and values, "cached" for those
                that use them, None to have no part in this.
            num_ref_tokens: how many of hidden_states' first tokens are reference pictures, with "extract".
            ref_fixed_timestep: the time that these are modulated by.

        Returns:
            [B, S, out_channels], without the reference pictures in "extract", and there the cache.

        Raises:
            ValueError: arguments that do not go together, or that nothing would come of.
        """
        references = num_ref_tokens if kv_cache_mode == "extract" else 0
        kept = self._kept(kv_cache, kv_cache_mode, references)
        L, tokens = encoder_hidden_states.shape[1], encoder_hidden_states.shape[1] + hidden_states.shape[1]
        mask = _mask(joint_attention_kwargs, kept, (hidden_states.shape[0], tokens))
        given = hidden_states, encoder_hidden_states, timestep, guidance
        cos_sin = self.pos_embed(txt_ids, img_ids)
        if kept is None:
            sample = self._step(*given, cos_sin, mask, self.round_norm)
        else:
            context = Context(cos_sin, L, self.round_norm, mask, kv_cache_mode, references)
            sample = self._predict(*given, context, kept, ref_fixed_timestep)
        return _output(sample, kept, kv_cache_mode, return_dict)

    @captured_step
    def _step(
        self,
        x: Tensor,
        text: Tensor,
        timestep: Tensor,
        guidance: Tensor | None,
        cos_sin: Tensor,
        mask: Tensor | None,
        round_norm: bool,
    ) -> Tensor:
        """`_predict` without kept reference pictures: a function of tensors alone."""
        return self._predict(x, text, timestep, guidance, Context(cos_sin, text.shape[1], round_norm, mask))

    def _predict(
        self,
        x: Tensor,
        text: Tensor,
        timestep: Tensor,
        guidance: Tensor | None,
        context: Context,
        kept: Flux2KVCache | None = None,
        fixed_timestep: float = 0.0,
    ) -> Tensor:
        """[B, S, out_channels], without the reference pictures that are extracted, of `forward`'s arguments."""
        L, S, references = context.text, x.shape[1], context.references
        timestep = timestep.to(x.dtype) * 1000
        guidance = None if guidance is None else guidance.to(x.dtype) * 1000
        temb = self.time_guidance_embed(timestep, guidance)
        x_modulation, single_modulation = self._modulations(temb)
        if references:
            fixed = self.time_guidance_embed(torch.full_like(timestep, fixed_timestep * 1000), guidance)
            ours, theirs = (x_modulation, single_modulation), self._modulations(fixed)
            x_modulation = _at(ours[0], theirs[0], 0, references, S)
            single_modulation = _at(ours[1], theirs[1], L, references, L + S)
        text_modulation = self.double_stream_modulation_txt(temb)

        x, text = self.x_embedder(x), self.context_embedder(text)
        for i, block in enumerate(self.transformer_blocks):
            layer = None if kept is None else kept.get_double(i)
            x, text = self._run(block, x, text, x_modulation, text_modulation, context, layer)
        stream = NormedStream(torch.cat([text, x], dim=1))
        for i, block in enumerate(self.single_transformer_blocks):
            layer = None if kept is None else kept.get_single(i)
            stream = self._run(block, stream, single_modulation, context, layer)
        return self.proj_out(self.norm_out(stream.x[:, L + references :], temb))

    def _modulations(self, temb: Tensor) -> tuple[Tensor, Tensor]:
        return self.double_stream_modulation_img(temb), self.single_stream_modulation(temb)

    def _run(self, block: nn.Module, *args: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block, *args)  # type: ignore[attr-defined]
        return block(*args)

    def _kept(self, cache: Flux2KVCache | None, mode: str | None, references: int) -> Flux2KVCache | None:
        """The cache that this forward fills or reads, if any."""
        if mode not in (None, "extract", "cached"):
            raise ValueError(f"kv_cache_mode is {mode!r}, not 'extract', 'cached' or None")
        if mode == "cached":
            if cache is None:
                raise ValueError("kv_cache_mode is 'cached', and there is no kv_cache")
            return cache
        if cache is not None:
            raise ValueError(f"a kv_cache that kv_cache_mode={mode!r} does not read")
        if not references:
            return None
        cache = Flux2KVCache(len(self.transformer_blocks), len(self.single_transformer_blocks))
        cache.num_ref_tokens = references
        return cache

    def set_attention_backend(self, backend: str) -> None:
        """Attention runs through PyTorch's scaled_dot_product_attention, which chooses among its own.

        Raises:
            ValueError: another one than "native" is asked for.
        """
        if backend.lower() != "native":
            raise ValueError(f"attention back end {backend!r}: only 'native' runs here")


# Saved pipelines name the class that diffusers loads in its place; diffusers goes by the module's name.
Flux2Transformer2DModel.__module__ = "diffusers"


def _mask(kwargs: dict[str, Any] | None, kept: Flux2KVCache | None, keys: tuple[int, int]) -> Tensor | None:
    """The mask among the keyword arguments of attention, [B, T] spread; what else there is would have no effect."""
    rest = dict(kwargs or {})
    mask = rest.pop("attention_mask", None)
    if rest:
        raise ValueError(f"joint_attention_kwargs: nothing here takes {', '.join(rest)}")
    if mask is not None and kept is not None:
        raise ValueError("attention_mask together with kept reference pictures is not supported")
    return mask[:, None, None] if mask is not None and mask.shape == keys else mask


def _at(ours: Tensor, theirs: Tensor, start: int, count: int, tokens: int) -> Tensor:
    """Modulations [B, tokens, ...]: `theirs` for `count` tokens from `start` on, `ours` for the others."""
    before, after = ours.expand(-1, start, -1), ours.expand(-1, tokens - start - count, -1)
    return torch.cat([before, theirs.expand(-1, count, -1), after], dim=1)


def _output(sample: Tensor, cache: Flux2KVCache | None, mode: str | None, return_dict: bool) -> Any:
    if mode == "extract":
        return Flux2Transformer2DModelOutput(sample=sample, kv_cache=cache) if return_dict else (sample, cache)
    return Flux2Transformer2DModelOutput(sample=sample) if return_dict else (sample,)
