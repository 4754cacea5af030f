"""Load-time work of a quantised engine: 8-bit operands beside the wide ones, on demand.

    y = (q_x @ q_w.T) * scale + bias        scale = input step x weight step, fp32 [N]

A layer's weights are rounded once, by the code of the integer reference (quant/convert.py), so both
multiply the same integers. Host memory holds every layer in both forms; the device receives those
that plans ask for, when they are bound. An engine whose plans are all 8-bit thus takes half the
weight memory of fp16, and one that also serves batches at which 8 bits do not pay takes both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from fastswin.engine.precision import FORMAT_DTYPES
from fastswin.engine.prepare import Builder, build
from fastswin.engine.prepared import Affine, Footprint, Linear, PreparedModel
from fastswin.engine.quantized.formats import LayerFormat, StageFormats
from fastswin.engine.quantized.library import LibraryAffine, library_affine
from fastswin.models.swin import SwinTransformer
from fastswin.ops.quantized_linear.ordering import order_rows, why_not_ordered
from fastswin.quant.convert import quantize_linear
from fastswin.quant.fake_quant import quantize
from fastswin.quant.layers import QuantLayer, quant_layers
from fastswin.quant.ranges import Calibration, LayerRange, inverse_of


@dataclasses.dataclass(frozen=True)
class Steps:
    """What an 8-bit layer needs beside its weight; all tensors on the device.

    Attributes:
        scale: fp32 ``[N]``: the weight's steps, times the input's where that is static.
        bias: fp32 ``[N]`` or None, the LayerNorm before it folded in.
        input_scale: fp32 ``[1]``, the input's step; None where each token has its own.
        input_inverse: one over it.
        output_scale: fp32 ``[1]``, or ``[3]`` for q, k and v; None where the output is wide.
        output_step: the first of them as a number, to undo it with.
        pad_output: for qkv with a quantised output, ``[3C]`` of a padded token as stored.
    """

    scale: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None
    input_inverse: torch.Tensor | None
    output_scale: torch.Tensor | None
    output_step: float
    pad_output: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class OrderedAffine:
    """An 8-bit layer with its output channels in the order of ops/quantized_linear/ordering.py.

    Attributes:
        weight: ``[N, K]``, in 8 bits.
        scale, bias: fp32 ``[N]`` of its steps.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


class LayerForms:
    """One quantisable layer: wide as :class:`~fastswin.engine.prepare.Linear`, or in 8 bits.

    Args:
        wide: the engine's wide form on the host, its biases on the device.
        packed: 8-bit weight ``[N, K]`` for our kernel, int8 or float8_e4m3fn, on the host.
        steps: of the layer, on the host.
        library: the form for the CUDA library on the host; None where there is none.
        device: where forms go when they are first read.
        footprint: counts what went there.
    """

    def __init__(
        self,
        wide: Affine,
        packed: torch.Tensor,
        steps: Steps,
        library: LibraryAffine | None,
        device: torch.device,
        footprint: Footprint,
    ) -> None:
        self._wide, self._packed, self._steps, self._library = wide, packed, steps, library
        self._device, self._footprint = device, footprint

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """Wide weight ``[N, K]``."""
        return self._place(self._wide.weight)

    @property
    def bias(self) -> torch.Tensor | None:
        return self._wide.bias

    @property
    def library_bias(self) -> torch.Tensor | None:
        return self._wide.library_bias

    @property
    def has_library(self) -> bool:
        """Whether the CUDA library can have it."""
        return self._library is not None

    @functools.cached_property
    def library(self) -> LibraryAffine:
        """Operands for the CUDA library, their bias in the wide dtype."""
        host = self._library
        assert host is not None  # plans ask has_library
        bias = None if host.bias is None else host.bias.to(self._wide.weight.dtype)
        return LibraryAffine(
            self._place(host.weight),
            host.scale.to(self._device),
            self._small(bias),
            self._small(host.output_inverse),
        )

    @functools.cached_property
    def packed(self) -> torch.Tensor:
        """8-bit weight ``[N, K]`` for our kernel, the LayerNorm before it folded in."""
        return self._place(self._packed)

    @property
    def orderable(self) -> bool:
        """Whether kernels can have the layer in the order that stores 8-bit results fastest."""
        steps = self._steps.output_scale
        return why_not_ordered(len(self._packed), 1 if steps is None else steps.numel()) is None

    @functools.cached_property
    def ordered(self) -> OrderedAffine:
        """The layer for results in 8 bits, which kernels store in this order."""
        host = self._steps
        bias = None if host.bias is None else order_rows(host.bias)
        scale = order_rows(host.scale).to(self._device)
        return OrderedAffine(self._place(order_rows(self._packed)), scale, self._small(bias))

    @property
    def stores_8_bits(self) -> bool:
        """Whether the scheme stores the layer's own output in 8 bits."""
        return self._steps.output_scale is not None

    @functools.cached_property
    def steps(self) -> Steps:
        """What both 8-bit forms share."""
        host = self._steps
        return dataclasses.replace(
            host,
            scale=host.scale.to(self._device),
            bias=self._small(host.bias),
            input_scale=self._small(host.input_scale),
            input_inverse=self._small(host.input_inverse),
            output_scale=self._small(host.output_scale),
            pad_output=self._small(host.pad_output),
        )

    @property
    def placed(self) -> list[torch.Tensor]:
        """The weights that are on the device."""
        there = self.__dict__
        found = [there[name] for name in ("weight", "packed") if name in there]
        forms = [there[name] for name in ("ordered", "library") if name in there]
        return found + [form.weight for form in forms]

    def place(self, layer: LayerFormat, *, narrow: bool) -> None:
        """Bring the form of a plan to the device; ``narrow``: the result is stored in 8 bits."""
        if not layer.quantized:
            _ = self.weight
            return
        _ = self.steps
        if layer.backend == "cublaslt":
            _ = self.library
        elif self.is_ordered(layer, narrow):
            _ = self.ordered
        else:
            _ = self.packed

    def is_ordered(self, layer: LayerFormat, narrow: bool) -> bool:
        """Whether a layer with an 8-bit result (``narrow``) runs in the order of ``ordered``."""
        return narrow and layer.backend == "triton" and self.orderable

    def _small(self, host: torch.Tensor | None) -> torch.Tensor | None:
        return None if host is None else host.to(self._device)

    def _place(self, host: torch.Tensor) -> torch.Tensor:
        self._footprint.num_bytes += host.numel() * host.element_size()
        return host.to(self._device)


@torch.no_grad()
def prepare_quantized(
    model: SwinTransformer, calibration: Calibration, device: torch.device, dtype: torch.dtype
) -> PreparedModel:
    """Snapshot of a calibrated model; the model is not modified.

    Args:
        model: the readable model.
        calibration: ranges that were checked against it.
        device: of the engine.
        dtype: of everything that is not quantised.
    """
    return build(model, _QuantizedBuilder(model, calibration, device, dtype))


def place_forms(weights: PreparedModel, stages: Sequence[StageFormats]) -> None:
    """Bring every layer to the device in the form that a plan's stages want."""
    for index, formats in enumerate(stages):
        for block, wanted in zip(weights.stages[index], formats.blocks, strict=True):
            _place(block.qkv, wanted.qkv, narrow=wanted.attention != "wide")
            _place(block.fc1, wanted.fc1, narrow=wanted.fc1.format == wanted.fc2.format)
            _place(block.proj, wanted.proj)
            _place(block.fc2, wanted.fc2)
        if formats.reduction is not None:
            _place(weights.mergings[index].reduction, formats.reduction)


def _place(linear: Linear, layer: LayerFormat, narrow: bool | None = None) -> None:
    """``narrow``: whether the result is stored in 8 bits; None where the scheme alone says it."""
    if isinstance(linear, LayerForms):
        linear.place(layer, narrow=linear.stores_8_bits if narrow is None else narrow)


class _QuantizedBuilder(Builder):
    """Makes both forms of the layers that a scheme quantises; the rest is the wide engine's."""

    def __init__(
        self,
        model: SwinTransformer,
        calibration: Calibration,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        self.layers, self.ranges = quant_layers(model), calibration.layers

    def linear(
        self,
        name: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fold: torch.nn.LayerNorm | None = None,
    ) -> Linear:
        found = self.ranges[name]
        affine = self.affine(weight, bias, fold)
        if not found.scheme.quantized:
            return affine
        self.footprint.num_bytes -= affine.weight.numel() * affine.weight.element_size()
        host = dataclasses.replace(affine, weight=affine.weight.cpu())
        layer = self.layers[name]
        packed, steps = quantize_layer(layer, found)
        library = library_affine(layer, found) if self.device.type == "cuda" else None
        return LayerForms(host, packed, steps, library, self.device, self.footprint)


def quantize_layer(layer: QuantLayer, r: LayerRange) -> tuple[torch.Tensor, Steps]:
    """A layer's 8-bit weight ``[N, K]`` and its steps on the host."""
    operands = quantize_linear(layer, r)
    assert operands.weight_scale is not None  # the scheme quantises it
    scale = operands.weight_scale
    input_scale = input_inverse = None
    if r.scheme.activation == "per_tensor":
        scale = r.input_scale * scale
        input_scale = torch.tensor([r.input_scale])
        input_inverse = torch.tensor([inverse_of(r.input_scale)])
    output_scale = pad = None
    if r.scheme.output == "quantized":
        output_scale = torch.tensor(r.output_scale)
        if layer.attention is not None:
            pad = stored_pad(layer, r)
    steps = Steps(
        scale.cpu(),
        None if operands.bias is None else operands.bias.cpu(),
        input_scale,
        input_inverse,
        output_scale,
        r.output_scale[0] if r.output_scale else 1.0,
        pad,
    )
    return operands.weight.cpu().contiguous(), steps


def stored_pad(layer: QuantLayer, r: LayerRange) -> torch.Tensor:
    """qkv ``[3C]`` of a padded token, the layer's own bias, in the output's format."""
    rows = layer.linear.weight.shape[0]
    bias = torch.zeros(rows) if layer.bias is None else layer.bias.detach().float().cpu()
    parts = [
        quantize(part, inverse_of(scale), r.scheme.format)
        for part, scale in zip(bias.chunk(3), r.output_scale, strict=True)
    ]
    return torch.cat(parts).to(FORMAT_DTYPES[r.scheme.format])
