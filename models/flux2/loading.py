"""Loading FLUX.2's transformer strictly, from diffusers' folders and from Black Forest Labs' single files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from xpu_ports.common.checkpoint import CheckpointError, TensorInfo
from xpu_ports.common.conversion import Rename, Split, Swap, pattern
from xpu_ports.models.flux2.diffusers_api import load_single_file_checkpoint
from xpu_ports.models.flux2.packed import register

# Files for ComfyUI have all of a model's parts in one.
PREFIX = "model.diffusion_model."
# What `load_single_file_checkpoint` takes.
_FILES = ("cache_dir", "disable_mmap", "force_download", "local_files_only", "proxies", "revision", "token")


def _stream(file: str, suffix: str, q: str, k: str, v: str, out: str, ff: str) -> list[Rename | Split]:
    """A stream of the double blocks."""
    f, m = "double_blocks.{i}." + file, "transformer_blocks.{i}."
    return [
        Split(f"{f}_attn.qkv.weight", tuple(f"{m}attn.{name}.weight" for name in (q, k, v))),
        Rename(f"{f}_attn.norm.query_norm.scale", f"{m}attn.norm_{suffix}q.weight"),
        Rename(f"{f}_attn.norm.key_norm.scale", f"{m}attn.norm_{suffix}k.weight"),
        Rename(f"{f}_attn.proj.weight", f"{m}attn.{out}.weight"),
        Rename(f"{f}_mlp.0.weight", f"{m}{ff}.linear_in.weight"),
        Rename(f"{f}_mlp.2.weight", f"{m}{ff}.linear_out.weight"),
    ]


RULES: tuple[Rename | Split, ...] = (
    # Shift, then scale in these files; scale, then shift in diffusers'.
    Swap("final_layer.adaLN_modulation.1.weight", "norm_out.linear.weight"),
    Rename("img_in.weight", "x_embedder.weight"),
    Rename("txt_in.weight", "context_embedder.weight"),
    *(
        Rename(f"{file}_in.{layer}_layer.weight", f"time_guidance_embed.{model}_embedder.linear_{n}.weight")
        for file, model in (("time", "timestep"), ("guidance", "guidance"))
        for layer, n in (("in", 1), ("out", 2))
    ),
    *(
        Rename(f"{name}.lin.weight", f"{name}.linear.weight")
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    ),
    Rename("final_layer.linear.weight", "proj_out.weight"),
    *_stream("img", "", "to_q", "to_k", "to_v", "to_out.0", "ff"),
    *_stream("txt", "added_", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context"),
    *(
        Rename(f"single_blocks.{{i}}.{file}", f"single_transformer_blocks.{{i}}.attn.{model}.weight")
        for file, model in (
            ("linear1.weight", "to_qkv_mlp_proj"),
            ("linear2.weight", "to_out"),
            ("norm.query_norm.scale", "norm_q"),
            ("norm.key_norm.scale", "norm_k"),
        )
    ),
)


def from_single_file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under diffusers' names; those under them already, and unknown ones, stay as they are."""
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        key = key.removeprefix(PREFIX)
        rule, fields = next(
            ((rule, found) for rule in RULES if (found := pattern(rule.file).match(key)) is not None), (None, None)
        )
        if rule is None or fields is None:
            named[key] = tensor
        elif isinstance(rule, Split):
            [parts] = zip(*rule.reverse().part(tensor), strict=True)
            named |= {pattern(name).fill(fields): part for name, part in zip(rule.model, parts, strict=True)}
        else:
            tensor = tensor.roll(tensor.shape[0] // 2, 0) if isinstance(rule, Swap) else tensor
            named[pattern(rule.model).fill(fields)] = tensor
    return named


def single_file_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under Black Forest Labs' names, from those of a whole model under diffusers'.

    Raises:
        ValueError: one has no such name, as packed weights have none.
    """
    models = [name for rule in RULES for name in (rule.model if isinstance(rule, Split) else (rule.model,))]
    for key in tensors:
        if all(pattern(name).match(key) is None for name in models):
            raise ValueError(f"{key} has no place in Black Forest Labs' files; packed weights have to be dense first")
    named: dict[str, Tensor] = {}
    for rule in RULES:
        parts = rule.model if isinstance(rule, Split) else (rule.model,)
        for key, tensor in tensors.items():
            fields = pattern(parts[0]).match(key)
            if fields is None:
                continue
            if isinstance(rule, Split):
                tensor = rule.reverse().join([[tensors[pattern(part).fill(fields)]] for part in parts])
            elif isinstance(rule, Swap):
                tensor = tensor.roll(tensor.shape[0] // 2, 0)
            named[pattern(rule.file).fill(fields)] = tensor
    return named


def config_of(tensors: Mapping[str, Tensor | TensorInfo], file: str) -> dict[str, Any]:
    """The config that tensors under diffusers' names are of, as far as shapes tell; the rest is the same in all models.

    Raises:
        CheckpointError: one that is needed for it is not there.
    """

    def shape(key: str) -> tuple[int, ...]:
        if key not in tensors:
            raise CheckpointError(file, key, "a tensor of FLUX.2's transformer", "none")
        return tensors[key].shape

    dim, in_channels = shape("x_embedder.weight")
    out_channels = shape("proj_out.weight")[0]
    [head_dim] = shape("single_transformer_blocks.0.attn.norm_q.weight")
    return {
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": _count(tensors, "transformer_blocks."),
        "num_single_layers": _count(tensors, "single_transformer_blocks."),
        "attention_head_dim": head_dim,
        "num_attention_heads": dim // head_dim,
        "joint_attention_dim": shape("context_embedder.weight")[1],
        "timestep_guidance_channels": shape("time_guidance_embed.timestep_embedder.linear_1.weight")[1],
        "mlp_ratio": (shape("single_transformer_blocks.0.attn.to_out.weight")[1] - dim) / dim,
        "axes_dims_rope": (head_dim // 4,) * 4,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in tensors,
    }


def _count(tensors: Mapping[str, Any], prefix: str) -> int:
    return len({key[len(prefix) :].split(".")[0] for key in tensors if key.startswith(prefix)})


def check_keys(missing: list[str], unexpected: list[str], file: str) -> None:
    """All of a checkpoint is loaded, or nothing.

    Raises:
        CheckpointError: a tensor is missing or has no place.
    """
    if missing:
        hint = f"{len(missing)} missing, {len(unexpected)} without a place"
        raise CheckpointError(file, sorted(missing)[0], "a tensor", "none", hint)
    if unexpected:
        hint = f"{len(unexpected)} without a place"
        raise CheckpointError(file, sorted(unexpected)[0], "no such tensor in Flux2Transformer2DModel", "one", hint)


class StrictFlux2Loading:
    """Goes before diffusers' model class: its ways of loading, with checks."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, **kwargs: Any) -> Any:
        """Load a folder or a repository, as diffusers does; MXFP4 weights stay packed.

        Raises:
            CheckpointError: a tensor is missing or has no place, or is packed in a way that is not known here.
        """
        register()
        wanted = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # type: ignore[misc]
            pretrained_model_name_or_path, output_loading_info=True, **kwargs
        )
        check_keys(info["missing_keys"], info["unexpected_keys"], str(pretrained_model_name_or_path))
        return (model, info) if wanted else model

    @classmethod
    def from_single_file(
        cls,
        pretrained_model_link_or_path_or_dict: str | Mapping[str, Tensor],
        config: str | None = None,
        subfolder: str | None = None,
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load one file with Black Forest Labs' names or diffusers', of any size of FLUX.2: shapes tell which.

        Args:
            pretrained_model_link_or_path_or_dict: a file, a link to one on the Hub, or its tensors.
            config, subfolder: a folder or repository whose config goes before what the shapes tell.
            dtype, torch_dtype: the model's dtype; the file's when left out.
            device: where to put it.
            kwargs: how to download it, as diffusers takes it.

        Raises:
            CheckpointError: a tensor is missing, has no place or another shape.
            ValueError: an argument that nothing here takes.
        """
        given = pretrained_model_link_or_path_or_dict
        files = {name: kwargs.pop(name) for name in _FILES if name in kwargs}
        if kwargs:
            raise ValueError(f"from_single_file: nothing here takes {', '.join(kwargs)}")
        name = os.fspath(given) if isinstance(given, (str, os.PathLike)) else "tensors"
        tensors = given if isinstance(given, Mapping) else load_single_file_checkpoint(name, **files)
        tensors = from_single_file_names(tensors)
        own: Any = cls
        wanted = config_of(tensors, name) if config is None else own.load_config(config, subfolder=subfolder)
        with torch.device("meta"):
            model = own.from_config(wanted)
        expected = model.state_dict()
        check_keys([k for k in expected if k not in tensors], [k for k in tensors if k not in expected], name)
        for key, tensor in tensors.items():
            if tensor.shape != expected[key].shape:
                raise CheckpointError(name, key, f"shape {list(expected[key].shape)}", f"{list(tensor.shape)}")
        model.load_state_dict(tensors, assign=True)
        return model.to(device=device, dtype=dtype or torch_dtype).eval()

    def save_single_file(self, path: str | os.PathLike) -> None:
        """Write one file with Black Forest Labs' names, which `from_single_file` reads, and so do others.

        Raises:
            ValueError: the weights are packed.
        """
        tensors = single_file_names(self.state_dict())  # type: ignore[attr-defined]
        save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, path, {"format": "pt"})
