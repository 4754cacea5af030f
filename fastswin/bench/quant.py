"""int8 and fp8 beside half precision, in turn on one card in one run: the suite "quant".

    python -m fastswin.bench.quant --models swin_tiny_patch4_window7_224 --batches 32,64 \
        --deadline-s 300 --out benchmarks/results
    OMP_NUM_THREADS=1 python -m fastswin.bench.quant --processes 16 --resume --deadline-s 420 \
        --contenders fp16,int8,fp8,fp16:compile-reduce-overhead --models ... --batches 1,8,32,64

For each model and batch every contender is built and checked (correctness.py: quantised ones beside
the integer reference), then all are timed in turn. ``over_fp16`` of a record is our own
half-precision engine's median over this one's. Kernels of all batches are compiled first, side by
side; with ``--processes`` each problem is built by a process of its own (quant_parallel.py).
Records are written after every problem; ``--resume`` leaves out those that this commit has. Exit
codes: 0 all measured and right, 1 something was not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.calibration import calibration_for
from fastswin.bench.correctness import make_gate
from fastswin.bench.failures import Failure, describe, release_memory
from fastswin.bench.measurement import Exclusive, Measurement, Outcome, make_candidate, own_peak_mib
from fastswin.bench.problems import (
    DEFAULT_BATCHES,
    SUITES,
    Problem,
    parse_batches,
    parse_names,
    seeded_images,
)
from fastswin.bench.quant_entries import DEFAULT_ENTRIES, Entry
from fastswin.bench.quant_parallel import Finished, Shared, run_side_by_side
from fastswin.bench.record import (
    DEFAULT_ROOT,
    Record,
    RunInfo,
    load_document,
    make_document,
    make_run_info,
    merge_records,
    record_key,
    result_path,
    save_records,
    stamp,
)
from fastswin.bench.roofline import Ceilings
from fastswin.bench.source import Source, SourceCache
from fastswin.bench.suites import (
    Progress,
    SuiteResult,
    choose_device,
    clock_precision,
    current_device,
    measure_device,
)
from fastswin.bench.timing import make_clock, measure
from fastswin.engine import Engine
from fastswin.models import list_models

#: Input batches that the timed calls rotate through.
INPUT_SETS = 4


def run_quant_suite(
    problems: Sequence[Problem],
    entries: Sequence[Entry] = DEFAULT_ENTRIES,
    device: str | torch.device | None = None,
    out: str | Path = DEFAULT_ROOT,
    seconds: float = 0.5,
    progress: Progress = lambda line: None,
    *,
    deadline_s: float | None = None,
    ceilings: Ceilings | None = None,
    processes: int = 0,
    build_s: float | None = None,
    resume: bool = False,
) -> SuiteResult:
    """Check and time all entries on all problems.

    Args:
        problems: models and batches; their own dtype is not looked at.
        entries: contenders, the one that ratios are taken over first.
        device: "cuda", "cpu" or a torch device; None takes the GPU.
        out: root of the results, written after every problem.
        seconds: of samples for each contender.
        progress: receives readable lines.
        deadline_s: problems that would start later are skipped (exit code 1).
        ceilings: copy and GEMM rates; None measures them first.
        processes: problems built side by side; 0 builds one after another in this process.
        build_s: longest wait, in s, for all of these to be built; None is half the deadline.
        resume: leave out problems whose records of this commit are in the file already.

    Raises:
        ValueError: no problem or no entry.
        RuntimeError: ``device`` was named but is not there.
    """
    if not problems or not entries:
        raise ValueError("problems and entries must hold at least one each")
    start = time.monotonic()
    target, notes = choose_device(device)
    if ceilings is None:
        wanted = [dataclasses.replace(problems[0], dtype=entry.dtype) for entry in entries]
        ceilings = measure_device(target, wanted)
    info = make_run_info(
        "quant", target, ceilings.copy_tbs, ceilings.gemm_tflops[clock_precision(target)]
    )
    path = result_path(Path(out), info)
    save_records(path, info, [])  # fails here, not after an hour, where out cannot be written
    progress(f"{info.gpu}: copy {info.copy_tbs} TB/s, GEMM {ceilings.gemm_tflops} TFLOP/s")
    if resume:
        problems = [p for p in problems if not _has_records(path, info, p, entries)]
    shared = Shared(entries, target, ceilings, info, seconds)
    deadline = math.inf if deadline_s is None else start + deadline_s
    outcomes: list[Outcome] = []
    if processes:
        wait_s = build_s or (deadline_s or 600.0) / 2
        found_by_problem = run_side_by_side(
            problems, shared, processes, build_s=wait_s, deadline=deadline, progress=progress
        )
    else:
        found_by_problem = _one_by_one(problems, shared, deadline, progress)
    for problem, found in found_by_problem:
        if isinstance(found, str):
            found = [_outcome(problem, entry, "skipped", found) for entry in entries]
        red = [_key(outcome) for outcome in found if outcome.status == "red"]
        save_records(path, info, [o.record for o in found if o.record is not None], red)
        for outcome in found:
            progress(f"[{time.monotonic() - start:4.0f} s] {_line(outcome)}")
        outcomes += found
    records = merge_records([], [o.record for o in outcomes if o.record is not None])
    document = make_document(info, records)
    return SuiteResult(document, path, tuple(outcomes), tuple(notes), tuple(map(str, entries)))


def _one_by_one(
    problems: Sequence[Problem], shared: Shared, deadline: float, progress: Progress
) -> Iterator[Finished]:
    """Outcomes of each problem, all in this process."""
    suite = QuantSuite(shared, progress)
    for problem in problems:
        if time.monotonic() > deadline:
            yield problem, "the deadline passed"
            continue
        yield problem, suite.run(problem, [p.batch for p in problems if p.model == problem.model])


def _has_records(path: Path, info: RunInfo, problem: Problem, entries: Sequence[Entry]) -> bool:
    """Whether the file has all entries of a problem from the tree that is measured."""
    document = load_document(path)
    known = [] if document is None else document["records"]
    found = {record_key(record) for record in known if record.get("commit") == info.commit}
    return all(_key(_outcome(problem, entry, "ok")) in found for entry in entries)


class QuantSuite:
    """What all problems of a run share."""

    def __init__(
        self,
        shared: Shared,
        progress: Progress = lambda line: None,
        exclusive: Exclusive = contextlib.nullcontext,
    ) -> None:
        self.entries = tuple(dict.fromkeys(shared.entries))
        self.device, self.ceilings, self.info = shared.device, shared.ceilings, shared.info
        self.seconds, self.progress = shared.seconds, progress
        self.exclusive = exclusive
        self.sources = SourceCache()
        self.compiled: set[str] = set()

    def run(self, problem: Problem, batches: Sequence[int]) -> list[Outcome]:
        """One problem; whatever goes wrong with it becomes an outcome.

        Args:
            problem: a model and batch.
            batches: whose kernels are compiled first, where the model is new. Without any, another
                process is at it, so that contenders which are not ours are built before.
        """
        release_memory()
        try:
            with current_device(self.device):
                source = self.sources.get(problem)
                if batches and problem.model not in self.compiled:
                    self.compiled.add(problem.model)
                    self.compile(source, problem, batches)
                return self.measure(source, problem, ours_last=not batches)
        except Exception as error:
            failure = describe(error)
            return [
                _outcome(problem, entry, failure.status, failure.message) for entry in self.entries
            ]

    def compile(self, source: Source, problem: Problem, batches: Sequence[int]) -> None:
        """Kernels of every batch, side by side; an engine that fails here is reported later."""
        for entry in self.entries:
            if not entry.is_ours:
                continue
            start = time.monotonic()
            own = dataclasses.replace(problem, dtype=entry.dtype)
            mix: Any = "scheme" if entry.variant == "fastswin-scheme" else "auto"
            precision: Any = entry.dtype
            try:
                ranges = calibration_for(source, own, self.device) if own.quantized else None
                engine = Engine(
                    source.engine_source, precision, device=self.device, calibration=ranges,
                    mix=mix,
                )  # fmt: skip
                count = engine.warmup(batches, problem.swin_config.image_size)
            except Exception as error:
                self.progress(f"{problem.model} {entry}: {describe(error).message}")
                continue
            took = time.monotonic() - start
            self.progress(f"{problem.model} {entry}: {count} kernels compiled in {took:.1f} s")

    def measure(self, source: Source, problem: Problem, ours_last: bool = False) -> list[Outcome]:
        """Build, check, then time in turn.

        Args:
            source: the model.
            problem: a model and batch.
            ours_last: whether contenders that are not ours are built first.
        """
        gates: dict[str, Any] = {}
        outcomes: dict[Entry, Outcome] = {}
        built: dict[Entry, Any] = {}
        candidates = []
        for entry in sorted(self.entries, key=lambda e: ours_last and e.is_ours):
            own = dataclasses.replace(problem, dtype=entry.dtype)
            if entry.dtype not in gates:
                gates[entry.dtype] = make_gate(source, own, self.device)
            images = [
                seeded_images(own, own.batch, self.device, seed) for seed in range(INPUT_SETS)
            ]
            one = Measurement(own, source, self.device, self.ceilings, self.info)
            result = one.build_and_check(entry.variant, gates[entry.dtype], images[0])
            if isinstance(result, Failure):
                outcomes[entry] = _outcome(problem, entry, result.status, result.message)
                continue
            built[entry] = one, *result
            candidate = make_candidate(result[0], images, own_peak_mib(result[0], images[0]))
            candidates.append(dataclasses.replace(candidate, name=str(entry)))
        with self.exclusive():
            timings = measure(candidates, make_clock(self.device), seconds=self.seconds)
        for entry, (one, contender, answer) in built.items():
            timing = timings[str(entry)]
            if isinstance(timing, Failure):
                outcomes[entry] = _outcome(problem, entry, timing.status, timing.message)
                continue
            record = one.record(contender, answer, gates[entry.dtype], timing)
            base = timings.get(str(self.entries[0]))
            if base is not None and not isinstance(base, Failure):
                record[f"over_{self.entries[0].dtype}"] = base.median_ms / timing.median_ms
            outcomes[entry] = _outcome(problem, entry, "ok", record=stamp(self.info, record))
        return [outcomes[entry] for entry in self.entries]


def _outcome(
    problem: Problem, entry: Entry, status: Any, message: str = "", record: Record | None = None
) -> Outcome:
    own = dataclasses.replace(problem, dtype=entry.dtype)
    return Outcome(own, entry.variant, status, message, record)


def _key(outcome: Outcome) -> Any:
    problem = outcome.problem
    return record_key(
        {
            "case": problem.model,
            "dtype": problem.dtype,
            "batch": problem.batch,
            "variant": outcome.variant,
        }
    )


def _line(outcome: Outcome) -> str:
    head, record = f"{outcome.problem} {outcome.variant}:", outcome.record
    if record is None:
        return f"{head} {outcome.status}: {outcome.message}"
    ratios = [f"{key} {value:.3f}" for key, value in record.items() if key.startswith("over_")]
    more = [f"{key} {record[key]}" for key in ("quantized_layers", "weights_mib") if key in record]
    peak = record["peak_mib"]
    more += [] if peak is None else [f"peak {peak:.0f} MiB"]
    return (
        f"{head} {record['median_ms']:.4g} ms (p20 {record['p20_ms']:.4g}, p80 "
        f"{record['p80_ms']:.4g}), {', '.join([*ratios, *more])}, rel rms err "
        f"{record['rel_rms_err']:.2g} (gate {record['gate_rel_rms']})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m fastswin.bench.quant", description=__doc__)
    parser.add_argument("--models", default=",".join(SUITES["quant"]))
    parser.add_argument("--batches", default=",".join(map(str, DEFAULT_BATCHES)))
    parser.add_argument("--contenders", help="such as fp16,int8,fp8,fp16:compile-reduce-overhead")
    parser.add_argument("--device")
    parser.add_argument("--seconds", type=float, default=0.5, help="samples of each contender")
    parser.add_argument("--deadline-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--processes", type=int, default=0, help="problems built side by side")
    parser.add_argument("--build-s", type=float, help="longest wait for them; half the deadline")
    parser.add_argument("--resume", action="store_true", help="leave out what this commit has")
    options = parser.parse_args(arguments)
    try:
        models = parse_names(options.models, list_models(), "models")
        batches = parse_batches(options.batches)
        entries: Sequence[Entry] = DEFAULT_ENTRIES
        if options.contenders:
            entries = [Entry.parse(text) for text in options.contenders.split(",")]
        result = run_quant_suite(
            [Problem(model, "fp16", batch) for model in models for batch in batches],
            entries,
            options.device,
            options.out,
            options.seconds,
            lambda line: print(line, flush=True),
            deadline_s=options.deadline_s,
            processes=options.processes,
            build_s=options.build_s,
            resume=options.resume,
        )
    except (ValueError, RuntimeError) as error:
        print(f"fastswin: {error}", file=sys.stderr)
        return 2
    for line in result.problems_found:
        print(f"fastswin: {line}", file=sys.stderr)
    print(f"records: {result.path}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
