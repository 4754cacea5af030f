"""The kernel's own source, a cluster's programs as threads: results, and that mistakes show."""

from __future__ import annotations

import time

import gluon_memory
import pytest
import ring_threads
import torch
from cluster_linear_cases import FORMS, check, check_stream, make_product
from cluster_linear_threads import config_of, send_rows, until_the_first_has_ended
from gluon_clusters import expect_bytes, expect_bytes_late, me, wait_bytes
from gluon_threads import _wait_products

torch.set_num_threads(1)

#: Seconds for which a program is slow.
HELD = 0.1

TILES = [(64, 64), (64, 128), (128, 64), (128, 128)]


@pytest.mark.parametrize("M", [49, 196])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product(tile, splits, M, run):
    """Two steps a program, two columns of tiles, the last rows of no tile."""
    N, K = 2 * tile[1], 128 * splits
    made = make_product(M, N, K, gelu=M == 49)
    check(run(made, config_of(*tile, splits, K)), made)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_epilogue(form, splits, dtype, run):
    K = 128 * splits
    made = make_product(70, 128, K, **FORMS[form], dtype=dtype)
    check(run(made, config_of(64, 64, splits, K)), made)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_onto_the_residual_in_place_with_statistics(tile, splits, run):
    K = 128 * splits
    check_stream(run, 140, 2 * tile[1], K, config_of(*tile, splits, K))


@pytest.mark.parametrize(
    ("writer", "reader"), [((64, 64, 2), (64, 128, 1)), ((32, 64, 2), (16, 128, 1))], ids=str
)
def test_statistics_of_one_product_stand_behind_the_next(writer, reader, run):
    """Rows far from zero, in parts of 64 columns; narrow tiles have less than all rows."""
    stream = make_product(49, 192, 256, residual=True, offset=50.0)
    stats = torch.full((2, 3, 49), float("nan"))
    x = run(stream, config_of(*writer, 256), in_place=True, stats_out=stats)
    made = make_product(49, 128, 192, parts=3, gelu=True, seed=1)
    made |= {"x": x, "norm_stats": stats}
    check(run(made, config_of(*reader, 192)), made)


@pytest.mark.parametrize("steps", [3, 5, 6])
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_ring_shorter_than_the_steps(splits, slots, steps, run):
    """Each slot is filled several times, its barrier's phases change."""
    K = 64 * steps * splits
    made = make_product(49, 64, K, residual=True)
    check(run(made, config_of(64, 64, splits, K, slots)), made)


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_the_order_in_which_stores_land_does_not_matter(splits, run):
    made = make_product(49, 64, 128 * splits)
    runs = [run(made, config_of(64, 64, splits, 128 * splits)) for _ in range(6)]
    check(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("splits", [2, 8])
def test_others_wait_for_a_slow_program(splits, run):
    """The last one of a cluster sends late."""

    def send(*arguments):
        if me().rank == splits - 1:
            time.sleep(HELD)
        send_rows(*arguments)

    made = make_product(49, 64, 128 * splits)
    check(run(made, config_of(64, 64, splits, 128 * splits), send_rows=send), made)


@pytest.mark.parametrize("parts", [1, 2, 6])
@pytest.mark.parametrize("tile", [(128, 64, 1), (128, 128, 1), (128, 64, 2), (64, 128, 1)], ids=str)
def test_more_rows_than_one_tile_have_their_own_statistics(tile, parts, run):
    """Joined beside the products where a thread has few rows' parts, behind them elsewhere."""
    made = make_product(300, tile[1], 384, parts=parts, offset=30.0)
    check(run(made, config_of(*tile, 384)), made)


def rejected(made, config, run, **stand_ins):
    with pytest.raises(AssertionError) as found:
        check(run(made, config, **stand_ins), made)
    return str(found.value)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_slot_that_is_refilled_while_it_is_read_is_noticed(splits, run):
    """Without the wait for the product before, its operands are overwritten."""

    def wait(outstanding, deps):
        return deps[0] if outstanding else _wait_products(outstanding, deps)

    K = 256 * splits
    made = make_product(49, 64, K)
    found = rejected(made, config_of(64, 64, splits, K, 2), run, warpgroup_mma_wait=wait)
    assert "error" in found


def test_a_slot_that_keeps_its_first_tile_is_noticed(run):
    """Its barrier says that the next one has come."""

    def ask(asked, desc, row, column, address, barriers, parameter, step, slot, *more):
        asked(desc, row, column, address, barriers, parameter, slot, slot, *more)

    made = make_product(49, 64, 256)
    assert "error" in rejected(made, config_of(64, 64, 1, 256, 2), run, ask_again=ask)


@pytest.mark.parametrize("shift", [1, 8])
def test_pieces_in_the_wrong_rows_are_noticed(shift, run):
    """One program's rows are taken up by the one whose rows are others."""

    def send(sums, *arguments):
        send_rows(torch.roll(sums, shift, 0) if me().rank == 1 else sums, *arguments)

    made = make_product(64, 64, 512)
    assert "error" in rejected(made, config_of(64, 64, 4, 512), run, send_rows=send)


def test_a_piece_in_the_place_of_another_is_noticed(run):
    """Two programs' sums in one place: those of one are lost, another place is never written."""

    def send(sums, address, *arguments):
        piece = 16 * 64 * 4
        send_rows(sums, address - piece if me().rank == 2 else address, *arguments)

    made = make_product(64, 64, 512)
    found = rejected(made, config_of(64, 64, 4, 512), run, send_rows=send)
    assert "error" in found or "NaN" in found


@pytest.mark.parametrize("splits", [2, 8])
def test_sums_that_nobody_waits_for_are_noticed(splits, run):
    """Program 0 has ended when the others send theirs."""

    def early(barrier):
        if me().rank != 0:
            wait_bytes(barrier)

    def send(*arguments):
        if me().rank != 0:
            until_the_first_has_ended()
        send_rows(*arguments)

    made = make_product(49, 64, 128 * splits)
    config = config_of(64, 64, splits, 128 * splits)
    rejected(made, config, run, wait_bytes=early, send_rows=send)


def test_own_sums_that_other_warps_do_not_see_yet_are_noticed(run, monkeypatch):
    """Without the meeting of a program's warps behind its stores to itself."""
    monkeypatch.setattr(ring_threads, "debug_barrier", lambda: setattr(me(), "apart", False))
    found = rejected(make_product(64, 64, 256), config_of(64, 64, 2, 256), run)
    assert "error" in found or "NaN" in found


@pytest.mark.parametrize("wrong", [-16, 16])
def test_a_barrier_that_counts_wrongly_is_noticed(wrong, run, monkeypatch):
    monkeypatch.setattr(gluon_memory, "PATIENCE", 1.0)

    def expect(barrier, size):
        expect_bytes(barrier, size + wrong)

    rejected(make_product(49, 64, 256), config_of(64, 64, 2, 256), run, expect_bytes=expect)


def test_stores_to_a_program_that_has_not_begun_are_noticed(run, monkeypatch):
    """Without the cluster's barrier a fast program sends to one that has made no barrier yet."""
    monkeypatch.setattr(gluon_memory, "PATIENCE", 1.0)

    found = rejected(
        make_product(49, 64, 256), config_of(64, 64, 2, 256), run, cluster_wait=lambda: None,
        expect_bytes=expect_bytes_late,
    )  # fmt: skip
    assert found == "a store before its barrier is made"
