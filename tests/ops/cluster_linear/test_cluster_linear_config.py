"""Tiles of products in clusters: what is measured and chosen is able, what is not says why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastswin.ops.cluster_linear import config as module
from fastswin.ops.cluster_linear.choice import (
    AT_ONCE,
    MEASURED,
    default_cluster_linear_config,
)
from fastswin.ops.cluster_linear.config import (
    MAX_SHARED_BYTES,
    ClusterLinearConfig,
    config_blocker,
    ring_slots,
    why_no_cluster_linear,
)
from fastswin.testing.aot import SHARED_MEMORY_LIMIT

TILE = ClusterLinearConfig(64, 64, 1, 4)

ROWS = [
    pytest.param(N, K, row[0], row[1:], id=f"{row[0]} rows, {N} x {K}")
    for (N, K), ranges in MEASURED.items()
    for row in ranges
]

#: Columns and inputs of the published models' products that are whole tiles, by channels; patch
#: merging's among them.
PUBLISHED = sorted(
    {(N, K) for C in (96, 128, 192, 256, 384, 512, 768, 1024, 1536)
     for N, K in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (C, 2 * C)) if N % 64 == K % 64 == 0}
)  # fmt: skip


def tile_of(config):
    """What the tables say of a tile."""
    shares = config.share_rows, config.share_columns
    return config.block_m, config.block_n, config.splits, config.block_k, *shares


def with_shares(tile):
    """A row of the tables, which leaves out that nothing is shared, without slots."""
    assert len(tile) in (4, 6, 7)
    return (*tile, 1, 1)[:6] if len(tile) == 4 else tuple(tile[:6])


def slots_of(K, tile):
    """Slots of a row of the tables, which leaves out as many as there are steps or fit."""
    if len(tile) == 7:
        return tile[6]
    return ring_slots(*tile[:3], K, block_k=tile[3])


@pytest.mark.parametrize(("N", "K", "rows", "tile"), ROWS)
def test_measured_tiles_are_able(N, K, rows, tile):
    """Of one row and of as many as the range has; rings hold all steps, what fits, or less."""
    config = default_cluster_linear_config(rows, N, K)
    assert tile_of(config) == with_shares(tile)
    assert config_blocker(config, 1, N, K) is None
    assert config_blocker(config, rows, N, K) is None
    assert config.slots == slots_of(K, tile)
    most = dataclasses.replace(config, slots=ring_slots(*tile[:3], K, block_k=tile[3]))
    assert len(tile) < 7 or 2 <= config.slots < most.slots


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_measured_ranges_ascend(shape):
    rows = [row[0] for row in MEASURED[shape]]
    assert rows == sorted(set(rows))
    assert rows[0] > 0


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_a_range_ends_with_its_own_rows(shape):
    """One row more takes the next range, or the model's choice."""
    for number, (rows, *tiles) in enumerate(MEASURED[shape]):
        config = default_cluster_linear_config(rows, *shape)
        assert tile_of(config) == with_shares(tiles)
        assert config.slots == slots_of(shape[1], tiles)
        more = default_cluster_linear_config(rows + 1, *shape)
        assert config_blocker(more, rows + 1, *shape) is None
        if number + 1 < len(MEASURED[shape]):
            assert tile_of(more) == with_shares(MEASURED[shape][number + 1][1:])


@settings(deadline=None, max_examples=300)
@given(
    M=st.integers(1, 200_000),
    N=st.integers(1, 96).map(lambda n: 64 * n),
    K=st.integers(1, 96).map(lambda n: 64 * n),
)
def test_choices_are_able(M, N, K):
    """Of every legal shape: 64 rows and columns in one program take any."""
    config = default_cluster_linear_config(M, N, K)
    assert config is not None
    assert config_blocker(config, M, N, K) is None
    assert config.shared_bytes() <= MAX_SHARED_BYTES
    assert config.splits in AT_ONCE


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_choices_for_the_published_models_fit_the_card(shape):
    """From one window to a batch that fills the card; a barrier's ring and the tail included."""
    for M in (1, 49, 64, 144, 196, 576, 640, 784, 1024, 1568, 3136, 25_088):
        config = default_cluster_linear_config(M, *shape)
        assert config_blocker(config, M, *shape) is None
        assert config.shared_bytes() <= SHARED_MEMORY_LIMIT[90] * 1024
        ring = config.slots * 2 * config.block_k * (config.block_m + config.block_n)
        sums = 4 * config.block_m * config.block_n if config.splits > 1 else 0
        assert config.shared_bytes() >= ring + sums + 8 * config.slots
        assert min(config.steps(shape[1]), 2) <= config.slots <= config.steps(shape[1])


@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(49, 96, 384), (49, 32, 384), (49, 0, 384), (49, 64, 96), (49, 64, 0), (49, 64, 32),
     (2**23, 64, 256), (2**21 - 63, 1024, 128)],
    ids=str,
)  # fmt: skip
def test_no_choice_where_nothing_fits(M, N, K):
    assert default_cluster_linear_config(M, N, K) is None


@pytest.mark.parametrize("block_k", [64, 128, 256])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_a_ring_has_as_many_slots_as_fit_or_as_steps(block_m, block_n, splits, block_k):
    """Of the largest steps a single slot fits, which is a ring where there is one step."""
    for steps in (1, 2, 3, 5, 8, 12, 24, 96):
        K = block_k * splits * steps
        slots = ring_slots(block_m, block_n, splits, K, block_k=block_k)
        config = ClusterLinearConfig(block_m, block_n, splits, slots, block_k)
        assert config.steps(K) == steps
        if slots < steps:
            more = dataclasses.replace(config, slots=slots + 1)
            assert more.shared_bytes() > MAX_SHARED_BYTES
        if block_m // splits >= 8:
            able = slots >= min(steps, 2)
            assert (config_blocker(config, 49, block_n, K) is None) == able
            assert able or (block_m, block_n, block_k) == (128, 128, 256)


TILES_NEEDED = "tiles of 16, 32, 64 or 128 rows and 64 or 128 columns are needed"
STEPS_NEEDED = "1, 2, 4 or 8 splits and steps of 64, 128 or 256 channels are needed"
SHARE_NEEDED = "tiles of 1 row or more, and of a divisor of {} columns, share"
RING_NEEDED = "a ring for {} steps has two slots to as many, not {}"


@pytest.mark.parametrize(
    ("tiles", "shape", "reason"),
    [
        ((64, 64, 1, 4), (49, 64, 256), None),
        ((64, 64, 1, 1), (49, 64, 64), None),
        ((64, 64, 1, 1, 256), (49, 64, 256), None),
        ((16, 64, 2, 2, 128), (49, 64, 512), None),
        ((32, 128, 4, 2), (49, 128, 768), None),
        ((128, 128, 8, 2), (49, 128, 1024), None),
        ((8, 64, 1, 4), (49, 64, 256), TILES_NEEDED),
        ((48, 64, 1, 4), (49, 64, 256), TILES_NEEDED),
        ((256, 64, 1, 4), (49, 64, 256), TILES_NEEDED),
        ((64, 256, 1, 4), (49, 256, 256), TILES_NEEDED),
        ((32, 32, 1, 4), (49, 64, 256), TILES_NEEDED),
        ((64, 64, 3, 4), (49, 64, 768), STEPS_NEEDED),
        ((64, 64, 16, 4), (49, 64, 4096), STEPS_NEEDED),
        ((64, 64, 1, 4, 32), (49, 64, 256), STEPS_NEEDED),
        ((64, 64, 1, 4, 192), (49, 64, 768), STEPS_NEEDED),
        ((32, 64, 1, 4, 512), (49, 64, 2048), STEPS_NEEDED),
        ((16, 64, 4, 2), (49, 64, 512), "each of 4 programs adds 8 of 16 rows or more"),
        ((16, 128, 8, 2), (49, 128, 1024), "each of 8 programs adds 8 of 16 rows or more"),
        ((32, 64, 8, 2), (49, 64, 1024), "each of 8 programs adds 8 of 32 rows or more"),
        ((128, 128, 1, 8), (49, 128, 512), "takes 262400 of 232448 bytes"),
        ((128, 128, 2, 6), (49, 128, 768), "takes 262400 of 232448 bytes"),
        ((32, 128, 1, 3, 256), (49, 128, 768), "takes 246016 of 232448 bytes"),
        ((64, 64, 1, 4), (49, 96, 256), "96 columns are no multiple of block_n=64"),
        ((32, 64, 1, 4), (49, 96, 256), "96 columns are no multiple of block_n=64"),
        ((64, 128, 1, 4), (49, 192, 256), "192 columns are no multiple of block_n=128"),
        ((64, 64, 1, 4), (49, 0, 256), "0 columns are no multiple of block_n=64"),
        ((64, 64, 1, 4), (49, 64, 288), "288 input channels are no multiple of 1 times 64"),
        ((64, 64, 1, 0), (49, 64, 0), "0 input channels are no multiple of 1 times 64"),
        ((64, 64, 4, 2), (49, 64, 384), "384 input channels are no multiple of 4 times 64"),
        ((32, 64, 2, 2, 256), (49, 64, 768), "768 input channels are no multiple of 2 times 256"),
        ((64, 64, 1, 4), (49, 64, 192), RING_NEEDED.format(3, 4)),
        ((64, 64, 2, 4), (49, 64, 384), RING_NEEDED.format(3, 4)),
        ((64, 64, 1, 0), (49, 64, 256), RING_NEEDED.format(4, 0)),
        ((64, 64, 1, -1), (49, 64, 256), RING_NEEDED.format(4, -1)),
        # one slot is filled again behind the step that waits for it: it would hang
        ((64, 64, 1, 1), (49, 64, 256), RING_NEEDED.format(4, 1)),
        ((32, 64, 2, 1, 256), (49, 64, 1024), RING_NEEDED.format(2, 1)),
        ((64, 64, 1, 4), (2**23 - 63, 64, 256), "values are addressed in 32 bits"),
        ((64, 64, 1, 4), (2**23 - 64, 64, 256), None),
        ((32, 64, 1, 4), (2**23 - 32, 64, 256), None),
        ((32, 64, 1, 4), (2**23 - 31, 64, 256), "values are addressed in 32 bits"),
        ((64, 64, 1, 4), (2**17, 2**14, 256), "values are addressed in 32 bits"),
        ((64, 64, 1, 4, 64, 2, 3), (49, 192, 256), None),
        ((64, 64, 1, 4, 64, 16, 1), (49, 64, 256), None),
        ((64, 64, 2, 2, 64, 2, 4), (49, 256, 256), None),
        ((32, 128, 1, 4, 64, 3, 2), (49, 256, 256), None),
        ((64, 64, 1, 4, 64, 0, 1), (49, 64, 256), SHARE_NEEDED.format(1)),
        ((64, 64, 1, 4, 64, 1, 0), (49, 64, 256), SHARE_NEEDED.format(1)),
        ((64, 64, 1, 4, 64, 1, -1), (49, 64, 256), SHARE_NEEDED.format(1)),
        ((64, 64, 1, 4, 64, 1, 2), (49, 64, 256), SHARE_NEEDED.format(1)),
        ((64, 64, 1, 4, 64, 2, 4), (49, 384, 256), SHARE_NEEDED.format(6)),
        ((64, 64, 1, 4, 64, 17, 1), (49, 64, 256), "a cluster of 17 programs, of 16 at most"),
        ((64, 64, 2, 2, 64, 3, 3), (49, 192, 256), "a cluster of 18 programs, of 16 at most"),
        ((64, 64, 8, 2, 64, 2, 2), (49, 128, 1024), "a cluster of 32 programs, of 16 at most"),
    ],
    ids=str,
)
def test_what_a_product_needs(tiles, shape, reason):
    found = config_blocker(ClusterLinearConfig(*tiles), *shape)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("shares", "reason"),
    [((1, 1), None), ((1, 6), None), ((1, 2), "all 6 tiles of a row share x, or none"),
     ((1, 3), "all 6 tiles of a row share x, or none"),
     ((2, 1), "all 6 tiles of a row share x, or none"),
     ((2, 6), "all 6 tiles of a row share x, or none"),
     ((1, 12), "of a divisor of 6 columns, share")],
)  # fmt: skip
def test_what_a_post_norm_shares(shares, reason):
    config = ClusterLinearConfig(64, 64, 1, 4, 64, *shares)
    found = config_blocker(config, 49, 384, 256, post_norm=True)
    assert found is None if reason is None else reason in found


def test_where_it_does_not_run(monkeypatch):
    monkeypatch.setattr(module, "gluon_blocker", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    cpu, cuda, half = torch.device("cpu"), torch.device("cuda"), torch.float16
    assert why_no_cluster_linear(cpu, half) == "clusters of programs need a GPU"
    for dtype in (torch.float32, torch.float64):
        reason = f"products in clusters are half precision, not {dtype}"
        assert why_no_cluster_linear(cuda, dtype) == reason
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(module, "device_capability", lambda device, found=capability: found)
        reason = f"the kernel is written for compute capability 9.0, this is {capability}"
        assert why_no_cluster_linear(cuda, half) == reason
    monkeypatch.setattr(module, "device_capability", lambda device: (9, 0))
    assert why_no_cluster_linear(cuda, half) is None
    assert why_no_cluster_linear(cuda, torch.bfloat16) is None
    monkeypatch.setattr(module, "gluon_blocker", lambda: "this Triton lacks Gluon for Hopper: x")
    assert why_no_cluster_linear(cuda, half) == "this Triton lacks Gluon for Hopper: x"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_cluster_linear(cuda, half) == "clusters of programs need a GPU"
