"""The product's kernel through its launcher, a cluster's programs as threads."""

from __future__ import annotations

import functools

import pytest
from cluster_linear_threads import STEPS
from gluon_clusters import run_clusters
from gluon_memory import Descriptor
from ring_threads import Asking

from fastswin.ops.cluster_linear import launch
from fastswin.ops.cluster_linear.config import config_blocker

#: Who asks for tiles: of the first filling, and of a later step.
ASKING = {"ask_for_tiles", "ask_again"}


@pytest.fixture
def run(monkeypatch):
    """The kernel's result; ``stand_ins`` take the place of its functions.

    One of :data:`ASKING` is given the function itself first.
    """

    def launched(
        stand_ins, kernel, clusters, size, tail, *arguments, num_warps, buffer_bytes, **constants
    ):
        from fastswin.ops.cluster_linear import kernel as module

        assert kernel is module._cluster_linear_kernel
        lines = constants["BLOCK_N" if constants["BLOCK_M"] < 64 else "BLOCK_M"]
        assert num_warps == lines // 16 * constants["ACROSS"]  # of the first operand
        asking = Asking(kernel.__name__, arguments, 32 * num_warps, buffer_bytes)
        texts = {n: v for n, v in stand_ins.items() if n in ("_asking", "_asking_again")}
        asked = {name: asking.function(name, **texts) for name in ASKING}
        for name in ASKING & stand_ins.keys():
            asked[name] = functools.partial(stand_ins[name], asked[name])
        run_clusters(
            module, kernel.__name__, clusters, size, tail, arguments, constants,
            dialect=asking.dialect(), **STEPS | stand_ins | asked,
        )  # fmt: skip

    def run(made, config, in_place=False, stats_out=None, **stand_ins):
        monkeypatch.setattr(launch, "launch_clusters", functools.partial(launched, stand_ins))
        monkeypatch.setattr(launch, "describe", lambda t, *block: Descriptor(t, list(block)))
        x, weight, post_norm = made["x"], made["weight"], None
        if "norm_weight" in made:
            post_norm = made["norm_weight"], made["norm_bias"]
        assert config_blocker(config, len(x), *weight.shape, post_norm is not None) is None
        residual = made.get("residual")
        out = x.new_full((len(x), len(weight)), float("nan"))
        if in_place:
            out = residual = residual.clone()
        return launch.cluster_linear_fwd(
            x, weight, made.get("bias"), made.get("activation"),
            made.get("layer_norm_eps", made.get("eps")), residual, out, config,
            norm_stats=made.get("norm_stats"), weight_sums=made.get("weight_sums"),
            stats_out=stats_out, post_norm=post_norm,
        )  # fmt: skip

    return run
