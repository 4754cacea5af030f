"""The kernel's own source with narrow tiles and wide steps, a cluster's programs as threads.

Tiles of 16 or 32 rows multiply the other way round and exchange sums by narrow_exchange.py; steps
of 128 or 256 channels leave all else as it is. As test_cluster_linear_clusters.py.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from cluster_linear_cases import (
    FORMS,
    HALF,
    check,
    check_post_norm,
    check_stream,
    make_post_norm,
    make_product,
)
from cluster_linear_threads import config_of, send_narrow, until_the_first_has_ended
from gluon_clusters import expect_bytes, me, wait_bytes
from gluon_threads import _wait_products

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, ring_slots

torch.set_num_threads(1)

#: Every narrow tile and cut: 8 rows or more a program.
NARROW = [
    tile for tile in itertools.product((16, 32), (64, 128), (1, 2, 4)) if tile[0] // tile[2] >= 8
]

#: Steps wider than 64 channels, in both orders.
WIDE = [
    (16, 64, 1, 128), (16, 128, 2, 256), (32, 64, 1, 256), (32, 128, 4, 128), (64, 64, 1, 256),
    (64, 128, 2, 128), (128, 64, 4, 128), (64, 64, 8, 256),
]  # fmt: skip


@pytest.mark.parametrize("M", [49, 70])
@pytest.mark.parametrize("tile", NARROW, ids=str)
def test_product(tile, M, run):
    """Two steps a program, two columns of tiles, the last rows of no tile."""
    N, K = 2 * tile[1], 128 * tile[2]
    made = make_product(M, N, K, gelu=M == 49)
    check(run(made, config_of(*tile, K)), made)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("tile", [(16, 64, 1), (16, 64, 2), (32, 64, 2), (32, 64, 4)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_epilogue(form, tile, dtype, run):
    K = 128 * tile[2]
    made = make_product(70, 128, K, **FORMS[form], dtype=dtype)
    check(run(made, config_of(*tile, K)), made)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("form", ["norm behind, gelu", "residual"])
@pytest.mark.parametrize("tile", WIDE, ids=str)
def test_wide_steps(tile, form, dtype, run):
    """Two steps a program."""
    *tile, block_k = tile
    K = 2 * block_k * tile[2]
    made = make_product(70, 128, K, **FORMS[form], dtype=dtype)
    check(run(made, config_of(*tile, K, block_k=block_k)), made)


@pytest.mark.parametrize("tile", [*((*tile, 64) for tile in NARROW), *WIDE], ids=str)
def test_onto_the_residual_in_place_with_statistics(tile, run):
    *tile, block_k = tile
    K = 2 * block_k * tile[2]
    check_stream(run, 70, 2 * tile[1], K, config_of(*tile, K, block_k=block_k))


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize(
    "tile", [(16, 64, 1, 64), (32, 64, 2, 64), (32, 64, 1, 128), (64, 64, 2, 256)], ids=str
)
def test_a_ring_shorter_than_the_steps(tile, steps, run):
    """Each slot is filled several times, its barrier's phases change; of one step all is there."""
    *tile, block_k = tile
    K = block_k * steps * tile[2]
    made = make_product(49, 64, K, residual=True)
    check(run(made, config_of(*tile, K, min(steps, 2), block_k)), made)


@pytest.mark.parametrize("block_k", [128, 256])
@pytest.mark.parametrize("tile", [(64, 64, 1), (64, 64, 2), (64, 128, 2), (128, 64, 4)], ids=str)
@pytest.mark.parametrize("slots", [2, None])
def test_post_norm_with_wide_steps(tile, block_k, slots, run):
    """Two tiles a row, three steps; rings of all of them, or as many as fit, and of two."""
    N, K = 2 * tile[1], 3 * block_k * tile[2]
    if slots is None:
        slots = ring_slots(*tile, K, N, True, block_k)
    made = make_post_norm(49, N, K, dtype=torch.bfloat16 if slots == 2 else torch.float16)
    config = ClusterLinearConfig(*tile, slots, block_k)
    check_post_norm(run(made, config, in_place=slots == 2), made)


@pytest.mark.parametrize("tile", [(16, 64, 2), (32, 64, 4)], ids=str)
def test_the_order_in_which_stores_land_does_not_matter(tile, run):
    """The last program of a cluster sends late."""

    def send(*arguments):
        if me().rank == tile[2] - 1:
            time.sleep(0.01)
        send_narrow(*arguments)

    K = 128 * tile[2]
    made = make_product(49, 64, K)
    runs = [run(made, config_of(*tile, K), send_narrow=send) for _ in range(4)]
    check(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def rejected(made, config, run, **stand_ins):
    with pytest.raises(AssertionError) as found:
        check(run(made, config, **stand_ins), made)
    return str(found.value)


@pytest.mark.parametrize("tile", [(32, 64, 1, 64), (32, 64, 2, 128), (64, 64, 1, 256)], ids=str)
def test_a_slot_that_is_refilled_while_it_is_read_is_noticed(tile, run):
    """Without the wait for the product before, its operands are overwritten."""

    def wait(outstanding, deps):
        return deps[0] if outstanding else _wait_products(outstanding, deps)

    *tile, block_k = tile
    K = 4 * block_k * tile[2]
    found = rejected(
        make_product(49, 64, K), config_of(*tile, K, 2, block_k), run, warpgroup_mma_wait=wait
    )
    assert "error" in found


@pytest.mark.parametrize("mistake", ["rows", "features", "place"])
def test_sums_in_the_wrong_place_are_noticed(mistake, run):
    """One program's rows or features are others'; or its sums lie where another's should."""

    def send(sums, address, *arguments):
        if me().rank == 1 and mistake == "place":
            address = address - 16 * 64 * 4
        elif me().rank == 1:
            sums = torch.roll(sums, 8, 1 if mistake == "rows" else 0)
        send_narrow(sums, address, *arguments)

    found = rejected(make_product(32, 64, 256), config_of(32, 64, 2, 256), run, send_narrow=send)
    assert "error" in found or "NaN" in found


def test_sums_that_nobody_waits_for_are_noticed(run):
    """Program 0 has ended when the other sends its own."""

    def early(barrier):
        if me().rank != 0:
            wait_bytes(barrier)

    def send(*arguments):
        if me().rank != 0:
            until_the_first_has_ended()
        send_narrow(*arguments)

    made, config = make_product(49, 64, 256), config_of(32, 64, 2, 256)
    rejected(made, config, run, wait_bytes=early, send_narrow=send)


@pytest.mark.parametrize("wrong", [-16, 16])
def test_a_barrier_that_counts_wrongly_is_noticed(wrong, run, monkeypatch):
    monkeypatch.setattr("gluon_memory.PATIENCE", 1.0)

    def expect(barrier, size):
        expect_bytes(barrier, size + wrong)

    rejected(make_product(49, 64, 256), config_of(16, 64, 2, 256), run, expect_bytes=expect)
