"""Problems of the suite "quant" side by side: each is built by a process, one at a time is timed.

Compiling is most of a run and uses the CPU; timing needs the card alone. A process builds and
checks all contenders of its problem, says so, and waits for its turn. Turns begin when every
running process is ready, or after ``build_s``; processes that still build are stopped while another
is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fastswin.bench.measurement import Outcome
from fastswin.bench.problems import Problem
from fastswin.bench.record import RunInfo
from fastswin.bench.roofline import Ceilings

Progress = Callable[[str], None]

#: Longest that the turn of one problem may take, s: a dozen contenders of half a second each, and
#: their first calls.
TURN_S = 90.0

READY = "ready"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process measures.

    Attributes:
        problem: one model and batch.
        shared: what all problems of the run share.
        compile_threads: of TorchInductor.
        warm_batches: batches whose kernels of ours it compiles first, for all processes of its
            model; those without build the contenders of others first, and find them on disk.
    """

    problem: Problem
    shared: Shared
    compile_threads: int
    warm_batches: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all problems of a run share.

    Attributes:
        entries: contenders, from quant.py.
        device: what is measured.
        ceilings: copy and GEMM rates.
        info: of the run.
        seconds: of samples for each contender.
    """

    entries: Sequence[Any]
    device: torch.device
    ceilings: Ceilings
    info: RunInfo
    seconds: float


@dataclasses.dataclass(eq=False)
class _Worker:
    problem: Problem
    process: Any
    pipe: multiprocessing.connection.Connection
    ready: bool = False


Finished = tuple[Problem, list[Outcome] | str]


def run_side_by_side(
    problems: Sequence[Problem],
    shared: Shared,
    processes: int,
    *,
    build_s: float,
    deadline: float,
    progress: Progress = lambda line: None,
) -> Iterator[Finished]:
    """Outcomes of each problem as it is timed, or why there are none.

    Args:
        problems: in the order in which they are begun.
        shared: what they share.
        processes: problems built at a time.
        build_s: seconds after which ready problems are timed although others still build.
        deadline: ``time.monotonic()`` after which nothing is begun, and what builds is ended.
        progress: receives readable lines.

    Raises:
        ValueError: ``processes`` is below 1.
    """
    if processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    threads = max(2, (os.cpu_count() or 1) // processes)
    waiting = _jobs(problems, shared, threads)
    running: list[_Worker] = []
    impatient = time.monotonic() + build_s
    try:
        while waiting or running:
            while waiting and len(running) < processes and time.monotonic() < deadline:
                running.append(_start(waiting.pop(0)))
            if time.monotonic() >= deadline and not any(worker.ready for worker in running):
                break
            limit = deadline if time.monotonic() > impatient else min(impatient, deadline)
            for worker, message in _messages(running, limit):
                if message == READY:
                    worker.ready = True
                    progress(f"{worker.problem}: built")
                else:
                    running.remove(worker)
                    yield worker.problem, message
            building = [worker for worker in running if not worker.ready]
            if not building or time.monotonic() >= min(impatient, deadline):
                with _stopped(building):
                    for worker in [worker for worker in running if worker.ready]:
                        running.remove(worker)
                        yield worker.problem, _turn(worker)
        for problem in [*(w.problem for w in running), *(job.problem for job in waiting)]:
            yield problem, "the deadline passed before it was built"
    finally:
        for worker in running:
            worker.process.terminate()
            worker.process.join(timeout=10)


def _jobs(problems: Sequence[Problem], shared: Shared, threads: int) -> list[Job]:
    """One a problem, in order; the first of every model warms the batches of all."""
    batches: dict[str, list[int]] = {}
    for problem in problems:
        batches.setdefault(problem.model, []).append(problem.batch)
    return [Job(p, shared, threads, tuple(batches.pop(p.model, ()))) for p in problems]


def _start(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(job, there), daemon=True)
    process.start()
    there.close()
    return _Worker(job.problem, process, here)


def _messages(running: Sequence[_Worker], limit: float) -> list[tuple[_Worker, Any]]:
    """What building processes say, at the latest at ``limit``; a dead one says that it died."""
    by_pipe = {worker.pipe: worker for worker in running if not worker.ready}
    left = min(max(0.0, limit - time.monotonic()), 3600.0)
    found: list[tuple[_Worker, Any]] = []
    if by_pipe:
        for pipe in multiprocessing.connection.wait(list(by_pipe), timeout=left):
            worker = by_pipe[pipe]  # type: ignore[index]
            found.append((worker, _receive(worker)))
    return found


def _receive(worker: _Worker) -> Any:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        return "its process died"


def _turn(worker: _Worker) -> list[Outcome] | str:
    """Give one process the device until it has timed its problem."""
    try:
        worker.pipe.send(READY)
    except OSError:
        return "its process died"
    if not worker.pipe.poll(TURN_S):
        worker.process.terminate()
        return f"not timed within {TURN_S:g} s"
    found = _receive(worker)
    worker.process.join(timeout=10)
    return found


@contextlib.contextmanager
def _stopped(workers: Sequence[_Worker]) -> Iterator[None]:
    """Processes that still build hold still inside the block."""
    for worker in workers:
        _signal(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            _signal(worker, signal.SIGCONT)


def _signal(worker: _Worker, number: int) -> None:
    if worker.process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, number)


def _work(job: Job, pipe: multiprocessing.connection.Connection) -> None:
    """Body of a process."""
    # the default starts one compiler per core in every process; a single one takes minutes
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(job.compile_threads))
    # every process would wake a thread per core to make its weights; others wait for who warms
    torch.set_num_threads(2 if job.warm_batches else 1)
    from fastswin.bench.quant import QuantSuite

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        pipe.send(READY)
        pipe.recv()
        yield

    suite = QuantSuite(job.shared, exclusive=turn)
    pipe.send(suite.run(job.problem, job.warm_batches))
