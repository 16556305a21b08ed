"""The shapes of the released Zamba2 checkpoints, to build a model of without downloading one.

Sources: Zyphra's config.json files as quoted in public traces and pull requests (1.2B: revision 6b05bf2; 2.7B:
Zyphra/Zamba2's repository; 7B: transformers#47994). The places of the 7B's shared blocks follow no period.
"""

from __future__ import annotations

from typing import Any

from transformers import Zamba2Config

LAYOUTS: dict[str, dict[str, Any]] = {
    "1.2b": {
        "hidden_size": 2048,
        "num_hidden_layers": 38,
        "hybrid": (5, 11, 17, 23, 29, 35),
        "num_mem_blocks": 1,
        "mamba_ngroups": 1,
        "mamba_d_state": 128,
        "n_mamba_heads": 64,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "2.7b": {
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "hybrid": (6, 12, 18, 24, 30, 36, 42, 47, 51),
        "num_mem_blocks": 2,
        "mamba_ngroups": 1,
        "mamba_d_state": 64,
        "n_mamba_heads": 80,
        "use_mem_rope": False,
        "use_shared_attention_adapter": False,
    },
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 81,
        "hybrid": (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77),
        "num_mem_blocks": 2,
        "mamba_ngroups": 2,
        "mamba_d_state": 64,
        "n_mamba_heads": 112,
        "use_mem_rope": True,
        "use_shared_attention_adapter": False,
    },
}


def layout_config(name: str, **overrides: Any) -> Zamba2Config:
    """The config of a released size.

    Args:
        name: "1.2b", "2.7b" or "7b".
        overrides: fields to set instead, to make it narrower.

    Raises:
        ValueError: there is no such size.
    """
    if name not in LAYOUTS:
        raise ValueError(f"no Zamba2 layout is named {name!r}; there are: {', '.join(LAYOUTS)}")
    fields = dict(LAYOUTS[name])
    hybrid = fields.pop("hybrid")
    fields["layers_block_type"] = [
        "hybrid" if i in hybrid else "linear_attention" for i in range(fields["num_hidden_layers"])
    ]
    fields |= {"vocab_size": 32000, "num_attention_heads": 32, "adapter_rank": 128, "chunk_size": 256}
    return Zamba2Config(**fields | overrides)
