"""The fastest configuration of one problem that is also right.

    for every candidate   three launches into NaN-filled memory: the same bits each time, no NaN
                          left, inside the kernel gate against fp64 (testing/tolerance.py)
    for those that pass   median of interleaved samples, each a graph of back-to-back launches

Weights and activations stay in L2 where they fit, as inside a network.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from fastswin.bench.failures import describe
from fastswin.bench.timing import Call, Clock, schedule
from fastswin.bench.tune_launch import Bench
from fastswin.testing.tolerance import compare_to_oracle
from fastswin.tuning.problem import LaunchConfig

#: Launches into poisoned memory that must agree bit for bit.
CHECKED_LAUNCHES = 3

#: A sample lasts about this long, between these numbers of launches.
SAMPLE_MS = 1.0
MIN_LAUNCHES, MAX_LAUNCHES = 4, 50

#: Samples of each candidate in the first round; the best few get as many again, several times.
FIRST_SAMPLES, FINAL_SAMPLES, FINALISTS = 3, 15, 4

#: A candidate is not timed further where its first launches took this many times those of the best
#: so far, and so many milliseconds: less is mostly what a launch costs the host.
HOPELESS, HOPELESS_MS = 1.6, 0.06

#: A candidate has to beat the heuristic by this much to replace it: less is noise.
LEAST_GAIN = 0.01


@dataclasses.dataclass(frozen=True)
class Found:
    """Outcome of one search.

    Attributes:
        config: the fastest right configuration; None for operators without one.
        latency_us: its median time.
        default_us: the heuristic's, None where that one failed.
        rejected: candidates that failed, with the reason.
    """

    config: LaunchConfig | None
    latency_us: float
    default_us: float | None
    rejected: tuple[tuple[LaunchConfig | None, str], ...] = ()


def search(
    bench: Bench,
    configs: Sequence[LaunchConfig | None],
    clock: Clock,
    default: LaunchConfig | None = None,
) -> Found:
    """Check and time configurations.

    Args:
        bench: the problem with its inputs.
        configs: candidates; ``[None]`` for what has nothing to choose.
        clock: of the device.
        default: the heuristic's choice, which the others have to beat.

    Raises:
        RuntimeError: no candidate passed; the message holds the first reason.
    """
    if not configs:
        raise RuntimeError(f"{bench.problem}: no candidate compiles")
    check = make_check(bench) if configs[0] is not None else lambda config: None
    right: list[LaunchConfig | None] = []
    rejected: list[tuple[LaunchConfig | None, str]] = []
    for config in configs:
        try:
            why = check(config)
        except Exception as error:  # a candidate may fail to launch; the others go on
            why = describe(error).message
        if why is None:
            right.append(config)
        else:
            rejected.append((config, why))
    if not right:
        raise RuntimeError(f"{bench.problem}: no configuration is right: {rejected[0][1]}")
    times_us = time_configs(bench, right, clock, default)
    default_us = times_us.get(default)
    best = min(times_us, key=lambda config: times_us[config])
    if default_us is not None and times_us[best] > (1 - LEAST_GAIN) * default_us:
        best = default
    return Found(best, times_us[best], default_us, tuple(rejected))


def make_check(bench: Bench) -> Callable[[LaunchConfig | None], str | None]:
    """A function that says what is wrong with a configuration's results, None for nothing."""
    dtype = bench.out.dtype
    oracle = bench.reference(torch.float64)
    eager = bench.reference(dtype)

    def check(config: LaunchConfig | None) -> str | None:
        first: torch.Tensor | None = None
        for _ in range(CHECKED_LAUNCHES):
            bench.out.fill_(math.nan)
            result = bench.launch(config)
            if first is None:
                first = result.clone()
            elif not torch.equal(_bits(first), _bits(result)):
                return "results differ from run to run"
        assert first is not None
        if not bool(torch.isfinite(first).all()):
            return "an output is not written, or not finite"
        gate = compare_to_oracle(bench.checked(first), eager, oracle, dtype)
        if not gate.passed:
            return f"error {gate.max_error:.3g} exceeds {gate.max_bound:.3g}"
        return None

    return check


def time_configs(
    bench: Bench,
    configs: Sequence[LaunchConfig | None],
    clock: Clock,
    default: LaunchConfig | None = None,
) -> dict[LaunchConfig | None, float]:
    """Median microseconds of one launch under the best few and the default, interleaved."""
    calls: dict[LaunchConfig | None, Call] = {}
    launches: dict[LaunchConfig | None, int] = {}
    least_ms = math.inf
    for config in configs:

        def call(config: LaunchConfig | None = config) -> object:
            return bench.launch(config)

        call()
        pilot_ms = clock.elapsed_ms(call, 2) / 2
        least_ms = min(least_ms, pilot_ms)
        if config != default and pilot_ms > max(HOPELESS * least_ms, HOPELESS_MS):
            continue
        wanted = math.ceil(SAMPLE_MS / max(pilot_ms, 1e-6))
        launches[config] = min(max(wanted, MIN_LAUNCHES), MAX_LAUNCHES)
        calls[config] = call
        if clock.kind == "cuda":
            calls[config] = _capture(call, launches[config])
            calls[config]()  # the first replay uploads the graph

    def sample(config: LaunchConfig | None) -> float:
        repeats = 1 if clock.kind == "cuda" else launches[config]
        return clock.elapsed_ms(calls[config], repeats) / launches[config] * 1e3

    timed = list(calls)
    samples: dict[LaunchConfig | None, list[float]] = {config: [] for config in timed}
    for index in schedule([FIRST_SAMPLES] * len(timed)):
        samples[timed[index]].append(sample(timed[index]))
    ranked = sorted(timed, key=lambda config: _median(samples[config]))
    finalists = list(dict.fromkeys([*ranked[:FINALISTS], *(c for c in timed if c == default)]))
    for index in schedule([FINAL_SAMPLES] * len(finalists)):
        samples[finalists[index]].append(sample(finalists[index]))
    return {config: _median(samples[config]) for config in finalists}


def _capture(call: Call, launches: int) -> Call:
    """A graph of ``launches`` calls.

    Without ``torch.cuda.graph``, which empties the allocator's cache (and in older releases
    collects garbage) every time: thousands of captures would take minutes for that alone.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()  # the library's workspace of this stream must exist
        stream.synchronize()
        graph.capture_begin()
        for _ in range(launches):
            call()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and -0 is not 0."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
