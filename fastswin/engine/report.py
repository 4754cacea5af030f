"""What an engine runs, readable by people and programs."""

from __future__ import annotations

import dataclasses
import json

from fastswin.engine.backends import Choice
from fastswin.engine.stage_plan import ModelPlan


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """Implementation of every layer for one batch and image size, and why.

    Attributes:
        source: what the engine was built from.
        device, precision: where and how it runs.
        weights_mib: packed weights in MiB.
        plan: the plan itself.
        tuning: which tuning table is in use, or why none.
        backend: which runtime runs the model, and why; the plan is that of "torch".
        programs: what that runtime has compiled, as (kind, images, image size).
        graphs: captured CUDA graphs as (kind, batch, image shape), oldest first.
        copies: those whose calls copy images or results, and why (graph_trial.py).
        scheme: of a quantised engine, its name, the images it was calibrated on and the mix.
    """

    source: str
    device: str
    precision: str
    weights_mib: float
    plan: ModelPlan
    graphs: tuple
    tuning: str = "off"
    backend: Choice | None = None
    programs: tuple = ()
    scheme: str = ""
    copies: tuple = ()

    @property
    def quantized_layers(self) -> str:
        """Layers that run in 8 bits, of all that could, such as "38/51"; "0/0" if none could."""
        layers = [
            layer
            for stage in self.plan.stages
            if stage.formats is not None
            for layer in stage.formats.layers()
        ]
        return f"{sum(layer.quantized for layer in layers)}/{len(layers)}"

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def __str__(self) -> str:
        plan = self.plan
        if self.backend is not None and self.backend.backend != "torch":
            return "\n".join(self._runtime_lines(self.backend))
        lines = [
            f"{self.source} on {self.device}, {self.precision}, weights {self.weights_mib:.1f} MiB",
            f"batch {plan.batch}, image {plan.image_size[0]}x{plan.image_size[1]}, "
            f"{len(self.graphs)} CUDA graphs captured",
            *(f"  {kind} of {images} images: {why}" for (kind, images, _), why in self.copies),
            *([f"  scheme: {self.scheme}"] if self.scheme else []),
            f"  tuning: {self.tuning}",
            f"  patch embed: {plan.embed}; pool: {plan.pool}; head: {plan.head}; "
            f"programmatic dependent launch: {'on' if plan.pdl else 'off'}",
        ]
        for s in plan.stages:
            lines.append(
                f"  stage {s.stage}: map {s.map_size[0]}x{s.map_size[1]}, {s.channels} channels, "
                f"{s.depth} blocks, window {s.window_size[0]}x{s.window_size[1]}, "
                f"shift {s.shift_size[0]},{s.shift_size[1]}: qkv {s.qkv}, attention "
                f"{s.attention}, proj {s.proj}, mlp {s.mlp}"
                + (f", merge {s.merge}" if s.merge else "")
            )
            if s.formats is not None:
                lines.extend(f"    {line}" for line in s.formats.lines())
            lines.extend(f"    {layer}: {why}" for layer, why in s.reasons.items())
            lines.extend(f"    {layer} tiles: {config}" for layer, config in s.launch.items())
        if self.backend is not None and self.device == "cpu":
            lines.append(f"  backend torch: {self.backend.reason}")
        return "\n".join(lines)

    def _runtime_lines(self, choice: Choice) -> list[str]:
        lines = [
            f"{self.source} on {self.device}, {self.precision}, weights {self.weights_mib:.1f} MiB",
            f"  backend {choice.backend}, products in {choice.compute}: {choice.reason}",
        ]
        for kind, images, (height, width) in self.programs:
            lines.append(f"  compiled: {kind} of {images} images of {height}x{width}")
        return lines
