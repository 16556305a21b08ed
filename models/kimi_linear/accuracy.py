"""Kimi Linear beside transformers: `python -m xpu_ports.models.kimi_linear.accuracy CKPT`, as `xpu-ports accuracy`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import KimiLinearForCausalLM as TransformersKimiLinear

from xpu_ports.common.compare import language
from xpu_ports.common.compare.bounds import Bounds
from xpu_ports.common.compare.command import main
from xpu_ports.common.compare.layers import PAIR, Names
from xpu_ports.common.compare.subject import Subject
from xpu_ports.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM
from xpu_ports.quant.mxfp4.quantize import quantize_model, round_weights

BOUNDS = {
    "float32": Bounds(
        "sums in another order: ten times what the tiny checkpoint shows",
        logits=1e-5, kl=1e-9, top_1=0.999, perplexity=1e-5, layer=1e-5, decode=1e-5,
    ),
    "bfloat16": Bounds(
        "both round at other places, and a few tokens go to other experts, which their logits show: four times the "
        "mean of the tiny checkpoint; of most tokens no further from float32 than transformers by more than a half",
        kl=0.03, top_1=0.93, perplexity=0.02, layer=0.04, yardstick=1.5,
    ),
    "float16": Bounds(
        "as bfloat16, with eight times its precision",
        kl=0.004, top_1=0.98, perplexity=0.005, layer=0.005, yardstick=1.5,
    ),
    "mxfp4": Bounds(
        "four bits a weight: twice what the tiny checkpoint loses, and larger models lose less",
        kl=0.4, top_1=0.65, perplexity=0.15, layer=0.6,
    ),
}  # fmt: skip


def dense_layers(model: Any) -> list[str]:
    """What stays dense in MXFP4: the head."""
    return ["lm_head"]


SUBJECT = Subject(
    port=KimiLinearForCausalLM,
    reference=TransformersKimiLinear,
    bounds=BOUNDS,
    layers=PAIR,
    names=Names(
        prefixes={"block_sparse_moe": "mlp"},
        joined={
            "qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "fg_a_proj": ("forget_gate.f_a_proj", "g_a_proj"),
            "f_b_proj": ("forget_gate.f_b_proj",),
            "gate_up_proj": ("gate_proj", "up_proj"),
        },
    ),
    quantize=lambda model: quantize_model(model, ignore=dense_layers(model)),
    round_weights=lambda model: round_weights(model, ignore=dense_layers(model)),
)

compare = functools.partial(language.compare, SUBJECT)

if __name__ == "__main__":
    sys.exit(main(compare, "python -m xpu_ports.models.kimi_linear.accuracy"))
