"""Addresses of a captured graph's images and results, changed from call to call.

A graph reads its images and leaves its results where it did when it was captured, so that a call
copies both: two launches of about 2 us beside 193 us of kernels (Swin-T at batch 1, H200). Here
the kernels that read the images are given the caller's address instead, and those that write the
results a fresh tensor's, by cuGraphExecKernelNodeSetParams: a call of the host for each kernel
whose addresses changed, two as a rule, and none where the same tensor comes again.

Where the addresses are, the captured graph tells: in the arguments of its kernels, as words of 8
bytes, alone or inside a structure. That need not be all of them, nor need every such word mean the
tensor, so a trial decides (graph_trial.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from fastswin.engine.graph_driver import (
    KERNEL,
    MEMCPY,
    MEMSET,
    SILENT_NODES,
    Driver,
    DriverError,
    KernelParams,
    packed_list,
)

#: Triton and the libraries choose kernels by whether addresses are multiples of this.
ALIGNMENT = 16

#: A kernel by number, an argument of its, and the word that holds an address.
_Place = tuple[int, "ctypes.Array[ctypes.c_uint64]", int]


class RedirectError(Exception):
    """Why a graph keeps its addresses."""


def readable(images: torch.Tensor, static: torch.Tensor) -> bool:
    """Whether a graph captured on ``static`` may read ``images`` in its place."""
    return (
        images.shape == static.shape
        and images.dtype == static.dtype
        and images.device == static.device
        and images.is_contiguous()
        and not images.is_neg()
        and images.data_ptr() % ALIGNMENT == 0
    )


class _Kernel:
    """A kernel node's parameters with arguments of our own, which can be changed."""

    def __init__(self, params: KernelParams, values: list[bytes]) -> None:
        self.arguments = [
            (ctypes.c_uint64 * -(-len(value) // 8)).from_buffer_copy(value + bytes(-len(value) % 8))
            for value in values
        ]
        self.params = params
        starts = list(map(ctypes.addressof, self.arguments))
        if params.extra:
            self._size = ctypes.c_size_t(len(values[0]))
            self._pointers = packed_list(starts[0], self._size)
            params.extra = ctypes.addressof(self._pointers)
        else:
            self._pointers = (ctypes.c_void_p * len(values))(*starts)
            params.values = self._pointers


class GraphAddresses:
    """The places in an instantiated graph that hold the addresses of some tensors.

    Args:
        graph: captured with ``keep_graph=True`` and instantiated; instantiated again, it needs
            another object of this class.
        tensors: the images, then results.
        last: take for results what the last kernel holds that has their address. Kernels before
            it may have it from a tensor that lay there earlier.

    Raises:
        RedirectError: a tensor's address is nowhere, or where it cannot be changed.
        DriverError: a call of the driver failed.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        tensors: Sequence[torch.Tensor],
        driver: Driver,
        last: bool = False,
    ) -> None:
        self.tensors = list(tensors)
        self._now = [tensor.data_ptr() for tensor in tensors]
        self._ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
        #: by tensor: the kernels that hold its address, with the argument and its word
        self._places: list[list[_Place]] = [[] for _ in tensors]
        self._calls: list[functools.partial[int]] = []
        self._kernels: list[_Kernel] = []  # the driver is given pointers to their arguments
        executable = graph.raw_cuda_graph_exec()
        for node in driver.nodes(graph.raw_cuda_graph()):
            node_type = driver.node_type(node)
            if node_type == KERNEL:
                if kernel := self._take(driver, node):
                    self._kernels.append(kernel)
                    self._calls.append(driver.setter(executable, node, kernel.params))
            elif node_type in (MEMCPY, MEMSET):
                words = driver.fill_words(node, node_type)
                if any(self._holding(word) is not None for word in words):
                    raise RedirectError("a copy or a fill of the graph touches the tensors")
            elif node_type not in SILENT_NODES:
                raise RedirectError(f"the graph has a node of type {node_type}")
        if not all(self._places):
            raise RedirectError("no kernel takes the address of the images or of a result")
        if last:
            for index, places in enumerate(self._places[1:], 1):
                self._places[index] = [place for place in places if place[0] == places[-1][0]]

    @property
    def places(self) -> int:
        """How many words hold an address."""
        return sum(map(len, self._places))

    @property
    def moves_results(self) -> bool:
        """Whether results are among the tensors, or the images alone."""
        return len(self.tensors) > 1

    def set(self, images: torch.Tensor, results: Sequence[torch.Tensor]) -> None:
        """Let later replays read ``images`` and, if it moves results, write ``results``.

        Raises:
            DriverError: the driver refused; the graph has to be instantiated again.
        """
        stale: set[int] = set()
        for index, tensor in enumerate((images, *results)[: len(self._now)]):
            address = tensor.data_ptr()
            if address != self._now[index]:
                self._now[index] = address
                for kernel, argument, word in self._places[index]:
                    argument[word] = address
                    stale.add(kernel)
        for call in stale:
            if code := self._calls[call]():
                raise DriverError(f"cuGraphExecKernelNodeSetParams returned CUDA error {code}")

    def _holding(self, word: int) -> int | None:
        """The tensor that ``word`` points into."""
        for index, (start, end) in enumerate(zip(self._now, self._ends, strict=True)):
            if start <= word < end:
                return index
        return None

    def _take(self, driver: Driver, node: int) -> _Kernel | None:
        """A kernel that holds addresses, noted with its places."""
        params = driver.kernel(node)
        values = driver.arguments(params)
        places = []
        for argument, value in enumerate(values):
            for word, at in enumerate(memoryview(value)[: len(value) & -8].cast("Q")):
                index = self._holding(at)
                if index is not None and at == self._now[index]:
                    places.append((index, argument, word))
                elif index == 0:  # in a result's memory something else may have begun there
                    raise RedirectError("a kernel takes an address inside the images")
        if not places:
            return None
        kernel = _Kernel(params, values)
        for index, argument, word in places:
            self._places[index].append((len(self._calls), kernel.arguments[argument], word))
        return kernel
