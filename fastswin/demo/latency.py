"""The latency part of the demonstration: which contenders this machine can show in the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.problems import Problem
from fastswin.bench.suites import Outcome, run_model_suite
from fastswin.data.shipped import SHIPPED, shipped_checkpoint
from fastswin.models.checkpoint import load_checkpoint

LARGE_MODEL = "swin_tiny_patch4_window7_224"

#: Contenders on a CPU: there are no graphs there, and compiling Swin-T alone takes minutes.
CPU_VARIANTS = ("fastswin", "eager", "jit-trace")


def problem_for(name: str, dtype: str, batch: int) -> Problem:
    """A benchmark problem of a published name, or of a shipped model with its weights."""
    if name not in SHIPPED:
        return Problem(name, dtype, batch)
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
        deadline_s: Swin-T is left out when less time than this is gone, in s; None never.
        say: receives readable lines.

    Returns:
        One entry a problem and contender: ``case``, ``dtype``, ``batch``, ``variant``,
        ``status`` and either the benchmark's record values or a ``message``.
    """
    gpu = device.type == "cuda"
    dtype, batches = ("fp16", (1, 32)) if gpu else ("fp32", (1,))
    problems = [problem_for(m, dtype, batch) for m in (name, LARGE_MODEL) for batch in batches]
    result = run_model_suite(
        problems,
        variants=None if gpu else CPU_VARIANTS,
        device=device,
        out=out,
        seconds_per_contender=1.0 if gpu else 2.0,
        progress=say,
        suite="demo",
        deadline_s=deadline_s,
    )
    return [_row(outcome) for outcome in result.outcomes]


def red_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each contender of ours whose answers were wrong or that could not run."""
    return [
        f"latency of {row['case']} {row['dtype']} batch {row['batch']}: {row['message']}"
        for row in rows
        if row["variant"] == "fastswin" and row["status"] not in ("ok", "skipped")
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
