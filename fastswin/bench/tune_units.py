"""What a table may change in a model: one layer of one stage in one form, with its tiles.

    layers of a stage      qkv and mlp in a form, attention
    proposal               a unit whose launches took less time apart than the engine's own choice
    kept                   units that whole models gained with and none lost with

The launches' times alone do not decide: they are of one kernel over and over, with its operands in
L2 and its neighbours missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from fastswin.engine.precision import PRECISIONS
from fastswin.engine.stage_plan import ModelPlan
from fastswin.engine.tuned import attention_kernel, stage_kernels, stage_layers
from fastswin.models.config import SwinConfig
from fastswin.ops.window_attention.api import KERNEL_HEAD_DIMS
from fastswin.tuning.document import Row
from fastswin.tuning.layers import LAYER_FIELDS, LayerProblem
from fastswin.tuning.problem import KernelProblem, make_problem

Problem = LayerProblem | KernelProblem

#: Launches and layers of a model at one batch.
Group = tuple[list[KernelProblem], list[LayerProblem]]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A layer in a form, or an attention launch; both with the best tiles of their launches.

    Attributes:
        problem: the layer, or the launch of attention.
        form: the plan's word; empty for attention.
    """

    problem: Problem
    form: str = ""

    def kernels(self) -> list[KernelProblem]:
        """Its launches with tiles to choose."""
        if isinstance(self.problem, KernelProblem):
            return [self.problem]
        p, d = self.problem, self.problem.dims
        words = {"qkv": "", "mlp": "", p.layer: self.form}
        found = stage_kernels(
            p.dtype, p.rows, d["C"], d.get("hidden", 0), bool(d["post_norm"]), **words
        )
        return list(found.values())

    def __str__(self) -> str:
        return f"{self.problem}" + (f" {self.form}" if self.form else "")


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of launches: with their best tiles, and with the engine's own."""

    best: Mapping[KernelProblem, float]
    default: Mapping[KernelProblem, float]


@dataclasses.dataclass(frozen=True)
class StageProblems:
    """What a table is asked for one stage: layers by name, attention; nothing for few rows."""

    layers: dict[str, LayerProblem]
    attention: KernelProblem | None


def stage_problems(
    config: SwinConfig, plan: ModelPlan, stage: int, precision: str
) -> StageProblems:
    """The problems of one stage that the planner asks a table about.

    Args:
        config: the model, at its own image size.
        plan: its plan without a table: stages of few rows, and halves or blocks that are one
            kernel, are what they are whatever a table says.
        stage: which.
        precision: "fp16", "bf16", "fp32" or "tf32"; the last two have attention alone.
    """
    planned = plan.stages[stage]
    if planned.few_rows or planned.attention == "block":
        return StageProblems({}, None)
    H, W = planned.map_size
    layers: dict[str, LayerProblem] = {}
    if PRECISIONS[precision].half:
        layers = stage_layers(
            precision, plan.batch * H * W, config.dim(stage), config.hidden_dim(stage),
            config.version == 2,
        )  # fmt: skip
        if planned.qkv == "inside":
            del layers["qkv"]
    attention = None
    own = planned.attention != "fused" and not planned.split_attention
    if own and config.head_dim(stage) <= KERNEL_HEAD_DIMS[1]:
        attention = attention_kernel(
            precision, plan.batch, (H, W), config.stage_window(stage), config.num_heads[stage],
            config.head_dim(stage), config.version == 2,
        )  # fmt: skip
    return StageProblems(layers, attention)


def tuning_group(config: SwinConfig, plan: ModelPlan, precision: str) -> Group:
    """Launches and layers that a table is asked about for a model and batch, without repeats.

    Args:
        config: the model, at its own image size.
        plan: its plan without a table.
        precision: "fp16", "bf16", "fp32" or "tf32"; the last two have attention alone to tune.
    """
    kernels: dict[KernelProblem, None] = {}
    layers: dict[LayerProblem, None] = {}
    for stage in range(config.num_stages):
        problems = stage_problems(config, plan, stage, precision)
        layers |= dict.fromkeys(problems.layers.values())
        if problems.attention is not None:
            kernels[problems.attention] = None
    for layer in layers:
        for launches in layer.forms().values():
            kernels |= dict.fromkeys(launches)
    return list(kernels), list(layers)


def propose(config: SwinConfig, plan: ModelPlan, precision: str, times: Times) -> dict[Unit, float]:
    """Units that should make a model faster, and the microseconds they should save, most first."""
    found: dict[Unit, float] = {}
    for stage, planned in enumerate(plan.stages):
        problems = stage_problems(config, plan, stage, precision)
        for name, layer in problems.layers.items():
            own = planned.qkv if name == "qkv" else planned.mlp
            for form, saved in _savings(layer, own, times).items():
                found[Unit(layer, form)] = saved * planned.depth
        launch = problems.attention
        if launch is not None and launch in times.best and launch in times.default:
            found[Unit(launch)] = (times.default[launch] - times.best[launch]) * planned.depth
    useful = {unit: us for unit, us in found.items() if us > 0}
    return dict(sorted(useful.items(), key=lambda item: -item[1]))


def _savings(layer: LayerProblem, own: str, times: Times) -> dict[str, float]:
    """By form, what a layer saves against the engine's own form with the engine's own tiles."""
    forms = layer.forms()
    if own not in forms or any(p not in times.default for p in forms[own]):
        return {}
    before = sum(times.default[p] for p in forms[own])
    return {
        form: before - sum(times.best[p] for p in launches)
        for form, launches in forms.items()
        if all(p in times.best for p in launches)
    }


def problems_of(config: SwinConfig, plan: ModelPlan, precision: str) -> set[Problem]:
    """Everything that a table is asked about for one model and batch."""
    found: set[Problem] = set()
    for stage in range(config.num_stages):
        problems = stage_problems(config, plan, stage, precision)
        found |= set(problems.layers.values())
        if problems.attention is not None:
            found.add(problems.attention)
    return found


def rows_of(document: dict[str, Any], units: Iterable[Unit], verdict: str) -> dict[str, Any]:
    """A document with the rows of some units alone, their forms chosen, under one verdict."""
    chosen = {u.problem: u.form for u in units if isinstance(u.problem, LayerProblem)}
    kernels = {kernel for unit in units for kernel in unit.kernels()}
    configs = [
        {**row, "verdict": verdict}
        for row in document["configs"]
        if kernel_of(row) in kernels and not is_default(row)
    ]
    choices = [
        {**row, "choice": chosen[layer_of(row)], "verdict": verdict}
        for row in document["choices"]
        if layer_of(row) in chosen
    ]
    return {**document, "models": [], "configs": configs, "choices": choices}


def is_default(row: Row) -> bool:
    """Whether a row's tiles are the engine's own, whose time it then repeats."""
    return row["default_us"] is not None and row["latency_us"] == row["default_us"]


def kernel_of(row: Row) -> KernelProblem:
    """The launch that a row of tiles is for."""
    return make_problem(row["op"], row["dtype"], row["rows"], **row["shape"])


def layer_of(row: Row) -> LayerProblem:
    """The layer that a row of forms is for."""
    shape = tuple(int(row["shape"][name]) for name in LAYER_FIELDS[row["layer"]])
    return LayerProblem(row["layer"], row["dtype"], row["rows"], shape)
