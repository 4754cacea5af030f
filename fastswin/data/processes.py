"""Several processes on one data set, as ``torchrun`` starts them.

    torchrun --nproc-per-node 4 --no-python fastswin evaluate ...

Each takes every ``count``-th image; sums are exchanged at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among all.

    Attributes:
        rank: its number, from 0.
        count: how many there are.
        device: where it runs: its own GPU where there are several.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in the order of their ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values


@contextlib.contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join what ``torchrun`` started, for the length of the block; alone without it.

    Args:
        device: "cuda" means each process's own GPU.

    Raises:
        RuntimeError: more processes on this machine than GPUs.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:
        yield Processes(0, 1, device)
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise RuntimeError(
                f"process {local} of this machine has no GPU: there are "
                f"{torch.cuda.device_count()}; start fewer with --nproc-per-node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)  # where collectives of objects put their bytes
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(torch.distributed.get_rank(), count, device)
    finally:
        torch.distributed.destroy_process_group()
