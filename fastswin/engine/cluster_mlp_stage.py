"""Stages of middle batches whose MLP half is one kernel of clusters (ops/cluster_mlp).

In the plan's words mlp "fused" with a ``ClusterMlpConfig``: LayerNorm, fc1 and fc2 are one launch,
whose hidden units never leave registers. It leaves its rows' statistics to attention by heads
(hopper_attention.py). All is launched ahead, so proj in front of it is our product ("fused"): with
the library's there Swin-S took 841 us at batch 8 for 766. Compute capability 9.0, half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastswin._triton.available import why_no_gluon
from fastswin.engine.hopper_attention import our_proj
from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.cluster_mlp.config import config_blocker, default_cluster_mlp_config

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): fewest and most rows of a batch.
ClusterMlps = Mapping[tuple[int, int], Pair]

#: The engine's, as whole models on an H200 chose (docs/performance.md).
CLUSTER_MLPS: ClusterMlps = {(1, 384): (640, 1664)}


def choose_cluster_mlp(table: ClusterMlps, shape: StageShape, chosen: Choice) -> bool:
    """Change one stage's words and tiles where the table and the kernel take its MLP half.

    Args:
        table: fewest and most rows by version and channels.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.

    Returns:
        Whether the MLP half is such a kernel.
    """
    M, C = shape.M, shape.C
    fewest, most = table.get(shape.key, (1, 0))
    if not fewest <= M <= most or chosen.words["mlp"] in ("inside", "fused"):
        return False
    tiles = default_cluster_mlp_config(M, C)
    if tiles is None:
        chosen.reasons["cluster_mlp"] = f"no tiles for {M} rows of {C} channels"
        return False
    blocker = config_blocker(tiles, M, C, shape.hidden)
    if blocker := blocker or why_no_gluon("fastswin.ops.cluster_mlp.kernel"):
        chosen.reasons["cluster_mlp"] = blocker
        return False
    for layer in ("fc1", "fc2"):
        chosen.launch.pop(layer, None)
    chosen.launch["mlp"], chosen.words["mlp"] = tiles, "fused"
    why = f"{M} rows: hidden units stay in the registers of a cluster's programs"
    chosen.reasons["mlp"] = why
    our_proj(shape, chosen)
    return True
