"""A captured graph without a GPU: kernels' arguments in memory, a driver that reads and sets them.

Kernels run on tensors of the CPU by the addresses that their arguments hold, so a redirected replay
reads and writes what it was told to.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from fastswin.engine.graph_driver import (
    KERNEL,
    Driver,
    DriverError,
    KernelParams,
    packed_list,
)
from fastswin.engine.graph_trial import redirect
from fastswin.engine.graphs import _Captured

CLASSES = 5


class Node:
    """A node: a kernel's arguments as bytes, or the words of a copy or a fill."""

    def __init__(self, *arguments, run=None, node_type=KERNEL, words=(), packed=False):
        self.arguments, self.run = [bytes(a) for a in arguments], run
        self.packed = packed
        assert not packed or len(arguments) == 1
        self.node_type, self.words = node_type, list(words)
        self._buffers = [ctypes.create_string_buffer(a, len(a)) for a in self.arguments]
        self._pointers = (ctypes.c_void_p * len(self._buffers))(
            *map(ctypes.addressof, self._buffers)
        )

        self._size = ctypes.c_size_t(len(self.arguments[0]) if packed else 0)
        self._list = packed_list(self._pointers[0], self._size) if packed else None

    def params(self):
        if self.packed:
            extra = ctypes.addressof(self._list)
            return KernelParams(function=1, shared_bytes=7, extra=extra)
        return KernelParams(function=1, shared_bytes=7, values=self._pointers)


class PlayedDriver(Driver):
    """The driver of one graph; ``fails`` refuses every change after so many."""

    def __init__(self, graph, fails=None):
        self.graph, self.fails, self.changes = graph, fails, []

    def nodes(self, graph):
        assert graph == id(self.graph)
        return list(range(1, len(self.graph.nodes) + 1))

    def node_type(self, node):
        return self.graph.nodes[node - 1].node_type

    def fill_words(self, node, node_type):
        return self.graph.nodes[node - 1].words

    def kernel(self, node):
        return self.graph.nodes[node - 1].params()

    def sizes(self, params):
        pointers = ctypes.cast(params.values, ctypes.c_void_p).value
        for node in self.graph.nodes:
            if ctypes.addressof(node._pointers) == pointers:
                return [len(a) for a in node.arguments]
        raise DriverError("no such kernel")

    def setter(self, executable, node, params):
        return functools.partial(self._set, executable, node, params)

    def _set(self, executable, node, params):
        if self.fails is not None and len(self.changes) >= self.fails:
            return 1
        assert executable == self.graph.raw_cuda_graph_exec()
        assert params.shared_bytes == 7
        found = self.graph.nodes[node - 1]
        sizes = [len(a) for a in found.arguments]
        self.graph.running[node - 1] = (
            self.arguments(params)
            if found.packed
            else [ctypes.string_at(params.values[i], size) for i, size in enumerate(sizes)]
        )
        self.changes.append(node)
        return 0


class PlayedGraph:
    """A torch.cuda.CUDAGraph of such nodes."""

    def __init__(self, nodes):
        self.nodes, self.instances, self.replays = nodes, 0, 0
        self.instantiate()

    def raw_cuda_graph(self):
        return id(self)

    def raw_cuda_graph_exec(self):
        return id(self) + self.instances

    def instantiate(self):
        self.instances += 1
        self.running = [node.arguments for node in self.nodes]

    def replay(self):
        self.replays += 1
        for node, arguments in zip(self.nodes, self.running, strict=True):
            if node.run is not None:
                node.run(*arguments)


def pointer(tensor, offset=0):
    return (tensor.data_ptr() + offset).to_bytes(8, "little")


def at(argument, *shape, word=0):
    """The tensor whose address is a word of an argument."""
    address = int.from_bytes(argument[8 * word : 8 * word + 8], "little")
    values = (ctypes.c_float * torch.Size(shape).numel()).from_address(address)
    return torch.frombuffer(values, dtype=torch.float32).view(shape)


class PlayedModel:
    """Images ``[B, 3, 4, 4]`` to sums ``[B, 3]`` to logits ``[B, 5]``, as two kernels.

    The first takes a pointer and a count; the second a structure of both pointers, one behind 4
    bytes and their padding.
    """

    def __init__(self, batch):
        self.batch = batch
        self.images = torch.zeros(batch, 3, 4, 4)
        self.sums = torch.zeros(batch, 3)
        pool = (ctypes.c_float * (batch * CLASSES + 64))()
        self.logits = torch.frombuffer(pool, dtype=torch.float32, count=batch * CLASSES)
        self.logits = self.logits.view(batch, CLASSES)
        count = batch.to_bytes(4, "little")
        self.nodes = [
            Node(pointer(self.images), pointer(self.sums), count, run=self._sum),
            Node(pointer(self.sums), count + bytes(4) + pointer(self.logits), run=self._head),
        ]

    def _sum(self, images, sums, count):
        at(sums, self.batch, 3).copy_(at(images, self.batch, 3, 4, 4).sum((2, 3)))

    def _head(self, sums, rest):
        at(rest, self.batch, CLASSES, word=1).copy_(head(at(sums, self.batch, 3)))

    def segments(self, behind=256):
        """torch.cuda.memory_snapshot() for the logits."""
        return [
            {"address": 64, "total_size": 64},
            {
                "address": self.logits.data_ptr() - 64,
                "total_size": 64 + self.logits.nbytes + behind,
            },
        ]


def head(sums):
    return torch.stack([sums.sum(1) * k + sums[:, 0] for k in range(1, CLASSES + 1)], 1)


def expected(images):
    return head(images.sum((2, 3)))


class Played:
    """A model's graph, its driver, and what redirect() says of it."""

    def __init__(self, monkeypatch, batch=2, change=None, behind=256):
        self.model = PlayedModel(batch)
        self.outputs = [self.model.logits]
        if change is not None:
            change(self)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.model.segments(behind))
        self.graph = PlayedGraph(self.model.nodes)
        self.driver = PlayedDriver(self.graph)

    def redirect(self):
        return redirect(self.graph, self.model.images, self.outputs, self.driver)

    def captured(self):
        captured = _Captured(self.graph, self.model.images, self.outputs, None)
        captured.addresses, captured.why_copies = self.redirect()
        self.driver.changes.clear()
        return captured


def some_images(batch=2, seed=0):
    return torch.randn(batch, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
