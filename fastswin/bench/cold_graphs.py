"""Work captured in a CUDA graph and timed from a cold L2.

At batch 1 a Swin's weights do not survive in L2 from one forward pass to the next. So what is timed
reads weights of its own, and L2 is written over before each replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Replays of a graph; the median counts.
REPLAYS = 9

#: Written between replays, to push weights out of L2.
FLUSH_BYTES = 96 << 20

#: The most bytes that the different weights of one graph may take.
WEIGHT_BYTES = 400 << 20


def make_flush(device: torch.device) -> torch.Tensor:
    """What :func:`graph_us` writes between replays."""
    return torch.empty(FLUSH_BYTES // 4, device=device)


def graph_us(run: Callable[[], None], flush: torch.Tensor | None) -> float:
    """Median microseconds of a captured ``run``, between events inside the stream.

    Args:
        run: launches on the current stream.
        flush: written before each replay; None leaves L2 as the replay before left it.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin()
        run()
        graph.capture_end()
    graph.replay()
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        if flush is not None:
            flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2]
