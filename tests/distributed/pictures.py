"""What each rank runs: FLUX.2's transformer by diffusers' plan, beside the whole one.

torchrun --nproc-per-node N pictures.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import diffusers.hooks.tensor_parallel as tensor_parallel
import torch
import torch.distributed as dist
from diffusers import TensorParallelConfig

from xpu_ports.common import dispatch
from xpu_ports.models.flux2 import Flux2Transformer2DModel

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny-flux2" / "transformer"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # diffusers divides on accelerators alone, and counts them.
    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    load = Flux2Transformer2DModel.from_pretrained
    whole = load(CHECKPOINT, torch_dtype=torch.float32)
    config = TensorParallelConfig(tp_degree=dist.get_world_size())
    divided = load(CHECKPOINT, torch_dtype=torch.float32, parallel_config=config)

    generator = torch.Generator().manual_seed(0)
    positions = torch.zeros(16, 4)
    positions[:, 1], positions[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    words = torch.zeros(7, 4)
    words[:, 3] = torch.arange(7)
    given = {
        "hidden_states": torch.randn(1, 16, whole.config.in_channels, generator=generator),
        "encoder_hidden_states": torch.randn(1, 7, whole.config.joint_attention_dim, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": positions,
        "txt_ids": words,
    }
    dispatch.reset_explain()
    with torch.no_grad():
        expected, found = (model(**given, return_dict=False)[0] for model in (whole, divided))
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in divided.parameters()]
    results = {
        "expected": expected,
        "found": found,
        "share": sum(p.numel() for p in parts) / sum(p.numel() for p in whole.parameters()),
        "ops": {decision.op for decision in dispatch.explain(show=False)},
    }
    torch.save(results, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
