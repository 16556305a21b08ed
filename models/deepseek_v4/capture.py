"""DeepSeek-V4's decode steps and rounds of guesses captured: a graph has caches of its own, with room for what comes.

Nothing in them hangs on a number that the host knows: how many tokens rows have, and how many of the new ones count, is
on the device, and stores are read as far as there is room, where entries that are not closed do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common.graph import CacheGraph, capture, fingerprint
from xpu_ports.models.deepseek_v4.caching import DeepseekV4Cache


class DeepseekV4StepGraph(CacheGraph):
    """One captured decode step on a `DeepseekV4Cache`."""

    @staticmethod
    def refuses(model: Any, cache: Any) -> str | None:
        return None if type(cache) is DeepseekV4Cache else f"the cache is a {type(cache).__name__}"

    @staticmethod
    def holder(cache: Any) -> CacheGraph | None:
        return getattr(cache, "holder", None)

    @staticmethod
    def kind(cache: Any) -> tuple:
        return (cache.layers[0].window.dtype,)

    def _allocate(self, model: Any, cache: Any) -> None:
        self.cache: DeepseekV4Cache = cache.captured(self.input_ids.shape[0], self.capacity)
        # Whether `count` is 1 in all rows.
        self.all_count = True

    def _step(self, forward: Callable[..., Any], model: Any) -> Tensor:
        return forward(model, input_ids=self.input_ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits

    def run(self, cache: Any, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        if self.bound is None or self.bound() is not cache:
            self.bind(cache)
        self.input_ids.copy_(input_ids)
        count = self.cache.lengths.count
        assert count is not None
        if mask is not None:
            mask = mask[:, -1:]
            torch.ne(mask[:, 0], 0, out=count)
        elif not self.all_count:
            count.fill_(1)
        self.all_count = mask is None
        self.replay()
        cache.lengths.note(1, mask)
        return self.lent()

    def bind(self, cache: Any) -> None:
        self.release()
        self.cache.lend(cache, self)
        self.bound = weakref.ref(cache)

    def release(self) -> None:
        cache = None if self.bound is None else self.bound()
        self.bound = None
        if cache is not None:
            cache.part()


class DraftGraph:
    """One captured round of greedy decoding with guesses: check some, take back those that are wrong, make new ones.

    All of it is on the device, how many guesses were right too: the host may be rounds ahead.
    """

    def __init__(self, model: Any, cache: DeepseekV4Cache, mtp_cache: DeepseekV4Cache, drafts: int, capacity: int):
        """Build buffers like those of the caches, which are only read, and capture the round on them.

        Args:
            drafts: guesses of a round.
            capacity: tokens that there is room for, those of a round that are taken back included.
        """
        self.model = weakref.ref(model)
        self.drafts, self.capacity, self.fingerprint = drafts, capacity, fingerprint(model)
        self.bound: list[weakref.ref[DeepseekV4Cache]] = []
        device = model.device
        with torch.inference_mode(False), torch.no_grad():
            # A token that is certain and not in the cache yet, and what may follow it.
            self.ids = torch.zeros(1, 1 + drafts, dtype=torch.long, device=device)
            self.cache, self.mtp_cache = cache.captured(1, capacity), mtp_cache.captured(1, capacity)
            self.all, self.one = (torch.full((1,), n, dtype=torch.long, device=device) for n in (1 + drafts, 1))
            self.replay, self.output = capture(device, lambda: self._round(model))

    def _round(self, model: Any) -> Tensor:
        """[1, drafts + 2]: what the model says behind each of the tokens, and how many of these answers count."""
        n, main, mtp = self.drafts, self.cache.lengths, self.mtp_cache.lengths
        assert main.tokens is not None
        assert mtp.tokens is not None
        main.count = self.all
        outputs = model(self.ids, cache=self.cache, use_cache=True, output_hidden_states=True)
        said = outputs.logits.argmax(-1)  # [1, n + 1]
        right = (said[:, :n] == self.ids[:, 1:]).long().cumprod(1).sum(1)  # [1]
        main.tokens.add_(right - n)
        # The layer reads the tokens that are certain now, on the model's streams; from the last of them on its own.
        mtp.count = kept = right + 1
        logits, streams = model.guess(said, outputs.hidden_states[-1], cache=self.mtp_cache)
        ids = [said.gather(1, right[:, None]), logits.argmax(-1).gather(1, right[:, None])]
        streams = streams.index_select(1, right)
        mtp.count = self.one
        for _ in range(n - 1):
            logits, streams = model.guess(ids[-1], streams, cache=self.mtp_cache)
            ids.append(logits.argmax(-1))
        mtp.tokens.sub_(n - 1)
        self.ids.copy_(torch.cat(ids, 1))
        return torch.cat([said, kept[:, None]], 1)

    def bind(self, cache: DeepseekV4Cache, mtp_cache: DeepseekV4Cache, ids: Tensor) -> None:
        """Go on from two caches and the tokens ids [1, drafts + 1]."""
        self.release()
        for mine, theirs in ((self.cache, cache), (self.mtp_cache, mtp_cache)):
            mine.lend(theirs, self)
            self.bound.append(weakref.ref(theirs))
        self.ids.copy_(ids)

    def release(self) -> None:
        """Hold no caches: those that were have lost count of what they hold, and are new again."""
        for reference in self.bound:
            cache = reference()
            if cache is not None:
                cache.forget()
        self.bound = []
