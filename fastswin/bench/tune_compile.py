"""Compile tuning candidates side by side, into Triton's cache.

Each process launches on tensors without data, notes the kernels and has Triton compile them for the
machine's GPU; nothing runs. The search then finds them in the cache. A candidate that cannot be
compiled, or that wants more shared memory than the card has, is known before anything is timed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from fastswin.bench.failures import describe
from fastswin.bench.tune_launch import make_bench, window_grid
from fastswin.tuning.problem import KernelProblem, LaunchConfig

Job = tuple[KernelProblem, LaunchConfig]


@dataclasses.dataclass(frozen=True)
class Built:
    """What the compiler said about one candidate.

    Attributes:
        shared_bytes: shared memory of one program.
        error: why it cannot run here; None where it can.
    """

    shared_bytes: int = 0
    error: str | None = None


class Compiler(Protocol):
    """Compiles candidates, perhaps in the background."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those queued before are compiled before."""

    def cancel(self) -> None:
        """Forget jobs that have not begun."""

    def results(self, jobs: Sequence[Job], deadline: float) -> dict[Job, Built]:
        """What is known of queued jobs at ``deadline`` (of ``time.monotonic``), or when all are."""


class CompilePool:
    """Processes that compile; started once, since importing takes seconds.

    Args:
        workers: processes.
    """

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
        self._futures: dict[tuple[object, ...], concurrent.futures.Future[Built]] = {}

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if _code(job) not in self._futures:
                self._futures[_code(job)] = self._pool.submit(compile_job, job)

    def cancel(self) -> None:
        waiting = [code for code, future in self._futures.items() if future.cancel()]
        for code in waiting:
            del self._futures[code]

    def results(self, jobs: Sequence[Job], deadline: float) -> dict[Job, Built]:
        done: dict[Job, Built] = {}
        for job in jobs:
            try:
                left = max(0.0, deadline - time.monotonic())
                done[job] = self._futures[_code(job)].result(timeout=left)
            except concurrent.futures.TimeoutError:
                continue
            except Exception as error:  # a compiler that crashed took its process with it
                done[job] = Built(error=describe(error).message)
        return done


def _code(job: Job) -> tuple[object, ...]:
    """Jobs with equal codes share one binary: rows are an argument of every kernel.

    Attention is compiled per grid of windows, which decides whether there is a shift.
    """
    problem, config = job
    grid = window_grid(problem.rows) if problem.op == "window_attention" else 0
    return problem.kernel, grid, config


def compile_job(job: Job) -> Built:
    """Compile one candidate in this process."""
    from fastswin.testing.aot import record_launches

    problem, config = job
    try:
        with record_launches() as launches:
            make_bench(problem, torch.device("meta")).launch(config)
        shared = 0
        for launch in launches:
            built = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(1,))
            shared = max(shared, built.metadata.shared)
        limit = _shared_limit()
    except Exception as error:
        return Built(error=describe(error).message)
    if shared > limit:
        return Built(shared, f"{shared} bytes of shared memory exceed the card's {limit}")
    return Built(shared)


def _shared_limit() -> int:
    from triton.compiler.compiler import max_shared_mem

    return int(max_shared_mem(torch.cuda.current_device()))
