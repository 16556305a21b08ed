"""Small checkpoints in every format that is read, their MXFP4 and FP8 numbers known from independent code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, GptOssConfig, PreTrainedModel
from transformers import DeepseekV4ForCausalLM as DeepseekV4
from transformers import GptOssForCausalLM as GptOss

from tests.quant.producers import tiny_llama
from xpu_ports.quant.convert import shards, writer
from xpu_ports.quant.convert.formats import read_source
from xpu_ports.quant.convert.plan import Plan, ToMXFP4, plan_bf16, plan_mxfp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Packed(NamedTuple):
    codes: Tensor
    scales: Tensor
    # What they stand for, fp32.
    values: Tensor


def random_mxfp4(*shape: int) -> Packed:
    """Random codes [..., K/2] and scales [..., K/32] of weights about 0.05 in size."""
    *outer, K = shape
    codes = torch.randint(0, 256, (*outer, K // 2), dtype=torch.uint8)
    scales = torch.randint(120, 124, (*outer, K // 32), dtype=torch.uint8)
    nibbles = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(shape)
    values = E2M1[nibbles] * np.exp2(scales.numpy().astype(np.float64) - 127).repeat(32, -1)
    return Packed(codes, scales, torch.from_numpy(values).float())


def random_fp8(rows: int, columns: int, tile: int = 128, e8m0: bool = True) -> Packed:
    """E4M3 numbers and a power of two for each tile."""
    codes = (torch.randn(rows, columns) * 40).clamp(-440, 440).to(torch.float8_e4m3fn)
    grid = -(-rows // tile), -(-columns // tile)
    exponents = torch.randint(-13, -9, grid)
    values = np.empty((rows, columns))
    for i, j in np.ndindex(*grid):
        some = slice(i * tile, (i + 1) * tile), slice(j * tile, (j + 1) * tile)
        values[some] = codes[some].float().numpy() * 2.0 ** int(exponents[i, j])
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu) if e8m0 else torch.exp2(exponents.float())
    return Packed(codes, scales, torch.from_numpy(values).float())


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], quantization: object = None) -> Path:
    """A checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.clone().contiguous() for k, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return folder


def tensors_of(model: PreTrainedModel, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model's tensors and its config as `save_pretrained` writes them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def load(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, whichever they are."""
    return {key: t for file in sorted(folder.glob("*.safetensors")) for key, t in load_file(file).items()}


def write(plan: Plan, target: Path, shard_bytes: int = shards.SHARD_BYTES, threads: int = 1) -> dict[str, int]:
    """All of a conversion, into an empty folder."""
    job = writer.job(plan, target, shard_bytes)
    return writer.write(job, writer.check_target(job, resume=False), threads, lambda _: None)


def to_mxfp4(source: Path, target: Path, fix_scales: bool = False, **asked: Any) -> Plan:
    plan = plan_mxfp4(read_source(source, fix_scales), ToMXFP4(**asked))
    write(plan, target)
    return plan


def to_bf16(source: Path, target: Path, fix_scales: bool = False) -> Plan:
    plan = plan_bf16(read_source(source, fix_scales))
    write(plan, target)
    return plan


# --------------------------------------------------------------------------------------------------------------- models


def packed_llama(folder: Path, quantization: object, kept: tuple[str, ...] = ("lm_head",)) -> dict[str, Packed]:
    """A Llama whose linear layers are `weight` uint8 and `weight_scale` uint8, as Quark and ModelOpt write them."""
    tensors, config = tensors_of(tiny_llama().bfloat16(), folder)
    packed = {}
    for key in [k for k, t in tensors.items() if t.dim() == 2 and "embed" not in k and k[:-7] not in kept]:
        packed[key] = random_mxfp4(*tensors[key].shape)
        tensors |= {key: packed[key].codes, f"{key}_scale": packed[key].scales}
    save(folder, tensors, config, quantization)
    return packed


def gpt_oss(folder: Path) -> tuple[dict[str, Packed], GptOss]:
    """(key of the dense stack -> numbers [E, N, K], the model with them)."""
    config = GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=3, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    model = GptOss(config).bfloat16().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    packed = {}
    for name in [n for n, _ in model.named_parameters() if n.endswith(("gate_up_proj", "down_proj"))]:
        E, K, N = model.get_parameter(name).shape
        packed[name] = random_mxfp4(E, N, K)
        model.get_parameter(name).data.copy_(packed[name].values.mT)
    tensors, raw = tensors_of(model, folder)
    for name, (codes, scales, _) in packed.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(folder, tensors, raw, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    return packed, model


def deepseek_v4(folder: Path) -> dict[str, Tensor]:
    """The official layout: FP8 tiles, FP4 experts, a draft layer. Gives every tensor's dense numbers."""
    config = DeepseekV4Config(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, q_lora_rank=160, qk_rope_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, max_position_embeddings=512, num_hash_layers=1,
        layer_types=["sliding_attention", "sliding_attention", "compressed_sparse_attention",
                     "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}, hc_mult=4,
        hc_sinkhorn_iters=20, sliding_window=8, o_groups=2, o_lora_rank=16, index_n_heads=16, index_head_dim=16,
        index_topk=4, rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 32,
                                    "beta_fast": 32, "beta_slow": 1},
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    saved, raw = tensors_of(DeepseekV4(config).bfloat16(), folder)
    tensors, dense = {}, {}
    for key, tensor in saved.items():
        name = key.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        tensors[name.replace(".attn.norm.", ".attn.kv_norm.")] = tensor
    tensors |= {f"mtp.0.{k.removeprefix('layers.1.')}": t for k, t in tensors.items() if k.startswith("layers.1.")}
    tensors["mtp.0.e_proj.weight"] = torch.zeros(64, 64)
    for key in list(tensors):
        layer = key.removesuffix(".weight")
        made = None
        if ".experts." in key:
            made = random_mxfp4(*tensors[key].shape)
            made = Packed(made.codes.view(torch.int8), made.scales.view(torch.float8_e8m0fnu), made.values)
        elif layer.endswith(("wq_a", "wq_b", "attn.wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj")):
            made = random_fp8(*tensors[key].shape)
        if made is not None:
            tensors |= {key: made.codes, f"{layer}.scale": made.scales}
        dense[key] = tensors[key] if made is None else made.values.bfloat16()
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
           "activation_scheme": "dynamic"}  # fmt: skip
    save(folder, tensors, {**raw, "expert_dtype": "fp4"}, fp8)
    return dense
