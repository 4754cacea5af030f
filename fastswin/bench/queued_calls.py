"""Times of back-to-back launches without a graph: what sweeps of launch configurations compare."""

from __future__ import annotations

from collections.abc import Callable

import torch

#: Calls back to back in a round, and rounds, the median of which counts.
CALLS, ROUNDS = 10, 3

#: About 2 ms in which the host queues the calls of one round.
HEAD_START_CYCLES = 4_000_000


def queued_ms(call: Callable[[], object], head_start_cycles: int = HEAD_START_CYCLES) -> float:
    """Median milliseconds a call, queued behind a wait of the GPU so that no launch is seen.

    Args:
        call: launches on the current CUDA stream.
        head_start_cycles: that the GPU waits; more where a call launches several kernels.
    """
    call()
    times_ms = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(head_start_cycles)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end) / CALLS)
    return sorted(times_ms)[ROUNDS // 2]
