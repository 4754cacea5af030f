"""Device memory that one contender is answerable for.

    peak = max allocated during one call + idle bytes of graph pools - held before it was built

A CUDA graph allocates nothing when replayed: its activations lie in a private pool that the
allocator counts as free. Those idle bytes are added, or graphs would look as if they needed no
memory at all.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

MIB = 2**20


def held_mib() -> float:
    """Device memory in use now, in MiB, graph pools included; 0 without a GPU in use.

    Garbage and cuBLAS's cached workspaces (32 MiB each on Hopper) are dropped first: counted here
    and freed by the next contender, as ``reduce-overhead`` does, they would be subtracted from it.
    """
    if not _cuda_in_use():
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return (torch.cuda.memory_allocated() + _idle_graph_bytes()) / MIB


def peak_mib(call: Callable[[], object], held_before_mib: float) -> float:
    """Peak device memory of one call on the current GPU in MiB, above what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() + _idle_graph_bytes()) / MIB
    return peak - held_before_mib


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _idle_graph_bytes() -> int:
    """Bytes of private (graph) pools that hold no live tensor."""
    idle = 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            idle += segment["total_size"] - segment["allocated_size"]
    return idle
