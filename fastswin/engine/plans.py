"""Plans of one engine, bound to its present weights: made when first needed, compiled once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import torch

from fastswin._triton.available import Impl
from fastswin.engine.bind import BoundPlan, bind
from fastswin.engine.calls import Call
from fastswin.engine.cluster_mlp_stage import ClusterMlps
from fastswin.engine.cluster_stage import ClusterStages
from fastswin.engine.forward import Forward
from fastswin.engine.fused_attention import FusedAttention
from fastswin.engine.plan import make_plan
from fastswin.engine.quantized.mix import Mix
from fastswin.engine.quantized.plan import quantize_plan
from fastswin.engine.quantized.prepare import place_forms
from fastswin.engine.stage_plan import ModelPlan
from fastswin.engine.warmup import compile_calls, kernel_calls
from fastswin.engine.whole_block import WholeBlocks
from fastswin.quant.ranges import Calibration
from fastswin.tuning.table import TuningTable

#: Bound plans kept, one per batch and image size.
MAX_PLANS = 64


class Plans:
    """Bound plans by batch and image size; the least recently used are dropped.

    Args:
        device: where calls run.
        impl, table, pdl: as :func:`fastswin.engine.plan.make_plan` has them.
        mix: which layers of a quantised engine stay wide.
    """

    def __init__(
        self,
        device: torch.device,
        impl: Impl,
        table: TuningTable | None,
        pdl: bool | None,
        mix: Mix,
    ) -> None:
        self._device, self._impl, self._table, self._pdl, self._mix = device, impl, table, pdl, mix
        self._compiled: set[Hashable] = set()
        self._bound: OrderedDict[tuple[int, tuple[int, int]], BoundPlan] = OrderedDict()
        self._forward: Forward | None = None
        self._ranges: Calibration | None = None

    def __len__(self) -> int:
        return len(self._bound)

    def take(self, forward: Forward, ranges: Calibration | None) -> None:
        """Bind to other weights from now on; what was bound is dropped, binaries stay known."""
        self._forward, self._ranges = forward, ranges
        self._bound.clear()

    def bound(self, batch: int, size: tuple[int, int]) -> BoundPlan:
        """The plan of a batch of images of ``(height, width)`` pixels.

        Raises:
            RuntimeError: it would have to be made while a CUDA graph is captured.
        """
        key = (batch, size)
        if key not in self._bound:
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"the engine has not run batch {batch} at {size[0]}x{size[1]} yet; call it "
                    "once with these shapes before capturing a CUDA graph around it"
                )
            forward = self.forward
            self._bound[key] = bind(self._plan(batch, size), forward.weights, forward.precision)
            if self._device.type == "cuda":  # calls on other streams read what was just bound
                torch.cuda.current_stream(self._device).synchronize()
            while len(self._bound) > MAX_PLANS:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]

    @property
    def forward(self) -> Forward:
        """The forward pass that plans are bound to."""
        assert self._forward is not None  # an engine takes weights before it plans
        return self._forward

    def _plan(self, batch: int, size: tuple[int, int]) -> ModelPlan:
        forward, ranges = self.forward, self._ranges
        # an attention half in one kernel is half precision, which only the mix "auto" may prefer
        fused: FusedAttention | None = None if ranges is None or self._mix == "auto" else {}
        # a whole block would leave nothing to quantise, and 8-bit layers leave no statistics
        blocks: WholeBlocks | None = None if ranges is None else {}
        clusters: ClusterStages | None = None if ranges is None else {}
        mlps: ClusterMlps | None = None if ranges is None else {}
        plan = make_plan(
            forward.config, batch, size, self._device, forward.precision, self._impl, self._table,
            self._pdl, fused, blocks, clusters, mlps,
        )  # fmt: skip
        if ranges is not None:
            plan = quantize_plan(plan, forward.config, ranges, self._mix, forward.weights)
            formats = [s.formats for s in plan.stages if s.formats is not None]
            place_forms(forward.weights, formats)
        return plan

    def new_calls(self, images: torch.Tensor, bound: BoundPlan) -> list[Call]:
        """Calls whose kernels no plan before this one has compiled; they count as compiled."""
        return kernel_calls(self.forward, bound, images, self._compiled)

    def compile(self, images: torch.Tensor, bound: BoundPlan) -> None:
        """Compile what a plan launches and no plan before it did, side by side."""
        if bound.compiled:
            return
        compile_calls(self.new_calls(images, bound), self._device)
        bound.compiled = True
