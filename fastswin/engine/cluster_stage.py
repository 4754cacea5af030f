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
from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.attention_half.hopper_config import (
    HopperHeadsConfig,
    HopperWholeConfig,
    HopperWindowsConfig,
    hopper_heads_blocker,
)
from fastswin.ops.cluster_linear.choice import (
    default_cluster_linear_config,
    default_post_norm_config,
)
from fastswin.ops.cluster_linear.config import gluon_blocker
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): most rows of a batch.
ClusterStages = Mapping[tuple[int, int], int]

#: The engine's, as whole models on an H200 chose (docs/performance.md). V2's 512 rows of 512
#: channels (batch 2) and of 768 (batch 8) were slower, as V1's 1,568 of 512 (Swin-B at 8); 392 of
#: 1,024 gain nothing.
CLUSTER_STAGES: ClusterStages = {
    (1, 128): 3136,
    (1, 192): 3136,
    (1, 256): 3136,
    (1, 384): 1024,
    (1, 512): 784,
    (1, 768): 400,
    (1, 1024): 300,
    (1, 1536): 64,
    (2, 192): 1024,
    (2, 256): 1024,
    (2, 384): 640,
    (2, 512): 256,
    (2, 768): 256,
    (2, 1024): 256,
}

#: By the same, most rows of stages in the table whose windows have more than 64 tokens, which have
#: no other form of Hopper's: Swin-L at 384 pixels takes 1.5, 1.5, 2.6 and 1.4 % less with its four,
#: and 1.7 at batch 2, Swin-B at batch 2 8.9. 9,216 rows of 128 channels cost Swin-B 1 %.
LONG_WINDOW_ROWS: ClusterStages = {
    (1, 192): 9216,
    (1, 384): 2304,
    (1, 512): 1152,
    (1, 768): 1152,
    (1, 1536): 144,
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
    table: ClusterStages, shape: StageShape, chosen: Choice
) -> tuple[str, ...] | None:
    """Change one stage's words and tiles where the table and the kernel take its products.

    Args:
        table: most rows by version and channels.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.

    Returns:
        Layers whose product has V2's norm behind it in its kernel; None where nothing changed.
    """
    words, reasons, M, C = chosen.words, chosen.reasons, shape.M, shape.C
    apart = words["attention"] == "triton" or (
        words["attention"] == "fused" and words["proj"] != "inside"
    )
    most = table.get(shape.key, 0)
    if most and shape.tokens > 64:
        most = max(most, LONG_WINDOW_ROWS.get(shape.key, 0))
    if M > most or not apart:
        return None
    if blocker := gluon_blocker():
        reasons["clusters"] = blocker
        return None
    hopper = hopper_heads_blocker(C, shape.num_heads, shape.window_size, shape.map_size)
    few = shape.windows <= HOPPER_HEADS.get(shape.key, 0)
    by_heads = few and hopper is None and words["attention"] == "triton"
    sizes = {
        "qkv": (3 * C, C), "proj": (C, C), "fc1": (shape.hidden, C), "fc2": (C, shape.hidden),
    }  # fmt: skip
    if by_heads or words["qkv"] == "inside":
        del sizes["qkv"]
    tiles: dict[str, LayerTiles] = {}
    normed = []
    for layer, (N, K) in sizes.items():
        if shape.version == 2 and layer in ("proj", "fc2"):
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
        chosen.launch.pop(layer, None)
    chosen.launch |= tiles
    if by_heads:
        words |= {"qkv": "inside", "attention": "fused"}
        why = f"{shape.windows} windows: one kernel per window and head"
        reasons |= {"qkv": why, "attention": why}
    if words["attention"] == "fused":
        if hopper is None:
            chosen.launch["attention"] = HopperHeadsConfig()
        else:
            reasons["attention"] += f"; not Hopper's: {hopper}"
    for layer, word in (("qkv", "clusters"), ("proj", "fused"), ("mlp", "clusters")):
        if words[layer] != "inside":
            words[layer] = word
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
