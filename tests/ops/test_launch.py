"""Launches through a kept kernel pass what a launch through Triton would have passed."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest
import torch
import triton

from fastswin import ops
from fastswin._triton import cluster
from fastswin._triton.launch import compiling_only, launch


class Compiled:
    """Takes every parameter of the kernel in order, as Triton's launcher does."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *values: self.log.append(("kept", grid, values))


class Kernel:
    """A kernel ``(x, n, BLOCK, OFFSET=None, SPLITS=1)``, compiled when it is first launched."""

    def __init__(self):
        def source(x, n, BLOCK, OFFSET=None, SPLITS=1): ...

        self.signature = inspect.signature(source)
        self.log = []

    def __getitem__(self, grid):
        def first(*arguments, **constants):
            self.log.append(("triton", grid, arguments, constants))
            return Compiled(self.log)

        return first

    def warmup(self, *arguments, grid, **constants):
        self.log.append(("compiled", grid, arguments, constants))


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"BLOCK": 16}, (16, None, 1)),
        ({"BLOCK": 16, "SPLITS": 4}, (16, None, 4)),
        ({"SPLITS": 2, "OFFSET": 3, "BLOCK": 8}, (8, 3, 2)),
    ],
    ids=["defaults", "one left out", "any order"],
)
def test_kept_kernels_get_every_parameter(given, passed):
    kernel, x = Kernel(), torch.zeros(4)
    for _ in range(3):
        launch(kernel, 5, x, 7, **given, num_warps=4)
    (first, *_), *later = kernel.log
    assert first == "triton"
    assert len(later) == 2
    for kind, grid, (tensor, n, *rest) in later:
        assert (kind, grid, n, tuple(rest)) == ("kept", (5, 1, 1), 7, passed)
        assert tensor is x


def test_another_constant_is_another_kernel():
    kernel, x = Kernel(), torch.zeros(4)
    for block in (8, 16):
        launch(kernel, 1, x, 7, BLOCK=block)
    assert [kind for kind, *_ in kernel.log] == ["triton", "triton"]


def test_compiling_only_runs_and_keeps_nothing():
    kernel, x = Kernel(), torch.zeros(4)
    with compiling_only():
        launch(kernel, 2, x, 7, BLOCK=8)
    launch(kernel, 2, x, 7, BLOCK=8)
    assert [kind for kind, *_ in kernel.log] == ["compiled", "triton"]


def test_no_operator_launches_past_what_may_only_compile():
    """``kernel[grid]`` written out would load what it compiled in the thread of a warm-up."""
    files = list(Path(ops.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert [f.name for f in files if re.search(r"_kernel\[", f.read_text())] == []


def test_a_device_that_holds_no_such_cluster_says_so(monkeypatch):
    compiled = types.SimpleNamespace(packed_metadata=(4, 12, 240_000))
    monkeypatch.setattr(cluster, "_clustered", lambda *_: (compiled, [], 0))
    with pytest.raises(RuntimeError, match="no cluster of 12 programs with 240000 bytes"):
        cluster.launch_clusters(None, 4, 12, 1000, torch.zeros(1))


@pytest.fixture
def compiled(monkeypatch):
    """What a compiler and a driver without a card would give; asks for memory are kept."""
    asked = []
    utils = types.SimpleNamespace(cuOccupancyMaxActiveClusters=lambda *given: 5)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(
        active=types.SimpleNamespace(utils=utils)))  # fmt: skip
    monkeypatch.setattr(cluster, "_CLUSTERED", {})
    monkeypatch.setattr(cluster, "_allow_shared_bytes", lambda *given: asked.append(given))

    def of(shared):
        class Found:
            """A compiled kernel, launched as often as its log has lines."""

            packed_metadata = (4, 1, shared)
            function = 1234
            log: list

            def _init_handles(self):
                self.loaded = True

            def __getitem__(self, grid):
                return lambda *values: self.log.append((grid, values, self.packed_metadata))

        kernel, found = Kernel(), Found()
        found.log = []  # which copies share
        kernel.warmup = lambda *arguments, grid, **constants: found
        return kernel, found, asked

    return of


LIMIT = 48 * 1024


@pytest.mark.parametrize(
    ("shared", "tail", "asks"),
    [(LIMIT, 1, True), (LIMIT, 0, False), (LIMIT - 1024, 1024, False), (LIMIT - 1024, 1025, True),
     (0, LIMIT + 1, True), (LIMIT + 1, 4096, False), (200_000, 9216, False), (1024, 256, False)],
)  # fmt: skip
def test_more_shared_memory_is_asked_for_where_triton_has_not(shared, tail, asks, compiled):
    """It asks itself where it counts more than a kernel has without; once for a kind of call."""
    kernel, found, asked = compiled(shared)
    for _ in range(2):
        cluster.launch_clusters(kernel, 7, 2, tail, torch.zeros(4), 7, BLOCK=16)
    assert asked == ([(1234, shared + tail)] if asks else [])
    assert [(grid, metadata) for grid, _, metadata in found.log[-2:]] == [
        ((7, 1, 1), (4, 2, shared + tail))
    ] * 2


def test_a_kernel_that_has_more_than_its_only_buffer_is_not_launched(compiled):
    """Where that begins is taken for granted."""
    kernel, found, _ = compiled(66_048)
    launched = len(found.log)
    with pytest.raises(RuntimeError, match="66048 bytes of shared memory, of which its only"):
        cluster.launch_clusters(kernel, 7, 2, 512, torch.zeros(4), 7, BLOCK=16, buffer_bytes=65_536)
    assert len(found.log) == launched
    cluster.launch_clusters(kernel, 7, 2, 512, torch.zeros(4), 7, BLOCK=16, buffer_bytes=66_048)
    assert len(found.log) == launched + 1


@pytest.mark.parametrize("code", [0, 1])
def test_what_the_driver_says_of_shared_memory(code, monkeypatch):
    asked = []

    def load(name):
        assert name == "libcuda.so.1"

        def answer(function, attribute, size):
            asked.append((function.value, attribute, size))
            return code

        return types.SimpleNamespace(cuFuncSetAttribute=answer)

    monkeypatch.setattr(cluster.ctypes, "CDLL", load)
    if code == 0:
        cluster._allow_shared_bytes(1 << 40, 65_000)
    else:
        reason = "cuFuncSetAttribute returned 1 for 65000 bytes of shared memory"
        with pytest.raises(RuntimeError, match=reason):
            cluster._allow_shared_bytes(1 << 40, 65_000)
    assert asked == [(1 << 40, 8, 65_000)]  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
