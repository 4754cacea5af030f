"""What the suites of single operators share: cases, the run with its deadline, records, options.

Every problem is checked before it is timed and written as soon as it is measured. A red problem has
no record, and a problem that would start past the deadline is named; either makes the exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from fastswin.bench.failures import release_memory
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    Record,
    make_document,
    make_run_info,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.roofline import Ceilings, measure_ceilings
from fastswin.bench.timing import Timing

Say = Callable[[str], None]


class OperatorProblem(Protocol):
    """One row of a suite."""

    @property
    def case(self) -> str:
        """Its name in records and on the command line."""


ProblemT = TypeVar("ProblemT", bound=OperatorProblem)


@dataclasses.dataclass(frozen=True)
class OperatorResult:
    """A finished run: its own records, the file they were merged into, what was not measured."""

    document: Document
    path: Path
    problems_found: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 where everything was right and in time, else 1."""
        return 1 if self.problems_found else 0


def print_line(line: str) -> None:
    """Print at once: a run that is cut off has said what it found."""
    print(line, flush=True)


def check_cases(names: Sequence[str], problems: Sequence[OperatorProblem]) -> None:
    """Raise ValueError, listing the known ones, where a case does not exist."""
    known = [problem.case for problem in problems]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown cases {unknown}; known: {', '.join(known)}")


def run_operator_suite(
    suite: str,
    problems: Sequence[ProblemT],
    measure_problem: Callable[[ProblemT, Ceilings], list[Record]],
    device: torch.device,
    root: Path,
    names: Sequence[str],
    deadline_s: float,
    say: Say,
) -> OperatorResult:
    """Measure problems and write ``<root>/<card>/<suite>.json`` after each.

    Args:
        suite: name of the result file.
        problems: all that the suite has.
        measure_problem: checks and times one, given the copy and GEMM rates of this run; returns
            its records, none where the check is red.
        device: where to measure.
        root: folder of the records.
        names: cases to measure; empty takes all.
        deadline_s: problems that would start later are skipped.
        say: receives readable lines.

    Returns:
        The records of this run and what was not measured.

    Raises:
        ValueError: an unknown case; nothing is run or written.
    """
    check_cases(names, problems)
    start = time.monotonic()
    ceilings = measure_ceilings(device, ["fp16" if device.type == "cuda" else "fp32"])
    gemm_tflops = next(iter(ceilings.gemm_tflops.values()))
    info = make_run_info(suite, device, ceilings.copy_tbs, gemm_tflops)
    path = result_path(root, info)
    say(f"{info.gpu}: copy {ceilings.copy_tbs:.3f} TB/s, torch {info.torch}")
    wrong: list[str] = []
    measured: list[Record] = []
    for problem in problems:
        if names and problem.case not in names:
            continue
        if time.monotonic() - start > deadline_s:
            wrong.append(f"{problem.case}: skipped, the deadline of {deadline_s:.0f} s is over")
            say(wrong[-1])
            continue
        records = [stamp(info, record) for record in measure_problem(problem, ceilings)]
        if records:
            save_records(path, info, records)
            measured += records
        else:
            wrong.append(f"{problem.case}: red, no speed")
        release_memory()
    return OperatorResult(make_document(info, measured), path, tuple(wrong))


def make_record(
    case: str,
    dtype: str,
    batch: int,
    variant: str,
    direction: str,
    timing: Timing,
    floor_ms: float,
    error: float,
    *,
    calls: int = 1,
    graph: bool = False,
    **more: float,
) -> Record:
    """The record of one timed contender, not stamped yet.

    Args:
        case, dtype, batch, variant: the record's key.
        direction: "forward", "backward" or "step".
        timing: of ``calls`` calls each.
        floor_ms: roofline of one call.
        error: largest one of fastswin against fp64, stored with that variant alone.
        calls: calls in one timed call.
        graph: whether a CUDA graph was replayed.
        more: further numbers of this suite.
    """
    record: dict[str, Any] = {
        "case": case, "dtype": dtype, "batch": batch, "variant": variant, "direction": direction,
        "median_ms": timing.median_ms / calls, "p20_ms": timing.p20_ms / calls,
        "p80_ms": timing.p80_ms / calls, "peak_mib": timing.peak_mib, "roofline_ms": floor_ms,
        **more, "graph": graph,
    }  # fmt: skip
    if variant == "fastswin":
        record["max_abs_err"] = error
    return record


def make_parser(
    prog: str, seconds: float, description: str | None = None
) -> argparse.ArgumentParser:
    """Options of a suite's own command line; ``seconds`` is the default per contender."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT, help="folder of the records")
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="per contender and direction"
    )
    parser.add_argument("--cases", default="", help="comma-separated; all by default")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--workers", type=int, default=12, help="compiling processes of --sweep and --warm"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser
