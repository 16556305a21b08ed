"""DeepSeek-V4 beside transformers: `python -m xpu_ports.models.deepseek_v4.accuracy CKPT`, as `xpu-ports accuracy`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM as TransformersDeepseekV4

from xpu_ports.common.checkpoint import checkpoint_files, read_headers
from xpu_ports.common.compare import language
from xpu_ports.common.compare.bounds import Bounds, Check
from xpu_ports.common.compare.command import main
from xpu_ports.common.compare.layers import Layers, Names
from xpu_ports.common.compare.report import Section
from xpu_ports.common.compare.subject import Options, Subject, load
from xpu_ports.common.configuration import find_config
from xpu_ports.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.quant.mxfp4.quantize import quantize_model, round_weights

# None in float16, which transformers' class does not run in.
BOUNDS = {
    "float32": Bounds(
        "sums in another order: ten times what the tiny checkpoint shows",
        logits=1e-5, kl=1e-9, top_1=0.999, perplexity=1e-5, layer=1e-5, decode=1e-5,
    ),
    "bfloat16": Bounds(
        "both round at other places, and a few tokens go to other experts, which their logits show: five times the "
        "mean of the tiny checkpoint; of most tokens no further from float32 than transformers by more than a half",
        kl=0.01, top_1=0.95, perplexity=0.01, layer=0.05, yardstick=1.5,
    ),
    "mxfp4": Bounds(
        "four bits a weight of the experts: three times what the tiny checkpoint loses, and larger models lose less",
        kl=0.08, top_1=0.85, perplexity=0.1, layer=0.25,
    ),
    "fp8": Bounds(
        "rows of three bits of mantissa: twice what they cost the layers of the tiny checkpoint, and what that moves "
        "of the experts' choice",
        kl=0.01, top_1=0.95, perplexity=0.02, layer=0.05,
    ),
}  # fmt: skip
# More entries than a text here has: the indexer chooses all of them.
ALL = {"index_topk": 1 << 20}


def dense_layers(model: Any) -> list[str]:
    """What stays dense in MXFP4: all but the routed experts, as in the published files."""
    return [r"re:(?!.*\.experts).*"]


def mtp(subject: Subject, options: Options, ids: Tensor) -> list[Section]:
    """How many guesses of the MTP layer the model keeps, where the checkpoint has the layer."""
    folder = find_config(options.checkpoint).rpartition("config.json")[0]
    if options.quant is not None or not any(key.startswith("mtp.") for key in read_headers(checkpoint_files(folder))):
        return []
    kwargs = dict(subject.caches[options.cache]) if options.cache else {}
    model = load(subject.port, options, {}, mtp=True, **kwargs)
    prompt = ids[None, : max(1, ids.shape[0] // 2)].to(model.device)
    arguments = dict(max_new_tokens=2 * options.steps, do_sample=False, eos_token_id=None)
    mask = torch.ones_like(prompt)
    plain = model.generate(prompt, attention_mask=mask, **arguments)
    guessed = model.generate(prompt, attention_mask=mask, draft="mtp", num_draft_tokens=1, **arguments)
    same = (plain == guessed).float().mean().item()
    # In fewer than 32 bits, of the model or of the cache, a step of two tokens may round otherwise than two steps.
    exact = 1.0 if model.dtype == torch.float32 and options.cache is None else None
    return [
        Section(
            "guesses of the MTP layer, one at a time",
            [
                Check("accepted", model.draft_acceptance),
                Check("tokens that are those without guesses", same, exact, at_least=True),
            ],
            why="greedy decoding with guesses is greedy decoding",
        )
    ]


SUBJECT = Subject(
    port=DeepseekV4ForCausalLM,
    reference=TransformersDeepseekV4,
    bounds=BOUNDS,
    layers=Layers(
        of=lambda model: model.model.layers,
        read=lambda args, kwargs: args[0],
        # Ours hands on products of the streams, which are not those of others put in their place.
        result=lambda output: output if isinstance(output, torch.Tensor) else output[0],
        put=lambda args, kwargs, x: ((x, *args[1:3], None, *args[4:]), kwargs),
    ),
    names=Names(joined={"gate_up_proj": ("gate_proj", "up_proj")}),
    aligned=ALL,
    reference_aligned=ALL,
    alignment=(
        "compared with all entries chosen (index_topk): of entries with equal scores transformers' choice depends on "
        "the length of the text"
    ),
    quantize=lambda model: quantize_model(model, ignore=dense_layers(model)),
    round_weights=lambda model: round_weights(model, ignore=dense_layers(model)),
    caches={"fp8": {"cache_dtype": "fp8"}},
    more=mtp,
)

compare = functools.partial(language.compare, SUBJECT)

if __name__ == "__main__":
    sys.exit(main(compare, "python -m xpu_ports.models.deepseek_v4.accuracy"))
