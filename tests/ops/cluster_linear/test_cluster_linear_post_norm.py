"""Results normalised behind the product: rows that several tiles of a cluster share."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cluster_linear_cases import check_post_norm, make_post_norm
from cluster_linear_threads import config_of, until_the_first_has_ended
from exchange_ptx import rows_places, tile_places
from gluon_clusters import me, send_statistics, wait_bytes

from fastswin.ops.cluster_linear.choice import MEASURED_POST_NORM, default_post_norm_config
from fastswin.ops.cluster_linear.config import (
    MAX_PROGRAMS,
    MAX_SHARED_BYTES,
    ClusterLinearConfig,
    config_blocker,
    ring_slots,
)

torch.set_num_threads(1)

ROWS = [(*shape, *row) for shape, ranges in MEASURED_POST_NORM.items() for row in ranges]

TILES = list(itertools.product((64, 128), (64, 128), (1, 2, 4, 8)))


def config_for(block_m, block_n, splits, N, K):
    slots = ring_slots(block_m, block_n, splits, K, N, post_norm=True)
    return ClusterLinearConfig(block_m, block_n, splits, slots)


@pytest.mark.parametrize("M", [49, 196])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64), (128, 128)], ids=str)
def test_post_norm(tile, splits, M, run):
    """Two tiles a row, of three where programs are few."""
    N, K = tile[1] * (3 if splits == 1 else 2), 128 * splits
    dtype = torch.bfloat16 if M == 49 else torch.float16
    made = make_post_norm(M, N, K, dtype=dtype)
    check_post_norm(run(made, config_for(*tile, splits, N, K), in_place=M == 196), made)


@pytest.mark.parametrize("N", [64, 128])
def test_rows_of_one_tile(N, run):
    """Clusters of one program, which still have a tail."""
    made = make_post_norm(49, N, 256)
    check_post_norm(run(made, config_for(64, N, 1, N, 256)), made)


@pytest.mark.parametrize(("N", "K", "rows", "block_m", "block_n", "splits", "block_k"), ROWS)
def test_measured_tiles_are_able(N, K, rows, block_m, block_n, splits, block_k):
    config = default_post_norm_config(rows, N, K)
    assert (config.block_m, config.block_n, config.splits) == (block_m, block_n, splits)
    assert config.block_k == block_k
    assert config.share_columns == N // block_n  # x is copied once for all of a row
    assert config_blocker(config, 1, N, K, post_norm=True) is None
    assert config_blocker(config, rows, N, K, post_norm=True) is None
    more = dataclasses.replace(config, slots=config.slots + 1)
    assert config.slots == config.steps(K) or more.shared_bytes(N, True) > MAX_SHARED_BYTES
    assert config.shared_bytes(N, True) <= MAX_SHARED_BYTES
    assert config.programs(N, True) == splits * N // block_n <= MAX_PROGRAMS
    assert default_post_norm_config(10**6, N, K) is None


def test_measured_ranges_ascend():
    for ranges in MEASURED_POST_NORM.values():
        rows = [row[0] for row in ranges]
        assert rows == sorted(set(rows))


def test_a_row_of_more_programs_than_a_cluster_is_refused():
    config = ClusterLinearConfig(64, 64, 2, 2)
    assert config_blocker(config, 49, 512, 512, post_norm=True) is None
    reason = "a cluster of 18 programs, of 16 at most"
    assert config_blocker(config, 49, 576, 512, post_norm=True) == reason
    assert config_blocker(config, 49, 576, 512) is None


@pytest.mark.parametrize("block_m", [16, 32])
def test_narrow_tiles_are_refused(block_m):
    config = ClusterLinearConfig(block_m, 64, 1, 2)
    reason = f"a post-norm needs tiles of 64 rows or more, not {block_m}"
    assert config_blocker(config, 49, 128, 256, post_norm=True) == reason
    assert config_blocker(config, 49, 128, 256) is None


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_one_thread_sends_each_rows_statistics(tile):
    """Those that send_statistics takes: the first of four lanes, of warps that share rows one."""
    block_m, _, splits = tile
    row, _ = rows_places(*tile) if splits > 1 else tile_places(*tile[:2])
    warps = min(block_m // 16, splits)
    sends = torch.arange(2 * block_m) & (32 * (warps - 1) + 3) == 0
    own = [number for thread in row[sends].tolist() for number in set(thread)]
    assert sorted(own) == list(range(block_m // splits))


def test_large_offsets_do_not_cancel(run):
    made = make_post_norm(49, 128, 256)
    made["bias"] += 200
    check_post_norm(run(made, config_for(64, 64, 2, 128, 256)), made)


@pytest.mark.parametrize("mistake", ["unread", "others"])
def test_statistics_that_are_not_the_rows_own_are_noticed(mistake, run):
    """Read before they have come; another row's."""

    def wait(barrier):
        if mistake == "others" or barrier == me().first or me().rank != 0:
            wait_bytes(barrier)

    def send(mean, deviations, address, *more):
        if mistake == "unread" and me().rank != 0:
            until_the_first_has_ended()
        if mistake == "others" and me().rank == 1:
            mean, deviations = mean.roll(1), deviations.roll(1)
        send_statistics(mean, deviations, address, *more)

    made = make_post_norm(49, 128, 256)
    made["bias"] += torch.arange(128) % 3
    with pytest.raises(AssertionError):
        check_post_norm(
            run(made, config_for(64, 64, 2, 128, 256), wait_bytes=wait, send_statistics=send), made
        )


def test_a_ring_shorter_than_the_steps(run):
    made = make_post_norm(49, 128, 768)
    check_post_norm(run(made, config_of(64, 64, 2, 768, 2), in_place=True), made)
