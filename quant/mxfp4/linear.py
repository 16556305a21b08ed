"""Layers whose weights stay packed: two E2M1 values a byte, an E8M0 scale for every 32 of them.

    y = x dequantize(W)^T + b            W4A16
    y = qdq(x) dequantize(W)^T + b       W4A4: qdq rounds x to MXFP4 and back, by blocks of 32 along K

Parameters have compressed-tensors' names and layouts, so that a module's state is a file's. No dense copy of a weight
is kept. Sources: OCP Microscaling Formats v1.0; compressed-tensors 0.20, `compressors/mxfp4`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from xpu_ports.quant.mxfp4.format import BLOCK, dequantize, quantize
from xpu_ports.quant.mxfp4.kernels.mxfp4_experts import mxfp4_experts
from xpu_ports.quant.mxfp4.kernels.mxfp4_linear import mxfp4_linear, mxfp4_linear_a4

# What a layer's input may be rounded to.
ACTIVATIONS = (None, "mxfp4")
# The weights of stacked experts in a model that is not packed.
EXPERTS = ("gate_up_proj", "down_proj")


class MXFP4Linear(nn.Module):
    """`nn.Linear` with a packed weight."""

    weight_packed: nn.Parameter  # uint8 [N, K/2]
    weight_scale: nn.Parameter  # uint8 [N, K/32]
    bias: nn.Parameter | None  # [N]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activations: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the layer, its weight zero.

        Args:
            in_features: K, a multiple of 32.
            out_features: N.
            bias: whether there is one.
            activations: None to use the input as it is (W4A16), "mxfp4" to quantize it too (W4A4).
            device: where.
            dtype: the bias's.

        Raises:
            ValueError: in_features or activations is none of these.
        """
        super().__init__()
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations is {activations!r}, expected None or 'mxfp4'")
        self.in_features, self.out_features, self.activations = in_features, out_features, activations
        self.weight_packed, self.weight_scale = _empty((out_features, in_features), device)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, activations: str | None = None, scale_rule: str = "even") -> MXFP4Linear:
        """Quantize a layer.

        Args:
            linear: the layer; its bias is taken over.
            activations: as in the constructor.
            scale_rule: how a block's scale is chosen, see `format.quantize`.
        """
        # Empty on the meta device: nothing is allocated that is not kept.
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, activations, "meta")
        layer.weight_packed, layer.weight_scale = map(_frozen, quantize(linear.weight.detach(), scale_rule))
        layer.bias = linear.bias
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N], in x's dtype."""
        linear = mxfp4_linear if self.activations is None else mxfp4_linear_a4
        return linear(x, self.weight_packed, self.weight_scale, self.bias)

    def dequantize(self, dtype: torch.dtype) -> nn.Linear:
        """A plain layer with the weight's values, [N, K] in `dtype`, and the same bias."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight = nn.Parameter(dequantize(self.weight_packed, self.weight_scale, dtype))
        linear.register_parameter("bias", self.bias)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {_scheme(self)}"


class MXFP4Experts(nn.Module):
    """The routed experts of a mixture, their two layers each one packed tensor; the gate's activation is SiLU."""

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        width: int,
        activations: str | None = None,
        device: torch.device | str | None = None,
        limit: float | None = None,
    ) -> None:
        """Make the experts, their weights zero.

        Args:
            experts: E.
            hidden_size: D, a multiple of 32.
            width: F, each expert's, a multiple of 32.
            activations: None for W4A16, "mxfp4" for W4A4.
            device: where.
            limit: bounds before the activation, as `moe_experts` takes them; None for none.

        Raises:
            ValueError: a width or activations is none of these.
        """
        super().__init__()
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations is {activations!r}, expected None or 'mxfp4'")
        self.activations, self.limit = activations, limit
        self.gate_up_proj_packed, self.gate_up_proj_scale = _empty((experts, 2 * width, hidden_size), device)
        self.down_proj_packed, self.down_proj_scale = _empty((experts, hidden_size, width), device)

    @classmethod
    def from_weights(
        cls,
        gate_up: Tensor,
        down: Tensor,
        activations: str | None = None,
        scale_rule: str = "even",
        limit: float | None = None,
    ) -> MXFP4Experts:
        """Quantize experts.

        Args:
            gate_up: [E, 2 F, D], the gate's rows first.
            down: [E, D, F].
            activations: as in the constructor.
            scale_rule: how a block's scale is chosen, see `format.quantize`.
            limit: as in the constructor.
        """
        E, D, F = down.shape
        experts = cls(E, D, F, activations, "meta", limit)
        experts.gate_up_proj_packed, experts.gate_up_proj_scale = map(_frozen, quantize(gate_up.detach(), scale_rule))
        experts.down_proj_packed, experts.down_proj_scale = map(_frozen, quantize(down.detach(), scale_rule))
        return experts

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Send each token through its experts and add up what they give, as `moe_experts` does.

        Args:
            x: [N, D].
            indices: [N, A], int64, in [0, E]; E is an expert that another rank has.
            weights: [N, A], fp32, what each of them counts.

        Returns:
            [N, D] in x's dtype.
        """
        return mxfp4_experts(
            x,
            self.gate_up_proj_packed,
            self.gate_up_proj_scale,
            self.down_proj_packed,
            self.down_proj_scale,
            indices,
            weights,
            self.limit,
            self.activations is not None,
        )

    def extra_repr(self) -> str:
        E, D, packed = self.down_proj_packed.shape
        return f"experts={E}, hidden_size={D}, width={2 * packed}, {_scheme(self)}"


def _empty(shape: tuple[int, ...], device: torch.device | str | None) -> tuple[nn.Parameter, nn.Parameter]:
    """Packed zeros and their scales for a weight of a shape [..., K]; without gradients."""
    *outer, K = shape
    if K % BLOCK:
        raise ValueError(f"{K} input features, expected a multiple of {BLOCK}")
    packed = torch.zeros(*outer, K // 2, dtype=torch.uint8, device=device)
    return _frozen(packed), _frozen(torch.zeros(*outer, K // BLOCK, dtype=torch.uint8, device=device))


def _frozen(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t, requires_grad=False)


def _scheme(module: MXFP4Linear | MXFP4Experts) -> str:
    return "W4A16" if module.activations is None else "W4A4"
