"""Streams, threads and captures around an engine on a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from engine_gpu_cases import cuda_images, eager_of, small

from fastswin.engine import Engine

pytestmark = pytest.mark.gpu


def test_side_stream():
    model = small()
    x = cuda_images(model, 4)
    expected = Engine(model)(x)
    engine, side = Engine(model), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = engine(x)
        second = engine(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_streams(graphs):
    """Interleaved calls share static buffers; each must see its own images."""
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    inputs = [cuda_images(model, 4, seed=s) for s in range(2)]
    expected = [eager_of(model)(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(engine(inputs[turn % 2]))
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert torch.equal(result, expected[turn % 2]), f"turn {turn}"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_threads_on_two_streams(graphs):
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    inputs = [cuda_images(model, 4, size) for size in ((56, 84), (84, 112))]
    expected = [eager_of(model)(x) for x in inputs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results[index].append(engine(inputs[index]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(r) for r in results] == [20, 20]
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(r, wanted) for r in got)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_inside_a_capture_of_the_user(graphs):
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    static = cuda_images(model, 4)
    expected = [eager_of(model)(cuda_images(model, 4, seed=s)) for s in range(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        engine(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = engine(static)
    for seed in range(2):
        static.copy_(cuda_images(model, 4, seed=seed))
        graph.replay()
        assert torch.equal(out, expected[seed])
    assert torch.equal(engine(cuda_images(model, 4)), expected[0])


def test_a_capture_without_a_call_before_is_refused():
    model = small()
    engine = Engine(model)
    x = cuda_images(model, 4)
    refused = None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        try:
            engine(x)
        except RuntimeError as error:
            refused = error
    assert "call it once with these shapes before capturing" in str(refused)
    assert torch.equal(engine(x), eager_of(model)(x))
