"""Whole models under several tables, timed in turn: what decides about a table's rows.

    each capture     every contender is captured anew, replayed in turn with the others, dropped
    gain             median over captures of heuristic / contender - 1

Two captures of one plan differ by up to 3 % at batch 1 and 1 % at 32, by where their memory lies;
hence several of each, and ratios within one turn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch

from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.source import perturb_weights
from fastswin.bench.timing import Call, Clock, schedule
from fastswin.engine.build import build_forward
from fastswin.engine.plan import make_plan
from fastswin.engine.plans import Plans
from fastswin.engine.precision import PRECISIONS, matmul_mode
from fastswin.engine.stage_plan import ModelPlan
from fastswin.models import SwinTransformer, find_variant
from fastswin.models.config import SwinConfig
from fastswin.tuning.table import TuningTable

#: Samples of each contender in one turn of captures; one lasts about this long.
SAMPLES, SAMPLE_MS = 5, 8.0

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One contender beside the heuristics.

    Attributes:
        median_ms: over the captures.
        gain: how much faster than the heuristics, 0.01 for 1 %; median over the captures.
        max_abs_diff: largest difference of its logits from theirs.
    """

    median_ms: float
    gain: float
    max_abs_diff: float


def heuristic_plan(
    config: SwinConfig, batch: int, precision: str, device: torch.device
) -> ModelPlan:
    """The engine's plan of a model at its own image size, without a table."""
    return make_plan(config, batch, config.image_size, device, PRECISIONS[precision])


class WholeModel:
    """A named model with seeded weights on a device, run under any table.

    Args:
        name: of a variant.
        precision: "fp16", "bf16", "fp32" or "tf32".
        device: where it runs.
    """

    def __init__(self, name: str, precision: str, device: torch.device) -> None:
        self.name, self.config = name, find_variant(name)
        self.precision, self.device = PRECISIONS[precision], device
        with torch.device("meta"):  # every parameter is written below
            model = SwinTransformer(self.config)
        model = model.to_empty(device="cpu").eval()
        perturb_weights(model)
        self._forward, _ = build_forward(model, model, None, self.precision, device)
        self._plain = self._plans(None)

    def measure(
        self, batch: int, tables: Mapping[Key, TuningTable], clock: Clock, captures: int
    ) -> tuple[float, dict[Key, Measured]]:
        """Milliseconds of the heuristics, and every table beside them.

        Args:
            batch: images.
            tables: contenders by any key.
            clock: of the device.
            captures: turns.
        """
        images = self._images(batch)
        with torch.no_grad(), matmul_mode(self.precision, self.device):
            calls = [self._call(self._plain, images)]
            calls += [self._call(self._plans(table), images) for table in tables.values()]
            truth, *logits = [call().float() for call in calls]
            turns = time_captures(calls, clock, captures)
        found: dict[Key, Measured] = {}
        for index, (key, own) in enumerate(zip(tables, logits, strict=True), start=1):
            difference = (own - truth).abs().max().item()
            found[key] = Measured(
                _median([turn[index] for turn in turns]),
                _median([turn[0] / turn[index] - 1 for turn in turns]),
                difference if math.isfinite(difference) else math.inf,
            )
        return _median([turn[0] for turn in turns]), found

    def _images(self, batch: int) -> torch.Tensor:
        problem = Problem(self.name, self.precision.name, batch)
        return seeded_images(problem, batch, self.device, seed=0)

    def _plans(self, table: TuningTable | None) -> Plans:
        plans = Plans(self.device, "auto", table, None, "auto")
        plans.take(self._forward, None)
        return plans

    def _call(self, plans: Plans, images: torch.Tensor) -> Callable[[], torch.Tensor]:
        bound = plans.bound(images.shape[0], (images.shape[2], images.shape[3]))
        if self.device.type == "cuda":
            plans.compile(images, bound)
        return lambda: self._forward.logits(images, bound)


def time_captures(calls: Sequence[Call], clock: Clock, captures: int) -> list[list[float]]:
    """For each turn of captures the median milliseconds of every call."""
    turns: list[list[float]] = []
    order = range(len(calls))
    for turn in range(captures):
        graphs = list(calls)
        for index in order if turn % 2 == 0 else reversed(order):  # memory is handed out in order
            if clock.kind == "cuda":
                graphs[index] = clock.capture(calls[index], 1)
            graphs[index]()  # the first replay uploads the graph
        pilots = [max(clock.elapsed_ms(graph, 1), 1e-3) for graph in graphs]
        repeats = [max(1, math.ceil(SAMPLE_MS / pilot)) for pilot in pilots]
        samples: list[list[float]] = [[] for _ in calls]
        for index in schedule([SAMPLES] * len(calls)):
            elapsed = clock.elapsed_ms(graphs[index], repeats[index])
            samples[index].append(elapsed / repeats[index])
        turns.append([_median(values) for values in samples])
    return turns


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
