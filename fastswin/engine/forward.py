"""The forward pass over operators: models/swin.py's story, in the same order, on packed weights.

    images [B, 3, h, w] -> embed -> stages -> norm + pool [B, C] -> head [B, classes]

The residual stream ``x [B, H, W, C]`` stays in image order and is updated in place; what it lacks
meanwhile, its readers add (bind.py).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastswin._triton.tiles import cdiv
from fastswin.engine.attention_half import AttentionHalf
from fastswin.engine.bind import BoundPlan, Left, Offset, RowStats
from fastswin.engine.mlp_half import MlpHalf
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.engine.stream import implementation_of
from fastswin.ops.cluster_linear.config import ClusterLinearConfig


class Forward(AttentionHalf, MlpHalf):
    """Runs a bound plan from images to logits or feature maps."""

    def logits(self, images: torch.Tensor, bound: BoundPlan) -> torch.Tensor:
        """Logits ``[B, classes]``, or pooled features ``[B, C]`` without a head."""
        return self.classify(self.stages(images, bound)[-1], bound)

    def classify(self, x: torch.Tensor, bound: BoundPlan) -> torch.Tensor:
        """The last stage's stream to logits: final norm, mean over tokens, head."""
        norm, head = self.weights.norm, self.weights.head
        if head is not None and bound.plan.head == "fused":
            return self.ops.norm_pool_head(
                x, norm.weight, norm.bias, head.weight, head.bias, eps=self.eps,
                offset=bound.stage_end[-1], impl="triton", pdl=bound.plan.ends_ahead,
            )  # fmt: skip
        pooled = self.ops.norm_pool(
            x, norm.weight, norm.bias, eps=self.eps, offset=bound.stage_end[-1],
            impl=implementation_of(bound.plan.pool), pdl=bound.plan.ends_ahead,
        )  # fmt: skip
        if head is None:
            return pooled
        if bound.plan.head == "tiled":
            return self.ops.linear(
                pooled, head.weight, head.bias, impl="triton", config=bound.plan.head_tiles,
                pdl=bound.plan.ends_ahead,
            )  # fmt: skip
        return F.linear(pooled, head.weight, head.library_bias)

    def features(self, images: torch.Tensor, bound: BoundPlan) -> list[torch.Tensor]:
        """Output of every stage, ``[B, H_i, W_i, C * 2**i]``, biases included."""
        outputs = self.stages(images, bound)
        return [
            x if end is None else (x.float() + end).to(x.dtype)
            for x, end in zip(outputs, bound.stage_end, strict=True)
        ]

    def stages(self, images: torch.Tensor, bound: BoundPlan) -> list[torch.Tensor]:
        """Residual stream at the end of every stage, without its pending biases."""
        x, left = self.embed(images, bound.plan)
        outputs = []
        for index, stage in enumerate(bound.plan.stages):
            blocks = list(zip(self.weights.stages[index], bound.offsets[index], strict=True))
            for block, offsets in blocks:
                stats = self.attention_half(x, block, stage, offsets, left)
                left = self.mlp_half(x, block, stage, offsets, stats)
            self.join(x, left, stage)
            outputs.append(x)
            if stage.merge is not None:
                x, left = self.merge(x, index, stage, bound.stage_end[index])
        return outputs

    def embed(self, images: torch.Tensor, plan: ModelPlan) -> tuple[torch.Tensor, Left]:
        """Images to the residual stream ``[B, H, W, C]``.

        With it its rows' statistics where the first block reads any, and nothing is added to them.
        """
        w, patch = self.weights, self.config.patch_size
        if self.config.window_convention == "torchvision":  # drops the remainder, never pads
            h, wd = (side // patch * patch for side in images.shape[2:])
            images = images[:, :, :h, :wd]
        if images.dtype not in (torch.float16, torch.float32):  # what the kernel reads on any GPU
            images = images.float()
        norm, first = w.patch_norm, plan.stages[0]
        left: RowStats | None = None
        if first.mlp == "clusters" and first.norm2 == "behind" and w.position_embedding is None:
            sides = (cdiv(side, patch) for side in images.shape[2:])
            tokens = len(images) * math.prod(sides)
            left = RowStats(images.new_empty(2, 1, tokens, dtype=torch.float32))
        x = self.ops.patch_embed(
            images, w.patch_weight, w.patch_bias,
            None if norm is None else norm.weight, None if norm is None else norm.bias,
            eps=self.resample_eps, dtype=self.precision.dtype, impl=implementation_of(plan.embed),
            pdl=plan.pdl or first.pdl, input_precision=plan.embed_products,
            stats_out=None if left is None else left.values,
        )  # fmt: skip
        position = self.position_embedding((x.shape[1], x.shape[2]))
        return x if position is None else x + position, left

    def position_embedding(self, map_size: tuple[int, int]) -> torch.Tensor | None:
        """``[1, H, W, C]`` for a map, resized bicubically from the built one; None without one."""
        built = self.config.map_size(0)
        if self.weights.position_embedding is None:
            return None
        position = self.weights.position_embedding.view(1, *built, -1)
        if map_size != built:
            position = F.interpolate(
                position.permute(0, 3, 1, 2).float(), size=map_size, mode="bicubic"
            ).permute(0, 2, 3, 1)
        return position.to(self.precision.dtype)

    def merge(
        self, x: torch.Tensor, index: int, stage: StagePlan, offset: Offset
    ) -> tuple[torch.Tensor, Left]:
        """Patch merging ``[B, H, W, C] -> [B, ceil(H/2), ceil(W/2), 2C]``.

        Returns:
            The next stage's stream and, from a product in clusters, its rows' statistics.
        """
        merging = self.weights.mergings[index]
        impl = implementation_of(stage.merge or "reference")
        eps = self.resample_eps if merging.norm is None else None
        if stage.merge == "fused":
            y = self.ops.merge_neighbours(
                x, merging.reduction.weight, merging.reduction.bias, layer_norm_eps=eps,
                offset=offset, impl="triton", pdl=stage.pdl, config=stage.launch.get("merge"),
            )  # fmt: skip
            return y, None
        rows = self.ops.gather_neighbours(
            x, layer_norm_eps=eps, offset=offset, impl=impl, pdl=stage.pdl
        )
        reduction, tiles = merging.reduction, stage.launch.get("merge")
        left = None
        if stage.merge == "tiled":
            y = rows.new_empty(*rows.shape[:3], len(reduction.weight))
            if isinstance(tiles, ClusterLinearConfig) and merging.norm is None:
                left = self.room_for_stats(y, tiles)
            self.ops.linear(
                rows, reduction.weight, reduction.bias, out=y,
                stats_out=None if left is None else left.values, impl="triton", config=tiles,
                pdl=stage.pdl,
            )  # fmt: skip
        else:
            y = self.wide_product(rows, reduction, split=stage.split)
        if merging.norm is not None:
            norm = merging.norm
            self.ops.layer_norm(
                y, norm.weight, norm.bias, eps=self.resample_eps, out=y, impl=impl, pdl=stage.pdl
            )
        return y, left
