"""The attention half of a block over operators, on packed weights.

    V1   x += proj(attention(qkv(norm1(x))))
    V2   x += norm1(proj(attention(qkv(x))))

The plan's words choose which kernel computes which part.
"""

from __future__ import annotations

import torch

from fastswin.engine.bind import BlockOffsets, Left, RowStats, Unjoined, in_place
from fastswin.engine.prepared import PreparedBlock
from fastswin.engine.stage_plan import StagePlan
from fastswin.engine.stream import StreamForward, implementation_of
from fastswin.ops.attention_half.hopper_config import HopperWholeConfig, HopperWindowsConfig


class AttentionHalf(StreamForward):
    """Runs attention halves."""

    def attention_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        left: Left = None,
    ) -> RowStats | None:
        """``x += attn(norm1(x))`` (V1) or ``x += norm1(attn(x))`` (V2), in place.

        ``left`` is what the block before has left: added to the stream on the way, or its rows'
        statistics.

        Returns:
            Statistics of the stream for :meth:`mlp_half` (:meth:`project_back`); mostly None.
        """
        if stage.attention == "block":
            self.join(x, left, stage)
            self.whole_block(x, block, stage)
            return None
        if stage.attention == "fused":
            return self.fused_attention_half(x, block, stage, offsets, left)
        qkv = self.project_qkv(x, block, stage, offsets, left)
        return self.project_back(x, self.attention(qkv, block, stage), block, stage)

    def whole_block(self, x: torch.Tensor, block: PreparedBlock, stage: StagePlan) -> None:
        """Both halves onto the stream in place; :meth:`mlp_half` has nothing left to do."""
        shift = stage.shift_size if block.shifted else (0, 0)
        self.ops.packed_swin_block(
            x, block.packed(), block.bias_table(shift, self.precision.dtype), block.head_scale,
            block.scale, stage.window_size, shift, self.eps, out=x, pdl=stage.pdl,
        )  # fmt: skip

    def fused_attention_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        left: Left = None,
    ) -> RowStats | None:
        """:meth:`attention_half` as one kernel, or as one and proj.

        By heads, rows that a join has to read anyway are normalised there: the kernel is without
        its pass for statistics, which every head of a window repeats.
        """
        shift = stage.shift_size if block.shifted else (0, 0)
        table = block.bias_table(shift, self.precision.dtype)
        geometry = (block.scale, stage.num_heads, stage.window_size, shift)
        norm, config = block.norm1, stage.launch.get("attention")
        if stage.proj == "inside":
            self.join(x, left, stage)
            whole = isinstance(config, HopperWholeConfig)
            self.ops.packed_attention_half(
                x, block.qkv.weight, block.qkv.bias, offsets.norm1, table, block.head_scale,
                block.pad_qkv, block.proj.weight, block.proj.bias,
                None if norm is None else norm.weight, None if norm is None else norm.bias,
                *geometry, self.eps, norm is None, config, out=x, pdl=stage.pdl,
                vectors=block.half_vectors() if whole else None,
            )  # fmt: skip
            return None
        rows, eps = x, self.eps if norm is None else None
        if isinstance(left, Unjoined):
            assert offsets.norm1 is None  # the product before had room for its bias
            rows, eps = self.join(x, left, stage, norm="pre"), None
        if isinstance(config, HopperWindowsConfig):
            assert offsets.norm1 is None  # an MLP that leaves a bias is not in front of it
        attended = self.ops.packed_heads_attention(
            rows, block.qkv.weight, offsets.qkv_vectors, offsets.norm1, table, block.head_scale,
            block.pad_qkv, *geometry, eps, config, pdl=stage.pdl,
            norm_stats=left.values if isinstance(left, RowStats) else None,
        )  # fmt: skip
        return self.project_back(x, attended, block, stage)

    def project_qkv(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        left: Left = None,
    ) -> torch.Tensor:
        """``[B, H, W, C]`` to q, k, v ``[B, H, W, 3C]``, normalised first in V1."""
        impl = implementation_of(stage.qkv)
        tiles, offset = stage.launch.get("qkv"), offsets.norm1
        if isinstance(left, RowStats) and stage.qkv == "clusters":
            return self.ops.linear(
                x, block.qkv.weight, block.qkv.bias, layer_norm_eps=self.eps,
                norm_stats=left.values, weight_sums=offsets.qkv_sums, impl="triton", config=tiles,
                pdl=stage.pdl,
            )  # fmt: skip
        if stage.qkv == "fused":
            self.join(x, left, stage)
            return self.ops.linear(
                x, block.qkv.weight, block.qkv.bias, layer_norm_eps=self.eps, offset=offset,
                impl="triton", config=tiles, pdl=stage.pdl, **self.wide_products,
            )  # fmt: skip
        h = x
        if isinstance(left, Unjoined):
            assert offset is None  # the product before had room for its bias
            h = self.join(x, left, stage, norm="pre")
        elif block.norm1 is None:
            h = self.ops.layer_norm(
                x, eps=self.eps, offset=offset, impl=impl, pdl=self.ahead(stage, tiles),
                tf32=self.cuts(tiles),
            )  # fmt: skip
        if stage.qkv in ("tiled", "clusters"):
            return self.ops.linear(
                h, block.qkv.weight, block.qkv.bias, impl="triton", config=tiles,
                pdl=self.ahead(stage, tiles), **self.wide_products,
            )  # fmt: skip
        return self.wide_product(h, block.qkv, split=stage.split)

    def project_back(
        self, x: torch.Tensor, attended: torch.Tensor, block: PreparedBlock, stage: StagePlan
    ) -> RowStats | None:
        """Attention's output ``[B, H, W, C]`` through proj onto the stream, in place.

        Returns:
            Statistics of the stream where the second norm is behind fc1's product; else None.
        """
        tiles = stage.launch.get("proj")
        if block.norm1 is not None:
            if "proj" in stage.post_norm:
                self.add_post_normed(x, attended, block.proj, block.norm1, tiles, stage.pdl)
                return None
            if stage.proj == "fused":
                branch = self.ops.linear(
                    attended, block.proj.weight, block.proj.bias, impl="triton", config=tiles,
                    pdl=stage.pdl,
                )  # fmt: skip
            else:
                branch = self.wide_product(attended, block.proj, split=stage.split)
            pdl = self.ahead(stage, stage.launch.get("fc1"))
            self.add_normed(x, branch, block.norm1, implementation_of(stage.qkv), pdl)
        elif stage.proj == "fused":
            return self.onto_stream(
                x, attended, block.proj, tiles, pdl=stage.pdl, statistics=stage.norm2 == "behind"
            )
        else:
            self.accumulate(
                x, attended, block.proj, deferred=in_place(stage.proj), split=stage.split
            )
        return None

    def attention(self, qkv: torch.Tensor, block: PreparedBlock, stage: StagePlan) -> torch.Tensor:
        """Window attention ``[B, H, W, 3C] -> [B, H, W, C]``."""
        shift = stage.shift_size if block.shifted else (0, 0)
        if stage.attention == "triton":
            table = block.attention_table(shift, self.precision.dtype, stage.compact_bias)
            return self.ops.packed_window_attention(
                qkv, table, block.head_scale, block.pad_qkv, block.scale, stage.num_heads,
                stage.window_size, shift, self.precision.tf32, stage.launch.get("attention"),
                pdl=stage.pdl, split=stage.split_attention,
            )  # fmt: skip
        return self.ops.window_attention_ref(
            qkv, block.bias, stage.num_heads, stage.window_size, shift, block.scale,
            block.logit_scale, block.pad_qkv,
        )  # fmt: skip
