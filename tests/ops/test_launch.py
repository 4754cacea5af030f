"""Launches through a kept kernel pass what a launch through Triton would have passed."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path

import pytest
import torch

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
