"""Run a suite: for each problem check, time side by side, and write the record at once.

Nothing that goes wrong with one contender or one problem stops the rest; it becomes an
:class:`~fastswin.bench.measurement.Outcome` with a readable line, and a non-zero exit code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from fastswin.bench.contenders import COMPILED, DEFAULT_VARIANTS, VARIANTS
from fastswin.bench.failures import describe, release_memory
from fastswin.bench.measurement import Exclusive, Measurement, Outcome
from fastswin.bench.problems import Problem
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Document,
    Key,
    make_document,
    make_run_info,
    merge_records,
    record_key,
    result_path,
    save_records,
)
from fastswin.bench.roofline import Ceilings, measure_ceilings
from fastswin.bench.source import SourceCache
from fastswin.bench.timing import check_arguments

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class SuiteResult:
    """A finished run.

    Attributes:
        document: records of this run alone, in the format of the file.
        path: the file they were merged into.
        outcomes: one per problem and contender.
        notes: readable lines about the run as a whole, each of which makes the exit code 1.
        required: variants that the caller named; None where the defaults were taken.
    """

    document: Document
    path: Path
    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    required: tuple[str, ...] | None = None

    @property
    def problems_found(self) -> list[str]:
        """Why the exit code is not 0, one line each."""
        lines = list(self.notes)
        for outcome in self.outcomes:
            if outcome.status == "ok":
                continue
            if outcome.status == "unavailable" and self.required is None:
                continue
            lines.append(
                f"{outcome.problem} {outcome.variant}: {outcome.status}: {outcome.message}"
            )
        return lines

    @property
    def exit_code(self) -> int:
        """0 where everything asked for was measured and right, else 1."""
        return 1 if self.problems_found else 0


def run_model_suite(
    problems: Sequence[Problem],
    variants: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    out: str | Path = DEFAULT_ROOT,
    seconds_per_contender: float = 1.0,
    progress: Progress = lambda line: None,
    *,
    suite: str = "model",
    warmup: int | None = None,
    iterations: int | None = None,
    deadline_s: float | None = None,
    cold_build_s: Mapping[tuple[Problem, str], float] | None = None,
    ceilings: Ceilings | None = None,
    exclusive: Exclusive = contextlib.nullcontext,
    forgiving: bool = False,
) -> SuiteResult:
    """Check and time every contender on every problem.

    Args:
        problems: from :func:`~fastswin.bench.problems.make_problems`.
        variants: keys of :data:`~fastswin.bench.contenders.VARIANTS`; None takes the default ones
            and forgives those that this machine lacks.
        device: "cuda", "cpu" or a torch device; None takes the GPU, or the CPU with a note (and
            exit code 1) where there is none.
        out: root of the results; the card's folder is made below it.
        seconds_per_contender: time for each contender's samples, in s.
        progress: receives readable lines.
        suite: name of the result file.
        warmup, iterations: exact numbers of discarded calls and of samples; None chooses.
        deadline_s: problems that would start later than this are skipped (exit code 1).
        cold_build_s: from :func:`~fastswin.bench.compile_cache.warm_compile_cache`.
        ceilings: copy and GEMM rates; None measures them first.
        exclusive: entered around each problem's timing, for runs that build in parallel.
        forgiving: whether named variants that this machine lacks are forgiven too.

    Returns:
        Outcomes of all, and the exit code.

    Raises:
        ValueError: an unknown variant, a bad number, no problem, or an unreadable result file.
        RuntimeError: ``device`` was named but is not there. Nothing is run or written.
    """
    start = time.monotonic()
    names = _check_variants(variants)
    check_arguments(seconds_per_contender, warmup, iterations)
    if not problems:
        raise ValueError("problems must hold at least one problem")
    target, notes = choose_device(device)
    clock_dtype = clock_precision(target)
    if ceilings is None:
        ceilings = measure_device(target, problems)
    info = make_run_info(suite, target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_dtype])
    path = result_path(Path(out), info)
    save_records(path, info, [])  # fails here, not after an hour, where out cannot be written
    progress(
        f"{info.gpu}: copy {info.copy_tbs} TB/s, {clock_dtype} GEMM {info.gemm_tflops} TFLOP/s"
    )
    for note in notes:
        progress(note)
    sources = SourceCache()
    outcomes: list[Outcome] = []
    for problem in problems:
        if deadline_s is not None and time.monotonic() - start > deadline_s:
            skipped = f"deadline of {deadline_s:g} s passed"
            outcomes += [Outcome(problem, name, "skipped", skipped) for name in names]
            progress(f"{problem}: {skipped}")
            continue
        try:
            with current_device(target):
                measured = Measurement(problem, sources.get(problem), target, ceilings, info)
                found = measured.run(
                    names,
                    seconds_per_contender,
                    warmup,
                    iterations,
                    cold_build_s or {},
                    progress,
                    exclusive,
                )
        except Exception as error:
            failure = describe(error)
            found = [Outcome(problem, name, failure.status, failure.message) for name in names]
        red = [_key(problem, outcome.variant) for outcome in found if outcome.status == "red"]
        save_records(path, info, [o.record for o in found if o.record is not None], red)
        release_memory()
        outcomes += found
        for outcome in found:
            progress(_line(outcome))
    records = merge_records([], [o.record for o in outcomes if o.record is not None])
    document = make_document(info, records)
    required = tuple(names) if variants is not None and not forgiving else None
    return SuiteResult(document, path, tuple(outcomes), tuple(notes), required)


def clock_precision(device: torch.device) -> str:
    """Precision of the GEMM rate in a record's head."""
    return "fp16" if device.type == "cuda" else "fp32"


def measure_device(device: torch.device, problems: Sequence[Problem]) -> Ceilings:
    """Copy and GEMM rates for the precisions of these problems."""
    with current_device(device):
        return measure_ceilings(device, [clock_precision(device), *(p.dtype for p in problems)])


def choose_device(device: str | torch.device | None) -> tuple[torch.device, list[str]]:
    """The device to measure, and a note where the GPU that was expected is missing.

    Raises:
        RuntimeError: a GPU was named and is not there.
    """
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda"), []
        return torch.device("cpu"), ["no GPU found: measured on the CPU (device='cpu' to mean it)"]
    target = torch.device(device)
    if target.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"device {str(device)!r} was asked for, but PyTorch finds no GPU")
    return target, []


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one: events, streams and memory statistics belong to that."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_variants(variants: Sequence[str] | None) -> list[str]:
    names = list(DEFAULT_VARIANTS) if variants is None else list(dict.fromkeys(variants))
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {name!r}")
    if not names:
        raise ValueError(f"variants must name at least one of {', '.join(VARIANTS)}")
    return names


def _key(problem: Problem, variant: str) -> Key:
    return record_key(
        {
            "case": problem.model,
            "dtype": problem.dtype,
            "batch": problem.batch,
            "variant": variant,
        }
    )


def _line(outcome: Outcome) -> str:
    head = f"{outcome.problem} {outcome.variant}:"
    record = outcome.record
    if record is None:
        return f"{head} {outcome.status}: {outcome.message}"
    build = "compile" if outcome.variant in COMPILED else "build"
    return (
        f"{head} {record['median_ms']:.4g} ms "
        f"(p20 {record['p20_ms']:.4g}, p90 {record['p90_ms']:.4g}, n {record['count']}), "
        f"max abs err {record['max_abs_err']:.2g}, {build} {record['build_s']:.1f} s, "
        f"graph {'yes' if record['graph'] else 'no'}, TF32 {'on' if record['tf32'] else 'off'}"
    )
