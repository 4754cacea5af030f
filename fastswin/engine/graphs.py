"""CUDA graphs over a ladder of batch sizes.

A forward pass of Swin-T is 60-90 launches of a few microseconds each; the host cannot issue them
that fast, a graph replay can. A graph is fixed in shape, so one is captured per rung of a ladder of
batch sizes and image size; a batch takes the next rung up (its unused rows hold old images, whose
results are dropped) and batches above the ladder are cut into pieces of the top rung.

All graphs share one memory pool, so they must not run at the same time: replays are chained by an
event across streams. At most ``max_graphs`` are kept, the least recently used goes first.

Results are tensors of their own, so they stay valid whatever runs next. Where a trial at capture
has shown that it can (graph_trial.py), a graph reads the caller's images and writes the results
where they are; else, and for images of another dtype, of other strides or fewer than the rung's,
one launch more copies the images in, and one for each result copies it out.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastswin.engine.graph_addresses import GraphAddresses, readable
from fastswin.engine.graph_driver import DriverError
from fastswin.engine.graph_trial import redirect
from fastswin.engine.library_workspace import library_workspace_in_pool

Outputs = list[torch.Tensor]


@dataclasses.dataclass
class _Captured:
    """One graph with its static input and outputs."""

    graph: torch.cuda.CUDAGraph
    images: torch.Tensor
    outputs: Outputs
    keep: object  # a graph holds addresses, not references, of the tensors it reads
    addresses: GraphAddresses | None = None
    why_copies: str = "graphs are not redirected"

    def replay(self, images: torch.Tensor) -> Outputs:
        """Results of up to a rung's images, in tensors of their own.

        The caller's images may be freed and results be used as after any operation on the current
        stream, and replays that are still running keep the addresses that they were launched with.
        """
        whole = len(images) == len(self.images)
        source, results = self.images, self.outputs
        if self.addresses is not None:
            if readable(images, self.images):
                source = images
            if whole and self.addresses.moves_results:
                results = [torch.empty_like(out) for out in self.outputs]
            try:
                self.addresses.set(source, results)
            except DriverError as error:
                self.graph.instantiate()  # with the addresses of the capture
                self.addresses, self.why_copies = None, str(error)
                source, results = self.images, self.outputs
        if source is not images:
            self.images[: len(images)].copy_(images)
        self.graph.replay()
        if results is not self.outputs:
            return results
        return [out[: len(images)].clone() for out in self.outputs]


class GraphLadder:
    """Replays ``run(kind, images) -> (outputs, keep)`` through captured graphs; not thread-safe.

    ``keep`` is whatever the outputs were computed from and must live as long as the graph. With
    ``redirects`` off, graphs copy images and results.
    """

    def __init__(
        self,
        run: Callable[[str, torch.Tensor], tuple[Outputs, object]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_sizes: tuple[int, ...],
        max_graphs: int,
        redirects: bool = True,
    ) -> None:
        self.redirects = redirects
        self.run, self.device, self.dtype = run, device, dtype
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._pool: Any = None  # an opaque handle, typed differently from torch to torch
        self._side: torch.cuda.Stream | None = None
        self._idle = torch.cuda.Event()

    def __call__(self, kind: str, images: torch.Tensor) -> Outputs:
        """Outputs of ``run`` for any batch of at least one image."""
        top = self.batch_sizes[-1]
        pieces = [self._replay(kind, piece) for piece in images.split(top)]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def keys(self) -> list[Hashable]:
        """Captured (kind, batch, image shape), least recently used first."""
        return list(self._graphs)

    def copies(self) -> tuple[tuple[Hashable, str], ...]:
        """Captured graphs whose calls copy images or results, and why."""
        found = ((key, captured.why_copies) for key, captured in self._graphs.items())
        return tuple((key, why) for key, why in found if why)

    def clear(self) -> None:
        """Drop every graph, for example because the weights they point to were replaced."""
        if self._graphs:
            torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self._pool = None

    def _replay(self, kind: str, images: torch.Tensor) -> Outputs:
        batch = images.shape[0]
        rung = next(size for size in self.batch_sizes if size >= batch)
        key = (kind, rung, tuple(images.shape[1:]))
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._idle)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(kind, rung, images)
            self._graphs[key] = captured
            while len(self._graphs) > self.max_graphs:
                torch.cuda.synchronize(self.device)  # the oldest graph may still be running
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        outputs = captured.replay(images)
        self._idle.record(stream)
        return outputs

    def _capture(self, kind: str, rung: int, images: torch.Tensor) -> _Captured:
        static = torch.zeros(rung, *images.shape[1:], device=self.device, dtype=self.dtype)
        static[: images.shape[0]].copy_(images)
        current = torch.cuda.current_stream(self.device)
        if self._side is None:  # one for all captures: cached memory never changes streams
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            self.run(kind, static)  # compiles kernels and sets up library handles
        torch.cuda.synchronize(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # tells where its kernels' addresses are
        with (
            library_workspace_in_pool(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
            ),
        ):
            outputs, keep = self.run(kind, static)
        current.wait_stream(self._side)
        graph.instantiate()
        captured = _Captured(graph, static, outputs, keep)
        if self.redirects:
            captured.addresses, captured.why_copies = redirect(graph, static, outputs)
        return captured
