"""Layers outside the blocks: LayerNorm (embedding, merging, last) and the patch convolution.

A patch convolution does not overlap, so it is a matrix product of ``[B * H * W, 3 * p * p]`` rows;
cuDNN converts layouts around it, which takes two thirds of its time in training.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin.accelerate.parts import autocast_dtype, autocast_norm_dtype, is_plain
from fastswin.accelerate.swap import Fused


class FusedLayerNorm(Fused):
    """``nn.LayerNorm`` over channels with a fused backward."""

    @staticmethod
    def _fastswin_blocker(module: Any) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} axes, not the channels only"
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim < 2:
            return self._fastswin_own_forward(x)
        norm: Any = self
        options = self._fastswin
        norm_dtype = x.dtype
        if autocast_dtype(x) is not None:
            norm_dtype = options.residual_dtype or autocast_norm_dtype(x)
        _, normed = ops.add_layer_norm(
            x, norm.weight, norm.bias, eps=norm.eps, norm_dtype=norm_dtype, impl=options.impl
        )
        return normed


class FusedPatchConv(Fused):
    """The convolution of a patch embedding as one matrix product, with its input checked."""

    @staticmethod
    def _fastswin_blocker(module: Any) -> str | None:
        plain = module.stride == module.kernel_size and module.groups == 1
        plain = plain and module.padding in ((0, 0), "valid") and module.dilation == (1, 1)
        return None if plain else "its patches overlap, are padded, dilated or grouped"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        conv: Any = self
        rows, columns = conv.kernel_size
        if images.ndim != 4 or images.shape[1] != conv.in_channels:
            raise ValueError(
                f"images must be [B, {conv.in_channels}, height, width], "
                f"got shape {tuple(images.shape)}"
            )
        if not images.dtype.is_floating_point:
            raise TypeError(f"images must be a float tensor, got {images.dtype}")
        B, channels, height, width = images.shape
        H, W = height // rows, width // columns
        half = autocast_dtype(images)
        x = images[:, :, : H * rows, : W * columns].to(half or images.dtype)
        x = x.reshape(B, channels, H, rows, W, columns).permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(B, H, W, channels * rows * columns)
        return F.linear(x, conv.weight.flatten(1), conv.bias).permute(0, 3, 1, 2)


def layer_mixin(module: nn.Module, patch_convs: set[int]) -> type[Fused] | None:
    """The mixin of a layer outside the blocks, None for layers that stay.

    Args:
        module: any module.
        patch_convs: ids of the convolutions that embed patches.
    """
    if is_plain(module, nn.LayerNorm):
        return FusedLayerNorm
    if id(module) in patch_convs and is_plain(module, nn.Conv2d):
        return FusedPatchConv
    return None
