"""Steps captured once as a device graph and replayed: one launch a token, or a step of a picture, instead of hundreds.

`@captured_decode` on a model's forward does it without the caller asking: a call with one new token a row and a
cache is replayed from a graph, everything else runs as written. A graph owns static buffers for its inputs and for
the cache's keys, values and states; the cache of the call is bound to them, and released (copied out) when another
cache needs the graph, when it outgrows it, or when it is changed in a way that a graph cannot follow.

`@captured_step` is for a method that is a function of tensors alone, such as a step of diffusion: from the second call
with tensors of the same shapes on it is replayed, its arguments copied into static buffers.

CUDA has `torch.cuda.CUDAGraph`; XPU is used where the installed torch has `torch.xpu.XPUGraph`. Where a step is not
captured, `explain()` says why.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from xpu_ports.common import dispatch
from xpu_ports.common.kernels.rotary_insert import rotary_insert

SUBJECT = "decode step"
STEP = "step"
# Keys that a graph has room for beyond those it starts with, and the fewest that it is built for.
ROOM = 128
SMALLEST = 256
# Graphs kept for a model: each holds a cache's memory.
KEPT = 4
# The same of `captured_step`, each of which holds the memory of a whole step; and how many shapes are remembered.
KEPT_STEPS = 2
REMEMBERED = 16
# Back ends of torch.distributed whose collectives a graph may hold.
CAPTURED_COLLECTIVES = ("nccl",)
_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "return_dict"}

_enabled: contextvars.ContextVar[bool] = contextvars.ContextVar("graphs_enabled", default=True)


@contextlib.contextmanager
def use_graphs(enabled: bool) -> Iterator[None]:
    """Turn the capture of steps off, or on again, inside a `with` block."""
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


_borrowed: contextvars.ContextVar[bool] = contextvars.ContextVar("logits_borrowed", default=False)


@contextlib.contextmanager
def borrowed_logits() -> Iterator[None]:
    """Inside the block captured steps return their own buffer, good until the next step, instead of a copy."""
    token = _borrowed.set(True)
    try:
        yield
    finally:
        _borrowed.reset(token)


def enabled() -> bool:
    """Whether steps may be captured here: not inside `use_graphs(False)`."""
    return _enabled.get()


def graph_class(device: torch.device) -> type | None:
    """The device's graph class, or None where this torch has none."""
    if device.type == "cuda":
        return torch.cuda.CUDAGraph
    if device.type == "xpu":
        return getattr(torch.xpu, "XPUGraph", None)
    return None


def capture(device: torch.device, step: Callable[[], Tensor], warm: bool = False) -> tuple[Callable[[], None], Tensor]:
    """Run `step` until it is warm, unless it is, then capture it.

    Returns:
        (replay, output): a call of `replay()` runs the step again and leaves its result in `output`.
    """
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for _ in range(0 if warm else 2):
            step()
    module.current_stream(device).wait_stream(stream)
    graph = graph_class(device)()  # type: ignore[misc]
    with module.graph(graph):
        output = step()
    return graph.replay, output


class Length:
    """How many tokens a bound cache holds: on the host, and on the device, [1], for the captured step."""

    def __init__(self, device: Tensor) -> None:
        self.host = 0
        self.device = device


class _Bound:
    """What bound layers share. Changes that a captured step cannot follow release the cache first."""

    binding: DecodeGraph
    index: int

    def _plain(self) -> Any:
        self.binding.release()
        return self.binding.released[self.index]


class BoundStates(_Bound, LinearAttentionLayer):
    """A recurrent layer whose states live in a graph's buffers."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for state in states.values():
                if state is not None:
                    state.copy_(state.index_select(0, beam_idx.to(state.device)))

    def reset(self) -> None:
        self._plain().reset()

    def crop(self, tokens_to_remove: int) -> None:
        self._plain().crop(tokens_to_remove)

    def offload(self) -> None:
        self._plain().offload()

    def activate_past_recording(self) -> None:
        self._plain().activate_past_recording()


class BoundAttention(_Bound, DynamicLayer):
    """An attention layer whose keys and values live in a graph's buffers, [B, H, capacity, K] each."""

    all_keys: Tensor
    all_values: Tensor
    length: Length
    dtype: torch.dtype

    # What the base class keeps as attributes are views here, of the length that the buffers hold now.
    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        return self.all_keys[:, :, : self.length.host]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.all_values[:, :, : self.length.host]

    # The base class's constructor clears what it takes for plain attributes.
    @keys.setter  # type: ignore[no-redef, attr-defined]
    def keys(self, value: None) -> None:
        assert value is None

    @values.setter  # type: ignore[no-redef, attr-defined]
    def values(self, value: None) -> None:
        assert value is None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.binding.stepping:
            return self._plain().update(key_states, value_states, *args, **kwargs)
        self.all_keys.index_copy_(2, self.length.device, key_states)
        self.all_values.index_copy_(2, self.length.device, value_states)
        return self.all_keys, self.all_values

    def update_rotated(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """`rotary_embedding` of q and k, then `update`, in a captured step and in one launch.

        Args:
            q, k, v: [B, 1, H, K].
            cos, sin: [B or 1, 1, K / 2].

        Returns:
            q [B, H, 1, K], and all keys and values.
        """
        q = rotary_insert(q, k, v, cos, sin, self.length.device, self.all_keys, self.all_values)
        return q.transpose(1, 2), self.all_keys, self.all_values

    def get_seq_length(self) -> int:
        return self.length.host

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length.host + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for kept in (self.keys, self.values):
            kept.copy_(kept.index_select(0, beam_idx.to(kept.device)))

    def reset(self) -> None:
        self._plain().reset()

    def crop(self, tokens_to_remove: int) -> None:
        self._plain().crop(tokens_to_remove)

    def offload(self) -> None:
        self._plain().offload()

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._plain().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._plain().batch_select_indices(indices)


class BoundAttentionAndStates(  # type: ignore[misc, override]
    BoundAttention, BoundStates, LinearAttentionAndFullAttentionLayer
):
    """A layer with both."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        BoundStates.reorder_cache(self, beam_idx)
        BoundAttention.reorder_cache(self, beam_idx)


def stepping_layer(cache: Cache | None, index: int) -> BoundAttention | None:
    """A layer of a cache, where a captured step is under way on it and it has keys and values."""
    layer = cache.layers[index] if cache is not None and index < len(cache.layers) else None
    return layer if isinstance(layer, BoundAttention) and layer.binding.stepping else None


BOUND: dict[type, type[_Bound]] = {
    LinearAttentionLayer: BoundStates,
    DynamicLayer: BoundAttention,
    LinearAttentionAndFullAttentionLayer: BoundAttentionAndStates,
}


class CacheGraph:
    """One captured decode step: for a model, a batch size and room for `capacity` tokens of a cache of one class."""

    def __init__(self, forward: Callable[..., Any], model: Any, cache: Any, batch: int, capacity: int) -> None:
        """Build buffers like `cache`'s and capture the step on them; `cache` itself is only read."""
        self.model = weakref.ref(model)
        self.capacity = capacity
        self.bound: weakref.ref[Any] | None = None
        self.fingerprint = fingerprint(model)
        with torch.inference_mode(False), torch.no_grad():
            self.input_ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
            self._allocate(model, cache)
            self.replay, self.logits = capture(model.device, lambda: self._step(forward, model))

    @staticmethod
    def refuses(model: Any, cache: Any) -> str | None:
        """Why steps of this model on this cache cannot be captured by this class, or None."""
        raise NotImplementedError

    @staticmethod
    def holder(cache: Any) -> CacheGraph | None:
        """The graph that a cache is bound to, if any."""
        raise NotImplementedError

    @staticmethod
    def kind(cache: Any) -> tuple:
        """What of a cache a graph is made for, beside its batch size and its length."""
        return ()

    def _allocate(self, model: Any, cache: Any) -> None:
        raise NotImplementedError

    def _step(self, forward: Callable[..., Any], model: Any) -> Tensor:
        """The work of one token, on the buffers alone; gives the logits."""
        raise NotImplementedError

    def run(self, cache: Any, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        """One step of `cache`, which has room here; binds it first if it is not bound.

        Args:
            mask: [B, tokens] or None, nonzero where a token counts.
            position_ids: [B, 1]; counted on from the step before, or from the mask or the cache, where None.

        Returns:
            The logits, [B, 1, vocabulary]: a copy, or inside `borrowed_logits()` what the next step overwrites.
        """
        raise NotImplementedError

    def bind(self, cache: Any) -> None:
        """Copy a cache into the buffers and make it a view of them; the one bound before is copied out."""
        raise NotImplementedError

    def release(self) -> None:
        """Give the bound cache, if it is still alive, copies of what the buffers hold."""
        raise NotImplementedError

    def lent(self) -> Tensor:
        """The logits of the step before, as `run` gives them."""
        return self.logits if _borrowed.get() else self.logits.clone()


class DecodeGraph(CacheGraph):
    """Steps on transformers' `DynamicCache`."""

    @staticmethod
    def refuses(model: Any, cache: Any) -> str | None:
        if type(cache) is not DynamicCache or cache.offloading:
            return f"the cache is a {type(cache).__name__}"
        if any(type(layer) not in BOUND and not isinstance(layer, _Bound) for layer in cache.layers):
            return "the cache has layers of other kinds"
        if model.config._attn_implementation != "sdpa":
            return f"attention is {model.config._attn_implementation}"
        return None

    @staticmethod
    def holder(cache: Any) -> CacheGraph | None:
        return next((layer.binding for layer in cache.layers if isinstance(layer, _Bound)), None)

    def _allocate(self, model: Any, cache: Any) -> None:
        batch, device = self.input_ids.shape[0], model.device
        self.stepping = False
        # Whether the positions in the buffer are those of the next step already.
        self.counting = False
        self.released: list[Any] = []
        self._original: list[type] = []
        # Positions and length side by side: both grow by one a step.
        self._counts = torch.zeros(batch + 1, dtype=torch.long, device=device)
        self.position_ids, self.length = self._counts[:batch, None], Length(self._counts[batch:])
        # Which keys count, none behind the newest, and whether the new token does; the second where the caller said so.
        self.seen = torch.zeros(batch, self.capacity, dtype=torch.bool, device=device)
        self.new = torch.ones(batch, 1, dtype=torch.bool, device=device)
        self.new_is_told = False
        self.layers = [self._buffers(layer) for layer in cache.layers]
        self._cache = Cache(layers=list(self.layers))

    def _buffers(self, layer: Any) -> Any:
        """An empty bound layer with static buffers of the layer's shapes."""
        bound = BOUND[type(layer)]()
        bound.binding, bound.index = self, len(self._original)
        self._original.append(type(layer))
        if isinstance(bound, BoundStates):
            bound.device, bound.dtype = layer.device, layer.dtype
            for name in ("conv_states", "recurrent_states"):
                states = getattr(layer, name)
                setattr(bound, name, {i: None if s is None else torch.zeros_like(s) for i, s in states.items()})
            for name in ("conv_kernel_size", "has_previous_state", "is_conv_states_initialized"):
                setattr(bound, name, dict(getattr(layer, name)))
            bound.is_recurrent_states_initialized = dict(layer.is_recurrent_states_initialized)
        if isinstance(bound, BoundAttention):
            bound.length = self.length
            bound.is_initialized = True
            bound.dtype, bound.device = layer.keys.dtype, layer.keys.device
            bound.all_keys, bound.all_values = (
                torch.zeros(*t.shape[:2], self.capacity, t.shape[3], dtype=t.dtype, device=t.device)
                for t in (layer.keys, layer.values)
            )
        return bound

    def _step(self, forward: Callable[..., Any], model: Any) -> Tensor:
        self.seen.index_copy_(1, self.length.device, self.new)
        masks = {"full_attention": self.seen[:, None, None], "linear_attention": self.new}
        self.stepping = True
        try:
            outputs = forward(
                model,
                input_ids=self.input_ids,
                attention_mask=masks,
                position_ids=self.position_ids,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            self.stepping = False
        self._counts.add_(1)
        return outputs.logits

    def run(self, cache: Any, input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        if self.bound is None or self.bound() is not cache:
            self.bind(cache)
        self.input_ids.copy_(input_ids)
        self._tell(mask)
        if position_ids is not None:
            self.position_ids.copy_(position_ids)
        elif not self.counting:
            self.position_ids.copy_(self.length.device if mask is None else mask.long().sum(-1, keepdim=True) - 1)
        self.counting = position_ids is None
        self.replay()
        self.length.host += 1
        return self.lent()

    def _tell(self, mask: Tensor | None) -> None:
        """Take over what the caller says of tokens, the new one included; the others are as they were, or count."""
        length, was_told = self.length.host, self.new_is_told
        self.new_is_told = mask is not None and mask.shape[1] > length
        if mask is not None:
            mask = mask[:, : length + 1]
            self.seen[:, : mask.shape[1]].copy_(mask)
            if self.new_is_told:
                self.new.copy_(mask[:, length:])
        if was_told and not self.new_is_told:
            self.new.fill_(True)

    def bind(self, cache: Any) -> None:
        self.release()
        length = cache.get_seq_length()
        for bound, layer in zip(self.layers, cache.layers, strict=True):
            if isinstance(bound, BoundStates):
                for name in ("conv_states", "recurrent_states"):
                    for mine, theirs in zip(getattr(bound, name).values(), getattr(layer, name).values(), strict=True):
                        if mine is not None:
                            mine.copy_(theirs)
                bound.has_previous_state = dict(layer.has_previous_state)
            if isinstance(bound, BoundAttention):
                bound.all_keys[:, :, :length].copy_(layer.keys)
                bound.all_values[:, :, :length].copy_(layer.values)
        self.seen.fill_(False)
        self.seen[:, :length] = True
        self.length.host = length
        self.length.device.fill_(length)
        cache.layers[:] = self.layers
        self.bound = weakref.ref(cache)
        self.counting = False

    def release(self) -> None:
        cache = None if self.bound is None else self.bound()
        self.bound = None
        if cache is None:
            return
        self.released = [self._copy(bound) for bound in self.layers]
        cache.layers[:] = self.released

    def _copy(self, bound: Any) -> Any:
        layer = self._original[bound.index]()
        if isinstance(bound, BoundStates):
            for name in ("conv_states", "recurrent_states"):
                states = getattr(bound, name)
                setattr(layer, name, {i: None if s is None else s.clone() for i, s in states.items()})
            for name in ("conv_kernel_size", "has_previous_state", "is_conv_states_initialized"):
                setattr(layer, name, dict(getattr(bound, name)))
            layer.is_recurrent_states_initialized = dict(bound.is_recurrent_states_initialized)
            layer.device, layer.dtype = bound.device, bound.dtype
        if isinstance(bound, BoundAttention):
            layer.is_initialized = True
            layer.dtype, layer.device = bound.dtype, bound.device
            layer.keys, layer.values = bound.keys.clone(), bound.values.clone()
        return layer


def fingerprint(model: torch.nn.Module) -> tuple:
    """What a captured step bakes in: where the weights are and which modules stand around them."""
    return tuple(p.data_ptr() for p in model.parameters()), sum(1 for _ in model.modules())


def refuses(model: Any, hooks: bool) -> str | None:
    """Why this model's steps cannot be captured, whatever the cache is, or None.

    Args:
        hooks: also look for hooks on modules, which takes a walk over them.
    """
    if graph_class(model.device) is None:
        return f"this torch has no graphs on {model.device.type}"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1 or devices & {"cpu", "disk"}:
        return "the model is spread over devices"
    ranks = getattr(model, "_ranks", None)
    if ranks is not None and torch.distributed.get_backend(ranks) not in CAPTURED_COLLECTIVES:
        return f"layers are divided among ranks, and {torch.distributed.get_backend(ranks)} is not captured"
    if hooks and any(_has_hooks(m) for m in model.modules()):
        return "modules have hooks"
    return None


def _refuses_mask(mask: Any) -> str | None:
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return None
    return "the attention mask is not [batch, tokens]"


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # transformers' own, which record outputs that a captured step is not asked for.
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in hooks)


def captured_decode(forward: Callable[..., Any] | None = None, *, steps: type[CacheGraph] = DecodeGraph) -> Any:
    """Replay a model's forward from a graph when it gets one new token a row and a cache; see the module's text.

    With transformers' `DynamicCache` the forward takes transformers' arguments and, as `attention_mask`, also a
    mapping with "full_attention" (bool, [B, 1, 1, keys], True where a key counts) and "linear_attention" ([B, 1],
    nonzero where the token counts).

    Args:
        forward: the model's.
        steps: the class of its graphs, where the model has a cache of its own.
    """
    if forward is None:
        return functools.partial(captured_decode, steps=steps)

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_decode_step(self, args, kwargs):
            return forward(self, *args, **kwargs)
        graph = _graph_for(steps, forward, self, kwargs)
        if graph is None:
            return forward(self, *args, **kwargs)
        return _replay(graph, kwargs)

    return wrapper


def _is_decode_step(model: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether this call is one new token a row on a cache with a past, asking for logits alone."""
    input_ids, cache = kwargs.get("input_ids"), kwargs.get("cache")
    if args or cache is None or input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] != 1:
        return False
    if model.device.type == "cpu" and graph_class(model.device) is None:
        return False
    if model.training or torch.is_grad_enabled() or not _enabled.get():
        return False
    if any(v is not None and v is not False and k not in _ARGUMENTS for k, v in kwargs.items()):
        return False
    return kwargs.get("use_cache") is not False and isinstance(cache, Cache) and cache.get_seq_length() > 0


def _graph_for(
    steps: type[CacheGraph], forward: Callable[..., Any], model: Any, kwargs: dict[str, Any]
) -> CacheGraph | None:
    cache = kwargs["cache"]
    batch, length = kwargs["input_ids"].shape[0], cache.get_seq_length()
    graphs: OrderedDict[tuple, CacheGraph] = model.__dict__.setdefault("_decode_graphs", OrderedDict())
    reason = refuses(model, hooks=False) or steps.refuses(model, cache) or _refuses_mask(kwargs.get("attention_mask"))
    bound = steps.holder(cache)
    if reason is None and bound is not None and length < bound.capacity and bound.model() is model:
        key = (batch, bound.capacity, *steps.kind(cache), *circumstances(model))
        if graphs.get(key) is bound:
            device = bound.input_ids.device
            dispatch.record(SUBJECT, "graph", device, f"batch {batch}, {bound.capacity} keys")
            return bound
    if bound is not None:
        bound.release()
    # Hooks are not looked for while a cache is bound.
    reason = reason or refuses(model, hooks=True)
    if reason is not None:
        dispatch.record(SUBJECT, "eager", model.device.type, reason)
        return None
    capacity = max(SMALLEST, 1 << (length + ROOM - 1).bit_length())
    key = (batch, capacity, *steps.kind(cache), *circumstances(model))
    graph = kept(model, key, lambda: steps(forward, model, cache, batch, capacity))
    dispatch.record(SUBJECT, "graph", model.device.type, f"batch {batch}, {graph.capacity} keys")
    return graph


def kept(model: Any, key: tuple, build: Callable[[], Any]) -> Any:
    """A graph of the model's, built where there is none of this key or its weights have moved.

    Args:
        key: what the graph is made for, `circumstances` included.
        build: gives a graph, which has `fingerprint` and `release`.
    """
    graphs: OrderedDict[tuple, Any] = model.__dict__.setdefault("_decode_graphs", OrderedDict())
    graph = graphs.get(key)
    if graph is None or graph.fingerprint != fingerprint(model):
        for other in list(graphs.values()) if graph is not None else []:
            other.release()
        if graph is not None:
            # The weights moved: no graph of this model is right any more.
            graphs.clear()
        graph = graphs[key] = build()
    graphs.move_to_end(key)
    while len(graphs) > KEPT:
        graphs.popitem(last=False)[1].release()
    return graph


def circumstances(model: Any) -> tuple:
    """What else decides which code a step runs: it is captured once for each."""
    choices = tuple(sorted(dispatch.forced_choices().items()))
    return (model.config._attn_implementation, model.dtype, model.device, choices)


def _replay(graph: CacheGraph, kwargs: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    cache = kwargs["cache"]
    logits = graph.run(cache, kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids"))
    outputs = CausalLMOutputWithPast(logits=logits, cache=cache)
    return outputs if kwargs.get("return_dict") is not False else outputs.to_tuple()


# ----------------------------------------------------------------------------------------------- steps without a cache


class StepGraph:
    """One captured call of a method: for a model, tensors of these shapes, and everything else as it is."""

    def __init__(self, step: Callable[..., Tensor], model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        """Capture the call on copies of the tensors; such a call has been made before."""
        self.fingerprint = fingerprint(model)
        with torch.inference_mode(False), torch.no_grad():
            self.inputs = tuple(torch.empty_like(a).copy_(a) if isinstance(a, Tensor) else a for a in arguments)
            self.replay, self.output = capture(_device_of(arguments), lambda: step(model, *self.inputs), warm=True)

    def run(self, arguments: tuple[Any, ...]) -> Tensor:
        for mine, given in zip(self.inputs, arguments, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.replay()
        return self.output.clone()


class _Steps:
    """The graphs of a model's step, and what it has been called with, latest last."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[tuple, StepGraph] = OrderedDict()
        self.seen: OrderedDict[tuple, None] = OrderedDict()


_STEPS: weakref.WeakKeyDictionary[torch.nn.Module, _Steps] = weakref.WeakKeyDictionary()


def captured_step(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Replay a model's method from a graph when it is called with tensors of shapes that it had before.

    The method takes tensors on one device and what can be hashed, by position, and gives a tensor; for equal shapes it
    runs the same code, and it waits for nothing. The first call with its shapes runs as written, since it may be the
    only one. A graph is captured anew when weights have moved. Only where no gradients are kept, and not on a CPU.
    """

    @functools.wraps(step)
    def wrapper(self: Any, *arguments: Any) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _enabled.get():
            return step(self, *arguments)
        device = _device_of(arguments)
        if device.type == "cpu" and graph_class(device) is None:
            return step(self, *arguments)
        reason = refuses_step(self, device)
        graph = _step_graph(step, self, arguments) if reason is None else None
        if graph is None:
            dispatch.record(STEP, "eager", device.type, reason or "the first call with these shapes")
            return step(self, *arguments)
        dispatch.record(STEP, "graph", device.type, "the shapes repeat")
        return graph.run(arguments)

    return wrapper


def _device_of(arguments: tuple[Any, ...]) -> torch.device:
    return next(a.device for a in arguments if isinstance(a, Tensor))


def refuses_step(model: torch.nn.Module, device: torch.device) -> str | None:
    """Why calls of this model cannot be captured, or None."""
    if graph_class(device) is None:
        return f"this torch has no graphs on {device.type}"
    if _is_capturing(device):
        return "a graph is being captured around it"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if getattr(model, "peft_config", None):
        # Their scale is a number in Python, which a graph would keep.
        return "adapters are loaded"
    for module in model.modules():
        # accelerate and diffusers put their hooks in place of a module's forward.
        if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
            return "modules have hooks"
        if module._compiled_call_impl is not None:
            return "modules are compiled"
    return None


def _is_capturing(device: torch.device) -> bool:
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def _step_graph(step: Callable[..., Tensor], model: torch.nn.Module, arguments: tuple[Any, ...]) -> StepGraph | None:
    """The graph for such a call; None for the first one."""
    steps = _STEPS.setdefault(model, _Steps())
    like = tuple((a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in arguments)
    key = step, like, tuple(sorted(dispatch.forced_choices().items()))
    graph = steps.graphs.get(key)
    if graph is not None and graph.fingerprint != fingerprint(model):
        # The weights moved: no graph of this model is right any more.
        steps.graphs.clear()
        graph = None
    elif graph is None and key in steps.seen:
        while len(steps.graphs) >= KEPT_STEPS:
            steps.graphs.popitem(last=False)
        graph = steps.graphs[key] = StepGraph(step, model, arguments)
    if graph is not None:
        steps.graphs.move_to_end(key)
    steps.seen[key] = None
    steps.seen.move_to_end(key)
    while len(steps.seen) > REMEMBERED:
        steps.seen.popitem(last=False)
    return graph
