"""Zamba2: Mamba-2 layers with shared attention blocks between them."""

from transformers import Zamba2Config

from xpu_ports.models.zamba2.modeling_zamba2 import Zamba2ForCausalLM, Zamba2Model, Zamba2PreTrainedModel

__all__ = ["Zamba2Config", "Zamba2ForCausalLM", "Zamba2Model", "Zamba2PreTrainedModel"]
