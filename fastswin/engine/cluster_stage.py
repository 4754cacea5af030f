"""Stages of few rows whose products run in clusters (ops/cluster_linear), launched ahead.

    V1   proj and fc2 add onto the stream and leave its rows' statistics; LayerNorm stands behind
         the product of the next reader: fc1, qkv, or attention by heads
    V2   the norms stand behind proj and fc2, in their kernels where a cluster holds a row

In the plan's words: mlp "clusters", qkv "clusters" unless it is in attention's kernel, proj
"fused", and the merging in front "tiled", which leaves the first block's statistics. Two launches
of LayerNorm, or of a join, less a block. Compute capability 9.0, half precision.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from fastswin.engine.small_batch import LayerTiles
from fastswin.engine.stage_plan import StagePlan
from fastswin.ops.attention_half.hopper_config import (
    HopperHeadsConfig,
    HopperWholeConfig,
    HopperWindowsConfig,
    hopper_heads_blocker,
)
from fastswin.ops.cluster_linear.config import (
    default_cluster_linear_config,
    default_post_norm_config,
    gluon_blocker,
)
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): most rows of a batch.
ClusterStages = Mapping[tuple[int, int], int]

#: The engine's, as whole models on an H200 chose (docs/performance.md). V2's 512 rows of 512
#: channels (batch 2) and of 768 (batch 8) were slower, as V1's 576 of 768 (Swin-L at 384 pixels).
CLUSTER_STAGES: ClusterStages = {
    (1, 128): 3136,
    (1, 192): 3136,
    (1, 256): 1568,
    (1, 384): 1024,
    (1, 512): 640,
    (1, 768): 256,
    (1, 1024): 256,
    (1, 1536): 64,
    (2, 192): 1024,
    (2, 256): 1024,
    (2, 384): 640,
    (2, 512): 256,
    (2, 768): 256,
    (2, 1024): 256,
}

#: By the same, most windows of such a stage whose LayerNorm, qkv and attention are one kernel of
#: Hopper's, by heads (ops/attention_half), where :data:`FUSED_ATTENTION` has none for every card.
HOPPER_HEADS: Mapping[tuple[int, int], int] = {
    (1, 128): 64,
    (1, 192): 64,
    (1, 512): 13,
    (1, 768): 5,
}

#: Most rows behind a merging in clusters between stages that are launched ahead: the library's
#: product there costs both of them their start (Swin-T at 8 393 us for 386, S 695 for 683).
MERGED = 6400


def choose_clusters(
    table: ClusterStages,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, LayerTiles],
    *,
    version: int,
    M: int,
    C: int,
    hidden: int,
    num_heads: int,
    window_size: Pair,
    map_size: Pair,
) -> tuple[str, ...] | None:
    """Change one stage's words and tiles where the table and the kernel take its products.

    Args:
        table: most rows by version and channels.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP.
        num_heads: of the stage.
        window_size, map_size: in tokens.

    Returns:
        Layers whose product has V2's norm behind it in its kernel; None where nothing changed.
    """
    apart = choice["attention"] == "triton" or (
        choice["attention"] == "fused" and choice["proj"] != "inside"
    )
    if M > table.get((version, C), 0) or not apart:
        return None
    if blocker := gluon_blocker():
        reasons["clusters"] = blocker
        return None
    windows = M // (window_size[0] * window_size[1])
    hopper = hopper_heads_blocker(C, num_heads, window_size, map_size)
    few = windows <= HOPPER_HEADS.get((version, C), 0)
    by_heads = few and hopper is None and choice["attention"] == "triton"
    sizes = {"qkv": (3 * C, C), "proj": (C, C), "fc1": (hidden, C), "fc2": (C, hidden)}
    if by_heads or choice["qkv"] == "inside":
        del sizes["qkv"]
    tiles: dict[str, LayerTiles] = {}
    normed = []
    for layer, (N, K) in sizes.items():
        if version == 2 and layer in ("proj", "fc2"):
            whole_rows = default_post_norm_config(M, N, K)
            if whole_rows is not None:
                tiles[layer] = whole_rows
                normed.append(layer)
                continue
        found = default_cluster_linear_config(M, N, K)
        if found is None:
            reasons["clusters"] = f"{layer}: no tiles for {N} columns of {K} channels"
            return None
        tiles[layer] = found
    for layer in ("qkv", "proj", "fc1", "fc2", "mlp"):
        launch.pop(layer, None)
    launch |= tiles
    if by_heads:
        choice |= {"qkv": "inside", "attention": "fused"}
        why = f"{windows} windows: one kernel per window and head"
        reasons |= {"qkv": why, "attention": why}
    if choice["attention"] == "fused":
        if hopper is None:
            launch["attention"] = HopperHeadsConfig()
        else:
            reasons["attention"] += f"; not Hopper's: {hopper}"
    for layer, word in (("qkv", "clusters"), ("proj", "fused"), ("mlp", "clusters")):
        if choice[layer] != "inside":
            choice[layer] = word
            reasons[layer] = f"{M} rows: weights wait in shared memory, K cut in clusters"
    return tuple(normed)


def _all_ahead(stage: StagePlan) -> bool:
    """Whether all of a stage is kernels for compute capability 9.0 that are launched ahead."""
    kinds = HopperWholeConfig, HopperWindowsConfig, ClusterMlpConfig
    special = any(isinstance(tiles, kinds) for tiles in stage.launch.values())
    return stage.pdl and (special or stage.mlp == "clusters")


def merge_in_clusters(stages: tuple[StagePlan, ...], batch: int) -> tuple[StagePlan, ...]:
    """Mergings in front of clustered stages, and between two launched ahead, by their product."""
    planned = list(stages)
    for index, (stage, after) in enumerate(itertools.pairwise(stages)):
        M = batch * after.map_size[0] * after.map_size[1]
        ahead = M <= MERGED and _all_ahead(stage) and _all_ahead(after)
        few = after.mlp == "clusters" or ahead
        if not few or stage.merge not in ("triton", "tiled"):
            continue
        tiles = default_cluster_linear_config(M, 2 * stage.channels, 4 * stage.channels)
        if tiles is None:
            continue
        reasons = stage.reasons | {"merge": f"{M} rows: statistics for the first block"}
        planned[index] = dataclasses.replace(
            stage, merge="tiled", reasons=reasons, launch=stage.launch | {"merge": tiles}
        )
    return tuple(planned)
