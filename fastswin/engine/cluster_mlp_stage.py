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
from fastswin.engine.small_batch import LayerTiles
from fastswin.ops.cluster_mlp.config import config_blocker, default_cluster_mlp_config

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): fewest and most rows of a batch.
ClusterMlps = Mapping[tuple[int, int], Pair]

#: The engine's, as whole models on an H200 chose (docs/performance.md).
CLUSTER_MLPS: ClusterMlps = {(1, 384): (640, 1664)}


def choose_cluster_mlp(
    table: ClusterMlps,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, LayerTiles],
    *,
    version: int,
    M: int,
    C: int,
    hidden: int,
) -> bool:
    """Change one stage's words and tiles where the table and the kernel take its MLP half.

    Args:
        table: fewest and most rows by version and channels.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP.

    Returns:
        Whether the MLP half is such a kernel.
    """
    fewest, most = table.get((version, C), (1, 0))
    if not fewest <= M <= most or choice["mlp"] in ("inside", "fused"):
        return False
    tiles = default_cluster_mlp_config(M, C)
    if tiles is None:
        reasons["cluster_mlp"] = f"no tiles for {M} rows of {C} channels"
        return False
    blocker = config_blocker(tiles, M, C, hidden) or why_no_gluon("fastswin.ops.cluster_mlp.kernel")
    if blocker:
        reasons["cluster_mlp"] = blocker
        return False
    for layer in ("fc1", "fc2"):
        launch.pop(layer, None)
    launch["mlp"], choice["mlp"] = tiles, "fused"
    reasons["mlp"] = f"{M} rows: hidden units stay in the registers of a cluster's programs"
    our_proj(choice, reasons, launch, M, C)
    return True
