"""Both halves of a block over operators, on packed weights: attention, then the MLP.

    V1   x += proj(attention(qkv(norm1(x))));  x += fc2(gelu(fc1(norm2(x))))
    V2   x += norm1(proj(attention(qkv(x))));  x += norm2(fc2(gelu(fc1(x))))

The plan's words choose which kernel computes which part. The residual stream ``x [B, H, W, C]``
stays in image order and is updated in place; what it lacks meanwhile, its readers add (bind.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl
from fastswin.engine import operators
from fastswin.engine.bind import BlockOffsets, Offset, Unjoined, in_place
from fastswin.engine.plan import StagePlan
from fastswin.engine.precision import Precision
from fastswin.engine.prepare import Linear, Norm, PreparedBlock, PreparedModel
from fastswin.engine.small_batch import LayerTiles
from fastswin.engine.tf32 import SPLIT_TILES
from fastswin.models.config import SwinConfig
from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.linear.api import Activation
from fastswin.ops.linear.config import OneShotConfig


class BlockForward:
    """Runs the halves of blocks; holds weights and no other state.

    ``ops`` stands in for operators.py where calls are to be noted (calls.py).
    """

    def __init__(
        self,
        config: SwinConfig,
        weights: PreparedModel,
        precision: Precision,
        ops: Any = operators,
    ) -> None:
        self.config, self.weights, self.precision, self.ops = config, weights, precision, ops
        self.eps = config.layer_norm_eps
        self.resample_eps = config.resample_eps
        form = precision.input_precision
        #: what our products are told beside their operands: nothing in half precision
        self.wide_products: dict[str, Any] = {} if form is None else {"input_precision": form}

    def attention_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        unjoined: Unjoined | None = None,
    ) -> Offset:
        """``x += attn(norm1(x))`` (V1) or ``x += norm1(attn(x))`` (V2), in place.

        ``unjoined`` is what the block before has left, added to the stream on the way.

        Returns:
            Statistics of the stream for :meth:`mlp_half` (:meth:`project_back`); mostly None.
        """
        if stage.attention == "fused":
            return self.fused_attention_half(x, block, stage, offsets, unjoined)
        qkv = self.project_qkv(x, block, stage, offsets.norm1, unjoined)
        return self.project_back(x, self.attention(qkv, block, stage), block, stage)

    def fused_attention_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        unjoined: Unjoined | None = None,
    ) -> Offset:
        """:meth:`attention_half` as one kernel, or as one and proj.

        By heads, rows that a join has to read anyway are normalised there: the kernel is without
        its pass for statistics, which every head of a window repeats.
        """
        shift = stage.shift_size if block.shifted else (0, 0)
        table = block.bias_table(shift, self.precision.dtype)
        geometry = (block.scale, stage.num_heads, stage.window_size, shift)
        norm, config = block.norm1, stage.launch.get("attention")
        if stage.proj == "inside":
            self.join(x, unjoined, stage)
            self.ops.packed_attention_half(
                x, block.qkv.weight, block.qkv.bias, offsets.norm1, table, block.head_scale,
                block.pad_qkv, block.proj.weight, block.proj.bias,
                None if norm is None else norm.weight, None if norm is None else norm.bias,
                *geometry, self.eps, norm is None, config, out=x, pdl=stage.pdl,
            )  # fmt: skip
            return None
        rows, eps = x, self.eps if norm is None else None
        if unjoined is not None:
            assert offsets.norm1 is None  # the product before had room for its bias
            rows, eps = self.join(x, unjoined, stage, norm="pre"), None
        attended = self.ops.packed_heads_attention(
            rows, block.qkv.weight, offsets.qkv_vectors, offsets.norm1, table, block.head_scale,
            block.pad_qkv, *geometry, eps, config, pdl=stage.pdl,
        )  # fmt: skip
        return self.project_back(x, attended, block, stage)

    def project_qkv(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offset: Offset,
        unjoined: Unjoined | None = None,
    ) -> torch.Tensor:
        """``[B, H, W, C]`` to q, k, v ``[B, H, W, 3C]``, normalised first in V1."""
        impl = implementation_of(stage.qkv)
        tiles = stage.launch.get("qkv")
        if stage.qkv == "fused":
            self.join(x, unjoined, stage)
            return self.ops.linear(
                x, block.qkv.weight, block.qkv.bias, layer_norm_eps=self.eps, offset=offset,
                impl="triton", config=tiles, pdl=stage.pdl, **self.wide_products,
            )  # fmt: skip
        h = x
        if unjoined is not None:
            assert offset is None  # the product before had room for its bias
            h = self.join(x, unjoined, stage, norm="pre")
        elif block.norm1 is None:
            h = self.ops.layer_norm(
                x, eps=self.eps, offset=offset, impl=impl, pdl=stage.pdl, tf32=self.cuts(tiles)
            )
        if stage.qkv == "tiled":
            return self.ops.linear(
                h, block.qkv.weight, block.qkv.bias, impl="triton", config=tiles, pdl=stage.pdl,
                **self.wide_products,
            )  # fmt: skip
        return self.wide_product(h, block.qkv, split=stage.split)

    def cuts(self, tiles: LayerTiles | None) -> bool:
        """Whether a product cuts its fp32 rows off, so that they should be TF32 numbers."""
        return self.precision.tf32 and isinstance(tiles, HopperGemmConfig)

    def project_back(
        self, x: torch.Tensor, attended: torch.Tensor, block: PreparedBlock, stage: StagePlan
    ) -> Offset:
        """Attention's output ``[B, H, W, C]`` through proj onto the stream, in place.

        Returns:
            Where the second norm is behind fc1's product, mean and squared deviations of parts of
            the stream's rows ``[2, parts, rows]`` (ops/linear/one_shot.py); else None.
        """
        stats = None
        if block.norm1 is not None:
            if stage.proj == "fused":
                branch = self.ops.linear(
                    attended, block.proj.weight, block.proj.bias, impl="triton",
                    config=stage.launch.get("proj"), pdl=stage.pdl,
                )  # fmt: skip
            else:
                branch = self.wide_product(attended, block.proj, split=stage.split)
            self._add_normed(x, branch, block.norm1, implementation_of(stage.qkv), stage.pdl)
        elif stage.proj == "fused":
            tiles = stage.launch.get("proj")
            if stage.norm2 == "behind":
                assert isinstance(tiles, OneShotConfig)
                C = x.shape[3]
                stats = torch.empty(
                    2, C // tiles.block_n, x.numel() // C, dtype=torch.float32, device=x.device
                )
            self.ops.linear(
                attended, block.proj.weight, block.proj.bias, residual=x, out=x, stats_out=stats,
                impl="triton", config=tiles, pdl=stage.pdl,
            )  # fmt: skip
        else:
            self._accumulate(
                x, attended, block.proj, deferred=in_place(stage.proj), split=stage.split
            )
        return stats

    def attention(self, qkv: torch.Tensor, block: PreparedBlock, stage: StagePlan) -> torch.Tensor:
        """Window attention ``[B, H, W, 3C] -> [B, H, W, C]``."""
        shift = stage.shift_size if block.shifted else (0, 0)
        if stage.attention == "triton":
            table = block.bias_table(shift, self.precision.dtype)
            return self.ops.packed_window_attention(
                qkv, table, block.head_scale, block.pad_qkv, block.scale, stage.num_heads,
                stage.window_size, shift, self.precision.tf32, stage.launch.get("attention"),
                pdl=stage.pdl, split=stage.split_attention,
            )  # fmt: skip
        return self.ops.window_attention_ref(
            qkv, block.bias, stage.num_heads, stage.window_size, shift, block.scale,
            block.logit_scale, block.pad_qkv,
        )  # fmt: skip

    def mlp_half(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        stats: Offset = None,
    ) -> Unjoined | None:
        """``x += mlp(norm2(x))`` (V1) or ``x += norm2(mlp(x))`` (V2), in place.

        ``stats`` are :meth:`attention_half`'s.

        Returns:
            What the stream lacks, for :meth:`attention_half` or :meth:`join`; mostly None.
        """
        fc1, fc2, norm = block.fc1, block.fc2, block.norm2
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
        if stage.mlp == "split":
            self.ops.linear(
                h, fc2.weight, fc2.bias, residual=x, out=x, impl="triton",
                config=stage.launch.get("fc2"), pdl=stage.pdl,
            )  # fmt: skip
            return None
        if stage.mlp == "split-k":
            partials = self.ops.split_k_linear(
                h, fc2.weight, impl="triton", config=stage.launch.get("fc2"), pdl=stage.pdl
            )
            if norm is None:
                return Unjoined(partials, fc2.bias)
            self.ops.add_split_k(
                partials, x, fc2.bias, norm="post", norm_weight=norm.weight, norm_bias=norm.bias,
                eps=self.eps, impl="triton", pdl=stage.pdl,
            )  # fmt: skip
            return None
        self.shrink(x, h, block, stage.mlp, pdl=stage.pdl, split=stage.split)
        return None

    def join(
        self, x: torch.Tensor, unjoined: Unjoined | None, stage: StagePlan, norm: str = "none"
    ) -> torch.Tensor:
        """Add what the stream lacks, in place; the stream, or with "pre" its LayerNorm."""
        if unjoined is None:
            return x
        normed = self.ops.add_split_k(
            unjoined.partials, x, unjoined.bias, norm=norm, eps=self.eps, impl="triton",
            pdl=stage.pdl,
        )  # fmt: skip
        return x if normed is None else normed

    def hidden(
        self,
        x: torch.Tensor,
        block: PreparedBlock,
        stage: StagePlan,
        offsets: BlockOffsets,
        stats: Offset = None,
    ) -> torch.Tensor:
        """``gelu(fc1(x))`` ``[B, H, W, hidden]``, normalised first in V1."""
        fc1, offset = block.fc1, offsets.norm2
        tiles = stage.launch.get("fc1")
        if stats is not None and offsets.fc1_sums is not None:
            assert offset is None  # the product before had room for its bias
            return self.ops.linear(
                x, fc1.weight, fc1.bias, activation="gelu", layer_norm_eps=self.eps,
                norm_stats=stats, weight_sums=offsets.fc1_sums, impl="triton", config=tiles,
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
                x, eps=self.eps, offset=offset, impl=implementation_of(stage.mlp), pdl=stage.pdl,
                tf32=self.cuts(tiles),
            )  # fmt: skip
        ours = self.precision.half or self.wide_products
        if ours and stage.mlp in ("library", "fused", "split-k"):
            return self.ops.linear(
                h, fc1.weight, fc1.bias, activation="gelu", impl="triton", config=tiles,
                pdl=stage.pdl, **self.wide_products,
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
            self._add_normed(x, branch, block.norm2, implementation_of(word), pdl)
        else:
            self._accumulate(x, h, fc2, deferred=in_place(word), split=split)

    def wide_product(
        self,
        h: torch.Tensor,
        affine: Linear,
        *,
        split: bool,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """``h @ weight.T + bias`` by the library, or fp32 as three TF32 products (tf32.py).

        ``activation`` goes with three products only.
        """
        if split:
            return self.ops.linear(
                h, affine.weight, affine.bias, activation=activation, impl="triton",
                config=SPLIT_TILES, input_precision="tf32x3",
            )  # fmt: skip
        return F.linear(h, affine.weight, affine.library_bias)

    def _accumulate(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        affine: Linear,
        *,
        deferred: bool,
        split: bool,
    ) -> None:
        """``x += h @ weight.T (+ bias)``, in one pass where the bias is deferred."""
        if split:
            self.ops.linear(
                h, affine.weight, None if deferred else affine.bias, residual=x, out=x,
                impl="triton", config=SPLIT_TILES, input_precision="tf32x3",
            )  # fmt: skip
        elif deferred:
            rows = x.view(-1, x.shape[-1])
            torch.addmm(rows, h.view(-1, h.shape[-1]), affine.weight.t(), out=rows)
        else:
            x += F.linear(h, affine.weight, affine.library_bias)

    def _add_normed(
        self, x: torch.Tensor, branch: torch.Tensor, norm: Norm, impl: Impl, pdl: bool = False
    ) -> None:
        """``x += layer_norm(branch)`` in place."""
        self.ops.layer_norm(
            branch, norm.weight, norm.bias, eps=self.eps, residual=x, out=x, impl=impl,
            pdl=pdl,
        )  # fmt: skip


def implementation_of(implementation: str) -> Impl:
    """The operators' ``impl=`` for a plan's word."""
    return "reference" if implementation == "reference" else "triton"
