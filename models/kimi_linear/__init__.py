"""Kimi Linear: Kimi Delta Attention with latent attention between, and a mixture of experts."""

from transformers import KimiLinearConfig

from xpu_ports.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearForCausalLM,
    KimiLinearModel,
    KimiLinearPreTrainedModel,
)

__all__ = ["KimiLinearConfig", "KimiLinearForCausalLM", "KimiLinearModel", "KimiLinearPreTrainedModel"]
