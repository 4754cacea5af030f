"""The one timing protocol of this package.

    warm-up (discarded) -> rounds over all contenders -> median, p20, p80, p90, count

A sample is ``calls_per_sample`` back-to-back calls between two CUDA events (host clock on a CPU),
divided by their number, with the device idle before and waited for after. Samples last at least
:data:`MIN_SAMPLE_MS`, so that the gap before the first launch is under about one percent. Calls
under :data:`GRAPH_BELOW_MS` that can be captured are captured back to back in one CUDA graph, whose
replay is the sample: otherwise it is the launches that get measured.

Contenders take turns in every round, forwards and backwards alternately, so drift of the clocks
hits all alike and none always runs after the same neighbour. Each call takes the next of several
distinct input sets. Weights and activations stay in L2 where they fit, as in continuous serving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from fastswin.bench.failures import Failure, describe
from fastswin.bench.memory import peak_mib
from fastswin.engine.library_workspace import library_workspace_in_pool

#: Calls shorter than this are timed by a CUDA graph of several of them.
GRAPH_BELOW_MS = 0.1

#: A sample lasts at least this long: a launch from idle costs up to 0.1 ms.
MIN_SAMPLE_MS = {"cuda": 10.0, "cpu": 1.0}

MAX_CALLS_PER_SAMPLE = 200
MIN_SAMPLES, MAX_SAMPLES = 10, 1000
MIN_WARMUP_CALLS, WARMUP_S = 3, 0.25

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Latency of one contender.

    Attributes:
        median_ms, p20_ms, p80_ms, p90_ms: per call, over the samples.
        count: samples.
        peak_mib: device memory at its highest during one call, None on a CPU.
        graph: whether the samples were replays of a graph captured for timing.
        calls_per_sample: back-to-back calls that one sample averages over.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    p90_ms: float
    count: int
    peak_mib: float | None
    graph: bool
    calls_per_sample: int = 1


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something to time.

    Attributes:
        name: key of the result.
        call: runs once, on whatever input is next.
        capturable: whether ``call`` may be captured in a CUDA graph (no host synchronisation, no
            graph of its own).
        peak_mib: its peak memory where the caller has measured it already (before other contenders
            were built, whose graph pools would be counted with it); None measures one call.
        scope: context that every call runs in, entered outside the timed region.
    """

    name: str
    call: Call
    capturable: bool = False
    peak_mib: float | None = None
    scope: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class Clock(Protocol):
    """Times calls on one kind of device."""

    kind: str

    def elapsed_ms(self, call: Call, calls: int) -> float:
        """Milliseconds of ``calls`` back-to-back calls, from an idle device to an idle device."""

    def capture(self, call: Call, calls: int) -> Call:
        """A call that replays ``calls`` calls."""


class HostClock:
    """Wall clock, for CPUs, where a call has finished when it returns."""

    kind = "cpu"

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now

    def elapsed_ms(self, call: Call, calls: int) -> float:
        start = self.now()
        for _ in range(calls):
            call()
        return (self.now() - start) * 1e3

    def capture(self, call: Call, calls: int) -> Call:
        raise RuntimeError("there are no CUDA graphs on a CPU")


class CudaClock:
    """CUDA events on the current stream; the device is synchronised on both sides."""

    kind = "cuda"

    def __init__(self) -> None:
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self, call: Call, calls: int) -> float:
        torch.cuda.synchronize()
        self.start.record()
        for _ in range(calls):
            call()
        self.end.record()
        torch.cuda.synchronize()
        return self.start.elapsed_time(self.end)

    def capture(self, call: Call, calls: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with library_workspace_in_pool(), torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay


def make_clock(device: torch.device) -> Clock:
    """The clock that tells the truth on ``device``."""
    return CudaClock() if device.type == "cuda" else HostClock()


def measure(
    candidates: Sequence[Candidate],
    clock: Clock,
    *,
    seconds: float = 1.0,
    warmup: int | None = None,
    iterations: int | None = None,
) -> dict[str, Timing | Failure]:
    """Time all candidates side by side.

    Args:
        candidates: contenders with distinct names.
        clock: from :func:`make_clock`.
        seconds: time to spend on each candidate's samples.
        warmup: discarded calls; None warms up for :data:`WARMUP_S`. 0 leaves nothing to plan by,
            so every sample is then one plain call.
        iterations: samples per candidate; None takes what ``seconds`` allows, 10 to 1000.

    Returns:
        Per name a :class:`Timing`, or the :class:`Failure` of a candidate that raised; the others
        are timed all the same.

    Raises:
        ValueError: ``seconds``, ``warmup`` or ``iterations`` is out of range.
    """
    check_arguments(seconds, warmup, iterations)
    runs: list[_Run] = []
    results: dict[str, Timing | Failure] = {}
    with _no_garbage_collection():
        for candidate in candidates:
            try:
                runs.append(_prepare(candidate, clock, seconds, warmup, iterations))
            except Exception as error:
                results[candidate.name] = describe(error)
        for index in schedule([run.wanted for run in runs]):
            _sample(runs[index], clock, results)
    for run in runs:
        if run.candidate.name not in results:
            results[run.candidate.name] = _finish(run, clock)
    return results


def schedule(wanted: Sequence[int]) -> Iterator[int]:
    """Order of samples: index of the contender, ``wanted[i]`` times each, spread evenly.

    Contenders with fewer samples sit out evenly spread rounds, so all cover the same stretch of
    time; odd rounds go backwards.
    """
    rounds = max(wanted, default=0)
    for turn in range(rounds):
        due = [i for i, n in enumerate(wanted) if (turn + 1) * n // rounds > turn * n // rounds]
        yield from due if turn % 2 == 0 else reversed(due)


def summarise(
    samples_ms: Sequence[float], peak: float | None, graph: bool, calls_per_sample: int
) -> Timing:
    """Median and percentiles (linear between samples) of per-call milliseconds."""
    p20, median, p80, p90 = np.percentile(samples_ms, [20, 50, 80, 90]).tolist()
    return Timing(median, p20, p80, p90, len(samples_ms), peak, graph, calls_per_sample)


@dataclasses.dataclass
class _Run:
    """One candidate on its way through the protocol."""

    candidate: Candidate
    call: Call
    calls: int
    graph: bool
    wanted: int
    samples_ms: list[float] = dataclasses.field(default_factory=list)


def _prepare(
    candidate: Candidate, clock: Clock, seconds: float, warmup: int | None, iterations: int | None
) -> _Run:
    with candidate.scope():
        pilot_ms = _warm_up(candidate.call, clock, warmup)
        if pilot_ms is None:
            return _Run(candidate, candidate.call, 1, False, iterations or MIN_SAMPLES)
        calls = math.ceil(MIN_SAMPLE_MS[clock.kind] / max(pilot_ms, 1e-6))
        calls = min(max(calls, 1), MAX_CALLS_PER_SAMPLE)
        graph = clock.kind == "cuda" and candidate.capturable and pilot_ms < GRAPH_BELOW_MS
        call = candidate.call
        if graph:
            call = clock.capture(candidate.call, calls)
            call()  # the first replay uploads the graph
        affordable = int(seconds * 1e3 / max(pilot_ms * calls, 1e-6))
        wanted = iterations or min(max(affordable, MIN_SAMPLES), MAX_SAMPLES)
        return _Run(candidate, call, calls, graph, wanted)


def _warm_up(call: Call, clock: Clock, warmup: int | None) -> float | None:
    """Run the discarded calls; returns the fastest of the last three in ms, None without any."""
    times: list[float] = []
    if warmup is not None:
        times += [clock.elapsed_ms(call, 1) for _ in range(warmup)]
        return min(times[-3:], default=None)
    while len(times) < MIN_WARMUP_CALLS or sum(times) < WARMUP_S * 1e3:
        times.append(clock.elapsed_ms(call, 1))
        if len(times) == MAX_SAMPLES:
            break
    return min(times[-3:])


def _sample(run: _Run, clock: Clock, results: dict[str, Timing | Failure]) -> None:
    if run.candidate.name in results:  # it failed in an earlier round
        return
    try:
        with run.candidate.scope():
            repeats = 1 if run.graph else run.calls
            run.samples_ms.append(clock.elapsed_ms(run.call, repeats) / run.calls)
    except Exception as error:
        results[run.candidate.name] = describe(error)


def _finish(run: _Run, clock: Clock) -> Timing | Failure:
    peak = run.candidate.peak_mib
    try:
        if clock.kind == "cuda" and peak is None:
            with run.candidate.scope():
                peak = peak_mib(run.candidate.call, 0.0)
    except Exception as error:
        return describe(error)
    return summarise(run.samples_ms, peak, run.graph, run.calls)


def check_arguments(seconds: float, warmup: int | None, iterations: int | None) -> None:
    """Raise the ValueError of :func:`measure`, for callers with work to do before it."""
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    if warmup is not None and warmup < 0:
        raise ValueError(f"warmup must be at least 0 calls, got {warmup}")
    if iterations is not None and iterations < 1:
        raise ValueError(f"iterations must be at least 1 sample, got {iterations}")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a sample would be charged to whoever is being timed."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
