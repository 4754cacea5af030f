"""The MLP half of a block over operators, on packed weights.

    V1   x += fc2(gelu(fc1(norm2(x))))
    V2   x += norm2(fc2(gelu(fc1(x))))

The plan's words choose which kernel computes which part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin.engine.bind import BlockOffsets, Left, RowStats, Unjoined, in_place
from fastswin.engine.prepared import PreparedBlock
from fastswin.engine.stage_plan import StagePlan
from fastswin.engine.stream import StreamForward, implementation_of
from fastswin.ops.cluster_mlp.config import TILE_ROWS, ClusterMlpConfig


class MlpHalf(StreamForward):
    """Runs MLP halves."""

    def mlp_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        stats: RowStats | None = None,
    ) -> Left:
        """``x += mlp(norm2(x))`` (V1) or ``x += norm2(mlp(x))`` (V2), in place.

        ``stats`` are :meth:`attention_half`'s.

        Returns:
            What the stream lacks, or its statistics, for :meth:`attention_half` or :meth:`join`;
            mostly None.
        """
        if stage.mlp == "inside":
            return None
        fc1, fc2, norm = block.fc1, block.fc2, block.norm2
        in_clusters = stage.launch.get("mlp")
        if isinstance(in_clusters, ClusterMlpConfig):
            assert offsets.norm2 is None  # the product before had room for its bias
            return self.mlp_in_clusters(x, block, stage, in_clusters)
        if stage.mlp == "fused":
            assert fc1.bias is not None  # Mlp always has both
            assert fc2.bias is not None
            self.ops.mlp(
                x, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
                norm_weight=None if norm is None else norm.weight,
                norm_bias=None if norm is None else norm.bias,
                offset=offsets.norm2, eps=self.eps, out=x, impl="triton",
                config=stage.launch.get("mlp"), pdl=stage.pdl, **self.wide_products,
            )  # fmt: skip
            return None
        h = self.hidden(x, block, stage, offsets, stats)
        tiles = stage.launch.get("fc2")
        if stage.mlp in ("split", "clusters") and norm is None:
            return self.onto_stream(
                x, h, fc2, tiles, pdl=stage.pdl, statistics=stage.mlp == "clusters"
            )
        if stage.mlp == "clusters":
            assert norm is not None
            if "fc2" in stage.post_norm:
                self.add_post_normed(x, h, fc2, norm, tiles, stage.pdl)
                return None
            branch = self.ops.linear(
                h, fc2.weight, fc2.bias, impl="triton", config=tiles, pdl=stage.pdl
            )
            self.add_normed(x, branch, norm, "triton", stage.pdl)
            return None
        if stage.mlp == "split-k":
            partials = self.ops.split_k_linear(
                h, fc2.weight, impl="triton", config=tiles, pdl=stage.pdl
            )
            if norm is None:
                return Unjoined(partials, fc2.bias)
            self.ops.add_split_k(
                partials, x, fc2.bias, norm="post", norm_weight=norm.weight, norm_bias=norm.bias,
                eps=self.eps, impl="triton", pdl=stage.pdl,
            )  # fmt: skip
            return None
        pdl = self.ahead(stage, stage.launch.get("qkv"))
        self.shrink(x, h, block, stage.mlp, pdl=pdl, split=stage.split)
        return None

    def mlp_in_clusters(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        tiles: ClusterMlpConfig,
    ) -> RowStats | None:
        """:meth:`mlp_half` as one kernel of a cluster's programs."""
        left = None
        if block.norm1 is None and stage.qkv in ("clusters", "inside"):
            C = x.shape[-1]
            left = RowStats(x.new_empty(2, C // TILE_ROWS, x.numel() // C, dtype=torch.float32))
        self.ops.packed_mlp(
            x, block.packed_mlp(tiles.programs), self.eps, tiles, out=x, pdl=stage.pdl,
            stats_out=None if left is None else left.values,
        )  # fmt: skip
        return left

    def hidden(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        stats: RowStats | None = None,
    ) -> torch.Tensor:
        """``gelu(fc1(x))`` ``[B, H, W, hidden]``, normalised first in V1."""
        fc1, offset = block.fc1, offsets.norm2
        tiles = stage.launch.get("fc1")
        if stats is not None and offsets.fc1_sums is not None:
            assert offset is None  # the product before had room for its bias
            return self.ops.linear(
                x, fc1.weight, fc1.bias, activation="gelu", layer_norm_eps=self.eps,
                norm_stats=stats.values, weight_sums=offsets.fc1_sums, impl="triton", config=tiles,
                pdl=stage.pdl,
            )  # fmt: skip
        if stage.mlp == "split":
            return self.ops.linear(
                x, fc1.weight, fc1.bias, activation="gelu", layer_norm_eps=self.eps,
                offset=offset, impl="triton", config=tiles, pdl=stage.pdl,
            )  # fmt: skip
        h = x
        if block.norm2 is None:
            h = self.ops.layer_norm(
                x, eps=self.eps, offset=offset, impl=implementation_of(stage.mlp),
                pdl=self.ahead(stage, tiles), tf32=self.cuts(tiles),
            )  # fmt: skip
        ours = self.precision.half or self.wide_products
        if ours and stage.mlp in ("library", "fused", "split-k", "clusters"):
            return self.ops.linear(
                h, fc1.weight, fc1.bias, activation="gelu", impl="triton", config=tiles,
                pdl=self.ahead(stage, tiles), **self.wide_products,
            )  # fmt: skip
        if stage.split:
            return self.wide_product(h, fc1, split=True, activation="gelu")
        h = self.wide_product(h, fc1, split=False)
        if h.is_cuda:  # in place half the bytes: more of them are still in L2
            return torch.ops.aten.gelu_(h)
        return F.gelu(h)

    def shrink(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        block: PreparedBlock,
        word: str,
        *,
        pdl: bool = False,
        split: bool = False,
    ) -> None:
        """``fc2(h)`` onto the stream by the library, in place; ``word`` is the plan's for mlp."""
        fc2 = block.fc2
        if block.norm2 is not None:
            branch = self.wide_product(h, fc2, split=split)
            self.add_normed(x, branch, block.norm2, implementation_of(word), pdl)
        else:
            self.accumulate(x, h, fc2, deferred=in_place(word), split=split)
