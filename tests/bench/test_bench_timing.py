"""The protocol under a clock that tells what it is told."""

import contextlib
import gc

import pytest
import torch

from fastswin.bench.failures import Failure
from fastswin.bench.timing import Candidate, HostClock, Timing, measure, schedule, summarise


class FakeClock:
    """A GPU-like clock on which each candidate's call takes a fixed time."""

    kind = "cuda"

    def __init__(self, cost_ms):
        self.cost_ms, self.log, self.captured = cost_ms, [], []

    def elapsed_ms(self, call, calls):
        name = None
        for _ in range(calls):
            name = call()
        self.log.append((name, calls))
        return self.cost_ms[name] * calls

    def capture(self, call, calls):
        self.captured.append((call(), calls))

        def replay():
            self.cost_ms["graph"] = self.cost_ms[call()] * calls
            return "graph"

        return replay


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """There is no GPU to ask for its peak."""
    monkeypatch.setattr("fastswin.bench.timing.peak_mib", lambda call, held: 100.0 - held)


def host_clock(durations_s):
    """A wall clock whose intervals are ``durations_s`` in turn."""
    ticks = iter([t for d in durations_s for t in (0.0, d)])
    return HostClock(now=lambda: next(ticks))


def test_percentiles_are_those_of_the_samples():
    timing = summarise([5.0, 1.0, 2.0, 4.0, 3.0], 7.0, False, 1)
    assert timing == Timing(3.0, 1.8, 4.2, pytest.approx(4.6), 5, 7.0, False, 1)


@pytest.mark.parametrize("iterations", [1, 50])
@pytest.mark.parametrize("warmup", [0, 10])
def test_counts_and_warmup(iterations, warmup):
    """Warm-up is slow on purpose: none of it may reach the statistics."""
    clock = host_clock([9.0] * warmup + [0.004] * iterations)
    calls = []
    candidate = Candidate("a", lambda: calls.append(1))
    timing = measure([candidate], clock, warmup=warmup, iterations=iterations)["a"]
    assert len(calls) == warmup + iterations
    assert timing.count == iterations
    assert timing.median_ms == pytest.approx(4.0)
    assert timing.p90_ms == pytest.approx(4.0)
    assert timing.peak_mib is None


def test_every_sample_of_a_gpu_waits_for_it():
    """One iteration without warm-up still goes through the clock, which synchronises."""
    clock = FakeClock({"a": 3.0})
    timing = measure([Candidate("a", lambda: "a")], clock, warmup=0, iterations=1)["a"]
    assert clock.log == [("a", 1)]
    assert (timing.median_ms, timing.count, timing.calls_per_sample) == (3.0, 1, 1)


def test_contenders_take_turns_forwards_and_backwards():
    clock = FakeClock({"a": 20.0, "b": 20.0, "c": 20.0})
    candidates = [Candidate(n, lambda n=n: n) for n in "abc"]
    measure(candidates, clock, warmup=0, iterations=3)
    assert "".join(name for name, _ in clock.log) == "abccbaabc"


def test_fewer_samples_are_spread_over_all_rounds():
    order = list(schedule([6, 2]))
    assert order.count(0) == 6
    assert order.count(1) == 2
    first, second = (i for i, index in enumerate(order) if index == 1)
    assert 2 <= first < 5
    assert second >= 6


def test_short_calls_are_repeated_until_a_sample_lasts():
    clock = FakeClock({"a": 0.5})
    timing = measure([Candidate("a", lambda: "a")], clock, warmup=3, iterations=4)["a"]
    assert timing.calls_per_sample == 20
    assert timing.median_ms == pytest.approx(0.5)
    assert not timing.graph


@pytest.mark.parametrize(
    ("cost_ms", "capturable", "graph"),
    [(0.05, True, True), (0.05, False, False), (0.2, True, False)],
    ids=["short", "short-not-capturable", "long"],
)
def test_graph_is_used_under_100_us(cost_ms, capturable, graph):
    clock = FakeClock({"a": cost_ms})
    candidate = Candidate("a", lambda: "a", capturable=capturable, peak_mib=70.0)
    timing = measure([candidate], clock, warmup=2, iterations=5)["a"]
    assert timing.graph is graph
    assert bool(clock.captured) is graph
    assert timing.median_ms == pytest.approx(cost_ms)
    assert timing.peak_mib == 70.0


@pytest.mark.parametrize(("cost_ms", "count"), [(10.0, 50), (400.0, 10), (0.2, 50)])
def test_samples_fill_the_time_budget(cost_ms, count):
    clock = FakeClock({"a": cost_ms})
    assert measure([Candidate("a", lambda: "a")], clock, seconds=0.5)["a"].count == count


@pytest.mark.parametrize("failing_call", [1, 3], ids=["in-warm-up", "in-a-round"])
def test_out_of_memory_of_one_leaves_the_others(failing_call):
    calls = []

    def fail():
        calls.append(1)
        if len(calls) >= failing_call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return "bad"

    clock = FakeClock({"bad": 20.0, "good": 20.0})
    candidates = [Candidate("bad", fail), Candidate("good", lambda: "good")]
    results = measure(candidates, clock, warmup=1, iterations=5)
    assert results["bad"] == Failure(
        "oom", "out of memory: CUDA out of memory. Tried to allocate 9 GiB"
    )
    assert results["good"].count == 5


def test_scope_is_entered_outside_the_timed_region():
    events = []

    @contextlib.contextmanager
    def scope():
        events.append("enter")
        yield
        events.append("exit")

    ticks = iter([0.0, 0.002])
    clock = HostClock(now=lambda: (events.append("tick"), next(ticks))[1])
    candidate = Candidate("a", lambda: events.append("call"), scope=scope)
    measure([candidate], clock, warmup=0, iterations=1)
    assert events == ["enter", "exit", "enter", "tick", "call", "tick", "exit"]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_off_and_comes_back_as_it_was(enabled):
    was = gc.isenabled()
    seen = []
    try:
        (gc.enable if enabled else gc.disable)()
        candidate = Candidate("a", lambda: seen.append(gc.isenabled()))
        measure([candidate], HostClock(), warmup=0, iterations=2)
        assert seen == [False, False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize(
    ("argument", "value"), [("seconds", 0.0), ("warmup", -1), ("iterations", 0)]
)
def test_bad_arguments_are_named(argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be"):
        measure([], HostClock(), **{argument: value})
