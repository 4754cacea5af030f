"""The readable Swin rewritten for export at one image size: window order and constants only.

    images [B, 3, h, w] -> embed -> gather -> blocks, a gather between two -> merging -> head

Between two blocks one constant ``Gather`` replaces reverse, roll, roll and partition (order.py);
padded tokens are blanked where attention reads them and left out of the pool. Everything that
depends on the size is computed here, in Python, so the graph holds no shape arithmetic.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from fastswin.export.graph_attention import AttentionForm, GraphAttention
from fastswin.export.graph_layers import (
    GraphLinear,
    GraphMlp,
    GraphNorm,
    GraphPatchEmbed,
    buffer,
    folded,
)
from fastswin.models.geometry import runtime_shift
from fastswin.models.swin import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    pad_to_patches,
)
from fastswin.models.window_order import (
    image_order,
    merging_order,
    place_of,
    transition,
    window_order,
)
from fastswin.ops.window_attention.geometry import shift_attention_mask

Pair = tuple[int, int]


class GraphBlock(nn.Module):
    """One block in window order, with the gather that leads to it."""

    def __init__(
        self,
        block: SwinTransformerBlock,
        form: AttentionForm,
        index: torch.Tensor | None,
        fold_norms: bool,
    ) -> None:
        super().__init__()
        self.index = None if index is None else buffer(index)
        self.post_norm, self.shifted = block.post_norm, block.shifted
        fold = fold_norms and not block.post_norm
        self.norm1, self.norm2 = GraphNorm(block.norm1, fold), GraphNorm(block.norm2, fold)
        self.attn = GraphAttention(block.attn, form, block.norm1 if fold else None)
        self.mlp = GraphMlp(block.mlp.fc1, block.mlp.fc2, block.norm2 if fold else None)

    def forward(
        self, x: torch.Tensor, keep: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the block.

        Args:
            x: stream ``[B, T, C]`` in the previous order.
            keep: ``[T, 1]`` in the new order, 0 where padded; None without padding.
            mask: shift mask of the block, None where it is not shifted.
        """
        if self.index is not None:
            x = torch.index_select(x, 1, self.index)
        if self.post_norm:
            x = x + self.norm1(self.attn(x, mask, keep))
            return x + self.norm2(self.mlp(x))
        x = x + self.attn(self.norm1(x), mask, keep)
        return x + self.mlp(self.norm2(x))


class GraphMerging(nn.Module):
    """Patch merging out of one window order into the next stage's."""

    def __init__(self, merging: PatchMerging, places: torch.Tensor, fold_norms: bool) -> None:
        """Take the weights, and ``places [T', 4]`` in the stream, -1 for a zero token."""
        super().__init__()
        fold = fold_norms and not merging.post_norm
        self.post_norm = merging.post_norm
        self.index = buffer(places.clamp(min=0).flatten())
        outside = places < 0
        self.keep = buffer((~outside).float()[..., None]) if outside.any() else None
        norm = merging.norm if fold else None
        self.reduction = GraphLinear(*folded(merging.reduction.weight, None, norm))
        self.norm = GraphNorm(merging.norm, fold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.index_select(x, 1, self.index)
        channels = x.shape[-1]
        if self.keep is not None:
            x = x.reshape(-1, len(self.index) // 4, 4, channels) * self.keep
        x = x.reshape(-1, len(self.index) // 4, 4 * channels)
        return self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))


class GraphStage(nn.Module):
    """Blocks at one resolution; ``mask`` and ``keep`` are shared by all of them."""

    def __init__(
        self,
        stage: SwinTransformerStage,
        image_size: Pair,
        form: AttentionForm,
        order: torch.Tensor | None,
        features: bool,
        fold_norms: bool,
    ) -> None:
        """Take a stage's weights.

        Args:
            stage: the readable stage.
            image_size: ``(height, width)`` in pixels.
            form: of the attention.
            order: order of the incoming stream; None: it comes in that of the first block.
            features: whether the stage's output map is wanted.
            fold_norms: as in :class:`GraphSwin`.
        """
        super().__init__()
        self.downsample: GraphMerging | None = None
        config = stage.config
        self.map_size = map_size = config.map_size(stage.stage, image_size)
        window = config.stage_window(stage.stage)
        shift = runtime_shift(map_size, window, config.window_convention, stage=stage.stage)
        orders = {s: window_order(map_size, window, s) for s in ((0, 0), shift)}
        mask = shift_attention_mask(map_size, window, shift) if any(shift) else None
        self.attn_mask = None if mask is None else buffer(mask[:, None])
        order = orders[0, 0] if order is None else order
        self.blocks = nn.ModuleList()
        for block in cast("list[SwinTransformerBlock]", stage.blocks):
            wanted = orders[shift if block.shifted else (0, 0)]
            self.blocks.append(GraphBlock(block, form, transition(order, wanted), fold_norms))
            order = wanted
        self.order = order
        self.keep = _kept(orders[0, 0])
        self.shifted_keep = _kept(orders[shift])
        index = transition(order, image_order(map_size)) if features else None
        self.image_index = None if index is None else buffer(index)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in cast("list[GraphBlock]", self.blocks):
            keep = self.shifted_keep if block.shifted else self.keep
            x = block(x, keep, self.attn_mask if block.shifted else None)
        return x

    def feature_map(self, x: torch.Tensor) -> torch.Tensor:
        """The stage's output as a map ``[B, H, W, C]``."""
        if self.image_index is not None:
            x = torch.index_select(x, 1, self.image_index)
        return x.reshape(-1, *self.map_size, x.shape[-1])


class GraphSwin(nn.Module):
    """A Swin Transformer at one image size, ready to be traced.

    Attributes:
        features: whether it returns the four maps ``[B, H_i, W_i, C_i]`` instead of the logits.
    """

    def __init__(
        self,
        model: SwinTransformer,
        image_size: Pair,
        form: AttentionForm = "plain",
        *,
        features: bool = False,
        fold_norms: bool = False,
    ) -> None:
        """Copy a readable model's weights into constants.

        Args:
            model: the readable model, fp32, any training mode.
            image_size: ``(height, width)`` in pixels of every image the graph will take.
            form: how attention is written, ``"plain"`` or ``"standard"``.
            features: return the stages' maps instead of the logits.
            fold_norms: multiply V1's LayerNorm affines into the linear layers behind them, as
                :mod:`fastswin.quant` calibrates them.

        Raises:
            ValueError: ``image_size`` gives a stage a map smaller than its window.
        """
        super().__init__()
        self.config, self.features = model.config, features
        position = None
        if model.config.absolute_position_embedding:
            position = model._position_embedding(model.config.map_size(0, image_size))
            position = position.flatten(1, 2)
        self.patch_embed = GraphPatchEmbed(model.patch_embed, position)
        self.layers = nn.ModuleList()
        order: torch.Tensor | None = image_order(model.config.map_size(0, image_size))
        for stage in cast("list[SwinTransformerStage]", model.layers):
            layer = GraphStage(stage, image_size, form, order, features, fold_norms)
            self.layers.append(layer)
            order = None
            if stage.downsample is not None:
                places = _merged_places(layer, stage, image_size)
                layer.downsample = GraphMerging(stage.downsample, places, fold_norms)
        self.norm = GraphNorm(model.norm)
        self.head = (
            GraphLinear(model.head.weight, model.head.bias)
            if isinstance(model.head, nn.Linear)
            else nn.Identity()
        )
        real = layer.order >= 0
        self.pool_weight = None if real.all() else buffer((real / real.sum()).float()[:, None])

    def query_scale(self) -> dict[str, float]:
        """Name of each qkv layer and the factor that its query rows were multiplied with (V1)."""
        if self.config.version == 2:
            return {}
        return {
            f"{name}.qkv": module.scale
            for name, module in self.named_modules()
            if isinstance(module, GraphAttention)
        }

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Logits ``[B, classes]`` or, with ``features``, one map a stage; fp32."""
        x = pad_to_patches(images, self.config).to(self.patch_embed.weight.dtype)
        x = self.patch_embed(x)
        outputs = []
        for layer in cast("list[GraphStage]", self.layers):
            x = layer(x)
            if self.features:
                outputs.append(layer.feature_map(x).float())
            if layer.downsample is not None:
                x = layer.downsample(x)
        if self.features:
            return tuple(outputs)
        x = self.norm(x)
        if self.pool_weight is not None:
            x = (x * self.pool_weight).sum(1)
        else:
            x = x.mean(1)
        return self.head(x).float()


def _merged_places(
    layer: GraphStage, stage: SwinTransformerStage, image_size: Pair
) -> torch.Tensor:
    """Places ``[T', 4]`` of the merging's neighbours, in the next stage's first window order."""
    config = stage.config
    map_size = config.map_size(stage.stage + 1, image_size)
    merged = window_order(map_size, config.stage_window(stage.stage + 1), (0, 0))
    neighbours = merging_order(layer.map_size, merged)
    return torch.where(neighbours < 0, -1, place_of(layer.order)[neighbours.clamp(min=0)])


def _kept(order: torch.Tensor) -> nn.Buffer | None:
    """``[T, 1]``, 0 at padded places; None where there are none."""
    return buffer((order >= 0).float()[:, None]) if (order < 0).any() else None
