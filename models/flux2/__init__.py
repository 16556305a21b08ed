"""FLUX.2: a transformer for diffusers' pipelines."""

from xpu_ports.models.flux2.modeling_flux2 import Flux2Transformer2DModel
from xpu_ports.models.flux2.pipeline import load_pipeline

__all__ = ["Flux2Transformer2DModel", "load_pipeline"]
