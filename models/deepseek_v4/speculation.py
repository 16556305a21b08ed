"""Decoding with guesses: the MTP layer proposes tokens, one forward of the model checks them all.

A round has one token t that is certain and not in the cache yet. The layer guesses what follows, token by token on its
own streams; the model reads t and the guesses at once, which gives what follows each of them. Guesses are kept up to
the first that the model would not have said, and the model's own token follows. Greedy output is the model's; sampled
output has its distribution (Leviathan et al., arXiv:2211.17192, appendix A.1).

Caches go back to the tokens that were kept; what the layer made of its own streams is computed again of the model's.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from xpu_ports.common import dispatch, graph
from xpu_ports.common.generation import AHEAD, Slot, stops_plainly
from xpu_ports.models.deepseek_v4.caching import ROLLBACK, DeepseekV4Cache
from xpu_ports.models.deepseek_v4.capture import DraftGraph

SUBJECT = "draft rounds"
# A round takes back all of its guesses, at most.
MOST_DRAFTS = ROLLBACK


class Speculation:
    """One call of `generate`: its model, caches and settings."""

    def __init__(self, model: Any, config: Any, processors: Any, criteria: Any, drafts: int, cache: Any) -> None:
        self.model, self.process, self.criteria, self.drafts = model, processors, criteria, drafts
        self.sample, self.cache = config.do_sample, cache
        self.mtp_cache = DeepseekV4Cache.of_mtp(model.config)
        self.proposed = self.accepted = 0

    def run(self, ids: Tensor, streamer: Any) -> Tensor:
        """The prompt ids [1, T] and what follows."""
        if streamer is not None:
            streamer.put(ids.cpu())
        new, streams = self.prefill(ids)
        while True:
            # `new` [1, N]: what the last round made certain, the last of them not in the cache; streams [1, N, S, D] of
            # the positions before each.
            for token in new.unbind(1):
                ids = torch.cat([ids, token[:, None]], dim=1)
                if streamer is not None:
                    streamer.put(token.cpu())
                if bool(self.criteria(ids, None).all()):
                    if streamer is not None:
                        streamer.end()
                    return ids
            new, streams = self.round(ids, new, streams)

    def prefill(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The first new token [1, 1] and the streams [1, 1, S, D] before it, with the prompt in both caches."""
        logits, streams = self.read(ids, 1)
        if ids.shape[1] > 1:
            self.model.guess(ids[:, 1:], streams[:, :-1], cache=self.mtp_cache, logits_to_keep=1)
        return self.choose(ids, logits[:, -1]), streams[:, -1:]

    def read(self, ids: Tensor, keep: int = 0) -> tuple[Tensor, Tensor]:
        """Logits [1, N, V], of the last `keep` alone where that is not 0, and streams [1, N, S, D] of new tokens."""
        outputs = self.model(ids, cache=self.cache, use_cache=True, output_hidden_states=True, logits_to_keep=keep)
        return outputs.logits, outputs.hidden_states[-1]

    def round(self, ids: Tensor, new: Tensor, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Guess, check, and go back; gives what `run` goes on with."""
        guesses, scores = self.propose(ids, new, streams)
        logits, streams = self.read(torch.cat([ids[:, -1:], guesses], dim=1))
        kept = self.check(ids, guesses, scores, logits)
        accepted = kept.shape[1] - 1
        self.proposed, self.accepted = self.proposed + self.drafts, self.accepted + accepted
        self.cache.crop(accepted - self.drafts)
        return kept, streams[:, : accepted + 1]

    def propose(self, ids: Tensor, new: Tensor, streams: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Guesses [1, drafts] and the distribution [1, V] that each was drawn from."""
        guesses: list[Tensor] = []
        scores: list[Tensor] = []
        for _ in range(self.drafts):
            logits, streams = self.model.guess(new, streams[:, -new.shape[1] :], cache=self.mtp_cache, logits_to_keep=1)
            scores.append(self.distribution(ids, logits[:, -1]))
            new = self.draw(scores[-1])
            guesses.append(new)
            ids = torch.cat([ids, new], dim=1)
        # The first step was on the model's streams and stays.
        self.mtp_cache.crop(1 - self.drafts)
        return torch.cat(guesses, dim=1), scores

    def check(self, ids: Tensor, guesses: Tensor, scores: list[Tensor], logits: Tensor) -> Tensor:
        """The guesses that the model keeps and its own next token, [1, N]."""
        kept: list[Tensor] = []
        for n, q in enumerate(scores):
            guess = guesses[:, n : n + 1]
            p = self.distribution(ids, logits[:, n])
            if self.sample:
                takes = torch.rand_like(p[:, :1]) * q.gather(1, guess) < p.gather(1, guess)
            else:
                takes = self.draw(p) == guess
            if not bool(takes):
                # What the model says more often than the layer.
                rest = (p - q).clamp(min=0) if self.sample else p
                return torch.cat([*kept, self.draw(rest)], dim=1)
            kept.append(guess)
            ids = torch.cat([ids, guess], dim=1)
        return torch.cat([*kept, self.choose(ids, logits[:, -1])], dim=1)

    def choose(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The model's next token, [1, 1]."""
        return self.draw(self.distribution(ids, logits))

    def distribution(self, ids: Tensor, logits: Tensor) -> Tensor:
        """What is drawn from, [1, V]: probabilities where tokens are sampled, else scores."""
        scores = self.process(ids, logits.float())
        return scores.softmax(-1) if self.sample else scores

    def draw(self, scores: Tensor) -> Tensor:
        return torch.multinomial(scores, 1) if self.sample else scores.argmax(-1, keepdim=True)


class CapturedSpeculation(Speculation):
    """Greedy decoding whose rounds are one graph each: the host reads what they gave a few rounds late."""

    def run(self, ids: Tensor, streamer: Any) -> Tensor:
        self.text = ids[0].tolist()
        if streamer is not None:
            streamer.put(ids.cpu())
        new, streams = self.prefill(ids)
        ended = self.add(new.tolist()[0], streamer)
        if not ended:
            guesses, _ = self.propose(torch.cat([ids, new], dim=1), new, streams)
            self.rounds(torch.cat([new, guesses], dim=1), streamer)
        if streamer is not None:
            streamer.end()
        return torch.tensor([self.text], device=ids.device)

    def rounds(self, ids: Tensor, streamer: Any) -> None:
        """Go on from ids [1, drafts + 1], the last certain token and what may follow, to the end."""
        most = self.criteria.max_length
        # What rounds too many and guesses that are taken back need beyond the text.
        room = most + (AHEAD + 2) * (self.drafts + 1)
        capacity = max(graph.SMALLEST, 1 << (room - 1).bit_length())
        key = "drafts", self.drafts, capacity, self.cache.layers[0].window.dtype, *graph.circumstances(self.model)
        captured = graph.kept(
            self.model, key, lambda: DraftGraph(self.model, self.cache, self.mtp_cache, self.drafts, capacity)
        )
        captured.bind(self.cache, self.mtp_cache, ids)
        slots: deque[Slot] = deque()
        ended = False
        while not ended:
            # Each round that is on its way gives a token at least.
            while len(slots) <= AHEAD and len(self.text) + len(slots) < most:
                captured.replay()
                slots.append(Slot.of(captured.output))
            *said, kept = slots.popleft().read()[0][0].tolist()
            self.proposed, self.accepted = self.proposed + self.drafts, self.accepted + kept - 1
            ended = self.add(said[:kept], streamer)
        captured.release()

    def add(self, tokens: list[int], streamer: Any) -> bool:
        """Put tokens behind the text up to its end; whether it is reached."""
        for token in tokens:
            self.text.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
            if token in self.ends or len(self.text) >= self.criteria.max_length:
                return True
        return False

    @property
    def ends(self) -> set[int]:
        found = [c.eos_token_id.tolist() for c in self.criteria if hasattr(c, "eos_token_id")]
        return {token for tokens in found for token in tokens}


def _is_captured(model: Any, config: Any, processors: Any, criteria: Any) -> bool:
    """Whether rounds are captured: where steps are, if nothing but the largest logits and the usual ends is asked."""
    reason = graph.refuses(model, hooks=True)
    if reason is None and (config.do_sample or len(processors) or not stops_plainly(criteria)):
        reason = "tokens are sampled, processed, or end in another way"
    if reason is None and not graph.enabled():
        reason = "graphs are off"
    dispatch.record(SUBJECT, "eager" if reason else "graph", model.device, reason or "greedy")
    return reason is None


def check_speculation(draft: str, drafts: int, model: Any) -> None:
    """What `generate` was asked for.

    Raises:
        ValueError: the model has no such layer, or is on several devices, or the number of tokens is none that a round
            takes back.
    """
    if draft != "mtp" or not hasattr(model, "mtp"):
        raise ValueError(f"draft is {draft!r}: only 'mtp' is known, of a model loaded with mtp=True")
    if not 1 <= drafts <= MOST_DRAFTS:
        raise ValueError(f"num_draft_tokens is {drafts}, not 1 to {MOST_DRAFTS}")
    places = sorted({str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise ValueError(f"drafts are made by a model on one device: device_map has layers on {', '.join(places)}")


def speculate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    num_draft_tokens: int = 1,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Tensor:
    """Called by `generate` in place of its loop.

    Raises:
        ValueError: there is more than one sequence, padding, a cache with a past, or more asked for than tokens.
    """
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("cache")
    if generation_config.num_beams > 1 or generation_config.return_dict_in_generate:
        raise ValueError("drafts are made for greedy decoding and sampling, which return tokens alone")
    if input_ids.shape[0] != 1 or (mask is not None and not bool(mask.all())):
        raise ValueError("drafts are made for one sequence without padding")
    if cache is None or cache.get_seq_length():
        raise ValueError("drafts need the cache that generate makes")
    captured = _is_captured(model, generation_config, logits_processor, stopping_criteria)
    loop = CapturedSpeculation if captured else Speculation
    run = loop(model, generation_config, logits_processor, stopping_criteria, num_draft_tokens, cache)
    ids = run.run(input_ids, streamer)
    model.draft_acceptance = run.accepted / max(run.proposed, 1)
    return ids
