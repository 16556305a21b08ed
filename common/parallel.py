"""Tensor and expert parallelism: a model's layers divided among the ranks of a process group.

    torchrun --nproc-per-node 2 run.py        # with  from_pretrained(path, tp_plan="auto")

transformers makes the process group (XCCL, NCCL or Gloo), reads the arguments and loads; this module says which part of
a layer is a rank's. transformers' own styles keep parameters as DTensors with one placement for each dimension. That
does not say how a fused projection divides (z, x, B, C and dt of Mamba-2, each by other counts), what files hold in
parts, or where blocks of packed weights end, and kernels would have to unwrap each weight at each call. So here a
parameter is a plain tensor of the rank's own sizes, which ops read as they read a whole one, and `sharded.py` gives
transformers' loader views of the files that read a rank's pieces alone.

A model's plan is data: pattern of a module -> `Divided`, or why its layers are whole on each rank.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from xpu_ports.common.dispatch import record
from xpu_ports.common.kernels.skinny_linear import linear
from xpu_ports.common.modules import is_plain

SUBJECT = "tensor parallel"
# Packed weights: suffix of the parameter -> columns of the weight that one of its columns stands for, and columns
# between which a rank's part may not begin.
PACKED = {"_packed": 2, "_scale": 32}
BLOCK = 32


# ------------------------------------------------------------------------------------------------------- parts of sizes


@dataclass(frozen=True)
class Share:
    """A rank's part, `first` to `last`, of `count` things: heads, groups, experts, columns."""

    count: int
    first: int
    last: int

    @property
    def own(self) -> int:
        return self.last - self.first

    def of(self, width: int) -> Share:
        """The columns, where each of the things has so many."""
        return Share(self.count * width, self.first * width, self.last * width)


def share(count: int, rank: int, ranks: int) -> Share:
    """Parts that differ by one at most; none is empty where there are as many things as ranks."""
    return Share(count, rank * count // ranks, (rank + 1) * count // ranks)


def share_columns(count: int, config: Any, rank: int, ranks: int) -> Share:
    """A part of an MLP's columns: in a packed model whole blocks, where there are as many of them as ranks."""
    packed = getattr(config, "quantization_config", None) is not None
    if packed and count % BLOCK == 0 and count // BLOCK >= ranks:
        return share(count // BLOCK, rank, ranks).of(BLOCK)
    return share(count, rank, ranks)


class Grouped(NamedTuple):
    """A rank's part of heads that belong to groups, and how many ranks have heads of the same group."""

    heads: Share
    groups: Share
    ranks_of_group: int
    # The heads, counted within their group; all of them where it is not divided.
    inside: Share


def share_grouped(heads: int, groups: int, rank: int, ranks: int) -> Grouped | None:
    """Whole groups by rank, or heads of one group; None where ranks would have parts of several.

    Args:
        heads: a multiple of groups, in their order.
    """
    each = heads // groups
    if groups >= ranks:
        mine = share(groups, rank, ranks)
        return Grouped(mine.of(each), mine, 1, Share(each, 0, each))
    span = ranks // groups
    if ranks % groups or each < span:
        return None
    group, inside = rank // span, share(each, rank % span, span)
    own = Share(heads, group * each + inside.first, group * each + inside.last)
    return Grouped(own, Share(groups, group, group + 1), span, inside)


@dataclass(frozen=True)
class Cut:
    """A rank's part of a weight: by dimension, what it has of each of the pieces that stand one after another."""

    dims: Mapping[int, tuple[Share, ...]]


def rows(*shares: Share) -> Cut:
    """Of a layer's outputs, and of its bias; also of a vector."""
    return Cut({0: shares})


def columns(*shares: Share) -> Cut:
    """Of a layer's inputs: what it gives has to be summed over ranks, and its bias is rank 0's alone."""
    return Cut({1: shares})


@dataclass(frozen=True)
class Divided:
    """How one kind of module is divided.

    Args:
        cuts: layer or parameter below the module -> the rank's part of it; "" is the module itself.
        sizes: attributes of the module, or of one below it, that count what it has.
        output: what has to be done to what comes out: "sum" over ranks, "gather" columns, or "lookup" of tokens.
        at: the layer below the module whose output that is; the module's own where it is "".
        experts: the rank's, of the module's `experts`, which then get the indices of their own.
        span: how many ranks share a group of the module's `norm`.
    """

    cuts: Mapping[str, Cut]
    sizes: Mapping[str, int] = field(default_factory=dict)
    output: str = "sum"
    at: str = ""
    experts: Share | None = None
    span: int = 1


# A module's name without the base model's prefix, with `*` for numbers or with them, which goes first -> how it is
# divided, or why not.
Plan = Mapping[str, Divided | str]
# config, rank, ranks -> plan
Planner = Callable[[Any, int, int], Plan]


def vocabulary(config: Any, rank: int, ranks: int) -> dict[str, Divided | str]:
    """Embeddings and the head by tokens, which they may share."""
    tokens = share(config.vocab_size, rank, ranks)
    return {
        "embed_tokens": Divided({"": rows(tokens)}, output="lookup"),
        "lm_head": Divided({"": rows(tokens)}, output="gather"),
    }


# ---------------------------------------------------------------------------------------------------- parts of tensors


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter."""

    # Of the whole.
    shape: tuple[int, ...]
    # Dimension -> pieces of it, from one index to another.
    pieces: Mapping[int, tuple[tuple[int, int], ...]]
    # A bias that another rank adds: zeros here.
    zero: bool = False

    @property
    def own(self) -> tuple[int, ...]:
        """The part's shape."""
        sizes = {dim: sum(b - a for a, b in pieces) for dim, pieces in self.pieces.items()}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(self.shape))


def part_of(name: str, shape: tuple[int, ...], cut: Cut, rank: int, ranks: int, per: int = 1) -> Part:
    """The part of a weight, or of a bias where the shape has one dimension.

    Args:
        name: the parameter's, for errors.
        shape: the whole's; of a packed parameter its own.
        cut: of the weight that it stands for.
        rank, ranks: whose.
        per: columns of the weight that one of the parameter's last dimension stands for.

    Raises:
        ValueError: the cut is not of this shape, or begins or ends inside a block of a packed weight.
    """
    if len(shape) == 1 and 0 not in cut.dims:
        return Part(shape, {}, zero=rank > 0)
    pieces = {}
    for dim, shares in cut.dims.items():
        if dim >= len(shape):
            continue
        unit = per if dim == len(shape) - 1 else 1
        found, expected = shape[dim] * unit, sum(s.count for s in shares)
        if found != expected:
            raise ValueError(f"{name} has {found} along dimension {dim}, the plan divides {expected}")
        if unit > 1 and any(s.first % BLOCK or s.last % BLOCK for s in shares):
            edge = next(edge for s in shares for edge in (s.first, s.last) if edge % BLOCK)
            raise ValueError(
                f"{name}: {found} columns on {ranks} ranks: rank {rank} ends or begins at column {edge}, inside a "
                f"block of {BLOCK}; ranks that divide {found // BLOCK} blocks work, and so does a dense weight"
            )
        at, mine = 0, []
        for s in shares:
            mine.append(((at + s.first) // unit, (at + s.last) // unit))
            at += s.count
        pieces[dim] = tuple(mine)
    return Part(shape, pieces)


# --------------------------------------------------------------------------------------------------- a model is divided


def divide(model: Any, planner: Planner, group: dist.ProcessGroup) -> None:
    """Make a model on the meta device this rank's, before its weights are loaded.

    Parameters get the sizes that are the rank's, modules count what they have, and outputs that are parts of sums are
    summed over ranks. `explain()` says what was divided, and what is whole on each rank and why. `model._ranks` is the
    group from here on, and `model._parts` says which part of each parameter this is.

    Args:
        model: changed in place; without gradients from here on.
        planner: says what is whose.
        group: the ranks, all of which call this.

    Raises:
        ValueError: the plan does not fit the model, or cuts a block of a packed weight.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    plan = planner(model.config, rank, ranks)
    spans = sorted({d.span for d in plan.values() if isinstance(d, Divided) and d.span > 1})
    groups = {span: _subgroup(group, span) for span in spans}
    model._ranks, model._parts = group, parts_of(model, plan, rank, ranks)
    # transformers asks it how many heads of keys a rank has, for caches of a fixed size.
    model._tp_plan = {
        f"{pattern}.{target}".rstrip("."): "colwise" if 0 in cut.dims else "rowwise"
        for pattern, how in plan.items()
        for target, cut in (how.cuts.items() if isinstance(how, Divided) else ())
    }
    made: dict[int, nn.Parameter] = {}
    for name, part in model._parts.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        old = model.get_parameter(name)
        new = nn.Parameter(torch.empty(part.own, dtype=old.dtype, device=old.device), requires_grad=False)
        # What was one parameter stays one.
        module._parameters[last] = made.setdefault(id(old), new)
    seen: set[int] = set()
    counts: dict[tuple[str, str], int] = {}
    for pattern, module in planned(model, plan):
        how = plan[pattern]
        choice, why = ("whole", how) if isinstance(how, str) else (f"1/{ranks}", _describe(how))
        said = choice, f"{replace_layer_number_by_wildcard(pattern)}: {why}"
        counts[said] = counts.get(said, 0) + 1
        if isinstance(how, Divided) and id(module) not in seen:
            seen.add(id(module))
            _install(module, how, group, groups)
    for (choice, why), count in counts.items():
        record(SUBJECT, choice, dist.get_backend(group), why, count)
    _same_random_numbers(group)


def parts_of(model: nn.Module, plan: Plan, rank: int, ranks: int) -> dict[str, Part]:
    """A rank's part of each parameter that is divided, by name, of a model that is whole or another rank's."""
    known: Mapping[str, Part] = getattr(model, "_parts", {})
    parts: dict[str, Part] = {}
    for name, pattern in _names(model, plan):
        how, module = plan[pattern], model.get_submodule(name)
        for target, cut in how.cuts.items() if isinstance(how, Divided) else ():
            found = [(f"{name}.{own}", per) for own, per in _parameters(module, target)]
            if not found and "*" not in target:
                raise ValueError(f"the plan divides {name}.{target}, which {type(model).__name__} does not have")
            for key, per in found:
                shape = known[key].shape if key in known else tuple(model.get_parameter(key).shape)
                parts[key] = part_of(key, shape, cut, rank, ranks, per)
    return parts


def _parameters(module: nn.Module, target: str) -> Iterator[tuple[str, int]]:
    """(name, columns that one of it stands for) of the parameters that a cut means by a layer or a parameter."""
    stems = {target, f"{target}.weight".lstrip("."), f"{target}.bias".lstrip(".")}
    for name, _ in module.named_parameters(remove_duplicate=False):
        for suffix, per in {"": 1, **PACKED}.items():
            if name.endswith(suffix) and replace_layer_number_by_wildcard(name.removesuffix(suffix)) in stems:
                yield name, per


def _names(model: nn.Module, plan: Plan) -> Iterator[tuple[str, str]]:
    """(name, pattern) of the modules that a plan names."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for name, _ in model.named_modules(remove_duplicate=False):
        own = name.removeprefix(base)
        for pattern in (own, replace_layer_number_by_wildcard(own)):
            if pattern in plan:
                yield name, pattern
                break


def planned(model: nn.Module, plan: Plan) -> Iterator[tuple[str, nn.Module]]:
    """(pattern, module) of what a plan names in a model."""
    for name, pattern in _names(model, plan):
        yield pattern, model.get_submodule(name)


def _describe(how: Divided) -> str:
    parts = {target: cut.dims for target, cut in how.cuts.items()}
    shares = next(iter(next(iter(parts.values())).values()))
    what = f"{next(iter(parts)) or 'weight'} {shares[0].first} to {shares[0].last} of {shares[0].count}"
    if how.experts is not None:
        what = f"experts {how.experts.first} to {how.experts.last} of {how.experts.count}"
    if how.span > 1:
        what += f", the norm's groups over {how.span} ranks"
    return what


def _install(module: nn.Module, how: Divided, group: dist.ProcessGroup, groups: Mapping[int, Any]) -> None:
    """What a module does differently on one of several ranks."""
    for path, size in how.sizes.items():
        owner, _, name = path.rpartition(".")
        owner_module = module.get_submodule(owner)
        if not hasattr(owner_module, name):
            raise ValueError(f"the plan sets {path}, which {type(module).__name__} does not have")
        setattr(owner_module, name, size)
    for name, layer in module.named_modules():
        cut = how.cuts.get(replace_layer_number_by_wildcard(name))
        for dim, count in ((0, "out_features"), (1, "in_features"), (0, "num_embeddings")):
            if cut is not None and hasattr(layer, count) and dim in cut.dims:
                setattr(layer, count, sum(s.own for s in cut.dims[dim]))
    if how.experts is not None:
        experts: Any = module.experts
        experts.forward = _of_own_experts(experts.forward, how.experts)
    if how.span > 1:
        norm: Any = module.norm
        [own] = how.cuts["norm"].dims[0]
        norm.share_groups(groups[how.span], own.count // (dist.get_world_size(group) // how.span))
    target = module.get_submodule(how.at)
    if how.output == "sum":
        run = _plain_forward(target) if isinstance(target, nn.Linear) else target.forward
        target.forward = summed(run, group)  # type: ignore[method-assign]
        return
    [tokens] = how.cuts[how.at].dims[0]
    if how.output == "gather":
        target.forward = _gathered(_plain_forward(target), tokens, group)  # type: ignore[method-assign]
    else:
        target.forward = _looked_up(target, tokens, group)  # type: ignore[method-assign]


def _subgroup(group: dist.ProcessGroup, span: int) -> dist.ProcessGroup:
    """The group of `span` neighbours that this rank is in; all ranks call this."""
    if span == dist.get_world_size(group):
        return group
    mine, _ = dist.new_subgroups(span)
    return mine


def _same_random_numbers(group: dist.ProcessGroup) -> None:
    """Let all ranks sample alike: each draws the next token for itself."""
    seeds = [torch.initial_seed()]
    dist.broadcast_object_list(seeds, group=group, group_src=0)
    torch.manual_seed(seeds[0])


# ---------------------------------------------------------------------------------------------- what runs between ranks


def summed(forward: Callable[..., Any], group: dist.ProcessGroup) -> Callable[..., Any]:
    """A forward whose output, or the first of several, is summed over ranks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return all_reduce(output[0], group), *output[1:]
        return all_reduce(output, group)

    return run


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, in x where that is contiguous.

    Raises:
        RuntimeError: a gradient would have to go through it, or another rank has ended.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("layers that are divided among ranks have no backward here; transformers' FSDP trains")
    x = x.contiguous()
    try:
        dist.all_reduce(x, group=group)
    except RuntimeError as error:
        raise _of_this_rank(error, group) from error
    return x


def _of_this_rank(error: RuntimeError, group: dist.ProcessGroup) -> RuntimeError:
    """A back end's error does not say whose it is, nor that the cause is elsewhere."""
    where = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
    return RuntimeError(f"{where}: another rank has ended, whose message says why, or is at another place: {error}")


def all_gather(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' columns side by side; x [..., its own of sizes] gives [..., sum(sizes)]."""
    most = max(sizes)
    mine = F.pad(x, (0, most - x.shape[-1])) if x.shape[-1] < most else x.contiguous()
    # One dimension: back ends differ in how they stack more.
    everything = torch.empty(len(sizes) * mine.numel(), dtype=x.dtype, device=x.device)
    # Its name before torch 2.13.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    try:
        gather(everything, mine.flatten(), group=group)
    except RuntimeError as error:
        raise _of_this_rank(error, group) from error
    everything = everything.view(len(sizes), *mine.shape)
    if min(sizes) == most:
        return everything.movedim(0, -2).flatten(-2)
    return torch.cat([t[..., :size] for t, size in zip(everything, sizes, strict=True)], dim=-1)


def _plain_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    """What `project` does with a layer, before its forward is another's."""
    return (lambda x: linear(x, layer.weight, layer.bias)) if is_plain(layer) else layer.forward


def _gathered(forward: Callable[[Tensor], Tensor], tokens: Share, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    ranks = dist.get_world_size(group)
    sizes = [share(tokens.count, rank, ranks).own for rank in range(ranks)]
    return lambda x: all_gather(forward(x), sizes, group)


def _looked_up(layer: Any, tokens: Share, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Embeddings of the rank's own tokens, zeros of the others', summed: exact in any dtype."""

    def run(ids: Tensor) -> Tensor:
        own = ids - tokens.first
        others = (own < 0) | (own >= tokens.own)
        x = F.embedding(own.masked_fill(others, 0), layer.weight)
        return all_reduce(x.masked_fill(others[..., None], 0), group)

    return run


def _of_own_experts(forward: Callable[..., Any], experts: Share) -> Callable[..., Any]:
    """Experts that get indices among all: those of other ranks become one past the last, which is none."""
    # By device, each expert's index among the rank's own: a lookup is one launch, comparing would be six.
    tables: dict[torch.device, Tensor] = {}

    def run(x: Tensor, indices: Tensor, weights: Tensor, *args: Any) -> Any:
        table = tables.get(indices.device)
        if table is None:
            own = torch.arange(experts.count) - experts.first
            own = own.where((own >= 0) & (own < experts.own), experts.own)
            table = tables[indices.device] = own.to(indices.device, indices.dtype)
        return forward(x, table[indices], weights, *args)

    return run


# ------------------------------------------------------------------------------------------------ back to whole tensors


def whole_tensors(
    model: Any, planner: Planner, state: Mapping[str, Tensor], group: dist.ProcessGroup, keep: bool
) -> dict[str, Tensor]:
    """A state dict with whole tensors on the CPU, as on one rank; all ranks call this.

    Args:
        model: divided by `divide`.
        planner: as there.
        state: the rank's own.
        group: as there.
        keep: False on ranks that need no result: they get an empty dict.
    """
    ranks = dist.get_world_size(group)
    plans = [parts_of(model, planner(model.config, rank, ranks), rank, ranks) for rank in range(ranks)]
    whole: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    for key, mine in state.items():
        # Tied tensors stay one tensor: `save_pretrained` writes them once.
        other = first.setdefault(mine.data_ptr(), key)
        if other != key:
            whole |= {key: whole[other]} if keep else {}
            continue
        if key not in model._parts:
            whole |= {key: mine.detach().cpu()} if keep else {}
            continue
        t = torch.empty(model._parts[key].shape, dtype=mine.dtype) if keep else None
        for rank in range(ranks):
            part = plans[rank][key]
            own = mine.detach().contiguous()
            if rank != dist.get_rank(group):
                own = torch.empty(part.own, dtype=mine.dtype, device=mine.device)
            dist.broadcast(own, group=group, group_src=rank)
            if t is not None and not part.zero:
                _place(t, part, own.cpu())
        if t is not None:
            whole[key] = t
    return whole


def _place(whole: Tensor, part: Part, own: Tensor) -> None:
    """Put a part where it is in the whole."""
    for at, source in blocks(part):
        whole[at] = own[source]


def blocks(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(where in the whole, where in the part) of the blocks that a part is made of."""
    grids: list[list[tuple[slice, slice]]] = []
    for dim, size in enumerate(part.shape):
        at, row = 0, []
        for a, b in part.pieces.get(dim, ((0, size),)):
            row.append((slice(a, b), slice(at, at + b - a)))
            at += b - a
        grids.append(row)
    for index in range(math.prod(len(row) for row in grids)):
        chosen = []
        for row in reversed(grids):
            index, i = divmod(index, len(row))
            chosen.append(row[i])
        chosen.reverse()
        yield tuple(c[0] for c in chosen), tuple(c[1] for c in chosen)
