"""The latency part of the demonstration: which contenders this machine can show in the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.problems import Problem
from fastswin.bench.suites import Outcome, run_model_suite
from fastswin.data.shipped import SHIPPED, shipped_checkpoint
from fastswin.models import load_checkpoint

LARGE_MODEL = "swin_tiny_patch4_window7_224"

#: Contenders on a CPU, where there are no graphs; compiling is for the small model alone.
CPU_VARIANTS = ("fastswin", "eager", "jit-trace")

#: Seconds that each part needs on a slow CPU: left out where less time is left.
COMPILE_S, LARGE_MODEL_S = 60.0, 30.0


def problem_for(name: str, dtype: str, batch: int, checkpoint: str | None = None) -> Problem:
    """A benchmark problem of a published name, or of a shipped model with its weights.

    Args:
        name: the model.
        dtype, batch: as in :class:`~fastswin.bench.problems.Problem`.
        checkpoint: state dict of a published model; None means seeded random weights.

    Raises:
        ValueError: an illegal dtype or batch, or a checkpoint for a shipped model.
    """
    if name not in SHIPPED:
        return Problem(name, dtype, batch, checkpoint=checkpoint)
    if checkpoint is not None:
        raise ValueError(f"checkpoint: {name} has its own weights")
    path = shipped_checkpoint(name)
    config = load_checkpoint(path).model.config
    return Problem(name, dtype, batch, config=config, checkpoint=str(path))


def measure_latency(
    name: str,
    device: torch.device,
    out: Path,
    *,
    deadline_s: float | None,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Time a shipped model and Swin-T against what else this machine offers.

    Args:
        name: shipped model.
        device: fp16 at batches 1 and 32 on a GPU, fp32 at batch 1 on a CPU.
        out: folder for the benchmark's own record.
        deadline_s: seconds for all; slow parts that would pass it are skipped. None never skips.
        say: receives readable lines.

    Returns:
        One entry a problem and contender: ``case``, ``dtype``, ``batch``, ``variant``,
        ``status`` and either the benchmark's record values or a ``message``.
    """
    if device.type == "cuda":
        problems = [problem_for(m, "fp16", b) for m in (name, LARGE_MODEL) for b in (1, 32)]
        return _run(problems, None, device, out, say)
    started = time.monotonic()

    def left() -> float:
        return math.inf if deadline_s is None else deadline_s - (time.monotonic() - started)

    small, large = problem_for(name, "fp32", 1), problem_for(LARGE_MODEL, "fp32", 1)
    compile_too = left() >= COMPILE_S
    rows = _run([small], (*CPU_VARIANTS, *(["compile"] if compile_too else [])), device, out, say)
    if not compile_too:
        rows.append(_row(Outcome(small, "compile", "skipped", "no time left")))
    if left() >= LARGE_MODEL_S:
        return rows + _run([large], CPU_VARIANTS, device, out, say)
    return rows + [_row(Outcome(large, v, "skipped", "no time left")) for v in CPU_VARIANTS]


def _run(
    problems: list[Problem],
    variants: Sequence[str] | None,
    device: torch.device,
    out: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    result = run_model_suite(problems, variants, device, out, progress=say, suite="demo")
    return [_row(outcome) for outcome in result.outcomes]


def red_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each contender of ours whose answers were wrong or that could not run."""
    return [
        f"latency of {row['case']} {row['dtype']} batch {row['batch']}: {row['message']}"
        for row in rows
        if row["variant"].startswith("fastswin") and row["status"] not in ("ok", "skipped")
    ]


def _row(outcome: Outcome) -> dict[str, Any]:
    problem = outcome.problem
    row: dict[str, Any] = {
        "case": problem.model,
        "dtype": problem.dtype,
        "batch": problem.batch,
        "variant": outcome.variant,
        "status": outcome.status,
        "message": outcome.message,
    }
    return row | (outcome.record or {})
