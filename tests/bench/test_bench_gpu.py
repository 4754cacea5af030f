"""What only a GPU can show: events, graphs, compiled contenders, memory."""

import dataclasses

import pytest
import torch

from fastswin.bench import suites
from fastswin.bench.contenders import DEFAULT_VARIANTS
from fastswin.bench.memory import held_mib, peak_mib
from fastswin.bench.precision import tf32_state
from fastswin.bench.timing import Candidate, CudaClock, measure

pytestmark = pytest.mark.gpu


def test_events_wait_for_the_work():
    """A launch takes microseconds; the product it starts takes far longer."""
    a = torch.randn(4096, 4096, device="cuda")
    timing = measure([Candidate("mm", lambda: a @ a)], CudaClock(), warmup=0, iterations=1)["mm"]
    assert timing.median_ms > 0.1


def test_short_calls_are_timed_in_a_graph():
    x = torch.randn(1024, device="cuda")
    y = torch.empty_like(x)
    candidates = [
        Candidate("graph", lambda: torch.add(x, 1.0, out=y), capturable=True),
        Candidate("plain", lambda: torch.add(x, 1.0, out=y)),
    ]
    found = measure(candidates, CudaClock(), seconds=0.2)
    assert (found["graph"].graph, found["plain"].graph) == (True, False)
    assert found["graph"].median_ms < found["plain"].median_ms


def test_memory_of_a_graph_is_counted():
    held = held_mib()
    x = torch.randn(16, 2**20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = (x * 2).relu().sum()
    peak = peak_mib(graph.replay, held)
    assert peak >= 2 * 64  # x, and at least one temporary of its size in the graph's pool
    assert total.item() == pytest.approx((x * 2).relu().sum().item(), rel=1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_all_contenders_are_right(tiny_problem, tmp_path, dtype):
    before = tf32_state()
    problem = dataclasses.replace(tiny_problem, dtype=dtype)
    result = suites.run_model_suite([problem], DEFAULT_VARIANTS, "cuda", tmp_path, 0.05)
    assert result.problems_found == []
    assert {r["variant"] for r in result.document["records"]} == set(DEFAULT_VARIANTS)
    graphs = {r["variant"] for r in result.document["records"] if r["graph"]}
    assert graphs >= {"fastswin", "eager-graph", "compile-reduce-overhead"}
    peaks = {r["variant"]: r["peak_mib"] for r in result.document["records"]}
    assert min(peaks.values()) > 0, peaks
    assert tf32_state() == before
    assert suites.choose_device(None)[0].type == "cuda"
