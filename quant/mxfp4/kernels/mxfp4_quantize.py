"""Activations to MXFP4.

Source: as `xpu_ports.quant.mxfp4.format`, whose `quantize` this is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpu_ports.common.dispatch import op
from xpu_ports.quant.mxfp4.format import BLOCK, quantize


def _fake(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    *leading, K = x.shape
    return x.new_empty((*leading, K // 2), dtype=torch.uint8), x.new_empty((*leading, K // BLOCK), dtype=torch.uint8)


@op(fake=_fake)
def mxfp4_quantize(x: Tensor, scale_rule: str = "even") -> tuple[Tensor, Tensor]:
    """Round to MXFP4, a scale for each block of 32.

    Args:
        x: [..., K], floating point, any row strides; K is a multiple of 32.
        scale_rule: "even", "floor" or "rceil": how a block's scale comes from its largest magnitude.

    Returns:
        (packed, scale): uint8 [..., K/2] and uint8 [..., K/32], byte for byte what `format.quantize` gives.

    Raises:
        ValueError: K is not a multiple of 32, or the rule does not exist.
    """
    return quantize(x, scale_rule)
