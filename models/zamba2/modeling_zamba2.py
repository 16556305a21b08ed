"""Zamba2, after "The Zamba2 Suite: Technical Report" (arXiv:2411.15242).

- a backbone of Mamba-2 layers (arXiv:2405.21060), section 2
- one or two attention blocks whose weights are shared by all the places where they run (figure 2)
- the shared block reads the residual stream beside the raw embeddings, 2 D wide, and feeds the next Mamba-2 layer's
  input, not the residual stream
- low-rank adapters of their own for each place: in the MLP always, in the attention of the 1.2B
- attention without positions (2.7B) or with rotary ones (1.2B, 7B), scaled by (head_dim / 2)^-0.5

Letters: B batch, T tokens, D model width, H heads, P head width, G groups, N state, W conv width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, Zamba2Config
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from xpu_ports.common.generation import CapturedGeneration
from xpu_ports.common.graph import captured_decode, stepping_layer
from xpu_ports.common.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from xpu_ports.common.kernels.concat_rms_norm import concat_rms_norm
from xpu_ports.common.kernels.decode_attention import decode_attention
from xpu_ports.common.kernels.gated_mlp import gated_activation
from xpu_ports.common.kernels.mamba2_decode_linear import mamba2_decode_linear
from xpu_ports.common.kernels.mamba2_decode_step import mamba2_decode_step
from xpu_ports.common.kernels.rotary_embedding import rotary_angles, rotary_embedding
from xpu_ports.common.kernels.selective_state_update import selective_state_update
from xpu_ports.common.kernels.skinny_linear import norm_glu
from xpu_ports.common.kernels.ssd_chunk_scan import ssd_chunk_scan
from xpu_ports.common.modules import (
    Mixer2RMSNormGated,
    RMSNorm,
    is_plain,
    project,
    project_adapted,
    record_apart,
    weights_read,
)
from xpu_ports.common.placement import place_shared_weights
from xpu_ports.common.sequence import causal_mask, eager_attention, last_inputs, mask_of_tokens
from xpu_ports.models.zamba2.configuration_checks import ZAMBA2_CHECKS
from xpu_ports.models.zamba2.parallel import parallel_plan
from xpu_ports.quant.loading import PackedLoading

# The published code fixes it, whatever rms_norm_eps says; every published config has the same value there.
GATED_NORM_EPS = 1e-5
# hidden_act in configs -> gated_activation's name.
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


class Zamba2RotaryEmbedding(nn.Module):
    """cos and sin of each position's angles, half-split layout, in fp32."""

    def __init__(self, config: Zamba2Config) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        compute = self.compute_default_rope_parameters
        if self.rope_type != "default":
            compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = compute(config)
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: Zamba2Config, **kwargs: Any) -> tuple[Tensor, float]:
        """Frequencies theta^(-2i / head_dim), [head_dim / 2], and the factor on cos and sin, 1."""
        dim = config.attention_head_dim
        return config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, T, head_dim / 2] each, for position_ids [B, T]."""
        return rotary_angles(position_ids.to(x.device), self.inv_freq.float().to(x.device), self.attention_scaling)


class Zamba2MambaMixer(nn.Module):
    """The Mamba-2 layer (arXiv:2405.21060, figure 6 right): in_proj, convolution, scan, gated norm, out_proj."""

    def __init__(self, config: Zamba2Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.H, self.P = config.n_mamba_heads, config.mamba_headdim
        self.G, self.N = config.mamba_ngroups, config.mamba_d_state
        self.W = config.mamba_d_conv
        self.d_inner = int(config.mamba_expand * config.hidden_size)
        self.d_conv = self.d_inner + 2 * self.G * self.N
        self.chunk_size = config.chunk_size
        # transformers clamps dt in prefill (not in decode); training did not, and neither does this, unless asked to.
        self.dt_min = config.time_step_min if getattr(config, "clamp_prefill_dt", False) else 0.0

        self.in_proj = nn.Linear(config.hidden_size, self.d_inner + self.d_conv + self.H, bias=config.add_bias_linear)
        self.conv1d = nn.Conv1d(self.d_conv, self.d_conv, self.W, groups=self.d_conv, padding=self.W - 1)
        self.dt_bias = nn.Parameter(torch.ones(self.H))
        self.A_log = nn.Parameter(torch.log(torch.arange(1, self.H + 1, dtype=torch.float)))
        self.D = nn.Parameter(torch.ones(self.H))
        self.norm = Mixer2RMSNormGated(self.d_inner, self.G, eps=GATED_NORM_EPS)
        self.out_proj = nn.Linear(self.d_inner, config.hidden_size, bias=config.add_bias_linear)

    # The weights of these two are read here, so their own forward, and accelerate's hook on it, does not run.
    @weights_read("conv1d", "norm")
    def forward(self, zxBCdt: Tensor, cache: Cache | None, mask: Tensor | None) -> Tensor:
        """Mix tokens over time.

        Args:
            zxBCdt: [B, T, d_inner + d_conv + H], what in_proj gives.
            cache: read and written at this layer's index; None for a sequence from its start.
            mask: [B, T], nonzero where a token counts, or None; one that does not leaves the state as it is.

        Returns:
            [B, T, D].
        """
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        one = state is not None and zxBCdt.shape[1] == 1
        if one and self.norm.ranks_of_group is None:
            return self.step(zxBCdt, cache.get_conv_state(self.layer_idx), state, mask)
        z, xBC, dt = zxBCdt.split([self.d_inner, self.d_conv, self.H], dim=-1)
        y = self.move(xBC, dt, cache, state, mask) if one else self.scan(xBC, dt, cache, state, mask)
        return project(self.out_proj, self.norm(y, z))

    def step(self, zxBCdt: Tensor, conv_state: Tensor, state: Tensor, mask: Tensor | None) -> Tensor:
        """One token, the states moved in place; [B, 1, .] gives [B, 1, D]."""
        # From the modules' own dicts: nn.Module looks attributes up in Python, here so many that a step would feel it.
        own, children = self._parameters, self._modules
        conv = children["conv1d"]._parameters
        out_proj: Any = children["out_proj"]
        inputs = (
            zxBCdt.squeeze(1),
            conv_state,
            state,
            conv["weight"].squeeze(1),
            conv["bias"],
            own["A_log"],
            own["D"],
            own["dt_bias"],
            children["norm"]._parameters["weight"],
            None if mask is None else mask[:, 0],
        )
        if is_plain(out_proj):
            out = out_proj._parameters
            return mamba2_decode_linear(*inputs, out["weight"], out["bias"], self.G, GATED_NORM_EPS).unsqueeze(1)
        record_apart("mamba2_decode_linear", zxBCdt, out_proj)
        return out_proj(mamba2_decode_step(*inputs, self.G, GATED_NORM_EPS)[:, None])

    def move(self, xBC: Tensor, dt: Tensor, cache: Cache, state: Tensor, mask: Tensor | None) -> Tensor:
        """One token as far as the norm, whose group other ranks have parts of; shapes as for `scan`."""
        conv_state = cache.get_conv_state(self.layer_idx)
        xBC = causal_conv1d_update(conv_state, xBC, self.conv1d.weight[:, 0], self.conv1d.bias, mask)
        x, B, C = self.heads(xBC[:, 0])
        mask = None if mask is None else mask[:, 0]
        y = selective_state_update(state, x, dt[:, 0], self.A_log, B, C, self.D, self.dt_bias, mask)
        return y.flatten(1)[:, None]

    def scan(self, xBC: Tensor, dt: Tensor, cache: Cache | None, state: Tensor | None, mask: Tensor | None) -> Tensor:
        """A sequence or a piece of one; xBC [B, T, d_conv], dt [B, T, H], gives [B, T, d_inner]."""
        conv_state = None if cache is None else cache.get_conv_state(self.layer_idx)
        if mask is not None:
            # dt = softplus(-inf) = 0: no decay, no input.
            valid = mask.bool()[..., None]
            xBC = torch.where(valid, xBC, 0.0)
            dt = dt.masked_fill(~valid, float("-inf"))
        if cache is not None:
            window = last_inputs(xBC, conv_state, mask, self.W)
            conv_state = None if conv_state is None else conv_state.clone()
            cache.update_conv_state(window, self.layer_idx, conv_kernel_size=self.W)
        xBC = causal_conv1d(xBC, self.conv1d.weight[:, 0], self.conv1d.bias, conv_state)
        x, B, C = self.heads(xBC)
        y, state = ssd_chunk_scan(x, dt, self.A_log, B, C, self.D, self.dt_bias, state, self.chunk_size, self.dt_min)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return y.flatten(2)

    def heads(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [..., d_conv] into x [..., H, P], B and C [..., G, N]."""
        x, B, C = xBC.split([self.d_inner, self.G * self.N, self.G * self.N], dim=-1)
        return x.unflatten(-1, (self.H, self.P)), B.unflatten(-1, (self.G, self.N)), C.unflatten(-1, (self.G, self.N))


class Adapters(nn.ModuleList):
    """Low-rank additions to a shared projection, one for each place where its block runs (report, section 2.3).

    Places are numbered over all blocks; those of other blocks hold an identity, so that names match checkpoints.
    """

    def __init__(self, config: Zamba2Config, block_id: int, d_in: int, d_out: int) -> None:
        def adapter() -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(d_in, config.adapter_rank, bias=False), nn.Linear(config.adapter_rank, d_out, bias=False)
            )

        places = range(len(config.hybrid_layer_ids))
        super().__init__([adapter() if i % config.num_mem_blocks == block_id else nn.Identity() for i in places])

    def at(self, place: int) -> nn.Module:
        """The one of a place, without what a list does for slices and negative places."""
        return self._modules[str(place)]


class Zamba2Attention(nn.Module):
    """Attention of the shared block (report, section 2.1): 2 D wide inside, D out."""

    def __init__(self, config: Zamba2Config, block_id: int) -> None:
        super().__init__()
        self.config = config
        self.is_causal = True
        self.head_dim = config.attention_head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        # The input is two streams side by side, so scores grow as for a head half as wide.
        self.scaling = (self.head_dim / 2) ** -0.5
        width = config.attention_hidden_size
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.adapted = config.use_shared_attention_adapter
        if self.adapted:
            self.linear_q_adapter_list = Adapters(config, block_id, width, width)
            self.linear_k_adapter_list = Adapters(config, block_id, width, kv_width)
            self.linear_v_adapter_list = Adapters(config, block_id, width, kv_width)

    def forward(
        self,
        x: Tensor,
        place: int,
        layer_idx: int,
        mask: Tensor | None,
        cache: Cache | None,
        positions: tuple[Tensor, Tensor] | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend over the past.

        Args:
            x: [B, T, 2 D].
            place: which of the shared blocks' places this is: chooses the adapters.
            layer_idx: the layer: chooses the cache, which places do not share.
            mask: what transformers' mask functions made for the attention in use.
            cache: extended by this call's keys and values.
            positions: cos and sin, [B, T, head_dim / 2] each, or None for no positions.

        Returns:
            ([B, T, D], attention weights where the attention in use gives them).
        """
        adapters = []
        if self.adapted:
            lists = self.linear_q_adapter_list, self.linear_k_adapter_list, self.linear_v_adapter_list
            adapters = [adapter_list.at(place) for adapter_list in lists]
        q, k, v = project_adapted(x, [self.q_proj, self.k_proj, self.v_proj], adapters)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        step = stepping_layer(cache, layer_idx)
        if step is not None and positions is not None:
            q, k, v = step.update_rotated(q, k, v, *positions)
        else:
            if positions is not None:
                q, k = rotary_embedding(q, k, *positions)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, H, T, head_dim]
            if cache is not None:
                k, v = cache.update(k, v, layer_idx)
        if x.shape[1] == 1 and self.config._attn_implementation == "sdpa" and not self.training:
            y = decode_attention(q[:, :, 0], k, v, None if mask is None else mask[:, 0, 0], self.scaling)
            return project(self.o_proj, y.flatten(1)[:, None]), None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        y, weights = attend(self, q, k, v, mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return project(self.o_proj, y.flatten(2)), weights


class Zamba2MLP(nn.Module):
    """The shared block's gated MLP with a low-rank addition for each place."""

    def __init__(self, config: Zamba2Config, block_id: int) -> None:
        super().__init__()
        F = config.intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * F, bias=config.add_bias_linear)
        self.down_proj = nn.Linear(F, config.hidden_size, bias=config.add_bias_linear)
        self.gate_up_proj_adapter_list = Adapters(config, block_id, config.hidden_size, 2 * F)

    def forward(self, x: Tensor, place: int, opening: Callable[[], RMSNorm]) -> Tensor:
        """The layer behind the norm that opens it; all [B, T, D].

        Args:
            opening: gives the norm. A module among the arguments accelerate would move, offloaded weights too.
        """
        norm = opening()
        layer, adapter = self.gate_up_proj, self.gate_up_proj_adapter_list.at(place)
        modules = (norm, layer, *adapter._modules.values())
        plain = all(is_plain(m) for m in modules)
        if plain and layer._parameters["bias"] is None:
            y = norm_glu(x, *[m._parameters["weight"] for m in modules], self.activation, norm.variance_epsilon)
        else:
            if not plain:
                record_apart("norm_glu", x, *modules)
            (gate_up,) = project_adapted(norm(x), [layer], [adapter])
            y = gated_activation(gate_up, None, self.activation)
        return project(self.down_proj, y)


class Zamba2AttentionDecoderLayer(nn.Module):
    """The shared block (report, figure 2): attention, then MLP, without residual additions of its own."""

    def __init__(self, config: Zamba2Config, block_id: int) -> None:
        super().__init__()
        self.self_attn = Zamba2Attention(config, block_id)
        self.feed_forward = Zamba2MLP(config, block_id)
        self.input_layernorm = RMSNorm(config.attention_hidden_size, eps=config.rms_norm_eps)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @weights_read("input_layernorm")
    def forward(
        self, h: Tensor, y: Tensor | None, x0: Tensor, place: int, layer_idx: int, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the block on [h + y | x0].

        Args:
            h, y: [B, T, D], the residual stream and what is still to be added to it, or None.
            x0: [B, T, D], the embeddings.
            place, layer_idx, mask, kwargs: the attention's.

        Returns:
            ([B, T, D], h + y).
        """
        norm = self.input_layernorm
        if y is None:
            x = concat_rms_norm(h, None, x0, norm.weight, norm.variance_epsilon)
        else:
            x, h = concat_rms_norm(y, h, x0, norm.weight, norm.variance_epsilon)
        x, _ = self.self_attn(x, place, layer_idx, mask, **kwargs)
        return self.feed_forward(x, place, lambda: self.pre_ff_layernorm), h


class Zamba2MambaDecoderLayer(GradientCheckpointingLayer):
    """Norm and Mamba-2 layer, the residual addition left to the next norm.

    The residual stream travels as a pair: `h`, and `y`, the last layer's output, not added yet. The norm that comes
    next does the addition, in the same pass over memory.
    """

    def __init__(self, config: Zamba2Config, layer_idx: int) -> None:
        super().__init__()
        self.mamba = Zamba2MambaMixer(config, layer_idx)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        h: Tensor,
        y: Tensor | None,
        x0: Tensor,
        token_mask: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(h, y) -> (h + y, this layer's output); all [B, T, D]."""
        mamba = self.mamba
        if y is None:
            zxBCdt = self.input_layernorm.then(mamba.in_proj, h)
        else:
            zxBCdt, h = self.input_layernorm.then(mamba.in_proj, y, residual=h)
        return h, mamba(zxBCdt, cache, token_mask)


class Zamba2HybridLayer(GradientCheckpointingLayer):
    """The shared block, a projection of its own, and a Mamba-2 layer that gets both (report, equation 2)."""

    def __init__(self, config: Zamba2Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.place = config.hybrid_layer_ids.index(layer_idx)
        block_id = self.place % config.num_mem_blocks
        self.linear = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.mamba_decoder = Zamba2MambaDecoderLayer(config, layer_idx)
        self.shared_transformer = Zamba2AttentionDecoderLayer(config, block_id)

    def forward(
        self,
        h: Tensor,
        y: Tensor | None,
        x0: Tensor,
        token_mask: Tensor | None,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(h, y) -> (h + y, this layer's output); the shared block's output reaches the Mamba-2 layer's input only."""
        t, h = self.shared_transformer(h, y, x0, self.place, self.layer_idx, attention_mask, cache=cache, **kwargs)
        t = project(self.linear, t)
        _, y = self.mamba_decoder(h, t, x0, token_mask, attention_mask, cache=cache)
        return h, y


class Zamba2PreTrainedModel(PackedLoading, PreTrainedModel):
    config: Zamba2Config
    _config_checks = ZAMBA2_CHECKS
    _parallel_plan = staticmethod(parallel_plan)
    config_class = Zamba2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Zamba2HybridLayer", "Zamba2MambaDecoderLayer"]
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_sdpa = True
    _is_stateful = True
    _can_record_outputs = {"attentions": Zamba2Attention}

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As the base class does, with shared blocks on each device that a layer of theirs is on."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        place_shared_weights(model)
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Zamba2MambaMixer):
            low, high = math.log(self.config.time_step_min), math.log(self.config.time_step_max)
            dt = torch.exp(low + torch.rand(module.H) * (high - low)).clamp(min=self.config.time_step_floor)
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            init.copy_(module.A_log, torch.log(torch.arange(1, module.H + 1)))
            init.ones_(module.D)


class Zamba2Model(Zamba2PreTrainedModel):
    """Embeddings, layers, final norm."""

    def __init__(self, config: Zamba2Config) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        kinds = {"linear_attention": Zamba2MambaDecoderLayer, "hybrid": Zamba2HybridLayer}
        self.layers = nn.ModuleList([kinds[kind](config, i) for i, kind in enumerate(config.layers_block_type)])
        self.final_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.use_mem_rope:
            self.rotary_emb = Zamba2RotaryEmbedding(config)
        self.gradient_checkpointing = False
        # Place j of the shared blocks has the weights of place j mod (number of blocks).
        ids, blocks = config.hybrid_layer_ids, config.num_mem_blocks
        self._tied_weights_keys = {
            f"layers.{layer}.shared_transformer.{name}": f"layers.{ids[place % blocks]}.shared_transformer.{name}"
            for place, layer in enumerate(ids)
            if place >= blocks
            for name, _ in self.layers[layer].shared_transformer.named_parameters()
        }
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Shared blocks share their weights whatever `tie_word_embeddings` says, so the base class is not asked."""
        return dict(self._tied_weights_keys)

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
    ) -> BaseModelOutputWithPast:
        """Run the layers over tokens.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, D], one of the two.
            attention_mask: [B, past + T], nonzero where a token counts; padding may stand on the left or on the
                right. A mapping with "full_attention" and "linear_attention" is taken as it is.
            position_ids: [B, T]; counted from the mask, else from the cache's length, when left out.
            cache: the state of the tokens before; made when `use_cache` and left out.
            use_cache: return the cache; the config's when left out.

        Raises:
            ValueError: none or both of input_ids and inputs_embeds.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds")
        x0 = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = count_positions(x0, attention_mask, cache)
        if isinstance(attention_mask, dict):
            token_mask, full_mask = attention_mask["linear_attention"], attention_mask["full_attention"]
        else:
            token_mask = mask_of_tokens(attention_mask, x0.shape[1])
            full_mask = causal_mask(self.config, x0, attention_mask, cache, position_ids)
        positions = self.rotary_emb(x0, position_ids) if self.config.use_mem_rope else None

        want_hidden = kwargs.pop("output_hidden_states", None) or False
        hidden_states = (x0,) if want_hidden else None
        h, y = x0, None
        for layer in self.layers:
            h, y = layer(h, y, x0, token_mask, full_mask, cache=cache, positions=positions, **kwargs)
            if want_hidden:
                hidden_states += (h + y,)
        h, _ = self.final_layernorm(y, residual=h)
        if want_hidden:
            hidden_states = (*hidden_states[:-1], h)
        return BaseModelOutputWithPast(
            last_hidden_state=h, cache=cache if use_cache else None, hidden_states=hidden_states
        )


def count_positions(x0: Tensor, attention_mask: Tensor | dict | None, cache: Cache | None) -> Tensor:
    """Positions of the new tokens, [B or 1, T]: padding does not count where the mask tells it."""
    T = x0.shape[1]
    past = 0 if cache is None else cache.get_seq_length()
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]
    return (torch.arange(T, device=x0.device) + past)[None]


class Zamba2ForCausalLM(Zamba2PreTrainedModel, CapturedGeneration, GenerationMixin):
    """Zamba2 with the head that gives logits, tied to the embeddings."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Zamba2Config) -> None:
        super().__init__(config)
        self.model = Zamba2Model(config)
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
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at each position, and the loss where labels are given.

        Args:
            labels: [B, T], token ids, -100 where there is none to predict; shifted inside.
            logits_to_keep: how many last positions, or which ones; 0 for all.
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache: see `Zamba2Model.forward`.
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
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        kwargs["logits_to_keep"] = self.config.num_logits_to_keep
        return super().prepare_inputs_for_generation(input_ids, **kwargs)
