"""Tiles of the product in clusters by shape: what was fastest on an H200, else a model of it."""

from __future__ import annotations

import itertools

from fastswin._triton.tiles import cdiv
from fastswin.ops.cluster_linear.config import (
    BLOCK_K,
    MAX_SHARED_BYTES,
    ClusterLinearConfig,
    config_blocker,
    ring_slots,
)

#: Rows up to a number, then block_m, block_n, splits and block_k of their fastest tiles; behind
#: them, where they differ from a single one and from as many as fit, how many of a cluster share
#: the weight and x, and slots of the ring.
Measured = tuple[tuple[int, ...], ...]

#: Fastest tiles by (N, K) of the named variants (H200: chains that start with a cold L2, then whole
#: models where a change was worth it); patch merging's products among them.
MEASURED: dict[tuple[int, int], Measured] = {
    (128, 128): ((3200, 32, 64, 1, 64),),
    (384, 128): ((3200, 32, 64, 1, 64),),
    (512, 128): ((3200, 32, 64, 1, 64),),
    (128, 512): ((3200, 32, 64, 1, 128),),
    (192, 192): ((3200, 32, 64, 1, 64), (6400, 64, 64, 1, 64)),
    (768, 192): ((3200, 32, 128, 1, 64), (9216, 64, 128, 1, 64)),
    (192, 384): ((1024, 32, 64, 1, 128), (6400, 64, 64, 1, 128)),
    (192, 768): (
        (1024, 32, 64, 1, 128),
        (2000, 64, 64, 1, 128),
        (3200, 128, 64, 1, 128),
        (9216, 64, 64, 1, 64, 1, 1, 6),
    ),
    (256, 256): ((2400, 32, 64, 1, 64),),
    (768, 256): ((2400, 32, 128, 1, 128),),
    (1024, 256): ((2000, 32, 128, 1, 128), (2400, 64, 64, 1, 256)),
    (256, 512): ((1024, 64, 64, 1, 64),),
    (256, 1024): ((1024, 32, 64, 1, 128), (2000, 64, 64, 1, 128), (2400, 64, 128, 1, 64)),
    (384, 384): (
        (256, 32, 64, 1, 128),
        (640, 32, 64, 1, 64),
        (1024, 32, 128, 1, 64),
        (1664, 32, 64, 1, 128),
        (2304, 64, 64, 1, 64),
    ),
    (1152, 384): ((512, 64, 64, 1, 64), (1000, 64, 128, 1, 64), (2304, 64, 128, 1, 64, 1, 1, 4)),
    (1536, 384): (
        (640, 32, 64, 1, 128),
        (2304, 128, 128, 1, 64, 1, 1, 4),
    ),
    (384, 768): ((256, 32, 64, 1, 128), (640, 32, 64, 1, 256), (1024, 64, 64, 1, 64)),
    (384, 1536): (
        (256, 32, 64, 2, 128),
        (640, 32, 64, 1, 128),
        (1024, 64, 128, 2, 128),
        (2304, 64, 128, 1, 64, 1, 1, 6),
    ),
    (512, 512): (
        (256, 32, 64, 1, 128),
        (640, 32, 64, 1, 64),
        (1000, 64, 64, 1, 64),
        (1664, 64, 128, 1, 64),
    ),
    (1536, 512): (
        (256, 64, 64, 1, 128),
        (640, 128, 64, 1, 64, 1, 1, 6),
        (1000, 128, 128, 1, 64, 1, 1, 5),
    ),
    (2048, 512): (
        (256, 64, 64, 1, 256),
        (400, 64, 128, 1, 128),
        (1000, 128, 128, 1, 64, 1, 1, 5),
    ),
    (512, 1024): ((256, 16, 64, 1, 256), (640, 64, 64, 1, 128)),
    (512, 2048): (
        (256, 32, 64, 2, 128),
        (400, 64, 64, 2, 128),
        (1000, 64, 128, 2, 64, 1, 1, 6),
    ),
    (768, 768): (
        (64, 32, 64, 1, 256),
        (256, 32, 64, 1, 128),
        (400, 64, 64, 1, 64, 1, 1, 8),
        (640, 64, 64, 1, 128, 1, 1, 4),
    ),
    (2304, 768): (
        (100, 64, 64, 1, 128),
        (256, 64, 128, 1, 128),
        (400, 64, 128, 1, 64, 1, 1, 6),
        (640, 128, 128, 1, 64, 1, 1, 4),
    ),
    (3072, 768): (
        (100, 64, 64, 1, 256),
        (256, 64, 128, 1, 64, 2, 4, 6),
        (640, 128, 128, 1, 64, 1, 1, 5),
    ),
    (768, 1536): ((64, 32, 64, 2, 256), (256, 32, 64, 1, 128)),
    (768, 3072): (
        (49, 64, 64, 4, 64),
        (100, 64, 64, 4, 128),
        (256, 64, 128, 4, 64, 2, 1, 6),
        (400, 64, 128, 2, 64),
        (640, 64, 128, 2, 64, 1, 1, 6),
    ),
    (1024, 1024): ((64, 16, 64, 1, 128), (256, 32, 64, 1, 256)),
    (3072, 1024): ((64, 64, 64, 2, 256), (256, 64, 64, 1, 256)),
    (4096, 1024): ((64, 64, 64, 1, 128), (256, 64, 128, 1, 64)),
    (1024, 2048): ((64, 32, 64, 2, 256), (256, 64, 64, 2, 128)),
    (1024, 4096): ((64, 64, 64, 4, 128), (256, 64, 128, 4, 64)),
    (1536, 1536): ((64, 64, 64, 2, 128), (144, 32, 64, 1, 128)),
    (4608, 1536): ((64, 64, 128, 2, 64, 1, 1, 6), (144, 64, 128, 1, 64, 3, 1, 6)),
    (6144, 1536): ((64, 64, 128, 2, 64, 1, 1, 6), (144, 128, 128, 1, 64, 1, 1, 5)),
    (1536, 3072): ((64, 64, 64, 4, 128),),
    (1536, 6144): ((64, 64, 64, 4, 64, 1, 1, 10), (144, 128, 128, 4, 64)),
}

#: Programs that a card of 132 multiprocessors holds at once, one each, by splits: clusters do not
#: cross the groups that its multiprocessors stand in.
AT_ONCE = {1: 132, 2: 128, 4: 124, 8: 120}


def default_cluster_linear_config(M: int, N: int, K: int) -> ClusterLinearConfig | None:
    """The measured tiles, or those that a model of the measurements expects to be fastest.

    None where the kernel takes no tiles.
    """
    for rows, *tile in MEASURED.get((N, K), ()):
        if rows >= M:
            return _with_ring(K, *tile)
    candidates = [
        _with_ring(K, block_m, block_n, splits)
        for block_m, block_n, splits in itertools.product((64, 128), (64, 128), AT_ONCE)
    ]
    able = [config for config in candidates if config_blocker(config, M, N, K) is None]
    return min(able, key=lambda config: _expected_us(config, M, N, K), default=None)


def _with_ring(
    K: int, block_m: int, block_n: int, splits: int, block_k: int = BLOCK_K, share_rows: int = 1,
    share_columns: int = 1, slots: int = 0,
) -> ClusterLinearConfig:  # fmt: skip
    """Tiles with a ring of so many slots, 0 for as many as there are steps or fit."""
    slots = slots or ring_slots(block_m, block_n, splits, K, block_k=block_k)
    return ClusterLinearConfig(
        block_m, block_n, splits, slots, block_k, share_rows, share_columns
    )  # fmt: skip


def _expected_us(config: ClusterLinearConfig, M: int, N: int, K: int) -> float:
    """Microseconds of a product, fitted to 315 that were measured (mean loss of its choices 6 %).

    Each program costs, each wave of them costs, and bytes that one multiprocessor fetches do.
    """
    programs = cdiv(M, config.block_m) * (N // config.block_n) * config.splits
    places = AT_ONCE[config.splits]
    waves = cdiv(programs, places * max(1, MAX_SHARED_BYTES // (config.shared_bytes() + 1024)))
    rows_and_columns = 0.074 * config.block_m + 0.062 * config.block_n
    fetched = cdiv(programs, places) * config.steps(K) * rows_and_columns / 64
    wide = 1.4 * (config.block_m == 128) + 1.2 * (config.block_n == 128)
    return 1.3 * programs / 132 + 2.1 * waves + fetched + wide + 0.3 * (config.splits > 1)


#: Tiles with a post-norm: all of a row are one cluster, so columns are few. As MEASURED,
#: without shares and slots.
MEASURED_POST_NORM: dict[tuple[int, int], Measured] = {
    (192, 192): ((1024, 64, 64, 1, 64),),
    (192, 768): ((1024, 64, 64, 1, 128),),
    (256, 256): ((1024, 64, 64, 1, 64),),
    (256, 1024): ((1024, 64, 64, 1, 128),),
    (384, 384): ((640, 64, 64, 1, 64),),
    (384, 1536): ((640, 64, 64, 2, 128),),
    (512, 512): ((640, 64, 64, 2, 64),),
    (512, 2048): ((640, 64, 64, 2, 128),),
    (768, 768): ((256, 64, 64, 1, 64),),
}


def default_post_norm_config(M: int, N: int, K: int) -> ClusterLinearConfig | None:
    """The measured tiles of a product with a post-norm; None where nothing was measured."""
    for rows, block_m, block_n, splits, block_k in MEASURED_POST_NORM.get((N, K), ()):
        if rows >= M:
            slots = ring_slots(block_m, block_n, splits, K, N, True, block_k)
            across = N // block_n
            return ClusterLinearConfig(block_m, block_n, splits, slots, block_k, 1, across)
    return None
