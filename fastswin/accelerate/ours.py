"""fastswin's readable model: its attention is fused already, the rest of the block is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastswin import ops
from fastswin.accelerate.block import Pair, check_stream
from fastswin.accelerate.merging import MapMergingV1, MapMergingV2
from fastswin.accelerate.official_names import OfficialBlock
from fastswin.accelerate.parts import Branch, project, project_qkv
from fastswin.accelerate.swap import Fused

_BLOCK = "fastswin.models.swin.SwinTransformerBlock"


class _Block(OfficialBlock):
    def _fastswin_attend(self: Any, x: torch.Tensor, shift_size: Pair) -> Branch:
        attn = self.attn
        qkv_bias = attn.qkv_bias
        out = ops.window_attention(
            project_qkv(x, attn.qkv.weight, qkv_bias),
            num_heads=attn.num_heads,
            window_size=attn.window_size,
            shift_size=shift_size,
            scale=attn.scale,
            qkv_bias=qkv_bias,
            sum_qkv_grad=True,
            dropout_p=attn.attn_drop_rate if attn.training else 0.0,
            impl=self._fastswin.impl,
            **attn.position_bias(),
        )
        return project(attn.proj, attn.proj_drop, out)

    def forward(self: Any, x: torch.Tensor, shift_size: Pair) -> torch.Tensor:
        check_stream(x, self.attn.qkv.in_features, "[B, H, W, C]")
        if self._fastswin_bypassed():
            return self._fastswin_own_forward(x, shift_size)
        return self._fastswin_forward(x, shift_size if self.shifted else (0, 0))


class BlockV1(_Block):
    """Norm first."""

    POST_NORM = False


class BlockV2(_Block):
    """Norm last."""

    POST_NORM = True


def block_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a block, by the full name of its class."""
    if name != _BLOCK:
        return None
    return BlockV2 if module.post_norm else BlockV1


def merging_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a patch merging, by the full name of its class."""
    if name != "fastswin.models.swin.PatchMerging":
        return None
    return MapMergingV2 if module.post_norm else MapMergingV1


def patch_conv(name: str, module: Any) -> nn.Module | None:
    """The patch convolution of an embedding module, by the full name of its class."""
    return module.proj if name == "fastswin.models.swin.PatchEmbed" else None
