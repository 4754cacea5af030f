"""The integer reference: a calibrated model whose linear layers multiply 8-bit operands.

    int8    q_x [M, K], q_w [N, K] in -127..127 -> exact integer sums -> fp32 epilogue
    fp8     e4m3 operands, products and sums in fp32

Everything between the products (LayerNorm, softmax, GELU, residual stream) is the readable fp32
model. It runs wherever PyTorch does and is what engines are compared with: exactly on the int8
GEMM, to one step of the output's scale after an epilogue.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F

from fastswin.models.swin import SwinTransformer
from fastswin.quant.fake_quant import input_scale, quantize, store_output, weight_inverse
from fastswin.quant.forward import run
from fastswin.quant.layers import QuantLayer, quant_layers
from fastswin.quant.ranges import Calibration, LayerRange, inverse_of
from fastswin.quant.scheme import LARGEST, Format

#: fp32 holds sums of this many int8 products exactly: 1024 * 127 * 127 < 2^24.
EXACT_TERMS = 1024


@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
    """One layer's operands.

    Attributes:
        weight: ``[N, K]``, int8 or float8_e4m3fn; the folded fp32 weight where it stays wide.
        weight_scale: float32 ``[N]``; None where it stays wide.
        bias: float32 ``[N]`` or None, the folded part included.
        range: scales of input and output.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor | None
    bias: torch.Tensor | None
    range: LayerRange

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float ``[..., K]`` to float32 ``[..., N]``, quantised on the way in and, if the scheme
        says so, out; a magnitude beyond the range saturates.

        Raises:
            ValueError: NaN in the input of an int8 layer, which integers cannot hold.
        """
        if self.weight_scale is None:
            return F.linear(x, self.weight, self.bias)
        scale, inverse = input_scale(x, self.range)
        y = self.product(quantize_(x * inverse, self.range.scheme.format))
        y *= scale * self.weight_scale
        if self.bias is not None:
            y += self.bias
        return store_output_(y, self.range)

    def product(self, q: torch.Tensor) -> torch.Tensor:
        """Sums of products with quantised numbers ``[..., K]``: float32 ``[..., N]``."""
        if self.range.scheme.format == "fp8":
            return F.linear(q, self.weight.float())
        sums = integer_product(q.reshape(-1, q.shape[-1]), self.weight.float())
        if not math.isfinite(float(sums.sum())):
            raise ValueError(f"{self.range.name}: its input holds NaN")
        return sums.view(*q.shape[:-1], len(self.weight))


class QuantizedSwin:
    """A calibrated model on 8-bit operands; call it with images.

    Args:
        model: the readable model; its weights are copied, its other modules are used in place.
        calibration: ranges made for these weights.

    Attributes:
        linears: one :class:`QuantizedLinear` a layer.

    Raises:
        QuantizationError: ranges that are missing, illegal, or made for other weights.
    """

    def __init__(self, model: SwinTransformer, calibration: Calibration) -> None:
        calibration.check(model)
        self.model = model.eval()
        self.calibration = calibration
        self.layers = quant_layers(model)
        self.linears = {
            name: quantize_linear(layer, calibration.layers[name])
            for name, layer in self.layers.items()
        }
        self._pads = {
            name: None if layer.bias is None else store_output(layer.bias.detach().float(), r)
            for name, layer in self.layers.items()
            if layer.attention is not None
            for r in (calibration.layers[name],)
        }

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """float images ``[B, channels, h, w]`` to float32 logits ``[B, classes]``."""
        return run(self.model, self.layers, images, self)

    def linear(self, layer: QuantLayer, x: torch.Tensor) -> torch.Tensor:
        """One layer, for :func:`fastswin.quant.forward.run`."""
        return self.linears[layer.name](x)

    def pad_qkv(self, layer: QuantLayer) -> torch.Tensor | None:
        """qkv of a padded token as stored."""
        return self._pads[layer.name]


@torch.no_grad()
def quantize_linear(layer: QuantLayer, r: LayerRange) -> QuantizedLinear:
    """A layer's folded weight in its format, with the bias kept in fp32."""
    weight, bias = layer.folded(torch.float64)
    weight, bias = weight.float(), None if bias is None else bias.float()
    if not r.scheme.quantized:
        return QuantizedLinear(weight, None, bias, r)
    scale = r.weight_scale.to(weight.device)
    q = quantize(weight, weight_inverse(scale), r.scheme.format)
    stored = q.to(torch.int8 if r.scheme.format == "int8" else torch.float8_e4m3fn)
    return QuantizedLinear(stored, scale, bias, r)


def quantize_(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Clamp and round scaled numbers in place: :func:`~fastswin.quant.fake_quant.quantize` after
    its product, without gradients."""
    largest = LARGEST[format]
    x.clamp_(-largest, largest)
    if format == "int8":
        return x.round_()
    return x.copy_(x.to(torch.float8_e4m3fn))


def store_output_(y: torch.Tensor, r: LayerRange) -> torch.Tensor:
    """:func:`~fastswin.quant.fake_quant.store_output` in place, without gradients."""
    if r.scheme.quantized and r.scheme.output == "quantized":
        for part, scale in zip(y.chunk(len(r.output_scale), dim=-1), r.output_scale, strict=True):
            quantize_(part.mul_(inverse_of(scale)), r.scheme.format).mul_(scale)
    return y


def integer_product(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``q @ weight.T`` of integers in -127..127 that are stored as float32.

    Args:
        q: ``[M, K]``; rows with NaN give NaN.
        weight: ``[N, K]``.

    Returns:
        float32 ``[M, N]``: the exact integer sums, rounded once where they exceed 2^24. That is
        fp32 products of at most 1024 terms, which are exact, added as integers; on a CPU 15 times
        faster than ``torch._int_mm``, and free of its limits on M, N and K.
    """
    if q.is_cuda:  # fp64: no setting of the process can turn it into TF32
        return (q.double() @ weight.double().t()).float()
    if q.shape[1] <= EXACT_TERMS:
        return q @ weight.t()
    total = torch.zeros(len(q), len(weight), dtype=torch.float64)
    for x, w in zip(q.split(EXACT_TERMS, dim=1), weight.split(EXACT_TERMS, dim=1), strict=True):
        total += x @ w.t()
    return total.float()
