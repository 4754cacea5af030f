"""What an engine runs, readable by people and programs."""

from __future__ import annotations

import dataclasses
import json

from fastswin.engine.plan import ModelPlan


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """Implementation of every layer for one batch and image size, and why.

    Attributes:
        source: what the engine was built from.
        device, precision: where and how it runs.
        weights_mib: packed weights in MiB.
        plan: the plan itself.
        graphs: captured CUDA graphs as (kind, batch, image shape), oldest first.
    """

    source: str
    device: str
    precision: str
    weights_mib: float
    plan: ModelPlan
    graphs: tuple

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"{self.source} on {self.device}, {self.precision}, weights {self.weights_mib:.1f} MiB",
            f"batch {plan.batch}, image {plan.image_size[0]}x{plan.image_size[1]}, "
            f"{len(self.graphs)} CUDA graphs captured",
            f"  patch embed: {plan.embed}; pool: {plan.pool}",
        ]
        for s in plan.stages:
            lines.append(
                f"  stage {s.stage}: map {s.map_size[0]}x{s.map_size[1]}, {s.channels} channels, "
                f"{s.depth} blocks, window {s.window_size[0]}x{s.window_size[1]}, "
                f"shift {s.shift_size[0]},{s.shift_size[1]}: qkv {s.qkv}, attention "
                f"{s.attention}, proj {s.proj}, mlp {s.mlp}"
                + (f", merge {s.merge}" if s.merge else "")
            )
            lines.extend(f"    {layer}: {why}" for layer, why in s.reasons.items())
        return "\n".join(lines)
