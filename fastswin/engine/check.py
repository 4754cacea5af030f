"""Where does a forward pass stop being finite?

fp16 ends at 65504; a residual stream that grows block by block passes it silently. This mode runs
the same layers without graphs and looks at the stream after every half block. The engine itself
never clamps: a clamped answer would be wrong without saying so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastswin.engine.bind import BoundPlan
from fastswin.engine.forward import Forward


class BlockRange(NamedTuple):
    """Largest magnitude of the residual stream after one half of one block."""

    stage: int
    block: int
    half: str
    max_abs: float


def check_finite(forward: Forward, images: torch.Tensor, bound: BoundPlan) -> list[BlockRange]:
    """Run block by block and collect magnitudes.

    Raises:
        FloatingPointError: the first value that is not finite, by stage, block and half.
        ValueError: there is no image.
    """
    if images.shape[0] == 0:
        raise ValueError("images must hold at least one image to check, got batch 0")
    ranges: list[BlockRange] = []
    x, _ = forward.embed(images, bound.plan)
    _record(ranges, x, forward, stage=0, block=0, half="patch embedding")
    for index, stage in enumerate(bound.plan.stages):
        blocks = forward.weights.stages[index]
        for number, block in enumerate(blocks):
            offsets = bound.offsets[index][number]
            stats = forward.attention_half(x, block, stage, offsets)
            _record(ranges, x, forward, stage=index, block=number, half="attention")
            forward.join(x, forward.mlp_half(x, block, stage, offsets, stats), stage)
            _record(ranges, x, forward, stage=index, block=number, half="mlp")
        if stage.merge is not None:
            x, _ = forward.merge(x, index, stage, bound.stage_end[index])
            _record(ranges, x, forward, stage=index, block=len(blocks), half="patch merging")
    logits = forward.classify(x, bound)
    _record(ranges, logits, forward, stage=index, block=len(blocks), half="pool and head")
    return ranges


def _record(
    ranges: list[BlockRange],
    x: torch.Tensor,
    forward: Forward,
    *,
    stage: int,
    block: int,
    half: str,
) -> None:
    max_abs = x.abs().max().item()
    if not bool(torch.isfinite(x).all()):
        name = forward.precision.name
        advice = "use precision='bf16' or 'fp32'" if name == "fp16" else "check the weights"
        raise FloatingPointError(
            f"values that are not finite first appear in stage {stage}, block {block} ({half}) "
            f"at precision {name!r}; {advice}"
        )
    ranges.append(BlockRange(stage, block, half, max_abs))
