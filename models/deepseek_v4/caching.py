"""What DeepSeek-V4 keeps of a sequence: a window of tokens, compressed entries, and what the next entry is made of.

Nothing here depends on how a sequence came in. A row's token p is at slot p mod R of its window's ring and of the
compressors' rings, entry j at slot j of its store, and how many tokens a row has is one number: going back is
lowering it. Rows of a batch may have different numbers of tokens, as those behind padding do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from xpu_ports.common.kernels.fp8_pages import PAGE_TOKENS, index_page_bytes, page_bytes

CACHE_DTYPES = ("auto", "bf16", "fp8")
# How many tokens `crop` takes back at most, short of all: the rings hold that many more than a step reads.
ROLLBACK = 32


class Lengths:
    """How many tokens each row of the batch has, and how many columns the cache was given, padding included."""

    def __init__(self) -> None:
        self.columns = 0
        # The most columns there have been: what the rings wrote over is that far behind.
        self.written = 0
        # [B], int64, on the model's device: it is never waited for.
        self.tokens: Tensor | None = None
        # [B, up to ROLLBACK], whether each of the last columns counted; None where all did.
        self.counted: Tensor | None = None
        # Whether a captured step holds `tokens`, and the layers' tensors: they are written in place from then on.
        self.fixed = False
        # [B], int64: how many tokens of a captured step are each row's; elsewhere None.
        self.count: Tensor | None = None

    def advance(self, count: Tensor, columns: int, mask: Tensor | None) -> None:
        """Add columns, of which `mask` [B, columns] tells those that count: `count` [B] of them in each row."""
        assert self.tokens is not None
        if self.fixed:
            self.tokens.add_(count)
        else:
            self.tokens = self.tokens + count
        self.note(columns, mask)

    def note(self, columns: int, mask: Tensor | None) -> None:
        """What `advance` does on the host: `tokens` has been added to."""
        if mask is not None or self.counted is not None:
            assert self.tokens is not None
            before, new = self.counted, mask
            if before is None:
                size = self.tokens.shape[0], min(self.columns, ROLLBACK)
                before = self.tokens.new_ones(size, dtype=torch.bool)
            if new is None:
                new = before.new_ones(before.shape[0], columns)
            self.counted = torch.cat([before, new.bool()], dim=1)[:, -ROLLBACK:]
        self.columns += columns
        self.written = max(self.written, self.columns)

    def _put(self, tokens: Tensor) -> None:
        """Have `tokens` from here on, in place where a captured step reads them."""
        if self.fixed:
            assert self.tokens is not None
            self.tokens.copy_(tokens)
        else:
            self.tokens = tokens

    def crop(self, columns: int) -> None:
        """Take back the last columns.

        Raises:
            ValueError: more than ROLLBACK before the most columns that there were, and not all, or more than there are.
        """
        if columns == self.columns:
            self.reset()
            return
        back = self.written - self.columns + columns
        if back > ROLLBACK or columns > self.columns:
            said = f"{columns} of {self.columns}"
            said += f", {back} before the last that were there," if back > columns else ""
            raise ValueError(f"crop takes back at most {ROLLBACK} tokens, or all; {said} asked for")
        if columns == 0:
            return
        assert self.tokens is not None
        if self.counted is None:
            self._put(self.tokens - columns)
        else:
            self._put(self.tokens - self.counted[:, -columns:].sum(1))
            self.counted = self.counted[:, :-columns]
        self.columns -= columns

    def select(self, rows: Tensor) -> None:
        """Make the batch of these of its rows."""
        if self.tokens is not None:
            self._put(self.tokens.index_select(0, rows.to(self.tokens.device)))
        if self.counted is not None:
            self.counted = self.counted.index_select(0, rows.to(self.counted.device))

    def reset(self) -> None:
        self.columns, self.written, self.counted = 0, 0, None
        if self.tokens is not None:
            self._put(torch.zeros_like(self.tokens))


class DeepseekV4CacheLayer(CacheLayerMixin):
    """One layer's rings and stores; [B, ...] all of them.

    window: the last tokens' rows, R slots. entries: compressed rows. state: the compressor's ring, fp32.
    index_entries, index_state: the indexer's. Rows are [B, slots, columns] in the model's dtype or FP8 pages.
    """

    TENSORS = ("window", "entries", "state", "index_entries", "index_state")

    def __init__(self, config: Any, kind: str, lengths: Lengths, fp8: bool) -> None:
        super().__init__()
        self.lengths, self.kind, self.fp8 = lengths, kind, fp8
        self.K, self.C, self.rope = config.head_dim, config.index_head_dim, config.qk_rope_head_dim
        self.window_slots = _up(config.sliding_window + ROLLBACK)
        self.ratio = config.compress_rates.get(kind, 0)
        self.is_sparse = kind == "compressed_sparse_attention"
        # Tensors, once the first tokens tell what batch, dtype and device they have.
        self.window: Any = None
        self.entries: Any = None
        self.state: Any = None
        self.index_entries: Any = None
        self.index_state: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Make the rings and stores for the batch, dtype and device of the first rows [B, T, K]."""
        self.allocate(key_states.shape[0], key_states.dtype, key_states.device)

    def allocate(self, B: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the rings and stores for so many rows of a dtype."""
        self.dtype, self.device = dtype, device
        self.window = self._store(B, self.window_slots, self.K, False)
        if self.ratio:
            # A sparse layer projects twice, and reads the window before as well.
            halves = 2 if self.is_sparse else 1
            ring = halves * self.ratio + ROLLBACK
            self.entries = self._store(B, PAGE_TOKENS, self.K, False)
            self.state = self._zeros(B, ring, 2 * halves * self.K)
            if self.is_sparse:
                self.index_entries = self._store(B, PAGE_TOKENS, self.C, True)
                self.index_state = self._zeros(B, ring, 4 * self.C)
        self.is_initialized = True

    def _store(self, B: int, slots: int, columns: int, index: bool) -> Tensor:
        slots = _up(slots)
        if not self.fp8:
            return torch.zeros(B, slots, columns, dtype=self.dtype, device=self.device)
        page = index_page_bytes(columns) if index else page_bytes(columns, self.rope)
        return torch.zeros(B, slots // PAGE_TOKENS, page, dtype=torch.uint8, device=self.device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)

    def reserve(self, entries: int) -> None:
        """Have room for so many entries a row: at least double when there is not, so that few are copied often."""
        for name, columns, index in (("entries", self.K, False), ("index_entries", self.C, True)):
            store = getattr(self, name)
            # A captured step is not run where there is no room.
            if store is None or self.lengths.fixed or _slots(store) >= entries:
                continue
            larger = self._store(store.shape[0], max(entries, 2 * _slots(store)), columns, index)
            larger[:, : store.shape[1]] = store
            setattr(self, name, larger)

    def slots(self) -> int:
        """How many entries the store has room for."""
        return 0 if self.entries is None else _slots(self.entries)

    @staticmethod
    def first(store: Tensor, entries: int) -> Tensor:
        """The part of a store that holds its first entries: a view."""
        return store[:, : -(-entries // PAGE_TOKENS) if store.dtype == torch.uint8 else entries]

    def select(self, rows: Tensor) -> None:
        """Make the batch of these of its rows."""
        for name in self.TENSORS:
            t = getattr(self, name)
            if t is None:
                continue
            chosen = t.index_select(0, rows.to(t.device))
            if self.lengths.fixed:
                t.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def memory(self) -> dict[str, int]:
        """Bytes of each ring and store."""
        held = {name: getattr(self, name) for name in self.TENSORS}
        return {name: t.numel() * t.element_size() for name, t in held.items() if t is not None}

    # What transformers asks of a layer. The rows of a layer are written by its ops, not through `update`.

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("DeepSeek-V4's layers write their cache themselves")

    def get_seq_length(self) -> int:
        return self.lengths.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.lengths.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        raise NotImplementedError("DeepSeek-V4's cache is not offloaded")

    prefetch = offload


def _slots(store: Tensor) -> int:
    """Slots of a row of a store made here: its pages have PAGE_TOKENS each."""
    return store.shape[1] * (PAGE_TOKENS if store.dtype == torch.uint8 else 1)


def _up(slots: int) -> int:
    return -(-slots // PAGE_TOKENS) * PAGE_TOKENS


class DeepseekV4Cache(Cache):
    """The cache of a model: pass it as `cache`, or let `generate` and `use_cache=True` make one.

    Args:
        config: the model's.
        cache_dtype: "fp8" for FP8 pages in the layout that serving engines have, "bf16" or "auto" for rows in the
            model's dtype. What config.cache_dtype says when left out, else "auto".
        kinds: of layers, where they are not the config's.

    Raises:
        ValueError: there is no such cache_dtype.
    """

    layers: Any

    def __init__(self, config: Any, cache_dtype: str | None = None, kinds: Sequence[str] | None = None) -> None:
        cache_dtype = cache_dtype or getattr(config, "cache_dtype", "auto")
        if cache_dtype not in CACHE_DTYPES:
            raise ValueError(f"cache_dtype is {cache_dtype!r}, not one of {', '.join(CACHE_DTYPES)}")
        self.lengths = Lengths()
        # What holds this cache's tensors in a captured step: it has `release`.
        self.holder: Any = None
        self.config, self.cache_dtype = config, cache_dtype
        fp8 = cache_dtype == "fp8"
        kinds = config.layer_types if kinds is None else kinds
        super().__init__(layers=[DeepseekV4CacheLayer(config, kind, self.lengths, fp8) for kind in kinds])

    @classmethod
    def of_mtp(cls, config: Any, cache_dtype: str | None = None) -> DeepseekV4Cache:
        """The cache of a layer that guesses further, which attends to a window alone."""
        return cls(config, cache_dtype, ["sliding_attention"])

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens.

        Args:
            tokens_to_remove: minus their number: at most ROLLBACK of them, or all.

        Raises:
            ValueError: it is positive, or more are asked for.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        self.lengths.crop(-tokens_to_remove)

    def reset(self) -> None:
        self.lengths.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.lengths.tokens is not None and beam_idx.shape[0] != self.lengths.tokens.shape[0]:
            self.release()
        self.lengths.select(beam_idx)
        for layer in self.layers:
            layer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.lengths.tokens is not None:
            rows = torch.arange(self.lengths.tokens.shape[0], device=self.lengths.tokens.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    # A captured step works on a cache of its own, whose tensors another cache may share for a while.

    def captured(self, rows: int, tokens: int) -> DeepseekV4Cache:
        """An empty cache like this one for a captured step: room for so many rows and tokens, at fixed addresses."""
        made = DeepseekV4Cache(self.config, self.cache_dtype, [layer.kind for layer in self.layers])
        for layer, like in zip(made.layers, self.layers, strict=True):
            layer.allocate(rows, like.dtype, like.device)
            if layer.ratio:
                layer.reserve(-(-tokens // layer.ratio))
        lengths, device = made.lengths, self.layers[0].device
        lengths.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        lengths.count = torch.ones(rows, dtype=torch.int64, device=device)
        # Not empty, whatever is in it: a step goes on from a past.
        lengths.columns, lengths.fixed = tokens, True
        return made

    def lend(self, cache: DeepseekV4Cache, holder: Any) -> None:
        """Copy another cache in, whose tensors are this one's until it is `part`ed.

        Args:
            cache: of the same layers and rows, with no more tokens than there is room for.
            holder: whose `release` does that.

        Raises:
            ValueError: the number of rows is another.
        """
        mine, theirs = self.lengths.tokens, cache.lengths.tokens
        assert mine is not None
        assert theirs is not None
        if mine.shape != theirs.shape:
            raise ValueError(f"the cache has {theirs.shape[0]} rows, the call {mine.shape[0]}")
        mine.copy_(theirs)
        cache.lengths.tokens, cache.lengths.fixed, cache.holder = mine, True, holder
        for ours, layer in zip(self.layers, cache.layers, strict=True):
            for name in layer.TENSORS:
                t, taken = getattr(ours, name), getattr(layer, name)
                if t is None:
                    continue
                # Stores may have more room than the other, on either side.
                size = min(t.shape[1], taken.shape[1])
                t[:, :size].copy_(taken[:, :size])
                setattr(layer, name, t)

    def part(self) -> None:
        """Take copies of what a captured step holds, and be held no longer."""
        self.holder, self.lengths.fixed = None, False
        if self.lengths.tokens is not None:
            self.lengths.tokens = self.lengths.tokens.clone()
        for layer in self.layers:
            for name in layer.TENSORS:
                t = getattr(layer, name)
                if t is not None:
                    setattr(layer, name, t.clone())

    def forget(self) -> None:
        """Be new again, held by no captured step."""
        new = DeepseekV4Cache(self.config, self.cache_dtype, [layer.kind for layer in self.layers])
        self.holder, self.lengths, self.layers = None, new.lengths, new.layers

    def release(self) -> None:
        """Be held by no captured step."""
        if self.holder is not None:
            self.holder.release()

    def memory(self) -> int:
        """Bytes of all layers."""
        return sum(sum(layer.memory().values()) for layer in self.layers)
