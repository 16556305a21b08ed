"""DeepSeek-V4: attention over a window and compressed entries, four residual streams, a mixture of experts."""

from transformers import DeepseekV4Config

from xpu_ports.models.deepseek_v4.caching import DeepseekV4Cache
from xpu_ports.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4ForCausalLM,
    DeepseekV4Model,
    DeepseekV4PreTrainedModel,
)

__all__ = [
    "DeepseekV4Cache",
    "DeepseekV4Config",
    "DeepseekV4ForCausalLM",
    "DeepseekV4Model",
    "DeepseekV4PreTrainedModel",
]
