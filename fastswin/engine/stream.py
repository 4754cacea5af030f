"""What both halves of a block do to the residual stream: products onto it, norms, joins.

The stream ``x [B, H, W, C]`` stays in image order and is updated in place; what it lacks meanwhile,
its readers add (bind.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fastswin._triton.available import Impl
from fastswin.engine import operators
from fastswin.engine.bind import Left, RowStats, Unjoined
from fastswin.engine.precision import Precision
from fastswin.engine.prepared import Linear, Norm, PreparedModel
from fastswin.engine.small_batch import LayerTiles
from fastswin.engine.stage_plan import StagePlan
from fastswin.engine.tf32 import SPLIT_TILES
from fastswin.models.config import SwinConfig
from fastswin.ops.cluster_linear.config import ClusterLinearConfig
from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.linear.api import Activation
from fastswin.ops.linear.config import OneShotConfig


class StreamForward:
    """Operators, weights and precision of a forward pass; no other state.

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

    def cuts(self, tiles: LayerTiles | None) -> bool:
        """Whether a product cuts its fp32 rows off, so that they should be TF32 numbers."""
        return self.precision.tf32 and isinstance(tiles, HopperGemmConfig)

    def ahead(self, stage: StagePlan, tiles: LayerTiles | None) -> bool:
        """Whether a product of these tiles is launched programmatically, and the norm before it."""
        return stage.pdl or (stage.ahead and isinstance(tiles, HopperGemmConfig))

    def join(
        self, x: torch.Tensor, left: Left, stage: StagePlan, norm: str = "none"
    ) -> torch.Tensor:
        """Add what the stream lacks, in place; the stream, or with "pre" its LayerNorm."""
        if not isinstance(left, Unjoined):
            return x
        normed = self.ops.add_split_k(
            left.partials, x, left.bias, norm=norm, eps=self.eps, impl="triton",
            pdl=stage.pdl,
        )  # fmt: skip
        return x if normed is None else normed

    def onto_stream(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        affine: Linear,
        tiles: LayerTiles | None,
        *,
        pdl: bool,
        statistics: bool,
    ) -> RowStats | None:
        """``x += h @ weight.T + bias`` by our product in place, and x's statistics if asked."""
        left = self.room_for_stats(x, tiles) if statistics else None
        self.ops.linear(
            h, affine.weight, affine.bias, residual=x, out=x,
            stats_out=None if left is None else left.values, impl="triton", config=tiles, pdl=pdl,
        )  # fmt: skip
        return left

    def add_post_normed(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        affine: Linear,
        norm: Norm,
        tiles: LayerTiles | None,
        pdl: bool,
    ) -> None:
        """``x += layer_norm(h @ weight.T + bias)`` in one kernel, in place."""
        self.ops.linear_post_norm(
            h, affine.weight, affine.bias, norm.weight, norm.bias, residual=x, eps=self.eps, out=x,
            impl="triton", config=tiles, pdl=pdl,
        )  # fmt: skip

    def room_for_stats(self, x: torch.Tensor, tiles: LayerTiles | None) -> RowStats:
        """Memory for the statistics that a product of these tiles leaves of ``x [..., C]``."""
        assert isinstance(tiles, OneShotConfig | ClusterLinearConfig)
        C = x.shape[-1]
        return RowStats(x.new_empty(2, C // tiles.block_n, x.numel() // C, dtype=torch.float32))

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

    def accumulate(
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

    def add_normed(
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
