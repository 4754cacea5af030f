"""The bench of products in clusters: which forms of a shape it compares."""

from __future__ import annotations

import dataclasses

import pytest

from fastswin.bench.op_cluster_linear_problems import (
    LAYERS,
    RINGS,
    STAGES,
    Shape,
    candidates,
    copies,
    forms,
    one_shot_tiles,
    others,
    programs,
    told,
)
from fastswin.engine.cluster_stage import CLUSTER_STAGES
from fastswin.ops.cluster_linear.choice import default_cluster_linear_config
from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker
from fastswin.ops.linear.config import OneShotConfig, one_shot_blocker

ALL = [Shape(layer, *stage) for stage in STAGES for layer in LAYERS]


def alone(tiles):
    """The same tiles without clusters that share."""
    return dataclasses.replace(tiles, share_rows=1, share_columns=1)


def tile_of(tiles):
    """What is multiplied, whoever shares it and however long the ring is."""
    return dataclasses.replace(alone(tiles), slots=0)


@pytest.mark.parametrize("shape", ALL, ids=str)
def test_every_shape_has_tiles_with_full_rings_and_something_beside_them(shape):
    M, N, K = shape.sizes
    found = candidates(shape)
    own = default_cluster_linear_config(M, N, K)
    assert own in found
    assert 70 >= len(found) == len(set(found)) >= 2
    for tiles in found:
        assert config_blocker(tiles, M, N, K) is None
        if tile_of(tiles) == tile_of(own):
            continue
        longer = dataclasses.replace(tiles, slots=tiles.slots + 1)
        assert config_blocker(longer, M, N, K) is not None
        assert tiles.slots >= 0.6 * tiles.steps(K)
        assert 20 <= programs(shape, tiles) <= 420
        assert tiles == alone(tiles)
    assert alone(own) in found
    assert forms(shape)[: len(others(shape))] == list(others(shape))
    assert 3 <= copies(shape) <= 20
    assert 2 * N * K * copies(shape) <= 400 << 20


@pytest.mark.parametrize("shape", [Shape("fc1", 576, 512), Shape("fc2", 49, 1536)], ids=str)
def test_the_operators_own_tile_comes_with_shorter_rings(shape):
    own = default_cluster_linear_config(*shape.sizes)
    found = {tiles.slots for tiles in candidates(shape) if tile_of(tiles) == tile_of(own)}
    assert found >= {slots for slots in RINGS if slots <= own.slots} | {own.slots}


def test_candidates_are_of_every_kind_and_not_too_many():
    found = [tiles for shape in ALL for tiles in candidates(shape)]
    assert {tiles.block_m for tiles in found} == {16, 32, 64, 128}
    assert {tiles.block_n for tiles in found} == {64, 128}
    assert {tiles.block_k for tiles in found} == {64, 128, 256}
    assert {tiles.splits for tiles in found} == {1, 2, 4, 8}
    assert 20 * len(ALL) <= len(found) <= 40 * len(ALL)


def test_few_rows_have_the_operators_own_choice():
    """Whose programs are fewer than a bench of stages looks at."""
    shape = Shape("proj", 20, 128)
    own = default_cluster_linear_config(*shape.sizes)
    assert candidates(shape)[0] == own
    assert {tile_of(tiles) for tiles in candidates(shape)} == {tile_of(own)}
    assert programs(shape, own) < 20


def test_shapes_are_stages_of_the_engine_and_proj_is_its_own():
    """Rows at batch 1 are among those that the engine's table has in clusters."""
    for rows, channels in STAGES:
        assert rows <= CLUSTER_STAGES[1, channels]
        tiles = one_shot_tiles(Shape("proj", rows, channels), 132)
        assert one_shot_blocker(channels) is None
        assert channels % tiles.block_n == 0  # statistics are of equal parts
    assert one_shot_tiles(Shape("proj", 196, 384), 132) == OneShotConfig(16, 64, 4)


def test_a_form_in_a_line():
    shape = Shape("fc2", 196, 384)
    tiles = ClusterLinearConfig(64, 128, 4, 6)
    assert told(shape, tiles) == "64x128 splits 4, steps of 64, ring 6 of 6, 48 programs"
    tiles = ClusterLinearConfig(32, 64, 2, 2, 256)
    assert told(shape, tiles) == "32x64 splits 2, steps of 256, ring 2 of 3, 84 programs"
    shared = dataclasses.replace(tiles, share_rows=2, share_columns=4)
    assert told(shape, shared) == f"{told(shape, tiles)}, 2 x 4 tiles share"
    assert (str(shape), shape.sizes) == ("fc2 196x384", (196, 384, 1536))
    assert told(shape, "split_k + join") == "split_k + join"
