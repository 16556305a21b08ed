"""Greedy decoding and sampling without waiting for the device at every token.

transformers' loop reads from the device after each step whether to stop, so the host cannot queue the next step
meanwhile. This one reads that flag, and the tokens for a streamer, a few steps late, and drops the steps too many.
It takes the plain cases; everything else goes to transformers' loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from xpu_ports.common import graph
from xpu_ports.common.kernels.greedy_tokens import greedy_tokens

# Steps that the host may be ahead of the device.
AHEAD = 4


class CapturedGeneration:
    """Stands before `GenerationMixin` in the bases of a model whose forward is `captured_decode`d."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        if synced_gpus or not _takes(self, stopping_criteria, generation_config, model_kwargs):
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        outputs = self._prefill(  # type: ignore[attr-defined]
            input_ids, generation_config, model_kwargs, is_first_iteration=not generation_config.is_assistant
        )
        loop = _Loop(self, input_ids, model_kwargs, logits_processor, stopping_criteria, generation_config, streamer)
        return loop.run(outputs)


def _takes(model: Any, stopping_criteria: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether the loop below does all that this call asks for."""
    cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
    return (
        # On a CPU there is nothing to wait for.
        (model.device.type != "cpu" or (graph.graph_class(model.device) is not None and graph.enabled()))
        and not model.training
        and not config.return_dict_in_generate
        and not config.is_assistant
        and model_kwargs.get("use_cache") is True
        # A cache that outlives the call must not hold the steps too many.
        and cache is not None
        and not getattr(cache, "_is_user_defined", False)
        and (mask is None or (isinstance(mask, Tensor) and mask.dim() == 2))
        and stops_plainly(stopping_criteria)
        and not set(model_kwargs) - {"cache", "attention_mask", "use_cache", "position_ids", "logits_to_keep"}
    )


def stops_plainly(stopping_criteria: Any) -> bool:
    """Whether a text ends at a length, and at tokens, and in no other way."""
    plain = all(type(criterion) in (MaxLengthCriteria, EosTokenCriteria) for criterion in stopping_criteria)
    return plain and stopping_criteria.max_length is not None


@dataclass
class Slot:
    """What one step sends to the host, and when it is there."""

    tensors: list[Tensor]
    event: Any
    length: int = 0

    @classmethod
    def of(cls, *tensors: Tensor, length: int = 0) -> Slot:
        """Send tensors of one device."""
        device = tensors[0].device
        on_cpu = device.type == "cpu"
        sent = [torch.empty(t.shape, dtype=t.dtype, pin_memory=not on_cpu) for t in tensors]
        for target, source in zip(sent, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        event = None if on_cpu else torch.Event(device=device)
        if event is not None:
            event.record()
        return cls(sent, event, length)

    def read(self) -> list[Tensor]:
        """What was sent, on the host: waits for it."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


class _Loop:
    def __init__(
        self,
        model: Any,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        logits_processor: Any,
        stopping_criteria: Any,
        config: GenerationConfig,
        streamer: Any,
    ) -> None:
        self.model, self.process, self.streamer = model, logits_processor, streamer
        self.sample = config.do_sample
        self.plain = not self.sample and len(logits_processor) == 0
        self.max_length = stopping_criteria.max_length
        batch, self.prompt = input_ids.shape
        device = input_ids.device
        self.eos = next((c.eos_token_id.to(device) for c in stopping_criteria if hasattr(c, "eos_token_id")), None)
        self.pad = None if config._pad_token_tensor is None else config._pad_token_tensor.to(device)
        self.ids = input_ids.new_zeros(batch, self.max_length)
        self.ids[:, : self.prompt] = input_ids
        # A mask of ones says nothing: looked at once, here, where the prompt is worked on anyway.
        mask = model_kwargs.get("attention_mask")
        self.mask = None
        if mask is not None and not bool(mask.all()):
            self.mask = mask.new_ones(batch, self.max_length)
            self.mask[:, : self.prompt] = mask
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        self.slots: deque[Slot] = deque()

    def run(self, outputs: Any) -> Tensor:
        cache, length = outputs.cache, self.prompt
        while True:
            tokens = self.choose(outputs.logits[:, -1], length)
            length += 1
            stopped = self.check(tokens, length)
            if stopped is not None or length >= self.max_length:
                break
            with graph.borrowed_logits():
                outputs = self.model(
                    input_ids=tokens[:, None],
                    attention_mask=None if self.mask is None else self.mask[:, :length],
                    cache=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        while stopped is None and self.slots:
            stopped = self.read()
        if self.streamer is not None:
            self.streamer.end()
        return self.ids[:, : length if stopped is None else stopped]

    def choose(self, logits: Tensor, length: int) -> Tensor:
        """Put the next token of each row into `ids`, pad where a row has ended; gives that column, [B]."""
        # The largest logit is the same in any dtype.
        scores = logits if self.plain else self.process(self.ids[:, :length], logits.float())
        tokens = self.ids[:, length]
        if not self.sample:
            greedy_tokens(scores, tokens, self.unfinished, self.eos, self.pad)
            return tokens
        drawn = torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]
        if self.eos is not None:
            assert self.pad is not None  # generate() asks for one where rows can end
            drawn = torch.where(self.unfinished, drawn, self.pad)
            self.unfinished &= (drawn[:, None] != self.eos).all(dim=-1)
        tokens.copy_(drawn)
        return tokens

    def check(self, tokens: Tensor, length: int) -> int | None:
        """Send to the host what it asks of this step; the length at which all rows had ended, once it is known."""
        sent = [] if self.eos is None else [self.unfinished]
        sent += [] if self.streamer is None else [tokens]
        if not sent:
            return None
        self.slots.append(Slot.of(*sent, length=length))
        return self.read() if len(self.slots) > AHEAD else None

    def read(self) -> int | None:
        slot = self.slots.popleft()
        sent = slot.read()
        if self.streamer is not None:
            self.streamer.put(sent[-1])
        return None if self.eos is None or bool(sent[0].any()) else slot.length
