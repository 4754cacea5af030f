"""Tiles and runs of attention's backward follow from the shape."""

from __future__ import annotations

import pytest

from fastswin.ops.window_attention.backward_config import (
    TileConfig,
    TiledBackwardConfig,
    default_backward_config,
    exact_tail,
    number_of_runs,
    takes_whole_windows,
)


@pytest.mark.parametrize("tokens", range(1, 600, 11))
def test_tiles_cover_every_token_once(tokens):
    for head_dim, itemsize in ((32, 2), (32, 4), (128, 2)):
        config = default_backward_config(tokens, head_dim, itemsize)
        if takes_whole_windows(tokens, head_dim, itemsize):
            continue
        assert isinstance(config, TiledBackwardConfig)
        for tile in (config.dq, config.dkv):
            steps = len(range(0, tokens - tile.tail, tile.walked))
            covered = steps * tile.walked + tile.tail
            assert tokens <= covered < tokens + tile.walked
            assert not tile.tail or steps == tokens // tile.walked


def test_windows_of_144_take_pipelined_tiles_and_dbias_along():
    config = default_backward_config(144, 32, 2)
    assert config.dq == TileConfig(64, 32, 16, num_warps=4, num_stages=3)
    assert config.dkv == TileConfig(16, 64, 16, num_warps=2, num_stages=2)
    assert config.dbias is None


def test_a_third_stage_of_dbias_is_for_cards_with_room():
    stages = {c: default_backward_config(576, 32, 2, c).dbias.num_stages
              for c in ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))}  # fmt: skip
    assert stages == {(8, 0): 2, (8, 6): 2, (9, 0): 3, (10, 0): 3, (12, 0): 2}


def test_runs_follow_from_the_shape():
    assert [number_of_runs(264, heads, 8192) for heads in (3, 6, 12, 24)] == [88, 44, 22, 11]
    assert number_of_runs(264, 500, 10) == 1
    assert number_of_runs(264, 3, 10) == 10
    assert [exact_tail(144, w) for w in (128, 64, 32, 16)] == [16, 16, 16, 0]
    assert TileConfig(16, 128).tail == 0
