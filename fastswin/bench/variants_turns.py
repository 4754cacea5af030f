"""One wave of processes: build all at once, then time them in turns that the parent gives out.

Rounds go through the processes forwards and backwards alternately, one process on the device at a
time, so that a drift of clocks or heat meets all alike. The first round counts replays and wakes
the clocks; it is dropped. A process that fails, dies or hangs costs its own row alone.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastswin.bench.failures import Failure
from fastswin.bench.variants_child import TURN, Ready, work
from fastswin.bench.variants_plan import Job

#: A turn that takes longer is a kernel that hangs.
HUNG_S = 30.0

#: Rounds at least, with the one that is dropped.
MIN_ROUNDS = 3

#: Lines of a process's output that are shown when it fails.
SHOWN_LINES = 20

#: Seconds that a process has to end before it is killed.
STOP_S = 5.0

Progress = Callable[[str], None]


@dataclasses.dataclass
class Result:
    """What one process came to.

    Attributes:
        job: what it held.
        ready: what it said when it was built, or None.
        turns_us: by round, microseconds per call.
        failure: why it takes no more turns; empty where it does.
    """

    job: Job
    ready: Ready | None = None
    turns_us: dict[int, float] = dataclasses.field(default_factory=dict)
    failure: str = ""


def run_wave(
    jobs: Sequence[Job], seconds: float, build_s: float, progress: Progress = lambda line: None
) -> list[Result]:
    """Build all jobs side by side, then time them in turns.

    Args:
        jobs: of one wave.
        seconds: of turns.
        build_s: longest that a process may build, in s.
        progress: receives readable lines.

    Returns:
        A result for each job, in their order.
    """
    start = time.monotonic()
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="fastswin-variants-") as folder:
        try:
            for index, job in enumerate(jobs):
                workers.append(_Worker(job, Path(folder) / f"{index}.log", progress))
            _wait_until_ready(workers, start + build_s, progress)
            rounds = _give_turns(workers, seconds)
            progress(f"{rounds} rounds, {time.monotonic() - start:.0f} s with building")
        finally:
            for worker in workers:
                worker.close()
    for worker in workers:
        worker.result.turns_us.pop(0, None)
    return [worker.result for worker in workers]


def _wait_until_ready(workers: Sequence[_Worker], deadline: float, progress: Progress) -> None:
    """Until every process is ready or gone; who is not by the deadline is ended."""
    waiting = list(workers)
    while waiting:
        left_s = max(0.0, deadline - time.monotonic())
        by_pipe = {worker.pipe: worker for worker in waiting}
        found = multiprocessing.connection.wait(list(by_pipe), timeout=left_s)
        if not found:
            for worker in waiting:
                worker.fail("not built in time")
            return
        for pipe in found:
            worker = by_pipe[pipe]  # type: ignore[index]
            waiting.remove(worker)
            worker.result.ready = worker.receive(HUNG_S)
            if ready := worker.result.ready:
                error = f"error {ready.relative_error:.1e}"
                progress(f"{worker.result.job}: built in {ready.build_s:.0f} s, {error}")


def _give_turns(workers: Sequence[_Worker], seconds: float) -> int:
    """Rounds of turns until the time is over; how many."""
    start, rounds = time.monotonic(), 0
    while time.monotonic() - start < seconds or rounds < MIN_ROUNDS:
        able = [w for w in workers if w.result.ready and not w.result.failure]
        if not able:
            break
        for worker in able if rounds % 2 == 0 else reversed(able):
            worker.take_turn(rounds)
        rounds += 1
    return rounds


class _Worker:
    """The parent's side of one process."""

    def __init__(self, job: Job, log: Path, progress: Progress) -> None:
        self.result, self._log, self._progress = Result(job), log, progress
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self._process = context.Process(target=work, args=(job, log, there), daemon=True)
        self._process.start()
        there.close()  # its end alone keeps the pipe open, so that its death is seen

    def take_turn(self, number: int) -> None:
        try:
            self.pipe.send(TURN)
        except OSError:
            self._note_death()
            return
        us = self.receive(HUNG_S)
        if us is not None:
            self.result.turns_us[number] = us

    def receive(self, timeout_s: float) -> Any:
        """The next answer; None, and a failure, where there is none."""
        try:
            if not self.pipe.poll(timeout_s):
                return self.fail(f"no answer in {timeout_s:.0f} s")
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return self._note_death()
        return self.fail(answer.message) if isinstance(answer, Failure) else answer

    def fail(self, why: str) -> None:
        """Note why, end the process and show the end of what it printed."""
        self._end(wait_s=0.0)
        self.result.failure = why
        self._progress(f"{self.result.job}: failed: {why}")
        printed = self._log.read_text(errors="replace") if self._log.exists() else ""
        for line in [line for line in printed.splitlines() if line.strip()][-SHOWN_LINES:]:
            self._progress(f"    {line}")

    def _note_death(self) -> None:
        self._process.join(STOP_S)
        self.fail(f"its process died with exit code {self._process.exitcode}")

    def close(self) -> None:
        """End the process; it does so by itself once the pipe is closed."""
        self.pipe.close()
        self._end(STOP_S)

    def _end(self, wait_s: float) -> None:
        self._process.join(wait_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
