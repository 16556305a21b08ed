"""The documentation is true: every command that it names exists, and each that can run here runs.

A command that is new in a block, or anywhere in the README, goes into RUN or, with a reason, into NOT_RUN.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, SHELLS, Block, blocks, named_commands, options_of, pages, problems
from xpu_ports.cli.main import main
from xpu_ports.models.zamba2.layouts import layout_config

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
BLOCKS = [block for page, text in TEXTS.items() for block in blocks(page, text)]

ZAMBA2, KIMI, DEEPSEEK, FLUX2 = (
    f"checkpoints/tiny-{name}" for name in ("zamba2", "kimi-linear", "deepseek-v4", "flux2")
)
H200 = ROOT / "benchmarks" / "results" / "h200"
SMALL = "--window 64 --windows 2 --steps 2"
DRAWN = "--height 64 --width 64 --text-tokens 32 --steps 2"
ADAPTERS = "--ignore 're:.*adapter.*'"

# A command as it is written -> what runs here for it, with paths and names put in and sizes made small.
RUN: dict[str, list[str]] = {
    "xpu-ports doctor": ["xpu-ports doctor"],
    "xpu-ports generate CKPT PROMPT": [f"xpu-ports generate {ZAMBA2} 'And God said' --max-new-tokens 3"],
    "xpu-ports image CKPT PROMPT --out x.png": [f"xpu-ports image {FLUX2} 'a red three' --out x.png {DRAWN}"],
    "xpu-ports explain CKPT": [f"xpu-ports explain {KIMI}"],
    "xpu-ports accuracy CKPT": [f"xpu-ports accuracy {ZAMBA2} {SMALL}"],
    "xpu-ports plan CKPT --device b580": [f"xpu-ports plan {ZAMBA2} --device b580"],
    "xpu-ports warmup CKPT": [f"xpu-ports warmup {ZAMBA2}"],
    "xpu-ports convert SRC DST --to mxfp4": [f"xpu-ports convert {KIMI} packed --to mxfp4"],
    "xpu-ports bench ops [NAME...]": ["xpu-ports bench ops rms_norm --sizes T1-N64 --no-compile"],
    "xpu-ports bench compare A.jsonl B.jsonl": [f"xpu-ports bench compare {H200}/ops.jsonl {H200}/ops.jsonl"],
    "xpu-ports bench compare A.jsonl B.jsonl --threshold 2 --changed": [
        f"xpu-ports bench compare {H200}/flux2-dev.jsonl {H200}/flux2-dev.jsonl --threshold 2 --changed"
    ],
    "xpu-ports bench roofline benchmarks/results/h200/ops.jsonl --out docs/pictures/h200-roofline.png": [
        f"xpu-ports bench roofline {H200}/ops.jsonl --out roofline.png"
    ],
    "xpu-ports bench predict gated_rms_norm --device b580,max1550": [
        "xpu-ports bench predict gated_rms_norm --device b580,max1550"
    ],
    "xpu-ports bench predict gated_rms_norm --device b580,max1550 --measured benchmarks/results/h200/ops.jsonl": [
        f"xpu-ports bench predict gated_rms_norm --device b580,max1550 --measured {H200}/ops.jsonl"
    ],
    "xpu-ports bench predict --model zamba2 --layout 2.7b --device b580,b60,b70 --context 160"
    " --measured benchmarks/results/h200/model-zamba2-2.7b-b1.jsonl": [
        "xpu-ports bench predict --model zamba2 --layout 2.7b --device b580,b60,b70 --context 160"
        f" --measured {H200}/model-zamba2-2.7b-b1.jsonl"
    ],
    "xpu-ports bench predict --checkpoint checkpoints/tiny-kimi-linear --device b60 --batch 1,8": [
        f"xpu-ports bench predict --checkpoint {KIMI} --device b60 --batch 1,8"
    ],
    "xpu-ports bench predict --model flux2 --layout klein-4b --device b580"
    " --measured benchmarks/results/h200/flux2-klein-4b.jsonl": [
        f"xpu-ports bench predict --model flux2 --layout klein-4b --device b580 --measured {H200}/flux2-klein-4b.jsonl"
    ],
    "xpu-ports accuracy CKPT [--reference transformers|diffusers|reference-path] [--text FILE] [--dtype bfloat16]"
    " [--quant mxfp4] [--cache fp8] [--yardstick] [--per-layer] [--out DIR] [--json]": [
        f"xpu-ports accuracy {DEEPSEEK} --reference reference-path --text tests/data/heldout.txt --cache fp8 {SMALL}",
        f"xpu-ports accuracy {ZAMBA2} --dtype bfloat16 --quant mxfp4 --yardstick --per-layer --out out --json {SMALL}",
    ],
    "xpu-ports plan CKPT [--device b580] [--context 8192] [--batch 1] [--prefill 4096] [--json]": [
        f"xpu-ports plan {KIMI} --device b580 --context 8192 --batch 1 --prefill 4096 --json"
    ],
    "xpu-ports convert SRC DST --to mxfp4 [--activations mxfp4] [--scale-rule even|floor|rceil]"
    " [--ignore NAME|re:PATTERN]...": [
        f"xpu-ports convert {ZAMBA2} {rule} --to mxfp4 --activations mxfp4 --scale-rule {rule} {ADAPTERS}"
        for rule in ("even", "floor", "rceil")
    ],
    "xpu-ports convert SRC DST --to bf16": [
        f"xpu-ports convert {ZAMBA2} packed --to mxfp4 {ADAPTERS}",
        "xpu-ports convert packed dense --to bf16",
    ],
    **{
        f"xpu-ports convert SRC DST --to mxfp4 --part {i}/3 --jobs 8": [
            f"xpu-ports convert {KIMI} parts --to mxfp4 --part {i}/3 --jobs 1 --shard-size 0.0006"
        ]
        for i in (1, 2, 3)
    },
    "xpu-ports convert SRC DST --to mxfp4 --merge": [
        *(f"xpu-ports convert {KIMI} parts --to mxfp4 --part {i}/3 --shard-size 0.0006" for i in (1, 2, 3)),
        f"xpu-ports convert {KIMI} parts --to mxfp4 --merge --shard-size 0.0006",
    ],
    "xpu-ports convert SRC DST --layout hf|official": [
        f"xpu-ports convert {KIMI} hf --layout hf",
        "xpu-ports convert hf official --layout official",
    ],
    r"xpu-ports convert DeepSeek-V4-Flash DeepSeek-V4-Flash-packed --to mxfp4 --ignore 're:(?!.*\.experts).*'": [
        rf"xpu-ports convert {DEEPSEEK} packed --to mxfp4 --ignore 're:(?!.*\.experts).*'"
    ],
    "xpu-ports convert black-forest-labs--FLUX.2-klein-4B klein-mxfp4 --to mxfp4": [
        f"xpu-ports convert {FLUX2} packed --to mxfp4"
    ],
    "xpu-ports tune skinny_linear --dry-run": ["xpu-ports tune skinny_linear --dry-run"],
    "python -m xpu_ports.models.deepseek_v4.train_mtp CHECKPOINT --text FILE --steps N --out FOLDER": [
        f"python -m xpu_ports.models.deepseek_v4.train_mtp {DEEPSEEK} --text tests/data/heldout.txt --steps 1 --out out"
        " --batch 1 --window 32"
    ],
}

NETWORK = "fetches packages: CI does it in `make demo`, from the index that it has"
PROCESSES = "tests/distributed starts several processes"
A_GPU = "needs an Intel or NVIDIA GPU"
# A command as it is written -> why it does not run here.
NOT_RUN = {
    "make demo": "CI runs it before the tests",
    "make docs": "CI runs it before the tests",
    "make test": "is what runs this",
    "make xpu-check": "takes over ten minutes, and root for Intel's offline compiler",
    "make xpu-test": A_GPU,
    'make demo TORCH="torch==2.12.0"': "fetches another PyTorch",
    "python3 -m venv .venv": NETWORK,
    "pip install torch --index-url https://download.pytorch.org/whl/xpu": "fetches PyTorch for XPU",
    "pip install torch": "fetches PyTorch for CUDA",
    "pip install -e .": NETWORK,
    "pip install -e '.[flux2]'": NETWORK,
    "pip uninstall -y torch triton": "would take away what the tests run on",
    "xpu-ports bench model zamba2 --layout 1.2b": "2.4 GB of weights; the notebook `slow` runs it on a tiny model",
    "xpu-ports bench ops rms_norm chunk_kda --out results": "minutes on a CPU; smaller sizes run in tests/benchmarks",
    "xpu-ports bench model zamba2 --layout 1.2b --batch 1,32 --prompt 128 --new 128 --out results": A_GPU,
    "xpu-ports bench model kimi_linear --checkpoint CKPT --out results": "tests/cli/test_bench.py runs it",
    "xpu-ports bench model deepseek_v4 --layout flash-6-layers --batch 8 --mxfp4 --out results": A_GPU,
    "xpu-ports bench model flux2 --layout klein-4b --side 1024 --mxfp4 --out results": A_GPU,
    'torchrun --nproc-per-node 2 -m xpu_ports.cli generate CKPT "And God said"': PROCESSES,
    "torchrun --nproc-per-node 2 -m xpu_ports.cli accuracy CKPT": PROCESSES,
    "torchrun --nproc-per-node 2 -m xpu_ports.cli bench model kimi_linear --layout 48b": "needs two large GPUs",
    "xpu-ports tune": A_GPU,
    "xpu-ports tune --model zamba2 --layout 1.2b --batch 1,8": A_GPU,
    "python -m xpu_ports.models.deepseek_v4.train_mtp CHECKPOINT --text FILE --batch 64 --rate 3e-3 --seconds 45"
    " --device cuda --out FOLDER": A_GPU,
}

# Code that runs before a page's blocks.
BEFORE = {
    "docs/mxfp4.md": """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from xpu_ports.quant.mxfp4.quantize import quantize_model

def llama():
    sizes = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, head_dim=32)).bfloat16()

model = llama()
quantize_model(model, ignore=["lm_head"])
model.save_pretrained("path/or/name")
""",
    "models/deepseek_v4/README.md": """
from xpu_ports.models.deepseek_v4 import DeepseekV4Cache, DeepseekV4ForCausalLM

path = "checkpoints/tiny-deepseek-v4"
""",
}
# What a block says -> what runs instead.
INSTEAD = {
    "docs/mxfp4.md": ("quantize_model(model, activations", "model = llama()\nquantize_model(model, activations"),
    "models/flux2/README.md": ('.to("xpu")', '.to("cpu")'),
}
# Python that is not run, by its page and first line, and why.
PYTHON_NOT_RUN = {
    ("docs/patching.md", "import kernels"): "needs the library `kernels` in a version that transformers takes",
    ("docs/scaling.md", "import xpu_ports.models"): "is one of several processes: tests/distributed",
}
# A page whose Python is files of an op, which test_contributing.py puts where they belong.
FILES = "docs/contributing.md"

# Output that a page shows, by its first words -> the page whose Python, or the command that prints it, or why neither.
OUTPUT = {
    "layer runs on modules": "docs/patching.md",
    "1 x 16384 tokens kept": "xpu-ports plan zamba2-7b --device b580 --context 16384",
    **{
        f"{layout} of {model}": f"xpu-ports plan {name} --layout {layout} --device b60,b70,max1550,h200 --cards {cards}"
        for model, name, layout, cards in (
            ("zamba2", "zamba2", "7b", "1,2,4,8"),
            ("kimi_linear", "kimi_linear", "48b", "1,2,4,8"),
            ("deepseek_v4", "deepseek_v4", "flash", "1,2,4,8"),
            ("deepseek_v4", "deepseek_v4", "pro", "1,2,4,8"),
            ("flux2's transformer", "flux2", "dev", "1,2,4,8"),
        )
    },
    "beside transformers, bfloat16: layer 4": "of a planted fault: tests/common/compare/test_language.py looks for it",
}


def written() -> set[str]:
    """Commands that must run or be listed."""
    return {c for block in BLOCKS for c in block.commands} | set(named_commands(TEXTS["README.md"]))


def python() -> dict[str, list[str]]:
    """The Python of each page."""
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        left = block.page == FILES or (block.page, block.text.splitlines()[0]) in PYTHON_NOT_RUN
        if block.language == "python" and not left:
            found.setdefault(block.page, []).append(block.text)
    return found


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the repository's checkpoints and test data in their places."""
    for name in ("checkpoints", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------------------ commands


def test_there_is_something_to_check() -> None:
    assert len(written()) > 20
    assert {"README.md", "docs/mxfp4.md", "docs/patching.md", "models/flux2/README.md"} <= python().keys()


def test_every_command_runs_or_is_listed() -> None:
    known = {*RUN, *NOT_RUN}
    assert not written() - known, "new in the documentation: put them into RUN, or into NOT_RUN with a reason"
    assert not known - written(), "no longer in the documentation"
    assert not RUN.keys() & NOT_RUN.keys()


def test_ci_runs_what_it_is_said_to() -> None:
    ran = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"make demo", "make docs", "make test"} <= set(ran)


@pytest.mark.parametrize("page", TEXTS)
def test_commands_exist(page: str) -> None:
    named = [*(c for block in BLOCKS if block.page == page for c in block.commands), *named_commands(TEXTS[page])]
    found = {command: wrong for command in named if (wrong := problems(command))}
    assert not found


@pytest.mark.parametrize("command", RUN)
def test_runs(command: str, workspace: Path) -> None:
    for line in RUN[command]:
        program, *words = shlex.split(line)
        if program == "xpu-ports":
            assert main(words) == 0, line
        else:
            assert words[0] == "-m"
            assert importlib.import_module(words[1]).main(words[2:]) in (0, None), line


@pytest.mark.parametrize("command", RUN)
def test_what_runs_is_the_command(command: str) -> None:
    """With each of its options, and all of the choices of one."""
    assert all(line.split()[:2] == command.split()[:2] for line in RUN[command])
    assert options_of(command) <= {option for line in RUN[command] for option in options_of(line)}


# -------------------------------------------------------------------------------------------------- Python, and output


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str | None]]:
    """All Python of all pages, in a process that has seen nothing else."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    given = {}
    for page, codes in python().items():
        old, new = INSTEAD.get(page, ("", ""))
        assert any(old in code for code in codes), f"{page} no longer says {old}"
        given[page] = [BEFORE.get(page, ""), *(code.replace(old, new) if old else code for code in codes)]
    (folder / "blocks.json").write_text(json.dumps(given))
    command = [sys.executable, str(ROOT / "tests" / "docs" / "run_blocks.py"), "blocks.json", "out.json"]
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "XPU_PORTS_TUNING")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("page", python())
def test_python(page: str, ran: dict[str, dict[str, str | None]]) -> None:
    assert ran[page]["error"] is None, ran[page]["error"]


def outputs() -> list[Block]:
    """Blocks without a language that are no commands, and Python that does not run."""
    return [b for b in BLOCKS if b.language == "" and not b.commands]


def how(block: Block) -> str | None:
    first = " ".join(block.text.split())
    return next((made for words, made in OUTPUT.items() if first.startswith(words)), None)


def test_every_output_is_made_or_listed() -> None:
    assert not [b for b in BLOCKS if b.language in SHELLS and not b.commands], "not commands of PROGRAMS"
    assert not [block for block in outputs() if how(block) is None], "put them into OUTPUT, or say that they are python"
    assert len(outputs()) == len(OUTPUT)


def test_outputs_of_python(ran: dict[str, dict[str, str | None]]) -> None:
    compared = [block for block in outputs() if how(block) in TEXTS]
    assert compared
    for block in compared:
        assert block.text.strip() in (ran[str(how(block))]["out"] or ""), block.page


def test_outputs_of_commands(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout_config("7b").save_pretrained("zamba2-7b")
    compared = [block for block in outputs() if str(how(block)).startswith("xpu-ports ")]
    assert compared
    for block in compared:
        made = str(how(block))
        assert made in set(named_commands(TEXTS[block.page])), f"{block.page} does not say {made}"
        main(shlex.split(made)[1:])
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert block.text.strip() in printed, f"{block.page} does not show what {made} prints"


# ------------------------------------------------------------------------------------------------------------- planted


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("xpu-ports generat CKPT PROMPT", "no command 'generat'"),
        ("xpu-ports bench op rms_norm", "no command 'op'"),
        ("xpu-ports plan CKPT --cardboard b580", "no option --cardboard"),
        ("xpu-ports accuracy CKPT [--reference transformers|torch]", "--reference does not take torch"),
        ("xpu-ports convert SRC DST --to=fp4", "--to does not take fp4"),
        ("xpu-ports explain CKPT PROMPT", "2 arguments, of at most 1"),
        ("make demos", "no target demos"),
        ("make demo TORCH=1 tests", "no target tests"),
        ("python benchmarks/op.py rms_norm", "no file benchmarks/op.py"),
        ("python -m xpu_offline.lints", "no module xpu_offline.lints"),
        ("bash xpu_offline/checks.sh", "no file xpu_offline/checks.sh"),
    ],
)
def test_what_does_not_exist_is_seen(command: str, wrong: str) -> None:
    assert any(found.startswith(wrong) for found in problems(command))


@pytest.mark.parametrize(
    "command", ["xpu-ports bench ops [NAME...]", "xpu-ports convert A B [--ignore NAME|re:PATTERN]... --to mxfp4"]
)
def test_usage_is_understood(command: str) -> None:
    assert problems(command) == []


PAGE = """
```
xpu-ports plan CKPT
    --json  # a comment
.venv/bin/pip install -e .
```
and `not this`, but `make  demo`
```
make nothing of it
17 rows
```
```python
make = 1
```
"""


def test_blocks_are_read() -> None:
    shell, output, code = blocks("page.md", PAGE)
    assert shell.commands == ["xpu-ports plan CKPT --json", "pip install -e ."]
    assert output.commands == code.commands == []
    assert list(named_commands(PAGE)) == ["make demo"]
