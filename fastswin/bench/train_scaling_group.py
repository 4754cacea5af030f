"""The first n processes of a group that is initialised: DDP among them, meeting, agreeing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class FirstProcesses:
    """The first ``count`` processes; made by all of them, used by those that belong to it.

    Args:
        count: of processes.
        device: this process's.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.group: Any = dist.new_group(list(range(count)))

    def parallel(self, module: nn.Module) -> nn.Module:
        """``module`` in DistributedDataParallel over these processes."""
        return nn.parallel.DistributedDataParallel(
            module, device_ids=device_ids(self.device), process_group=self.group,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # a Swin's are constants
        )  # fmt: skip

    def meet(self) -> None:
        """Return when every process has finished its work and come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.count > 1:
            dist.barrier(self.group, device_ids=device_ids(self.device))

    def agrees_to_go_on(self, mine: bool) -> bool:
        """Rank 0's answer, in every process."""
        answer = torch.tensor(float(mine), device=self.device)
        if self.count > 1:
            dist.broadcast(answer, 0, self.group)
        return bool(answer)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether every process has these tensors, by their fp64 sums and sums of squares."""
        exact = [t.detach().double() for t in tensors]
        sums = torch.stack([s for t in exact for s in (t.sum(), t.square().sum())])
        low, high = sums.clone(), sums.clone()
        if self.count > 1:
            dist.all_reduce(low, dist.ReduceOp.MIN, self.group)
            dist.all_reduce(high, dist.ReduceOp.MAX, self.group)
        return torch.equal(low, high)


def device_ids(device: torch.device) -> list[int] | None:
    """``device`` as torch.distributed's functions take it."""
    return [device.index] if device.type == "cuda" else None
