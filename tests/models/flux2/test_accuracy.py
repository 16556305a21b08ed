"""`accuracy` of FLUX.2: within its bounds as it is, and outside, the block named, with a fault in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")

from xpu_ports.common.compare.subject import Options
from xpu_ports.models.flux2 import accuracy

CHECKPOINT = str(Path(__file__).parents[3] / "checkpoints" / "tiny-flux2")


def options(**more: Any) -> Options:
    given = dict(dtype=torch.float32, side=64, draw_steps=2) | more
    return Options(checkpoint=CHECKPOINT, device=torch.device("cpu"), **given)


def test_within_bounds(tmp_path: Path) -> None:
    report = accuracy.compare(options(out=tmp_path))
    blocks, picture = report.sections
    assert report.within, [c for s in report.sections for c in (*s.checks, *s.layers) if not c.within]
    assert [layer.kind for layer in blocks.layers] == ["double"] * 2 + ["single"] * 4
    assert len(picture.latents_by_step) == 2
    [path] = report.pictures.values()
    from PIL import Image

    # Three pictures of 64 pixels, two gaps of 2, four times as large.
    assert Image.open(path).size == (4 * (3 * 64 + 2 * 2), 4 * 64)


def test_packed(tmp_path: Path) -> None:
    """Beside dense weights; a folder that is packed already, beside itself."""
    report = accuracy.compare(options(draw_steps=1, quant="mxfp4"))
    assert report.within
    assert all(layer.error > 0.01 for layer in report.sections[0].layers)
    pipe: Any = accuracy.load_pipeline(CHECKPOINT, dtype=torch.bfloat16)
    accuracy.quantize_transformer(pipe.transformer)
    pipe.save_pretrained(tmp_path)
    report = accuracy.compare(replace(options(draw_steps=1), checkpoint=str(tmp_path)))
    assert report.within
    assert "beside the reference ops" in report.sections[0].title
    assert all(layer.error == 0 for layer in report.sections[0].layers)


def test_a_doubled_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    load = accuracy.load_pipeline

    @torch.no_grad()
    def faulty(*args: Any, **kwargs: Any) -> Any:
        pipe: Any = load(*args, **kwargs)
        pipe.transformer.single_transformer_blocks[1].attn.to_out.weight.mul_(2)
        return pipe

    monkeypatch.setattr(accuracy, "load_pipeline", faulty)
    report = accuracy.compare(options(draw_steps=1))
    blocks, picture = report.sections
    assert not report.within
    assert [layer.layer for layer in blocks.layers if not layer.within] == [3]
    assert blocks.culprit is not None
    assert (blocks.culprit.layer, blocks.culprit.kind, blocks.culprit.module) == (3, "single", "attn.to_out")
    assert not picture.within
