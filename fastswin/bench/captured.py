"""Contenders of operator suites inside CUDA graphs, so that no launch from the host is timed.

A graph of ``calls`` calls is replayed once per timed call. An operator of 20 to 500 us would
otherwise be timed as its Python part, above all its backward through autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fastswin.bench.timing import Candidate
from fastswin.engine.library_workspace import library_workspace_in_pool

Call = Callable[[], object]

#: Calls of each contender before anything is captured or timed.
WARM_CALLS = 3


def captured_candidate(name: str, make_call: Callable[[], Call], calls: int) -> Candidate:
    """A warm contender: the replay of a graph of ``calls`` calls, or one plain call for 0.

    Args:
        name: of the variant.
        make_call: builds what is timed; runs on the stream of the capture, since a backward runs on
            the stream of its forward.
        calls: in the graph; 0 captures nothing (a CPU).

    Raises:
        RuntimeError: the call cannot be captured.
    """
    if not calls:
        call = make_call()
        for _ in range(WARM_CALLS):
            call()
        return Candidate(name, call)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call = make_call()
        for _ in range(WARM_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with library_workspace_in_pool(), torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    return Candidate(name, functools.partial(_replay, graph, call))


def _replay(graph: torch.cuda.CUDAGraph, keep: Call) -> None:
    """Replay; ``keep`` owns the tensors (a backward's saved outputs) whose addresses it holds."""
    graph.replay()
