"""Turns of all processes to rows, one for each model, batch and variant, and rows to a table.

    ratio      median of a variant's turns / median of the baseline's
    min ratio  the same of the shortest turns, which other users of the host disturb least
    paired     median over rounds of (turn / the baseline's turn of that round)
    error      largest error of the logits over the largest logit, both against fp64
    bits       whether all logits are the baseline's

Ratios below 1 are gains. Where the three agree, the difference is the variant's; where they differ
by more than it is worth, the run was too short or had the card not to itself.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from fastswin.bench.problems import Problem
from fastswin.bench.tables import NO_VALUE, Table
from fastswin.bench.variants_turns import Result

#: Relative errors from which logits are called wrong, by precision: far above what rounding makes.
WRONG_FROM = {"fp16": 4e-3, "bf16": 3e-2, "tf32": 4e-3, "fp32": 1e-4}

#: Names of the columns.
HEADER = (
    "model", "variant", "batch", "median us", "min us", "ratio", "min ratio", "paired", "error",
    "bits", "turns", "note",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One model and batch under one variant; None where there is nothing to tell.

    Attributes:
        model, batch, dtype, variant: what ran.
        median_us, min_us: of the turns, per call.
        ratio, min_ratio, paired_ratio: to the baseline, which has 1.
        relative_error: against fp64; None where it is not finite, too.
        wrong: whether the error is one, or not finite.
        same_bits: as the baseline's logits.
        failure: why it ended early; empty where it did not.
        copies: why calls of its engine copy images or logits.
        framework: whose model it is.
        build_s: seconds.
        turns_us: by round.
    """

    model: str
    batch: int
    dtype: str
    variant: str
    median_us: float | None
    min_us: float | None
    ratio: float | None
    min_ratio: float | None
    paired_ratio: float | None
    relative_error: float | None
    wrong: bool
    same_bits: bool | None
    failure: str
    copies: str
    framework: str
    build_s: float | None
    turns_us: dict[int, float]


def make_rows(results: Sequence[Result]) -> list[Row]:
    """A row for each result; the first of a problem is its baseline."""
    baselines: dict[Problem, Result] = {}
    return [_row(r, baselines.setdefault(r.job.problem, r)) for r in results]


def _row(result: Result, baseline: Result) -> Row:
    problem, ready, turns = result.job.problem, result.ready, result.turns_us
    median_us = statistics.median(turns.values()) if turns else None
    min_us = min(turns.values(), default=None)
    ratio = min_ratio = paired_ratio = None
    if median_us and min_us and baseline.turns_us:
        ratio = median_us / statistics.median(baseline.turns_us.values())
        min_ratio = min_us / min(baseline.turns_us.values())
        shared = turns.keys() & baseline.turns_us.keys()
        if shared:
            paired_ratio = statistics.median(turns[i] / baseline.turns_us[i] for i in shared)
    error = ready.relative_error if ready else None
    return Row(
        model=problem.model,
        batch=problem.batch,
        dtype=problem.dtype,
        variant=result.job.variant,
        median_us=median_us,
        min_us=min_us,
        ratio=ratio,
        min_ratio=min_ratio,
        paired_ratio=paired_ratio,
        relative_error=error if error is not None and math.isfinite(error) else None,
        wrong=error is not None and not error < WRONG_FROM[problem.dtype],  # NaN is wrong, too
        same_bits=ready.bits == baseline.ready.bits if ready and baseline.ready else None,
        failure=result.failure,
        copies=ready.copies if ready else "",
        framework=ready.framework if ready else "",
        build_s=ready.build_s if ready else None,
        turns_us=turns,
    )


def make_table(rows: Sequence[Row], title: str) -> Table:
    """Rows as text, in their order."""
    cells = []
    for row in rows:
        notes = ["WRONG"] if row.wrong else []
        notes += [f"failed: {row.failure}"] if row.failure else []
        notes += [f"calls copy: {row.copies}"] if row.copies else []
        bits = {True: "same", False: "differ", None: NO_VALUE}[row.same_bits]
        cells.append((
            row.model, row.variant, str(row.batch), _cell(row.median_us, ".1f"),
            _cell(row.min_us, ".1f"), _cell(row.ratio, ".4f"), _cell(row.min_ratio, ".4f"),
            _cell(row.paired_ratio, ".4f"), _cell(row.relative_error, ".1e"), bits,
            str(len(row.turns_us)), "; ".join(notes),
        ))  # fmt: skip
    caption = "ratios to the first variant of a model and batch, below 1 is faster"
    return Table(title, HEADER, tuple(cells), caption)


def _cell(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else format(value, form)
