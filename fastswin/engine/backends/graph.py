"""The forward pass of models/swin.py as a static graph for one image size, in window order.

    images [B, 3, h, w] -> patches [B, T, C] -> blocks, one gather between two -> norm, mean, head

The stream ``x [B, T, C]`` stands in the order of the coming block's windows, so the runtime sees no
roll, partition or reverse: a constant gather of whole rows leads from one order to the next
(models/window_order.py), and merging gathers its four neighbours from wherever they stand. Places
that are padding hold some other token; attention reads the padded token's qkv there instead, and
nothing else reads them. An :class:`Emitter` writes each step in a runtime's own operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fastswin.engine.backends.layers import (
    Array,
    Attention,
    Linear,
    linear,
    norm_arrays,
    to_array,
)
from fastswin.engine.prepared import PreparedBlock, PreparedModel
from fastswin.models.config import SwinConfig
from fastswin.models.geometry import runtime_shift
from fastswin.models.window_order import (
    image_order,
    merging_order,
    place_of,
    transition,
    window_order,
)
from fastswin.ops.window_attention.geometry import shift_attention_mask
from fastswin.ops.window_attention.reference import MAX_LOGIT_SCALE
from fastswin.quant.ranges import LayerRange

Pair = tuple[int, int]
Value = Any

#: Elements up to which bias and shift mask are added up beforehand; above, the mask is a constant
#: of its own that all heads share (a map of 200x336 would hold 39 MB a block in Swin-T).
SUMMED_BIAS_ELEMENTS = 1 << 22


class Emitter(Protocol):
    """Writes a graph in one runtime's operators; values are its own handles.

    Attributes:
        qkv_products: in how many products a runtime computes q, k and v fastest, 1 or 3.
    """

    qkv_products: int

    def images(self, shape: tuple[int, int, int, int]) -> Value:
        """The input ``[B, channels, h, w]``, float32."""

    def patches(self, images: Value, weight: Array, bias: Array) -> Value:
        """``[B, H * W, C]`` from a convolution whose stride is its kernel, row by row."""

    def linear(self, x: Value, layer: Linear) -> Value:
        """``[..., K] -> [..., N]``."""

    def layer_norm(
        self, x: Value, eps: float, channels: int, affine: tuple[Array, Array] | None
    ) -> Value:
        """Over the last axis, of ``channels`` elements."""

    def add(self, x: Value, y: Value | Array) -> Value:
        """Sum."""

    def gelu(self, x: Value) -> Value:
        """Exact GELU."""

    def gather(self, x: Value, index: Array) -> Value:
        """Rows ``index [T']`` of axis 1: ``[B, T, C] -> [B, T', C]``."""

    def blank(self, x: Value, keep: Array, fill: Array) -> Value:
        """``x [B, T, C]`` where ``keep [T]``, else ``fill [C]``."""

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        """To a constant shape."""

    def attention(self, qkv: Sequence[Value], spec: Attention) -> Value:
        """One ``[B * nW, N, 3C]``, or three ``[B * nW, N, C]``, ``-> [B * nW, N, C]``."""

    def mean(self, x: Value) -> Value:
        """Over axis 1: ``[B, T, C] -> [B, C]``."""


def emit_swin(
    emitter: Emitter,
    config: SwinConfig,
    weights: PreparedModel,
    batch: int,
    image_size: Pair,
    kind: str,
    position: torch.Tensor | None = None,
    ranges: Mapping[str, LayerRange] | None = None,
) -> list[Value]:
    """Write the model.

    Args:
        emitter: of a runtime.
        config: the model's.
        weights: prepared in fp32 on the CPU.
        batch: images ``B``.
        image_size: ``(h, w)`` in pixels, whole patches.
        kind: "logits", or "features" for every stage's ``[B, H_i, W_i, C_i]``.
        position: position embedding ``[1, H, W, C]`` of this size, None without one.
        ranges: int8 ranges by layer name; None keeps floats.

    Returns:
        The outputs: logits ``[B, classes]`` (pooled features without a head), or the pyramid.

    Raises:
        ValueError: a stage's map is smaller than its window; the message names the stage.
    """
    story = _Story(emitter, config, weights, batch, image_size, ranges or {})
    return story.tell(kind, position)


class _Story:
    """State of one writing: the emitter, the model and the present order of the stream."""

    def __init__(
        self,
        emitter: Emitter,
        config: SwinConfig,
        weights: PreparedModel,
        batch: int,
        image_size: Pair,
        ranges: Mapping[str, LayerRange],
    ) -> None:
        self.e, self.config, self.weights = emitter, config, weights
        self.batch, self.image_size, self.ranges = batch, image_size, ranges

    def tell(self, kind: str, position: torch.Tensor | None) -> list[Value]:
        config, weights, e = self.config, self.weights, self.e
        images = e.images((self.batch, config.in_channels, *self.image_size))
        x = e.patches(images, to_array(weights.patch_weight), to_array(weights.patch_bias))
        if weights.patch_norm is not None:
            x = e.layer_norm(
                x, config.resample_eps, config.embed_dim, norm_arrays(weights.patch_norm)
            )
        if position is not None:
            x = e.add(x, to_array(position.reshape(1, -1, config.embed_dim)))
        order = image_order(config.map_size(0, self.image_size))
        outputs = []
        for stage, blocks in enumerate(weights.stages):
            map_size = config.map_size(stage, self.image_size)
            x, order = self.stage(x, order, stage, blocks, map_size)
            if kind == "features":
                whole = self.reorder(x, order, image_order(map_size))
                outputs.append(e.reshape(whole, (self.batch, *map_size, config.dim(stage))))
            if stage + 1 < config.num_stages:
                x, order = self.merge(x, order, stage, map_size)
            else:
                real = image_order(map_size)
                x = self.reorder(x, order, real) if len(order) > len(real) else x
        if kind == "features":
            return outputs
        last = config.dim(config.num_stages - 1)
        x = e.mean(e.layer_norm(x, config.layer_norm_eps, last, norm_arrays(weights.norm)))
        return [x if weights.head is None else e.linear(x, linear(weights.head, None))]

    def stage(
        self,
        x: Value,
        order: torch.Tensor,
        stage: int,
        blocks: tuple[PreparedBlock, ...],
        map_size: Pair,
    ) -> tuple[Value, torch.Tensor]:
        window = self.config.stage_window(stage)
        shift = runtime_shift(map_size, window, self.config.window_convention, stage=stage)
        mask = shift_attention_mask(map_size, window, shift) if shift != (0, 0) else None
        for number, block in enumerate(blocks):
            shifted = block.shifted and mask is not None
            wanted = window_order(map_size, window, shift if shifted else (0, 0))
            x = self.reorder(x, order, wanted)
            order = wanted
            x = self.block(x, order, stage, number, block, mask if shifted else None)
        return x, order

    def block(
        self,
        x: Value,
        order: torch.Tensor,
        stage: int,
        number: int,
        block: PreparedBlock,
        mask: torch.Tensor | None,
    ) -> Value:
        """V1: ``x + attn(norm(x))``, ``x + mlp(norm(x))``; V2: ``x + norm(attn(x))`` likewise."""
        e, eps, at = self.e, self.config.layer_norm_eps, f"layers.{stage}.blocks.{number}"
        norm1, norm2, C = norm_arrays(block.norm1), norm_arrays(block.norm2), self.config.dim(stage)
        h = e.layer_norm(x, eps, C, None) if norm1 is None else x
        h = self.attention(h, order, stage, block, mask, at)
        x = e.add(x, h if norm1 is None else e.layer_norm(h, eps, C, norm1))
        h = e.layer_norm(x, eps, C, None) if norm2 is None else x
        h = e.gelu(e.linear(h, linear(block.fc1, self.ranges.get(f"{at}.mlp.fc1"))))
        h = e.linear(h, linear(block.fc2, self.ranges.get(f"{at}.mlp.fc2")))
        return e.add(x, h if norm2 is None else e.layer_norm(h, eps, C, norm2))

    def attention(
        self,
        h: Value,
        order: torch.Tensor,
        stage: int,
        block: PreparedBlock,
        mask: torch.Tensor | None,
        at: str,
    ) -> Value:
        e, C, heads = self.e, self.config.dim(stage), self.config.num_heads[stage]
        tokens = block.window_size[0] * block.window_size[1]
        windows = self.batch * len(order) // tokens
        layer = linear(block.qkv, self.ranges.get(f"{at}.attn.qkv"))
        factor = block.scale if block.logit_scale is None else 1.0
        products = e.qkv_products
        qkv = [e.linear(h, part) for part in layer.scale_first(C, factor).split(products)]
        if bool((order < 0).any()):
            fill = np.zeros(3 * C, np.float32)
            if block.pad_qkv is not None:
                fill = to_array(block.pad_qkv).copy()
                fill[:C] *= np.float32(factor)
            keep, fills = (order >= 0).numpy(), np.split(fill, products)
            qkv = [e.blank(part, keep, f) for part, f in zip(qkv, fills, strict=True)]
        temperature = None
        if block.logit_scale is not None:
            temperature = to_array(block.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp())
        spec = Attention(
            windows, tokens, heads, C // heads, self.score_bias(block, mask), temperature
        )
        shape = (windows, tokens, 3 * C // products)
        out = e.attention([e.reshape(part, shape) for part in qkv], spec)
        out = e.reshape(out, (self.batch, len(order), C))
        return e.linear(out, linear(block.proj, self.ranges.get(f"{at}.attn.proj")))

    def score_bias(self, block: PreparedBlock, mask: torch.Tensor | None) -> tuple[Array, ...]:
        """Position bias ``[1, nH, N, N]`` and shift mask ``[B * nW, 1, N, N]``, or their sum."""
        bias = to_array(block.bias)[None]
        if mask is None:
            return (bias,)
        repeated = np.tile(to_array(mask)[:, None], (self.batch, 1, 1, 1))
        if len(repeated) * bias.size <= SUMMED_BIAS_ELEMENTS:
            return (bias + repeated,)
        return bias, repeated

    def merge(
        self, x: Value, order: torch.Tensor, stage: int, map_size: Pair
    ) -> tuple[Value, torch.Tensor]:
        """``[B, T, C] -> [B, T', 2C]`` in the window order of the next stage's first block."""
        e, config, merging = self.e, self.config, self.weights.mergings[stage]
        merged = config.map_size(stage + 1, self.image_size)
        wanted = window_order(merged, config.stage_window(stage + 1), (0, 0))
        near = merging_order(map_size, wanted).flatten()
        x = e.gather(x, place_of(order)[near.clamp(min=0)].numpy())
        if bool((near < 0).any()):
            x = e.blank(x, (near >= 0).numpy(), np.zeros(config.dim(stage), np.float32))
        x = e.reshape(x, (self.batch, len(wanted), 4 * config.dim(stage)))
        layer = linear(merging.reduction, self.ranges.get(f"layers.{stage}.downsample.reduction"))
        four, two = 4 * config.dim(stage), config.dim(stage + 1)
        if merging.norm is None:
            return e.linear(e.layer_norm(x, config.resample_eps, four, None), layer), wanted
        return e.layer_norm(
            e.linear(x, layer), config.resample_eps, two, norm_arrays(merging.norm)
        ), wanted

    def reorder(self, x: Value, order: torch.Tensor, wanted: torch.Tensor) -> Value:
        index = transition(order, wanted)
        return x if index is None else self.e.gather(x, index.numpy())
