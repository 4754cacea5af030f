"""Quantisation in floating point: the values of 8-bit storage, with gradients that pass through.

    forward    q = round(clamp(x * inverse, -L, L))        integers (int8) or e4m3 values (fp8)
    backward   dx = dq * inverse where |x * inverse| <= L, else 0     (straight-through)

A layer multiplies the *quantised numbers* and scales the product, as an integer kernel does:

    y = (q_x @ q_w.T) * (input_scale * weight_scale) + bias

so its products and sums are those of the int8 GEMM exactly for as long as they stay below 2^24,
which fp32 holds (K <= 1040 in the worst case), and gradients are those of ordinary fake
quantisation. :mod:`fastswin.quant.convert` is the same with true 8-bit operands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from fastswin.quant.layers import QuantLayer
from fastswin.quant.ranges import LayerRange, inverse_of
from fastswin.quant.scheme import LARGEST, Format

Inverse = float | torch.Tensor


def quantize(x: torch.Tensor, inverse: Inverse, format: Format) -> torch.Tensor:
    """Quantised values as float numbers, with straight-through gradients.

    Args:
        x: float, any shape.
        inverse: one over the step: a number, or a tensor that broadcasts with x. It gets no
            gradient.
        format: "int8" (integers in -127..127, half to even) or "fp8" (e4m3 values).

    Returns:
        ``x * inverse``, clamped and rounded, in x's dtype; NaN stays NaN.
    """
    largest = LARGEST[format]
    return _Round.apply((x * inverse).clamp(-largest, largest), format)


class _Round(torch.autograd.Function):
    """Rounding to the nearest value of a format; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, format: Format) -> torch.Tensor:
        if format == "int8":
            return x.round()
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def weight_inverse(scale: torch.Tensor) -> torch.Tensor:
    """``1 / scale`` for every row, ``[N, 1]`` float32."""
    return scale.reciprocal()[:, None]


def token_scale(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Dynamic steps of an input, one a token: ``[..., K]`` to ``[..., 1]``; 1 for a zero token."""
    amax = x.detach().abs().amax(dim=-1, keepdim=True).float()
    return torch.where(amax > 0, amax / LARGEST[format], 1.0)


class FakeQuant:
    """The products of a model under fake quantisation, for training and comparison.

    Weight scales follow the present weights; activation ranges are those of the calibration.

    Args:
        ranges: one a layer, such as ``calibration.layers``.
    """

    def __init__(self, ranges: Mapping[str, LayerRange]) -> None:
        self.ranges = ranges

    def linear(self, layer: QuantLayer, x: torch.Tensor) -> torch.Tensor:
        """One layer, see the module's formula; a wide layer is the folded float product."""
        r = self.ranges[layer.name]
        weight, bias = layer.folded()
        if not r.scheme.quantized:
            return store_output(F.linear(x, weight, bias), r)
        format = r.scheme.format
        scale, inverse = input_scale(x, r)
        rows = row_scale(weight, r)
        products = F.linear(
            quantize(x, inverse, format), quantize(weight, weight_inverse(rows), format)
        )
        y = products * (scale * rows)
        return store_output(y if bias is None else y + bias, r)

    def pad_qkv(self, layer: QuantLayer) -> torch.Tensor | None:
        """The layer's own bias as its output would store it."""
        bias = layer.bias
        return None if bias is None else store_output(bias, self.ranges[layer.name])


def input_scale(x: torch.Tensor, r: LayerRange) -> tuple[Inverse, Inverse]:
    """Step of a layer's input and its inverse: numbers, or ``[..., 1]`` tensors per token."""
    if r.scheme.activation == "per_token":
        scale = token_scale(x, r.scheme.format)
        return scale, scale.reciprocal()
    return r.input_scale, inverse_of(r.input_scale)


@torch.no_grad()
def row_scale(weight: torch.Tensor, r: LayerRange) -> torch.Tensor:
    """Steps ``[N]`` of the present weight ``[N, K]``, as calibration would find them."""
    amax = weight.abs().amax(dim=1).float()
    if r.scheme.weight == "per_tensor":
        amax = amax.amax().expand(len(amax))
    return torch.where(amax > 0, amax / LARGEST[r.scheme.format], 1.0)


def store_output(y: torch.Tensor, r: LayerRange) -> torch.Tensor:
    """``[..., N]`` as read back from a quantised output; unchanged where the output is wide."""
    if not r.scheme.quantized or r.scheme.output == "wide":
        return y
    parts = [
        quantize(part, inverse_of(scale), r.scheme.format) * scale
        for part, scale in zip(y.chunk(len(r.output_scale), dim=-1), r.output_scale, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
