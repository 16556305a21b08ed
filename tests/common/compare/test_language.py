"""`accuracy` of the tiny language models: within their bounds as they are, and outside with each planted fault."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xpu_ports.common.checkpoint import read_header
from xpu_ports.common.compare.decode import DECODE
from xpu_ports.common.compare.language import compare
from xpu_ports.common.compare.layers import LayerError, first_culprit, traced, watched
from xpu_ports.common.compare.report import Report, Section
from xpu_ports.common.compare.subject import Options, Subject
from xpu_ports.common.kernels.rms_norm import rms_norm
from xpu_ports.models.deepseek_v4.accuracy import SUBJECT as DEEPSEEK_V4
from xpu_ports.models.kimi_linear.accuracy import SUBJECT as KIMI_LINEAR
from xpu_ports.models.zamba2 import modeling_zamba2
from xpu_ports.models.zamba2.accuracy import SUBJECT as ZAMBA2

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
SUBJECTS = {"zamba2": ZAMBA2, "kimi-linear": KIMI_LINEAR, "deepseek-v4": DEEPSEEK_V4}


def options(name: str, dtype: torch.dtype | None = torch.float32, **more: Any) -> Options:
    """Little text, on the CPU."""
    given = dict(window=48, windows=1, steps=6) | more
    return Options(checkpoint=str(CHECKPOINTS / f"tiny-{name}"), device=torch.device("cpu"), dtype=dtype, **given)


class Planted:
    """A port with a fault in it."""

    def __init__(self, port: Any, plant: Callable[[Any], None]) -> None:
        self._port, self._plant = port, plant
        self.__name__, self.config_class = port.__name__, port.config_class

    @torch.no_grad()
    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        model = self._port.from_pretrained(*args, **kwargs)
        self._plant(model)
        return model


def planted(subject: Subject, plant: Callable[[Any], None]) -> Subject:
    return dataclasses.replace(subject, port=Planted(subject.port, plant))


def section(report: Report, title: str) -> Section:
    return next(s for s in report.sections if s.title.startswith(title))


def value(section: Section, figure: str) -> float:
    return next(check.value for check in section.checks if check.figure == figure)


def outside(report: Report) -> list[Any]:
    return [c for s in report.sections for c in (*s.checks, *s.layers) if not c.within]


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_tiny_checkpoints_are_within_their_bounds(name: str) -> None:
    """Zamba2 in the checkpoint's bf16, beside fp32 too; the others in fp32."""
    as_shipped = name == "zamba2"
    given = options(name, None, yardstick=True) if as_shipped else options(name)
    report = compare(SUBJECTS[name], given)
    assert report.within, outside(report)
    beside = section(report, "beside transformers")
    assert 5 < value(beside, "perplexity, reference") < 100
    if as_shipped:
        yardstick = section(report, "beside transformers, float32")
        assert 0 < value(yardstick, "KL to it, mean, port") < 1e-2
        assert 0.3 < value(yardstick, "KL to it, median, port over reference") <= 1.5
    else:
        assert value(beside, "same likeliest token") == 1
    layers = 6 if name == "deepseek-v4" else 8
    assert [layer.layer for layer in beside.layers] == list(range(layers))
    assert all(layer.so_far is not None and layer.kind for layer in beside.layers)
    assert len(beside.kl_by_position) == 48
    decode = section(report, DECODE)
    assert value(decode, "tokens") == 6
    assert len(decode.layers) == layers
    assert report.explain
    assert {line["device"] for line in report.explain} == {"cpu"}
    header = read_header(CHECKPOINTS / f"tiny-{name}" / "model.safetensors")
    guesses = [s for s in report.sections if "MTP" in s.title]
    assert len(guesses) == any(key.startswith("mtp.") for key in header)
    for found in guesses:
        assert 0 <= value(found, "accepted") <= 1
        assert value(found, "tokens that are those without guesses") == 1


@pytest.mark.parametrize("name", SUBJECTS)
@torch.no_grad()
def test_every_module_has_its_counterpart(name: str) -> None:
    """Of every layer the modules' inputs and outputs are the reference's, and most of them are compared."""
    subject, given = SUBJECTS[name], options(name)
    ids = torch.randint(3, 200, (1, 48))

    def load(cls: Any, changes: Any) -> Any:
        config = cls.config_class.from_pretrained(given.checkpoint)
        for field, setting in changes.items():
            setattr(config, field, setting)
        return cls.from_pretrained(given.checkpoint, config=config, dtype=torch.float32).eval()

    streams: dict[int, torch.Tensor] = {}
    theirs, ours = load(subject.reference, subject.reference_aligned), load(subject.port, subject.aligned)
    with contextlib.ExitStack() as stack:
        expected = [stack.enter_context(traced(layer)) for layer in subject.reference_layers.of(theirs)]
        stack.enter_context(watched(theirs, subject.reference_layers, lambda i, x, y: streams.update({i: x})))
        theirs(ids)
    with contextlib.ExitStack() as stack:
        got = [stack.enter_context(traced(layer)) for layer in subject.layers.of(ours)]
        give = lambda i, x: streams[i].clone()  # noqa: E731
        stack.enter_context(watched(ours, subject.layers, lambda *_: None, give))
        ours(ids)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        layer = LayerError(i, "", 1.0, 0.0, 1.0)
        assert first_culprit(layer, a, b, subject.names, 1e-5).module is None, i
        # With nothing allowed everything that is compared is off, so the first of them is found.
        assert first_culprit(layer, a, b, subject.names, -1.0).module is not None
        compared = sum(
            first_culprit(layer, a, [event], subject.names, -1.0).module is not None
            for event in b
            if sum(e.module == event.module and e.side == event.side for e in b) == 1
        )
        assert compared >= 0.5 * len(b), (i, compared, len(b))


# --------------------------------------------------------------------------------------------------------------- faults


def double_a_projection(model: Any) -> None:
    model.model.layers[4].mamba.out_proj.weight.mul_(2)


def norm_before_gate(model: Any) -> None:
    norm = model.model.layers[3].mamba.norm

    def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (norm.n_groups, norm.group_size))
        ones = torch.ones(norm.group_size)
        return rms_norm(groups, ones, norm.variance_epsilon).flatten(-2) * norm.weight * torch.nn.functional.silu(gate)

    norm.forward = forward


def forget_a_state(model: Any) -> None:
    """The fifth layer's state is not moved by a step."""
    attention = model.model.layers[4].self_attn
    step = attention.step

    def stale(qkv: Any, g: Any, beta: Any, conv_state: Any, state: torch.Tensor, mask: Any) -> torch.Tensor:
        kept = state.clone()
        out = step(qkv, g, beta, conv_state, state, mask)
        state.copy_(kept)
        return out

    attention.step = stale


def test_a_doubled_projection() -> None:
    """In the checkpoint's bf16."""
    report = compare(planted(ZAMBA2, double_a_projection), options("zamba2", None))
    assert not report.within
    beside = section(report, "beside transformers")
    assert [layer.within for layer in beside.layers] == [i != 4 for i in range(8)]
    culprit = beside.culprit
    assert culprit is not None
    assert (culprit.layer, culprit.module, culprit.side) == (4, "mamba.out_proj", "output")
    assert culprit.error == pytest.approx(1, rel=0.01)
    assert culprit.after == "mamba.norm"
    assert str(culprit).startswith("layer 4 (linear_attention): mamba.out_proj is off by 1")


def test_a_norm_before_its_gate() -> None:
    report = compare(planted(ZAMBA2, norm_before_gate), options("zamba2"))
    culprit = section(report, "beside transformers").culprit
    assert not report.within
    assert culprit is not None
    assert (culprit.layer, culprit.module, culprit.side) == (3, "mamba.norm", "output")


def test_positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the keys: what reaches the output's projection is off where all projections are right."""
    rotate = modeling_zamba2.rotary_embedding

    def shifted(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
        return rotate(q, k, cos, sin)[0], rotate(q, k, cos.roll(1, 1), sin.roll(1, 1))[1]

    monkeypatch.setattr(modeling_zamba2, "rotary_embedding", shifted)
    report = compare(ZAMBA2, options("zamba2"))
    beside = section(report, "beside transformers")
    assert not report.within
    assert [layer.layer for layer in beside.layers if not layer.within] == [2, 5]
    culprit = beside.culprit
    assert culprit is not None
    assert (culprit.layer, culprit.module, culprit.side) == (2, "shared_transformer.self_attn.o_proj", "input")
    assert "v_proj before it is right" in str(culprit) or "adapter" in str(culprit)


def test_a_swapped_nibble() -> None:
    """One byte of one packed weight, beside dense weights of the same values; the cost of packing hides it."""
    assert ZAMBA2.quantize is not None

    def quantize(model: Any) -> Any:
        packed = ZAMBA2.quantize(model).model.layers[1].mamba.in_proj.weight_packed  # type: ignore[misc]
        byte = packed[7, 3].item()
        assert byte & 15 != byte >> 4
        packed[7, 3] = (byte & 15) << 4 | byte >> 4
        return model

    subject = dataclasses.replace(ZAMBA2, quantize=quantize)
    report = compare(subject, options("zamba2", quant="mxfp4"))
    assert not report.within
    assert section(report, "beside transformers, float32, dense weights").first_outside is None
    beside = section(report, "beside dense weights of the same values")
    assert [layer.layer for layer in beside.layers if not layer.within] == [1]
    culprit = beside.culprit
    assert culprit is not None
    assert (culprit.layer, culprit.module, culprit.side) == (1, "mamba.in_proj", "output")


def test_a_stale_state() -> None:
    """Right in one forward, off in cached steps."""
    report = compare(planted(KIMI_LINEAR, forget_a_state), options("kimi-linear"))
    assert not report.within
    assert section(report, "beside transformers").within
    decode = section(report, DECODE)
    assert [layer.layer for layer in decode.layers if not layer.within] == [4]
    culprit = decode.culprit
    assert culprit is not None
    assert (culprit.layer, culprit.module, culprit.side) == (4, "self_attn.o_norm", "input")


# ------------------------------------------------------------------------------------------------------------- variants


def test_an_fp8_cache() -> None:
    report = compare(DEEPSEEK_V4, options("deepseek-v4", cache="fp8"))
    beside = section(report, "beside transformers, float32, dense cache")
    assert report.within, outside(report)
    assert value(beside, "KL, mean") > 1e-7


def test_the_port_beside_itself() -> None:
    report = compare(KIMI_LINEAR, options("kimi-linear", reference="reference-path"))
    assert report.within
    assert value(section(report, "beside the reference ops"), "logits, largest difference") == 0


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (dict(cache="fp8"), "Zamba2ForCausalLM has no such cache"),
        (dict(reference="diffusers"), "for pictures"),
        (dict(dtype=torch.float64), "states bounds for float32"),
        (dict(text=Path(__file__).with_name("nothing.txt")), "nothing.txt"),
    ],
    ids=["cache", "diffusers", "dtype", "text"],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(
    changed: dict, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = dataclasses.replace(
        ZAMBA2, reference=None, port=Planted(ZAMBA2.port, lambda model: pytest.fail("loaded"))
    )
    with pytest.raises((ValueError, OSError), match=why):
        compare(subject, dataclasses.replace(options("zamba2"), **changed))
