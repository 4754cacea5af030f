"""The MLP's kernel through its launcher, a cluster's programs as threads."""

from __future__ import annotations

import functools

import pytest
import torch
from cluster_mlp_threads import STEPS, arrive_by_warp
from gluon_clusters import run_clusters
from gluon_memory import Descriptor

from fastswin.ops.cluster_mlp import launch
from fastswin.ops.cluster_mlp.config import config_blocker
from fastswin.ops.cluster_mlp.packing import pack_mlp, pack_offset
from fastswin.ops.linear.vectors import row_sums


@pytest.fixture
def run(monkeypatch):
    """The kernel's result; ``stand_ins`` take the place of its functions."""

    def launched(stand_ins, kernel, clusters, size, tail, *arguments, num_warps, **constants):
        from fastswin.ops.cluster_mlp import kernel as module

        assert kernel is module._cluster_mlp_kernel
        assert num_warps == constants["BLOCK_M"] // 16
        arrive = functools.partial(arrive_by_warp, num_warps)
        run_clusters(
            module, kernel.__name__, clusters, size, tail, arguments, constants,
            partitions=2, **{"arrive_by_warp": arrive} | STEPS | stand_ins,
        )  # fmt: skip

    def run(made, config, in_place=False, stats_out=None, **stand_ins):
        monkeypatch.setattr(launch, "launch_clusters", functools.partial(launched, stand_ins))
        monkeypatch.setattr(launch, "describe", lambda t, *block: Descriptor(t, list(block)))
        x, fc1, fc2 = made["x"], made["fc1_weight"], made["fc2_weight"]
        assert config_blocker(config, *x.shape, len(fc1)) is None
        out = torch.full_like(x, float("nan"))
        if in_place:
            out = x = x.clone()
        post_norm = (made["norm_weight"], made["norm_bias"]) if "norm_weight" in made else None
        offset, bias = None, made["fc2_bias"]
        if "offset" in made:
            offset, bias = pack_offset(made["offset"], bias, x.dtype)
        return launch.cluster_mlp_fwd(
            x, pack_mlp(fc1, fc2, config.programs), None if post_norm else row_sums(fc1),
            made["fc1_bias"], bias, made["eps"], out, config,
            stats_out=stats_out, post_norm=post_norm, offset=offset,
        )  # fmt: skip

    return run
