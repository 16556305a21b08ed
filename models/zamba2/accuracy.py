"""Zamba2 beside transformers: `python -m xpu_ports.models.zamba2.accuracy CKPT`, as `xpu-ports accuracy CKPT`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import Zamba2ForCausalLM as TransformersZamba2

from xpu_ports.common.compare import language
from xpu_ports.common.compare.bounds import Bounds
from xpu_ports.common.compare.command import main
from xpu_ports.common.compare.layers import PAIR, Names
from xpu_ports.common.compare.subject import Subject
from xpu_ports.models.zamba2.modeling_zamba2 import Zamba2ForCausalLM
from xpu_ports.quant.mxfp4.format import BLOCK
from xpu_ports.quant.mxfp4.quantize import quantize_model, round_weights

BOUNDS = {
    "float32": Bounds(
        "sums in another order: ten times what the tiny checkpoint shows",
        logits=1e-5, kl=1e-9, top_1=0.999, perplexity=1e-5, layer=1e-5, decode=1e-5,
    ),
    "bfloat16": Bounds(
        "both round at other places: three times what the tiny checkpoint shows, and no further from float32 than "
        "transformers by more than a half",
        logits=0.05, kl=1e-3, top_1=0.96, perplexity=0.005, layer=0.03, decode=0.03, yardstick=1.5,
    ),
    "float16": Bounds(
        "as bfloat16, with eight times its precision",
        logits=0.006, kl=5e-5, top_1=0.99, perplexity=0.001, layer=0.004, decode=0.004, yardstick=1.5,
    ),
    "mxfp4": Bounds(
        "four bits a weight: twice what the tiny checkpoint loses, and larger models lose less",
        kl=0.2, top_1=0.7, perplexity=0.2, layer=0.4,
    ),
}  # fmt: skip


def dense_layers(model: Any) -> list[str]:
    """What stays dense in MXFP4: adapters whose rank is no whole number of blocks."""
    return ["re:.*adapter_list.*"] if model.config.adapter_rank % BLOCK else []


SUBJECT = Subject(
    port=Zamba2ForCausalLM,
    reference=TransformersZamba2,
    bounds=BOUNDS,
    layers=PAIR,
    # The first's output is the pair of streams here, and their sum there; the second's norm is inside it here.
    names=Names(apart=("mamba_decoder", "shared_transformer.feed_forward")),
    aligned={"clamp_prefill_dt": True},
    alignment="compared with clamp_prefill_dt, as transformers clamps dt in a prefill; training and decoding do not",
    quantize=lambda model: quantize_model(model, ignore=dense_layers(model)),
    round_weights=lambda model: round_weights(model, ignore=dense_layers(model)),
)

compare = functools.partial(language.compare, SUBJECT)

if __name__ == "__main__":
    sys.exit(main(compare, "python -m xpu_ports.models.zamba2.accuracy"))
