"""Kernel times as the driver's tracer reports them, by torch.profiler.

Launches of Triton belong to no PyTorch operator, so a trace does not say which call a kernel came
from. Calls are therefore run one after another on one stream with a marker kernel in front of each:
what lies between two markers on the device is one call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fastswin.engine.calls import Call

#: Rounds over all calls that are traced; the median round of each call counts.
ROUNDS = 9

#: Name of the marker's kernel (``torch.cuda._sleep``) in traces.
MARKER = "spin_kernel"


@dataclasses.dataclass(frozen=True)
class Traced:
    """One call: device time of its kernels in us, and their names."""

    latency_us: float
    kernels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a trace: name, start and duration in us."""

    name: str
    start_us: float
    duration_us: float


def trace_calls(calls: Sequence[Call], device: torch.device) -> list[Traced]:
    """Trace calls on a GPU.

    Raises:
        RuntimeError: there is no GPU, or the trace does not hold what was run.
    """
    if device.type != "cuda":
        raise RuntimeError("traces are of GPUs")
    from torch.profiler import ProfilerActivity, profile

    for call in calls:
        call.run()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(ROUNDS):
            for call in calls:
                torch.cuda._sleep(1)
                call.run()
        torch.cuda.synchronize(device)
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in trace.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return split_trace(kernels, len(calls))


def split_trace(kernels: Sequence[Kernel], calls: int) -> list[Traced]:
    """Kernels of a whole trace to one :class:`Traced` per call.

    Args:
        kernels: of all rounds, in any order, markers included.
        calls: in one round.

    Raises:
        RuntimeError: the number of markers is not a whole number of rounds, or a call of some round
            has no kernel.
    """
    runs: list[list[Kernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if MARKER in kernel.name:
            runs.append([])
        elif runs:
            runs[-1].append(kernel)
    if not runs or len(runs) % calls or not all(runs):
        raise RuntimeError(
            f"the trace holds {len(runs)} calls with {sum(map(bool, runs))} that ran kernels, "
            f"expected rounds of {calls}"
        )
    found = []
    for index in range(calls):
        rounds = runs[index::calls]
        times = sorted(sum(kernel.duration_us for kernel in run) for run in rounds)
        names = tuple(kernel.name for kernel in rounds[0])
        found.append(Traced(times[len(times) // 2], names))
    return found
