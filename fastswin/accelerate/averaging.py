"""Gradients averaged over processes inside the backward pass, so that CUDA graphs hold that too.

    grad_i = (1 / n) sum over the n processes of grad_i

DistributedDataParallel waits for the whole backward graph of a captured step and then copies every
gradient into its buckets: of Swin-T's step of 15.6 ms on an H200 that took 1.6 more on two GPUs.
Here a bucket's gradients are joined and reduced as soon as they are there, on NCCL's own stream,
while the graph goes on with earlier layers; the averages are written back when all are there.

Source of buckets in reverse order and of the overlap: Li et al., "PyTorch Distributed: Experiences
on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

#: Bytes of a bucket: long enough for the links' full rate, short enough that Swin-T has five.
BUCKET_BYTES = 25 * 2**20


class GradientAverage:
    """Averages what ``torch.autograd.grad`` returns for parameters, while hooks are installed.

    Every backward pass within :meth:`installed` must reach all of them, in every process.
    ``Tensor.backward`` is not enough: it may add to a gradient before it is averaged.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: Any, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Nothing is sent yet.

        Args:
            parameters: in the order of the forward pass; those without ``requires_grad`` are left.
            group: ``torch.distributed`` process group.
            bucket_bytes: of gradients that are reduced together; the last bucket may be smaller.
        """
        self.group = group
        self._size = dist.get_world_size(group)
        # gloo knows no average
        self._mean = dist.get_backend(group) == "nccl"
        wanted = [p for p in parameters if p.requires_grad]
        self._buckets = _in_buckets(wanted, bucket_bytes)
        self._clear()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Average in every backward pass within.

        Raises:
            RuntimeError: at the end, where a backward pass did not reach every parameter.
        """
        handles = [
            parameter.register_hook(self._hook(number, place))
            for number, bucket in enumerate(self._buckets)
            for place, parameter in enumerate(bucket)
        ]
        try:
            yield
            if any(self._found):
                raise RuntimeError("a backward pass did not reach every parameter of the model")
        finally:
            for handle in handles:
                handle.remove()
            self._clear()

    def share_state(self, module: nn.Module) -> None:
        """Give every process the parameters and buffers of the group's first one."""
        first = dist.get_global_rank(self.group, 0)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), first, group=self.group)

    def _clear(self) -> None:
        self._found: list[dict[int, torch.Tensor]] = [{} for _ in self._buckets]
        self._started: list[tuple[int, torch.Tensor, Any]] = []

    def _hook(self, number: int, place: int) -> Any:
        def arrived(gradient: torch.Tensor) -> None:
            found = self._found[number]
            found[place] = gradient
            if len(found) == len(self._buckets[number]):
                self._start(number)
            if len(self._started) == len(self._buckets):
                self._finish()

        return arrived

    def _start(self, number: int) -> None:
        found = self._found[number]
        flat = torch.cat([found[place].reshape(-1) for place in range(len(found))])
        operation = dist.ReduceOp.AVG if self._mean else dist.ReduceOp.SUM
        work = dist.all_reduce(flat, operation, group=self.group, async_op=True)
        self._started.append((number, flat, work))

    def _finish(self) -> None:
        for number, flat, work in self._started:
            work.wait()
            if not self._mean:
                flat /= self._size
            gradients = [self._found[number][place] for place in range(len(self._found[number]))]
            parts = flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(
                gradients, [p.view(g.shape) for p, g in zip(parts, gradients, strict=True)]
            )
        self._clear()


def _in_buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Of one dtype each, last parameters first, as their gradients come."""
    buckets: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        fits = filled + size <= limit and buckets and buckets[-1][0].dtype == parameter.dtype
        if fits:
            buckets[-1].append(parameter)
            filled += size
        else:
            buckets.append([parameter])
            filled = size
    return buckets
