"""`xpu-ports image`, on a CPU: the picture, what is printed, and what is refused before the work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny-flux2"
SMALL = ("--height", 64, "--width", 64, "--steps", 2, "--text-tokens", 32, "--device", "cpu")


@pytest.fixture
def drawn(cli, tmp_path):
    """Draws with options; gives the picture's pixels and what the command printed."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    from PIL import Image

    def draw(*options: object):
        out = tmp_path / "x.png"
        outcome = cli("image", TINY, "a red three", "--out", out, *SMALL, *options)
        assert outcome.code == 0, outcome.err
        with Image.open(out) as picture:
            return (picture.size, picture.tobytes()), outcome

    return draw


def test_draws(drawn) -> None:
    """The same for a seed, another one for another; other sizes; what ran it."""
    (size, pixels), outcome = drawn("--explain")
    assert size == (64, 64)
    assert len(set(pixels)) > 10
    assert outcome.out == ""
    assert "x.png: 64 x 64, 2 steps in" in outcome.err
    assert "qk_norm_rope" in outcome.err
    assert drawn()[0] == (size, pixels)
    assert drawn("--seed", 1)[0] != (size, pixels)
    assert drawn("--width", 32)[0][0] == (32, 64)


def test_json(drawn) -> None:
    _, outcome = drawn("--json", "--guidance", 1, "--dtype", "float32", "--backend", "reference")
    result = json.loads(outcome.out)
    assert (result["steps"], result["width"], result["height"], result["device"]) == (2, 64, 64, "cpu")
    assert (result["pipeline"], result["dtype"]) == ("Flux2KleinPipeline", "float32")
    # Six blocks, two steps, no negative prompt.
    assert {d["op"]: (d["calls"], d["reason"]) for d in result["explain"]}["qk_norm_rope"] == (12, "forced")
    assert result["parameters"] == json.loads((TINY / "training.json").read_text())["dit_params"]


def test_edits(drawn, tmp_path) -> None:
    from PIL import Image

    plain, _ = drawn()
    with Image.open(TINY / "sample.png") as sample:
        sample.crop((0, 0, 64, 64)).save(tmp_path / "reference.png")
    assert drawn("--image", tmp_path / "reference.png")[0] != plain


def test_mistakes(mistake, tmp_path) -> None:
    out = tmp_path / "x.png"
    assert "nowhere: no such folder" in mistake("image", "nowhere", "a", "--out", out)
    assert "there is no model_index.json" in mistake("image", TINY / "vae", "a", "--out", out)
    assert "expected a name that ends in .png" in mistake("image", TINY, "a", "--out", tmp_path / "x.gif")
    assert "no such folder" in mistake("image", TINY, "a", "--out", tmp_path / "y" / "x.png")
    assert "PROMPT is empty" in mistake("image", TINY, " ", "--out", out)
    assert "--image" in mistake("image", TINY, "a", "--out", out, "--image", tmp_path / "none.png")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert "'FluxPipeline', expected a pipeline of FLUX.2" in mistake("image", tmp_path, "a", "--out", out)
    (tmp_path / "model_index.json").write_text("{")
    assert "not JSON" in mistake("image", tmp_path, "a", "--out", out)
    assert not out.exists()


def test_mistakes_that_need_the_pipeline(mistake, tmp_path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    command = ("image", TINY, "a", "--out", tmp_path / "x.png", "--device", "cpu")
    assert "--height is 65, expected a multiple of 4" in mistake(*command, "--height", 65)
    assert "only the CPU" in mistake(*command, "--offload")


def test_without_diffusers(mistake, tmp_path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.startswith("xpu_ports.models.flux2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    error = mistake("image", TINY, "a", "--out", tmp_path / "x.png", "--device", "cpu")
    assert "pip install 'xpu-ports[flux2]'" in error
