"""Plans for a GPU of compute capability 9.0, made where there is none."""

from __future__ import annotations

import torch

from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.stage_plan import ModelPlan
from fastswin.models.variants import find_variant


def plan_of(
    name: str, device: torch.device, precision: str = "fp16", batch: int = 1, **choices
) -> ModelPlan:
    """The plan of a named variant."""
    config = find_variant(name)
    chosen = PRECISIONS[precision]
    return make_plan(config, batch, config.image_size, device, chosen, "triton", **choices)
