"""Which layers of a plan run in 8 bits: what the scheme allows, kernels can, and the mix wants.

    scheme says wide                    wide
    no 8-bit kernel for the shape       wide, with the operator's reason
    no speed on this card (mix "auto")  wide, with the measurement's reason
    else                                8 bits, by "triton", or by "cublaslt" for fp8 where it is
                                        faster; by "reference" where no kernel runs at all

Every fallback is wider than the scheme, never narrower, and is decided here, before anything runs.
"""

from __future__ import annotations

import dataclasses

from fastswin.engine.plan import SMALL_STAGE_VALUES, ModelPlan, StagePlan
from fastswin.engine.prepare import Linear, PreparedModel
from fastswin.engine.quantized.formats import (
    WIDE_LAYER,
    BlockFormats,
    LayerFormat,
    StageFormats,
    Storage,
)
from fastswin.engine.quantized.library import why_not_library
from fastswin.engine.quantized.mix import Mix, why_wide
from fastswin.engine.quantized.prepare import LayerForms
from fastswin.models.config import SwinConfig
from fastswin.ops.quantized_linear.config import quantized_linear_blocker
from fastswin.quant.ranges import Calibration, LayerRange


def quantize_plan(
    plan: ModelPlan,
    config: SwinConfig,
    calibration: Calibration,
    mix: Mix,
    weights: PreparedModel | None = None,
) -> ModelPlan:
    """A half-precision plan with its 8-bit layers chosen.

    Args:
        plan: of the engine's wide precision.
        config: the model's.
        calibration: what its layers may be quantised to.
        mix: "auto" leaves wide what brings no speed, "scheme" quantises all that the scheme does.
        weights: of the engine, some layers of which the CUDA library may take; None has none.
    """
    stages = tuple(
        _StageChooser(stage, config, calibration, mix, max(plan.batch, 1), weights).choose()
        for stage in plan.stages
    )
    return dataclasses.replace(plan, stages=stages)


class _StageChooser:
    """Decides one stage's layers and collects the reasons."""

    def __init__(
        self,
        stage: StagePlan,
        config: SwinConfig,
        calibration: Calibration,
        mix: Mix,
        batch: int,
        weights: PreparedModel | None,
    ) -> None:
        self.stage, self.calibration, self.mix = stage, calibration, mix
        self.weights = weights
        self.hidden = config.hidden_dim(stage.stage)
        self.rows = batch * stage.map_size[0] * stage.map_size[1]
        self.kernels = stage.qkv != "reference"
        self.reasons: dict[str, str] = {}

    def choose(self) -> StagePlan:
        at = f"layers.{self.stage.stage}"
        blocks = tuple(self.block(f"{at}.blocks.{i}", i) for i in range(self.stage.depth))
        reduction = None
        if self.stage.merge is not None:
            C = self.stage.channels
            reduction = self.layer(f"{at}.downsample.reduction", 2 * C, 4 * C)
            if self.weights is not None:
                forms = self.weights.mergings[self.stage.stage].reduction
                reduction = self.library("reduction", reduction, forms, 2 * C, 4 * C)
        return dataclasses.replace(
            self.stage,
            formats=StageFormats(blocks, reduction),
            reasons=self.stage.reasons | self.reasons,
        )

    def block(self, at: str, number: int) -> BlockFormats:
        C, hidden = self.stage.channels, self.hidden
        qkv = self.layer(f"{at}.attn.qkv", 3 * C, C)
        attention: Storage = "wide"
        if qkv.quantized and self.range(f"{at}.attn.qkv").scheme.output == "quantized":
            attention = qkv.format
        proj = self.layer(f"{at}.attn.proj", C, C)
        fc1 = self.layer(f"{at}.mlp.fc1", hidden, C)
        fc2 = self.layer(f"{at}.mlp.fc2", C, hidden)
        if self.weights is not None:
            forms = self.weights.stages[self.stage.stage][number]
            qkv = self.library("qkv", qkv, forms.qkv, 3 * C, C)
            proj = self.library("proj", proj, forms.proj, C, C)
            if fc2.format == fc1.format:  # the library's GELU needs an 8-bit output
                fc1 = self.library("fc1", fc1, forms.fc1, hidden, C)
            fc2 = self.library("fc2", fc2, forms.fc2, C, hidden)
        return BlockFormats(qkv, attention, proj, fc1, fc2)

    def library(self, kind: str, layer: LayerFormat, forms: Linear, N: int, K: int) -> LayerFormat:
        """The layer, by the CUDA library where that is faster and has it."""
        usable = self.mix == "auto" and isinstance(forms, LayerForms) and forms.has_library
        if not usable or layer != LayerFormat("fp8", "triton"):
            return layer
        assert self.weights is not None
        wide = self.weights.patch_weight
        reason = why_not_library(
            kind, self.rows, self.stage.channels, N, K, wide.device, wide.dtype
        )
        if reason is not None:
            self.reasons[f"{kind} library"] = reason
            return layer
        return LayerFormat("fp8", "cublaslt")

    def range(self, name: str) -> LayerRange:
        return self.calibration.layers[name]

    def layer(self, name: str, N: int, K: int) -> LayerFormat:
        scheme = self.range(name).scheme
        if not scheme.quantized:
            return WIDE_LAYER
        kind = name.rpartition(".")[2]
        if reason := self.why_not(kind, scheme.format, N, K):
            self.reasons[f"{kind} format"] = reason
            return WIDE_LAYER
        return LayerFormat(scheme.format, "triton" if self.kernels else "reference")

    def why_not(self, kind: str, format: str, N: int, K: int) -> str | None:
        """Why a layer that the scheme quantises stays wide."""
        if not self.kernels:
            return None
        if blocker := quantized_linear_blocker(N, K):
            return f"wide: {blocker}"
        if self.mix != "auto":
            return None
        small = self.stage.pdl and self.rows * self.stage.channels <= SMALL_STAGE_VALUES
        return why_wide(kind, format, self.rows, self.stage.channels, small=small)
