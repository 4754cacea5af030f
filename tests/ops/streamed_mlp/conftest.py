"""The streamed MLP through its launcher, programs and partitions as threads."""

from __future__ import annotations

import functools

import pytest
import torch
from gluon_clusters import run_clusters
from gluon_memory import Descriptor
from streamed_mlp_threads import STEPS

from fastswin.ops.streamed_mlp import launch
from fastswin.ops.streamed_mlp.config import config_blocker


@pytest.fixture
def run(monkeypatch):
    """The kernel's result; ``stand_ins`` take the place of its functions."""

    def clustered(stand_ins, kernel, clusters, size, tail, *arguments, num_warps, **constants):
        from fastswin.ops.streamed_mlp import kernel as module

        assert kernel is module._streamed_mlp_kernel
        assert num_warps == 4
        assert tail == constants["TAIL"]
        run_clusters(
            module, kernel.__name__, clusters, size, tail, arguments, constants,
            partitions=constants["GROUPS"] + 1, **STEPS | stand_ins,
        )  # fmt: skip

    def run(made, config, in_place=False, **stand_ins):
        in_clusters = functools.partial(clustered, stand_ins)
        monkeypatch.setattr(launch, "launch_clusters", in_clusters)
        monkeypatch.setattr(
            launch, "launch",
            lambda kernel, grid, *arguments, **constants: in_clusters(
                kernel, grid, 1, 0, *arguments, **constants
            ),
        )  # fmt: skip
        monkeypatch.setattr(launch, "describe", lambda t, *block: Descriptor(t, list(block)))
        x, fc1, fc2 = made["x"], made["fc1_weight"], made["fc2_weight"]
        assert config_blocker(config, *x.shape, len(fc1)) is None
        out = torch.full_like(x, float("nan"))
        if in_place:
            out = x = x.clone()
        norm = (made["norm_weight"], made["norm_bias"]) if "norm_weight" in made else None
        return launch.streamed_mlp_fwd(
            x, (fc1, made["fc1_bias"]), (fc2, made["fc2_bias"]), norm, made.get("offset"),
            made["eps"], out, config,
        )  # fmt: skip

    return run
