"""What the graph of a model is made of: arrays by value, no framework.

    y = x @ weight.T + bias                                          float
    y = (q_x @ q_w.T) * (input_scale * weight_scale) + bias          int8, quant/ranges.py

Weights are those of engine/prepare.py in fp32: LayerNorm's affine folded into the product behind it
in V1. ``scale_first`` folds attention's scale into the rows of q, exactly in either format, because
a row and its quantisation step are multiplied alike.

x86 without VNNI multiplies unsigned by signed bytes and adds each pair of products in 16 bits,
which saturates: ``255 * (|w0| + |w1|)`` must stay below 32768, so ``|w0| + |w1| <= 128``. There a
row in which neighbours would pass that gets a larger step; its weights lose one of their eight bits
at most. Without that Swin-T's logits are 2.4 times as far off.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fastswin.engine.prepared import Linear as PreparedLinear
from fastswin.engine.prepared import Norm
from fastswin.quant.ranges import LayerRange

Array = np.ndarray

#: Largest sum of two neighbouring weights' magnitudes where pairs are added in 16 bits.
SATURATING_PAIR = 128


@dataclasses.dataclass(frozen=True)
class Linear:
    """One product.

    Attributes:
        weight: float32 ``[N, K]``.
        bias: float32 ``[N]``, or None.
        input_scale: step of the int8 input; None where the product stays in floats.
        weight_scale: float32 ``[N]``, steps of the int8 weight's rows, with ``input_scale``.
    """

    weight: Array
    bias: Array | None
    input_scale: float | None = None
    weight_scale: Array | None = None

    @property
    def quantized(self) -> bool:
        return self.input_scale is not None

    def scale_first(self, rows: int, factor: float) -> Linear:
        """The same product with its first ``rows`` outputs multiplied by ``factor > 0``."""

        def scaled(values: Array | None) -> Array | None:
            if values is None:
                return None
            values = values.copy()
            values[:rows] *= np.float32(factor)
            return values

        weight = scaled(self.weight)
        assert weight is not None
        return Linear(weight, scaled(self.bias), self.input_scale, scaled(self.weight_scale))

    def split(self, parts: int) -> list[Linear]:
        """Products that give equal shares of the outputs, in order."""

        def shares(values: Array | None) -> list[Array | None]:
            return [None] * parts if values is None else list(np.split(values, parts))

        return [
            Linear(weight, bias, self.input_scale, weight_scale)
            for weight, bias, weight_scale in zip(
                np.split(self.weight, parts), shares(self.bias), shares(self.weight_scale),
                strict=True,
            )
        ]  # fmt: skip

    def quantized_weight(self, *, saturating: bool) -> tuple[Array, Array]:
        """int8 weight ``[N, K]``, half to even in -127..127, and its float32 steps ``[N]``."""
        assert self.weight_scale is not None
        steps = self.weight_scale
        if saturating:
            pair = _largest_pair(self.weight)
            steps = np.maximum(steps, pair / SATURATING_PAIR).astype(np.float32)
            # two values that both round up may pass the limit by one: one step more for their row
            over = _largest_pair(_rounded(self.weight, steps)) > SATURATING_PAIR
            steps[over] = np.maximum(steps, pair / (SATURATING_PAIR - 1))[over]
        return _rounded(self.weight, steps).astype(np.int8), steps


def _rounded(weight: Array, steps: Array) -> Array:
    return np.clip(np.rint(weight / steps[:, None]), -127, 127)


def _largest_pair(weight: Array) -> Array:
    """Largest ``|w[2 i]| + |w[2 i + 1]|`` of each row."""
    magnitude = np.abs(weight)
    if magnitude.shape[1] % 2:
        magnitude = np.pad(magnitude, ((0, 0), (0, 1)))
    return (magnitude[:, 0::2] + magnitude[:, 1::2]).max(axis=1)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention within windows of ``[B * nW, N, 3C]`` q, k, v.

    Attributes:
        windows: ``B * nW``.
        tokens: ``N``.
        heads, head_dim: ``nH`` and ``D``.
        bias: float32 additions to the scores, each of a shape that broadcasts to
            ``[B * nW, nH, N, N]``.
        temperature: V2's ``exp(min(logit_scale, ln 100))``, float32 ``[nH]``; q and k are then
            normalised. None: dot products, scale folded into q.
    """

    windows: int
    tokens: int
    heads: int
    head_dim: int
    bias: tuple[Array, ...]
    temperature: Array | None


def linear(affine: PreparedLinear, ranges: LayerRange | None) -> Linear:
    """A prepared layer in floats, or in int8 where its ranges say so."""
    weight = to_array(affine.weight)
    bias = None if affine.bias is None else to_array(affine.bias)
    if ranges is None or not ranges.scheme.quantized:
        return Linear(weight, bias)
    return Linear(weight, bias, ranges.input_scale, to_array(ranges.weight_scale))


def norm_arrays(norm: Norm | None) -> tuple[Array, Array] | None:
    """Weight and bias ``[C]``; None where the affine is folded away."""
    return None if norm is None else (to_array(norm.weight), to_array(norm.bias))


def to_array(tensor: torch.Tensor) -> Array:
    """A float32 array of a CPU tensor's values."""
    return tensor.detach().float().contiguous().numpy()
