"""Build many problems side by side, time them one after another.

Compiling is most of a suite's wall time and uses the CPU; timing needs the device alone. Each
problem of a wave gets a process that builds and checks all its contenders, then waits; when every
process of the wave is ready (or gone), each gets its turn to time while the others sleep. Those
that took too long are ended before. So the contenders of one problem are timed in one process,
interleaved, on an otherwise idle card.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fastswin.bench.measurement import Outcome
from fastswin.bench.problems import Problem
from fastswin.bench.record import DEFAULT_ROOT, make_run_info, result_path, save_records
from fastswin.bench.roofline import Ceilings
from fastswin.bench.suites import choose_device, clock_precision, measure_device, run_model_suite

Progress = Callable[[str], None]

#: What a process says that has built its contenders.
_READY = "ready"


@dataclasses.dataclass(frozen=True)
class _Worker:
    problem: Problem
    process: Any
    pipe: multiprocessing.connection.Connection


def run_parallel(
    problems: Sequence[Problem],
    processes: int,
    variants: Sequence[str] | None = None,
    *,
    device: str | None = None,
    suite: str = "model",
    out: str | Path = DEFAULT_ROOT,
    seconds_per_contender: float = 1.0,
    build_s: float = 400.0,
    start_timing: Callable[[], None] = lambda: None,
    progress: Progress = lambda line: None,
) -> list[str]:
    """Measure problems in waves of ``processes``; returns what went wrong, one line each.

    Args:
        problems: from :func:`~fastswin.bench.problems.make_problems`.
        processes: problems built at a time.
        variants: keys of the contenders; None takes all.
        device: "cuda" or "cpu"; None takes the GPU where there is one.
        suite, out: where the records go.
        seconds_per_contender: time for each contender's samples, in s.
        build_s: longest that a wave may build before the ready ones are timed, in s.
        start_timing: called before the device is used for measurement; may wait.
        progress: receives readable lines.

    Raises:
        ValueError: ``processes`` is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    target, _ = choose_device(device)
    context = multiprocessing.get_context("spawn")
    threads = max(2, (os.cpu_count() or 1) // processes)
    wrong: list[str] = []
    ceilings: Ceilings | None = None
    for first in range(0, len(problems), processes):
        workers = []
        for problem in problems[first : first + processes]:
            here, there = context.Pipe()
            options = (problem, variants, str(target), suite, seconds_per_contender, threads, there)
            process = context.Process(target=_work, args=options, daemon=True)
            process.start()
            there.close()
            workers.append(_Worker(problem, process, here))
        ready, failures = _wait_until_ready(workers, build_s, progress)
        for worker in workers:  # one that still compiles would take the others' cores
            if worker not in ready:
                worker.process.terminate()
                worker.process.join(timeout=10)
        wrong += failures
        start_timing()
        if ceilings is None:
            ceilings = measure_device(target, problems)
        for worker in ready:
            wrong += _time(worker, ceilings, target, suite, Path(out), progress)
        for worker in workers:
            worker.process.join(timeout=10)
    return wrong


def _wait_until_ready(
    workers: list[_Worker], build_s: float, progress: Progress
) -> tuple[list[_Worker], list[str]]:
    """Workers that said "ready" within the time, in their order, and what the others died of."""
    deadline = time.monotonic() + build_s
    ready: list[_Worker] = []
    failures: list[str] = []
    waiting = list(workers)
    while waiting and time.monotonic() < deadline:
        by_pipe = {w.pipe: w for w in waiting}
        left = max(0.0, deadline - time.monotonic())
        for pipe in multiprocessing.connection.wait(list(by_pipe), timeout=left):
            worker = by_pipe[pipe]  # type: ignore[index]
            waiting.remove(worker)
            try:
                said = worker.pipe.recv()
            except EOFError:
                failures.append(f"{worker.problem}: its process died while it built")
                continue
            if said == _READY:
                ready.append(worker)
                progress(f"{worker.problem}: built")
            else:
                failures += said["wrong"] or [f"{worker.problem}: nothing was measured"]
    failures += [f"{worker.problem}: not built within {build_s:g} s" for worker in waiting]
    return [worker for worker in workers if worker in ready], failures


def _time(
    worker: _Worker, ceilings: Ceilings, target: Any, suite: str, out: Path, progress: Progress
) -> list[str]:
    """Give one worker its turn and store its records."""
    try:
        worker.pipe.send(ceilings)
        found = worker.pipe.recv()
    except (EOFError, OSError):
        return [f"{worker.problem}: its process died"]
    dtype = clock_precision(target)
    info = make_run_info(suite, target, ceilings.copy_tbs, ceilings.gemm_tflops[dtype])
    records = [record | {"copy_tbs": info.copy_tbs} for record in found["records"]]
    save_records(result_path(out, info), info, records)
    for line in found["lines"]:
        progress(line)
    return list(found["wrong"])


class _Turn:
    """In the worker: report ready, then block until the parent hands over the device."""

    def __init__(self, pipe: multiprocessing.connection.Connection) -> None:
        self.pipe = pipe
        self.ceilings: Ceilings | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.pipe.send(_READY)
        self.ceilings = self.pipe.recv()
        yield


def _work(
    problem: Problem,
    variants: Sequence[str] | None,
    device: str,
    suite: str,
    seconds: float,
    compile_threads: int,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """Body of a worker process."""
    # the default starts one compiler per core in every process; a single one takes minutes
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads))
    if device.startswith("cuda"):
        torch.set_num_threads(1)  # every process would wake a thread per core to make its weights
    turn = _Turn(pipe)
    lines: list[str] = []
    placeholder = Ceilings(copy_tbs=1.0, gemm_tflops={problem.dtype: 1.0, "fp16": 1.0, "fp32": 1.0})
    try:
        with tempfile.TemporaryDirectory() as scratch:
            result = run_model_suite(
                [problem], variants, device, scratch, seconds, lines.append, suite=suite,
                ceilings=placeholder, exclusive=turn,
            )  # fmt: skip
    except Exception as error:
        said = f"{problem}: {type(error).__name__}: {error}"
        pipe.send({"records": [], "lines": [], "wrong": [said]})
        raise
    records = [_with_ceilings(o, turn.ceilings) for o in result.outcomes if o.record is not None]
    kept = [line for line in lines if " ms " in line or ": red" in line or "error" in line]
    pipe.send({"records": records, "lines": kept, "wrong": result.problems_found})


def _with_ceilings(outcome: Outcome, ceilings: Ceilings | None) -> dict[str, Any]:
    """The record with the roofline of the rates that the parent measured."""
    from fastswin.bench.roofline import roofline_ms

    assert outcome.record is not None
    record = json.loads(json.dumps(outcome.record))
    if ceilings is not None:
        problem = outcome.problem
        record["roofline_ms"] = roofline_ms(
            problem.swin_config, problem.batch, problem.dtype, ceilings
        )
        record["gemm_tflops"] = ceilings.gemm_tflops[problem.dtype]
    return record
