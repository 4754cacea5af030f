"""Warps, programs and shared memory of products in clusters, as the configuration counts them."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest
import torch
from gluon_memory import Shared
from gluon_threads import bound_source

from fastswin.ops.cluster_linear import ring
from fastswin.ops.cluster_linear.config import MAX_SHARED_BYTES, ClusterLinearConfig
from fastswin.testing.aot import SHARED_MEMORY_LIMIT


@pytest.mark.parametrize(
    ("tile", "warps", "across", "narrow"),
    [((16, 64, 1), 4, 1, True), ((32, 128, 1), 8, 1, True), ((64, 64, 1), 4, 1, False),
     ((64, 128, 1), 8, 2, False), ((64, 128, 2), 4, 1, False), ((128, 64, 1), 8, 1, False),
     ((128, 128, 1), 8, 1, False)],
    ids=str,
)  # fmt: skip
def test_warps_for_16_lines_of_the_first_operand(tile, warps, across, narrow):
    """Two side by side where a program alone finishes 128 columns of 64 rows."""
    config = ClusterLinearConfig(*tile, 4)
    assert (config.warps, config.warps_across, config.narrow) == (warps, across, narrow)


def test_shared_memory_of_a_program():
    assert MAX_SHARED_BYTES == SHARED_MEMORY_LIMIT[90] * 1024
    wide = ClusterLinearConfig(32, 64, 2, 3, 256)
    assert (wide.head_bytes, wide.ring_bytes) == (128, 3 * 96 * 512)
    assert wide.tail_bytes() == 256 + 32 * 64 * 4
    assert wide.shared_bytes() == wide.ring_bytes + wide.tail_bytes()
    alone = ClusterLinearConfig(64, 128, 1, 6)
    assert (alone.tail_bytes(), alone.shared_bytes()) == (256, 6 * 192 * 128 + 256)
    shared = ClusterLinearConfig(64, 128, 4, 6)
    assert shared.tail_bytes() == 256 + 64 * 128 * 4
    assert shared.shared_bytes() == alone.shared_bytes() + 64 * 128 * 4


def test_statistics_of_a_post_norm_lie_behind_the_sums():
    """Of a program's rows 8 bytes from each tile of columns."""
    config = ClusterLinearConfig(64, 64, 2, 4)
    assert config.tail_bytes(384, True) == config.tail_bytes() + 6 * 32 * 8
    assert config.shared_bytes(384, True) == config.ring_bytes + config.tail_bytes(384, True)
    assert config.tail_bytes(384, False) == config.tail_bytes()


@pytest.mark.parametrize(
    ("slots", "head"), [(1, 128), (2, 128), (13, 128), (14, 128), (15, 256), (30, 256), (31, 384)]
)
def test_barriers_of_more_than_14_slots_need_a_longer_head(slots, head):
    config = ClusterLinearConfig(16, 64, 1, slots)
    assert config.head_bytes == head >= 16 + 8 * slots
    assert config.tail_bytes() == head + 128


@pytest.mark.parametrize(
    ("tile", "slots", "block_k", "ring"),
    [
        ((64, 64), 3, 64, 6 * 8192),
        ((64, 128), 2, 64, 3 * 16384),
        ((64, 128), 3, 64, 5 * 16384),  # four and a half
        ((128, 64), 1, 64, 2 * 16384),
        ((16, 64), 3, 64, 4 * 8192),  # three and three quarters
        ((16, 128), 9, 64, 11 * 16384),  # ten and an eighth
        ((16, 128), 1, 256, 5 * 16384),
        ((32, 128), 4, 64, 5 * 16384),
    ],
    ids=str,
)
def test_a_ring_is_whole_tiles_of_the_larger_operand(tile, slots, block_k, ring):
    config = ClusterLinearConfig(*tile, 1, slots, block_k)
    assert config.ring_bytes == ring
    assert 0 <= ring - slots * 2 * block_k * sum(tile) < 128 * max(tile)
    assert config.shared_bytes() == ring + config.tail_bytes()


def test_the_kernels_buffer_is_as_large_as_the_ring():
    """And its tiles, by number and by address, are those that have been asked for."""
    found = {"allocate_shared_memory": lambda dtype, shape, layout: Shared(dtype, shape)}
    tiles = bound_source(ring, "ring_tiles", lambda axis: None, 0, found)
    desc = types.SimpleNamespace(dtype=torch.float16, layout=None)
    forms = itertools.product((16, 32, 64, 128), (64, 128), (1, 2, 3, 5, 7), (64, 256))
    for block_m, block_n, slots, block_k in forms:
        config = ClusterLinearConfig(block_m, block_n, 1, slots, block_k)
        x, weight = tiles(desc, desc, slots * block_k // 64, block_m, block_n)
        assert (x.shape[1:], weight.shape[1:]) == ([block_m, 64], [block_n, 64])
        for operand in (x, weight):
            assert len(operand.items) == operand.shape[0]
            assert operand.shape[0] * operand.shape[1] * 128 == config.ring_bytes


def test_programs_of_a_cluster():
    shared = ClusterLinearConfig(64, 64, 2, 4, 64, 2, 3)
    assert (shared.columns(768, False), shared.programs(768, False)) == (3, 12)
    whole = ClusterLinearConfig(64, 64, 2, 4, 64, 1, 6)
    for config in (whole, dataclasses.replace(whole, share_columns=1)):
        assert (config.columns(384, True), config.programs(384, True)) == (6, 12)
