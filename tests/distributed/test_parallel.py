"""Models on 2 and 4 ranks of Gloo beside the same model on one: logits, greedy text, bytes, files, errors.

One job of torchrun for each number of ranks runs all that is compared, since starting one costs more than most of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, KimiLinearConfig, Zamba2Config

from tests.distributed.launch import torchrun
from tests.distributed.worker import load, measure, model_class, of_random_weights
from tests.models.deepseek_v4.test_published import make as write_published
from xpu_ports.models.deepseek_v4 import DeepseekV4ForCausalLM
from xpu_ports.models.kimi_linear import KimiLinearForCausalLM
from xpu_ports.models.zamba2 import Zamba2ForCausalLM
from xpu_ports.quant.mxfp4.quantize import quantize_model

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
WORKER = Path(__file__).parent / "worker.py"
# Largest difference of logits in fp32: sums over ranks are in another order.
TO_ONE = 1e-4
TINY = ("tiny-zamba2", "tiny-kimi-linear", "tiny-deepseek-v4")
MXFP4 = tuple(f"{name}-mxfp4" for name in TINY)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15}
ZAMBA2 = {
    **SPECIAL, "vocab_size": 97, "hidden_size": 48, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3, "intermediate_size": 70, "mamba_d_state": 12, "mamba_expand": 2, "chunk_size": 16,
    "num_mem_blocks": 1, "adapter_rank": 4, "use_shared_attention_adapter": True, "use_mem_rope": True,
    "add_bias_linear": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
}  # fmt: skip
KIMI = {
    **SPECIAL, "vocab_size": 97, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
    "num_hidden_layers": 5, "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 6, "linear_head_dim": 8, "linear_num_heads": 5,
    "num_local_experts": 7, "num_experts_per_tok": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
}  # fmt: skip
V4 = {
    **SPECIAL, "vocab_size": 97, "hidden_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_key_value_heads": 1, "head_dim": 20, "q_lora_rank": 28, "qk_rope_head_dim": 8, "n_routed_experts": 7,
    "num_experts_per_tok": 3, "n_shared_experts": 1, "max_position_embeddings": 4096, "sliding_window": 12,
    "compress_ratios": [128, 4, 0, 0], "compress_rate_hca": 9, "num_hash_layers": 1, "hc_mult": 4,
    "o_lora_rank": 14, "index_n_heads": 8, "index_head_dim": 18, "index_topk": 6, "swiglu_limit": 0.4,
}  # fmt: skip
# Counts that ranks do and do not divide. With 2 and with 4 ranks:
UNEVEN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # groups by rank, and over two ranks with 2 and 3 heads of 5; heads of attention 1 and 2, and whole
    "zamba2-2-groups": (Zamba2ForCausalLM, Zamba2Config, {
        **ZAMBA2, "n_mamba_heads": 12, "mamba_ngroups": 2, "num_attention_heads": 3, "num_key_value_heads": 3}),
    # one group and two, and whole; keys that heads share
    "zamba2-3-groups": (Zamba2ForCausalLM, Zamba2Config, {
        **ZAMBA2, "n_mamba_heads": 6, "mamba_ngroups": 3, "num_attention_heads": 8, "num_key_value_heads": 4}),
    # heads 2 and 3, and 1, 1, 1, 2; of the other layers whole with 4; experts 3 and 4, and 1, 2, 2, 2
    "kimi-uneven": (KimiLinearForCausalLM, KimiLinearConfig, KIMI),
    # output groups 1 and 2, and whole
    "v4-3-groups": (DeepseekV4ForCausalLM, DeepseekV4Config, {**V4, "num_attention_heads": 6, "o_groups": 3}),
    # output groups by rank, and over two ranks with 1 and 2 heads
    "v4-2-groups": (DeepseekV4ForCausalLM, DeepseekV4Config, {**V4, "num_attention_heads": 6, "o_groups": 2}),
}  # fmt: skip
# Why a layer is whole on each rank, with so many of them.
WHOLE = {
    ("zamba2-2-groups", 4): "layers.*.shared_transformer.self_attn: num_key_value_heads = 3, fewer than 4 ranks",
    ("zamba2-3-groups", 4): "layers.*.mamba: n_mamba_heads = 6 in mamba_ngroups = 3 groups do not divide among 4 ranks",
    ("kimi-uneven", 4): "layers.*.self_attn: num_attention_heads = 3, fewer than 4 ranks",
    ("v4-3-groups", 4): "layers.*.self_attn: num_attention_heads = 6 in o_groups = 3 do not divide among 4 ranks",
}

# FP8 and FP4 in files, whose rows become dense as they are read.
PUBLISHED = "v4-published"
# Weights drawn by name: tied ones, biases, counts that ranks do not divide.
RANDOM = ("tiny-zamba2", "zamba2-2-groups", "kimi-uneven", "v4-2-groups")
# Few tokens where more would show nothing else.
NEW_TOKENS = {PUBLISHED: 8, "zamba2-3-groups": 8, "v4-3-groups": 8}

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a name, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def path(name: str) -> Path:
        if name in TINY:
            return CHECKPOINTS / name
        if name in UNEVEN:
            torch.manual_seed(0)
            model_type, config_type, values = UNEVEN[name]
            model = model_type(config_type(**values))
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    # So that a bias that is added by each rank shows.
                    torch.nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(folder / name)
        elif name in MXFP4:
            model = load(CHECKPOINTS / name.removesuffix("-mxfp4"))
            quantize_model(model, ignore=["re:.*adapter.*"]).save_pretrained(folder / name)
        elif name == PUBLISHED:
            (folder / name).mkdir()
            write_published(folder / name)
        return folder / name

    return path


@pytest.fixture(scope="module")
def alone(path_of: Callable[[str], Path]) -> Callable[[str], dict[str, Any]]:
    """What one process gives, and the bytes of its parameters."""

    # Small products: threads would wait for each other, more so where ranks of another test run beside them.
    threads = torch.get_num_threads()

    @cache
    def result(name: str) -> dict[str, Any]:
        torch.set_num_threads(1)
        model = load(path_of(name))
        shapes = {key: p.shape for key, p in model.named_parameters()}
        figures = measure(model, NEW_TOKENS.get(name, 100))
        torch.set_num_threads(threads)
        return {**figures, "shapes": shapes, "bytes": {key: p.nbytes for key, p in model.named_parameters()}}

    return result


def job(path_of: Callable[[str], Path], name: str) -> dict[str, Any]:
    return {"path": str(path_of(name)), "new_tokens": NEW_TOKENS.get(name, 100)}


def launched(ranks: int, jobs: dict[str, Any], folder: Path) -> dict[str, Results]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = torchrun(ranks, WORKER, folder / "jobs.json", folder)
    assert done.returncode == 0, done.stderr[-6000:]
    found = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    return {name: [results[name] for results in found] for name in jobs}


@pytest.fixture(scope="module")
def on_2(path_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    jobs = {name: job(path_of, name) for name in (*TINY, *MXFP4, *UNEVEN, PUBLISHED)}
    for name in ("tiny-zamba2", "kimi-uneven", "v4-2-groups"):
        jobs[name]["save"] = str(tmp_path_factory.mktemp("saved"))
    jobs["tiny-kimi-linear"]["sample"] = True
    for name in RANDOM:
        jobs[name]["random"] = True
    jobs["tiny-deepseek-v4"] |= {"load": {"mtp": True}, "draft": True}
    results = launched(2, jobs, tmp_path_factory.mktemp("ranks"))
    return {name: [{**r, "save": jobs[name].get("save")} for r in each] for name, each in results.items()}


@pytest.fixture(scope="module")
def on_4(path_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    jobs = {name: job(path_of, name) for name in UNEVEN}
    return launched(4, jobs, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def tiny_on_4(path_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    jobs = {name: job(path_of, name) for name in (*TINY, *MXFP4)}
    return launched(4, jobs, tmp_path_factory.mktemp("ranks"))


def same(ranks: Results, one: dict[str, Any]) -> None:
    """All ranks say the same as one process."""
    for result in ranks:
        assert "error" not in result, result
        for name in ("logits", "padded"):
            assert torch.equal(result[name], ranks[0][name]), f"ranks differ in {name}"
            largest = (result[name] - one[name]).abs().max().item()
            assert largest <= TO_ONE, f"{name} differ by {largest:.2e}"
        assert torch.equal(result["greedy"], one["greedy"])
        # It is no text of one token again and again.
        assert len(set(one["greedy"][0, 20:].tolist())) > 3


@pytest.mark.parametrize("name", [*TINY, *MXFP4, *UNEVEN, PUBLISHED])
def test_two_ranks(on_2: dict[str, Results], alone: Callable[[str], dict[str, Any]], name: str) -> None:
    same(on_2[name], alone(name))


@pytest.mark.parametrize("name", UNEVEN)
def test_four_ranks(on_4: dict[str, Results], alone: Callable[[str], dict[str, Any]], name: str) -> None:
    same(on_4[name], alone(name))


@pytest.mark.full
@pytest.mark.parametrize("name", MXFP4[1:])
def test_a_block_is_not_divided(tiny_on_4: dict[str, Results], name: str) -> None:
    """The shared experts have two blocks of columns: loading ends on every rank, by name."""
    for result in tiny_on_4[name]:
        assert "shared_experts.down_proj.weight_packed: 64 columns on 4 ranks" in result["error"]
        assert "ranks that divide 2 blocks work" in result["error"]


@pytest.mark.full
@pytest.mark.parametrize("name", [*TINY, MXFP4[0]])
def test_tiny_on_four_ranks(tiny_on_4: dict[str, Results], alone: Callable[[str], dict[str, Any]], name: str) -> None:
    same(tiny_on_4[name], alone(name))


@pytest.mark.parametrize(("name", "ranks"), WHOLE)
def test_what_is_whole_is_said(on_4: dict[str, Results], name: str, ranks: int) -> None:
    for result in on_4[name]:
        assert ("whole", WHOLE[name, ranks]) in result["explain"]
        assert any(choice == f"1/{ranks}" for choice, _ in result["explain"]), "nothing is divided"


@pytest.mark.parametrize("name", [*TINY, *MXFP4])
def test_bytes(on_2: dict[str, Results], path_of: Callable[[str], Path], name: str) -> None:
    """A rank holds half of what is divided, beside what is whole or is with both, and reads what it holds."""
    for result in on_2[name]:
        once = result["divided"] - result["again"]
        assert result["held"] == once / 2 + result["again"] + result["whole"]
        assert once > 0.6 * (result["divided"] + result["whole"]), "most is divided"
        stored = sum(t.nbytes for t in load_file(path_of(name) / "model.safetensors").values())
        assert result["read"] < 0.75 * stored


def test_bytes_of_experts(on_4: dict[str, Results]) -> None:
    """Counts that ranks do not divide are no more than one apart."""
    key = "model.layers.1.block_sparse_moe.experts.gate_up_proj"
    assert [result["shapes"][key][0] for result in on_4["kimi-uneven"]] == [1, 2, 2, 2]


def test_bytes_read_are_those_held(on_2: dict[str, Results]) -> None:
    """The file of tiny-zamba2 is bf16, and what is loaded is fp32."""
    for result in on_2["tiny-zamba2"]:
        assert 2 * result["read"] == result["held"]


def test_no_rank_holds_the_experts_of_others(on_2: dict[str, Results]) -> None:
    key = "model.layers.1.block_sparse_moe.experts.down_proj"
    assert [result["shapes"][key][0] for result in on_2["kimi-uneven"]] == [3, 4]


@pytest.mark.parametrize("name", ["tiny-zamba2", "kimi-uneven", "v4-2-groups"])
def test_saved_whole(on_2: dict[str, Results], path_of: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    load(path_of(name)).save_pretrained(tmp_path)
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path, Path(on_2[name][0]["save"])))
    assert expected.keys() == found.keys()
    for key, t in expected.items():
        assert torch.equal(t, found[key]), key
    assert model_class(on_2[name][0]["save"]).from_pretrained(on_2[name][0]["save"])


def test_guesses_change_nothing(on_2: dict[str, Results]) -> None:
    for result in on_2["tiny-deepseek-v4"]:
        assert torch.equal(result["draft"], result["greedy"][:, :50])


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights(on_2: dict[str, Results], path_of: Callable[[str], Path], name: str) -> None:
    """They are those of one process, though no rank draws with its own shapes."""
    path = path_of(name)
    config = model_class(path).config_class.from_pretrained(path)
    one = of_random_weights(model_class(path), config, torch.device("cpu"))
    first, second = (result["random"] for result in on_2[name])
    assert torch.equal(first, second)
    assert first.std() > 0.01
    torch.testing.assert_close(first, one, rtol=0, atol=TO_ONE)


def test_ranks_sample_alike(on_2: dict[str, Results]) -> None:
    first, second = (result["sample"] for result in on_2["tiny-kimi-linear"])
    assert torch.equal(first, second)
