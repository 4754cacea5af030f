"""timm's ``SwinTransformer`` and ``SwinTransformerV2``.

timm pads after the cyclic shift, the fused kernel before. A shifted block on a map that is no
multiple of its window therefore runs timm's own forward pass: same answers, not faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastswin.accelerate.block import check_stream
from fastswin.accelerate.merging import MapMergingV1, MapMergingV2
from fastswin.accelerate.official_names import OfficialBlock
from fastswin.accelerate.swap import Fused
from fastswin.models.live.source import pair

_EMBED = "timm.layers.patch_embed.PatchEmbed"


class _Block(OfficialBlock):
    def _fastswin_drop_paths(self: Any) -> tuple[nn.Module, nn.Module]:
        return self.drop_path1, self.drop_path2

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        check_stream(x, self.attn.qkv.in_features, "[B, H, W, C]")
        window, shift = pair(self.attn.window_size), pair(self.shift_size)
        whole = x.shape[1] % window[0] == 0 and x.shape[2] % window[1] == 0
        if self._fastswin_bypassed() or (any(shift) and not whole):
            return self._fastswin_own_forward(x)
        return self._fastswin_forward(x, shift)


class BlockV1(_Block):
    """timm's SwinTransformerBlock."""

    POST_NORM = False


class BlockV2(_Block):
    """timm's SwinTransformerV2Block."""

    POST_NORM = True


_BLOCKS: dict[str, type[Fused]] = {
    "timm.models.swin_transformer.SwinTransformerBlock": BlockV1,
    "timm.models.swin_transformer_v2.SwinTransformerV2Block": BlockV2,
}


_MERGINGS: dict[str, type[Fused]] = {
    "timm.models.swin_transformer.PatchMerging": MapMergingV1,
    "timm.models.swin_transformer_v2.PatchMerging": MapMergingV2,
}


def block_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a block, by the full name of its class."""
    return _BLOCKS.get(name)


def merging_mixin(name: str, module: Any) -> type[Fused] | None:
    """The mixin of a patch merging, by the full name of its class."""
    return _MERGINGS.get(name)


def patch_conv(name: str, module: Any) -> nn.Module | None:
    """The patch convolution of an embedding module, by the full name of its class."""
    return module.proj if name == _EMBED else None
