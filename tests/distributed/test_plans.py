"""How sizes, weights and files are divided, without ranks: every number has a place, and none is read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.distributed.configuration_utils import DistributedConfig

from tests.distributed.test_parallel import CHECKPOINTS, TINY, UNEVEN
from tests.distributed.worker import model_class
from xpu_ports.common import graph
from xpu_ports.common.conversion import Fuse
from xpu_ports.common.modules import is_plain, project
from xpu_ports.common.parallel import (
    Cut,
    Divided,
    Part,
    Share,
    all_reduce,
    blocks,
    columns,
    part_of,
    parts_of,
    rows,
    share,
    share_columns,
    share_grouped,
)
from xpu_ports.common.sharded import opened, part_of_source
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.deepseek_v4 import layouts as v4_layouts
from xpu_ports.models.kimi_linear import layouts as kimi_layouts
from xpu_ports.models.zamba2 import Zamba2ForCausalLM, Zamba2Model
from xpu_ports.models.zamba2 import layouts as zamba2_layouts
from xpu_ports.quant.mxfp4.quantize import quantize_model


@pytest.mark.parametrize("count", [1, 7, 8, 320])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_all_of_it(count: int, ranks: int) -> None:
    parts = [share(count, rank, ranks) for rank in range(ranks)]
    assert [i for p in parts for i in range(p.first, p.last)] == list(range(count))
    assert max(p.own for p in parts) - min(p.own for p in parts) <= 1
    assert [p.of(3) for p in parts] == [Share(3 * count, 3 * p.first, 3 * p.last) for p in parts]


@pytest.mark.parametrize(
    ("heads", "groups", "ranks"), [(8, 1, 4), (10, 2, 4), (6, 3, 2), (8, 8, 4), (6, 2, 2), (5, 1, 3)]
)
def test_heads_stay_with_their_groups(heads: int, groups: int, ranks: int) -> None:
    parts = [share_grouped(heads, groups, rank, ranks) for rank in range(ranks)]
    assert [h for p in parts for h in range(p.heads.first, p.heads.last)] == list(range(heads))
    for p in parts:
        of_group = {h // (heads // groups) for h in range(p.heads.first, p.heads.last)}
        assert of_group == set(range(p.groups.first, p.groups.last))
        assert p.heads.own
        assert p.inside.own == p.heads.own // p.groups.own
        assert p.ranks_of_group == max(1, ranks // groups)


@pytest.mark.parametrize(("heads", "groups", "ranks"), [(6, 2, 3), (6, 3, 4), (2, 2, 4), (4, 1, 5)])
def test_heads_that_cannot_be_divided(heads: int, groups: int, ranks: int) -> None:
    assert all(share_grouped(heads, groups, rank, ranks) is None for rank in range(ranks))


class Packed:
    quantization_config = {"quant_method": "compressed-tensors"}


def test_columns_of_packed_weights_are_whole_blocks() -> None:
    assert share_columns(320, object(), 1, 4) == Share(320, 80, 160)
    assert share_columns(320, Packed, 1, 4) == Share(320, 64, 160)
    assert share_columns(320, Packed, 1, 16) == Share(320, 20, 40), "more ranks than blocks"


def test_a_block_is_not_divided() -> None:
    cut = columns(share(320, 1, 4))
    assert part_of("x.weight", (8, 320), cut, 1, 4).own == (8, 80)
    assert part_of("x.weight_packed", (8, 160), columns(Share(320, 64, 160)), 1, 4, 2).pieces == {1: ((32, 80),)}
    for name, width, per in (("x.weight_packed", 160, 2), ("x.weight_scale", 10, 32)):
        with pytest.raises(
            ValueError, match=rf"{name}: 320 columns on 4 ranks: rank 1 .* column 80, inside a block of 32"
        ):
            part_of(name, (8, width), cut, 1, 4, per)


def test_a_plan_of_another_size() -> None:
    with pytest.raises(ValueError, match="weight has 9 along dimension 0, the plan divides 8"):
        part_of("weight", (9, 4), rows(share(8, 0, 2)), 0, 2)


def test_blocks_of_a_part() -> None:
    part = Part((6, 4), {0: ((0, 1), (3, 5)), 1: ((2, 4),)})
    whole = torch.arange(24).view(6, 4)
    own = torch.full(part.own, -1)
    for at, place in blocks(part):
        own[place] = whole[at]
    assert torch.equal(own, whole[[0, 3, 4]][:, 2:4])


FUSES = {
    "one": (None, [(6, 4)]),
    "rows": (Fuse(("a", "b"), "c"), [(3, 4), (3, 4)]),
    "shares": (Fuse(("a", "b"), "c", shares=(2, 1)), [(4, 4), (2, 4)]),
    "columns": (Fuse(("a", "b"), "c", dim=1), [(6, 2), (6, 2)]),
}


@pytest.mark.parametrize(("rule", "shapes"), FUSES.values(), ids=FUSES)
def test_parts_of_what_is_joined(rule: Fuse | None, shapes: list[tuple[int, int]]) -> None:
    sources = [torch.randn(shape) for shape in shapes]
    whole = rule.join([[t] for t in sources]) if rule else sources[0]
    for pieces in ({0: ((1, 3), (4, 5))}, {1: ((0, 1), (2, 3))}, {0: ((0, 2), (4, 5)), 1: ((0, 1), (2, 3))}):
        part = Part(tuple(whole.shape), pieces)
        read: list[int] = []
        found = {str(i): part_of_source(part, rule, i, 0) for i in range(len(sources))}
        with opened({str(i): t for i, t in enumerate(sources)}, None, found, read) as views:
            mine = [views[str(i)][...] for i in range(len(sources))]
        expected = torch.empty(part.own)
        for at, own in blocks(part):
            expected[own] = whole[at]
        assert torch.equal(torch.cat(mine, rule.dim) if rule else mine[0], expected)
        assert sum(read) == 4 * expected.numel()


def test_experts_of_other_ranks_are_left_out() -> None:
    rule = Fuse(("{e}.w1", "{e}.w3"), "gate_up", dim=1, stack="e")
    part = Part((4, 6, 5), {0: ((1, 3),)})
    assert [part_of_source(part, rule, 1, e) for e in range(4)] == [None, Part((3, 5), {}), Part((3, 5), {}), None]


def meta(cls: Any, config: Any) -> Any:
    with torch.device("meta"):
        return cls(config)


MODELS = {
    **{
        name: lambda name=name: model_class(CHECKPOINTS / name).config_class.from_pretrained(CHECKPOINTS / name)
        for name in TINY
    },
    **{name: lambda name=name: UNEVEN[name][1](**UNEVEN[name][2]) for name in UNEVEN},
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_is_somewhere(name: str, ranks: int) -> None:
    cls = UNEVEN[name][0] if name in UNEVEN else model_class(CHECKPOINTS / name)
    config = MODELS[name]()
    model = meta(cls, config)
    found: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        plan = cls._parallel_plan(config, rank, ranks)
        for key, part in parts_of(model, plan, rank, ranks).items():
            count = found.setdefault(key, torch.zeros(part.shape, dtype=torch.uint8))
            for at, _ in blocks(part):
                count[at] += not part.zero
    assert found
    for key, count in found.items():
        # B and C of a group are with all ranks that have heads of it, as are a group's rows of o_b_proj.
        shared = ("in_proj", "conv1d", "o_a_proj", "o_b_proj")
        most = ranks if any(name in key for name in shared) else 1
        assert count.min() >= 1, key
        assert count.max() <= most, key


PUBLISHED = {
    "zamba2-1.2b": lambda: zamba2_layouts.layout_config("1.2b"),
    "zamba2-7b": lambda: zamba2_layouts.layout_config("7b"),
    "kimi-48b": lambda: kimi_layouts.layout_config("48b"),
    "v4-flash": lambda: v4_layouts.layout_config("flash"),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_divide(name: str, ranks: int) -> None:
    """All of their layers, and a rank's share is 1/ranks but for B, C and what heads share."""
    config = PUBLISHED[name]()
    cls = model_class(CHECKPOINTS / {"zamba2": TINY[0], "kimi": TINY[1], "v4": TINY[2]}[name.split("-")[0]])
    plan = cls._parallel_plan(config, ranks - 1, ranks)
    assert all(isinstance(how, Divided) for how in plan.values()), plan
    model = meta(cls, config)
    parts = parts_of(model, plan, ranks - 1, ranks)
    own = sum(torch.Size(p.own).numel() for p in parts.values())
    total = sum(p.numel() for p in model.parameters())
    assert own + total - sum(torch.Size(p.shape).numel() for p in parts.values()) < total / ranks * 1.25


def test_layers_with_another_forward_are_called() -> None:
    """Reading the weights of a layer that sums over ranks would leave out the sum."""
    layer = nn.Linear(2, 2, bias=False)
    assert is_plain(layer)
    layer.forward = lambda x: x + 1  # type: ignore[method-assign]
    assert not is_plain(layer)
    assert torch.equal(project(layer, torch.zeros(1, 2)), torch.ones(1, 2))


def test_a_stored_tensor_is_read_in_part(tmp_path: Path) -> None:
    path = CHECKPOINTS / TINY[0] / "model.safetensors"
    key = "model.layers.0.mamba.in_proj.weight"
    whole = load_file(path)[key]
    N, D = whole.shape
    part = part_of(key, (N, D), Cut({0: (share(N, 1, 2),)}), 1, 2)
    read: list[int] = []
    with opened(None, [str(path)], {key: part}, read) as views:
        assert views[key].get_shape() == [N - N // 2, D]
        assert views[key].get_dtype() == "BF16"
        assert torch.equal(views[key][...], whole[N // 2 :])
    assert sum(read) == 2 * (N - N // 2) * D


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise"}), "pass tp_plan='auto'"),
        (DistributedConfig(tp_size=2, fsdp_size=2), "not fsdp_size=2"),
        (DistributedConfig(tp_size=2, pp_size=2), "not pp_size=2"),
        (DistributedConfig(tp_size=2, fsdp_size=2, ep_size=4), "not fsdp_size=2"),
    ],
)
def test_other_kinds_of_parallelism(config: DistributedConfig, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Zamba2ForCausalLM.maybe_distribute_model(None, config, object())


def test_no_backward() -> None:
    with pytest.raises(RuntimeError, match="no backward"):
        all_reduce(torch.zeros(2, requires_grad=True), None)


def test_a_divided_model_is_not_packed_in_memory() -> None:
    model = meta(Zamba2ForCausalLM, MODELS["tiny-zamba2"]())
    model._parts = {"lm_head.weight": Part((2048, 128), {})}
    with pytest.raises(ValueError, match="convert the checkpoint"):
        quantize_model(model)


@pytest.mark.parametrize(("backend", "said"), [("nccl", None), ("xccl", "xccl is not captured")])
def test_which_collectives_are_captured(backend: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "graph_class", lambda device: object)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
    model = nn.Linear(2, 2)
    model.device, model._ranks = torch.device("cpu"), object()
    found = graph.refuses(model, hooks=False)
    assert found is None if said is None else said in found


def test_a_base_model_and_layers_that_guess() -> None:
    config = MODELS["tiny-zamba2"]()
    parts = parts_of(meta(Zamba2Model, config), Zamba2Model._parallel_plan(config, 0, 2), 0, 2)
    assert {"embed_tokens.weight", "layers.0.mamba.in_proj.weight"} <= parts.keys()
    config = MODELS["tiny-deepseek-v4"]()
    config.mtp = True
    parts = parts_of(meta(DeepseekV4ForCausalLM, config), DeepseekV4ForCausalLM._parallel_plan(config, 0, 2), 0, 2)
    assert {"mtp.0.self_attn.sinks", "mtp.0.mlp.experts.down_proj"} <= parts.keys()
