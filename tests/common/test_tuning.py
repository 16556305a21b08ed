"""Tables of tuned launches: when they go before a rule, when they are refused and what is said then."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from xpu_ports.common import dispatch, tritonlib, tuning
from xpu_ports.common.device import ARCHITECTURES, Architecture, use_architecture
from xpu_ports.common.kernels.rms_norm import rms_norm
from xpu_ports.common.tuning import Entry, Table, TableError, Tunable

XE2 = ARCHITECTURES["xe2"]
B580 = "Intel(R) Arc(TM) B580 Graphics"


class Cut(NamedTuple):
    block: int
    warps: int
    dot: bool


def rule(arch: Architecture, N: int, dtype: torch.dtype, fused: str = "", few: bool = False) -> Cut:
    return Cut(N, 1, False)


def candidates(arch: Architecture, N: int, dtype: torch.dtype, fused: str = "", few: bool = False) -> Iterator[Cut]:
    return (Cut(block, warps, dot) for block in (N, 2 * N) for warps in (1, 4) for dot in (False, True))


SIZES = {"N": 64, "dtype": "bfloat16", "fused": "norm", "few": False}
TILE = {"block": 128, "warps": 4, "dot": True}
ENTRY = {"kernel": "k", "sizes": SIZES, "tile": TILE, "measured": {"k N64": [3.0, 2.5]}}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tunable[Cut]]:
    """The only kernel there is, on a machine with a B580 and no table."""
    monkeypatch.setattr(tuning, "TUNABLES", {})
    monkeypatch.setattr(tuning, "device_names", lambda name: {B580} if name == "xe2" else set())
    monkeypatch.setattr(tuning, "load_ops", lambda: None)
    monkeypatch.delenv(tuning.ENVIRONMENT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuning.forget()
    dispatch.reset_explain()
    yield Tunable("k", rule, candidates)
    monkeypatch.undo()
    tuning.forget()
    dispatch.reset_explain()


def value(**changes: Any) -> dict[str, Any]:
    """What a table's file holds, with fields changed."""
    made_with = {"architecture": "xe2", "device": B580, "triton": tuning.triton_version()}
    return {"format": 1, **made_with, "entries": [ENTRY], **changes}


def put(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def ask(kernel: Tunable[Cut], arch: Architecture = XE2, **sizes: Any) -> Cut:
    asked = {**SIZES, "dtype": torch.bfloat16, **sizes}
    return kernel(arch, *asked.values())


def reasons() -> list[tuple[str, str]]:
    return [(d.backend, d.reason) for d in dispatch.explain(show=False) if d.op == "tuning"]


def test_without_a_table_the_rule(kernel: Tunable[Cut]) -> None:
    assert ask(kernel) == Cut(64, 1, False)
    assert reasons() == []


def test_a_table_goes_before_the_rule(kernel: Tunable[Cut]) -> None:
    path = put(tuning.default_path("xe2"), value())
    assert ask(kernel) == Cut(128, 4, True)
    assert reasons() == [("table", f"1 tiles of {path}")]
    assert tuning.check("xe2") == f"1 tiles of {path}"


@pytest.mark.parametrize("other", [{"N": 128}, {"dtype": torch.float16}, {"fused": ""}, {"few": True}], ids=str)
def test_other_sizes_go_by_the_rule(kernel: Tunable[Cut], other: dict[str, Any]) -> None:
    put(tuning.default_path("xe2"), value())
    assert ask(kernel, **other) == Cut(other.get("N", 64), 1, False)


def test_another_architecture_goes_by_the_rule(kernel: Tunable[Cut]) -> None:
    put(tuning.default_path("xe2"), value())
    assert ask(kernel, ARCHITECTURES["max"]) == Cut(64, 1, False)
    assert reasons() == []


def test_sizes_left_out_are_the_defaults(kernel: Tunable[Cut]) -> None:
    entry = {**ENTRY, "sizes": {**SIZES, "fused": ""}}
    put(tuning.default_path("xe2"), value(entries=[entry]))
    assert kernel(XE2, 64, torch.bfloat16) == Cut(128, 4, True)


def test_the_environment_names_another_file(
    kernel: Tunable[Cut], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(tuning.default_path("xe2"), value())
    mine = put(tmp_path / "mine.json", value(entries=[{**ENTRY, "tile": {**TILE, "warps": 1}}]))
    monkeypatch.setenv(tuning.ENVIRONMENT, str(mine))
    assert ask(kernel) == Cut(128, 1, True)


def test_the_environment_turns_tables_off(kernel: Tunable[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    put(tuning.default_path("xe2"), "not read")
    monkeypatch.setenv(tuning.ENVIRONMENT, "off")
    assert ask(kernel) == Cut(64, 1, False)
    assert tuning.check("xe2") is None


def test_a_launch_looks_once(kernel: Tunable[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    put(tuning.default_path("xe2"), value())
    first = [ask(kernel), ask(kernel, N=32)]

    def never(*args: Any) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(tuning, "read", never)
    monkeypatch.setattr(tuning, "_tuned", never)
    kernel.rule = never  # type: ignore[assignment]
    assert [ask(kernel), ask(kernel, N=32)] == first


# Content of a file -> words of the refusal.
BAD: dict[str, tuple[Any, str]] = {
    "json": ("{", "not a table of tuned launches"),
    "list": ([], "format is None, expected 1"),
    "format": (value(format=2), "format is 2, expected 1"),
    "field": (value(author="me"), "'author'"),
    "architecture": (value(architecture="max"), "made for the architecture 'max', not 'xe2'"),
    "triton": (value(triton="2.1"), "made with Triton 2.1, this is"),
    "device": (value(device="Arc A770"), f"made on 'Arc A770', here is '{B580}'"),
    "type": (value(device=3), "device is 3, expected str"),
    "entry": (value(entries=[{**ENTRY, "note": ""}]), "entry 0: has"),
    "measured": (value(entries=[{**ENTRY, "measured": {"a": [1.0]}}]), "expected two times each"),
    "size": (value(entries=[{**ENTRY, "sizes": {**SIZES, "T": 1}}]), "k, sizes: has"),
    "size-type": (value(entries=[{**ENTRY, "sizes": {**SIZES, "N": True}}]), "N is True, expected int"),
    "dtype": (value(entries=[{**ENTRY, "sizes": {**SIZES, "dtype": "bf16"}}]), "no dtype is named 'bf16'"),
    "tile": (value(entries=[{**ENTRY, "tile": {**TILE, "stages": 2}}]), "k, tile: has"),
    "tile-type": (value(entries=[{**ENTRY, "tile": {**TILE, "warps": 4.0}}]), "warps is 4.0, expected int"),
    "spills": (value(entries=[ENTRY, {**ENTRY, "tile": {**TILE, "warps": 2}}]), "entry 1, k: {'block': 128, 'warps'"),
}
BAD_PARAMETERS = pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)


@BAD_PARAMETERS
def test_a_bad_table_is_left_aside_with_the_reason(kernel: Tunable[Cut], content: Any, words: str) -> None:
    path = put(tuning.default_path("xe2"), content)
    assert ask(kernel) == ask(kernel) == Cut(64, 1, False)
    (reason,) = [reason for choice, reason in reasons() if choice == "built-in tiles"]
    assert reason.startswith(f"{path}: ")
    assert words in reason
    with pytest.raises(TableError) as refused:
        tuning.check("xe2")
    assert str(refused.value) == reason


@BAD_PARAMETERS
def test_a_bad_table_that_was_asked_for_is_an_error(
    kernel: Tunable[Cut], content: Any, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(tuning.ENVIRONMENT, str(put(tmp_path / "mine.json", content)))
    # Again at the next launch: not the rule after the first complaint.
    for _ in range(2):
        with pytest.raises(TableError) as refused:
            ask(kernel)
        assert words in str(refused.value)


def test_a_table_that_was_asked_for_has_to_be_there(kernel: Tunable[Cut], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.ENVIRONMENT, "no/such.json")
    with pytest.raises(TableError, match=r"such\.json: not a table"):
        ask(kernel)


def test_check_knows_the_kernels(kernel: Tunable[Cut]) -> None:
    put(tuning.default_path("xe2"), value(entries=[{**ENTRY, "kernel": "gone"}]))
    with pytest.raises(TableError, match="entry 0: no kernel is named 'gone'"):
        tuning.check("xe2")
    assert ask(kernel) == Cut(64, 1, False)


def test_written_as_read(kernel: Tunable[Cut], tmp_path: Path) -> None:
    entry = tuning.to_entry(kernel, (64, torch.float16, "norm", True), Cut(64, 4, False), {"k N64": (3.0, 2.5)})
    table = Table("xe2", B580, tuning.triton_version(), (entry,))
    path = tmp_path / "new" / "xe2.json"
    tuning.write(path, table)
    assert tuning.read(path) == table
    assert tuning.tiles(table, kernel, "") == {(64, torch.float16, "norm", True): Cut(64, 4, False)}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_table(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "xe2.json"
    old = Table("xe2", B580, "3.6", ())
    tuning.write(path, old)

    def full(*args: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(OSError, match="no space left"):
            tuning.write(path, Table("xe2", B580, "3.6", (Entry("k", {}, {}, {}),)))
    assert tuning.read(path) == old
    assert list(tmp_path.iterdir()) == [path]


def test_trying_and_rules_alone(kernel: Tunable[Cut]) -> None:
    put(tuning.default_path("xe2"), value())
    undone: list[None] = []
    kernel.dependents.append(lambda: undone.append(None))
    sizes = tuple({**SIZES, "dtype": torch.bfloat16}.values())
    with tuning.rules_alone():
        assert ask(kernel) == Cut(64, 1, False)
        with kernel.trying(XE2, sizes, Cut(64, 4, True)):
            assert len(undone) > 0
            assert ask(kernel) == Cut(64, 4, True)
            assert ask(kernel, N=32) == Cut(32, 1, False)
        assert ask(kernel) == Cut(64, 1, False)
    assert ask(kernel) == Cut(128, 4, True)
    assert kernel.seen() == [sizes]


def test_a_name_has_one_kernel(kernel: Tunable[Cut]) -> None:
    with pytest.raises(RuntimeError, match="'k' is registered twice"):
        Tunable("k", rule, candidates)


@pytest.mark.skipif(not tritonlib.INTERPRETED, reason="launches are looked at in Triton's interpreter")
def test_a_launch_takes_the_tile_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the file to the kernel, and right with it."""
    from xpu_ports.common.kernels.rms_norm import tile

    monkeypatch.setattr(tuning, "device_names", lambda name: {"cpu"})
    sizes = (64, False, True)
    chosen = tile.allowed(ARCHITECTURES["cpu"], sizes)[-1]
    assert chosen != tile.rule(ARCHITECTURES["cpu"], *sizes)
    entry = tuning.to_entry(tile, sizes, chosen, {})
    path = tmp_path / "cpu.json"
    tuning.write(path, Table("cpu", "cpu", tuning.triton_version(), (entry,)))
    monkeypatch.setenv(tuning.ENVIRONMENT, str(path))
    tuning.forget()
    launched = []
    call = tritonlib.Fixed.__call__
    monkeypatch.setattr(
        tritonlib.Fixed, "__call__", lambda self, *args: (launched.append(self.constants), call(self, *args))[1]
    )
    x = torch.randn(3, 64)
    try:
        with use_architecture("cpu"), dispatch.use_backend("triton"):
            y = rms_norm(x, None, 1e-6)
    finally:
        monkeypatch.undo()
        tuning.forget()
    assert [(c["BLOCK_M"], c["BLOCK_N"], c["num_warps"]) for c in launched] == [chosen]
    torch.testing.assert_close(y, rms_norm.reference(x, None, 1e-6))


# Kernel -> sizes to look at: of one, of none of a power of two, of models.
LOOKED_AT: dict[str, Callable[[], Iterator[tuple]]] = {
    "rms_norm": lambda: itertools.product((1, 100, 4096, 16384), (False, True), (False, True)),
    "gated_rms_norm": lambda: itertools.product((1, 128, 3584, 16384), (False, True)),
    "qk_norm_rope": lambda: itertools.product((1, 3, 24, 48), (64, 128, 256)),
    "ada_layer_norm": lambda: itertools.product((1, 100, 3072, 6144, 16384)),
    "decode_attention": lambda: itertools.product(
        (torch.float32, torch.bfloat16), (1, 3, 8), (1, 64, 160, 256), (64, 256)
    ),
    "selective_state_update": lambda: itertools.product((1, 256), (1, 112), (1, 60, 64), (1, 64, 128, 512)),
    "mamba2_decode_step": lambda: itertools.product((1, 256), (1, 112), (1, 60, 64), (1, 64, 128, 512)),
    "skinny_linear": lambda: itertools.product((1, 2, 4, 8), (1, 8512), (1, 257, 2048, 14336), (2, 4), ("", "norm")),
    "mamba2_decode_linear": lambda: itertools.product((1, 2, 4, 8), (1, 2048), (1, 257, 4096), (2, 4)),
    "mla_rope": lambda: itertools.product((1, 64, 128), (64, 128, 512)),
    "mhc_streams": lambda: itertools.product((1000, 4096, 7168), (False, True)),
    "mhc_dot": lambda: itertools.product((4, 24), (torch.float32, torch.bfloat16), ("few", "some", "many")),
    "mhc_post_products": lambda: itertools.product((4, 24), (torch.float32, torch.bfloat16), ("few", "some", "many")),
    "indexer_scores": lambda: itertools.product((1, 4096), (1, 64), (4, 128)),
}
# Of which other devices have one tile: on Intel GPUs the one that does not spill.
FIXED = {"mhc_dot", "mhc_post_products", "indexer_scores"}


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_what_kernels_propose(name: str, arch: Architecture) -> None:
    """The rule's tile first, few others, all of powers of two with at most 32 warps."""
    dispatch.load_ops()
    kernel = tuning.TUNABLES[name]
    most = 0
    for sizes in LOOKED_AT[name]():
        tiles = kernel.allowed(arch, sizes)
        assert tiles[0] == kernel.rule(arch, *sizes)
        for tile in tiles:
            # How many blocks are in flight is any number.
            fields = (field for field, kind in kernel.fields.items() if kind is int and field != "stages")
            numbers = [getattr(tile, field) for field in fields]
            assert all(n > 0 and n & (n - 1) == 0 for n in numbers), tile
            assert tile.warps <= 32
        most = max(most, len(tiles))
    assert 1 <= most <= 24
    assert most > 1 or (name in FIXED and arch.name != "nvidia")


def test_every_kernel_is_looked_at() -> None:
    dispatch.load_ops()
    assert set(tuning.TUNABLES) == {*LOOKED_AT}
