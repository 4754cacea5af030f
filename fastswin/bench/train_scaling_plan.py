"""What suite ``scaling`` measures, as the launcher and the processes that it starts both read it.

A plan goes to the processes as words of a command line (:meth:`ScalingPlan.words`), which
:func:`add_options` and :func:`read_plan` understand; a user's command line is read the same way.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from fastswin.bench.problems import Problem, parse_batches

#: Who averages gradients: DistributedDataParallel or the captured step.
AVERAGING = ("ddp", "graph")


@dataclasses.dataclass(frozen=True)
class ScalingPlan:
    """Numbers of GPUs to train one model on.

    Attributes:
        problem: model, dtype and batch per GPU.
        gpus: numbers of GPUs, a process each.
        variant: of :data:`~fastswin.bench.train_contenders.VARIANTS`.
        seconds: of samples for each number.
        averaging: ways of :data:`AVERAGING`, one after another.

    Raises:
        ValueError: unknown ``averaging``, or none.
    """

    problem: Problem
    gpus: Sequence[int]
    variant: str = "fastswin"
    seconds: float = 5.0
    averaging: Sequence[str] = AVERAGING[:1]

    def __post_init__(self) -> None:
        if not self.averaging or not set(self.averaging) <= set(AVERAGING):
            raise ValueError(
                f"averaging must be of {', '.join(AVERAGING)}, got {list(self.averaging)}"
            )

    @property
    def processes(self) -> int:
        """Of the group, enough for every number."""
        return max(self.gpus)

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Numbers of GPUs with how gradients are averaged, a single one first."""
        numbers = sorted(set(self.gpus))
        alone = [(1, "none")] if 1 in numbers else []
        return alone + [(n, way) for way in self.averaging for n in numbers if n > 1]

    def words(self) -> list[str]:
        """This plan on a command line; a model is told by its name."""
        return [
            "--model", self.problem.model, "--dtype", self.problem.dtype,
            "--batch", str(self.problem.batch), "--variant", self.variant,
            "--averaging", ",".join(self.averaging), "--gpus", ",".join(map(str, self.gpus)),
            "--seconds", str(self.seconds),
        ]  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Let a command line state a plan."""
    parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=128, help="per GPU")
    parser.add_argument("--variant", default="fastswin")
    parser.add_argument("--averaging", default="ddp", help="ddp, graph or ddp,graph")
    parser.add_argument("--gpus", default="1,2,4", help="comma-separated numbers")
    parser.add_argument("--seconds", type=float, default=5.0)


def read_plan(options: argparse.Namespace) -> ScalingPlan:
    """The plan of a parsed command line.

    Raises:
        ValueError: ``gpus`` or ``averaging`` is off.
    """
    return ScalingPlan(
        Problem(options.model, options.dtype, options.batch),
        tuple(parse_batches(options.gpus, "gpus")),
        options.variant,
        options.seconds,
        tuple(options.averaging.split(",")),
    )
