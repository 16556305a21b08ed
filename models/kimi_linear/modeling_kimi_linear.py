"""Kimi Linear, after "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv:2510.26692).

- three layers of Kimi Delta Attention, a delta rule with a decay for each channel, to one of full attention
- full attention without positions, its keys and values kept as one latent of a token (MLA, arXiv:2405.04434)
- after each of them a mixture of experts with a shared one, a dense MLP in the first layer

Letters: B batch, T tokens, S past and new tokens, D model width, H heads, K and V key and value width of a head,
R latent width, W conv width, N tokens of a batch, E experts, A experts of a token, F MLP width.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, KimiLinearConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from xpu_ports.common.generation import CapturedGeneration
from xpu_ports.common.graph import captured_decode
from xpu_ports.common.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.kda import chunk_kda, kda_gate, recurrent_kda
from xpu_ports.common.kernels.mla_decode import mla_decode
from xpu_ports.common.kernels.moe_experts import moe_experts
from xpu_ports.common.kernels.moe_router import moe_router_logits, moe_sigmoid_router
from xpu_ports.common.modules import FusedRMSNormGated, RMSNorm, is_plain, project, project_adapted, weights_read
from xpu_ports.common.sequence import causal_mask, eager_attention, last_inputs, mask_of_tokens
from xpu_ports.models.kimi_linear.configuration_checks import KIMI_LINEAR_CHECKS, published_config
from xpu_ports.models.kimi_linear.parallel import parallel_plan
from xpu_ports.models.kimi_linear.weight_rules import weight_rules
from xpu_ports.quant.loading import PackedLoading

# The published code and transformers leave the latent's norm at this, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention (report, section 3, equation 1; section 4.1 for the projections around it)."""

    def __init__(self, config: KimiLinearConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.H, self.K = config.linear_num_heads, config.linear_head_dim
        self.W = config.linear_conv_kernel_dim
        self.scale = self.K**-0.5
        D, P = config.hidden_size, self.H * self.K
        self.qkv_proj = nn.Linear(D, 3 * P, bias=False)
        wide = torch.float32
        self.conv1d = nn.Conv1d(3 * P, 3 * P, self.W, groups=3 * P, padding=self.W - 1, bias=False, dtype=wide)
        # The first halves of two low-rank projections: of the decay, f, and of the output's gate, g.
        self.fg_a_proj = nn.Linear(D, 2 * self.K, bias=False)
        self.f_b_proj = nn.Linear(self.K, P, bias=False)
        self.g_b_proj = nn.Linear(self.K, P, bias=False)
        self.b_proj = nn.Linear(D, self.H, bias=False)
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.H, 1, dtype=wide))
        self.dt_bias = nn.Parameter(torch.zeros(P, dtype=wide))
        self.o_norm = FusedRMSNormGated(self.K, eps=config.rms_norm_eps, activation="sigmoid")
        self.o_proj = nn.Linear(P, D, bias=False)

    # Its weights are read here, so its own forward, and accelerate's hook on it, does not run.
    @weights_read("conv1d")
    def forward(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        """Mix tokens over time.

        Args:
            x: [B, T, D].
            cache: read and written at this layer's index; None for a sequence from its start.
            mask: [B, T], nonzero where a token counts, or None; one that does not leaves the state as it is.

        Returns:
            [B, T, D].
        """
        qkv, fg, b = project_adapted(x, [self.qkv_proj, self.fg_a_proj, self.b_proj], [])
        f, z = fg.split(self.K, dim=-1)
        f, z = project(self.f_b_proj, f), project(self.g_b_proj, z)
        f, z = (t.unflatten(-1, (self.H, self.K)) for t in (f, z))
        g = kda_gate(f, self.A_log.flatten(), self.dt_bias, None)
        beta = b.to(g.dtype).sigmoid()
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            o = self.step(qkv, g, beta, cache.get_conv_state(self.layer_idx), state, mask)
        else:
            o = self.scan(qkv, g, beta, cache, state, mask)
        return project(self.o_proj, self.o_norm(o, z).flatten(2))

    def step(
        self, qkv: Tensor, g: Tensor, beta: Tensor, conv_state: Tensor, state: Tensor, mask: Tensor | None
    ) -> Tensor:
        """One token, the states moved in place; [B, 1, 3 H K] gives [B, 1, H, K]."""
        qkv = causal_conv1d_update(conv_state, qkv, self.conv1d.weight[:, 0], None, mask)
        return recurrent_kda(state, *self.heads(qkv), g, beta, self.scale, True, mask)

    def scan(
        self, qkv: Tensor, g: Tensor, beta: Tensor, cache: Cache | None, state: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """A sequence or a piece of one; qkv [B, T, 3 H K], g [B, T, H, K], beta [B, T, H], gives [B, T, H, K]."""
        conv_state = None if cache is None else cache.get_conv_state(self.layer_idx)
        if mask is not None:
            # No decay and no input: the state passes by.
            valid = mask.bool()[..., None]
            qkv, beta = torch.where(valid, qkv, 0.0), torch.where(valid, beta, 0.0)
            g = torch.where(valid[..., None], g, 0.0)
        if cache is not None:
            window = last_inputs(qkv, conv_state, mask, self.W)
            conv_state = None if conv_state is None else conv_state.clone()
            cache.update_conv_state(window, self.layer_idx, conv_kernel_size=self.W)
        qkv = causal_conv1d(qkv, self.conv1d.weight[:, 0], None, conv_state)
        o, state = chunk_kda(*self.heads(qkv), g, beta, state, self.scale, True, None)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return o

    def heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """Split [..., 3 H K] into q, k and v, [..., H, K] each."""
        return qkv.unflatten(-1, (3, self.H, self.K)).unbind(-3)


class KimiMLAAttention(nn.Module):
    """Multi-head latent attention without positions (report, section 4.2; MLA: arXiv:2405.04434, section 2.1).

    The cache holds one row of R + K_shared columns for a token: its normalized latent, of which all heads' keys and
    values are linear functions, and the part of the keys that the heads share. Other models rotate that part by the
    position; here it is as projected.
    """

    def __init__(self, config: KimiLinearConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.num_key_value_groups = 1
        self.H, self.R = config.num_attention_heads, config.kv_lora_rank
        self.K_own, self.K_shared, self.V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scaling = (self.K_own + self.K_shared) ** -0.5
        D = config.hidden_size
        self.q_proj = nn.Linear(D, self.H * (self.K_own + self.K_shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(D, self.R + self.K_shared, bias=False)
        self.kv_a_layernorm = RMSNorm(self.R, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.R, self.H * (self.K_own + self.V), bias=False)
        self.o_proj = nn.Linear(self.H * self.V, D, bias=False)

    def forward(
        self, x: Tensor, cache: Cache | None, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over the past.

        Args:
            x: [B, T, D].
            cache: extended by this call's rows.
            mask: what transformers' mask functions made for the attention in use.

        Returns:
            ([B, T, D], attention weights where the attention in use gives them).
        """
        q, kv = project_adapted(x, [self.q_proj, self.kv_a_proj_with_mqa], [])
        q = q.unflatten(-1, (self.H, -1))  # [B, T, H, K_own + K_shared]
        latent, shared = kv.split([self.R, self.K_shared], dim=-1)
        rows = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)[:, None]  # [B, 1, T, R + K_shared]
        if cache is not None:
            # The values are columns of the keys: nothing to keep for them.
            rows, _ = cache.update(rows, rows[..., :0], self.layer_idx)
        absorbs = self.config._attn_implementation == "sdpa" and not self.training and is_plain(self.kv_b_proj)
        if x.shape[1] == 1 and absorbs:
            y = self.absorbed(q[:, 0], rows, None if mask is None else mask[:, 0, 0])
            return project(self.o_proj, y.flatten(1)[:, None]), None
        k, v = self.expanded(rows)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        y, weights = attend(self, q.transpose(1, 2), k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return project(self.o_proj, y.flatten(2)), weights

    def expanded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, S, K_own + K_shared] and values [B, H, S, V] of rows [B, 1, S, R + K_shared]."""
        latent, shared = rows.split([self.R, self.K_shared], dim=-1)
        k, v = project(self.kv_b_proj, latent[:, 0]).unflatten(-1, (self.H, -1)).split([self.K_own, self.V], dim=-1)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return torch.cat([k, shared.expand(-1, self.H, -1, -1)], dim=-1), v

    def absorbed(self, q: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
        """One query a row, q [B, H, K_own + K_shared], on rows as they are; [B, H, V].

        q . (W_k c) = (W_k^T q) . c, and the sum over tokens of p W_v c is W_v times that of p c.
        """
        w_k, w_v = self.kv_b_proj.weight.unflatten(0, (self.H, -1)).split([self.K_own, self.V], dim=1)
        own, shared = q.split([self.K_own, self.K_shared], dim=-1)
        q = torch.cat([(own.transpose(0, 1) @ w_k).transpose(0, 1), shared], dim=-1)  # [B, H, R + K_shared]
        y = mla_decode(q, rows[:, 0], mask, self.R, self.scaling)  # [B, H, R]
        return (y.transpose(0, 1) @ w_v.mT).transpose(0, 1)


class KimiMLP(nn.Module):
    """A gated MLP: the first layer's, and the shared expert of the others."""

    def __init__(self, config: KimiLinearConfig, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, gated_activation(project(self.gate_up_proj, x), None, "silu"))


class KimiRouter(nn.Module):
    """Sigmoid scores of all experts, in fp32, and the choice among them (arXiv:2412.19437, section 2.1.2)."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        E, D = config.num_local_experts, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(E, D, dtype=torch.float32))
        self.register_buffer("e_score_correction_bias", torch.zeros(E, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits [N, E], weights [N, A], indices [N, A]) of x [N, D]."""
        logits = moe_router_logits(x, self.weight)
        return logits, *moe_sigmoid_router(logits, self.e_score_correction_bias, self.top_k, self.scale)


class KimiExperts(nn.Module):
    """The routed experts' weights, one tensor for each of their two layers."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        E, D, F = config.num_local_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * F, D))
        self.down_proj = nn.Parameter(torch.zeros(E, D, F))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor, shared: KimiMLP | None = None) -> Tensor:
        """The experts' sum for x [N, D], with that of a shared one whose weights are read here, where there is one."""
        gate_up, down = (None, None) if shared is None else (shared.gate_up_proj.weight, shared.down_proj.weight)
        return moe_experts(x, self.gate_up_proj, self.down_proj, indices, weights, None, gate_up, down)


class KimiSparseMoeBlock(nn.Module):
    """Routed experts beside a shared one (report, section 4; arXiv:2412.19437, equation 12)."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        self.gate = KimiRouter(config)
        self.experts = KimiExperts(config)
        self.shared_experts = KimiMLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # [N, D]
        _, weights, indices = self.gate(tokens)
        shared = self.shared_experts
        hooks = shared._forward_hooks or shared._forward_pre_hooks
        if not hooks and all(is_plain(layer) for layer in shared.children()):
            return self.experts(tokens, indices, weights, shared).view_as(x)
        return self.experts(tokens, indices, weights).view_as(x) + shared(x)


class KimiLinearDecoderLayer(GradientCheckpointingLayer):
    """Attention of one kind or the other, then experts or an MLP (report, figure 3).

    The residual stream travels as a pair: `h`, and `y`, the last layer's output, not added yet. The norm that comes
    next does the addition, in the same pass over memory.
    """

    def __init__(self, config: KimiLinearConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_linear = config.layer_types[layer_idx] == "linear_attention"
        self.self_attn = (KimiDeltaAttention if self.is_linear else KimiMLAAttention)(config, layer_idx)
        if config.mlp_layer_types[layer_idx] == "sparse":
            self.block_sparse_moe = KimiSparseMoeBlock(config)
        else:
            self.mlp = KimiMLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        h: Tensor,
        y: Tensor | None,
        token_mask: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(h, y) -> (the stream after attention, what the experts or the MLP add to it); all [B, T, D]."""
        if y is None:
            x = self.input_layernorm(h)
        else:
            x, h = self.input_layernorm(y, residual=h)
        if self.is_linear:
            y = self.self_attn(x, cache, token_mask)
        else:
            y, _ = self.self_attn(x, cache, attention_mask, **kwargs)
        mlp = self._modules.get("mlp")
        if mlp is not None:
            gate_up, h = self.post_attention_layernorm.then(mlp.gate_up_proj, y, residual=h)
            return h, project(mlp.down_proj, gated_activation(gate_up, None, "silu"))
        x, h = self.post_attention_layernorm(y, residual=h)
        return h, self.block_sparse_moe(x)


class KimiLinearPreTrainedModel(PackedLoading, PreTrainedModel):
    config: KimiLinearConfig
    _config_checks = KIMI_LINEAR_CHECKS
    _parallel_plan = staticmethod(parallel_plan)
    config_class = KimiLinearConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiLinearDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _is_stateful = True
    _can_record_outputs = {"attentions": KimiMLAAttention, "router_logits": OutputRecorder(KimiRouter, index=0)}
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "conv1d.weight", "gate.weight", "e_score_correction_bias"]

    def __init__(self, config: KimiLinearConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config, *inputs, **kwargs)
        self._weight_rules = weight_rules(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, KimiDeltaAttention):
            init.copy_(module.A_log, torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())
            dt = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp().clamp(min=1e-4)
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        elif isinstance(module, KimiExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, KimiRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, FusedRMSNormGated):
            init.ones_(module.weight)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """transformers' `save_pretrained`, with the keys of the published config.json beside transformers' own."""
        config = self.config
        self.config = published_config(config)
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.config = config


class KimiLinearModel(KimiLinearPreTrainedModel):
    """Embeddings, layers, final norm."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([KimiLinearDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Run the layers over tokens.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, D], one of the two.
            attention_mask: [B, past + T], nonzero where a token counts; padding may stand on the left or on the
                right. A mapping with "full_attention" and "linear_attention" is taken as it is.
            position_ids: not read: the model knows no positions but the order.
            cache: the state of the tokens before; made when `use_cache` and left out.
            use_cache: return the cache; the config's when left out.

        Raises:
            ValueError: none or both of input_ids and inputs_embeds.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if isinstance(attention_mask, dict):
            token_mask, full_mask = attention_mask["linear_attention"], attention_mask["full_attention"]
        else:
            token_mask = mask_of_tokens(attention_mask, h.shape[1])
            full_mask = causal_mask(self.config, h, attention_mask, cache, None)
        want_hidden = kwargs.pop("output_hidden_states", None) or False
        hidden_states = (h,) if want_hidden else None
        y = None
        for layer in self.layers:
            h, y = layer(h, y, token_mask, full_mask, cache=cache, **kwargs)
            if want_hidden:
                hidden_states += (h + y,)
        h, _ = self.norm(y, residual=h)
        if want_hidden:
            hidden_states = (*hidden_states[:-1], h)
        return MoeModelOutputWithPast(
            last_hidden_state=h, cache=cache if use_cache else None, hidden_states=hidden_states
        )


class KimiLinearForCausalLM(KimiLinearPreTrainedModel, CapturedGeneration, GenerationMixin):
    """Kimi Linear with the head that gives logits."""

    _tied_weights_keys: dict[str, str] = {}

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__(config)
        self.model = KimiLinearModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @captured_decode
    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
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
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: see `KimiLinearModel.forward`.
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
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
