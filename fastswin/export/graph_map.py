"""The readable Swin rewritten for export in image order, ``[B, H, W, C]`` from end to end.

Attention is one ``fastswin::WindowAttention`` node (attention_op.py), inside which shift and
partition are index arithmetic; nothing else of a block looks at a token's place.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fastswin.export.attention_op import window_attention_node
from fastswin.export.graph_attention import GraphAttention
from fastswin.export.graph_layers import GraphLinear, GraphMlp, GraphNorm, GraphPatchEmbed
from fastswin.models.geometry import runtime_shift
from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    gather_neighbours,
    pad_to_patches,
)

Pair = tuple[int, int]


class MapBlock(nn.Module):
    """One block on a map ``[B, H, W, C]``."""

    def __init__(self, block: SwinTransformerBlock, shift_size: Pair, padded: bool) -> None:
        super().__init__()
        self.post_norm = block.post_norm
        self.shift_size = shift_size if block.shifted else (0, 0)
        self.padded = padded
        self.norm1, self.norm2 = GraphNorm(block.norm1), GraphNorm(block.norm2)
        self.attn = GraphAttention(block.attn, "fastswin")
        self.mlp = GraphMlp(block.mlp.fc1, block.mlp.fc2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post_norm:
            x = x + self.norm1(self.attention(x))
            return x + self.norm2(self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        attn = self.attn
        temperature = attn.temperature
        out = window_attention_node(
            attn.qkv(x),
            attn.bias,
            None if temperature is None else temperature.flatten(),
            attn.qkv.bias if self.padded else None,
            num_heads=attn.num_heads,
            window_size=attn.window_size,
            shift_size=self.shift_size,
            scale=attn.scale if temperature is None else 1.0,
        )
        return attn.proj(out)


class MapMerging(nn.Module):
    """Patch merging of a map."""

    def __init__(self, merging: PatchMerging) -> None:
        super().__init__()
        self.post_norm = merging.post_norm
        self.reduction = GraphLinear(merging.reduction.weight, None)
        self.norm = GraphNorm(merging.norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = gather_neighbours(x)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))


class MapSwin(nn.Module):
    """A Swin Transformer at one image size with attention as one node a block."""

    def __init__(
        self,
        model: SwinTransformer,
        image_size: Pair,
        *,
        features: bool = False,
        block_type: type[MapBlock] = MapBlock,
    ) -> None:
        """Copy a readable model's weights into constants.

        Args:
            model: the readable model, fp32.
            image_size: ``(height, width)`` in pixels of every image the graph will take.
            features: return the stages' maps instead of the logits.
            block_type: how a block's attention is written.
        """
        super().__init__()
        self.config, self.features = model.config, features
        config = model.config
        self.map_size = config.map_size(0, image_size)
        position = None
        if config.absolute_position_embedding:
            position = model._position_embedding(self.map_size).flatten(1, 2)
        self.patch_embed = GraphPatchEmbed(model.patch_embed, position)
        self.layers = nn.ModuleList()
        for index, stage in enumerate(cast("list[SwinTransformerStage]", model.layers)):
            size = config.map_size(index, image_size)
            window = config.stage_window(index)
            shift = runtime_shift(size, window, config.window_convention, stage=index)
            padded = bool(size[0] % window[0] or size[1] % window[1])
            kinds = cast("list[SwinTransformerBlock]", stage.blocks)
            blocks = nn.Sequential(*(block_type(block, shift, padded) for block in kinds))
            layer = nn.ModuleDict({"blocks": blocks})
            if stage.downsample is not None:
                layer["downsample"] = MapMerging(stage.downsample)
            self.layers.append(layer)
        self.norm = GraphNorm(model.norm)
        self.head = (
            GraphLinear(model.head.weight, model.head.bias)
            if isinstance(model.head, nn.Linear)
            else nn.Identity()
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Logits ``[B, classes]`` or, with ``features``, one map a stage; fp32."""
        x = pad_to_patches(images, self.config).to(self.patch_embed.weight.dtype)
        x = self.patch_embed(x)
        x = x.reshape(-1, *self.map_size, x.shape[-1])
        outputs = []
        for layer in cast("list[nn.ModuleDict]", self.layers):
            x = layer["blocks"](x)
            if self.features:
                outputs.append(x.float())
            if "downsample" in layer:
                x = layer["downsample"](x)
        if self.features:
            return tuple(outputs)
        return self.head(self.norm(x).mean((1, 2))).float()
