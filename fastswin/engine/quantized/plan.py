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

from fastswin._triton.available import why_not_half
from fastswin.engine.prepared import Linear, PreparedModel
from fastswin.engine.quantized.formats import (
    WIDE_LAYER,
    BlockFormats,
    LayerFormat,
    StageFormats,
    Storage,
)
from fastswin.engine.quantized.library import why_not_library
from fastswin.engine.quantized.mix import Mix, why_not_fused, why_wide
from fastswin.engine.quantized.prepare import LayerForms
from fastswin.engine.stage_choice import SMALL_STAGE_VALUES
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.models.config import SwinConfig
from fastswin.ops.quantized_linear.config import quantized_linear_blocker
from fastswin.ops.quantized_mlp.config import quantized_mlp_blocker
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
        self.config = config
        #: Whether half precision has the forms of few rows here, so that only weights' bytes count.
        few = stage.pdl and self.rows * stage.channels <= SMALL_STAGE_VALUES
        self.small = mix == "auto" and few
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
        if attention != "wide" and self.small:
            attention = "wide"  # a few windows gain nothing from half the bytes
        if fused := self.fused_mlp(f"{at}.mlp"):
            fc1 = fc2 = fused
        else:
            fc1 = self.layer(f"{at}.mlp.fc1", hidden, C)
            fc2 = self.layer(f"{at}.mlp.fc2", C, hidden)
        if self.weights is not None:
            forms = self.weights.stages[self.stage.stage][number]
            if attention == qkv.format:  # its form for the library holds the steps of q, k and v
                qkv = self.library("qkv", qkv, forms.qkv, 3 * C, C)
            proj = self.library("proj", proj, forms.proj, C, C)
            if fc2.format == fc1.format and not fused:  # the library's GELU needs an 8-bit output
                fc1 = self.library("fc1", fc1, forms.fc1, hidden, C)
            if not fused:
                fc2 = self.library("fc2", fc2, forms.fc2, C, hidden)
        return BlockFormats(qkv, attention, proj, fc1, fc2, "fused" if fused else "split")

    def fused_mlp(self, at: str) -> LayerFormat | None:
        """The format of an MLP that is one 8-bit kernel, None where it is not."""
        if self.mix != "auto" or not self.kernels or self.small:
            return None
        reason = why_not_one_kernel(self.config, self.range(f"{at}.fc1"), self.range(f"{at}.fc2"))
        format = self.range(f"{at}.fc1").scheme.format
        if reason is None and self.weights is not None:
            reason = why_not_half(self.weights.patch_weight.dtype)
        if reason is None:
            C = self.stage.channels
            reason = quantized_mlp_blocker(C, self.hidden) or why_not_fused(format, self.rows, C)
        if reason is not None:
            self.reasons["fused 8-bit mlp"] = reason
            return None
        return LayerFormat(format, "triton")

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
        if self.stage.attention == "fused" and kind in ("qkv", "proj"):
            return "wide: LayerNorm, qkv and attention are one kernel, in half precision"
        if self.mix != "auto":
            return None
        return why_wide(
            kind, format, self.rows, self.stage.channels, small=self.small,
            post_norm=self.config.version == 2,
        )  # fmt: skip


def why_not_one_kernel(config: SwinConfig, fc1: LayerRange, fc2: LayerRange) -> str | None:
    """Reason why scheme or model keep an MLP in several kernels, None where one can be had."""
    if config.version != 1:
        return "V2 normalises the branch after fc2"
    if not fc1.scheme.quantized or fc1.scheme.format != fc2.scheme.format:
        return "fc1 and fc2 are not in one 8-bit format"
    if "per_token" in (fc1.scheme.activation, fc2.scheme.activation):
        return "a step a token needs the row's maximum first"
    if fc2.scheme.output == "quantized":
        return "fc2's output is stored in 8 bits"
    return None
