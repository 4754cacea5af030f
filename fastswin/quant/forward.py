"""The forward pass of models/swin.py, in the same order, with every quantisable product handed out.

    images [B, 3, h, w] -> embed -> blocks and mergings over ``product.linear`` -> norm, pool, head

One story serves three tellers: the observer of calibration, fake quantisation in training, and the
integer reference. A product receives its layer and the layer's input *without* the affine of the
LayerNorm before it, which is folded into the weight (layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin._triton.available import Impl
from fastswin.models.geometry import runtime_shift
from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    gather_neighbours,
)
from fastswin.quant.layers import QuantLayer

Pair = tuple[int, int]


class Product(Protocol):
    """What stands for a linear layer."""

    def linear(self, layer: QuantLayer, x: torch.Tensor) -> torch.Tensor:
        """``[..., K] -> [..., N]``, bias included, in the wide dtype."""

    def pad_qkv(self, layer: QuantLayer) -> torch.Tensor | None:
        """qkv ``[3C]`` of a padded token: the layer's own bias, as its output would store it."""


def run(
    model: SwinTransformer,
    layers: Mapping[str, QuantLayer],
    images: torch.Tensor,
    product: Product,
    impl: Impl = "reference",
) -> torch.Tensor:
    """Logits ``[B, classes]`` of a model whose linear layers are a product's.

    Args:
        model: its training flag decides about dropout and drop path.
        layers: :func:`~fastswin.quant.layers.quant_layers` of the model.
        images: float ``[B, channels, h, w]``.
        product: computes the layers.
        impl: of window attention; "auto" trains faster on a GPU.
    """
    x = model.embed(images)
    for i, stage in enumerate(cast("list[SwinTransformerStage]", model.layers)):
        window = model.config.stage_window(i)
        shift = runtime_shift(
            (x.shape[1], x.shape[2]), window, model.config.window_convention, stage=i
        )
        for j, block in enumerate(cast("list[SwinTransformerBlock]", stage.blocks)):
            at = f"layers.{i}.blocks.{j}"
            x = _block(at, layers, block, x, shift if block.shifted else (0, 0), product, impl)
        if stage.downsample is not None:
            reduction = layers[f"layers.{i}.downsample.reduction"]
            x = _merge(reduction, stage.downsample, x, product)
    return model.head(model.norm(x).mean(dim=(1, 2)))


def _block(
    at: str,
    layers: Mapping[str, QuantLayer],
    block: SwinTransformerBlock,
    x: torch.Tensor,
    shift: Pair,
    product: Product,
    impl: Impl,
) -> torch.Tensor:
    qkv, proj = layers[f"{at}.attn.qkv"], layers[f"{at}.attn.proj"]
    fc1, fc2 = layers[f"{at}.mlp.fc1"], layers[f"{at}.mlp.fc2"]
    attn, mlp = block.attn, block.mlp

    def attention(h: torch.Tensor) -> torch.Tensor:
        attended = ops.window_attention(
            product.linear(qkv, h),
            num_heads=attn.num_heads,
            window_size=attn.window_size,
            shift_size=shift,
            scale=attn.scale,
            qkv_bias=product.pad_qkv(qkv),
            dropout_p=attn.attn_drop_rate if attn.training else 0.0,
            impl=impl,
            **attn.position_bias(),
        )
        return attn.proj_drop(product.linear(proj, attended))

    def perceptron(h: torch.Tensor) -> torch.Tensor:
        hidden = mlp.drop(F.gelu(product.linear(fc1, h)))
        return mlp.drop(product.linear(fc2, hidden))

    if block.post_norm:
        x = x + block.drop_path(block.norm1(attention(x)))
        return x + block.drop_path(block.norm2(perceptron(x)))
    x = x + block.drop_path(attention(_bare(block.norm1, x)))
    return x + block.drop_path(perceptron(_bare(block.norm2, x)))


def _merge(
    layer: QuantLayer, merging: PatchMerging, x: torch.Tensor, product: Product
) -> torch.Tensor:
    x = gather_neighbours(x)
    if merging.post_norm:
        return merging.norm(product.linear(layer, x))
    return product.linear(layer, _bare(merging.norm, x))


def _bare(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without its affine."""
    return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
