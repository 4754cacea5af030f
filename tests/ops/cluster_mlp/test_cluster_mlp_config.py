"""Tiles of the MLP in clusters: what is legal, what fits, and in what order weights are packed."""

from __future__ import annotations

import pytest
import torch

from fastswin.ops.cluster_mlp import exchange
from fastswin.ops.cluster_mlp.config import (
    MAX_SHARED_BYTES,
    TAIL_BARRIERS,
    TILE_BYTES,
    ClusterMlpConfig,
    config_blocker,
    default_cluster_mlp_config,
    why_no_cluster_mlp,
)
from fastswin.ops.cluster_mlp.packing import channel_order, pack_mlp
from fastswin.ops.linear.vectors import row_sums


def test_numbers_of_the_widest_stages():
    """384 channels: x takes 96 KB, the ring 8 of 18 tiles; 512: 128 KB and 6 of 32."""
    small, wide = (ClusterMlpConfig(128, 8) for _ in range(2))
    assert (small.hidden(384), small.tiles(384), small.slots(384)) == (192, 18, 8)
    assert (wide.hidden(512), wide.tiles(512), wide.slots(512)) == (256, 32, 6)
    assert (small.rows, small.warps) == (16, 8)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("C", [256, 384, 512, 768, 1024])
@pytest.mark.parametrize("programs", [4, 8, 16])
@pytest.mark.parametrize("block_m", [64, 128])
def test_legal_tiles_fit(block_m, programs, C, offset):
    config = ClusterMlpConfig(block_m, programs)
    if config_blocker(config, 1568, C, 4 * C) is None:
        slots = config.slots(C, offset)
        assert config.shared_bytes(C, offset) <= MAX_SHARED_BYTES
        rest = MAX_SHARED_BYTES - config.shared_bytes(C, offset)
        assert slots == config.tiles(C) or rest < TILE_BYTES
        assert 8 * (C // 128 + 2 + slots) <= TAIL_BARRIERS


@pytest.mark.parametrize(
    ("config", "M", "C", "H", "reason"),
    [
        (ClusterMlpConfig(32, 8), 100, 384, 1536, "64 or 128 rows"),
        (ClusterMlpConfig(128, 6), 100, 384, 1536, "4, 8 or 16 programs"),
        (ClusterMlpConfig(128, 8), 100, 384, 1024, "4 times"),
        (ClusterMlpConfig(128, 8), 100, 192, 768, "multiple of 128"),
        (ClusterMlpConfig(128, 4), 100, 128, 512, "from 256 on"),
        (ClusterMlpConfig(128, 4), 100, 384, 1536, "128 or 192 or 256 hidden units"),
        (ClusterMlpConfig(128, 16), 100, 768, 3072, "room for 2 weight tiles"),
        (ClusterMlpConfig(128, 8), 2**23, 384, 1536, "32 bits"),
    ],
)
def test_reasons(config, M, C, H, reason):
    found = config_blocker(config, M, C, H)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(("M", "C"), [(1568, 384), (1568, 512), (784, 384), (784, 512), (392, 768)])
def test_measured_tiles_are_legal(M, C):
    config = default_cluster_mlp_config(M, C)
    assert config is not None
    assert config_blocker(config, M, C, 4 * C) is None


def test_other_shapes_have_none():
    assert default_cluster_mlp_config(1568, 192) is None
    assert default_cluster_mlp_config(6272, 384) is None


def test_only_half_precision_on_a_gpu():
    assert "half precision" in why_no_cluster_mlp(torch.device("cuda"), torch.float32)
    assert "need a GPU" in why_no_cluster_mlp(torch.device("cpu"), torch.float16)


def test_channels_stand_where_a_thread_has_eight_neighbours():
    """Places 2 q and 2 q + 1 of every 8 are thread q's: of 32 channels 8 q to 8 q + 7."""
    order = channel_order(64)
    assert sorted(order.tolist()) == list(range(64))
    for first in (0, 32):
        for q in range(4):
            places = [first + 8 * i + 2 * q + e for i in range(4) for e in range(2)]
            assert order[places].tolist() == list(range(first + 8 * q, first + 8 * q + 8))


@pytest.mark.parametrize(("C", "programs"), [(384, 8), (512, 8), (256, 8), (768, 16)])
def test_packed_tiles(C, programs):
    """Each weight once, each program's where the kernel's products look for it."""
    H = 4 * C
    fc1 = torch.arange(H * C, dtype=torch.float64).view(H, C)
    fc2 = -1 - torch.arange(H * C, dtype=torch.float64).view(C, H)
    config = ClusterMlpConfig(128, programs)
    tiles = pack_mlp(fc1, fc2, programs).view(programs, config.tiles(C), 128, 64)
    assert len(tiles.unique()) == 2 * H * C
    order, hidden, program = channel_order(C), H // programs, programs - 1
    units = slice(program * hidden, (program + 1) * hidden)
    own1, own2 = fc1[units][:, order], fc2[order][:, units]
    found = iter(tiles[program])
    others = own1[128:]
    for step in range(C // 64):
        columns = slice(64 * step, 64 * step + 64)
        assert torch.equal(next(found), own1[:128, columns])
        if len(others) == 128:
            assert torch.equal(next(found), others[:, columns])
        elif len(others) == 64 and step % 2:
            before = slice(64 * step - 64, 64 * step)
            assert torch.equal(next(found), torch.cat((others[:, before], others[:, columns])))
    for row in range(0, C, 128):
        for unit in range(0, hidden, 64):
            assert torch.equal(next(found), own2[row : row + 128, unit : unit + 64])
    assert next(found, None) is None


def test_sums_are_of_what_is_multiplied():
    weight = torch.randn(8, 384).half()
    assert torch.equal(row_sums(weight), weight.double().sum(1).float())


@pytest.mark.parametrize("programs", [4, 8, 16])
@pytest.mark.parametrize("block_m", [64, 128])
def test_threads_of_a_row_are_neighbours_of_one_warp(block_m, programs):
    """Triton 3.6 adds up a row with lanes next to each other, whatever the layout says: with a bit
    of rows between those of columns statistics were wrong on the card, and right on a CPU.
    """
    layout = exchange.rows_layout(block_m, programs)
    along = [base[1] != 0 for base in layout.lane_bases]
    assert along == sorted(along, reverse=True)
    assert all(base[1] == 0 for base in layout.warp_bases)
